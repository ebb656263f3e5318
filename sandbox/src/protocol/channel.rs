//! The SOCK_SEQPACKET pair between agentd and the launcher: one packet is one message with its descriptors.
//!
//! A packet is one byte that says where the body is, and the body:
//!
//! | first byte | rest | descriptors |
//! |---|---|---|
//! | `0` | the message's JSON | the message's |
//! | `1` | nothing | a sealed memfd that holds the JSON, then the message's |
//!
//! Bodies over [`INLINE_LIMIT`] go by memfd. Its seals are required, so what is read cannot change while it is read, and
//! a descriptor that is no memfd (which could block who reads it) is refused; the body is bounded by [`BODY_LIMIT`].
//!
//! [`QueuedChannel`] is for who must not wait, the launcher and agentd's tasks: it never blocks, and keeps what does not fit into
//! the socket in a queue. [`Channel`] is the blocking end, for who plays one of both in a test.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest body that travels inside the packet, in bytes.
pub const INLINE_LIMIT: usize = 32 * 1024;
/// The longest body at all, in bytes.
pub const BODY_LIMIT: usize = 16 * 1024 * 1024;
/// The most descriptors that one message may carry.
pub const DESCRIPTOR_LIMIT: usize = 96;
/// The most bytes that wait in a queue before the peer counts as stuck.
pub const QUEUE_LIMIT: usize = 64 * 1024 * 1024;

const INLINE: u8 = 0;
const IN_MEMFD: u8 = 1;
const BODY_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// A message could not be sent.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The other end is gone.
    #[error("the other end of the launcher's channel is closed")]
    Closed,
    /// The message has no JSON form.
    #[error("the message has no JSON form")]
    Encode(#[source] serde_json::Error),
    /// The message is larger than [`BODY_LIMIT`].
    #[error("a message of {0} bytes is over the channel's limit of {BODY_LIMIT}")]
    TooLarge(usize),
    /// More descriptors than [`DESCRIPTOR_LIMIT`].
    #[error("a message with {0} descriptors is over the channel's limit of {DESCRIPTOR_LIMIT}")]
    TooManyDescriptors(usize),
    /// The other end does not read.
    #[error("the other end of the launcher's channel has stopped reading")]
    Stuck,
    /// The kernel refused.
    #[error("failed to {call} for the launcher's channel")]
    Io {
        /// The system call.
        call: &'static str,
        /// Its error.
        #[source]
        source: Errno,
    },
}

/// A message could not be received.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    /// The packet was read and dropped: it is no message. The channel goes on.
    #[error("a packet on the launcher's channel is no message: {0}")]
    Malformed(String),
    /// The kernel refused.
    #[error("failed to read the launcher's channel")]
    Io(#[source] Errno),
}

/// What a read of the channel found.
#[derive(Debug)]
pub enum Received<M> {
    /// A message with its descriptors, which are all close-on-exec.
    Message(M, Vec<OwnedFd>),
    /// Nothing now (only from [`QueuedChannel`]).
    Nothing,
    /// The other end is gone.
    Closed,
}

/// A connected pair of descriptors, close-on-exec; one end each for the launcher and agentd.
///
/// # Errors
/// When the process has no descriptors left.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// The blocking end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// The channel over one end of a [`pair`].
    #[must_use]
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Sends one message; the descriptors are duplicated into the packet.
    ///
    /// # Errors
    /// When the other end is gone, the message is too large, or the kernel refuses.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> Result<(), SendError> {
        let packet = Packet::encode(message, descriptors.len())?;
        let descriptors: Vec<_> = packet.memfd.iter().map(AsFd::as_fd).chain(descriptors.iter().copied()).collect();
        packet.send(self.socket.as_fd(), &descriptors, SendFlags::empty())
    }

    /// Waits for one message.
    ///
    /// # Errors
    /// [`ReceiveError::Malformed`] for a packet that is no message; the channel can be read on after it.
    pub fn receive<M: DeserializeOwned>(&self) -> Result<Received<M>, ReceiveError> {
        receive(self.socket.as_fd(), RecvFlags::empty())
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The end that never blocks.
#[derive(Debug)]
pub struct QueuedChannel {
    socket: OwnedFd,
    queue: VecDeque<(Packet, Vec<OwnedFd>)>,
    queued_bytes: usize,
}

impl QueuedChannel {
    /// The channel over one end of a [`pair`].
    #[must_use]
    pub const fn new(socket: OwnedFd) -> Self {
        Self { socket, queue: VecDeque::new(), queued_bytes: 0 }
    }

    /// Sends one message, or queues it when the socket is full.
    ///
    /// # Errors
    /// [`SendError::Stuck`] when more than [`QUEUE_LIMIT`] bytes wait already, and what [`Channel::send`] says.
    pub fn send(&mut self, message: &impl Serialize, descriptors: Vec<OwnedFd>) -> Result<(), SendError> {
        let mut packet = Packet::encode(message, descriptors.len())?;
        let descriptors: Vec<_> = packet.memfd.take().into_iter().chain(descriptors).collect();
        self.queued_bytes += packet.size;
        self.queue.push_back((packet, descriptors));
        self.flush()?;
        if self.queued_bytes > QUEUE_LIMIT { Err(SendError::Stuck) } else { Ok(()) }
    }

    /// Sends what waits, as far as the socket takes it.
    ///
    /// # Errors
    /// When the other end is gone or the kernel refuses.
    pub fn flush(&mut self) -> Result<(), SendError> {
        while let Some((packet, descriptors)) = self.queue.front() {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            match packet.send(self.socket.as_fd(), &borrowed, SendFlags::DONTWAIT) {
                Ok(()) => {}
                Err(SendError::Io { source: Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM, .. }) => return Ok(()),
                Err(error) => return Err(error),
            }
            self.queued_bytes -= packet.size;
            self.queue.pop_front();
        }
        Ok(())
    }

    /// Whether the socket should be polled for writing.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Takes one message if there is one.
    ///
    /// # Errors
    /// As [`Channel::receive`].
    pub fn receive<M: DeserializeOwned>(&self) -> Result<Received<M>, ReceiveError> {
        receive(self.socket.as_fd(), RecvFlags::DONTWAIT)
    }
}

impl AsFd for QueuedChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[derive(Debug)]
struct Packet {
    bytes: Vec<u8>,
    memfd: Option<OwnedFd>,
    /// What it counts for in the queue, the memfd's content included.
    size: usize,
}

impl Packet {
    fn encode(message: &impl Serialize, descriptors: usize) -> Result<Self, SendError> {
        if descriptors > DESCRIPTOR_LIMIT {
            return Err(SendError::TooManyDescriptors(descriptors));
        }
        let mut bytes = vec![INLINE];
        serde_json::to_writer(&mut bytes, message).map_err(SendError::Encode)?;
        let body = bytes.len() - 1;
        if body > BODY_LIMIT {
            return Err(SendError::TooLarge(body));
        }
        if body <= INLINE_LIMIT {
            return Ok(Self { bytes, memfd: None, size: body });
        }
        let memfd = sealed_memfd(&bytes[1..])?;
        Ok(Self { bytes: vec![IN_MEMFD], memfd: Some(memfd), size: body })
    }

    fn send(&self, socket: BorrowedFd<'_>, descriptors: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), SendError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTOR_LIMIT + 1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(SendError::TooManyDescriptors(descriptors.len()));
        }
        loop {
            let parts = [IoSlice::new(&self.bytes)];
            match rustix::net::sendmsg(socket, &parts, &mut ancillary, flags | SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SendError::Closed),
                Err(source) => return Err(SendError::Io { call: "sendmsg", source }),
            }
        }
    }
}

fn sealed_memfd(body: &[u8]) -> Result<OwnedFd, SendError> {
    let failed = |call: &'static str| move |source| SendError::Io { call, source };
    let memfd = rustix::fs::memfd_create("agentd-message", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(failed("memfd_create"))?;
    let mut rest = body;
    while !rest.is_empty() {
        match rustix::io::write(&memfd, rest) {
            Ok(written) => rest = &rest[written..],
            Err(Errno::INTR) => {}
            Err(source) => return Err(SendError::Io { call: "write", source }),
        }
    }
    rustix::fs::fcntl_add_seals(&memfd, BODY_SEALS).map_err(failed("fcntl(F_ADD_SEALS)"))?;
    Ok(memfd)
}

fn receive<M: DeserializeOwned>(socket: BorrowedFd<'_>, flags: RecvFlags) -> Result<Received<M>, ReceiveError> {
    // Most are short: room for the longest would be most of the work.
    let length = loop {
        match rustix::net::recv(socket, &mut [0_u8; 0][..], flags | RecvFlags::PEEK | RecvFlags::TRUNC) {
            Ok((_, length)) => break length,
            Err(Errno::INTR) => {}
            Err(error) => return nothing_received(error),
        }
    };
    let mut bytes = vec![0; length.min(INLINE_LIMIT + 1)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTOR_LIMIT + 1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut parts, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            Err(error) => return nothing_received(error),
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    let malformed = |reason: &str| Err(ReceiveError::Malformed(reason.to_owned()));
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return malformed("it is larger than a packet may be, or carries too many descriptors");
    }
    match bytes.get(..message.bytes) {
        None | Some([]) => Ok(Received::Closed),
        Some([INLINE, body @ ..]) => parse(body).map(|message| Received::Message(message, descriptors)),
        Some([IN_MEMFD]) => {
            if descriptors.is_empty() {
                return malformed("it names a memfd and carries none");
            }
            let body = read_sealed(&descriptors.remove(0))?;
            parse(&body).map(|message| Received::Message(message, descriptors))
        }
        Some(_) => malformed("its first byte is unknown"),
    }
}

fn nothing_received<M>(error: Errno) -> Result<Received<M>, ReceiveError> {
    match error {
        Errno::AGAIN => Ok(Received::Nothing),
        Errno::CONNRESET => Ok(Received::Closed),
        error => Err(ReceiveError::Io(error)),
    }
}

fn parse<M: DeserializeOwned>(body: &[u8]) -> Result<M, ReceiveError> {
    serde_json::from_slice(body).map_err(|error| ReceiveError::Malformed(error.to_string()))
}

fn read_sealed(memfd: &OwnedFd) -> Result<Vec<u8>, ReceiveError> {
    let malformed = |reason: String| ReceiveError::Malformed(reason);
    let seals = rustix::fs::fcntl_get_seals(memfd)
        .map_err(|error| malformed(format!("its first descriptor is no memfd: {error}")))?;
    if !seals.contains(BODY_SEALS) {
        return Err(malformed("its memfd is not sealed".to_owned()));
    }
    let size = rustix::fs::fstat(memfd).map_err(ReceiveError::Io)?.st_size;
    let size = usize::try_from(size).ok().filter(|size| *size <= BODY_LIMIT);
    let size = size.ok_or_else(|| malformed(format!("its body is over {BODY_LIMIT} bytes")))?;
    let mut body = vec![0; size];
    let mut filled = 0;
    while filled < size {
        match rustix::io::pread(memfd, &mut body[filled..], filled as u64) {
            Ok(0) => return Err(malformed("its memfd ended early".to_owned())),
            Ok(read) => filled += read,
            Err(Errno::INTR) => {}
            Err(error) => return Err(ReceiveError::Io(error)),
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use proptest::prelude::*;
    use toolproto::ids::CallId;

    use super::*;
    use crate::protocol::{FromLauncher, ToLauncher};

    fn ends() -> (Channel, QueuedChannel) {
        let (agentd, launcher) = pair().unwrap();
        (Channel::new(agentd), QueuedChannel::new(launcher))
    }

    fn misuse(message: &str) -> FromLauncher {
        FromLauncher::Misuse { message: message.to_owned(), job: None, call: None }
    }

    #[test]
    fn bodies_of_every_size_round_trip_with_their_descriptors() {
        let (agentd, mut launcher) = ends();
        for size in [0, 1, INLINE_LIMIT - 100, INLINE_LIMIT, INLINE_LIMIT + 1, 3 << 20] {
            let (mut reader, mut writer) = std::io::pipe().unwrap();
            writer.write_all(b"through the descriptor").unwrap();
            drop(writer);
            let message = misuse(&"x".repeat(size));
            launcher.send(&message, vec![reader.try_clone().unwrap().into()]).unwrap();
            let Received::Message(received, mut descriptors) = agentd.receive::<FromLauncher>().unwrap() else {
                panic!("no message of {size}");
            };
            assert!(received == message, "{size}");
            assert_eq!(descriptors.len(), 1, "the memfd is not the message's");
            let flags = rustix::io::fcntl_getfd(&descriptors[0]).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
            let mut text = String::new();
            std::fs::File::from(descriptors.remove(0)).read_to_string(&mut text).unwrap();
            assert_eq!(text, "through the descriptor");
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn what_does_not_fit_waits_and_arrives_in_order() {
        let (agentd, mut launcher) = ends();
        let count = 2000;
        for number in 0..count {
            launcher.send(&misuse(&format!("{number} {}", "x".repeat(2000))), Vec::new()).unwrap();
        }
        assert!(launcher.has_queued(), "the socket took all of it; the test needs more");
        for number in 0..count {
            launcher.flush().unwrap();
            let Received::Message(FromLauncher::Misuse { message, .. }, _) = agentd.receive().unwrap() else {
                panic!()
            };
            assert!(message.starts_with(&format!("{number} ")));
        }
        assert!(!launcher.has_queued());
    }

    #[test]
    fn a_peer_that_never_reads_is_found() {
        let (_agentd, mut launcher) = ends();
        let message = misuse(&"x".repeat(INLINE_LIMIT - 100));
        let error = (0..=QUEUE_LIMIT / INLINE_LIMIT + 100).find_map(|_| launcher.send(&message, Vec::new()).err());
        assert!(matches!(error, Some(SendError::Stuck)), "{error:?}");
    }

    #[test]
    fn a_closed_peer_is_no_error_of_reading() {
        let (agentd, launcher) = ends();
        assert!(matches!(launcher.receive::<ToLauncher>(), Ok(Received::Nothing)));
        drop(agentd);
        assert!(matches!(launcher.receive::<ToLauncher>(), Ok(Received::Closed)));
        let (agentd, launcher) = ends();
        drop(launcher);
        let error = agentd.send(&ToLauncher::Stop { call: CallId::from_u128(1) }, &[]).unwrap_err();
        assert!(matches!(error, SendError::Closed), "{error:?}");
    }

    fn send_raw(socket: &Channel, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let packet = Packet { bytes: bytes.to_vec(), memfd: None, size: bytes.len() };
        packet.send(socket.as_fd(), descriptors, SendFlags::empty()).unwrap();
    }

    #[test]
    fn bodies_that_could_change_or_block_are_refused() {
        let (agentd, launcher) = ends();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let unsealed = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::io::write(&unsealed, b"{}").unwrap();
        let huge = rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&huge, 1 << 40).unwrap();
        rustix::fs::fcntl_add_seals(&huge, BODY_SEALS).unwrap();
        let cases: [(&[BorrowedFd<'_>], &str); 4] = [
            (&[], "carries none"),
            (&[pipe.as_fd()], "no memfd"),
            (&[unsealed.as_fd()], "not sealed"),
            (&[huge.as_fd()], "over"),
        ];
        for (descriptors, words) in cases {
            send_raw(&agentd, &[IN_MEMFD], descriptors);
            let error = launcher.receive::<ToLauncher>().unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
        }
        // The channel goes on after each of them.
        let stop = ToLauncher::Stop { call: CallId::from_u128(1) };
        agentd.send(&stop, &[]).unwrap();
        assert!(matches!(launcher.receive::<ToLauncher>(), Ok(Received::Message(message, _)) if message == stop));
    }

    proptest! {
        #[test]
        fn no_packet_stops_the_launcher(bytes in proptest::collection::vec(any::<u8>(), 1..200)) {
            let (agentd, launcher) = ends();
            send_raw(&agentd, &bytes, &[]);
            // Random bytes are no message; whatever they are, reading goes on.
            let _ = launcher.receive::<ToLauncher>();
            let stop = ToLauncher::Stop { call: CallId::from_u128(1) };
            agentd.send(&stop, &[]).unwrap();
            prop_assert!(matches!(launcher.receive::<ToLauncher>(), Ok(Received::Message(m, _)) if m == stop));
        }
    }
}
