//! The framed protocol of `POST /v1/exec` after its upgrade.
//!
//! The client sends the request with `Connection: Upgrade` and `Upgrade: agentd-exec/1` and an
//! [`ExecRequest`](crate::api::ExecRequest) as its body. After `101 Switching Protocols` both sides send frames: one byte
//! kind, four bytes length (big-endian), the payload.
//!
//! | kind | from | payload |
//! |---|---|---|
//! | 0 stdin | client | bytes for the command's stdin; none at all mean end of file |
//! | 1 stdout | daemon | bytes that the command wrote |
//! | 2 stderr | daemon | bytes that the command wrote |
//! | 3 status | daemon | an [`ExecEnd`](crate::api::ExecEnd) as JSON; the last frame |
//! | 4 problem | daemon | a [`Problem`](crate::job::Problem) as JSON: refused, nothing ran; the last frame |
//! | 5 stop | client | empty: end the command (SIGTERM, the grace, then SIGKILL); the status still follows |
//! | 6 credit | daemon | four bytes, big-endian: so many bytes of stdin were taken |
//!
//! The client has at most [`WINDOW`] bytes of stdin on their way that no credit was given for, so that the daemon never
//! has to stop reading: stop and hang-up are seen also while the command does not read. A client that hangs up before
//! the last frame ends the command.

/// The protocol's name in the `Upgrade` header.
pub const EXEC_PROTOCOL: &str = "agentd-exec/1";
/// The largest payload: a receipt of a call that changed very many files must fit.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// How many bytes of stdin may be on their way without credit.
pub const WINDOW: usize = 256 << 10;
/// How many bytes of a stream one frame carries at most, so that one stream does not hold up another.
pub const CHUNK: usize = 32 << 10;

const HEADER: usize = 5;

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// Bytes for the command's stdin, or end of file.
    Stdin,
    /// Bytes of its stdout.
    Stdout,
    /// Bytes of its stderr.
    Stderr,
    /// How it ended.
    Status,
    /// Why it was refused.
    Problem,
    /// The client's wish to end it.
    Stop,
    /// How much of stdin the command took.
    Credit,
}

impl FrameKind {
    const ALL: [Self; 7] =
        [Self::Stdin, Self::Stdout, Self::Stderr, Self::Status, Self::Problem, Self::Stop, Self::Credit];

    const fn byte(self) -> u8 {
        match self {
            Self::Stdin => 0,
            Self::Stdout => 1,
            Self::Stderr => 2,
            Self::Status => 3,
            Self::Problem => 4,
            Self::Stop => 5,
            Self::Credit => 6,
        }
    }
}

/// One frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it carries.
    pub kind: FrameKind,
    /// The payload.
    pub payload: Vec<u8>,
}

/// The other side does not speak the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// An unknown kind.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// A payload over [`MAX_PAYLOAD`].
    #[error("frame of {0} bytes; at most {MAX_PAYLOAD} are allowed")]
    TooLarge(usize),
}

impl Frame {
    /// The frame's bytes.
    ///
    /// # Errors
    /// When the payload is over [`MAX_PAYLOAD`].
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let too_large = FrameError::TooLarge(self.payload.len());
        if self.payload.len() > MAX_PAYLOAD {
            return Err(too_large);
        }
        let length = u32::try_from(self.payload.len()).map_err(|_| too_large)?;
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        bytes.push(self.kind.byte());
        bytes.extend_from_slice(&length.to_be_bytes());
        bytes.extend_from_slice(&self.payload);
        Ok(bytes)
    }
}

/// Takes bytes as they arrive and gives frames as they become whole.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
}

impl FrameReader {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// When the bytes are no frames; the connection is of no use then.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((&[byte, a, b, c, d], rest)) = self.buffer.split_first_chunk::<HEADER>() else { return Ok(None) };
        let kind = FrameKind::ALL.into_iter().find(|kind| kind.byte() == byte).ok_or(FrameError::Kind(byte))?;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        if length > MAX_PAYLOAD {
            return Err(FrameError::TooLarge(length));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let payload = payload.to_vec();
        self.buffer.drain(..HEADER + length);
        Ok(Some(Frame { kind, payload }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nonsense_is_refused_before_it_is_buffered() {
        let mut reader = FrameReader::default();
        reader.push(&[9, 0, 0, 0, 0]);
        assert_eq!(reader.next_frame(), Err(FrameError::Kind(9)));
        let mut reader = FrameReader::default();
        reader.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(reader.next_frame(), Err(FrameError::TooLarge(u32::MAX as usize)));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in proptest::collection::vec((0_usize..7, proptest::collection::vec(any::<u8>(), 0..50)), 0..8),
            cut in 1_usize..20,
        ) {
            let frames: Vec<Frame> = payloads
                .into_iter()
                .map(|(kind, payload)| Frame { kind: FrameKind::ALL[kind], payload })
                .collect();
            let bytes: Vec<u8> = frames.iter().flat_map(|frame| frame.encode().unwrap()).collect();
            let mut reader = FrameReader::default();
            let mut read = Vec::new();
            for piece in bytes.chunks(cut) {
                reader.push(piece);
                while let Some(frame) = reader.next_frame().unwrap() {
                    read.push(frame);
                }
            }
            prop_assert_eq!(read, frames);
        }
    }
}
