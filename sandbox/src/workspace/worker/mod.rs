//! The workspace worker: one process per job that touches the workspace's files, as the caller and never as root.
//!
//! ```text
//! launcher                      worker (fork, no exec)
//!   start ───────────────────▶  closes what it inherited, becomes the caller, gives up every capability
//!          ◀─ Opened + dir ───  opens the workspace by its path, with the caller's rights
//!          ◀─ Refused ────────  …or says why not, and ends
//!   Confine (+ staging) ──────▶  Landlock: only beneath these two; seccomp: only what reading and renaming takes
//!   Lock   ───────────────────▶
//!          ◀─ Locked, Busy ───  whether the workspace is this job's
//!   Scan, ScanWhole ──────────▶
//!          ◀─ Scanned ────────  digest of the tree as it is now; the last two trees are kept
//!   Compare ──────────────────▶
//!          ◀─ Compared ───────  what differs between them
//!   Prepare ──────────────────▶  what the call wrote above the last tree, and a durable journal
//!          ◀─ Prepared ───────
//!   Apply, TakeBack, Remove ──▶  the commit is carried out, taken back, forgotten
//!          ◀─ Done, GivenUp ──
//!   (end of file) ────────────▶ ends
//! ```
//!
//! Requests are answered in order, one answer each. The worker's user can stop or kill it, and it reads files that a hostile tool
//! wrote: the launcher never waits for it, puts a deadline on every request, and takes its answers as input of the
//! caller's. What it says about the caller's files, the caller could have brought about anyway.

mod confine;
mod process;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Signal, WaitId, WaitIdOptions};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::receipt::{Change, Denial};

use super::changes::Changes;
use super::scan::TreeLimits;
use crate::sys::worker_process::fork_running;
#[cfg(fuzzing)]
pub use wire::read_frames;
use wire::{Confine, Incoming, Message};
pub use wire::{LockKind, Request, WireError};

/// Who a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The caller's uid.
    pub uid: u32,
    /// The caller's gid.
    pub gid: u32,
    /// The caller's supplementary groups.
    pub groups: Vec<u32>,
}

/// What a worker answers.
#[derive(Debug)]
pub enum Answer {
    /// The first answer: the workspace, opened as the caller, who owns it. The launcher still checks that it lies
    /// below an allowed root, and its owner.
    Opened {
        /// The directory.
        dir: OwnedFd,
    },
    /// The first answer: the workspace could not be opened. The worker has ended.
    Refused {
        /// WORKSPACE_UNAVAILABLE or INTERNAL_LOGIC_ERROR.
        code: Code,
        /// In words.
        message: String,
    },
    /// The workspace is held.
    Locked,
    /// Another job holds it.
    Busy,
    /// The tree was read.
    Scanned {
        /// Its digest.
        digest: Digest,
        /// How many entries it has.
        entries: u64,
        /// What differs from the tree as this worker knew it last: changed by nobody that it knows.
        unattributed: Vec<Change>,
    },
    /// The last two trees were compared.
    Compared {
        /// The earlier one's digest.
        before: Digest,
        /// The later one's digest.
        after: Digest,
        /// What differs.
        changes: Changes,
    },
    /// A commit is prepared.
    Prepared {
        /// The workspace's digest before.
        before: Digest,
        /// The workspace's digest once it is applied.
        after: Digest,
        /// What differs.
        changes: Changes,
    },
    /// Apply, TakeBack or Remove is done.
    Done,
    /// Apply or Roll could not be done, and what was done of it is taken back: the workspace is as it was.
    GivenUp {
        /// WORKSPACE_CONFLICT, DISK_FULL, WORKSPACE_UNAVAILABLE.
        code: Code,
        /// In words.
        message: String,
        /// Which entries are in the way.
        denied: Vec<Denial>,
    },
    /// The request could not be done.
    Failed {
        /// WORKSPACE_TOO_LARGE, WORKSPACE_UNAVAILABLE and the like.
        code: Code,
        /// In words.
        message: String,
        /// Which entries are in the way of a commit, and by which rule.
        denied: Vec<Denial>,
    },
}

/// Talking to a worker failed. It must be killed.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// It could not be started.
    #[error("failed to start a workspace worker")]
    Start(#[source] io::Error),
    /// It has ended, or was killed.
    #[error("the workspace worker has ended")]
    Gone,
    /// It does not take requests: stopped by its user, or busy with too many.
    #[error("the workspace worker does not read its requests")]
    Stuck,
    /// The socket failed.
    #[error("failed to talk to the workspace worker")]
    Socket(#[source] io::Error),
    /// It broke the protocol.
    #[error("the workspace worker sent what is no answer")]
    Malformed(#[from] WireError),
}

/// A worker, from the launcher's side. Killed when dropped.
#[derive(Debug)]
pub struct Worker {
    socket: OwnedFd,
    pidfd: OwnedFd,
    incoming: Incoming,
    ready: VecDeque<Answer>,
    is_reaped: bool,
}

/// How long a killed worker is waited for before it is left to be reaped later.
const REAP_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

impl Worker {
    /// Starts a worker that opens `path` as the caller. Its first answer is [`Answer::Opened`] or [`Answer::Refused`]. Does
    /// not wait for it.
    ///
    /// # Errors
    /// When no process or socket can be made.
    pub fn start(credentials: &Credentials, path: &Path, limits: TreeLimits) -> Result<Self, WorkerError> {
        let start = |errno: rustix::io::Errno| WorkerError::Start(errno.into());
        let (socket, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .map_err(start)?;
        let parent = rustix::process::getpid();
        let pidfd =
            fork_running(|| process::run(theirs, parent, credentials, path, limits)).map_err(WorkerError::Start)?;
        rustix::io::ioctl_fionbio(&socket, true).map_err(start)?;
        Ok(Self { socket, pidfd, incoming: Incoming::default(), ready: VecDeque::new(), is_reaped: false })
    }

    /// Readable when an answer, or a part of one, has come.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Readable when the worker has ended.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Confines a worker that has opened its workspace to that, and to the job's staging directory if there is one. It
    /// serves no request before. A worker that cannot be confined ends.
    ///
    /// # Errors
    /// When the worker has ended, or does not read.
    pub fn confine(&mut self, staging: Option<BorrowedFd<'_>>) -> Result<(), WorkerError> {
        let frame = wire::encode(&if staging.is_some() { Confine::WithStaging } else { Confine::Workspace })?;
        match wire::send_with(self.socket.as_fd(), &frame, staging) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(WorkerError::Stuck),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(WorkerError::Gone),
            Err(error) => Err(WorkerError::Socket(error)),
        }
    }

    /// Asks for something, without waiting.
    ///
    /// # Errors
    /// When the worker has ended, or does not read.
    pub fn send(&mut self, request: &Request) -> Result<(), WorkerError> {
        let frame = wire::encode(request)?;
        // A request is far smaller than the socket's buffer, so it is taken whole or not at all unless many lie there.
        match rustix::net::send(&self.socket, &frame, rustix::net::SendFlags::NOSIGNAL) {
            Ok(sent) if sent == frame.len() => Ok(()),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Err(WorkerError::Stuck),
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => Err(WorkerError::Gone),
            Err(errno) => Err(WorkerError::Socket(errno.into())),
        }
    }

    /// The next answer, if it is there; never waits.
    ///
    /// # Errors
    /// [`WorkerError::Gone`] once the worker has ended and every answer was taken; otherwise when the socket fails or the answer is none.
    pub fn receive(&mut self) -> Result<Option<Answer>, WorkerError> {
        if let Some(answer) = self.ready.pop_front() {
            return Ok(Some(answer));
        }
        let more = self.incoming.fill(self.socket.as_fd()).map_err(WorkerError::Socket)?;
        while let Some((message, dir)) = self.incoming.next_message()? {
            self.ready.push_back(answer(message, dir)?);
        }
        match self.ready.pop_front() {
            Some(answer) => Ok(Some(answer)),
            None if more.is_end() => Err(WorkerError::Gone),
            None => Ok(None),
        }
    }

    /// Kills the worker and reaps it, if it ends within a moment.
    pub fn kill(mut self) {
        self.end();
    }

    /// Reaps the worker if it has ended; never waits. To be asked when [`Worker::pidfd`] is readable.
    pub fn is_gone(&mut self) -> bool {
        if !self.is_reaped {
            let id = WaitId::PidFd(self.pidfd.as_fd());
            self.is_reaped = matches!(
                rustix::process::waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOHANG),
                Ok(Some(_)) | Err(rustix::io::Errno::CHILD)
            );
        }
        self.is_reaped
    }

    fn end(&mut self) {
        if self.is_gone() {
            return;
        }
        // Fails only when the process has ended meanwhile, which is what is wanted.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
        // One that the kernel holds (a dead network file system) must not hold the launcher as well.
        let waited = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&REAP_TIMEOUT));
        if waited.is_err() || !self.is_gone() {
            tracing::warn!("a killed workspace worker has not ended yet");
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

fn answer(message: Message, dir: Option<OwnedFd>) -> Result<Answer, WireError> {
    Ok(match message {
        Message::Opened => Answer::Opened { dir: dir.ok_or(WireError::DescriptorMissing)? },
        Message::Prepared { before, after, changes } => Answer::Prepared { before, after, changes },
        Message::Done => Answer::Done,
        Message::Refused { code, message } => Answer::Refused { code, message },
        Message::Locked => Answer::Locked,
        Message::Busy => Answer::Busy,
        Message::Scanned { digest, entries, unattributed } => Answer::Scanned { digest, entries, unattributed },
        Message::Compared { before, after, changes } => Answer::Compared { before, after, changes },
        Message::GivenUp { code, message, denied } => Answer::GivenUp { code, message, denied },
        Message::Failed { code, message, denied } => Answer::Failed { code, message, denied },
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::path::PathBuf;
    use std::time::{Duration, Instant};

    use tempfile::TempDir;

    use super::*;
    use crate::workspace::scan::Unreadable;
    use crate::workspace::staging;

    const UID: u32 = 61_240;
    const LIMITS: TreeLimits =
        TreeLimits { entries: 100_000, bytes: 1 << 30, depth: 100, unreadable: Unreadable::Lift };

    fn caller(uid: u32) -> Credentials {
        Credentials { uid, gid: uid, groups: vec![uid, 61_299] }
    }

    fn workspace_of(uid: u32) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        own(dir.path(), uid);
        dir
    }

    fn own(path: &Path, uid: u32) {
        std::os::unix::fs::lchown(path, Some(uid), Some(uid)).unwrap();
    }

    fn write(path: &Path, content: &str, uid: u32) {
        fs::write(path, content).unwrap();
        own(path, uid);
    }

    fn start(uid: u32, path: &Path) -> Worker {
        Worker::start(&caller(uid), path, LIMITS).unwrap()
    }

    fn next(worker: &mut Worker) -> Answer {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(answer) = worker.receive().unwrap() {
                return answer;
            }
            assert!(Instant::now() < deadline, "no answer");
            poll(&mut [PollFd::new(&worker.fd(), PollFlags::IN)], Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
        }
    }

    fn ask(worker: &mut Worker, request: &Request) -> Answer {
        worker.send(request).unwrap();
        next(worker)
    }

    fn opened(uid: u32, path: &Path) -> (Worker, OwnedFd) {
        let mut worker = start(uid, path);
        match next(&mut worker) {
            Answer::Opened { dir } => {
                worker.confine(None).unwrap();
                (worker, dir)
            }
            other => panic!("{other:?}"),
        }
    }

    fn refusal(uid: u32, path: &Path) -> (Code, String) {
        let mut worker = start(uid, path);
        match next(&mut worker) {
            Answer::Refused { code, message } => (code, message),
            other => panic!("{other:?}"),
        }
    }

    fn scanned(worker: &mut Worker) -> Digest {
        match ask(worker, &Request::Scan) {
            Answer::Scanned { digest, .. } => digest,
            other => panic!("{other:?}"),
        }
    }

    fn process_of(worker: &Worker) -> PathBuf {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", worker.pidfd().as_raw_fd())).unwrap();
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")).unwrap().trim().to_owned();
        PathBuf::from("/proc").join(pid)
    }

    #[test]
    fn it_is_the_caller_and_nothing_more() {
        for uid in [UID, 0] {
            let dir = workspace_of(uid);
            let (mut worker, handed_up) = opened(uid, dir.path());
            // Once it answers, it is confined.
            scanned(&mut worker);
            let status = fs::read_to_string(process_of(&worker).join("status")).unwrap();
            let field = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
                line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
            };
            for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                assert_eq!(field(set), ["0000000000000000"], "{set}");
            }
            assert_eq!(field("Uid"), vec![uid.to_string(); 4]);
            assert_eq!(field("Gid"), vec![uid.to_string(); 4]);
            let mut groups = field("Groups");
            groups.sort();
            let mut expected = vec![uid.to_string(), "61299".to_owned()];
            expected.sort();
            assert_eq!(groups, expected);
            assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1".to_owned()], vec!["2".to_owned()]));
            let mut open: Vec<PathBuf> = fs::read_dir(process_of(&worker).join("fd"))
                .unwrap()
                .map(|entry| fs::read_link(entry.unwrap().path()).unwrap())
                .filter(|target| !target.to_string_lossy().starts_with("socket:"))
                .collect();
            open.sort();
            let null = PathBuf::from("/dev/null");
            let watches = PathBuf::from("anon_inode:inotify");
            let mut expected = vec![null.clone(), null.clone(), null, dir.path().to_owned(), watches];
            expected.sort();
            assert_eq!(open, expected);
            assert_eq!(rustix::fs::fstat(&handed_up).unwrap().st_ino, fs::metadata(dir.path()).unwrap().ino());
        }
    }

    #[test]
    fn only_the_callers_own_directory_is_opened() {
        let others = workspace_of(61_241);
        fs::set_permissions(others.path(), Permissions::from_mode(0o777)).unwrap();
        let (code, message) = refusal(UID, others.path());
        assert_eq!(code, Code::WorkspaceUnavailable);
        assert!(message.contains("belongs to uid 61241"), "{message}");

        let (code, message) = refusal(UID, Path::new("/nonexistent/workspace"));
        assert_eq!(code, Code::WorkspaceUnavailable);
        assert!(message.contains("No such file"), "{message}");

        // Below a directory that the caller cannot enter, where root could.
        let closed = tempfile::tempdir().unwrap();
        fs::create_dir(closed.path().join("inside")).unwrap();
        own(&closed.path().join("inside"), UID);
        fs::set_permissions(closed.path(), Permissions::from_mode(0o700)).unwrap();
        assert_eq!(refusal(UID, &closed.path().join("inside")).0, Code::WorkspaceUnavailable);
        fs::set_permissions(closed.path(), Permissions::from_mode(0o711)).unwrap();
        opened(UID, &closed.path().join("inside"));

        let file = workspace_of(UID);
        write(&file.path().join("file"), "", UID);
        assert_eq!(refusal(UID, &file.path().join("file")).0, Code::WorkspaceUnavailable);
    }

    #[test]
    fn scans_and_comparisons_come_in_order() {
        let dir = workspace_of(UID);
        write(&dir.path().join("kept"), "x", UID);
        write(&dir.path().join("changed"), "x", UID);
        let (mut worker, _) = opened(UID, dir.path());
        assert!(matches!(ask(&mut worker, &Request::Compare), Answer::Failed { .. }));
        let before = scanned(&mut worker);
        write(&dir.path().join("changed"), "y", UID);
        write(&dir.path().join("made"), "z", UID);
        worker.send(&Request::Scan).unwrap();
        worker.send(&Request::Compare).unwrap();
        let Answer::Scanned { digest: after, entries: 3, .. } = next(&mut worker) else { panic!() };
        let Answer::Compared { before: first, after: second, changes } = next(&mut worker) else { panic!() };
        assert_eq!((first, second), (before, after));
        assert_eq!((changes.created.len(), changes.modified.len(), changes.deleted.len()), (1, 1, 0));
        let by_hand = super::super::scan::scan(fs::File::open(dir.path()).unwrap().as_fd(), &LIMITS).unwrap();
        assert_eq!(by_hand.digest(), after);
    }

    #[test]
    fn it_watches_each_directory_and_what_it_tells_is_what_a_whole_reading_finds() {
        let dir = workspace_of(UID);
        let make = |name: &str, mode: u32| {
            fs::create_dir_all(dir.path().join(name)).unwrap();
            own(&dir.path().join(name), UID);
            write(&dir.path().join(name).join("file"), name, UID);
            fs::set_permissions(dir.path().join(name), Permissions::from_mode(mode)).unwrap();
        };
        make("open", 0o755);
        make("closed", 0o000);
        let (mut worker, _) = opened(UID, dir.path());
        let agree = |worker: &mut Worker| {
            let (again, whole) = (scanned(worker), ask(worker, &Request::ScanWhole));
            let Answer::Scanned { digest, unattributed, .. } = whole else { panic!("{whole:?}") };
            assert_eq!((again, unattributed), (digest, Vec::new()));
            again
        };
        let first = agree(&mut worker);
        let watched = || {
            let descriptors = fs::read_dir(process_of(&worker).join("fdinfo")).unwrap();
            let told = descriptors.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
            told.map(|told| told.matches("inotify wd:").count()).sum::<usize>()
        };
        assert_eq!(watched(), 3);
        write(&dir.path().join("closed/file"), "changed", UID);
        let second = agree(&mut worker);
        make("closed/below", 0o500);
        make("open/below", 0o111);
        let third = agree(&mut worker);
        fs::set_permissions(dir.path(), Permissions::from_mode(0o750)).unwrap();
        fs::remove_dir_all(dir.path().join("open")).unwrap();
        let fourth = agree(&mut worker);
        assert_eq!(
            std::collections::BTreeSet::from([first, second, third, fourth].map(|one| one.to_string())).len(),
            4
        );
    }

    #[test]
    fn long_lists_of_changes_come_whole() {
        let dir = workspace_of(UID);
        let (mut worker, _) = opened(UID, dir.path());
        scanned(&mut worker);
        for index in 0..8000 {
            fs::File::create(dir.path().join(format!("file{index:06}"))).unwrap();
        }
        for entry in fs::read_dir(dir.path()).unwrap() {
            own(&entry.unwrap().path(), UID);
        }
        scanned(&mut worker);
        let Answer::Compared { changes, .. } = ask(&mut worker, &Request::Compare) else { panic!() };
        assert_eq!(changes.created.len(), 8000);
    }

    #[test]
    fn what_its_owner_cannot_read_is_read_and_set_back() {
        for uid in [UID, 0] {
            let dir = workspace_of(uid);
            let modes = [("closed", 0o000), ("listed", 0o444), ("searched", 0o111), ("closed/file", 0o000)];
            for name in ["closed", "listed", "searched"] {
                fs::create_dir(dir.path().join(name)).unwrap();
                write(&dir.path().join(name).join("file"), "x", uid);
            }
            for (name, mode) in modes.iter().rev() {
                own(&dir.path().join(name), uid);
                fs::set_permissions(dir.path().join(name), Permissions::from_mode(*mode)).unwrap();
            }
            fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
            let (mut worker, _) = opened(uid, dir.path());
            // Root with its capabilities reads without lifting.
            let expected = super::super::scan::scan(
                fs::File::open(dir.path()).unwrap().as_fd(),
                &TreeLimits { unreadable: Unreadable::Refuse, ..LIMITS },
            );
            assert_eq!(scanned(&mut worker), expected.unwrap().digest());
            for (name, mode) in modes {
                assert_eq!(fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777, mode, "{name}");
            }
            // What a failing scan lifted is set back, too.
            write(&dir.path().join("closed/foreign"), "x", 61_241);
            fs::set_permissions(dir.path().join("closed/foreign"), Permissions::from_mode(0o000)).unwrap();
            let Answer::Failed { code, message, .. } = ask(&mut worker, &Request::Scan) else { panic!() };
            assert_eq!(code, Code::WorkspaceUnavailable);
            assert!(message.contains("`closed/foreign` cannot be read"), "{message}");
            for (name, mode) in modes {
                assert_eq!(fs::metadata(dir.path().join(name)).unwrap().mode() & 0o7777, mode, "{name}");
            }
        }
    }

    #[test]
    fn one_that_its_user_stopped_holds_nobody() {
        let dir = workspace_of(UID);
        let (mut worker, _) = opened(UID, dir.path());
        rustix::process::pidfd_send_signal(worker.pidfd(), Signal::STOP).unwrap();
        let begun = Instant::now();
        worker.send(&Request::Scan).unwrap();
        assert!(worker.receive().unwrap().is_none());
        let flood = (0..100_000).find_map(|_| worker.send(&Request::Scan).err());
        assert!(matches!(flood, Some(WorkerError::Stuck)), "{flood:?}");
        let process = process_of(&worker);
        worker.kill();
        assert!(!process.exists());
        assert!(begun.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn one_that_was_killed_is_noticed() {
        let dir = workspace_of(UID);
        let (mut worker, _) = opened(UID, dir.path());
        assert!(!worker.is_gone());
        rustix::process::pidfd_send_signal(worker.pidfd(), Signal::KILL).unwrap();
        poll(&mut [PollFd::new(&worker.pidfd(), PollFlags::IN)], None).unwrap();
        assert!(worker.is_gone());
        assert!(matches!(worker.receive(), Err(WorkerError::Gone)));
        assert!(matches!(worker.send(&Request::Scan), Err(WorkerError::Gone)));
    }

    #[test]
    fn a_stopped_one_still_dies_with_the_launcher() {
        let dir = workspace_of(UID);
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let launcher = fork_running(|| {
            let (worker, _dir) = opened(UID, dir.path());
            rustix::process::pidfd_send_signal(worker.pidfd(), Signal::STOP).unwrap();
            let name = process_of(&worker).into_os_string().into_encoded_bytes();
            io::Write::write_all(&mut &theirs, &name).unwrap();
            std::mem::forget(worker);
            0
        })
        .unwrap();
        drop(theirs);
        let mut name = [0; 64];
        let length = io::Read::read(&mut &ours, &mut name).unwrap();
        let process = PathBuf::from(std::str::from_utf8(&name[..length]).unwrap());
        let status = rustix::process::waitid(WaitId::PidFd(launcher.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
        assert_eq!(status.exit_status(), Some(0));
        let is_alive = || {
            let stat = fs::read_to_string(process.join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['T', 'R', 'S', 'D']))
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while is_alive() {
            assert!(Instant::now() < deadline, "the worker lives on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_call_is_prepared_applied_and_taken_back() {
        let bench = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::set_permissions(bench.path(), Permissions::from_mode(0o755)).unwrap();
        let path = bench.path().join("workspace");
        fs::create_dir(&path).unwrap();
        own(&path, UID);
        write(&path.join("kept"), "x", UID);
        write(&path.join("changed"), "old", UID);
        let owner = crate::workspace::Owner { uid: UID, gid: UID };
        let root = staging::root(fs::File::open(bench.path()).unwrap().as_fd(), "staging").unwrap();
        let job = staging::WorkspaceStaging::open(root.as_fd(), "job", owner).unwrap();

        let mut worker = start(UID, &path);
        let Answer::Opened { dir } = next(&mut worker) else { panic!() };
        worker.confine(Some(job.files())).unwrap();
        let before = scanned(&mut worker);
        let layer = |number: u64| {
            job.make_layer(number, dir.as_fd()).unwrap();
            let upper = bench.path().join(format!("staging/job/files/{number}/upper"));
            write(&upper.join("changed"), "new", UID);
            write(&upper.join("made"), "made", UID);
        };
        layer(1);
        let (first, after, changes) = match ask(&mut worker, &Request::Prepare { layer: 1, protect: Vec::new() }) {
            Answer::Prepared { before, after, changes } => (before, after, changes),
            other => panic!("{other:?}"),
        };
        assert_eq!(first, before);
        assert_eq!((changes.created.len(), changes.modified.len()), (1, 1));
        assert_eq!(fs::read(path.join("changed")).unwrap(), b"old");
        assert!(matches!(ask(&mut worker, &Request::Apply { layer: 1 }), Answer::Done));
        assert_eq!(fs::read(path.join("changed")).unwrap(), b"new");
        assert_eq!(scanned(&mut worker), after);
        assert!(matches!(ask(&mut worker, &Request::TakeBack { layer: 1 }), Answer::Done));
        assert_eq!(scanned(&mut worker), before);

        // Somebody changes something else between a commit's preparation and its end, and it is read in between.
        layer(3);
        assert!(matches!(
            ask(&mut worker, &Request::Prepare { layer: 3, protect: Vec::new() }),
            Answer::Prepared { .. }
        ));
        fs::create_dir(path.join("outside")).unwrap();
        let Answer::Scanned { unattributed, .. } = ask(&mut worker, &Request::Scan) else { panic!() };
        assert_eq!(unattributed.len(), 1);
        assert!(matches!(ask(&mut worker, &Request::Apply { layer: 3 }), Answer::Done));
        let Answer::Scanned { digest, unattributed, .. } = ask(&mut worker, &Request::Scan) else { panic!() };
        assert_eq!(unattributed.len(), 1, "not lost");
        let by_hand = super::super::scan::scan(fs::File::open(&path).unwrap().as_fd(), &LIMITS).unwrap();
        assert_eq!(digest, by_hand.digest());

        // A change from outside, to a file that the next call changes as well.
        layer(2);
        write(&path.join("changed"), "outside", UID);
        let Answer::Failed { code, message, .. } =
            ask(&mut worker, &Request::Prepare { layer: 2, protect: Vec::new() })
        else {
            panic!()
        };
        assert_eq!(code, Code::WorkspaceConflict);
        assert!(message.contains("`changed`"), "{message}");
        assert_eq!(fs::read(path.join("changed")).unwrap(), b"outside");
        assert!(matches!(ask(&mut worker, &Request::Remove { layer: 2 }), Answer::Done));
        assert!(!bench.path().join("staging/job/files/2").exists());
        assert!(matches!(ask(&mut worker, &Request::Apply { layer: 2 }), Answer::Failed { .. }));
    }
}
