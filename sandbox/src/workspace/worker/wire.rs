//! The frames between the launcher and a worker: a length (4 bytes, little-endian) and JSON, over a stream socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::receipt::{Change, Denial};

use crate::policy::ProtectRule;
use crate::workspace::changes::Changes;

/// The largest frame that is sent or read. A change list of some 50,000 entries fits.
pub(super) const MAX_FRAME: usize = 16 << 20;
/// Most descriptors that wait to be taken by a message.
const MAX_DESCRIPTORS: usize = 1;
/// How much is read in one turn, so that a worker that sends without end cannot hold the launcher.
const MAX_READ: usize = 1 << 20;

/// What the launcher asks of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Read the tree as it is now, as far as it may have changed.
    Scan,
    /// Read all of it.
    ScanWhole,
    /// Take the workspace's lock, or change how it is held, without waiting.
    Lock(LockKind),
    /// Give the lock back.
    Unlock,
    /// Compare the last two trees that were read.
    Compare,
    /// Read what a call wrote above the tree that was read last, and prepare its commit.
    Prepare {
        /// The number of the call's layer.
        layer: u64,
        /// Names that the call may not have changed.
        protect: Vec<ProtectRule>,
    },
    /// Carry a prepared commit out.
    Apply {
        /// The number of the call's layer.
        layer: u64,
    },
    /// Take a commit back that is carried out, or was in part.
    TakeBack {
        /// The number of the call's layer.
        layer: u64,
    },
    /// Say what going to a layer, back or forth, would make of the workspace.
    Foresee {
        /// The last layer that is to be carried out; 0 is the state before all.
        to: u64,
    },
    /// Go there.
    Roll {
        /// The last layer that is carried out now.
        from: u64,
        /// The last layer that is to be carried out.
        to: u64,
    },
    /// Remove a layer, and what its commit could be taken back with.
    Remove {
        /// The number of the call's layer.
        layer: u64,
    },
}

/// How a workspace is held, across jobs and daemons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LockKind {
    /// By a job whose calls read it, beside others.
    Shared,
    /// By a job whose calls change it, alone.
    Exclusive,
}

/// The launcher's first word to a worker that has opened its workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Confine {
    /// To the workspace alone.
    Workspace,
    /// And to the staging directory that comes with it.
    WithStaging,
}

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Message {
    Opened,
    Refused { code: Code, message: String },
    Locked,
    Busy,
    Scanned { digest: Digest, entries: u64, unattributed: Vec<Change> },
    Compared { before: Digest, after: Digest, changes: Changes },
    Prepared { before: Digest, after: Digest, changes: Changes },
    Done,
    GivenUp { code: Code, message: String, denied: Vec<Denial> },
    Failed { code: Code, message: String, denied: Vec<Denial> },
}

/// What was read is not of the worker's protocol.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// A frame over the limit.
    #[error("a frame of {0} bytes is too large")]
    TooLarge(usize),
    /// The frame holds something else.
    #[error("a frame is no message")]
    Shape(#[source] serde_json::Error),
    /// A message that carries a descriptor came without.
    #[error("the message lacks its descriptor")]
    DescriptorMissing,
}

/// A frame around a message.
pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, WireError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message).map_err(WireError::Shape)?;
    let length = frame.len() - 4;
    match u32::try_from(length) {
        Ok(prefix) if length <= MAX_FRAME => frame[..4].copy_from_slice(&prefix.to_le_bytes()),
        _ => return Err(WireError::TooLarge(length)),
    }
    Ok(frame)
}

/// The message in a frame's body.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    serde_json::from_slice(body).map_err(WireError::Shape)
}

/// The length in a frame's first four bytes.
pub(super) fn body_length(prefix: [u8; 4]) -> Result<usize, WireError> {
    let length = u32::from_le_bytes(prefix) as usize;
    if length <= MAX_FRAME { Ok(length) } else { Err(WireError::TooLarge(length)) }
}

/// Sends a frame at once or not at all, with a descriptor.
pub(super) fn send_with(socket: BorrowedFd<'_>, frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = descriptor.into_iter().collect();
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::Error::other("no space for a descriptor"));
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == frame.len() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// Waits for a whole frame and a descriptor with it; none at the end of the stream.
pub(super) fn receive_with(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut frame = vec![0; 4];
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut frame)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
    )?;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut received) => received.next(),
        _ => None,
    });
    let Some(prefix) = frame.first_chunk::<4>().filter(|_| received.bytes == 4) else { return Ok(None) };
    let mut body = vec![0; body_length(*prefix).map_err(io::Error::other)?];
    let (read, _) = rustix::net::recv(socket, &mut body[..], RecvFlags::WAITALL)?;
    if read == body.len() { Ok(Some((body, descriptor))) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// Whether the other end may still send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Open,
    Ended,
}

impl Stream {
    pub(super) const fn is_end(self) -> bool {
        matches!(self, Self::Ended)
    }
}

/// What has come from a worker and is not yet a whole message.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Incoming {
    /// Takes what is there without waiting, up to a bound.
    pub(super) fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<Stream> {
        let mut chunk = [0; 64 << 10];
        let mut total = 0;
        while total < MAX_READ && self.bytes.len() < MAX_FRAME + 4 {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let read = match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut chunk)], &mut control, flags) {
                Ok(received) => received.bytes,
                Err(rustix::io::Errno::AGAIN) => return Ok(Stream::Open),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::CONNRESET) => return Ok(Stream::Ended),
                Err(errno) => return Err(errno.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    self.descriptors.extend(received);
                }
            }
            self.descriptors.truncate(MAX_DESCRIPTORS);
            if read == 0 {
                return Ok(Stream::Ended);
            }
            self.bytes.extend_from_slice(&chunk[..read]);
            total += read;
        }
        Ok(Stream::Open)
    }

    /// The first whole message, and a descriptor that came with it.
    pub(super) fn next_message(&mut self) -> Result<Option<(Message, Option<OwnedFd>)>, WireError> {
        let Some(prefix) = self.bytes.first_chunk::<4>() else { return Ok(None) };
        let end = 4 + body_length(*prefix)?;
        let Some(body) = self.bytes.get(4..end) else { return Ok(None) };
        let message = decode(body)?;
        self.bytes.drain(..end);
        Ok(Some((message, self.descriptors.pop_front())))
    }
}

/// Reads what a worker might have sent, as the launcher does, and says how many messages it was.
///
/// # Errors
/// At what is none.
#[cfg(fuzzing)]
pub fn read_frames(bytes: &[u8]) -> Result<usize, WireError> {
    let mut incoming = Incoming { bytes: bytes.to_vec(), descriptors: VecDeque::new() };
    let mut count = 0;
    while incoming.next_message()?.is_some() {
        count += 1;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(bytes: &[u8]) -> Incoming {
        Incoming { bytes: bytes.to_vec(), descriptors: VecDeque::new() }
    }

    #[test]
    fn a_message_comes_once_it_is_whole() {
        let message = Message::Done;
        let frame = encode(&message).unwrap();
        let mut partial = incoming(&frame[..frame.len() - 1]);
        assert!(partial.next_message().unwrap().is_none());
        partial.bytes.push(frame[frame.len() - 1]);
        assert_eq!(partial.next_message().unwrap().unwrap().0, message);
        assert!(partial.next_message().unwrap().is_none());
    }

    #[test]
    fn nonsense_and_too_large_frames_are_refused() {
        assert!(matches!(incoming(&u32::MAX.to_le_bytes()).next_message(), Err(WireError::TooLarge(_))));
        assert!(matches!(incoming(b"\x02\0\0\0{}").next_message(), Err(WireError::Shape(_))));
        let long = Message::Failed { code: Code::Cancelled, message: "x".repeat(MAX_FRAME), denied: Vec::new() };
        assert!(matches!(encode(&long), Err(WireError::TooLarge(_))));
    }
}
