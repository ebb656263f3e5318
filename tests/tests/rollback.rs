//! Going back to what a receipt left, and forth again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agentd_tests::daemon::{Daemon, PATIENCE, eventually, listing, shown, signal_process};
use agentd_tests::site::Site;
use agentd_tests::{leftovers, needs, requirement};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// Runs a command that ends well; the id of its job.
fn run(daemon: &Daemon<'_>, workspace: &Path, script: &str) -> String {
    let options = ["--policy", "workspace", "--workspace", workspace.to_str().unwrap()];
    let output = daemon.exec(&options, &["sh", "-c", script], b"");
    assert_eq!(output.status.code(), Some(0), "{script}: {}\n{}", shown(&output), daemon.log());
    newest(daemon)
}

fn newest(daemon: &Daemon<'_>) -> String {
    daemon.get("/v1/jobs?limit=1").json()["jobs"][0]["job_id"].as_str().unwrap().to_owned()
}

fn rollback(daemon: &Daemon<'_>, job: &str, to: u64) -> Output {
    daemon.agentctl(&["--json", "rollback", job, "--to", &to.to_string()]).output().unwrap()
}

/// A rollback that is done; the id of its own job.
fn back(daemon: &Daemon<'_>, job: &str, to: u64) -> String {
    let output = rollback(daemon, job, to);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["job_id"].as_str().unwrap().to_owned()
}

fn refused(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(2), "{}", shown(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", shown(output)))
}

fn digest(daemon: &Daemon<'_>, workspace: &Path) -> String {
    let output = daemon.agentctl(&["digest", workspace.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn receipt(daemon: &Daemon<'_>, job: &str) -> Value {
    let receipts = daemon.get(&format!("/v1/jobs/{job}/receipts")).json();
    let payload = receipts["receipts"][0]["payload"].as_str().unwrap();
    let statement = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
    serde_json::from_slice::<Value>(&statement).unwrap()["predicate"].take()
}

/// A workspace with something of every kind.
fn filled(site: &Site) -> PathBuf {
    let path = site.workspace("w", 0, 0);
    for file in ["kept", "changed", "removed", "moved"] {
        fs::write(path.join(file), format!("this is {file}")).unwrap();
    }
    fs::create_dir_all(path.join("tree/below")).unwrap();
    fs::write(path.join("tree/below/file"), "deep").unwrap();
    path
}

const FIRST: &str =
    "echo one >> changed; rm removed; mv moved elsewhere; rm -r tree; echo a file > tree; ln -s kept link";
const SECOND: &str =
    "echo two >> changed; rm tree; mkdir -p tree/new; echo x > tree/new/y; chmod 600 kept; mkdir shut; chmod 0 shut";
const THIRD: &str = "rm -r tree link changed; mkdir changed; echo three > changed/in";

#[test]
fn a_workspace_goes_back_to_any_receipt_and_forth_again() {
    needs!(requirement::root());
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = filled(&site);
    let mut states = vec![digest(&daemon, &workspace)];
    let mut jobs = Vec::new();
    for script in [FIRST, SECOND, THIRD] {
        jobs.push(run(&daemon, &workspace, script));
        states.push(digest(&daemon, &workspace));
    }
    let one = back(&daemon, &jobs[2], 0);
    assert_eq!(digest(&daemon, &workspace), states[2]);
    let told = receipt(&daemon, &one);
    assert_eq!((&told["workspace"]["state"], &told["tool"]["name"]), (&json!("rolled_back"), &json!("rollback")));
    assert_eq!((&told["workspace"]["before"], &told["workspace"]["after"]), (&json!(states[3]), &json!(states[2])));
    assert!(told["workspace"]["deleted"].to_string().contains("changed/in"), "{told}");
    // Forth again: by undoing the rollback, or to the receipt itself.
    let two = back(&daemon, &one, 0);
    assert_eq!(digest(&daemon, &workspace), states[3]);
    back(&daemon, &two, 0);
    assert_eq!(digest(&daemon, &workspace), states[2]);
    back(&daemon, &jobs[2], 1);
    assert_eq!(digest(&daemon, &workspace), states[3]);
    // Over several receipts at once, after a restart, and with a file of somebody else's in between.
    daemon.stop();
    let daemon = Daemon::start(&site);
    let all = back(&daemon, &jobs[0], 0);
    assert_eq!(digest(&daemon, &workspace), states[0]);
    back(&daemon, &jobs[1], 1);
    assert_eq!(digest(&daemon, &workspace), states[2]);
    back(&daemon, &jobs[0], 1);
    assert_eq!(digest(&daemon, &workspace), states[1]);
    fs::write(workspace.join("theirs"), "x").unwrap();
    back(&daemon, &jobs[0], 0);
    fs::remove_file(workspace.join("theirs")).unwrap();
    assert_eq!(digest(&daemon, &workspace), states[0]);
    let told = receipt(&daemon, &newest(&daemon));
    assert!(!told["workspace"]["deleted"].to_string().contains("theirs"), "{told}");
    // Once something else is committed, the way forth is gone, and says so.
    run(&daemon, &workspace, "echo other > other");
    let problem = refused(&rollback(&daemon, &jobs[1], 1));
    assert_eq!(problem["code"], "UNDO_UNAVAILABLE", "{problem}");
    drop(all);
    // Its bundle is as good as any other's.
    let bundle = site.path("bundle");
    let output = daemon.agentctl(&["receipts", &one, "--bundle", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    let output = daemon.agentctl(&["verify", bundle.to_str().unwrap()]).output().unwrap();
    assert!(output.status.success(), "{}", shown(&output));
    daemon.stop();
}

#[test]
fn what_others_changed_or_nobody_keeps_is_not_rolled_back() {
    needs!(requirement::root());
    let site = Site::new();
    let file = site.path("config/agentd.toml");
    let text = fs::read_to_string(&file).unwrap().replace("[workspace]\n", "[workspace]\nundo_bytes = \"4KiB\"\n");
    site.write("config/agentd.toml", text.as_bytes());
    let daemon = Daemon::start(&site);
    let workspace = filled(&site);
    let job = run(&daemon, &workspace, FIRST);
    let expect = |code: &str, words: &str, job: &str, to: u64| {
        let before = digest(&daemon, &workspace);
        let problem = refused(&rollback(&daemon, job, to));
        assert_eq!(problem["code"], code, "{problem}");
        assert!(problem["detail"].as_str().unwrap().contains(words), "{problem}");
        assert_eq!(digest(&daemon, &workspace), before);
    };
    // Somebody has edited what would be replaced; has put something where a file would return, or into what would go.
    let edited = fs::read(workspace.join("changed")).unwrap();
    fs::write(workspace.join("changed"), "theirs").unwrap();
    expect("WORKSPACE_CONFLICT", "changed", &job, 0);
    fs::write(workspace.join("changed"), &edited).unwrap();
    fs::write(workspace.join("removed"), "theirs").unwrap();
    expect("WORKSPACE_CONFLICT", "removed", &job, 0);
    fs::remove_file(workspace.join("removed")).unwrap();
    let second = run(&daemon, &workspace, "mkdir -p made/deep; echo x > made/deep/x");
    fs::write(workspace.join("made/deep/theirs"), "x").unwrap();
    expect("WORKSPACE_CONFLICT", "theirs", &second, 0);
    fs::remove_file(workspace.join("made/deep/theirs")).unwrap();
    back(&daemon, &second, 0);
    assert!(!workspace.join("made").exists());
    expect("INPUT_INVALID", "no receipt 7", &job, 7);
    let idle = run(&daemon, &workspace, "true");
    let before = digest(&daemon, &workspace);
    back(&daemon, &idle, 0);
    assert_eq!(digest(&daemon, &workspace), before, "a call that changed nothing has nothing to take back");
    // What was replaced takes more than is kept.
    fs::write(workspace.join("large"), vec![b'x'; 10_000]).unwrap();
    let large = run(&daemon, &workspace, "echo small > large");
    expect("UNDO_UNAVAILABLE", "undo_bytes", &large, 0);
    daemon.stop();
}

#[test]
fn a_repository_and_a_database_are_whole_after_commit_and_rollback() {
    needs!(requirement::root(), requirement::program("/usr/bin/git"), requirement::program("/usr/bin/python3"));
    let site = Site::new();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    let identity = "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b; ";
    // The database stays open in WAL mode, so that -wal and -shm are there when the call ends.
    let database = |rows: u32| {
        format!(
            "python3 -c \"import os, sqlite3; c = sqlite3.connect('d.sqlite'); c.execute('PRAGMA journal_mode=WAL'); \
             c.execute('CREATE TABLE IF NOT EXISTS t (n)'); [c.execute('INSERT INTO t VALUES (?)', (i,)) for i in range({rows})]; \
             c.commit(); os._exit(0)\""
        )
    };
    let check = |commits: &str, rows: u32| {
        let git = |arguments: &[&str]| {
            let directory = workspace.join("repository");
            let mut command = Command::new("/usr/bin/git");
            let output =
                command.args(["-c", "safe.directory=*", "-C"]).arg(directory).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", shown(&output));
            String::from_utf8(output.stdout).unwrap()
        };
        git(&["fsck", "--strict"]);
        assert_eq!(git(&["rev-list", "--count", "HEAD"]).trim(), commits);
        assert_eq!(git(&["--no-optional-locks", "status", "--porcelain"]), "");
        // A copy, since reading in WAL mode writes.
        let copy = tempfile::tempdir().unwrap();
        for name in listing(&workspace).iter().filter(|name| name.starts_with("d.sqlite")) {
            fs::copy(workspace.join(name), copy.path().join(name)).unwrap();
        }
        let script = "import sqlite3; c = sqlite3.connect('d.sqlite'); \
                      print(c.execute('PRAGMA integrity_check').fetchone()[0], c.execute('SELECT count(*) FROM t').fetchone()[0])";
        let output = Command::new("/usr/bin/python3").args(["-c", script]).current_dir(copy.path()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), format!("ok {rows}"), "{}", shown(&output));
    };
    let first = format!(
        "{identity} git init -q repository && cd repository && for i in 1 2 3 4 5; do echo $i > f$i; done && git add . && \
         git commit -qm one && cd .. && {}",
        database(100)
    );
    run(&daemon, &workspace, &first);
    check("1", 100);
    assert!(workspace.join("d.sqlite-wal").exists());
    let second = format!(
        "{identity} cd repository && echo more >> f1 && git rm -q f2 && git commit -qam two && git gc -q && cd .. && {}",
        database(50)
    );
    let job = run(&daemon, &workspace, &second);
    check("2", 150);
    let undo = back(&daemon, &job, 0);
    check("1", 100);
    back(&daemon, &undo, 0);
    check("2", 150);
    daemon.stop();
}

#[test]
fn a_kill_in_a_rollback_leaves_one_state_or_the_other() {
    needs!(requirement::root());
    let site = Site::new();
    let workspace = filled(&site);
    let clock = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_nanos();
    let mut daemon = Daemon::start(&site);
    let before = digest(&daemon, &workspace);
    let many = "mkdir many; for i in $(seq 300); do echo $i > many/$i; done; ";
    let job = run(&daemon, &workspace, &format!("{many}{FIRST}"));
    let second = run(&daemon, &workspace, SECOND);
    let after = digest(&daemon, &workspace);
    drop(second);
    for round in 0..12_u64 {
        let is_back = digest(&daemon, &workspace) == before;
        let last = newest(&daemon);
        let target: (&str, u64) = if is_back { (&last, 0) } else { (&job, 0) };
        let (agentd, launcher) = (daemon.agentd_pid(), daemon.launcher_pid());
        std::thread::scope(|scope| {
            let running = scope.spawn(|| rollback(&daemon, target.0, target.1));
            std::thread::sleep(Duration::from_micros((u64::from(clock) * (round + 7)) % 250_000));
            signal_process(if round % 2 == 0 { agentd } else { launcher }, Signal::SIGKILL);
            drop(running.join().unwrap());
        });
        daemon.wait_for_end(PATIENCE);
        daemon.leave_to_the_test();
        eventually("the end of every process", PATIENCE, || leftovers::site_processes(&site).is_empty());
        drop(daemon);
        daemon = Daemon::start(&site);
        let now = digest(&daemon, &workspace);
        assert!(now == before || now == after, "round {round}: a mix: {:?}\n{}", listing(&workspace), daemon.log());
        // The ledger's last word about the workspace is what lies there.
        let jobs = daemon.get("/v1/jobs?limit=200").json();
        let told = jobs["jobs"].as_array().unwrap().iter().find_map(|job| {
            let receipts = daemon.get(&format!("/v1/jobs/{}/receipts", job["job_id"].as_str().unwrap())).json();
            let payload = receipts["receipts"][0]["payload"].as_str()?.to_owned();
            let statement = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
            let predicate = serde_json::from_slice::<Value>(&statement).unwrap()["predicate"].take();
            let changes = ["committed", "rolled_back"].contains(&predicate["workspace"]["state"].as_str()?);
            changes.then(|| predicate["workspace"]["after"].as_str().unwrap().to_owned())
        });
        assert_eq!(told, Some(now), "round {round}\n{}", daemon.log());
    }
    daemon.stop();
}
