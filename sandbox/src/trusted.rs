//! Files that only root can write: what the launcher believes, it reads through here.
//!
//! A path is walked by descriptor, one component after the other, and each directory on the way is checked on the very
//! descriptor that the next component is opened from: owned by root, and writable by nobody else. One that all can write
//! but that is sticky, such as `/tmp`, passes when the next component is root's, since others can neither remove nor
//! replace that. An ACL that lets others write shows in the group's permission bits, so it is seen too.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use toolproto::source::FileError;

/// The largest file that is read as configuration.
const MAX_FILE: u64 = 4 << 20;
const STICKY: u32 = 0o1000;
const OTHERS_WRITE: u32 = 0o022;
const OTHERS_ANYTHING: u32 = 0o077;

/// A path that is not trusted, or cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// The kernel refused.
    #[error("{} cannot be read: {source}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// It belongs to somebody else.
    #[error("{} belongs to uid {uid}; it must be root's (chown root), since whoever writes it decides what runs", path.display())]
    NotRoots {
        /// The path.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Others can write it.
    #[error("{} can be written by others (mode {mode:04o}); take that away (chmod go-w)", path.display())]
    Writable {
        /// The path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Others can read it.
    #[error("{} can be read by others (mode {mode:04o}); take that away (chmod go=)", path.display())]
    Readable {
        /// The path.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// It is of another kind.
    #[error("{} is no {expected}", path.display())]
    Kind {
        /// The path.
        path: PathBuf,
        /// What it should be.
        expected: &'static str,
    },
    /// It is too large.
    #[error("{} is over {MAX_FILE} bytes", path.display())]
    TooLarge {
        /// The path.
        path: PathBuf,
    },
    /// It is not text.
    #[error("{} is not UTF-8 text", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },
}

impl TrustError {
    /// Whether there is nothing at the path.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Read { source: Errno::NOENT | Errno::NOTDIR, .. })
    }

    /// The error about a file of the configuration.
    #[must_use]
    pub fn about(&self, file: &Path) -> FileError {
        FileError::whole(file, self.to_string())
    }
}

/// Whose files are believed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owners {
    /// Only what root alone can write: for everything that is going to run.
    RootOnly,
    /// Anybody's: for checking files that nothing will run from.
    Anybody,
}

/// A directory that is trusted, with the whole chain above it.
#[derive(Debug)]
pub struct TrustedDir {
    path: PathBuf,
    fd: OwnedFd,
    owners: Owners,
}

impl TrustedDir {
    /// Opens a directory. Symbolic links are resolved first; what they lead to is what is checked.
    ///
    /// # Errors
    /// When it or a directory above it can be written by others, or it cannot be opened.
    pub fn open(path: &Path, owners: Owners) -> Result<Self, TrustError> {
        let read = |path: &Path| {
            let path = path.to_owned();
            move |source| TrustError::Read { path, source }
        };
        let resolved = path.canonicalize().map_err(|error| TrustError::Read {
            path: path.to_owned(),
            source: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        })?;
        let mut at = PathBuf::from("/");
        let mut fd = rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(read(&at))?;
        for component in resolved.components() {
            let Component::Normal(name) = component else { continue };
            owners.check(&at, &stat(fd.as_fd(), &at)?, Place::OnTheWay)?;
            at.push(name);
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
            fd = rustix::fs::openat(&fd, name, flags, Mode::empty()).map_err(read(&at))?;
        }
        let found = stat(fd.as_fd(), &at)?;
        owners.check(&at, &found, Place::Final)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
            return Err(TrustError::Kind { path: at, expected: "directory" });
        }
        // From O_PATH to a descriptor that can be listed; the same inode, whatever the name says by now.
        let fd = rustix::fs::openat(&fd, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(read(&at))?;
        Ok(Self { path: at, fd, owners })
    }

    /// Its path, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names in it, sorted, without those that start with a dot.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn names(&self) -> Result<Vec<OsString>, TrustError> {
        let mut names = self.all_names()?;
        names.retain(|name| !name.as_encoded_bytes().starts_with(b"."));
        Ok(names)
    }

    /// All names in it, sorted.
    ///
    /// # Errors
    /// When it cannot be listed.
    pub fn all_names(&self) -> Result<Vec<OsString>, TrustError> {
        use std::os::unix::ffi::OsStringExt;
        let failed = |source| TrustError::Read { path: self.path.clone(), source };
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Reads a file in it that only root can write, as text.
    ///
    /// # Errors
    /// When it is not there, no regular file, others can write it, or it is no text.
    pub fn read(&self, name: &OsStr) -> Result<String, TrustError> {
        self.read_checked(name, |_, _| Ok(()))
    }

    /// Reads a file in it that only root can read and write, as text.
    ///
    /// # Errors
    /// As [`Self::read`], and when others can read it.
    pub fn read_private(&self, name: &OsStr) -> Result<String, TrustError> {
        self.read_checked(name, |path, found| match found.st_mode & OTHERS_ANYTHING {
            0 => Ok(()),
            _ => Err(TrustError::Readable { path: path.to_owned(), mode: found.st_mode & 0o7777 }),
        })
    }

    fn read_checked(
        &self,
        name: &OsStr,
        check: impl FnOnce(&Path, &Stat) -> Result<(), TrustError>,
    ) -> Result<String, TrustError> {
        let path = self.path.join(name);
        let failed = |source| TrustError::Read { path: path.clone(), source };
        // Non-blocking, so that a FIFO in the file's place holds nobody up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty()).map_err(failed)?;
        let found = stat(fd.as_fd(), &path)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(TrustError::Kind { path, expected: "regular file" });
        }
        self.owners.check(&path, &found, Place::Final)?;
        check(&path, &found)?;
        let mut bytes = Vec::new();
        std::fs::File::from(fd)
            .take(MAX_FILE + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(TrustError::TooLarge { path });
        }
        String::from_utf8(bytes).map_err(|_| TrustError::NotText { path })
    }
}

impl AsFd for TrustedDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Checks a file, such as a program, and the chain of directories above it. Returns its path without symbolic links.
///
/// # Errors
/// As [`TrustedDir::open`].
pub fn file(path: &Path, owners: Owners) -> Result<PathBuf, TrustError> {
    let failed = |source| TrustError::Read { path: path.to_owned(), source };
    let resolved = path.canonicalize().map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let (Some(folder), Some(name)) = (resolved.parent(), resolved.file_name()) else {
        return Err(TrustError::Kind { path: resolved, expected: "regular file" });
    };
    let folder = TrustedDir::open(folder, owners)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(&folder, name, flags, Mode::empty()).map_err(failed)?;
    let found = stat(fd.as_fd(), &resolved)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(TrustError::Kind { path: resolved, expected: "regular file" });
    }
    owners.check(&resolved, &found, Place::Final)?;
    Ok(resolved)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    OnTheWay,
    Final,
}

impl Owners {
    fn check(self, path: &Path, found: &Stat, place: Place) -> Result<(), TrustError> {
        if self == Self::Anybody {
            return Ok(());
        }
        if found.st_uid != 0 {
            return Err(TrustError::NotRoots { path: path.to_owned(), uid: found.st_uid });
        }
        let is_kept_by_sticky = place == Place::OnTheWay && found.st_mode & STICKY != 0;
        if found.st_mode & OTHERS_WRITE != 0 && !is_kept_by_sticky {
            return Err(TrustError::Writable { path: path.to_owned(), mode: found.st_mode & 0o7777 });
        }
        Ok(())
    }
}

fn stat(fd: BorrowedFd<'_>, path: &Path) -> Result<Stat, TrustError> {
    rustix::fs::fstat(fd).map_err(|source| TrustError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// `<tmp>/a/b` with a file in it, all root's; below the sticky /tmp.
    fn tree() -> (tempfile::TempDir, PathBuf) {
        let top = tempfile::tempdir().unwrap();
        let b = top.path().join("a/b");
        fs::create_dir_all(&b).unwrap();
        set_mode(&top.path().join("a"), 0o755);
        set_mode(&b, 0o755);
        fs::write(b.join("f"), "text").unwrap();
        (top, b)
    }

    #[test]
    fn roots_directory_below_a_sticky_one_is_roots() {
        let (_top, b) = tree();
        let dir = TrustedDir::open(&b, Owners::RootOnly).unwrap();
        assert_eq!(dir.read(OsStr::new("f")).unwrap(), "text");
        assert_eq!(dir.names().unwrap(), ["f"]);
        assert_eq!(file(&b.join("f"), Owners::RootOnly).unwrap(), b.canonicalize().unwrap().join("f"));
    }

    #[test]
    fn a_writable_link_in_the_chain_is_found_wherever_it_is() {
        type Spoil = fn(&Path);
        let spoils: [(&str, Spoil); 7] = [
            ("others write a", |top| set_mode(&top.join("a"), 0o777)),
            ("a group writes a", |top| set_mode(&top.join("a"), 0o775)),
            ("others write b", |top| set_mode(&top.join("a/b"), 0o757)),
            ("b is sticky but final", |top| set_mode(&top.join("a/b"), 0o1777)),
            ("a is another's", |top| chown(top.join("a"), Some(1), None).unwrap()),
            ("b is another's", |top| chown(top.join("a/b"), Some(1), None).unwrap()),
            ("a is sticky and b another's", |top| {
                set_mode(&top.join("a"), 0o1777);
                chown(top.join("a/b"), Some(1), None).unwrap();
            }),
        ];
        for (name, spoil) in spoils {
            let (top, b) = tree();
            assert!(TrustedDir::open(&b, Owners::RootOnly).is_ok());
            spoil(top.path());
            assert!(TrustedDir::open(&b, Owners::RootOnly).is_err(), "{name}");
            assert!(file(&b.join("f"), Owners::RootOnly).is_err(), "{name}");
            assert!(TrustedDir::open(&b, Owners::Anybody).is_ok(), "{name}");
        }
        let (top, b) = tree();
        set_mode(&top.path().join("a"), 0o1777);
        assert!(TrustedDir::open(&b, Owners::RootOnly).is_ok(), "a sticky directory on the way");
    }

    #[test]
    fn files_of_others_fifos_and_links_are_refused() {
        let (_top, b) = tree();
        let dir = TrustedDir::open(&b, Owners::RootOnly).unwrap();
        set_mode(&b.join("f"), 0o666);
        assert!(matches!(dir.read(OsStr::new("f")), Err(TrustError::Writable { .. })));
        set_mode(&b.join("f"), 0o644);
        chown(b.join("f"), Some(1), None).unwrap();
        assert!(matches!(dir.read(OsStr::new("f")), Err(TrustError::NotRoots { uid: 1, .. })));
        symlink("/etc/passwd", b.join("link")).unwrap();
        assert!(dir.read(OsStr::new("link")).is_err());
        rustix::fs::mknodat(&dir, "fifo", FileType::Fifo, Mode::from_raw_mode(0o644), 0).unwrap();
        assert!(matches!(dir.read(OsStr::new("fifo")), Err(TrustError::Kind { .. })), "and does not block");
        assert!(dir.read(OsStr::new("none")).unwrap_err().is_missing());
    }

    #[test]
    fn a_link_to_a_directory_of_others_is_refused_for_what_it_leads_to() {
        let (top, b) = tree();
        symlink(&b, top.path().join("link")).unwrap();
        assert!(TrustedDir::open(&top.path().join("link"), Owners::RootOnly).is_ok());
        set_mode(&b, 0o777);
        assert!(TrustedDir::open(&top.path().join("link"), Owners::RootOnly).is_err());
    }
}
