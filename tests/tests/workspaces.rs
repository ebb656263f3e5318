//! Whose directory may be a workspace, who touches its files, and what happens when that goes wrong.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};

use agentd_tests::daemon::{Daemon, Held, PATIENCE, eventually, kill_process, shown, signal_process};
use agentd_tests::model_server::{ModelServer, Script, Turn};
use agentd_tests::site::{Site, chmod};
use agentd_tests::{leftovers, needs, requirement};
use nix::sys::signal::Signal;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde_json::{Value, json};

/// A group that every Debian has, here the one whose members may use the daemon.
const GROUP: u32 = 100;
const ANNA: u32 = 61_601;
const BERT: u32 = 61_602;

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

fn exec(daemon: &Daemon<'_>, uid: u32, workspace: &Path, script: &str) -> Output {
    let workspace = workspace.to_str().unwrap();
    let arguments = ["exec", "--policy", "workspace", "--workspace", workspace, "--", "sh", "-c", script];
    daemon.agentctl_as(uid, GROUP, &arguments).output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn anothers_directory_is_no_workspace_even_if_the_group_may_write() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let of_bert = site.workspace("bert", BERT, GROUP);
    chmod(&of_bert, 0o2777);
    let output = exec(&daemon, ANNA, &of_bert, "echo x > x");
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    assert!(words(&output).contains(&format!("belongs to uid {BERT}")), "{}", shown(&output));
    assert!(words(&output).contains("WORKSPACE_UNAVAILABLE"), "{}", shown(&output));
    assert!(!of_bert.join("x").exists());
    // Its owner may, and what a call makes is the owner's.
    let output = exec(&daemon, BERT, &of_bert, "echo x > x");
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    assert_eq!(of_bert.join("x").metadata().unwrap().uid(), BERT);
    daemon.stop();
}

#[test]
fn a_link_that_is_swapped_while_it_is_looked_at_leads_nobody_elsewhere() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let (own, foreign) = (site.workspace("anna", ANNA, GROUP), site.workspace("bert", BERT, GROUP));
    chmod(&foreign, 0o777);
    let place = site.workspace("place", ANNA, GROUP);
    let link = place.join("link");
    symlink(&own, &link).unwrap();
    let stopped = AtomicBool::new(false);
    let statuses: Vec<Option<i32>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            let spare = place.join("spare");
            for target in [&foreign, &own].into_iter().cycle() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                symlink(target, &spare).unwrap();
                fs::rename(&spare, &link).unwrap();
            }
        });
        let statuses = (0..40).map(|_| exec(&daemon, ANNA, &link, "echo x >> made").status.code()).collect();
        stopped.store(true, Ordering::Relaxed);
        statuses
    });
    assert!(!foreign.join("made").exists(), "a call reached somebody else's directory");
    assert!(statuses.iter().all(|status| [Some(0), Some(125)].contains(status)), "{statuses:?}");
    let done = statuses.iter().filter(|status| **status == Some(0)).count();
    let lines = fs::read_to_string(own.join("made")).unwrap_or_default().lines().count();
    assert_eq!(lines, done, "{statuses:?}");
    assert!(done > 0, "no call ever got the directory that it may have: {statuses:?}");
    daemon.stop();
}

#[test]
fn a_worker_that_its_user_kills_costs_the_call_and_nothing_else() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("anna", ANNA, GROUP);
    fs::write(workspace.join("kept"), "kept").unwrap();
    chown(workspace.join("kept"), Some(ANNA), Some(GROUP)).unwrap();
    let script = "echo x > kept; echo written; read held; true";
    let path = workspace.to_str().unwrap();
    let command = ["exec", "--policy", "workspace", "--workspace", path, "--", "sh", "-c", script];
    let mut running = Held::start(&mut daemon.agentctl_as(ANNA, GROUP, &command));
    assert_eq!(running.line(), "written");
    let own = leftovers::processes().into_iter();
    let mut worker =
        own.filter(|process| process.parent == daemon.launcher_pid() && process.uid == ANNA).map(|one| one.id);
    kill_process(worker.next_back().expect("a worker"));
    let output = running.let_go();
    assert_eq!(output.status.code(), Some(125), "{}", shown(&output));
    assert!(words(&output).contains("WORKSPACE_UNAVAILABLE"), "{}", shown(&output));
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"kept");
    let output = exec(&daemon, ANNA, &workspace, "echo x > kept");
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"x\n");
    daemon.stop();
}

/// A small file system, unmounted when this goes.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).expect("it is mounted");
    }
}

#[test]
fn a_full_disk_ends_in_the_old_state_and_is_named() {
    needs!(requirements());
    let site = site();
    let place = site.path("work/small");
    fs::create_dir(&place).unwrap();
    mount("none", &place, "tmpfs", MountFlags::empty(), Some(c"size=2m,mode=0755")).unwrap();
    let mounted = Mounted(place.clone());
    let workspace = place.join("w");
    fs::create_dir(&workspace).unwrap();
    chown(&workspace, Some(ANNA), Some(GROUP)).unwrap();
    fs::write(workspace.join("kept"), "kept").unwrap();
    chown(workspace.join("kept"), Some(ANNA), Some(GROUP)).unwrap();
    let daemon = Daemon::start(&site);
    // The call itself ends well and leaves not one free byte for the journal of its commit.
    let fill = "echo changed > kept; dd if=/dev/zero of=fill bs=4096 2>/dev/null; true";
    let output = exec(&daemon, ANNA, &workspace, fill);
    assert_eq!(output.status.code(), Some(125), "{}\n{}", shown(&output), daemon.log());
    assert!(words(&output).contains("DISK_FULL"), "{}", shown(&output));
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"kept");
    assert!(!workspace.join("fill").exists());
    // The twin, once what the call wrote has been thrown away.
    eventually("space", PATIENCE, || rustix::fs::statvfs(&place).unwrap().f_bavail > 100);
    let output = exec(&daemon, ANNA, &workspace, "echo changed > kept");
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"changed\n");
    daemon.signal_launcher(Signal::SIGTERM);
    let mut daemon = daemon;
    daemon.wait_for_end(PATIENCE);
    drop(mounted);
    drop(daemon);
}

#[test]
fn set_id_bits_and_attributes_of_a_call_do_not_enter() {
    needs!(requirements(), requirement::program("/usr/bin/python3"));
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("anna", ANNA, GROUP);
    fs::write(workspace.join("kept"), "kept").unwrap();
    chown(workspace.join("kept"), Some(ANNA), Some(GROUP)).unwrap();
    rustix::fs::setxattr(workspace.join("kept"), "user.note", b"mine", rustix::fs::XattrFlags::empty()).unwrap();
    let script = "cp /bin/true tool; chmod 6755 tool; echo changed > kept; \
                  python3 -c \"import os; os.setxattr('tool', 'user.evil', b'x')\" || true";
    let output = exec(&daemon, ANNA, &workspace, script);
    assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
    let mode = workspace.join("tool").metadata().unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode, 0o755, "{mode:o}");
    let mut value = [0; 16];
    let found = rustix::fs::getxattr(workspace.join("tool"), "user.evil", &mut value[..]);
    assert_eq!(found, Err(rustix::io::Errno::NODATA));
    // What a file carried before stays with its successor.
    assert_eq!(fs::read(workspace.join("kept")).unwrap(), b"changed\n");
    let length = rustix::fs::getxattr(workspace.join("kept"), "user.note", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"mine");
    let output = exec(&daemon, ANNA, &workspace, "mknod device c 1 3");
    assert!(![Some(0), Some(125)].contains(&output.status.code()), "{}", shown(&output));
    daemon.stop();
}

/// A POSIX ACL as its attribute holds it (linux/posix_acl_xattr.h): one more user may read and write, as far as the mask lets it.
fn acl(user: u32, mask: u16) -> Vec<u8> {
    const NO_ID: u32 = u32::MAX;
    let entries = [(0x01_u16, 6_u16, NO_ID), (0x02, 6, user), (0x04, 4, NO_ID), (0x10, mask, NO_ID), (0x20, 4, NO_ID)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(rights.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 256];
    match rustix::fs::getxattr(path, name, &mut value[..]) {
        Ok(length) => Some(value[..length].to_vec()),
        Err(rustix::io::Errno::NODATA) => None,
        Err(errno) => panic!("{}: {name}: {errno}", path.display()),
    }
}

#[test]
fn acls_stay_with_what_is_replaced_and_new_files_have_none() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("anna", ANNA, GROUP);
    let access = "system.posix_acl_access";
    for name in ["rewritten", "renamed over"] {
        fs::write(workspace.join(name), "at first").unwrap();
        chown(workspace.join(name), Some(ANNA), Some(GROUP)).unwrap();
        rustix::fs::setxattr(workspace.join(name), access, &acl(BERT, 6), rustix::fs::XattrFlags::empty()).unwrap();
    }
    // What the directory gives to what is made in it is the owner's wish for its own files, not for a call's.
    rustix::fs::setxattr(&workspace, "system.posix_acl_default", &acl(BERT, 6), rustix::fs::XattrFlags::empty())
        .unwrap();
    let script = "echo changed > rewritten; echo new > made; echo other > x; mv x 'renamed over'";
    let output = exec(&daemon, ANNA, &workspace, script);
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
    assert_eq!(fs::read(workspace.join("rewritten")).unwrap(), b"changed\n");
    assert_eq!(fs::read(workspace.join("renamed over")).unwrap(), b"other\n");
    assert_eq!(attribute(&workspace.join("rewritten"), access), Some(acl(BERT, 6)));
    // A new file's mode is the call's, and with it the mask.
    assert_eq!(attribute(&workspace.join("renamed over"), access), Some(acl(BERT, 4)));
    assert_eq!(attribute(&workspace.join("made"), access), None);
    daemon.stop();
}

#[test]
fn capabilities_of_files_do_not_enter_and_go_with_what_carried_them() {
    needs!(requirements(), requirement::program("/usr/bin/python3"));
    let site = site();
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("anna", ANNA, GROUP);
    fs::copy("/bin/true", workspace.join("able")).unwrap();
    chown(workspace.join("able"), Some(ANNA), Some(GROUP)).unwrap();
    // CAP_NET_RAW, permitted and effective: VFS_CAP_REVISION_2 of linux/capability.h.
    let words = [0x0200_0001_u32, 1 << 13, 0, 0, 0];
    let capability: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let name = "security.capability";
    rustix::fs::setxattr(workspace.join("able"), name, &capability, rustix::fs::XattrFlags::empty()).unwrap();
    let script = format!(
        "import os\n\
         open('made', 'w').write('x')\n\
         try: os.setxattr('made', '{name}', bytes({capability:?})); print('was given')\n\
         except OSError: print('refused')\n\
         open('able', 'ab').write(b'more')\n"
    );
    let arguments = ["exec", "--policy", "workspace", "--workspace", workspace.to_str().unwrap(), "--"];
    let arguments: Vec<&str> = arguments.iter().copied().chain(["python3", "-c", &script]).collect();
    let output = daemon.agentctl_as(ANNA, GROUP, &arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "refused", "{}", shown(&output));
    assert!(fs::read(workspace.join("able")).unwrap().ends_with(b"more"));
    assert_eq!(attribute(&workspace.join("made"), name), None);
    assert_eq!(attribute(&workspace.join("able"), name), None);
    daemon.stop();
}

#[test]
fn a_worker_that_its_user_stops_costs_the_call_its_time_and_nobody_else_anything() {
    needs!(requirements());
    let site = site();
    let daemon = Daemon::start(&site);
    let (workspace, other) = (site.workspace("anna", ANNA, GROUP), site.workspace("bert", BERT, GROUP));
    let holder = fs::File::open(&workspace).unwrap();
    rustix::fs::flock(&holder, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let worker = || {
        let own = leftovers::processes().into_iter();
        own.filter(|process| process.parent == daemon.launcher_pid() && process.uid == ANNA).map(|one| one.id).next()
    };
    let arguments =
        ["exec", "--policy", "workspace", "--workspace", workspace.to_str().unwrap(), "--timeout", "10s", "--", "true"];
    let mut agentctl = daemon.agentctl_as(ANNA, GROUP, &arguments);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || agentctl.output().unwrap());
        // Somebody has the workspace, and the worker is stopped while the call waits for it.
        eventually("a call that waits", PATIENCE, || daemon.log().contains("a call waits for its workspace"));
        let stopped = worker().expect("the worker of a call that waits");
        signal_process(stopped, Signal::SIGSTOP);
        drop(holder);
        let output = exec(&daemon, BERT, &other, "echo x > x");
        assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
        // Nobody answers any more whether the workspace is free; what is known is that it was not.
        let output = waiting.join().unwrap();
        assert_eq!(output.status.code(), Some(125), "{}\n{}", shown(&output), daemon.log());
        assert!(String::from_utf8_lossy(&output.stderr).contains("WORKSPACE_BUSY"), "{}", shown(&output));
        eventually("the end of the stopped worker", PATIENCE, || worker() != Some(stopped));
    });
    let output = exec(&daemon, ANNA, &workspace, "echo x > x");
    assert_eq!(output.status.code(), Some(0), "{}\n{}", shown(&output), daemon.log());
    daemon.stop();
}

#[test]
fn what_others_change_between_two_calls_is_listed_as_nobodys() {
    needs!(requirements());
    let site = site();
    let look = "open('/workspace/' + arguments['write'], 'w').write('of the call')\nreply({})";
    site.python_tool("write", "[execution]\nmutates_workspace = true", look);
    let script = Script::of([
        Turn::call("write", json!({"write": "first"})),
        Turn::call("write", json!({"write": "second"})),
        Turn::text("{}"),
    ]);
    let server = ModelServer::start(script).unwrap();
    // Each call waits for a person, so that there is a moment between both.
    site.agent("writer", &server.base_url(), &["write"], "[approval]\ntools = [\"write\"]\n");
    let daemon = Daemon::start(&site);
    let workspace = site.workspace("w", 0, 0);
    for name in ["changed", "removed", "same"] {
        fs::write(workspace.join(name), "at first").unwrap();
    }
    let job = daemon.submit(&json!({"version": 1, "agent": "writer", "goal": {}, "workspace": workspace}));
    let mut approved = String::new();
    let mut approve = |between: &dyn Fn()| {
        let waiting =
            || daemon.get(&format!("/v1/jobs/{job}")).json()["waiting_for"]["call_id"].as_str().map(str::to_owned);
        eventually("a call that waits", PATIENCE, || waiting().is_some_and(|call| call != approved));
        approved = waiting().unwrap();
        between();
        let answer =
            daemon.post(&format!("/v1/jobs/{job}/approvals"), &json!({"call_id": approved, "decision": "approve"}));
        assert!((200..300).contains(&answer.status), "{}", answer.text());
    };
    approve(&|| ());
    approve(&|| {
        fs::write(workspace.join("changed"), "of the owner").unwrap();
        fs::remove_file(workspace.join("removed")).unwrap();
        fs::create_dir(workspace.join("new")).unwrap();
    });
    let result = daemon.result(&job);
    assert_eq!(result["status"], "success", "{result}\n{}", daemon.log());
    let receipts = daemon.get(&format!("/v1/jobs/{job}/receipts")).json();
    let predicate = |index: usize| {
        let payload = receipts["receipts"][index]["payload"].as_str().unwrap();
        let statement = data_encoding::BASE64.decode(payload.as_bytes()).unwrap();
        serde_json::from_slice::<Value>(&statement).unwrap()["predicate"].take()
    };
    assert_eq!(predicate(0)["workspace"]["unattributed"], json!([]));
    let second = predicate(1);
    let list = second["workspace"]["unattributed"].as_array().unwrap();
    let paths: Vec<&str> = list.iter().map(|change| change["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["new", "changed", "removed"], "{second}");
    assert_ne!(second["workspace"]["before"], predicate(0)["workspace"]["after"]);
    assert_eq!(second["workspace"]["created"][0]["path"], "second");
    daemon.stop();
}
