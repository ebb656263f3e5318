//! The worker's own side, from the fork to its end.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::Pid;
use toolproto::code::Code;
use toolproto::receipt::Denial;

use super::wire::{self, Confine, LockKind, Message, Request, WireError};
use super::{Credentials, confine};
use crate::policy::ProtectRule;
use crate::sys::worker_process::keep_only;
use crate::workspace::attention::{Attention, Care};
use crate::workspace::changes;
use crate::workspace::commit::{CallStaging, CommitError, Prepared};
use crate::workspace::rollback;
use crate::workspace::scan::TreeLimits;
use crate::workspace::tree::Tree;

/// The exit status of a worker that could not serve; the launcher sees only that it has gone.
const EXIT_FAILURE: i32 = 1;

/// Runs in the forked child, until the launcher closes its end. Returns the exit status.
pub(super) fn run(socket: OwnedFd, parent: Pid, credentials: &Credentials, path: &Path, limits: TreeLimits) -> i32 {
    let Ok(socket) = keep_only(socket) else { return EXIT_FAILURE };
    let mut socket = UnixStream::from(socket);
    match serve(&mut socket, parent, credentials, path, limits) {
        Ok(()) => 0,
        Err(ServeError::Refused { code, message }) => {
            // If the launcher has gone as well, nobody is left to be told.
            let _ = send(&mut socket, &Message::Refused { code, message });
            EXIT_FAILURE
        }
        Err(ServeError::Wire(_) | ServeError::Socket(_)) => EXIT_FAILURE,
    }
}

#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("{message}")]
    Refused { code: Code, message: String },
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

fn serve(
    socket: &mut UnixStream,
    parent: Pid,
    credentials: &Credentials,
    path: &Path,
    limits: TreeLimits,
) -> Result<(), ServeError> {
    confine::become_caller(credentials, parent)
        .map_err(|error| ServeError::Refused { code: Code::InternalLogicError, message: in_words(&error) })?;
    let dir = open_workspace(credentials, path)?;
    wire::send_with(socket.as_fd(), &wire::encode(&Message::Opened)?, Some(dir.as_fd()))?;
    let Some((body, staging)) = wire::receive_with(socket.as_fd())? else { return Ok(()) };
    match (wire::decode(&body)?, &staging) {
        (Confine::Workspace, None) | (Confine::WithStaging, Some(_)) => {}
        _ => return Err(WireError::DescriptorMissing.into()),
    }
    let attention = Attention::to(dir.as_fd());
    confine::restrict(dir.as_fd(), staging.as_ref().map(AsFd::as_fd))
        .map_err(|error| ServeError::Refused { code: Code::InternalLogicError, message: in_words(&error) })?;
    let mut session =
        Session { dir, lock: None, staging, limits, attention, earlier: None, latest: None, scans: 0, prepared: None };
    while let Some(request) = receive(socket)? {
        let message = session.answer(&request);
        match send(socket, &message) {
            Err(ServeError::Wire(WireError::TooLarge(bytes))) => {
                let message = format!("the list of changes takes {bytes} bytes, more than {}", wire::MAX_FRAME);
                send(socket, &Message::Failed { code: Code::WorkspaceTooLarge, message, denied: Vec::new() })?;
            }
            result => result?,
        }
    }
    Ok(())
}

/// Opens the workspace with the caller's rights, symlinks in the path followed with the caller's rights.
fn open_workspace(credentials: &Credentials, path: &Path) -> Result<OwnedFd, ServeError> {
    let unavailable = |reason: String| ServeError::Refused {
        code: Code::WorkspaceUnavailable,
        message: format!("the workspace {}: {reason}", path.display()),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|errno| unavailable(io::Error::from(errno).to_string()))?;
    let stat = rustix::fs::fstat(&dir).map_err(|errno| unavailable(io::Error::from(errno).to_string()))?;
    if stat.st_uid != credentials.uid {
        return Err(unavailable(format!("belongs to uid {}, not to the caller, uid {}", stat.st_uid, credentials.uid)));
    }
    Ok(dir)
}

struct Session {
    dir: OwnedFd,
    lock: Option<OwnedFd>,
    staging: Option<OwnedFd>,
    limits: TreeLimits,
    attention: Attention,
    earlier: Option<Tree>,
    latest: Option<Tree>,
    /// How often the workspace was read.
    scans: u64,
    prepared: Option<Outlook>,
}

/// The workspace as it will be once a layer is applied.
struct Outlook {
    layer: u64,
    tree: Tree,
    /// How often it had been read when this was prepared.
    scans: u64,
}

impl Session {
    fn answer(&mut self, request: &Request) -> Message {
        let answer = match request {
            Request::Lock(kind) => self.lock(*kind),
            Request::Unlock => {
                self.lock = None;
                Ok(Message::Done)
            }
            Request::Scan => self.scan(Care::Changes),
            Request::ScanWhole => self.scan(Care::Whole),
            Request::Compare => self.compare(),
            Request::Prepare { layer, protect } => self.prepare(*layer, protect),
            Request::Apply { layer } => self.apply(*layer),
            Request::TakeBack { layer } => self.take_back(*layer),
            Request::Foresee { to } => self.foresee(*to),
            Request::Roll { from, to } => self.roll(*from, *to),
            Request::Remove { layer } => self.remove(*layer),
        };
        answer.unwrap_or_else(|Failure { code, message, denied }| Message::Failed {
            code,
            message: format!("the workspace: {message}"),
            denied,
        })
    }

    fn scan(&mut self, care: Care) -> Answered {
        let tree = self
            .attention
            .examine(self.dir.as_fd(), &self.limits, self.latest.as_ref(), care)
            .map_err(|error| Failure::new(error.code(), in_words(&error)))?;
        let changed = self.latest.as_ref().map(|known| changes::compare(known, &tree)).unwrap_or_default();
        let unattributed = changed.created.into_iter().chain(changed.modified).chain(changed.deleted).collect();
        let message = Message::Scanned { digest: tree.digest(), entries: tree.len() as u64, unattributed };
        self.earlier = self.latest.replace(tree);
        self.scans += 1;
        Ok(message)
    }

    /// The lock is on the directory itself, so that daemons with other state directories see it and nothing need be made for
    /// it. Only flock(2) can be had on a directory; as an OFD lock it belongs to the open file, here one that nobody else has,
    /// and goes with the worker.
    fn lock(&mut self, kind: LockKind) -> Answered {
        let failed = |errno: rustix::io::Errno| {
            Failure::new(Code::WorkspaceUnavailable, format!("cannot be locked: {}", io::Error::from(errno)))
        };
        let own = match self.lock.take() {
            Some(own) => own,
            None => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::openat(&self.dir, ".", flags, Mode::empty()).map_err(failed)?
            }
        };
        let operation = match kind {
            LockKind::Shared => FlockOperation::NonBlockingLockShared,
            LockKind::Exclusive => FlockOperation::NonBlockingLockExclusive,
        };
        match rustix::fs::flock(&own, operation) {
            Ok(()) => {
                self.lock = Some(own);
                Ok(Message::Locked)
            }
            // What was held is given back: who waits for more must not keep others waiting.
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(Message::Busy),
            Err(errno) => Err(failed(errno)),
        }
    }

    fn compare(&self) -> Answered {
        let (Some(before), Some(after)) = (&self.earlier, &self.latest) else {
            return Err(Failure::new(Code::InternalLogicError, "fewer than two trees were read"));
        };
        let changes = changes::compare(before, after);
        Ok(Message::Compared { before: before.digest(), after: after.digest(), changes })
    }

    fn prepare(&mut self, layer: u64, protect: &[ProtectRule]) -> Answered {
        let base = self.latest.as_ref().ok_or_else(|| Failure::new(Code::InternalLogicError, "no tree was read"))?;
        let call = CallStaging::open(self.files()?, layer).map_err(refused)?;
        let Prepared { before, after, changes, tree } =
            call.prepare(self.dir.as_fd(), base, &self.limits, protect).map_err(refused)?;
        self.prepared = Some(Outlook { layer, tree, scans: self.scans });
        Ok(Message::Prepared { before, after, changes })
    }

    fn apply(&mut self, layer: u64) -> Answered {
        let call = CallStaging::open(self.files()?, layer).map_err(refused)?;
        if let Err(error) = call.apply(self.dir.as_fd(), |_| ()) {
            return given_up(error);
        }
        if let Some(Outlook { tree, scans, .. }) = self.prepared.take_if(|prepared| prepared.layer == layer) {
            self.earlier = self.latest.replace(tree);
            // What was read in between was looked at, and is not in this tree.
            if scans != self.scans {
                self.attention.doubt();
            }
        }
        Ok(Message::Done)
    }

    fn take_back(&self, layer: u64) -> Answered {
        let call = CallStaging::open(self.files()?, layer).map_err(refused)?;
        call.take_back(self.dir.as_fd(), |_| ()).map_err(refused)?;
        Ok(Message::Done)
    }

    fn foresee(&self, to: u64) -> Answered {
        let now = self.latest.as_ref().ok_or_else(|| Failure::new(Code::InternalLogicError, "no tree was read"))?;
        let Prepared { before, after, changes, .. } =
            rollback::foresee(self.files()?, self.dir.as_fd(), now, to).map_err(refused)?;
        Ok(Message::Prepared { before, after, changes })
    }

    fn roll(&mut self, from: u64, to: u64) -> Answered {
        let carried_out = rollback::carry_out(self.files()?, self.dir.as_fd(), from, to);
        // Read anew before the next call.
        self.latest = None;
        carried_out.map_or_else(given_up, |()| Ok(Message::Done))
    }

    fn remove(&mut self, layer: u64) -> Answered {
        self.prepared.take_if(|prepared| prepared.layer == layer);
        CallStaging::remove(self.files()?, layer).map_err(refused)?;
        Ok(Message::Done)
    }

    fn files(&self) -> Result<BorrowedFd<'_>, Failure> {
        self.staging
            .as_ref()
            .map(AsFd::as_fd)
            .ok_or_else(|| Failure::new(Code::InternalLogicError, "it has no staging directory"))
    }
}

/// Why a request could not be followed.
struct Failure {
    code: Code,
    message: String,
    denied: Vec<Denial>,
}

impl Failure {
    fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), denied: Vec::new() }
    }
}

type Answered = Result<Message, Failure>;

fn refused(error: CommitError) -> Failure {
    Failure { code: error.code(), message: in_words(&error), denied: error.denied() }
}

/// A commit that is not carried out: whether the workspace is as it was, the launcher must know.
fn given_up(error: CommitError) -> Answered {
    let is_taken_back = error.leaves_nothing();
    let Failure { code, message, denied } = refused(error);
    if is_taken_back {
        return Ok(Message::GivenUp { code, message: format!("the workspace: {message}"), denied });
    }
    Err(Failure { code, message, denied })
}

fn send(socket: &mut UnixStream, message: &Message) -> Result<(), ServeError> {
    let frame = wire::encode(message)?;
    socket.write_all(&frame)?;
    Ok(())
}

/// The next request, or none at the end of the stream.
fn receive(socket: &mut UnixStream) -> Result<Option<Request>, ServeError> {
    let mut prefix = [0; 4];
    match socket.read_exact(&mut prefix) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let mut body = vec![0; wire::body_length(prefix)?];
    socket.read_exact(&mut body)?;
    Ok(Some(wire::decode(&body)?))
}

/// An error with what caused it.
fn in_words(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words.push_str(": ");
        words.push_str(&error.to_string());
        cause = error.source();
    }
    words
}
