//! Who is on the other end of a connection.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use toolproto::code::Code;

use super::problem::Refusal;
use crate::access::Gate;
use crate::caller::Caller;

/// An accepted connection: who made it, and the socket that proves it to the launcher.
#[derive(Clone, Debug)]
pub(super) struct Connection(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    caller: Caller,
    socket: OwnedFd,
}

impl Connection {
    /// Reads who made the connection (unix(7): SO_PEERCRED and SO_PEERGROUPS) and keeps a duplicate of its socket.
    pub(super) fn of(socket: BorrowedFd<'_>, gate: &Gate) -> io::Result<Self> {
        let credentials = rustix::net::sockopt::socket_peercred(socket)?;
        let mut groups = vec![credentials.gid.as_raw()];
        groups.extend(sandbox::sys::peer::groups(socket)?);
        let caller = gate.caller(credentials.uid.as_raw(), groups);
        Ok(Self(Arc::new(Inner { caller, socket: socket.try_clone_to_owned()? })))
    }

    /// Who made it.
    pub(super) fn caller(&self) -> &Caller {
        &self.0.caller
    }

    /// A duplicate of the accepted socket, for the launcher.
    pub(super) fn socket(&self) -> Result<OwnedFd, Refusal> {
        self.0.socket.as_fd().try_clone_to_owned().map_err(|error| {
            Refusal::new(Code::Overloaded, format!("the connection's socket could not be duplicated: {error}"))
        })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Connection {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Refusal> {
        // The server puts it there; without it nobody would know who asks.
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or_else(|| Refusal::new(Code::InternalLogicError, "the connection is unknown"))
    }
}
