//! A real daemon on a [`Site`], and what must be true after it: nothing of it is left.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http_client::{self, Incoming, Response, SseEvent};
use crate::site::Site;
use crate::{leftovers, programs, requirement};

/// How long anything may take that is not the subject of a test. Generous: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running daemon: the launcher is our child, agentd is the launcher's.
pub struct Daemon<'a> {
    site: &'a Site,
    launcher: Child,
    /// Set once the test has looked at how it ended, and what it left, by itself.
    settled: bool,
}

impl<'a> Daemon<'a> {
    /// Starts a daemon, with best-effort limits where the host has no controllers, and waits until it answers.
    ///
    /// # Panics
    /// When it does not, with its log.
    pub fn start(site: &'a Site) -> Self {
        let mode = if requirement::cgroup_controllers().is_ok() { "required" } else { "best-effort" };
        Self::start_with(site, &["--limits", mode])
    }

    /// Starts a daemon with these arguments besides the directories.
    ///
    /// # Panics
    /// When it does not answer, with its log.
    pub fn start_with(site: &'a Site, arguments: &[&str]) -> Self {
        Self::start_by(site, arguments, |daemon| daemon)
    }

    /// Starts a daemon by another command, which is made from the one that starts it and becomes it.
    ///
    /// # Panics
    /// When it does not answer, with its log.
    pub fn start_by(site: &'a Site, arguments: &[&str], by: impl FnOnce(Command) -> Command) -> Self {
        let log = File::options().create(true).append(true).open(site.path("agentd.log")).expect("a log file");
        let mut command = by(Self::command(site, arguments));
        command.env(leftovers::MARK, site.folder()).env("PROBE_ENVIRONMENT", "must-not-leak");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a second descriptor")).stderr(log);
        let mut daemon = Self { site, launcher: command.spawn().expect("agentd starts"), settled: false };
        let end = Instant::now() + PATIENCE;
        while !daemon.answers() {
            if let Some(status) = daemon.launcher.try_wait().expect("a child can be awaited") {
                daemon.settled = true;
                panic!("agentd ended at its start with {status}:\n{}", daemon.log());
            }
            assert!(Instant::now() < end, "agentd does not answer:\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }

    /// The command that starts a daemon on a site, its log going to the site.
    ///
    /// # Panics
    /// When the log cannot be made.
    pub fn command(site: &Site, arguments: &[&str]) -> Command {
        let log = File::options().create(true).append(true).open(site.path("agentd.log")).expect("a log file");
        let mut command = Command::new(programs::find("agentd"));
        command.arg("serve").arg("--config-dir").arg(site.path("config")).arg("--state-dir").arg(site.path("state"));
        command.arg("--socket").arg(site.path("run/agentd.sock")).args(arguments);
        command.env(leftovers::MARK, site.folder()).env("PROBE_ENVIRONMENT", "must-not-leak");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a second descriptor")).stderr(log);
        command
    }

    /// Everything that it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.site.path("agentd.log")).unwrap_or_default()
    }

    /// Its socket.
    pub fn socket(&self) -> PathBuf {
        self.site.path("run/agentd.sock")
    }

    /// The launcher's process id.
    pub fn launcher_pid(&self) -> u32 {
        self.launcher.id()
    }

    /// The process id of agentd, the launcher's child.
    ///
    /// # Panics
    /// When there is none.
    pub fn agentd_pid(&self) -> u32 {
        let children = leftovers::processes().into_iter().filter(|process| process.parent == self.launcher.id());
        let found = children.filter(|process| process.name == "agentd").map(|process| process.id).next();
        found.unwrap_or_else(|| panic!("no agentd below the launcher:\n{}", self.log()))
    }

    fn answers(&self) -> bool {
        UnixStream::connect(self.socket()).is_ok_and(|stream| {
            // A daemon that accepts and then says nothing does not answer.
            stream.set_read_timeout(Some(Duration::from_secs(2))).is_ok()
                && http_client::send(stream, "GET", "/v1/health", &[], b"").is_ok_and(|reply| reply.status == 200)
        })
    }

    /// Opens a request and reads the head of its response.
    ///
    /// # Panics
    /// When the daemon is not reached.
    pub fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Incoming<UnixStream> {
        let stream = UnixStream::connect(self.socket()).expect("the daemon's socket");
        stream.set_read_timeout(Some(PATIENCE * 2)).expect("a read time-out");
        http_client::send(stream, method, path, headers, body)
            .unwrap_or_else(|error| panic!("{method} {path}: {error}\n{}", self.log()))
    }

    /// A whole exchange.
    ///
    /// # Panics
    /// When it breaks off.
    pub fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Response {
        let text = body.map(Value::to_string).unwrap_or_default();
        let headers: &[(&str, &str)] = if body.is_some() { &[("content-type", "application/json")] } else { &[] };
        self.open(method, path, headers, text.as_bytes())
            .finish()
            .unwrap_or_else(|error| panic!("{method} {path}: {error}\n{}", self.log()))
    }

    /// GET.
    pub fn get(&self, path: &str) -> Response {
        self.request("GET", path, None)
    }

    /// POST of a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.request("POST", path, Some(body))
    }

    /// Submits a job and returns its id.
    ///
    /// # Panics
    /// When it is not accepted.
    pub fn submit(&self, job: &Value) -> String {
        let response = self.post("/v1/jobs", job);
        assert_eq!(response.status, 202, "{}", response.text());
        response.json()["job_id"].as_str().expect("a job id").to_owned()
    }

    /// Waits for a job's result.
    ///
    /// # Panics
    /// When there is none in time.
    pub fn result(&self, job: &str) -> Value {
        let end = Instant::now() + PATIENCE * 2;
        loop {
            let response = self.get(&format!("/v1/jobs/{job}/result?wait=10"));
            match response.status {
                200 => return response.json(),
                202 => assert!(Instant::now() < end, "job {job} does not end:\n{}", self.log()),
                _ => panic!("{}: {}", response.status, response.text()),
            }
        }
    }

    /// Submits a job for an agent and waits for its result.
    pub fn run(&self, agent: &str, goal: &Value) -> Value {
        self.result(&self.submit(&json!({"version": 1, "agent": agent, "goal": goal})))
    }

    /// A call of a tool without a loop.
    ///
    /// # Panics
    /// When the request itself is refused.
    pub fn call(&self, tool: &str, arguments: &Value) -> Value {
        let response = self.post("/v1/calls", &json!({"version": 1, "tool": tool, "arguments": arguments}));
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()
    }

    /// The events of a job from after this id until the stream ends, or until `enough` says so.
    ///
    /// # Panics
    /// When there is no stream, or it breaks off.
    pub fn events(&self, job: &str, after: Option<&str>, mut enough: impl FnMut(&[SseEvent]) -> bool) -> Vec<SseEvent> {
        let mut headers = vec![("accept", "text/event-stream")];
        if let Some(id) = after {
            headers.push(("last-event-id", id));
        }
        let incoming = self.open("GET", &format!("/v1/jobs/{job}/events"), &headers, b"");
        if incoming.status != 200 {
            let status = incoming.status;
            let mut text = String::new();
            let mut incoming = incoming;
            incoming.read_to_string(&mut text).expect("a body");
            panic!("{status}: {text}");
        }
        let mut reader = BufReader::new(incoming);
        let mut events = Vec::new();
        while !enough(&events) {
            match http_client::next_event(&mut reader).expect("the stream goes on") {
                Some(event) => events.push(event),
                None => break,
            }
        }
        events
    }

    /// agentctl for this daemon.
    pub fn agentctl(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(programs::find("agentctl"));
        command.arg("--socket").arg(self.socket()).args(arguments).stdin(Stdio::null());
        command
    }

    /// agentctl as somebody else.
    pub fn agentctl_as(&self, uid: u32, gid: u32, arguments: &[&str]) -> Command {
        // The build lies where others cannot look.
        let copy = self.site.path("agentctl");
        if !copy.exists() {
            programs::copy(&programs::find("agentctl"), &copy);
        }
        let mut command = Command::new(copy);
        command.arg("--socket").arg(self.socket()).args(arguments).stdin(Stdio::null()).uid(uid).gid(gid);
        command.current_dir("/");
        command
    }

    /// One sandboxed command by agentctl; `input` becomes its stdin.
    ///
    /// # Panics
    /// When agentctl cannot be run.
    pub fn exec(&self, options: &[&str], command: &[&str], input: &[u8]) -> Output {
        let mut held = self.exec_held(options, command);
        let mut stdin = held.child.stdin.take().expect("a pipe");
        let input = input.to_owned();
        let writer = std::thread::spawn(move || {
            // A command that does not read its input closes the pipe.
            let _ = stdin.write_all(&input);
        });
        let output = held.let_go();
        writer.join().expect("the writer ends");
        output
    }

    /// Starts one sandboxed command by agentctl, whose stdin stays open until it is let go.
    ///
    /// # Panics
    /// When agentctl cannot be run.
    pub fn exec_held(&self, options: &[&str], command: &[&str]) -> Held {
        let arguments: Vec<&str> = ["exec"].iter().chain(options).chain(&["--"]).chain(command).copied().collect();
        Held::start(&mut self.agentctl(&arguments))
    }

    /// Sends a signal to the launcher.
    ///
    /// # Panics
    /// When it has gone.
    pub fn signal_launcher(&self, signal: nix::sys::signal::Signal) {
        signal_process(self.launcher.id(), signal);
    }

    /// Waits until the launcher has ended.
    ///
    /// # Panics
    /// When it does not end within the time.
    pub fn wait_for_end(&mut self, within: Duration) -> ExitStatus {
        let end = Instant::now() + within;
        loop {
            if let Some(status) = self.launcher.try_wait().expect("a child can be awaited") {
                return status;
            }
            assert!(Instant::now() < end, "the launcher does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops it as a service manager would, and proves that it left nothing.
    ///
    /// # Panics
    /// When it does not stop, or leaves something.
    pub fn stop(mut self) {
        self.settled = true;
        self.signal_launcher(nix::sys::signal::Signal::SIGTERM);
        let status = self.wait_for_end(PATIENCE);
        assert!(status.success(), "agentd ended with {status}:\n{}", self.log());
        assert!(!self.socket().exists(), "the socket is left");
        leftovers::assert_none(self.site);
    }

    /// The test itself looks at how it ends and at what it leaves; processes that are left are still ended.
    pub fn leave_to_the_test(&mut self) {
        self.settled = true;
    }

    /// The site.
    pub fn site(&self) -> &Site {
        self.site
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        if matches!(self.launcher.try_wait(), Ok(None)) {
            signal_process(self.launcher.id(), nix::sys::signal::Signal::SIGTERM);
            let end = Instant::now() + PATIENCE;
            while matches!(self.launcher.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(10));
            }
            // Both fail only when it has ended.
            let _ = self.launcher.kill();
            let _ = self.launcher.wait();
        }
        let left = leftovers::find(self.site);
        leftovers::clear(self.site);
        if std::thread::panicking() {
            eprintln!("the daemon's log:\n{}", self.log());
            if !left.is_empty() {
                eprintln!("left behind: {left:#?}");
            }
        } else if !self.settled {
            assert!(left.is_empty(), "left behind: {left:#?}\n{}", self.log());
        }
    }
}

/// A sandboxed command that may wait on its stdin for as long as a test wants.
pub struct Held {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Held {
    /// Starts agentctl with these arguments.
    ///
    /// # Panics
    /// When it cannot be run.
    pub fn start(agentctl: &mut Command) -> Self {
        agentctl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = agentctl.spawn().expect("agentctl starts");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, stdout }
    }

    /// Reads its next line of stdout.
    ///
    /// # Panics
    /// When it cannot be read.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("a line of text");
        line.trim_end_matches('\n').to_owned()
    }

    /// Ends its stdin and waits for its end. What was read of its stdout already is not given again.
    ///
    /// # Panics
    /// When it cannot be awaited.
    pub fn let_go(mut self) -> Output {
        drop(self.child.stdin.take());
        // While the other stream is read, since a pipe that nobody reads fills up.
        let rest = std::thread::spawn(move || {
            let mut rest = Vec::new();
            self.stdout.read_to_end(&mut rest).map(|_| rest)
        });
        let output = self.child.wait_with_output().expect("agentctl ends");
        Output { stdout: rest.join().expect("a reader").expect("stdout can be read"), ..output }
    }

    /// Kills agentctl, as somebody does who no longer wants what it waits for.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn abandon(mut self) {
        self.child.kill().expect("agentctl can be killed");
        self.child.wait().expect("agentctl ends");
    }
}

/// Signals a process by its id.
///
/// # Panics
/// When it has gone.
pub fn signal_process(id: u32, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(id).expect("a process id"));
    nix::sys::signal::kill(pid, signal).unwrap_or_else(|error| panic!("{signal} to {id}: {error}"));
}

/// Kills a process and waits until it runs no more: a signal is on its way for a while, and its parent hears of the end only after it.
///
/// # Panics
/// When it has gone before, or does not go.
pub fn kill_process(id: u32) {
    signal_process(id, nix::sys::signal::Signal::SIGKILL);
    eventually(&format!("process {id} is dead"), PATIENCE, || !runs(id));
}

/// Whether a process is there and not a zombie.
#[must_use]
pub fn runs(id: u32) -> bool {
    fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z ") && !stat.contains(") X "))
}

/// Waits until something holds.
///
/// # Panics
/// When it does not hold in time.
pub fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < end, "not within {within:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Output as text, for messages.
pub fn shown(output: &Output) -> String {
    format!(
        "{}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// What a path holds, by name, in order: to prove that nothing else appeared.
///
/// # Panics
/// When it cannot be listed.
pub fn listing(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
