//! What a call is given to read, and what it has written.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::io::Errno;
use tokio::io::AsyncWriteExt;

use crate::launch::{LinkError, Recorded};

/// How much of a call's stdout is read at most; the launcher's own cap per tool is lower.
const STDOUT_LIMIT: u64 = 64 << 20;
/// How much of the end of a call's stderr is kept.
const STDERR_TAIL: u64 = 8 << 10;
/// How long output may be that is read without leaving the task for it.
const SHORT_OUTPUT: u64 = 64 << 10;

/// A pipe for what a call reads.
pub(super) fn pipe() -> Result<(OwnedFd, OwnedFd), LinkError> {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| LinkError::Exchange(format!("no pipe for the call: {error}")))
}

/// What a call's program waits for before it is executed.
pub(super) struct Gate(OwnedFd);

impl Gate {
    /// A closed one, whose other end goes to the launcher with these descriptors.
    pub(super) fn new(descriptors: &mut Vec<OwnedFd>) -> Result<Self, LinkError> {
        let (theirs, own) = pipe()?;
        descriptors.push(theirs);
        Ok(Self(own))
    }

    /// Lets the program be executed.
    pub(super) fn open(self) {
        // A call that has ended meanwhile needs no program.
        let _ = rustix::io::write(&self.0, &[1]);
    }
}

/// Writes the request, once it may be known, and closes the pipe. A tool that does not read it, or has ended, is no failure here.
pub(super) async fn feed_stdin(pipe: OwnedFd, bytes: Arc<[u8]>, recorded: Recorded) {
    let written = async {
        recorded.wait().await;
        // Most requests fit into the pipe as it is.
        rustix::io::ioctl_fionbio(&pipe, true)?;
        let written = match rustix::io::write(&pipe, &bytes) {
            Ok(written) if written == bytes.len() => return Ok(()),
            Ok(written) => written,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(io::Error::from(error)),
        };
        let mut pipe = tokio::net::unix::pipe::Sender::from_owned_fd(pipe)?;
        pipe.write_all(bytes.get(written..).unwrap_or_default()).await
    };
    if let Err(error) = written.await
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        tracing::warn!(%error, "a tool's stdin could not be written");
    }
}

/// Whether reading output takes less time than having another thread read it.
pub(super) fn is_short(files: &[File]) -> bool {
    files.iter().all(|file| file.metadata().is_ok_and(|metadata| metadata.len() <= SHORT_OUTPUT))
}

/// What a call wrote: all of stdout up to [`STDOUT_LIMIT`], the end of stderr. An `exec` has no captured output.
pub(super) fn captured(files: Vec<File>) -> io::Result<(Vec<u8>, String)> {
    let mut files = files.into_iter();
    let stdout = match files.next() {
        Some(file) => read_range(&file, 0, STDOUT_LIMIT)?,
        None => Vec::new(),
    };
    let stderr = match files.next() {
        Some(file) => {
            let length = file.metadata()?.len();
            read_range(&file, length.saturating_sub(STDERR_TAIL), STDERR_TAIL)?
        }
        None => Vec::new(),
    };
    Ok((stdout, String::from_utf8_lossy(&stderr).into_owned()))
}

/// Reads by offset: the descriptor shares its position with whoever wrote.
fn read_range(file: &File, from: u64, limit: u64) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len().saturating_sub(from).min(limit);
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}
