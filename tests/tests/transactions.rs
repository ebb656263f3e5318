//! A call changes its workspace completely or not at all, and exactly once: seen from outside, with real tools, and with
//! SIGKILL at any instant.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, listing, shown, signal_process};
use agentd_tests::http_client;
use agentd_tests::model_server::{Call, ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{leftovers, needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

fn requirements() -> Result<(), String> {
    requirement::root()?;
    requirement::program("/usr/bin/python3")?;
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    if groups.lines().any(|line| line.starts_with("users:x:100:")) {
        Ok(())
    } else {
        Err("there is no group `users`".to_owned())
    }
}

/// The owner of the workspaces: not root, so that owners and rights count.
const OWNER: u32 = 61_500;
/// A group that every Debian has, here the one whose members may use the daemon.
const GROUP: u32 = 100;

/// Everything that a tool can do to a tree, then an end of each kind.
const EDIT: &str = "
import shutil, signal
os.chdir('/workspace')
open('kept', 'a').write('more')
os.remove('removed')
shutil.rmtree('tree')
os.mkdir('tree')
open('tree/new', 'w').write('new')
os.rename('moved', 'elsewhere')
os.symlink('kept', 'link')
os.link('kept', 'second')
os.chmod('mode', 0o600)
os.mkdir('locked'); open('locked/inside', 'w').write('x'); os.chmod('locked', 0o000)
how = arguments['how']
if how == 'ok': reply({})
if how == 'own error':
    print(json.dumps({'protocol': 1, 'call_id': request['call_id'], 'ok': False, 'error': {'code': 'NO', 'message': 'no'}}))
    sys.exit(1)
if how == 'exception': raise ValueError('no')
if how == 'killed': os.kill(os.getpid(), signal.SIGKILL)
if how == 'hangs': time.sleep(1000)
if how == 'no reply': sys.exit(0)
if how == 'too large': reply({'text': 'x' * 10_000_000})
if how == 'leaves a child':
    if os.fork() == 0: time.sleep(1000)
    os.kill(os.getpid(), signal.SIGSEGV)
";

fn site() -> Site {
    let site = Site::new();
    let all = "{ \"*\" = [\"group:users\"] }";
    site.configure(&format!(
        "[service]\ngroup = \"users\"\n\n[access]\nadhoc = [\"group:users\"]\nagents = {all}\ntools = {all}\npolicies = {all}\n"
    ));
    site.python_tool(
        "edit",
        "[execution]\nmutates_workspace = true\n[timeout]\nafter = \"3s\"\n[breaker]\nwindow = 100\nmin_calls = 100",
        EDIT,
    );
    site
}

/// A workspace with something of every kind in it, its owner's.
fn filled(site: &Site, name: &str) -> PathBuf {
    let path = site.workspace(name, OWNER, GROUP);
    for file in ["kept", "removed", "moved", "mode"] {
        fs::write(path.join(file), format!("this is {file}")).unwrap();
    }
    for directory in ["tree", "tree/below", "empty"] {
        fs::create_dir(path.join(directory)).unwrap();
    }
    fs::write(path.join("tree/below/file"), "deep").unwrap();
    own(&path);
    path
}

fn own(path: &Path) {
    std::os::unix::fs::lchown(path, Some(OWNER), Some(GROUP)).unwrap();
    if path.symlink_metadata().unwrap().is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| own(&entry.unwrap().path()));
    }
}

fn digest(daemon: &Daemon<'_>, workspace: &Path) -> String {
    let output = daemon.agentctl(&["digest", workspace.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// What a tree holds, by path: mode, content, and the time of the last change to it.
fn contents(path: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>, i64)> {
    fn walk(top: &Path, at: &Path, found: &mut BTreeMap<PathBuf, (u32, Vec<u8>, i64)>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let content = if metadata.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            if metadata.is_dir() {
                walk(top, &path, found);
            }
            let below = path.strip_prefix(top).unwrap().to_owned();
            found.insert(below, (metadata.mode(), content, metadata.mtime_nsec()));
        }
    }
    let mut found = BTreeMap::new();
    walk(path, path, &mut found);
    found
}

/// A call as the workspace's owner; the reply.
fn call(daemon: &Daemon<'_>, tool: &str, arguments: &Value, workspace: &Path) -> Value {
    let arguments = arguments.to_string();
    let options = ["--json", "call", tool, "--args", &arguments, "--workspace", workspace.to_str().unwrap()];
    let output = daemon.agentctl_as(OWNER, GROUP, &options).output().unwrap();
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", shown(&output), daemon.log()))
}

/// The receipt of a call, by its reply.
fn receipt_of(daemon: &Daemon<'_>, reply: &Value) -> Value {
    let receipts = daemon.get(&format!("/v1/jobs/{}/receipts", reply["job_id"].as_str().unwrap())).json();
    predicate(&receipts["receipts"][0])
}

fn predicate(envelope: &Value) -> Value {
    let payload = envelope["payload"].as_str().unwrap();
    let statement = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    serde_json::from_slice::<Value>(&statement).unwrap()["predicate"].take()
}

fn paths(changes: &Value) -> Vec<&str> {
    changes.as_array().unwrap().iter().map(|change| change["path"].as_str().unwrap()).collect()
}

/// The layers that lie in a site's staging directory, whoever's they are, but for those of commits that are carried out, which
/// are the undo store.
fn layers(site: &Site) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for daemon in directories(&site.path("work/.agentd-staging")) {
        for workspace in directories(&daemon) {
            let layers = directories(&workspace.join("files")).into_iter();
            found.extend(layers.filter(|layer| !layer.join("journal.applied").exists()));
        }
    }
    found
}

fn directories(path: &Path) -> Vec<PathBuf> {
    fs::read_dir(path).map(|entries| entries.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
}

#[test]
fn a_call_that_does_not_end_well_changes_nothing() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, "w");
    let (before, held) = (digest(&daemon, &workspace), contents(&workspace));
    let ends = [
        ("own error", "TOOL_FAILED"),
        ("exception", "TOOL_CRASHED"),
        ("killed", "TOOL_CRASHED"),
        ("hangs", "TOOL_TIMEOUT"),
        ("no reply", "TOOL_PROTOCOL_ERROR"),
        ("too large", "RESPONSE_TOO_LARGE"),
        ("leaves a child", "TOOL_CRASHED"),
    ];
    for (how, code) in ends {
        let reply = call(&daemon, "edit", &json!({"how": how}), &workspace);
        assert_eq!(reply["error"]["code"], code, "{how}: {reply}\n{}", daemon.log());
        let receipt = receipt_of(&daemon, &reply);
        let change = &receipt["workspace"];
        assert_eq!(change["state"], "discarded", "{how}: {change}");
        assert_eq!((&change["before"], &change["after"]), (&json!(before), &json!(before)), "{how}");
        assert_eq!(change["created"], json!([]));
        assert_eq!(digest(&daemon, &workspace), before, "{how}");
        assert_eq!(contents(&workspace), held, "{how}");
        eventually("no layer", PATIENCE, || layers(&site).is_empty());
    }
    // The twin.
    let reply = call(&daemon, "edit", &json!({"how": "ok"}), &workspace);
    assert_eq!(reply["ok"], true, "{reply}");
    assert_ne!(digest(&daemon, &workspace), before);
    daemon.stop();
}

#[test]
fn a_call_that_ends_well_commits_what_it_changed_and_nothing_else() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, "w");
    let before = digest(&daemon, &workspace);
    let reply = call(&daemon, "edit", &json!({"how": "ok"}), &workspace);
    assert_eq!(reply["ok"], true, "{reply}\n{}", daemon.log());
    let receipt = receipt_of(&daemon, &reply);
    let change = &receipt["workspace"];
    assert_eq!(change["state"], "committed");
    assert_eq!((&change["before"], &change["after"]), (&json!(before), &json!(digest(&daemon, &workspace))));
    assert_eq!(paths(&change["created"]), ["elsewhere", "link", "locked", "locked/inside", "second", "tree/new"]);
    assert_eq!(paths(&change["modified"]), ["kept", "mode"]);
    assert_eq!(paths(&change["deleted"]), ["moved", "removed", "tree/below", "tree/below/file"]);

    assert_eq!(listing(&workspace), ["elsewhere", "empty", "kept", "link", "locked", "mode", "second", "tree"]);
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"this is keptmore");
    assert_eq!(fs::read(workspace.join("second")).unwrap(), b"this is keptmore");
    assert_eq!(listing(&workspace.join("tree")), ["new"]);
    assert_eq!(workspace.join("mode").metadata().unwrap().mode() & 0o7777, 0o600);
    assert_eq!(workspace.join("locked").metadata().unwrap().mode() & 0o7777, 0);
    for name in listing(&workspace) {
        let metadata = workspace.join(&name).symlink_metadata().unwrap();
        assert_eq!((metadata.uid(), metadata.gid()), (OWNER, GROUP), "{name}");
    }
    eventually("no layer", PATIENCE, || layers(&site).is_empty());
    daemon.stop();
}

#[test]
fn a_command_commits_by_its_status() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, "w");
    let run = |options: &[&str], script: &str| {
        let mut arguments = vec!["exec", "--policy", "workspace", "--workspace", workspace.to_str().unwrap()];
        arguments.extend(options);
        arguments.extend(["--", "sh", "-c", script]);
        let output = daemon.agentctl_as(OWNER, GROUP, &arguments).output().unwrap();
        output.status.code().unwrap()
    };
    let before = digest(&daemon, &workspace);
    assert_eq!(run(&[], "echo x > made; rm kept; exit 3"), 3);
    assert_eq!(digest(&daemon, &workspace), before);
    assert_eq!(run(&["--keep"], "echo x > made; kill -9 $$"), 137);
    assert_eq!(run(&["--keep", "--timeout", "1s"], "echo x > made; sleep 100"), 124);
    assert_eq!(digest(&daemon, &workspace), before);
    assert_eq!(run(&["--keep"], "echo x > made; exit 3"), 3);
    assert_eq!(fs::read(workspace.join("made")).unwrap(), b"x\n");
    assert_eq!(run(&[], "rm made; echo y > kept"), 0);
    assert!(!workspace.join("made").exists());
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"y\n");
    daemon.stop();
}

#[test]
fn calls_that_only_read_run_together_and_see_one_state() {
    needs!(requirements());
    let look = |name: &str| Call::new("look", json!({"name": name}));
    let server = ModelServer::start(Script::of([
        Turn::calls((0..4).map(|number| look(&number.to_string())).collect()),
        Turn::text("{}").expecting("\"writable\":false"),
    ]))
    .unwrap();
    let site = site();
    let body = "
def seen(): return sorted((name, open('/workspace/' + name).read()) for name in os.listdir('/workspace') if os.path.isfile('/workspace/' + name))
first = seen()
time.sleep(0.5)
try:
    open('/workspace/kept', 'w'); writable = True
except OSError: writable = False
reply({'files': len(first), 'same': first == seen(), 'writable': writable})";
    site.python_tool("look", "[execution]\nread_only = true", body);
    site.agent("reader", &server.base_url(), &["look"], "");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    for number in 0..5 {
        fs::write(workspace.join(format!("kept{number}")), "x").unwrap();
    }
    fs::write(workspace.join("kept"), "x").unwrap();
    let id = daemon.submit(&json!({"version": 1, "agent": "reader", "goal": {}, "workspace": workspace}));
    let result = daemon.result(&id);
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    let receipts = daemon.get(&format!("/v1/jobs/{id}/receipts")).json();
    let receipts: Vec<Value> = receipts["receipts"].as_array().unwrap().iter().map(predicate).collect();
    let calls: Vec<&Value> = receipts.iter().filter(|receipt| receipt["tool"].is_object()).collect();
    assert_eq!(calls.len(), 4);
    let starts = calls.iter().map(|call| call["started"].as_str().unwrap().to_owned()).max().unwrap();
    let ends = calls.iter().map(|call| call["ended"].as_str().unwrap().to_owned()).min().unwrap();
    assert!(starts < ends, "they ran one after the other: {calls:#?}");
    for call in calls {
        assert_eq!(call["workspace"]["state"], "read_only");
        assert_eq!(call["workspace"]["before"], call["workspace"]["after"]);
    }
    daemon.stop();
}

#[test]
fn an_edit_from_outside_meanwhile_is_a_conflict_and_stays() {
    needs!(requirements());
    let site = site();
    let body = "
open('/workspace/kept', 'w').write('of the call')
open('/workspace/other', 'w').write('of the call')
time.sleep(5)
reply({})";
    site.python_tool("wait", "[execution]\nmutates_workspace = true\n[timeout]\nafter = \"60s\"", body);
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, "w");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&daemon, "wait", &json!({}), &workspace));
        eventually("a layer", PATIENCE, || !layers(&site).is_empty());
        // A file that the call has written as well, while it runs.
        eventually("the call's version", PATIENCE, || {
            layers(&site)
                .iter()
                .any(|layer| fs::read(layer.join("upper/other")).is_ok_and(|text| text == b"of the call"))
        });
        fs::write(workspace.join("kept"), "of the user").unwrap();
        let reply = waiting.join().unwrap();
        assert_eq!(reply["error"]["code"], "WORKSPACE_CONFLICT", "{reply}\n{}", daemon.log());
        let receipt = receipt_of(&daemon, &reply);
        assert_eq!(receipt["workspace"]["state"], "conflict");
        assert_eq!(receipt["outcome"]["code"], "WORKSPACE_CONFLICT");
        assert!(receipt["denied"].to_string().contains("kept"), "{receipt}");
        assert!(reply["error"].to_string().contains("kept"), "{reply}");
    });
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"of the user");
    assert!(!workspace.join("other").exists());
    daemon.stop();
}

/// Moves a whole workspace from one number to the next: every file says the number, so that a mix of two states shows; the
/// log has one file per step, so that a step that is taken twice shows.
const STEP: &str = "
os.chdir('/workspace')
def read(name):
    try: return open(name).read()
    except FileNotFoundError: return '0'
number = int(read('number'))
names = ['number', 'a', 'b/c', 'b/d/e'] + ['many/%d' % one for one in range(20)]
seen = {name: read(name) for name in names}
log = sorted(int(name) for name in os.listdir('log')) if os.path.isdir('log') else []
if set(seen.values()) != {str(number)} or log != list(range(1, number + 1)):
    print(json.dumps({'protocol': 1, 'call_id': request['call_id'], 'ok': False, 'error': {'code': 'MIXED', 'message': repr((seen, log))}}))
    sys.exit(1)
number += 1
import shutil
shutil.rmtree('b', ignore_errors=True)
if os.path.exists('many') and number % 2: shutil.rmtree('many')
for directory in ['b', 'b/d', 'many', 'log']: os.makedirs(directory, exist_ok=True)
for name in names: open(name, 'w').write(str(number))
open('log/%d' % number, 'w').write('x')
reply({'number': number})";

/// Whether a workspace is at one step of [`STEP`] and no other; which.
fn step_of(workspace: &Path) -> u64 {
    let read = |name: &str| match fs::read_to_string(workspace.join(name)) {
        Ok(text) => text.parse::<u64>().unwrap(),
        Err(_) => 0,
    };
    let number = read("number");
    let names = ["a", "b/c", "b/d/e"].map(str::to_owned).into_iter();
    for name in names.chain((0..20).map(|one| format!("many/{one}"))) {
        assert_eq!(read(&name), number, "{name} is of another state than `number`");
    }
    let log = if number == 0 { Vec::new() } else { listing(&workspace.join("log")) };
    let mut log: Vec<u64> = log.iter().map(|name| name.parse().unwrap()).collect();
    log.sort_unstable();
    assert_eq!(log, (1..=number).collect::<Vec<_>>(), "a step is missing or was taken twice");
    number
}

/// A generator of instants that a seed repeats.
struct Instants(u64);

impl Instants {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The digests after each commit in a workspace that the ledger has, in the order of their ends.
fn commits(daemon: &Daemon<'_>, workspace: &Path, known: &mut BTreeMap<String, Vec<(String, String)>>) -> Vec<String> {
    let mut page = "/v1/jobs?limit=200".to_owned();
    let mut all = BTreeSet::new();
    loop {
        let jobs = daemon.get(&page).json();
        for job in jobs["jobs"].as_array().unwrap() {
            if job["workspace"] == json!(workspace) {
                let id = job["job_id"].as_str().unwrap().to_owned();
                all.insert(id.clone());
                if known.contains_key(&id) && job["state"] == "done" {
                    continue;
                }
                let receipts = daemon.get(&format!("/v1/jobs/{id}/receipts")).json();
                let receipts = receipts["receipts"].as_array().unwrap().iter().map(predicate);
                let committed = receipts.filter(|receipt| receipt["workspace"]["state"] == "committed");
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                let ends = committed.map(|one| (text(&one["ended"]), text(&one["workspace"]["after"]))).collect();
                known.insert(id, ends);
            }
        }
        match jobs["next"].as_str() {
            Some(next) => page = format!("/v1/jobs?limit=200&before={next}"),
            None => break,
        }
    }
    let mut ends: Vec<&(String, String)> = known.values().flatten().collect();
    ends.sort();
    ends.into_iter().map(|(_, after)| after.clone()).collect()
}

const KILLS: u64 = 66;

#[test]
fn a_kill_at_any_instant_leaves_the_state_that_the_ledger_knows() {
    needs!(requirements());
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    let seed = std::env::var("AGENTD_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(clock);
    eprintln!("AGENTD_TEST_SEED={seed}");
    let mut instants = Instants(seed);
    let server = ModelServer::start(Script::of([])).unwrap();
    let site = Site::new();
    site.python_tool("step", "[execution]\nmutates_workspace = true", STEP);
    let budget = "[budget]\nmax_turns = 5000\nmax_tool_calls = 5000\nwall_seconds = 3000\n\n[loop]\nmode = \"warn\"\n";
    site.agent("walker", &server.base_url(), &["step"], budget);
    let (of_job, of_calls) = (site.workspace("job", 0, 0), site.workspace("calls", 0, 0));
    let mut job = None;
    let mut known = BTreeMap::new();
    let mut killed: BTreeMap<&str, u64> = BTreeMap::new();
    for round in 0..=KILLS {
        while server.turns_left() < 20 {
            server.push(Turn::call("step", json!({})));
        }
        let mut daemon = Daemon::start(&site);
        // What lies in the workspace of direct calls, which nobody uses now, is what the ledger says.
        let ledger = commits(&daemon, &of_calls, &mut known);
        assert_eq!(step_of(&of_calls), ledger.len() as u64, "round {round}: {}", daemon.log());
        if let Some(last) = ledger.last() {
            assert_eq!(&digest(&daemon, &of_calls), last, "round {round}");
        }
        // A workspace's staging directory bears its inode's number.
        let id = of_calls.metadata().map(|found| format!("/{}/files/", found.ino())).unwrap();
        eventually("no layer of a direct call", PATIENCE, || {
            !layers(&site).iter().any(|layer| layer.to_str().unwrap().contains(&id))
        });
        let job = job.get_or_insert_with(|| {
            daemon.submit(&json!({"version": 1, "agent": "walker", "goal": {}, "workspace": of_job}))
        });
        if round == KILLS {
            assert_eq!(daemon.post(&format!("/v1/jobs/{job}/cancel"), &json!({})).status, 200);
            let result = daemon.result(job);
            assert_eq!(result["termination_reason"], "cancelled", "{result}\n{}", daemon.log());
            let mut known = BTreeMap::new();
            let ledger = commits(&daemon, &of_job, &mut known);
            assert_eq!(step_of(&of_job), ledger.len() as u64);
            assert_eq!(Some(&digest(&daemon, &of_job)), ledger.last());
            eprintln!("{killed:?}: {} steps of the job, {} of calls", ledger.len(), step_of(&of_calls));
            assert!(ledger.len() as u64 > KILLS / 3, "the job hardly moved: {}", daemon.log());
            assert!(!daemon.log().contains("MIXED"), "{}", daemon.log());
            eventually("no layer", PATIENCE, || layers(&site).is_empty());
            daemon.stop();
            return;
        }
        let (agentd, launcher) = (daemon.agentd_pid(), daemon.launcher_pid());
        let wait = Duration::from_micros(instants.below(600_000));
        let victims: &[u32] = match instants.below(3) {
            0 => &[agentd],
            1 => &[launcher],
            _ => &[agentd, launcher],
        };
        let name = match victims {
            [one] if *one == agentd => "agentd",
            [_] => "launcher",
            _ => "both",
        };
        *killed.entry(name).or_default() += 1;
        let stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let body = json!({"version": 1, "tool": "step", "arguments": {}, "workspace": of_calls}).to_string();
                while !stopped.load(Ordering::Relaxed) {
                    // It breaks off when the daemon does.
                    let Ok(stream) = std::os::unix::net::UnixStream::connect(daemon.socket()) else { return };
                    let headers = [("content-type", "application/json")];
                    let Ok(reply) = http_client::send(stream, "POST", "/v1/calls", &headers, body.as_bytes()) else {
                        return;
                    };
                    let Ok(reply) = reply.finish() else { return };
                    let text = reply.text();
                    assert!(!text.contains("MIXED"), "{text}");
                }
            });
            std::thread::sleep(wait);
            victims.iter().for_each(|victim| signal_process(*victim, Signal::SIGKILL));
            stopped.store(true, Ordering::Relaxed);
        });
        daemon.wait_for_end(PATIENCE);
        daemon.leave_to_the_test();
        eventually("the end of every process", PATIENCE, || leftovers::site_processes(&site).is_empty());
        drop(daemon);
    }
}
