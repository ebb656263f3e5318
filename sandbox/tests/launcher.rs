//! The launcher as a process: a small daemon hands its end of the channel and the listener to the test, which then plays
//! agentd. Runs as root.

use std::fs;
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use data_encoding::BASE64;
use ed25519_dalek::pkcs8::DecodePublicKey;
use ed25519_dalek::{Verifier, VerifyingKey};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, Signal};
use sandbox::protocol::channel::{Channel, Received};
use sandbox::protocol::{
    Application, Drafted, FromLauncher, LaunchFailure, Narrowing, Program, RUNTIME_STEP, Receipted, SliceLimits,
    ToLauncher, WorkspaceChoice,
};
use toolproto::code::Code;
use toolproto::digest::{Digest, canonical_json};
use toolproto::ids::{CallId, JobId};
use toolproto::job::ReceiptsHead;
use toolproto::receipt::{
    Claims, Draft, Outcome, OutcomeKind, PAYLOAD_TYPE, Seal, SignedEvidence, WorkspaceState, evidence_signing_bytes,
    key_id, pre_authentication_encoding,
};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends by SIGINT at any instant: Python's own handler would go unnoticed by a sleep that is just about to begin.
const DAEMON: &str = r#"#!/usr/bin/python3
import signal, socket, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
listener = socket.socket(fileno=4)
listener.setblocking(True)
test, _ = listener.accept()
socket.send_fds(test, [" ".join(sys.argv[1:]).encode()], [3, 4])
time.sleep(100000)
"#;

const POLICIES: [(&str, &str); 4] = [
    ("layered", "workspace = \"overlay\"\nadhoc = true\n"),
    ("direct", "workspace = \"direct\"\nadhoc = true\n"),
    ("reader", "workspace = \"read_only\"\nadhoc = true\n"),
    ("tools_only", "workspace = \"none\"\nadhoc = false\n"),
];

/// What every policy of the tests extends.
const STRICT: &str = include_str!("../../policies/strict.toml");

struct Bench {
    dir: tempfile::TempDir,
    launcher: Launcher,
    log: PathBuf,
    channel: Channel,
    listener: UnixListener,
    arguments: String,
    leftovers: Vec<(JobId, CallId)>,
}

fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let write = |name: &str, text: &str, mode: u32| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    };
    write("daemon", DAEMON, 0o755);
    let roots = dir.path().join("work");
    fs::create_dir(&roots).unwrap();
    let config = format!(
        "version = 1\n[service]\nuser = \"no-such-user\"\ngroup = \"no-such-group\"\n[paths]\npolicies = [\"policies\"]\n\
         [workspace]\nroots = [{roots:?}]\n[timeouts]\ngrace = \"200ms\"\n"
    );
    write("config/agentd.toml", &config, 0o644);
    write("config/policies/strict.toml", STRICT, 0o644);
    for (name, text) in POLICIES {
        let text = format!("version = 1\nname = \"{name}\"\n{text}extends = \"strict\"\n");
        write(&format!("config/policies/{name}.toml"), &text, 0o644);
    }
    let tool = "version = 1\nname = \"echo\"\ndescription = \"Answers.\"\n[run]\nruntime = \"exec\"\nentry = \"run\"\n\
        [contract]\ninput = \"in.json\"\n[limits]\nmax_response_bytes = \"4KiB\"\n[timeout]\nafter = \"20s\"\n[sandbox]\npolicy = \"direct\"\n";
    write("config/tools/echo/tool.toml", tool, 0o644);
    write("config/tools/echo/run", "#!/bin/sh\nread line; eval \"$line\"\n", 0o755);
    write("config/tools/echo/in.json", "{}", 0o644);
    dir
}

fn launcher(dir: &Path, log: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agentd-launcher"));
    command
        .arg("--config-dir")
        .arg(dir.join("config"))
        .arg("--state-dir")
        .arg(dir.join("state"))
        .arg("--socket")
        .arg(dir.join("run/agentd.sock"))
        .arg("--daemon")
        .arg(dir.join("daemon"))
        .args(["--limits", "best-effort"])
        .stdin(Stdio::null())
        .stderr(fs::File::options().create(true).append(true).open(log).unwrap());
    command
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Bench {
    fn start() -> Self {
        Self::start_in(place())
    }

    fn start_in(dir: tempfile::TempDir) -> Self {
        let log = dir.path().join("log");
        let mut launcher = Launcher(launcher(dir.path(), &log).spawn().unwrap());
        let socket = dir.path().join("run/agentd.sock");
        let mut handed = None;
        wait_until("a socket", || {
            assert!(launcher.0.try_wait().unwrap().is_none(), "{}", fs::read_to_string(&log).unwrap());
            // The daemon of a launcher that was killed before may hold the old socket a moment longer.
            handed = UnixStream::connect(&socket).ok().and_then(|stream| receive(stream.as_fd()).ok());
            handed.is_some()
        });
        let (arguments, mut descriptors) = handed.unwrap();
        let listener = UnixListener::from(descriptors.pop().unwrap());
        listener.set_nonblocking(false).unwrap();
        let channel = Channel::new(descriptors.pop().unwrap());
        match channel.receive() {
            Ok(Received::Message(FromLauncher::Secrets { known }, _)) => assert_eq!(known, []),
            other => panic!("{other:?}\n{}", fs::read_to_string(&log).unwrap()),
        }
        let leftovers = match channel.receive() {
            Ok(Received::Message(FromLauncher::Leftovers { undecided }, _)) => undecided,
            other => panic!("{other:?}\n{}", fs::read_to_string(&log).unwrap()),
        };
        Self { dir, launcher, log, channel, listener, arguments, leftovers }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/agentd.sock")
    }

    /// A client's connection: its end, and the accepted one.
    fn connect(&self) -> (UnixStream, UnixStream) {
        let client = UnixStream::connect(self.socket()).unwrap();
        (client, self.listener.accept().unwrap().0)
    }

    fn send(&self, message: &ToLauncher, descriptors: &[BorrowedFd<'_>]) {
        self.channel.send(message, descriptors).unwrap();
    }

    fn receive(&self) -> (FromLauncher, Vec<OwnedFd>) {
        match self.channel.receive() {
            Ok(Received::Message(message, descriptors)) => (message, descriptors),
            other => panic!("{other:?}\n{}", fs::read_to_string(&self.log).unwrap()),
        }
    }

    fn try_admit(&self, job: JobId, workspace: WorkspaceChoice, client: BorrowedFd<'_>) -> FromLauncher {
        let limits = SliceLimits::default();
        self.send(&ToLauncher::Admit { job, workspace, agent: None, limits }, &[client]);
        self.receive().0
    }

    fn admit(&self, workspace: WorkspaceChoice) -> (JobId, Option<PathBuf>) {
        let job = JobId::generate();
        let (_client, accepted) = self.connect();
        match self.try_admit(job, workspace, accepted.as_fd()) {
            FromLauncher::Admitted { job: admitted, uid: 0, workspace, .. } if admitted == job => (job, workspace),
            other => panic!("{other:?}\n{}", fs::read_to_string(&self.log).unwrap()),
        }
    }

    /// Launches the tool `echo` with a line of shell.
    fn launch(&self, job: JobId, script: &str) -> CallId {
        self.launch_as(job, Program::Tool { name: "echo".to_owned() }, script, 60_000, &[])
    }

    fn launch_as(&self, job: JobId, program: Program, stdin: &str, time_ms: u64, streams: &[BorrowedFd<'_>]) -> CallId {
        let call = CallId::generate();
        self.launch_attempt(job, (call, call), program, stdin, time_ms, streams);
        call
    }

    fn launch_attempt(
        &self,
        job: JobId,
        (call, attempt_of): (CallId, CallId),
        program: Program,
        stdin: &str,
        time_ms: u64,
        streams: &[BorrowedFd<'_>],
    ) {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writeln!(writer, "{stdin}").unwrap();
        let descriptors: Vec<_> = [reader.as_fd()].into_iter().chain(streams.iter().copied()).collect();
        let narrow = Narrowing::default();
        self.send(&ToLauncher::Launch { job, call, attempt_of, program, time_ms, narrow, gated: false }, &descriptors);
    }

    /// Whether the launcher says anything within so long.
    fn has_answer(&self, within: Duration) -> bool {
        let mut ready = [PollFd::new(&self.channel, PollFlags::IN)];
        let within = Timespec { tv_sec: 0, tv_nsec: within.subsec_nanos().into() };
        poll(&mut ready, Some(&within)).unwrap() > 0
    }

    fn started(&self) {
        assert!(matches!(self.receive().0, FromLauncher::Started { .. }));
    }

    fn ended(&self, call: CallId) -> Ended {
        loop {
            let (message, descriptors) = self.receive();
            match message {
                FromLauncher::Started { .. } => {}
                FromLauncher::Ended { call: ended, outcome, failure, stdout_overflowed, .. } => {
                    assert_eq!(ended, call);
                    let output = descriptors.into_iter().map(|descriptor| {
                        let mut bytes = Vec::new();
                        fs::File::from(descriptor).read_to_end(&mut bytes).unwrap();
                        String::from_utf8_lossy(&bytes).into_owned()
                    });
                    return Ended { outcome, failure, stdout_overflowed, output: output.collect() };
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn settle(&self, call: CallId) -> SignedEvidence {
        self.send(&ToLauncher::Settle { call, commit: true, claims: Claims::default(), receipt: unsealed() }, &[]);
        match self.receive().0 {
            FromLauncher::Sealed { call: sealed, evidence, .. } if sealed == call => *evidence,
            other => panic!("{other:?}"),
        }
    }

    fn settle_with(&self, call: CallId, drafted: Drafted) -> (SignedEvidence, Option<Receipted>) {
        let receipt = Box::new(drafted);
        self.send(&ToLauncher::Settle { call, commit: true, claims: Claims::default(), receipt }, &[]);
        match self.receive().0 {
            FromLauncher::Sealed { call: sealed, evidence, receipt, .. } if sealed == call => {
                (*evidence, receipt.map(|receipt| *receipt))
            }
            other => panic!("{other:?}"),
        }
    }

    fn run(&self, job: JobId, script: &str) -> (Ended, SignedEvidence) {
        let call = self.launch(job, script);
        let ended = self.ended(call);
        let evidence = self.settle(call);
        (ended, evidence)
    }

    fn daemon_pid(&self) -> i32 {
        child_of(self.launcher.0.id(), |name| name == "daemon" || name == "python3").unwrap()
    }

    fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the launcher's end", || {
            status = self.launcher.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// This bench's place for cgroups, as the launcher names it.
    fn cgroups(&self) -> Option<PathBuf> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?.to_owned();
        let state = self.dir.path().join("state").canonicalize().ok()?;
        let hash = blake3::hash(state.as_os_str().as_encoded_bytes()).to_hex();
        Some(Path::new(&mount).join(format!("agentd-{}", &hash[..16])))
    }
}

/// Ends with this value, also when a test fails before it has a bench.
struct Launcher(Child);

impl Launcher {
    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.launcher.end();
        // No next launcher will sweep what a killed one leaves in the cgroup hierarchy.
        if self.cgroups().is_some_and(|root| root.exists()) {
            let state = self.dir.path().join("state").canonicalize().unwrap();
            let cgroups = sandbox::cgroup::Tree::open(&state).unwrap();
            cgroups.sweep().unwrap();
            cgroups.remove().unwrap();
        }
    }
}

#[derive(Debug)]
struct Ended {
    outcome: Outcome,
    failure: Option<LaunchFailure>,
    stdout_overflowed: bool,
    output: Vec<String>,
}

/// What the fake daemon was started with: its arguments, and its descriptors.
fn receive(socket: BorrowedFd<'_>) -> rustix::io::Result<(String, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 1000];
    let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
    let message = rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    if message.bytes == 0 {
        return Err(rustix::io::Errno::CONNRESET);
    }
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok((String::from_utf8_lossy(&bytes[..message.bytes]).into_owned(), descriptors))
}

/// The fields of /proc/PID/status.
fn status(pid: i32, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn child_of(parent: u32, is_it: impl Fn(&str) -> bool) -> Option<i32> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .find(|pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| is_it(name.trim())))
}

fn is_alive(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A process of the sandbox, by a marker in its command line, as the host sees it.
fn find(marker: &str) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter(|pid: &i32| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            *pid != std::process::id() as i32 && String::from_utf8_lossy(&command).contains(marker) && is_alive(*pid)
        })
        .collect()
}

fn kill(pid: i32) {
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[test]
fn both_processes_have_what_they_need_and_nothing_else() {
    let bench = Bench::start();
    let daemon = bench.daemon_pid();
    assert_eq!(status(daemon, "Uid"), "69999 69999 69999 69999");
    assert_eq!(status(daemon, "Gid"), "69999 69999 69999 69999");
    assert_eq!(status(daemon, "Groups"), "");
    assert_eq!(status(daemon, "NoNewPrivs"), "1");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(daemon, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(daemon, "SigBlk"), "0000000000000000");
    let state = bench.dir.path().join("state");
    let expected = format!(
        "daemon --launcher-fd 3 --listener-fd 4 --config-dir {} --state-dir {}",
        bench.dir.path().join("config").display(),
        state.display()
    );
    let further = bench.arguments.strip_prefix(&expected).unwrap_or_else(|| panic!("{}", bench.arguments));
    // Where there are cgroups, it is told where the jobs' lie.
    let slices = further.strip_prefix(" --cgroup-root ");
    assert!(further.is_empty() || slices.is_some_and(|root| Path::new(root).is_dir()), "{further}");
    let numbers = fs::read_dir(format!("/proc/{daemon}/fd")).unwrap();
    let mut numbers: Vec<i32> =
        numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    numbers.sort_unstable();
    // The daemon has opened nothing but the test's connection.
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);

    let launcher = bench.launcher.0.id() as i32;
    assert_eq!(status(launcher, "Threads"), "1");
    assert_eq!(status(launcher, "NoNewPrivs"), "1");
    let held = u64::from_str_radix(&status(launcher, "CapPrm"), 16).unwrap();
    let module_loading = 1 << 16;
    let reboot = 1 << 22;
    let clock = 1 << 25;
    assert_eq!(held & (module_loading | reboot | clock), 0);
    assert_eq!(status(launcher, "CapBnd"), "0000000000000000");
    assert_eq!(status(launcher, "CapEff"), status(launcher, "CapPrm"));
    assert_eq!(status(launcher, "CapInh"), "0000000000000000");
}

#[test]
fn the_state_directory_and_the_socket_are_as_documented() {
    let bench = Bench::start();
    let seen = |path: &str| {
        let found = fs::metadata(bench.dir.path().join(path)).unwrap();
        (found.uid(), found.mode() & 0o7777)
    };
    assert_eq!(seen("state"), (0, 0o711));
    assert_eq!(seen("state/ledger"), (69_999, 0o700));
    assert_eq!(seen("state/launcher"), (0, 0o700));
    assert_eq!(seen("state/workspaces"), (0, 0o711));
    assert_eq!(seen("run/agentd.sock"), (0, 0o660));
}

#[test]
fn a_call_runs_confined_and_its_evidence_is_chained() {
    let bench = Bench::start();
    let (job, workspace) = bench.admit(WorkspaceChoice::Private);
    let workspace = workspace.unwrap();
    let (first, evidence) = bench.run(job, "id -u; pwd; echo made > made.txt; echo log >&2");
    assert_eq!(first.outcome, Outcome { kind: OutcomeKind::Exited, code: None, exit_status: Some(0), signal: None });
    let lines: Vec<_> = first.output[0].lines().collect();
    assert!((70_000..80_000).contains(&lines[0].parse::<u32>().unwrap()), "{lines:?}");
    assert_eq!(lines[1], "/workspace");
    assert_eq!(first.output[1], "log\n");
    assert_eq!(fs::metadata(workspace.join("made.txt")).unwrap().uid(), 0, "the caller's on disk");

    let record = evidence.record;
    assert_eq!((record.sequence, record.previous, record.uid), (1, None, 0));
    let pem = fs::read_to_string(bench.dir.path().join("state/receipt.pub")).unwrap();
    let key = VerifyingKey::from_public_key_pem(&pem).unwrap();
    let verify = |bytes: &[u8], signature: &str| {
        let signature = BASE64.decode(signature.as_bytes()).unwrap();
        key.verify(bytes, &ed25519_dalek::Signature::from_slice(&signature).unwrap()).unwrap();
    };
    verify(&evidence_signing_bytes(&canonical_json(&record).unwrap()), &evidence.signature.unwrap());
    bench.send(&ToLauncher::Sign { job, call: Some(record.call_id), payload: BASE64.encode(b"{}") }, &[]);
    let FromLauncher::Signed { signature: Some(signature), .. } = bench.receive().0 else { panic!() };
    assert_eq!(signature.keyid, key_id(key.as_bytes()));
    verify(&pre_authentication_encoding(PAYLOAD_TYPE, b"{}"), &signature.sig);
    assert_eq!(record.workspace.state, WorkspaceState::Direct);
    assert_eq!(record.workspace.created.iter().map(|change| change.path.as_str()).collect::<Vec<_>>(), ["made.txt"]);
    assert_ne!(record.workspace.before, record.workspace.after);
    assert!(record.enforced.iter().any(|name| name == "seccomp"), "{:?}", record.enforced);
    assert!(record.tool.digest.is_some());

    let (second, next) = bench.run(job, "exit 3");
    assert_eq!(second.outcome.exit_status, Some(3));
    assert_eq!(next.record.sequence, 2);
    assert_eq!(next.record.previous, Some(Digest::of_json(&record).unwrap()));
    assert_eq!(next.record.workspace.before, record.workspace.after);
    assert_eq!(next.record.workspace.before, next.record.workspace.after);

    bench.send(&ToLauncher::Close { job, keep: false }, &[]);
    assert_eq!(bench.receive().0, FromLauncher::Closed { job });
    if let Some(root) = bench.cgroups() {
        wait_until("an empty cgroup", || !root.join(format!("agent-{job}.slice")).exists());
    }
}

#[test]
fn nothing_of_a_sandbox_outlives_the_evidence_and_nothing_at_all_the_job() {
    let bench = Bench::start();
    let launcher = bench.launcher.0.id();
    let frames = run_and_close(&bench, launcher);
    assert!(!frames.is_empty(), "no frame of a root is kept");
    // What is held is used again, and nothing is added.
    let later = run_and_close(&bench, launcher);
    assert_eq!(later, frames);
}

/// Runs calls of a job, closes it, and yields the mount namespaces that are held then.
fn run_and_close(bench: &Bench, launcher: u32) -> Vec<PathBuf> {
    let (job, _) = bench.admit(WorkspaceChoice::None);
    for script in ["true", "sleep 60 & exit 0", "exit 3", "dd if=/dev/zero of=/tmp/x bs=1M count=1 2>&1 | tail -1"] {
        let (_, evidence) = bench.run(job, script);
        assert_eq!(child_of(launcher, |name| name == "agentd-init"), None, "PID 1 is left after `{script}`");
        assert_ne!(evidence.record.cgroup, "none");
        let leaf = bench.cgroups().unwrap().join(&evidence.record.cgroup);
        let left = fs::read_to_string(leaf.join("cgroup.procs")).unwrap_or_default();
        assert_eq!(left, "", "processes are left after `{script}`");
    }
    bench.send(&ToLauncher::Close { job, keep: false }, &[]);
    assert_eq!(bench.receive().0, FromLauncher::Closed { job });
    let slices: Vec<_> = fs::read_dir(bench.cgroups().unwrap()).unwrap().map(|entry| entry.unwrap()).collect();
    let slices = slices.iter().filter(|entry| entry.file_name().to_string_lossy().starts_with("agent-"));
    assert_eq!(slices.count(), 0, "the job's cgroup is left");
    let held = fs::read_dir(format!("/proc/{launcher}/fd")).unwrap();
    let held = held.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let mut held: Vec<_> = held.filter(|target| target.to_string_lossy().starts_with("mnt:")).collect();
    held.sort();
    held
}

#[test]
fn a_drafted_receipt_is_put_around_its_evidence_unless_something_was_withheld() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let call = bench.launch(job, "true");
    assert_eq!(bench.ended(call).outcome.exit_status, Some(0));
    let (evidence, receipt) = bench.settle_with(call, drafted(job, call));
    let Receipted { envelope, seal: Some(seal) } = receipt.unwrap() else { panic!("no seal") };
    let pem = fs::read_to_string(bench.dir.path().join("state/receipt.pub")).unwrap();
    let key = VerifyingKey::from_public_key_pem(&pem).unwrap();
    for signed in [&envelope, &seal] {
        let signature = BASE64.decode(signed.signatures[0].sig.as_bytes()).unwrap();
        let signature = ed25519_dalek::Signature::from_slice(&signature).unwrap();
        key.verify(&signed.signing_bytes().unwrap(), &signature).unwrap();
    }
    let receipt = envelope.receipt().unwrap();
    assert_eq!((receipt.sequence, receipt.host.as_str(), receipt.notes), (1, "host", vec!["drafted".to_owned()]));
    assert_eq!((receipt.outcome.code, receipt.usage), (Some(Code::ToolProtocolError), evidence.record.all_usage()));
    // What closes the chain names the receipt as it was signed, and its evidence.
    let closing = &seal.statement().unwrap()["predicate"];
    assert_eq!(closing["previous"], serde_json::json!(envelope.digest().unwrap()));
    assert_eq!(closing["evidence_head"], serde_json::json!(Digest::of_json(&evidence.record).unwrap()));
    assert_eq!(receipt.evidence, evidence);

    let (job, workspace) = bench.admit(WorkspaceChoice::Private);
    let command = ["sh", "-c", "echo theirs > note.txt"].map(str::to_owned).to_vec();
    let program =
        Program::Adhoc { policy: "layered".to_owned(), runtime: None, command, network: Vec::new(), keep: true };
    let (out, err) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let call = bench.launch_as(job, program, "", 60_000, &[out.as_fd(), err.as_fd()]);
    assert_eq!(bench.ended(call).outcome.exit_status, Some(0));
    fs::write(workspace.unwrap().join("note.txt"), "ours").unwrap();
    let (evidence, receipt) = bench.settle_with(call, drafted(job, call));
    assert_eq!((evidence.record.workspace.state, receipt), (WorkspaceState::Conflict, None));
}

#[test]
fn evidence_of_very_many_entries_travels_without_the_receipt_around_it() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::Private);
    for (script, entries) in [("seq 1000 | xargs touch", 1000), ("seq 2001 3001 | xargs touch", 1001)] {
        let call = bench.launch(job, script);
        assert_eq!(bench.ended(call).outcome.exit_status, Some(0));
        let (evidence, receipt) = bench.settle_with(call, drafted(job, call));
        assert_eq!(evidence.record.workspace.created.len(), entries);
        assert_eq!(receipt.is_some(), entries <= 1000, "{entries}");
    }
}

#[test]
fn a_failure_on_a_full_private_file_system_is_named_as_that() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let (ended, evidence) = bench.run(job, "cat /dev/zero > /tmp/x");
    assert_eq!(ended.outcome.code, Some(Code::DiskFull), "{ended:?}");
    assert!(evidence.record.denied.iter().any(|denial| denial.rule == "[limits] tmp"), "{:?}", evidence.record.denied);
}

/// The draft of a receipt that nobody looks at.
fn unsealed() -> Box<Drafted> {
    Box::new(Drafted { seal: None, ..drafted(JobId::from_u128(0), CallId::from_u128(0)) })
}

/// A draft, and what closes the job after it.
fn drafted(job: JobId, call: CallId) -> Drafted {
    let draft = Draft {
        chain: ReceiptsHead { count: 0, head: None },
        arguments_digest: Digest::sha256(call.to_string().as_bytes()),
        declared: "undeclared".to_owned(),
        code: Some(Code::ToolProtocolError),
        result: None,
        notes: vec!["drafted".to_owned()],
        host: "host".to_owned(),
        boot_id: "boot".to_owned(),
        agentd_version: "0".to_owned(),
        key_id: None,
    };
    let sealed = jiff::Timestamp::UNIX_EPOCH;
    let seal = Seal { version: 1, job_id: job, count: 1, previous: None, evidence_head: None, sealed, key_id: None };
    Drafted { draft, seal: Some(seal) }
}

#[test]
fn exec_uses_agentds_streams_and_a_read_only_policy_keeps_the_workspace() {
    let bench = Bench::start();
    let work = bench.dir.path().join("work/mine");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("data"), "kept").unwrap();
    let (job, path) = bench.admit(WorkspaceChoice::Named(work.clone()));
    assert_eq!(path, Some(work.clone()));
    let (mut reader, writer) = std::io::pipe().unwrap();
    let command = ["sh", "-c", "cat; cat data; echo no > data"].map(str::to_owned).to_vec();
    let program =
        Program::Adhoc { policy: "reader".to_owned(), runtime: None, command, network: Vec::new(), keep: false };
    let streams = [writer.as_fd(), writer.as_fd()];
    let call = bench.launch_as(job, program, "typed", 60_000, &streams);
    drop(writer);
    let ended = bench.ended(call);
    assert_ne!(ended.outcome.exit_status, Some(0));
    assert!(ended.output.is_empty());
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("typed\nkept"), "{text}");
    assert_eq!(fs::read_to_string(work.join("data")).unwrap(), "kept");
    let evidence = bench.settle(call);
    assert_eq!(evidence.record.workspace.state, WorkspaceState::ReadOnly);
    assert!(evidence.record.workspace.before.is_some());
    assert_eq!(evidence.record.tool.name, "exec");
}

#[test]
fn deadlines_stops_and_floods_end_calls_with_everything_they_started() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let marker = format!("{}", 500_000 + std::process::id());

    let program = Program::Tool { name: "echo".to_owned() };
    let script = format!("trap '' TERM; setsid sleep {marker} & sleep {marker}");
    let call = bench.launch_as(job, program, &script, 700, &[]);
    let ended = bench.ended(call);
    assert_eq!((ended.outcome.kind, ended.outcome.code), (OutcomeKind::TimedOut, Some(Code::ToolTimeout)));
    assert!(find(&format!("sleep\0{marker}")).is_empty(), "nothing outlives its call");
    assert_eq!(bench.settle(call).record.workspace.state, WorkspaceState::None);

    let call = bench.launch(job, &format!("sleep {marker}"));
    bench.started();
    bench.send(&ToLauncher::Stop { call }, &[]);
    assert_eq!(bench.ended(call).outcome.kind, OutcomeKind::Cancelled);
    bench.settle(call);

    // An orphan does not hold the end up, and is killed.
    let call = bench.launch(job, &format!("(trap '' TERM; setsid sleep {marker}) & echo done"));
    let ended = bench.ended(call);
    assert_eq!(ended.outcome.exit_status, Some(0));
    assert_eq!(ended.output[0], "done\n");
    assert!(find(&format!("sleep\0{marker}")).is_empty());
    bench.settle(call);

    let call = bench.launch(job, "head -c 1000000 /dev/zero; head -c 3000000 /dev/zero >&2; echo end >&2");
    let ended = bench.ended(call);
    assert!(ended.stdout_overflowed);
    assert!(ended.output[0].len() <= 3 * 4096, "{}", ended.output[0].len());
    assert!(ended.output[1].ends_with("end\n"), "the end of stderr, which held nobody up");
    bench.settle(call);

    let call = bench.launch(job, "kill -SEGV $$");
    let ended = bench.ended(call);
    assert_eq!((ended.outcome.kind, ended.outcome.signal), (OutcomeKind::Signalled, Some(libc::SIGSEGV)));
}

#[test]
fn what_cannot_run_is_answered_with_its_code() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let adhoc = |policy: &str, command: &[&str]| Program::Adhoc {
        policy: policy.to_owned(),
        runtime: None,
        command: command.iter().map(|word| (*word).to_owned()).collect(),
        network: Vec::new(),
        keep: false,
    };
    let with_runtime = |name: &str, program| match program {
        Program::Adhoc { policy, command, network, keep, .. } => {
            Program::Adhoc { policy, runtime: Some(name.to_owned()), command, network, keep }
        }
        other => other,
    };
    let cases = [
        (Program::Tool { name: "none".to_owned() }, Code::ToolUnknown),
        (adhoc("none", &["true"]), Code::PolicyUnknown),
        (adhoc("tools_only", &["true"]), Code::NotPermitted),
        (with_runtime("abacus", adhoc("direct", &["true"])), Code::ToolUnavailable),
        (adhoc("direct", &["no-such-program"]), Code::LaunchFailed),
    ];
    for (program, code) in cases {
        let call = bench.launch_as(job, program, "", 60_000, &[]);
        let ended = bench.ended(call);
        assert_eq!((ended.outcome.kind, ended.outcome.code), (OutcomeKind::LaunchFailed, Some(code)));
        assert_eq!(ended.failure.unwrap().code, code);
        assert_eq!(bench.settle(call).record.outcome.code, Some(code));
    }
    let call = bench.launch_as(job, adhoc("direct", &["no-such-program"]), "", 60_000, &[]);
    let failure = bench.ended(call).failure.unwrap();
    assert_eq!((failure.step.as_str(), failure.errno), ("exec", Some(libc::ENOENT)));
    bench.settle(call);

    let call = CallId::generate();
    let claims = Claims { code: Some(Code::ArgumentsInvalid), ..Claims::default() };
    bench.send(&ToLauncher::Record { job, call, program: Program::Tool { name: "echo".to_owned() }, claims }, &[]);
    let FromLauncher::Sealed { evidence, .. } = bench.receive().0 else { panic!() };
    assert_eq!(evidence.record.outcome.kind, OutcomeKind::Refused);
    assert_eq!((evidence.record.sequence, evidence.record.outcome.code), (7, Some(Code::ArgumentsInvalid)));
    assert!(evidence.record.previous.is_some());
}

#[test]
fn a_runtime_is_tried_for_no_job_and_leaves_no_evidence() {
    let dir = place();
    let file = dir.path().join("config/agentd.toml");
    let runtimes = "[runtimes.shell]\ncommand = \"/bin/sh\"\nprobe = [\"-c\", \"id -u; echo seven >&2\"]\n\
        [runtimes.endless]\ncommand = \"/bin/sleep\"\nprobe = [\"1000\"]\n";
    fs::write(&file, fs::read_to_string(&file).unwrap() + runtimes).unwrap();
    let bench = Bench::start_in(dir);
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let probe = |runtime: &str, time_ms: u64| {
        let call = CallId::generate();
        bench.send(&ToLauncher::Probe { call, runtime: runtime.to_owned(), time_ms }, &[]);
        call
    };
    let tried = probe("shell", 60_000);
    let ended = bench.ended(tried);
    assert_eq!((ended.outcome.kind, ended.outcome.exit_status), (OutcomeKind::Exited, Some(0)));
    assert!((70_000..80_000).contains(&ended.output[0].trim().parse::<u32>().unwrap()), "{ended:?}");
    assert_eq!(ended.output[1], "seven\n");
    assert_eq!(bench.ended(probe("endless", 100)).outcome.kind, OutcomeKind::TimedOut);
    let stopped = probe("endless", 60_000);
    bench.started();
    bench.send(&ToLauncher::Stop { call: stopped }, &[]);
    assert_eq!(bench.ended(stopped).outcome.kind, OutcomeKind::Cancelled);
    let missing = bench.ended(probe("abacus", 60_000)).failure.unwrap();
    assert_eq!((missing.code, missing.step.as_str()), (Code::ToolUnavailable, RUNTIME_STEP));

    bench.send(&ToLauncher::Settle { call: tried, commit: true, claims: Claims::default(), receipt: unsealed() }, &[]);
    let answer = bench.receive().0;
    assert!(matches!(answer, FromLauncher::Misuse { .. }), "a probe was settled: {answer:?}");
    let (_, evidence) = bench.run(job, "true");
    assert_eq!((evidence.record.sequence, evidence.record.previous), (1, None));
    let slice = bench.cgroups().map(|root| root.join("probes.slice"));
    assert!(slice.is_none_or(|slice| !slice.exists()), "the cgroup of probes is left");
}

#[test]
fn messages_that_cannot_be_followed_change_nothing() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let (unknown, call) = (JobId::generate(), CallId::generate());
    let echo = || Program::Tool { name: "echo".to_owned() };
    let (pipe, _writer) = std::io::pipe().unwrap();
    let narrow = Narrowing::default();
    let launch = |job| ToLauncher::Launch {
        job,
        call,
        attempt_of: call,
        program: echo(),
        time_ms: 1,
        narrow: narrow.clone(),
        gated: false,
    };
    let admit =
        ToLauncher::Admit { job, workspace: WorkspaceChoice::None, agent: None, limits: SliceLimits::default() };
    let cases: [(ToLauncher, &[BorrowedFd<'_>]); 5] = [
        (launch(job), &[]),
        (ToLauncher::Settle { call, commit: true, claims: Claims::default(), receipt: unsealed() }, &[]),
        (ToLauncher::Record { job: unknown, call, program: echo(), claims: Claims::default() }, &[]),
        (ToLauncher::Sign { job, call: Some(call), payload: String::new() }, &[]),
        (admit, &[pipe.as_fd()]),
    ];
    for (message, descriptors) in cases {
        bench.send(&message, descriptors);
        let answer = bench.receive().0;
        assert!(matches!(answer, FromLauncher::Misuse { .. }), "{message:?}: {answer:?}");
    }
    let (ended, _) = bench.run(job, "echo still here");
    assert_eq!(ended.output[0], "still here\n");
}

#[test]
fn a_launch_that_did_not_wait_for_its_grant_ends_when_that_is_refused() {
    let bench = Bench::start();
    let refused = JobId::generate();
    let socket = UnixStream::pair().unwrap().0;
    let answer = bench.try_admit(refused, WorkspaceChoice::None, socket.as_fd());
    assert!(matches!(answer, FromLauncher::Rejected { .. }), "{answer:?}");
    let call = bench.launch(refused, "true");
    let failure = bench.ended(call).failure.unwrap();
    assert_eq!(failure.code, Code::NotPermitted, "{failure:?}");
    let (job, _) = bench.admit(WorkspaceChoice::None);
    assert_eq!(bench.run(job, "echo still here").0.output[0], "still here\n");
}

#[test]
fn a_gated_program_is_executed_when_the_gate_opens_and_never_when_it_closes() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let time_ms = 300;
    let launch = |script: &str| {
        let (gate, keeper) = std::io::pipe().unwrap();
        let (stdin, mut writer) = std::io::pipe().unwrap();
        writeln!(writer, "{script}").unwrap();
        let call = CallId::generate();
        let (program, narrow) = (Program::Tool { name: "echo".to_owned() }, Narrowing::default());
        let message = ToLauncher::Launch { job, call, attempt_of: call, program, time_ms, narrow, gated: true };
        bench.send(&message, &[stdin.as_fd(), gate.as_fd()]);
        (call, keeper)
    };
    let (call, mut keeper) = launch("sleep 0.2; echo ran");
    // Longer than its time: what it waits for is not its own doing.
    assert!(!bench.has_answer(Duration::from_millis(600)), "it did not wait for the gate");
    keeper.write_all(&[1]).unwrap();
    bench.started();
    assert_eq!(bench.ended(call).output[0], "ran\n");
    bench.settle(call);
    let (call, mut keeper) = launch("sleep 60");
    keeper.write_all(&[1]).unwrap();
    assert_eq!(bench.ended(call).outcome.code, Some(Code::ToolTimeout), "its time is over all the same");
    bench.settle(call);
    let (call, keeper) = launch("echo ran");
    drop(keeper);
    let ended = bench.ended(call);
    let failure = ended.failure.unwrap();
    assert_eq!((failure.code, failure.step.as_str()), (Code::LaunchFailed, "gate"));
    assert_eq!(ended.output[0], "");
    bench.settle(call);
}

#[test]
fn a_grant_takes_a_genuine_client() {
    let bench = Bench::start();
    let (client, accepted) = bench.connect();
    let refused = |socket: BorrowedFd<'_>, what: &str| {
        let answer = bench.try_admit(JobId::generate(), WorkspaceChoice::Private, socket);
        assert!(matches!(answer, FromLauncher::Rejected { code: Code::NotPermitted, .. }), "{what}: {answer:?}");
    };
    refused(client.as_fd(), "the client's end, whose peer is root");
    refused(bench.listener.as_fd(), "the listener, which root made");
    let own = bench.dir.path().join("own.sock");
    let listener = UnixListener::bind(&own).unwrap();
    let _client = UnixStream::connect(&own).unwrap();
    refused(listener.accept().unwrap().0.as_fd(), "a socket that was accepted elsewhere");
    refused(UnixStream::pair().unwrap().0.as_fd(), "a pair");
    let answer = bench.try_admit(JobId::generate(), WorkspaceChoice::Private, accepted.as_fd());
    assert!(matches!(answer, FromLauncher::Admitted { uid: 0, .. }), "{answer:?}");
}

#[test]
fn only_an_own_directory_below_a_root_becomes_a_workspace() {
    let bench = Bench::start();
    let work = bench.dir.path().join("work");
    let make = |name: &str, uid: u32| {
        fs::create_dir_all(work.join(name)).unwrap();
        chown(work.join(name), Some(uid), None).unwrap();
        work.join(name)
    };
    let (_client, accepted) = bench.connect();
    let cases = [
        make("anothers", 1000),
        bench.dir.path().join("config"),
        bench.dir.path().join("state/launcher"),
        work.join("missing"),
        PathBuf::from("relative"),
    ];
    for path in cases {
        let answer = bench.try_admit(JobId::generate(), WorkspaceChoice::Named(path.clone()), accepted.as_fd());
        let refused = matches!(answer, FromLauncher::Rejected { code: Code::WorkspaceUnavailable, .. });
        assert!(refused, "{}: {answer:?}", path.display());
    }
    let own = make("own", 0);
    let answer = bench.try_admit(JobId::generate(), WorkspaceChoice::Named(own), accepted.as_fd());
    assert!(matches!(answer, FromLauncher::Admitted { .. }), "{answer:?}");
}

#[test]
fn when_the_daemon_is_killed_everything_ends_and_nothing_is_left() {
    let mut bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::Private);
    let marker = format!("{}", 600_000 + std::process::id());
    bench.launch(job, &format!("setsid sleep {marker} & sleep {marker}"));
    bench.started();
    wait_until("both sleepers", || find(&format!("sleep\0{marker}")).len() == 2);
    kill(bench.daemon_pid());
    assert!(!bench.wait().success());
    assert!(find(&marker).is_empty());
    assert!(bench.log().contains("agentd was killed"), "{}", bench.log());
    assert!(!bench.socket().exists());
    assert!(bench.cgroups().is_none_or(|root| !root.exists()));
}

#[test]
fn when_the_launcher_is_killed_everything_dies_and_the_next_start_sweeps() {
    let mut bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::Private);
    let marker = format!("{}", 700_000 + std::process::id());
    bench.launch(job, &format!("setsid sleep {marker} & sleep {marker}"));
    bench.started();
    wait_until("both sleepers", || find(&format!("sleep\0{marker}")).len() == 2);
    let daemon = bench.daemon_pid();
    bench.launcher.0.kill().unwrap();
    bench.wait();
    wait_until("the daemon's end", || !is_alive(daemon));
    wait_until("the tools' end", || find(&marker).is_empty());
    let slice = bench.cgroups().map(|root| root.join(format!("agent-{job}.slice")));
    assert!(slice.as_ref().is_none_or(|slice| slice.exists()), "the test shows nothing without a leftover");

    let dir = std::mem::replace(&mut bench.dir, tempfile::tempdir().unwrap());
    drop(bench);
    let next = Bench::start_in(dir);
    assert!(slice.is_none_or(|slice| !slice.exists()));
    let (job, _) = next.admit(WorkspaceChoice::None);
    assert_eq!(next.run(job, "echo again").0.output[0], "again\n");
}

#[test]
fn a_later_launcher_knows_which_calls_never_started() {
    let mut bench = Bench::start();
    let (job, limits) = (JobId::generate(), SliceLimits::default());
    let (_client, accepted) = bench.connect();
    let agent = Some(toolproto::digest::Digest::sha256(b"agent"));
    bench.send(&ToLauncher::Admit { job, workspace: WorkspaceChoice::Private, agent, limits }, &[accepted.as_fd()]);
    assert!(matches!(bench.receive().0, FromLauncher::Admitted { .. }));
    let refused = bench.launch_as(job, Program::Tool { name: "none".to_owned() }, "", 60_000, &[]);
    assert_eq!(bench.ended(refused).outcome.code, Some(Code::ToolUnknown));
    bench.settle(refused);
    let ended = bench.launch(job, "echo done");
    bench.ended(ended);
    bench.settle(ended);
    // One that runs for another, whose own attempt was refused before it came here.
    let (instead, planned, ordered) = (CallId::generate(), CallId::generate(), CallId::generate());
    let echo = Program::Tool { name: "echo".to_owned() };
    bench.launch_attempt(job, (instead, planned), echo, "sleep 1000", 60_000, &[]);
    bench.started();
    bench.launcher.0.kill().unwrap();
    bench.wait();

    let dir = std::mem::replace(&mut bench.dir, tempfile::tempdir().unwrap());
    drop(bench);
    let next = Bench::start_in(dir);
    let dangling = vec![refused, ended, planned, ordered];
    next.send(&ToLauncher::Readmit { job, receipts: 2, dangling }, &[]);
    match next.receive().0 {
        FromLauncher::Admitted { never_started, .. } => assert_eq!(never_started, [refused, ordered]),
        other => panic!("{other:?}"),
    }
    let grants = next.dir.path().join("state/launcher/grants");
    assert_eq!(names(&grants).len(), 2);
    next.send(&ToLauncher::Close { job, keep: false }, &[]);
    assert!(matches!(next.receive().0, FromLauncher::Closed { .. }));
    assert_eq!(names(&grants), [""; 0], "notes outlive their job");
}

#[test]
fn signals_reach_the_daemon_and_the_launcher_ends_with_it() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut bench = Bench::start();
        let daemon = bench.daemon_pid();
        rustix::process::kill_process(Pid::from_raw(bench.launcher.0.id() as i32).unwrap(), signal).unwrap();
        bench.wait();
        assert!(!is_alive(daemon));
        assert!(!bench.socket().exists());
    }
}

#[test]
fn a_tool_whose_files_were_changed_is_not_run_before_a_reload() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let program = bench.dir.path().join("config/tools/echo/run");
    let (_, before) = bench.run(job, "true");
    let original = fs::read_to_string(&program).unwrap();
    fs::write(&program, format!("{original}echo more\n")).unwrap();
    let (ended, evidence) = bench.run(job, "echo never");
    assert_eq!((ended.outcome.kind, ended.outcome.code), (OutcomeKind::LaunchFailed, Some(Code::ToolChanged)));
    let failure = ended.failure.unwrap();
    assert!(failure.message.contains("tool `echo`") && failure.message.contains("reload"), "{}", failure.message);
    assert_eq!(evidence.record.tool, before.record.tool);
    fs::write(&program, &original).unwrap();
    assert_eq!(bench.run(job, "echo again").0.output[0], "again\n", "the files are the same again");
    fs::write(&program, format!("{original}echo more\n")).unwrap();
    bench.send(&ToLauncher::Reload, &[]);
    while !matches!(bench.receive().0, FromLauncher::Reloaded { refused: None }) {}
    let (ended, evidence) = bench.run(job, "echo now");
    assert_eq!(ended.output[0], "now\nmore\n");
    assert_ne!(evidence.record.tool.digest, before.record.tool.digest);
}

#[test]
fn a_reload_takes_what_is_right_and_keeps_what_was_before_what_is_wrong() {
    let bench = Bench::start();
    let (job, _) = bench.admit(WorkspaceChoice::None);
    let file = bench.dir.path().join("config/policies/tools_only.toml");
    let text = fs::read_to_string(&file).unwrap();
    let adhoc = || {
        let command = vec!["true".to_owned()];
        let program = Program::Adhoc {
            policy: "tools_only".to_owned(),
            runtime: None,
            command,
            network: Vec::new(),
            keep: false,
        };
        let call = bench.launch_as(job, program, "", 60_000, &[]);
        let code = bench.ended(call).outcome.code;
        bench.settle(call);
        code
    };
    let reload = || {
        bench.send(&ToLauncher::Reload, &[]);
        loop {
            match bench.receive().0 {
                FromLauncher::Reloaded { refused } => return refused,
                // What tools' secrets are now comes first.
                FromLauncher::Secrets { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    };
    assert_eq!(adhoc(), Some(Code::NotPermitted));
    fs::write(&file, format!("nonsense = 1\n{text}")).unwrap();
    let refused = reload().unwrap();
    assert!(refused.contains("tools_only.toml:1"), "{refused}");
    assert!(bench.log().contains("not reloaded"), "{}", bench.log());
    assert_eq!(adhoc(), Some(Code::NotPermitted));
    fs::write(&file, text.replace("adhoc = false", "adhoc = true")).unwrap();
    assert_eq!(reload(), None);
    assert_eq!(adhoc(), None, "the mended file counts");
}

#[test]
fn a_second_daemon_on_one_state_directory_is_refused() {
    let bench = Bench::start();
    let log = bench.dir.path().join("second.log");
    // Its socket would be refused too, but the state directory comes first.
    assert!(!launcher(bench.dir.path(), &log).status().unwrap().success());
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.contains("another agentd uses the state directory"), "{text}");
    let (job, _) = bench.admit(WorkspaceChoice::None);
    assert_eq!(bench.run(job, "echo unharmed").0.output[0], "unharmed\n");
}

#[test]
fn a_bad_configuration_is_named_with_file_and_line() {
    let spoil = |name: &str, text: &str, words: &str| {
        let dir = place();
        let file = dir.path().join("config").join(name);
        fs::write(&file, text).unwrap();
        let log = dir.path().join("log");
        assert!(!launcher(dir.path(), &log).status().unwrap().success());
        let log = fs::read_to_string(&log).unwrap();
        assert!(log.contains(&format!("{}{words}", file.display())), "{log}");
        assert!(!dir.path().join("state").exists(), "nothing is set up before the configuration is right");
    };
    spoil("agentd.toml", "version = 1\n[servce]\n", ":2: unknown field `servce`");
    spoil("tools/echo/tool.toml", "version = 1\nname = 3\n", ":2:");
    spoil("policies/direct.toml", "version = 1\nname = \"direct\"\nworkspaces = \"direct\"\n", ":3:");

    let dir = place();
    fs::set_permissions(dir.path().join("config/tools"), fs::Permissions::from_mode(0o777)).unwrap();
    let log = dir.path().join("log");
    assert!(!launcher(dir.path(), &log).status().unwrap().success());
    assert!(fs::read_to_string(&log).unwrap().contains("can be written by others"));
}

/// A call of a shell script under the policy whose calls write into a layer.
fn layered(bench: &Bench, job: JobId, script: &str) -> CallId {
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let program =
        Program::Adhoc { policy: "layered".to_owned(), runtime: None, command, network: Vec::new(), keep: false };
    let call = bench.launch_as(job, program, "", 60_000, &[]);
    let ended = bench.ended(call);
    assert_eq!(ended.outcome.exit_status, Some(0), "{ended:?}\n{}", bench.log());
    call
}

fn named_workspace(bench: &Bench) -> PathBuf {
    let path = bench.dir.path().join("work/named");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("kept"), "kept").unwrap();
    fs::write(path.join("changed"), "old").unwrap();
    path
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// How many layers lie in the staging directory whose commit is not carried out.
fn layers(bench: &Bench) -> usize {
    let below = |path: &Path| fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let daemons = below(&bench.dir.path().join("work/.agentd-staging"));
    let workspaces = daemons.iter().flat_map(|daemon| below(daemon));
    let layers = workspaces.flat_map(|workspace| below(&workspace.join("files")));
    layers.filter(|layer| !layer.join("journal.applied").exists()).count()
}

const EDIT: &str = "echo made > made; rm kept; echo new > changed";

fn is_old(path: &Path) -> bool {
    names(path) == ["changed", "kept"] && fs::read(path.join("changed")).unwrap() == b"old"
}

fn is_new(path: &Path) -> bool {
    names(path) == ["changed", "made"] && fs::read(path.join("changed")).unwrap() == b"new\n"
}

fn applied(bench: &Bench, call: CallId) {
    match bench.receive().0 {
        FromLauncher::Applied { call: applied, application: Application::Done } if applied == call => {}
        other => panic!("{other:?}\n{}", bench.log()),
    }
}

#[test]
fn changes_reach_the_workspace_once_the_receipt_is_stored_and_not_before() {
    let bench = Bench::start();
    let path = named_workspace(&bench);
    let (job, _) = bench.admit(WorkspaceChoice::Named(path.clone()));

    let call = layered(&bench, job, EDIT);
    assert!(is_old(&path));
    let workspace = bench.settle(call).record.workspace;
    assert_eq!(workspace.state, WorkspaceState::Committed);
    let counts = (workspace.created.len(), workspace.modified.len(), workspace.deleted.len());
    assert_eq!(counts, (1, 1, 1));
    assert!(is_old(&path), "prepared, not stored");
    bench.send(&ToLauncher::Stored { call }, &[]);
    applied(&bench, call);
    assert!(is_new(&path));
    assert_eq!(fs::metadata(path.join("made")).unwrap().uid(), 0);

    // An unwanted call leaves nothing.
    let call = layered(&bench, job, "rm -r *; mkdir -p a/b/c");
    bench.send(&ToLauncher::Settle { call, commit: false, claims: Claims::default(), receipt: unsealed() }, &[]);
    let FromLauncher::Sealed { evidence, .. } = bench.receive().0 else { panic!() };
    assert_eq!(evidence.record.workspace.state, WorkspaceState::Discarded);
    assert_eq!(evidence.record.workspace.before, workspace.after);
    assert_eq!(evidence.record.workspace.after, workspace.after);
    assert!(is_new(&path));

    // A change from outside, to a file that the call changed as well.
    let call = layered(&bench, job, "echo mine > changed");
    fs::write(path.join("changed"), "theirs").unwrap();
    let record = bench.settle(call).record;
    assert_eq!(record.workspace.state, WorkspaceState::Conflict);
    assert_eq!(record.outcome.code, Some(Code::WorkspaceConflict));
    assert_eq!(fs::read(path.join("changed")).unwrap(), b"theirs");

    bench.send(&ToLauncher::Close { job, keep: false }, &[]);
    assert!(matches!(bench.receive().0, FromLauncher::Closed { .. }));
    wait_until("an empty staging directory", || layers(&bench) == 0);
}

#[test]
fn a_commit_that_was_prepared_before_a_crash_is_decided_by_the_ledger() {
    for stored in [true, false] {
        let mut bench = Bench::start();
        let path = named_workspace(&bench);
        let (job, _) = bench.admit(WorkspaceChoice::Named(path.clone()));
        let call = layered(&bench, job, EDIT);
        assert_eq!(bench.settle(call).record.workspace.state, WorkspaceState::Committed);
        bench.launcher.0.kill().unwrap();
        bench.wait();
        assert!(is_old(&path));

        let dir = std::mem::replace(&mut bench.dir, tempfile::tempdir().unwrap());
        drop(bench);
        let bench = Bench::start_in(dir);
        assert_eq!(bench.leftovers, [(job, call)]);
        assert!(is_old(&path));
        bench.send(&ToLauncher::Decide { call, stored }, &[]);
        applied(&bench, call);
        assert!(if stored { is_new(&path) } else { is_old(&path) });
        wait_until("an empty staging directory", || layers(&bench) == 0);
        // It is asked about once.
        bench.send(&ToLauncher::Decide { call, stored }, &[]);
        assert!(matches!(bench.receive().0, FromLauncher::Misuse { .. }));
    }
}
