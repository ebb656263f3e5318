//! Refused system calls, by name: the filter asks PID 1 of the sandbox instead of answering itself, PID 1 answers with the
//! errno that the filter would have given, and keeps a record. An allowed call never takes this way, so it costs nothing.
//!
//! ```text
//!   tool ── refused call ──► kernel ── notification ──► PID 1 ── errno ──► kernel ──► tool
//!                                                         └── record ──► memfd ── when all is over ──► launcher
//! ```
//!
//! The answer is an error. To let a call pass after looking at what its arguments point to would be no check at all, since the
//! tool can change that in between (seccomp_unotify(2)). socket(2) alone is let pass as the filter would have, by arguments
//! that are numbers: PID 1 keeps in mind that a socket was made which is more than local, so that a network in which none
//! was made is known to be as new (see [`netns::bare`](crate::netns::bare)).

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use toolproto::receipt::Denial;

use crate::descriptors;
use crate::seccomp::{self, Program, call_name};
use crate::sys::seccomp::{Notification, pass, receive, refuse};

/// The most different calls that are told apart; later ones are refused all the same.
const MOST: usize = 64;
/// A record in the memfd: number, count, six arguments, all 64 bits. Before the first is as much room for [`SOCKET_MADE`].
const RECORD: usize = 64;
/// Stands first in the memfd once a socket was made.
const SOCKET_MADE: u8 = 1;
/// How many arguments are shown: enough for every call that is allowed with some arguments only.
const SHOWN: usize = 3;

/// The ends of what tool, PID 1 and launcher share, before they part.
#[derive(Debug)]
pub(crate) struct Channel {
    /// The tool sends the filter's listener here, and closes it at exec.
    pub(crate) tool: OwnedFd,
    /// PID 1 receives it here.
    pub(crate) init: OwnedFd,
    /// Where PID 1 keeps its records.
    pub(crate) records: OwnedFd,
}

impl Channel {
    /// A new channel.
    pub(crate) fn new() -> io::Result<Self> {
        let (tool, init) = descriptors::pair()?;
        let records = memfd_create("agentd-denials", MemfdFlags::CLOEXEC)?;
        Ok(Self { tool, init, records })
    }
}

/// PID 1's side.
#[derive(Debug)]
pub(crate) struct Recorder<'a> {
    records: BorrowedFd<'a>,
    program: &'a Program,
    is_socket_made: bool,
    seen: Vec<Refused>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refused {
    call: i64,
    count: u64,
    arguments: [u64; 6],
}

impl<'a> Recorder<'a> {
    /// A recorder that writes there, for processes with this filter.
    pub(crate) const fn new(records: BorrowedFd<'a>, program: &'a Program) -> Self {
        Self { records, program, is_socket_made: false, seen: Vec::new() }
    }

    /// Answers one notification. The caller of the refused call may have been killed meanwhile.
    pub(crate) fn answer(&mut self, listener: BorrowedFd<'_>) -> io::Result<()> {
        let notification = match receive(listener) {
            Ok(notification) => notification,
            Err(error) if gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let answered = if self.program.lets_make_socket(notification.call, &notification.arguments) {
            self.note_socket()?;
            pass(listener, notification.id)
        } else {
            self.record(&notification)?;
            refuse(listener, notification.id, seccomp::errno_for(notification.call))
        };
        match answered {
            Err(error) if !gone(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Before the socket is there.
    fn note_socket(&mut self) -> io::Result<()> {
        if !self.is_socket_made {
            rustix::io::pwrite(self.records, &[SOCKET_MADE], 0)?;
            self.is_socket_made = true;
        }
        Ok(())
    }

    fn record(&mut self, notification: &Notification) -> io::Result<()> {
        let same = |seen: &Refused| {
            seen.call == notification.call && seen.arguments[..SHOWN] == notification.arguments[..SHOWN]
        };
        let index = match self.seen.iter().position(same) {
            Some(index) => index,
            None if self.seen.len() < MOST => {
                let arguments = notification.arguments;
                self.seen.push(Refused { call: notification.call, count: 0, arguments });
                self.seen.len() - 1
            }
            None => return Ok(()),
        };
        self.seen[index].count += 1;
        rustix::io::pwrite(self.records, &self.seen[index].encode(), place(index))?;
        Ok(())
    }
}

fn place(record: usize) -> u64 {
    ((record + 1) * RECORD) as u64
}

/// Whether a socket was made that is more than local. What cannot be read says nothing against it.
pub(crate) fn is_socket_made(records: BorrowedFd<'_>) -> bool {
    let mut made = [0];
    // Nothing is there when nothing was recorded, and a zero before the first record.
    !matches!(rustix::io::pread(records, &mut made, 0), Ok(0 | 1) if made[0] != SOCKET_MADE)
}

fn gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR | libc::EAGAIN))
}

impl Refused {
    fn encode(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        let fields = [self.call.cast_unsigned(), self.count].into_iter().chain(self.arguments);
        for (target, field) in record.as_chunks_mut::<8>().0.iter_mut().zip(fields) {
            *target = field.to_le_bytes();
        }
        record
    }

    fn decode(record: &[u8; RECORD]) -> Self {
        let mut fields = record.as_chunks::<8>().0.iter().map(|field| u64::from_le_bytes(*field));
        let mut next = || fields.next().unwrap_or_default();
        Self { call: next().cast_signed(), count: next(), arguments: [next(), next(), next(), next(), next(), next()] }
    }
}

/// Reads what PID 1 recorded, once it is gone: one entry per call, with the arguments where those decide.
pub(crate) fn read(records: BorrowedFd<'_>) -> Vec<Denial> {
    let mut refused = Vec::new();
    while refused.len() < MOST {
        let mut record = [0; RECORD];
        match rustix::io::pread(records, &mut record, place(refused.len())) {
            Ok(RECORD) => refused.push(Refused::decode(&record)),
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    let mut denials: Vec<Denial> = Vec::new();
    for one in refused {
        let denial = describe(&one);
        if !denials.contains(&denial) {
            denials.push(denial);
        }
    }
    denials
}

fn describe(refused: &Refused) -> Denial {
    let Some(name) = call_name(refused.call) else {
        let detail = format!("number {}", refused.call);
        return Denial::seen("syscall", detail, "none: agentd does not know this system call");
    };
    // Where some arguments are allowed by a shipped group, the refused ones are what matters.
    let detail = if seccomp::is_conditional(name) {
        let shown: Vec<_> = refused.arguments[..SHOWN].iter().map(|argument| format!("{argument:#x}")).collect();
        format!("{name}({})", shown.join(", "))
    } else {
        name.to_owned()
    };
    Denial::seen("syscall", detail, format!("[[syscall]] allow = [\"{name}\"]"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn records_are_read_as_they_were_written_and_counted_once() {
        let channel = Channel::new().unwrap();
        let program = Program::compile(&[]).unwrap();
        let mut recorder = Recorder::new(channel.records.as_fd(), &program);
        let refused = |call, argument| Notification { id: 0, call, arguments: [argument, 2, 3, 4, 5, 6] };
        for _ in 0..3 {
            recorder.record(&refused(libc::SYS_mount, 1)).unwrap();
        }
        recorder.record(&refused(libc::SYS_mount, 7)).unwrap();
        recorder.record(&refused(libc::SYS_socket, 38)).unwrap();
        recorder.record(&refused(9999, 0)).unwrap();
        assert_eq!(recorder.seen[0].count, 3);
        assert_eq!(Refused::decode(&recorder.seen[0].encode()), recorder.seen[0]);
        assert!(!is_socket_made(channel.records.as_fd()));
        recorder.note_socket().unwrap();
        assert!(is_socket_made(channel.records.as_fd()));
        let denials = read(channel.records.as_fd());
        let details: Vec<_> = denials.iter().map(|denial| denial.detail.as_str()).collect();
        assert_eq!(details, ["mount", "socket(0x26, 0x2, 0x3)", "number 9999"]);
        assert_eq!(denials[0].rule, "[[syscall]] allow = [\"mount\"]");
    }

    #[test]
    fn the_number_of_records_is_bounded() {
        let channel = Channel::new().unwrap();
        let program = Program::compile(&[]).unwrap();
        let mut recorder = Recorder::new(channel.records.as_fd(), &program);
        for argument in 0..1000 {
            recorder.record(&Notification { id: 0, call: libc::SYS_socket, arguments: [argument; 6] }).unwrap();
        }
        assert_eq!(read(channel.records.as_fd()).len(), MOST);
    }
}
