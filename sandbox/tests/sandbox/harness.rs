//! A single-threaded test runner, and a caller that does what the launcher does with a sandbox.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use sandbox::cgroup::{Slice, Tree};
use sandbox::frames::Frames;
use sandbox::host::{Host, LimitsMode};
use sandbox::launch::{Exit, Finished, Reusable, Running, Status, Stdio, start};
use sandbox::listings::Listings;
use sandbox::netns::bare::Bares;
use sandbox::plan::{Inputs, Place, Plan, View};
use sandbox::policy::{CallLimits, Policy};
use sandbox::protocol::{LaunchFailure, SliceLimits};
use toolproto::units::Bytes;

/// A named test.
pub(crate) type Test = (&'static str, fn());

/// Runs all tests whose name holds an argument, and reports as libtest does.
pub(crate) fn run(groups: &[fn() -> &'static [Test]]) -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    if std::env::args().any(|argument| argument == crate::lifecycle::PLAY_LAUNCHER) {
        crate::lifecycle::play_launcher();
    }
    if std::env::args().any(|argument| argument == "--list") {
        for (name, _) in groups.iter().flat_map(|group| group()) {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: sandboxes are made by root");
        return if must_run() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    let mut failed = Vec::new();
    let mut passed = 0;
    for (name, test) in groups.iter().flat_map(|group| group()) {
        if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part.as_str())) {
            continue;
        }
        let began = Instant::now();
        let ok = catch_unwind(AssertUnwindSafe(test)).is_ok();
        println!("test {name} ... {} ({} ms)", if ok { "ok" } else { "FAILED" }, began.elapsed().as_millis());
        if ok { passed += 1 } else { failed.push(*name) }
    }
    remove_tree();
    let verdict = if failed.is_empty() { "ok" } else { "FAILED" };
    println!("\ntest result: {verdict}. {passed} passed; {} failed; {failed:?}", failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whether a skip is a failure.
pub(crate) fn must_run() -> bool {
    std::env::var_os("AGENTD_TEST_MUST_RUN").is_some_and(|value| value == "1")
}

/// Says why a test cannot run here.
pub(crate) fn skip(reason: &str) {
    println!("skipped: {reason}");
    assert!(!must_run(), "a skip counts as a failure here: {reason}");
}

/// This host, probed once.
pub(crate) fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| Host::probe(LimitsMode::BestEffort))
}

/// The shipped policies.
pub(crate) fn policies() -> &'static BTreeMap<String, Policy> {
    static POLICIES: OnceLock<BTreeMap<String, Policy>> = OnceLock::new();
    POLICIES.get_or_init(|| {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
        let files: Vec<(PathBuf, String)> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.clone(), std::fs::read_to_string(&path).unwrap()))
            .collect();
        Policy::load_all(&files).unwrap_or_else(|errors| panic!("{errors:?}"))
    })
}

/// The cgroup root of a process that runs these tests.
pub(crate) fn tree_of(pid: u32) -> Tree {
    Tree::open(&std::env::temp_dir().join(format!("agentd-sandbox-test-{pid}"))).unwrap()
}

fn slice() -> &'static Slice {
    static SLICE: OnceLock<Slice> = OnceLock::new();
    SLICE.get_or_init(|| tree_of(std::process::id()).slice("agent-test.slice", &SliceLimits::default()).unwrap())
}

fn remove_tree() {
    // A test that failed may have left processes.
    slice().kill().unwrap();
    tree_of(std::process::id()).sweep().unwrap();
    tree_of(std::process::id()).remove().unwrap();
}

/// A sandbox to be.
pub(crate) struct Sandbox {
    policy: &'static str,
    command: Vec<OsString>,
    stdin: Vec<u8>,
    tool_folder: Option<PathBuf>,
    runtime_mounts: Vec<PathBuf>,
    read_only: bool,
    deadline: Duration,
    limits: Option<CallLimits>,
    host: Host,
    rules: String,
    makes_network: bool,
    user: u32,
    pub(crate) without_cgroup: bool,
}

/// What became of it.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) exit: Result<Exit, LaunchFailure>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) timed_out: bool,
    pub(crate) finished: Finished,
    pub(crate) sandbox_id: u32,
}

impl Output {
    /// Its stdout, after a status of 0.
    #[track_caller]
    pub(crate) fn success(&self) -> &str {
        assert_eq!(self.exit, Ok(Exit::Status(0)), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self.stdout.trim_end()
    }

    pub(crate) fn is_success(&self) -> bool {
        self.exit == Ok(Exit::Status(0))
    }
}

/// A sandbox in which `/bin/sh` runs a script.
pub(crate) fn sh(policy: &'static str, script: &str) -> Sandbox {
    Sandbox::new(policy, &["/bin/sh", "-c", script])
}

impl Sandbox {
    pub(crate) fn new(policy: &'static str, command: &[&str]) -> Self {
        Self {
            policy,
            command: command.iter().map(OsString::from).collect(),
            stdin: Vec::new(),
            tool_folder: None,
            runtime_mounts: Vec::new(),
            read_only: false,
            deadline: Duration::from_secs(120),
            limits: None,
            host: host().clone(),
            rules: String::new(),
            makes_network: false,
            user: 0,
            without_cgroup: false,
        }
    }

    pub(crate) fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    pub(crate) fn tool_folder(mut self, path: &Path) -> Self {
        self.tool_folder = Some(path.to_owned());
        self
    }

    pub(crate) fn runtime_mount(mut self, path: &Path) -> Self {
        self.runtime_mounts.push(path.to_owned());
        self
    }

    pub(crate) fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    pub(crate) fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    pub(crate) fn limits(mut self, limits: CallLimits) -> Self {
        self.limits = Some(limits);
        self
    }

    pub(crate) fn host(mut self, host: Host) -> Self {
        self.host = host;
        self
    }

    /// For a call of this user.
    pub(crate) fn user(mut self, user: u32) -> Self {
        self.user = user;
        self
    }

    /// With a network that it makes itself.
    pub(crate) fn making_network(mut self) -> Self {
        self.makes_network = true;
        self
    }

    /// Further rules of its policy.
    pub(crate) fn rules(mut self, rules: &str) -> Self {
        self.rules = rules.to_owned();
        self
    }

    fn policy(&self) -> Policy {
        let shipped = &policies()[self.policy];
        if self.rules.is_empty() {
            return shipped.clone();
        }
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
        let strict = std::fs::read_to_string(directory.join("strict.toml")).unwrap();
        let text = format!("version = 1\nname = \"own\"\nworkspace = \"none\"\nextends = \"strict\"\n{}", self.rules);
        let files = [("strict.toml".into(), strict), ("own.toml".into(), text)];
        Policy::load_all(&files).unwrap_or_else(|errors| panic!("{errors:?}")).remove("own").unwrap()
    }

    pub(crate) fn without_cgroup(mut self) -> Self {
        self.without_cgroup = true;
        self
    }

    pub(crate) fn plan(&self, sandbox_id: u32) -> Result<Plan, LaunchFailure> {
        let policy = self.policy();
        Plan::build(
            &self.host,
            &Listings::default(),
            Inputs {
                policy: &policy,
                command: &self.command,
                env: &[],
                tool_folder: self.tool_folder.as_deref(),
                runtime_mounts: &self.runtime_mounts,
                user: self.user,
                sandbox_id,
                view: View::Empty,
                place: Place::Usual,
                workspace_read_only: self.read_only,
                limits: self.limits_of(&policy),
                network: None,
            },
        )
    }

    fn limits_of(&self, policy: &Policy) -> CallLimits {
        self.limits.clone().unwrap_or_else(|| policy.limits.clone())
    }

    /// Starts it, with stdout and stderr captured in files.
    pub(crate) fn start(&self) -> (Running, File, File, u32) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let sandbox_id = 78_000 + number % 1000;
        let mut plan = self.plan(sandbox_id).unwrap();
        frames().provide(&mut plan);
        if !self.makes_network
            && plan.makes_bare_network()
            && let Some(bare) = networks().take(self.user, Instant::now())
        {
            plan.enter_network(bare);
        }
        let leaf = (!self.without_cgroup)
            .then(|| slice().leaf(&format!("call-{number}"), &self.limits_of(&self.policy())).unwrap());
        let (stdin, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        // Small enough for the pipe's buffer.
        assert!(self.stdin.len() <= 65_536);
        File::from(writer).write_all(&self.stdin).unwrap();
        let capture = || File::from(memfd_create("output", MemfdFlags::CLOEXEC).unwrap());
        let (stdout, stderr) = (capture(), capture());
        let duplicate = |file: &File| OwnedFd::from(file.try_clone().unwrap());
        let stdio = Stdio { stdin, stdout: duplicate(&stdout), stderr: duplicate(&stderr), events: None, gate: None };
        (start(plan, stdio, leaf).unwrap(), stdout, stderr, sandbox_id)
    }

    /// Runs it to its end.
    pub(crate) fn run(&self) -> Output {
        let (mut running, stdout, stderr, sandbox_id) = self.start();
        // The time that a slow machine takes to set it up is not the tool's.
        settle(&mut running);
        let (exit, timed_out) = end(&mut running, self.deadline);
        let exit = match running.read_status() {
            Status::Failed(failure) => Err(failure),
            _ => Ok(exit),
        };
        let finished = running.finished();
        clear_away(running);
        Output { exit, stdout: content(stdout), stderr: content(stderr), timed_out, finished, sandbox_id }
    }
}

/// Takes away what a sandbox has left in which nobody is any more.
pub(crate) fn clear_away(running: Running) {
    let (leaf, Reusable { frame, network }) = running.into_remains().clear_away();
    assert!(leaf.is_none(), "the leaf could not be removed");
    frame.into_iter().for_each(|frame| frames().take_back(frame, Instant::now()));
    network.into_iter().for_each(|network| networks().take_back(network));
}

fn networks() -> MutexGuard<'static, Bares> {
    static NETWORKS: OnceLock<Mutex<Bares>> = OnceLock::new();
    NETWORKS.get_or_init(Mutex::default).lock().unwrap()
}

/// What sandboxes leave to later ones, as those of a launcher do.
fn frames() -> MutexGuard<'static, Frames> {
    static FRAMES: OnceLock<Mutex<Frames>> = OnceLock::new();
    FRAMES.get_or_init(|| Mutex::new(Frames::watching_mounts())).lock().unwrap()
}

/// Waits for the tool or the deadline, then ends everything as the launcher does.
pub(crate) fn end(running: &mut Running, deadline: Duration) -> (Exit, bool) {
    let mut exit = wait(running, deadline);
    let timed_out = exit.is_none();
    running.terminate();
    let grace = Instant::now() + Duration::from_millis(500);
    while !running.is_gone() && Instant::now() < grace {
        exit = running.reap().or(exit);
        std::thread::sleep(Duration::from_millis(1));
    }
    if !running.is_gone() {
        running.kill();
    }
    let longest = Instant::now() + Duration::from_secs(30);
    while !running.is_gone() {
        assert!(Instant::now() < longest, "processes are left after the kill");
        exit = running.reap().or(exit);
        std::thread::sleep(Duration::from_millis(1));
    }
    (exit.unwrap(), timed_out)
}

/// Waits for the tool's end.
pub(crate) fn wait(running: &mut Running, longest: Duration) -> Option<Exit> {
    let deadline = Instant::now() + longest;
    loop {
        if let Some(exit) = running.reap() {
            return Some(exit);
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        let timeout = Timespec { tv_sec: left.as_secs().try_into().unwrap(), tv_nsec: left.subsec_nanos().into() };
        let tool = running.tool();
        let mut ready = [PollFd::new(&tool, PollFlags::IN)];
        let _ = poll(&mut ready, Some(&timeout));
    }
}

/// Waits until the program runs or will never run.
fn settle(running: &mut Running) -> Status {
    loop {
        match running.read_status() {
            Status::Pending => {
                let status = running.status();
                let _ = poll(&mut [PollFd::new(&status, PollFlags::IN)], None);
            }
            settled => return settled,
        }
    }
}

/// Waits until the program runs.
pub(crate) fn wait_for_exec(running: &mut Running) {
    assert_eq!(settle(running), Status::Executing);
}

/// What was captured so far.
pub(crate) fn content(mut file: File) -> String {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Limits that any host can keep.
pub(crate) fn modest_limits() -> CallLimits {
    CallLimits { tmp: Bytes::mib(16), empty_workspace: Bytes::mib(16), ..CallLimits::default() }
}
