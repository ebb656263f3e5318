//! Which file it is, whatever its name.

use std::fs::Metadata;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;

use rustix::fs::Stat;
use rustix::io::Errno;

/// A file by what cannot be forged. The default is that of no file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileIdentity {
    /// The file system.
    pub device: u64,
    /// The inode.
    pub inode: u64,
}

impl FileIdentity {
    /// Of an open descriptor, without asking a slow file system's server.
    ///
    /// # Errors
    /// As fstat(2).
    pub fn of(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        Ok(Self::from(&rustix::fs::fstat(fd)?))
    }
}

impl From<&Stat> for FileIdentity {
    fn from(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

impl From<&Metadata> for FileIdentity {
    fn from(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}
