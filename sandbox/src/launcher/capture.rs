//! What a tool writes to stdout and stderr.
//!
//! stdout goes to a file on a tmpfs of its own, whose size is the cap: a runtime that exits without flushing a slow pipe
//! loses nothing, writing never blocks, and what is over the cap fails with ENOSPC, which is seen afterwards by the file's
//! size. stderr is a log: a pipe that the launcher drains, of which the end is kept, so that a chatty tool is neither
//! killed nor held up. Nothing of either is parsed here.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen};
use rustix::pipe::{PipeFlags, pipe_with};

/// How much of stderr's end is kept.
const TAIL: usize = 64 * 1024;
/// The most that is read in one go from one call, so that no call starves the others.
const CHUNK: usize = 64 * 1024;
/// The most that is read at once: mostly nothing is there.
const BUFFER: usize = 4 * 1024;

/// A tool's stdout, from the launcher's side.
#[derive(Debug)]
pub struct Stdout {
    reader: OwnedFd,
    cap: u64,
}

impl Stdout {
    /// A file that holds at most `cap` bytes and a little more, so that more is seen. Yields the tool's end, too.
    ///
    /// # Errors
    /// When the kernel has no memory or descriptors left.
    pub fn with_cap(cap: u64) -> io::Result<(Self, OwnedFd)> {
        let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        // The kernel rounds up to whole pages.
        fsconfig_set_string(&tmpfs, "size", (cap.saturating_add(1)).to_string())?;
        fsconfig_set_string(&tmpfs, "mode", "0700")?;
        fsconfig_create(&tmpfs)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let mount = fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let create = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC;
        let writer = rustix::fs::openat(&mount, "stdout", create, Mode::RUSR | Mode::WUSR)?;
        let reader = rustix::fs::openat(&mount, "stdout", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // Without a name: nothing can be made beside it or in its place.
        rustix::fs::unlinkat(&mount, "stdout", rustix::fs::AtFlags::empty())?;
        Ok((Self { reader, cap }, writer))
    }

    /// Whether the tool wrote more than the cap. To be asked when its processes are gone.
    #[must_use]
    pub fn has_overflowed(&self) -> bool {
        // A size that cannot be read cannot be vouched for.
        rustix::fs::fstat(&self.reader)
            .map_or(true, |found| u64::try_from(found.st_size).unwrap_or(u64::MAX) > self.cap)
    }

    /// The file, for reading.
    #[must_use]
    pub fn into_reader(self) -> OwnedFd {
        self.reader
    }
}

/// A tool's stderr, from the launcher's side.
#[derive(Debug)]
pub struct Stderr {
    /// Absent after its end.
    reader: Option<OwnedFd>,
    tail: VecDeque<u8>,
}

impl Stderr {
    /// A pipe whose writing end belongs to the sandbox's uid. Yields that end, too.
    ///
    /// # Errors
    /// When no descriptors are left.
    pub fn for_sandbox(uid: u32) -> io::Result<(Self, OwnedFd)> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        // So that a program may open /dev/stderr.
        rustix::fs::fchown(&writer, Some(Uid::from_raw(uid)), None)?;
        Ok((Self { reader: Some(reader), tail: VecDeque::new() }, writer))
    }

    /// What to poll for reading; nothing after its end.
    #[must_use]
    pub fn reader(&self) -> Option<BorrowedFd<'_>> {
        self.reader.as_ref().map(AsFd::as_fd)
    }

    /// Reads what is there, at most a chunk.
    pub fn drain(&mut self) {
        for _ in 0..CHUNK / BUFFER {
            let Some(reader) = &self.reader else { return };
            let mut buffer = [0; BUFFER];
            match rustix::io::read(reader, &mut buffer) {
                Ok(0) => self.reader = None,
                Ok(length) => {
                    self.tail.extend(&buffer[..length]);
                    let excess = self.tail.len().saturating_sub(TAIL);
                    self.tail.drain(..excess);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    tracing::warn!(%error, "a tool's stderr cannot be read");
                    self.reader = None;
                }
            }
        }
    }

    /// The end of what was written, as a file for reading. To be asked when the tool's processes are gone.
    ///
    /// # Errors
    /// When the kernel has no memory or descriptors left.
    pub fn into_file(mut self) -> io::Result<OwnedFd> {
        // A pipe holds a few chunks at most, and nobody writes any more.
        for _ in 0..=(1 << 20) / CHUNK {
            self.drain();
        }
        let file = rustix::fs::memfd_create("agentd-stderr", MemfdFlags::CLOEXEC)?;
        let mut file = std::fs::File::from(file);
        let (first, second) = self.tail.as_slices();
        io::Write::write_all(&mut file, first)?;
        io::Write::write_all(&mut file, second)?;
        io::Seek::rewind(&mut file)?;
        Ok(file.into())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    fn read(fd: OwnedFd) -> Vec<u8> {
        let mut bytes = Vec::new();
        File::from(fd).read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn stdout_holds_the_cap_and_shows_what_is_over_it() {
        for (cap, written, overflows) in [(10, 10, false), (10, 11, true), (4096, 4096, false), (4095, 4096, true)] {
            let (stdout, writer) = Stdout::with_cap(cap).unwrap();
            File::from(writer).write_all(&vec![b'x'; written]).unwrap();
            assert_eq!(stdout.has_overflowed(), overflows, "{cap} {written}");
            assert_eq!(read(stdout.into_reader()).len(), written);
        }
    }

    #[test]
    fn stdout_neither_grows_for_ever_nor_blocks() {
        let (stdout, writer) = Stdout::with_cap(8192).unwrap();
        let error = File::from(writer).write_all(&vec![b'x'; 1 << 20]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
        assert!(stdout.has_overflowed());
        assert!(read(stdout.into_reader()).len() <= 3 * 4096);
    }

    #[test]
    fn the_readers_end_cannot_write() {
        let (stdout, _writer) = Stdout::with_cap(10).unwrap();
        assert!(File::from(stdout.into_reader()).write_all(b"x").is_err());
    }

    #[test]
    fn of_a_long_stderr_the_end_is_kept_and_the_writer_never_waits_for_long() {
        let (mut stderr, writer) = Stderr::for_sandbox(70_000).unwrap();
        let thread = std::thread::spawn(move || {
            let mut writer = File::from(writer);
            writer.write_all(&vec![b'x'; 3 << 20]).unwrap();
            writer.write_all(b"the last words").unwrap();
        });
        while stderr.reader().is_some() {
            stderr.drain();
        }
        thread.join().unwrap();
        let kept = read(stderr.into_file().unwrap());
        assert_eq!(kept.len(), TAIL);
        assert!(kept.ends_with(b"xxthe last words"));
    }

    #[test]
    fn what_lies_in_the_pipe_at_the_end_is_not_lost() {
        let (stderr, writer) = Stderr::for_sandbox(70_000).unwrap();
        File::from(writer.try_clone().unwrap()).write_all(b"all of it").unwrap();
        assert_eq!(read(stderr.into_file().unwrap()), b"all of it", "though a writer is left");
    }
}
