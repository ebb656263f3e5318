//! agentd's socket: bound by the launcher or by the service manager, served by agentd.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::file_identity::FileIdentity;
use crate::trusted::{Owners, TrustError, TrustedDir};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// The socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Others could replace it.
    #[error("the socket's directory is refused: {0}")]
    Trust(#[from] TrustError),
    /// Somebody serves it.
    #[error("{} is served by another process; stop it first, or name another socket with --socket", .0.display())]
    Live(PathBuf),
    /// Something else lies in its place.
    #[error("{} is in the way and is no socket", .0.display())]
    InTheWay(PathBuf),
    /// The path has no name, or is longer than a socket's may be.
    #[error("{} can be no socket's path: it must name a file and be under 108 bytes long", .0.display())]
    Path(PathBuf),
    /// The service manager listens elsewhere.
    #[error(
        "the socket that the service manager passed is not {}: ListenStream= in agentd.socket and --socket must name one path",
        .0.display()
    )]
    Elsewhere(PathBuf),
    /// The service manager passed something else.
    #[error("the service manager passed no listening stream socket: agentd.socket needs ListenStream= and Accept=no")]
    NotListening,
    /// Whoever likes can connect.
    #[error(
        "everybody may connect to {} (mode {mode:04o}): set SocketMode=0660 and SocketGroup= in agentd.socket",
        path.display()
    )]
    Open {
        /// The socket's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The kernel refused.
    #[error("failed to {action} {}", path.display())]
    Bind {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The bound and listening socket.
#[derive(Debug)]
pub struct ApiSocket {
    path: PathBuf,
    listener: OwnedFd,
    identity: FileIdentity,
    owner: Owner,
}

/// Who made the socket's file, and so removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Launcher,
    /// It listens on while agentd does not run.
    ServiceManager,
}

impl ApiSocket {
    /// Binds the socket for root and a group. A stale file of an earlier run is replaced, a live one refused.
    ///
    /// # Errors
    /// When its directory can be written by others, somebody serves it, or the kernel refuses.
    pub fn bind(path: &Path, group: u32) -> Result<Self, SocketError> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(SocketError::Path(path.to_owned()));
        };
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        make_folder(folder).map_err(|source| SocketError::Bind {
            action: "create",
            path: folder.to_owned(),
            source,
        })?;
        let directory = TrustedDir::open(folder, Owners::RootOnly)?;
        let path = directory.path().join(name);
        let failed = |action| {
            let path = path.clone();
            move |source: Errno| SocketError::Bind { action, path, source: source.into() }
        };
        let address = SocketAddrUnix::new(&path).map_err(|_| SocketError::Path(path.clone()))?;
        remove_stale(&path, &address)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(failed("make a socket for"))?;
        // Nobody can connect before it listens, and by then owner and mode are set.
        rustix::net::bind(&listener, &address).map_err(failed("bind"))?;
        let file = crate::sys::peer::bound_file(listener.as_fd()).map_err(|source| SocketError::Bind {
            action: "look at",
            path: path.clone(),
            source,
        })?;
        let identity = FileIdentity::of(file.as_fd()).map_err(failed("look at"))?;
        rustix::fs::chownat(&directory, name, Some(Uid::ROOT), Some(Gid::from_raw(group)), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed("give to its group"))?;
        rustix::fs::chmodat(&directory, name, Mode::from_raw_mode(0o660), AtFlags::empty())
            .map_err(failed("set the mode of"))?;
        rustix::net::listen(&listener, BACKLOG).map_err(failed("listen on"))?;
        Ok(Self { path, listener, identity, owner: Owner::Launcher })
    }

    /// Takes over a socket that the service manager bound to `path` and listens on.
    ///
    /// # Errors
    /// When it is another socket than that, or more people may connect than its owner and group.
    pub fn adopt(listener: OwnedFd, path: &Path) -> Result<Self, SocketError> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(SocketError::Path(path.to_owned()));
        };
        let is_stream = rustix::net::sockopt::socket_type(&listener) == Ok(SocketType::STREAM);
        if !is_stream || rustix::net::sockopt::socket_acceptconn(&listener) != Ok(true) {
            return Err(SocketError::NotListening);
        }
        let directory = TrustedDir::open(folder, Owners::RootOnly)?;
        let path = directory.path().join(name);
        let failed = |source: io::Error| SocketError::Bind { action: "look at", path: path.clone(), source };
        // The kernel's answer counts: the name that the socket was bound to may lead elsewhere by now.
        let file = crate::sys::peer::bound_file(listener.as_fd()).map_err(failed)?;
        let identity = FileIdentity::of(file.as_fd()).map_err(|error| failed(error.into()))?;
        let found = rustix::fs::lstat(&path).map_err(|error| failed(error.into()))?;
        if identity != (FileIdentity { device: found.st_dev, inode: found.st_ino }) {
            return Err(SocketError::Elsewhere(path));
        }
        let mode = found.st_mode & 0o7777;
        if found.st_uid != 0 || mode & 0o002 != 0 {
            return Err(SocketError::Open { path, mode });
        }
        Ok(Self { path, listener, identity, owner: Owner::ServiceManager })
    }

    /// Its path, without symbolic links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its file, which every accepted connection carries.
    #[must_use]
    pub const fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Removes the file, if it is still this socket's and the launcher made it.
    pub fn remove(&self) {
        if self.owner == Owner::ServiceManager {
            return;
        }
        let is_own = rustix::fs::lstat(&self.path)
            .is_ok_and(|found| self.identity == FileIdentity { device: found.st_dev, inode: found.st_ino });
        if is_own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket's file stays");
        }
    }
}

impl AsFd for ApiSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Makes a folder, and what is missing above it, for all to enter, whatever the umask: who may connect, the socket itself says.
fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
        Err(_) if folder.is_dir() => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_folder(folder.parent().ok_or(error)?)?;
            make_folder(folder)
        }
        Err(error) => Err(error),
    }
}

fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let failed = |action| {
        let path = path.to_owned();
        move |source: io::Error| SocketError::Bind { action, path, source }
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at")(error)),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::InTheWay(path.to_owned())),
        Ok(_) => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|error| failed("make a socket for")(error.into()))?;
    match rustix::net::connect(&probe, address) {
        // Only a socket that nobody listens on refuses; a full queue (EAGAIN) or another type is somebody's.
        Err(Errno::CONNREFUSED) => fs::remove_file(path).map_err(failed("remove the stale")),
        Err(Errno::NOENT) => Ok(()),
        _ => Err(SocketError::Live(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_stale_file_is_replaced_and_a_live_socket_or_another_file_is_not() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("run/agentd.sock");
        let socket = ApiSocket::bind(&path, 1234).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (0, 1234, 0o660));
        assert_eq!(socket.identity(), FileIdentity { device: found.dev(), inode: found.ino() });
        assert!(matches!(ApiSocket::bind(&path, 0), Err(SocketError::Live(_))));

        drop(socket);
        assert!(path.exists(), "as after a kill");
        let socket = ApiSocket::bind(&path, 0).unwrap();
        socket.remove();
        assert!(!path.exists());

        fs::write(&path, "precious").unwrap();
        assert!(matches!(ApiSocket::bind(&path, 0), Err(SocketError::InTheWay(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn anothers_socket_is_not_removed() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("agentd.sock");
        let socket = ApiSocket::bind(&path, 0).unwrap();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        socket.remove();
        assert!(path.exists());
    }

    #[test]
    fn a_passed_socket_is_taken_when_it_is_the_one_that_is_asked_for() {
        let top = tempfile::tempdir().unwrap();
        fs::set_permissions(top.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = top.path().join("agentd.sock");
        let listener = || {
            let _ = fs::remove_file(&path);
            UnixListener::bind(&path).unwrap()
        };
        let allow = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();

        let passed = listener();
        allow(0o660);
        let socket = ApiSocket::adopt(passed.into(), &path).unwrap();
        let found = fs::metadata(&path).unwrap();
        assert_eq!(socket.identity(), FileIdentity { device: found.dev(), inode: found.ino() });
        socket.remove();
        assert!(path.exists(), "the service manager listens on");

        let passed = listener();
        allow(0o666);
        assert!(matches!(ApiSocket::adopt(passed.into(), &path), Err(SocketError::Open { mode: 0o666, .. })));

        let passed = listener();
        allow(0o660);
        let other = top.path().join("other.sock");
        let _other = UnixListener::bind(&other).unwrap();
        assert!(matches!(ApiSocket::adopt(passed.into(), &other), Err(SocketError::Elsewhere(_))));

        let (end, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(matches!(ApiSocket::adopt(end.into(), &path), Err(SocketError::NotListening)));
        let file = fs::File::open("/dev/null").unwrap();
        assert!(matches!(ApiSocket::adopt(file.into(), &path), Err(SocketError::NotListening)));
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let top = tempfile::tempdir().unwrap();
        fs::set_permissions(top.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(ApiSocket::bind(&top.path().join("s"), 0), Err(SocketError::Trust(_))));
        assert!(matches!(
            ApiSocket::bind(&PathBuf::from("/tmp/").join("x".repeat(200)), 0),
            Err(SocketError::Trust(_))
        ));
    }

    #[test]
    fn a_path_that_is_too_long_is_named() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("x".repeat(120));
        assert!(matches!(ApiSocket::bind(&path, 0), Err(SocketError::Path(_))));
    }
}
