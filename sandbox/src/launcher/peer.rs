//! Who is behind a client's accepted socket: read from the kernel, never from a message.
//!
//! The launcher gets these sockets from agentd, which may be captured. So each must prove that it was accepted on the
//! socket that the launcher bound itself:
//!
//! - its file (SIOCUNIXFILE) is the one that the launcher bound; a client's end has none, a foreign listener another;
//! - it is connected and not listening: a listening socket reports the credentials of whoever called listen(2), which
//!   for the launcher's own listener is root.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::file_identity::FileIdentity;

/// Who asks.
#[derive(Debug)]
pub struct Peer {
    /// The uid at the time of connect(2).
    pub uid: u32,
    /// The gid.
    pub gid: u32,
    /// The supplementary groups.
    pub groups: Vec<u32>,
    /// The process; absent before kernel 6.5 and when it is gone already.
    pub pidfd: Option<OwnedFd>,
}

/// The socket proves nothing.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Not bound to any file, so it was not accepted on the launcher's socket.
    #[error("the descriptor is no socket that was accepted on agentd's socket")]
    NotAccepted(#[source] io::Error),
    /// Bound to another file.
    #[error("the socket was accepted on another listener than agentd's")]
    OtherListener,
    /// The listener itself.
    #[error("the socket is a listener, not a client's connection")]
    Listener,
    /// The kernel refused.
    #[error("failed to read who is behind the socket")]
    Read(#[source] io::Error),
}

impl Peer {
    /// Reads who is behind `socket`, which must have been accepted on the listener with that file.
    ///
    /// # Errors
    /// When it was not, or the kernel refuses.
    pub fn of(socket: BorrowedFd<'_>, listener: FileIdentity) -> Result<Self, PeerError> {
        let file = crate::sys::peer::bound_file(socket).map_err(PeerError::NotAccepted)?;
        let read = |error: Errno| PeerError::Read(error.into());
        if FileIdentity::of(file.as_fd()).map_err(read)? != listener {
            return Err(PeerError::OtherListener);
        }
        if rustix::net::sockopt::socket_acceptconn(socket).map_err(read)? {
            return Err(PeerError::Listener);
        }
        let credentials = rustix::net::sockopt::socket_peercred(socket).map_err(read)?;
        Ok(Self {
            uid: credentials.uid.as_raw(),
            gid: credentials.gid.as_raw(),
            groups: crate::sys::peer::groups(socket).map_err(PeerError::Read)?,
            pidfd: crate::sys::peer::pidfd(socket).map_err(PeerError::Read)?,
        })
    }

    /// Whether a gid is among the peer's groups.
    #[must_use]
    pub fn has_group(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn listener(dir: &tempfile::TempDir, name: &str) -> (UnixListener, FileIdentity) {
        let listener = UnixListener::bind(dir.path().join(name)).unwrap();
        let file = crate::sys::peer::bound_file(listener.as_fd()).unwrap();
        let identity = FileIdentity::of(file.as_fd()).unwrap();
        (listener, identity)
    }

    #[test]
    fn an_accepted_socket_names_its_client() {
        let dir = tempfile::tempdir().unwrap();
        let (listener, identity) = listener(&dir, "s");
        let _client = UnixStream::connect(dir.path().join("s")).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let peer = Peer::of(accepted.as_fd(), identity).unwrap();
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        let own: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        assert_eq!(peer.groups, own);
        assert!(peer.has_group(rustix::process::getgid().as_raw()));
        if let Some(pidfd) = &peer.pidfd {
            rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::CONT).unwrap();
        }
    }

    #[test]
    fn forged_sockets_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (genuine, identity) = listener(&dir, "s");
        let (other, _) = listener(&dir, "other");
        let client = UnixStream::connect(dir.path().join("s")).unwrap();
        let _accepted = genuine.accept().unwrap();
        assert!(matches!(Peer::of(client.as_fd(), identity), Err(PeerError::NotAccepted(_))), "the client's own end");

        let _client = UnixStream::connect(dir.path().join("other")).unwrap();
        let (accepted, _) = other.accept().unwrap();
        assert!(matches!(Peer::of(accepted.as_fd(), identity), Err(PeerError::OtherListener)));

        assert!(matches!(Peer::of(genuine.as_fd(), identity), Err(PeerError::Listener)), "reports root's credentials");

        let (a, _b) = UnixStream::pair().unwrap();
        assert!(matches!(Peer::of(a.as_fd(), identity), Err(PeerError::NotAccepted(_))));
        let file = std::fs::File::open(dir.path()).unwrap();
        assert!(matches!(Peer::of(file.as_fd(), identity), Err(PeerError::NotAccepted(_))));
    }
}
