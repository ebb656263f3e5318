//! What comes between a call's receipt and its commit: its changes are not taken over, a further receipt says so, and both
//! versions are kept.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, listing, shown};
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
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

/// The owner of the workspaces: not root, so that what is kept for it must be within its reach.
const OWNER: u32 = 61_500;
/// The group whose members may use the daemon.
const GROUP: u32 = 100;

/// Writes two files once it is told to.
const WRITE: &str = "
os.chdir('/workspace')
while open('signal').read() != 'go': time.sleep(0.02)
open('kept', 'w').write('of the call')
open('other', 'w').write('of the call')
reply({})";

fn site() -> Site {
    let site = Site::new();
    let all = "{ \"*\" = [\"group:users\"] }";
    site.configure(&format!(
        "[service]\ngroup = \"users\"\n\n[access]\nadhoc = [\"group:users\"]\nagents = {all}\ntools = {all}\npolicies = {all}\n"
    ));
    site.python_tool("write", "[execution]\nmutates_workspace = true\n[timeout]\nafter = \"100s\"", WRITE);
    site
}

fn filled(site: &Site, owner: u32) -> PathBuf {
    let path = site.workspace("w", owner, GROUP);
    for (name, text) in [("kept", "at first"), ("signal", "wait")] {
        fs::write(path.join(name), text).unwrap();
        std::os::unix::fs::chown(path.join(name), Some(owner), Some(GROUP)).unwrap();
    }
    path
}

/// Keeps the ledger from storing anything: what is prepared meanwhile is not decided.
struct HeldLedger(Child);

impl HeldLedger {
    fn hold(site: &Site) -> Self {
        let script = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60); \
                      c.execute('BEGIN IMMEDIATE'); print('held', flush=True); sys.stdin.read(); c.execute('ROLLBACK')";
        let mut python = Command::new("/usr/bin/python3")
            .args(["-c", script])
            .arg(site.path("state/ledger/ledger.sqlite"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(python.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "held\n");
        Self(python)
    }

    fn release(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}

/// Whether a commit, or with this name a rollback, is prepared and not carried out.
fn is_prepared(site: &Site, name: &str) -> bool {
    is_below(&site.path("work/.agentd-staging"), name)
}

fn is_below(staging: &Path, name: &str) -> bool {
    let found = Command::new("/usr/bin/find").arg(staging).args(["-name", name]).output().unwrap();
    !found.stdout.is_empty()
}

fn receipts(daemon: &Daemon<'_>, job: &str) -> Vec<Value> {
    let receipts = daemon.get(&format!("/v1/jobs/{job}/receipts")).json();
    let predicate = |envelope: &Value| {
        let statement = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
        serde_json::from_slice::<Value>(&statement).unwrap()["predicate"].take()
    };
    receipts["receipts"].as_array().unwrap().iter().map(predicate).collect()
}

/// The bundle of a job holds in itself.
fn assert_verified(daemon: &Daemon<'_>, site: &Site, job: &str) {
    let bundle = site.path("bundle");
    let output = daemon.agentctl(&["receipts", job, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let output = daemon.agentctl(&["verify", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    // The twin: without the promise, the receipt that takes it back has nothing to take back.
    let text = fs::read_to_string(&bundle).unwrap();
    let is_withdrawal = |line: &&str| {
        let envelope: Value = serde_json::from_str(line).unwrap();
        let payload = data_encoding::BASE64.decode(envelope["payload"].as_str().unwrap().as_bytes()).unwrap();
        String::from_utf8(payload).unwrap().contains("\"withdraws\"")
    };
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(is_withdrawal).expect("a receipt that takes one back");
    let without: Vec<&str> =
        lines.iter().enumerate().filter(|(index, _)| *index + 1 != at).map(|(_, line)| *line).collect();
    fs::write(&bundle, without.join("\n")).unwrap();
    let output = daemon.agentctl(&["--json", "verify", bundle.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", shown(&output));
    assert!(String::from_utf8_lossy(&output.stdout).contains("bad_withdrawal"), "{}", shown(&output));
}

/// What the workspace's owner reads.
fn read_as_owner(path: &Path) -> String {
    let output = Command::new("/usr/bin/cat").arg(path).uid(OWNER).gid(GROUP).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_late_conflict_of_a_direct_call_takes_its_receipt_back_and_keeps_both_versions() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, OWNER);
    let options = ["--json", "call", "write", "--args", "{}", "--workspace", workspace.to_str().unwrap()];
    let mut agentctl = daemon.agentctl_as(OWNER, GROUP, &options);
    let output = std::thread::scope(|scope| {
        let calling = scope.spawn(move || agentctl.output().unwrap());
        eventually("the call", PATIENCE, || is_prepared(&site, "upper"));
        let held = HeldLedger::hold(&site);
        fs::write(workspace.join("signal"), "go").unwrap();
        eventually("a prepared commit", PATIENCE, || is_prepared(&site, "journal"));
        fs::write(workspace.join("kept"), "of the user").unwrap();
        held.release();
        calling.join().unwrap()
    });
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(&output)));
    assert_eq!(reply["error"]["code"], "WORKSPACE_CONFLICT", "{reply}\n{}", daemon.log());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(fs::read_to_string(workspace.join("kept")).unwrap(), "of the user");
    assert!(!workspace.join("other").exists());
    let kept = PathBuf::from(reply["error"]["details"]["kept"].as_str().unwrap_or_else(|| panic!("{reply}")));
    assert!(reply["error"]["message"].as_str().unwrap().contains(kept.to_str().unwrap()), "{reply}");
    assert_eq!(read_as_owner(&kept.join("upper/kept")), "of the call");
    assert_eq!(read_as_owner(&kept.join("upper/other")), "of the call");

    let job = reply["job_id"].as_str().unwrap();
    let told = receipts(&daemon, job);
    let [promise, withdrawal, seal] = told.as_slice() else { panic!("{told:#?}") };
    assert_eq!((&promise["workspace"]["state"], &promise["call_id"]), (&json!("committed"), &reply["call_id"]));
    assert_eq!((&withdrawal["workspace"]["state"], &withdrawal["withdraws"]), (&json!("conflict"), &reply["call_id"]));
    assert_eq!(withdrawal["workspace"]["after"], promise["workspace"]["before"]);
    assert_eq!(withdrawal["outcome"]["code"], "WORKSPACE_CONFLICT");
    assert!(withdrawal["denied"].to_string().contains("kept"), "{withdrawal}");
    assert_eq!((&withdrawal["sequence"], &seal["count"]), (&json!(2), &json!(2)));
    assert_verified(&daemon, &site, job);

    // Nothing of it comes back, and the next call works.
    daemon.stop();
    let daemon = Daemon::start(&site);
    assert_eq!(fs::read_to_string(workspace.join("kept")).unwrap(), "of the user");
    let output = daemon.agentctl_as(OWNER, GROUP, &options).output().unwrap();
    assert!(output.status.success(), "{}\n{}", shown(&output), daemon.log());
    assert_eq!(fs::read_to_string(workspace.join("kept")).unwrap(), "of the call");
    daemon.stop();
}

#[test]
fn a_job_goes_on_after_a_late_conflict_and_its_model_is_told() {
    needs!(requirements());
    let script = Script::of([
        Turn::call("write", json!({})),
        Turn::call("write", json!({})).expecting("WORKSPACE_CONFLICT"),
        Turn::text(json!({"done": true}).to_string()),
    ]);
    let server = ModelServer::start(script).unwrap();
    let site = site();
    site.agent("writer", &server.base_url(), &["write"], "");
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, 0);
    let job = daemon.submit(&json!({"version": 1, "agent": "writer", "goal": {}, "workspace": workspace}));
    eventually("the call", PATIENCE, || is_prepared(&site, "upper"));
    let held = HeldLedger::hold(&site);
    fs::write(workspace.join("signal"), "go").unwrap();
    eventually("a prepared commit", PATIENCE, || is_prepared(&site, "journal"));
    fs::write(workspace.join("kept"), "of the user").unwrap();
    held.release();
    let result = daemon.result(&job);
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    assert_eq!(result["receipts"]["count"], 3, "{result}");
    let told = receipts(&daemon, &job);
    let states: Vec<&Value> = told.iter().filter_map(|receipt| receipt["workspace"].get("state")).collect();
    assert_eq!(states, ["committed", "conflict", "committed"]);
    // What the user wrote is nobody's that the job knows.
    let unattributed = told[2]["workspace"]["unattributed"].to_string();
    assert!(unattributed.contains("\"kept\"") && unattributed.contains("\"signal\""), "{unattributed}");
    assert_eq!(fs::read_to_string(workspace.join("other")).unwrap(), "of the call");
    assert_verified(&daemon, &site, &job);
    daemon.stop();
}

#[test]
fn a_late_conflict_of_a_rollback_takes_its_receipt_back() {
    needs!(requirements());
    conflict_of_a_rollback("gone", &|workspace| fs::write(workspace.join("gone"), "of the user").unwrap());
}

#[test]
fn a_file_put_in_place_of_one_that_a_rollback_moves_is_a_conflict_at_once() {
    needs!(requirements());
    conflict_of_a_rollback("kept", &|workspace| {
        fs::write(workspace.join("new"), "of the user").unwrap();
        fs::rename(workspace.join("new"), workspace.join("kept")).unwrap();
    });
}

/// Somebody writes a file between a rollback's receipt and the rollback.
fn conflict_of_a_rollback(name: &str, write: &dyn Fn(&Path)) {
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site, 0);
    fs::write(workspace.join("gone"), "at first").unwrap();
    let options = ["--policy", "workspace", "--workspace", workspace.to_str().unwrap()];
    let output = daemon.exec(&options, &["sh", "-c", "echo x > kept; echo y > made; rm gone"], b"");
    assert!(output.status.success(), "{}", shown(&output));
    let newest = || daemon.get("/v1/jobs?limit=1").json()["jobs"][0]["job_id"].as_str().unwrap().to_owned();
    let job = newest();
    let output = std::thread::scope(|scope| {
        let mut held = None;
        let mut agentctl = daemon.agentctl(&["--json", "rollback", &job, "--to", "0"]);
        // The rollback's own job is stored before the ledger can be held: it waits for the workspace, which is held.
        let holder = fs::File::open(&workspace).unwrap();
        rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let rolling = scope.spawn(move || agentctl.output().unwrap());
        eventually("the rollback's job", PATIENCE, || newest() != job);
        held.replace(HeldLedger::hold(&site));
        drop(holder);
        eventually("a prepared rollback", PATIENCE, || is_prepared(&site, "rollback"));
        write(&workspace);
        held.take().unwrap().release();
        rolling.join().unwrap()
    });
    let problem: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(&output)));
    assert_eq!(problem["code"], "WORKSPACE_CONFLICT", "{problem}\n{}", daemon.log());
    let assert_unmoved = || {
        for (file, after_the_call) in [("kept", Some("x\n")), ("made", Some("y\n")), ("gone", None)] {
            let expected = if file == name { Some("of the user") } else { after_the_call };
            assert_eq!(fs::read_to_string(workspace.join(file)).ok().as_deref(), expected, "{file}");
        }
    };
    assert_unmoved();
    let rollback = newest();
    let told = receipts(&daemon, &rollback);
    let states: Vec<&Value> = told.iter().filter_map(|receipt| receipt["workspace"].get("state")).collect();
    assert_eq!(states, ["rolled_back", "conflict"]);
    assert_verified(&daemon, &site, &rollback);
    daemon.stop();

    // It is over: nothing is tried again, and another rollback is refused for the same file.
    let daemon = Daemon::start(&site);
    assert_unmoved();
    let output = daemon.agentctl(&["--json", "rollback", &job, "--to", "0"]).output().unwrap();
    let problem: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(&output)));
    assert_eq!(problem["code"], "WORKSPACE_CONFLICT", "{problem}\n{}", daemon.log());
    assert_unmoved();
    daemon.stop();
}

/// A small disk of its own with blocks of 1 KiB, unmounted when this goes.
struct Disk(PathBuf);

impl Disk {
    fn mounted(site: &Site, place: &Path) -> Self {
        let image = site.path("disk");
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let run = |command: &mut Command| {
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", shown(&output));
        };
        run(Command::new("/usr/sbin/mkfs.ext4").args(["-q", "-b", "1024", "-m", "0"]).arg(&image));
        run(Command::new("/usr/bin/mount").args(["-o", "loop"]).arg(&image).arg(place));
        Self(place.to_owned())
    }

    /// Takes every free block.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        for size in [64 << 10, 1 << 10] {
            while file.write_all(&vec![b'x'; size]).and_then(|()| file.sync_data()).is_ok() {}
        }
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH).expect("it is mounted");
    }
}

fn loop_devices() -> Result<(), String> {
    requirement::program("/usr/sbin/mkfs.ext4")?;
    let output = Command::new("/usr/sbin/losetup").arg("--find").output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(format!("no loop device: {}", shown(&output))) }
}

#[test]
fn a_disk_that_is_full_in_the_commit_ends_in_the_old_state() {
    needs!(requirements(), loop_devices());
    let site = site();
    // Names so long that the workspace's directory needs further blocks for them.
    let many = "
os.chdir('/workspace')
while open('signal').read() != 'go': time.sleep(0.02)
open('kept', 'w').write('of the call')
for number in range(60): open('%03d' % number + 'x' * 200, 'w').close()
reply({})";
    site.python_tool("many", "[execution]\nmutates_workspace = true\n[timeout]\nafter = \"100s\"", many);
    let place = site.path("work/disk");
    fs::create_dir(&place).unwrap();
    let disk = Disk::mounted(&site, &place);
    let workspace = place.join("w");
    fs::create_dir(&workspace).unwrap();
    for (name, text) in [("kept", "at first"), ("signal", "wait")] {
        fs::write(workspace.join(name), text).unwrap();
    }
    let daemon = Daemon::start(&site);
    let options = ["--json", "call", "many", "--args", "{}", "--workspace", workspace.to_str().unwrap()];
    let call = || daemon.agentctl(&options).output().unwrap();
    let (output, filler) = std::thread::scope(|scope| {
        let calling = scope.spawn(call);
        eventually("the call", PATIENCE, || is_below(&place.join(".agentd-staging"), "upper"));
        let held = HeldLedger::hold(&site);
        fs::write(workspace.join("signal"), "go").unwrap();
        eventually("a prepared commit", PATIENCE, || is_below(&place.join(".agentd-staging"), "journal"));
        let filler = disk.fill();
        held.release();
        (calling.join().unwrap(), filler)
    });
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", shown(&output)));
    assert_eq!(reply["error"]["code"], "DISK_FULL", "{reply}\n{}", daemon.log());
    assert_eq!(listing(&workspace), ["kept", "signal"]);
    assert_eq!(fs::read_to_string(workspace.join("kept")).unwrap(), "at first");
    let job = reply["job_id"].as_str().unwrap();
    let told = receipts(&daemon, job);
    let states: Vec<&Value> = told.iter().filter_map(|receipt| receipt["workspace"].get("state")).collect();
    assert_eq!(states, ["committed", "discarded"]);
    assert_eq!(told[1]["outcome"]["code"], "DISK_FULL");
    assert_verified(&daemon, &site, job);
    // The twin, with room.
    fs::remove_file(filler).unwrap();
    let output = call();
    assert!(output.status.success(), "{}\n{}", shown(&output), daemon.log());
    assert_eq!(listing(&workspace).len(), 62);
    let mut daemon = daemon;
    daemon.signal_launcher(nix::sys::signal::Signal::SIGTERM);
    daemon.wait_for_end(PATIENCE);
    drop(disk);
    drop(daemon);
}
