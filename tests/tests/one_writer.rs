//! One job at a time changes a workspace, across the jobs of a daemon and across daemons.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use agentd_tests::daemon::{Daemon, Held, PATIENCE, eventually, shown};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};

fn exec(daemon: &Daemon<'_>, policy: &str, workspace: &Path, script: &str) -> Output {
    daemon.exec(&["--policy", policy, "--workspace", workspace.to_str().unwrap()], &["sh", "-c", script], b"")
}

/// The same, which goes on from its `read` when it is let go.
fn held(daemon: &Daemon<'_>, policy: &str, workspace: &Path, script: &str) -> Held {
    daemon.exec_held(&["--policy", policy, "--workspace", workspace.to_str().unwrap()], &["sh", "-c", script])
}

/// A site whose jobs may use another site's workspaces, and do this when one is held.
fn beside(work: &Path, busy: &str) -> Site {
    let site = Site::new();
    let file = site.path("config/agentd.toml");
    let own = format!("roots = [\"{}\"]", site.path("work").display());
    let both = format!("busy = \"{busy}\"\nroots = [\"{}\", \"{}\"]", site.path("work").display(), work.display());
    let text = fs::read_to_string(&file).unwrap().replace(&own, &both);
    site.write("config/agentd.toml", text.as_bytes());
    site
}

/// What a running call has written so far lies in a layer; its name tells that the call runs.
fn runs(work: &Path, name: &str) -> bool {
    let below = |path: &PathBuf| {
        fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let mut places = vec![work.join(".agentd-staging")];
    for _ in 0..2 {
        places = places.iter().flat_map(below).collect();
    }
    let layers = places.iter().map(|place| place.join("files")).flat_map(|files| below(&files));
    layers.into_iter().any(|layer| layer.join("upper").join(name).exists())
}

#[test]
fn who_changes_a_workspace_has_it_alone_across_jobs_and_daemons() {
    needs!(requirement::root());
    let site = Site::new();
    let work = site.path("work");
    let (refusing, waiting) = (beside(&work, "refuse"), beside(&work, "wait"));
    let workspace = site.workspace("w", 0, 0);
    fs::write(workspace.join("count"), "0").unwrap();
    let first = Daemon::start(&site);
    let second = Daemon::start(&refusing);
    let third = Daemon::start(&waiting);
    let add = "read n < count; echo $((n + 1)) > count";
    std::thread::scope(|scope| {
        let long = held(&first, "workspace", &workspace, &format!("echo x > first; read held; {add}"));
        eventually("the first call", PATIENCE, || runs(&work, "first"));
        // Another daemon's job, which is not to wait.
        let output = exec(&second, "workspace", &workspace, add);
        assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains("WORKSPACE_BUSY"), "{}", shown(&output));
        let output = exec(&second, "strict", &workspace, "cat count");
        assert!(String::from_utf8_lossy(&output.stderr).contains("WORKSPACE_BUSY"), "{}", shown(&output));
        // Jobs that wait: of the same daemon, of another.
        let others = [&first, &third, &first].map(|daemon| {
            let workspace = &workspace;
            scope.spawn(move || exec(daemon, "workspace", workspace, add))
        });
        let long = long.let_go();
        for output in others.into_iter().map(|one| one.join().unwrap()).chain([long]) {
            assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
        }
    });
    assert_eq!(fs::read_to_string(workspace.join("count")).unwrap(), "4\n", "an update is lost");
    // The twins: it is free again; and those who only read do not keep each other out.
    assert_eq!(exec(&second, "workspace", &workspace, add).status.code(), Some(0));
    let mut reader = held(&first, "strict", &workspace, "cat count; read held; cat count");
    assert_eq!(reader.line(), "5");
    let output = exec(&second, "strict", &workspace, "cat count");
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"5\n"[..]), "{}", shown(&output));
    let output = reader.let_go();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"5\n"[..]), "{}", shown(&output));
    for daemon in [first, second, third] {
        daemon.stop();
    }
}

#[test]
fn who_waits_longer_than_the_call_could_run_is_told_that_the_workspace_is_held() {
    needs!(requirement::root());
    let site = Site::new();
    let workspace = site.workspace("w", 0, 0);
    let daemon = Daemon::start(&site);
    let long = held(&daemon, "workspace", &workspace, "echo x > first; read held; true");
    eventually("the first call", PATIENCE, || runs(&site.path("work"), "first"));
    let options = ["--policy", "workspace", "--timeout", "3s", "--workspace", workspace.to_str().unwrap()];
    let output = daemon.exec(&options, &["true"], b"");
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    assert!(String::from_utf8_lossy(&output.stderr).contains("WORKSPACE_BUSY"), "{}", shown(&output));
    // The twin: who goes away while the call waits has cancelled it.
    let options = ["--policy", "workspace", "--workspace", workspace.to_str().unwrap()];
    let waiting = daemon.exec_held(&options, &["true"]);
    let waits = || {
        let log = daemon.log();
        log.lines().filter(|line| line.contains("a call waits for its workspace")).nth(1).map(str::to_owned)
    };
    eventually("a second call that waits", PATIENCE, || waits().is_some());
    waiting.abandon();
    let line = waits().unwrap();
    let job = line.split_once("job=").and_then(|(_, rest)| rest.split_whitespace().next()).expect("the job's id");
    let receipts = || daemon.agentctl(&["receipts", "--show", job]).output().unwrap();
    let is_cancelled = || String::from_utf8_lossy(&receipts().stdout).contains("cancelled");
    eventually("a receipt that says so", PATIENCE, is_cancelled);
    assert_eq!(long.let_go().status.code(), Some(0));
    daemon.stop();
}
