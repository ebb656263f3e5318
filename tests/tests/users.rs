//! Several users of one daemon: each sees and touches only what is theirs.

use std::fs;
use std::process::Output;

use agentd_tests::daemon::{Daemon, listing, shown};
use agentd_tests::model_server::{ModelServer, Order, Script, Turn};
use agentd_tests::site::Site;
use agentd_tests::{needs, requirement};
use serde_json::{Value, json};

/// A group that every Debian has, here the one whose members may use the daemon.
const GROUP: u32 = 100;
const ANNA: u32 = 60_001;
const BERT: u32 = 60_002;

fn requirements() -> Result<(), String> {
    requirement::root()?;
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    if groups.lines().any(|line| line.starts_with("users:x:100:")) {
        Ok(())
    } else {
        Err("there is no group `users`".to_owned())
    }
}

fn site() -> Site {
    let site = Site::new();
    let all = "{ \"*\" = [\"group:users\"] }";
    site.configure(&format!(
        "[service]\ngroup = \"users\"\n\n[access]\nadhoc = [\"group:users\"]\nagents = {all}\ntools = {all}\npolicies = {all}\n"
    ));
    site
}

fn json_of(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", shown(output)))
}

#[test]
fn users_see_their_own_jobs_only_and_root_sees_all() {
    needs!(requirements());
    let script = Script { order: Order::Transcript, ..Script::of([Turn::text("{}")]) };
    let server = ModelServer::start(script).unwrap();
    let site = site();
    site.agent("worker", &server.base_url(), &[], "");
    let daemon = Daemon::start(&site);
    let as_user = |uid: u32, arguments: &[&str]| daemon.agentctl_as(uid, GROUP, arguments).output().unwrap();
    let run = as_user(ANNA, &["--json", "run", "worker", "--goal", "{}"]);
    assert_eq!(run.status.code(), Some(0), "{}", shown(&run));
    let of_anna = json_of(&run)["job_id"].as_str().unwrap().to_owned();
    let of_bert =
        json_of(&as_user(BERT, &["--json", "run", "worker", "--goal", "{}"]))["job_id"].as_str().unwrap().to_owned();

    let jobs = |output: Output| -> Vec<String> {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        [&of_anna, &of_bert].into_iter().filter(|id| text.contains(*id)).cloned().collect()
    };
    assert_eq!(jobs(as_user(ANNA, &["--json", "jobs"])), std::slice::from_ref(&of_anna));
    assert_eq!(jobs(as_user(BERT, &["--json", "jobs"])), std::slice::from_ref(&of_bert));
    assert_eq!(jobs(daemon.agentctl(&["--json", "jobs"]).output().unwrap()).len(), 2);
    for arguments in
        [["show", &of_anna], ["result", &of_anna], ["events", &of_anna], ["receipts", &of_anna], ["cancel", &of_anna]]
    {
        let output = as_user(BERT, &arguments);
        // That a job exists is also no business of others.
        assert!([Some(2), Some(4)].contains(&output.status.code()), "{arguments:?}: {}", shown(&output));
        assert!(!String::from_utf8_lossy(&output.stdout).contains("worker"), "{}", shown(&output));
        if arguments[0] != "cancel" {
            assert_eq!(as_user(ANNA, &arguments).status.code(), Some(0), "the twin");
        }
    }
    daemon.stop();
}

#[test]
fn administrators_open_and_reset_breakers_and_nobody_else() {
    needs!(requirements());
    let site = site();
    site.python_tool("echo", "", "reply({})");
    let daemon = Daemon::start(&site);
    let as_anna = |arguments: &[&str]| daemon.agentctl_as(ANNA, GROUP, arguments).output().unwrap();
    let as_root = |arguments: &[&str]| daemon.agentctl(arguments).output().unwrap();
    let call = || json_of(&as_anna(&["--json", "call", "echo", "--args", "{}"]));
    let open = ["tools", "open", "echo", "--reason", "its upstream is moved"];
    assert_eq!(as_anna(&open).status.code(), Some(4));
    assert_eq!(call()["ok"], json!(true));

    assert_eq!(as_root(&open).status.code(), Some(0));
    let refused = call();
    assert_eq!(refused["error"]["code"], json!("BREAKER_OPEN"), "{refused}");
    assert!(refused["error"]["message"].as_str().unwrap().contains("its upstream is moved"), "{refused}");
    assert!(daemon.get("/v1/metrics").text().contains("agentd_breaker{breaker=\"echo\",state=\"open\"} 1"));
    assert_eq!(as_anna(&["tools", "reset", "echo"]).status.code(), Some(4));
    assert_eq!(as_root(&["tools", "reset", "echo"]).status.code(), Some(0));
    assert_eq!(call()["ok"], json!(true));

    assert_eq!(as_root(&["tools", "open", "runtime:python", "--reason", "upgrade"]).status.code(), Some(0));
    assert_eq!(call()["error"]["code"], json!("BREAKER_OPEN"));
    for unknown in ["eco", "runtime:abacus", "a/b"] {
        assert_eq!(as_root(&["tools", "reset", unknown]).status.code(), Some(2), "{unknown}");
    }
    let no_reason = daemon.post("/v1/tools/echo/breaker", &json!({"version": 1, "action": "open"}));
    assert_eq!((no_reason.status, no_reason.json()["code"].as_str()), (400, Some("INPUT_INVALID")));
    let log = site.path("state/audit/audit.log");
    daemon.stop();
    let lines = fs::read_to_string(log).unwrap();
    let changes: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .filter(|line: &Value| line["event"] == "breaker.changed")
        .collect();
    let states: Vec<_> =
        changes.iter().map(|line| (line["tool"].as_str().unwrap(), line["to"].as_str().unwrap())).collect();
    assert_eq!(states, [("echo", "open"), ("echo", "closed"), ("runtime:python", "open")]);
    assert_eq!((&changes[0]["actor"], &changes[0]["from"]), (&json!("uid:0"), &json!("closed")));
    assert_eq!(changes[0]["reason"], json!("opened by hand: its upstream is moved"));
}

#[test]
fn who_is_not_in_the_group_is_kept_out() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let stranger = daemon.agentctl_as(ANNA, ANNA, &["tools"]).output().unwrap();
    assert_eq!(stranger.status.code(), Some(4), "{}", shown(&stranger));
    let member = daemon.agentctl_as(ANNA, GROUP, &["tools"]).output().unwrap();
    assert_eq!(member.status.code(), Some(0), "{}", shown(&member));
    daemon.stop();
}

#[test]
fn members_reach_a_socket_whose_directory_agentd_made() {
    needs!(requirements());
    let site = site();
    fs::remove_dir(site.path("run")).unwrap();
    let daemon = Daemon::start(&site);
    let member = daemon.agentctl_as(ANNA, GROUP, &["tools"]).output().unwrap();
    assert_eq!(member.status.code(), Some(0), "{}", shown(&member));
    daemon.stop();
}

#[test]
fn a_workspace_is_its_owners_and_stays_so() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("annas", ANNA, ANNA);
    fs::write(workspace.join("seen"), "x").unwrap();
    std::os::unix::fs::chown(workspace.join("seen"), Some(ANNA), Some(ANNA)).unwrap();
    let path = workspace.to_str().unwrap();
    let exec = |uid: u32| {
        let command = "id -u; stat -c %u /workspace/seen; echo y > /workspace/seen && echo z > /workspace/made";
        let arguments = ["exec", "--policy", "workspace", "--workspace", path, "--", "sh", "-c", command];
        daemon.agentctl_as(uid, GROUP, &arguments).output().unwrap()
    };
    let others = exec(BERT);
    assert_eq!(others.status.code(), Some(125), "{}", shown(&others));
    assert!(String::from_utf8_lossy(&others.stderr).contains("WORKSPACE_UNAVAILABLE"), "{}", shown(&others));
    assert_eq!(listing(&workspace), ["seen"]);
    let own = exec(ANNA);
    assert_eq!(own.status.code(), Some(0), "{}", shown(&own));
    // Inside, the tool has a uid of its own and the files seem to be its; on disk they are the owner's.
    let text = String::from_utf8_lossy(&own.stdout).into_owned();
    let ids: Vec<u32> = text.lines().map(|line| line.parse().unwrap()).collect();
    assert!(site.owns_uid(ids[0]) && ids[0] == ids[1], "{text}");
    for name in ["seen", "made"] {
        let metadata = fs::metadata(workspace.join(name)).unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::uid(&metadata), ANNA, "{name}");
    }
    daemon.stop();
}

#[test]
fn a_private_workspace_is_closed_to_others() {
    needs!(requirements());
    let script = Script::of([Turn::call("note", json!({})), Turn::text("{}")]);
    let server = ModelServer::start(script).unwrap();
    let site = site();
    site.python_tool(
        "note",
        "[execution]\nmutates_workspace = true",
        "open('/workspace/private', 'w').write('x')\nreply({})",
    );
    site.agent("worker", &server.base_url(), &["note"], "");
    let daemon = Daemon::start(&site);
    let output = daemon.agentctl_as(ANNA, GROUP, &["--json", "run", "worker", "--goal", "{}"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    let workspaces = site.path("state/workspaces");
    let [name] = listing(&workspaces).try_into().unwrap();
    let metadata = fs::metadata(workspaces.join(&name)).unwrap();
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!((metadata.uid(), metadata.mode() & 0o777), (ANNA, 0o700));
    assert_eq!(listing(&workspaces.join(&name)), ["private"]);
    assert_eq!(metadata.uid(), fs::metadata(workspaces.join(&name).join("private")).unwrap().uid());
    daemon.stop();
}
