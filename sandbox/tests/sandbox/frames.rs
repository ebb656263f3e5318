//! Frames of roots that one sandbox leaves to the next: what a call sees is the same as without.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::harness::{Sandbox, Test, clear_away, content, end, sh, wait_for_exec};

pub(crate) const TESTS: &[Test] = &[
    ("frames::a_frame_is_used_again_and_by_one_sandbox_at_a_time", a_frame_is_used_again_and_by_one_sandbox_at_a_time),
    ("frames::the_user_is_each_calls_own", the_user_is_each_calls_own),
    ("frames::what_a_call_has_of_its_own_is_new", what_a_call_has_of_its_own_is_new),
    ("frames::nothing_of_a_frame_can_be_changed_from_inside", nothing_of_a_frame_can_be_changed_from_inside),
    ("frames::what_is_replaced_on_the_host_is_seen", what_is_replaced_on_the_host_is_seen),
    ("frames::what_is_mounted_on_the_host_is_seen", what_is_mounted_on_the_host_is_seen),
    ("frames::what_is_hidden_stays_so_when_it_is_replaced", what_is_hidden_stays_so_when_it_is_replaced),
    ("frames::what_is_mounted_on_the_host_and_hidden_stays_so", what_is_mounted_on_the_host_and_hidden_stays_so),
    ("frames::what_had_a_hidden_name_is_seen_under_another", what_had_a_hidden_name_is_seen_under_another),
    (
        "frames::what_is_hidden_behind_a_link_is_hidden_from_the_first_call",
        what_is_hidden_behind_a_link_is_hidden_from_the_first_call,
    ),
    ("frames::each_user_has_frames_of_its_own", each_user_has_frames_of_its_own),
    (
        "frames::a_frame_in_which_nothing_was_executed_is_not_used_again",
        a_frame_in_which_nothing_was_executed_is_not_used_again,
    ),
    ("frames::a_runtime_may_need_what_lies_below_dev", a_runtime_may_need_what_lies_below_dev),
];

/// On the host, and nowhere that every sandbox has of its own.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir_in("/srv").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    place
}

/// Names the frame: the file system of its root, and when that was made.
const FRAME: &str = "stat -c %d-%.9Z /; ";

fn a_frame_is_used_again_and_by_one_sandbox_at_a_time() {
    let place = place();
    let other = sh("strict", FRAME).runtime_mount(place.path()).run();
    let first = sh("strict", FRAME).run();
    let second = sh("strict", FRAME).run();
    assert_eq!(first.success(), second.success());
    assert_ne!(first.success(), other.success(), "what shows something else has another frame");

    let waiting = sh("strict", &format!("{FRAME} sleep 600"));
    let (mut waiting, stdout, _stderr, _id) = waiting.start();
    wait_for_exec(&mut waiting);
    let beside = sh("strict", FRAME).run();
    end(&mut waiting, std::time::Duration::ZERO);
    let waited = content(stdout);
    assert_eq!(waited.trim_end(), first.success());
    assert_ne!(beside.success(), first.success(), "two sandboxes have the same frame at the same time");
    clear_away(waiting);
    assert_eq!(sh("strict", FRAME).run().success(), first.success(), "the one that was given back last");
}

fn the_user_is_each_calls_own() {
    let mut before = None;
    for _ in 0..3 {
        let output = sh("strict", &format!("{FRAME} id -un; id -gn; cut -d: -f3 /etc/passwd /etc/group")).run();
        let (frame, names) = output.success().split_once('\n').unwrap();
        assert_eq!(names, format!("agent\nagent\n0\n{id}\n0\n{id}", id = output.sandbox_id));
        assert!(before.is_none_or(|before| before == frame), "not the same frame");
        before = Some(frame.to_owned());
    }
}

fn what_a_call_has_of_its_own_is_new() {
    let script = "ls -A /tmp /dev/shm /workspace; echo $$; ls -d /proc/[0-9]*; ls /dev/pts; \
                  for place in /tmp /dev/shm /workspace; do echo secret > $place/left || exit 1; done";
    let runs = [sh("strict", script).run(), sh("strict", script).run()];
    for run in &runs {
        let expected = "/dev/shm:\n\n/tmp:\n\n/workspace:\n2\n/proc/2\n/proc/3\nptmx";
        // The listing of processes includes the one that lists them, under whatever number.
        let seen = run.success();
        assert!(seen.starts_with("/dev/shm:\n\n/tmp:\n\n/workspace:\n2\n/proc/2\n"), "{seen}\n{expected}");
        assert!(seen.ends_with("ptmx"), "{seen}");
    }
}

fn nothing_of_a_frame_can_be_changed_from_inside() {
    let attempts = "for file in / /etc /etc/passwd /etc/hosts /dev /dev/null /var /run /sys /proc; do \
                      chmod 777 $file && exit 1; touch $file && [ $file != /dev/null ] && exit 2; \
                      [ -d $file ] && mkdir $file/new && exit 3; mv $file /gone && exit 4; \
                      ln -s x $file/link && exit 5; \
                    done; \
                    (echo x > /etc/passwd) && exit 6; (echo x >> /etc/hosts) && exit 7; \
                    mknod /dev/fifo p && exit 8; \
                    for device in /dev/*; do rm -r $device && exit 9; done; \
                    umount /dev/shm && exit 10; mount -o remount,rw / && exit 11; true";
    sh("workspace", attempts).run().success();
    let look = "stat -c '%n %a %u %h' / /etc /etc/passwd /etc/hosts /dev /dev/null /var /run /sys; ls /dev /etc | sort";
    let before = sh("workspace", look).run();
    sh("workspace", attempts).run();
    assert_eq!(sh("workspace", look).run().success(), before.success());
}

fn what_is_replaced_on_the_host_is_seen() {
    let place = place();
    let (file, link, directory) =
        (place.path().join("file"), place.path().join("link"), place.path().join("directory"));
    let show = || {
        let script = format!("cat {} {} {}/inside", file.display(), link.display(), directory.display());
        let sandbox = sh("workspace", &script).runtime_mount(&file).runtime_mount(&link).runtime_mount(&directory);
        sandbox.run().success().to_owned()
    };
    let replace = |with: &str| {
        fs::write(place.path().join("new"), format!("file {with}\n")).unwrap();
        fs::rename(place.path().join("new"), &file).unwrap();
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("inside"), format!("inside {with}\n")).unwrap();
        let _ = fs::remove_file(&link);
        symlink(if with == "1" { &file } else { Path::new("/etc/hostname") }, &link).unwrap();
    };
    replace("1");
    assert_eq!(show(), "file 1\nfile 1\ninside 1");
    assert_eq!(show(), "file 1\nfile 1\ninside 1");
    replace("2");
    assert_eq!(show(), "file 2\nsandbox\ninside 2");
    // What lies in a directory that is shown is the host's at any time.
    fs::write(directory.join("inside"), "inside 3\n").unwrap();
    assert_eq!(show(), "file 2\nsandbox\ninside 3");
    fs::remove_file(&file).unwrap();
    let script = format!("cat {}", file.display());
    assert!(!sh("workspace", &script).runtime_mount(&file).run().is_success(), "it is gone");
}

/// Something that is mounted on the host as long as it lives.
struct Mounted<'a>(&'a Path);

impl<'a> Mounted<'a> {
    fn on(place: &'a Path, content: &str) -> Self {
        mount("none", place, "tmpfs", MountFlags::empty(), None).unwrap();
        let mounted = Self(place);
        fs::write(place.join("content"), content).unwrap();
        mounted
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        unmount(self.0, UnmountFlags::empty()).unwrap();
    }
}

fn what_is_mounted_on_the_host_is_seen() {
    let place = place();
    let below = place.path().join("below");
    fs::create_dir(&below).unwrap();
    let script = format!("cat {}/content || echo nothing", below.display());
    let show = || sh("workspace", &script).runtime_mount(place.path()).run().success().to_owned();
    assert_eq!([show(), show()], ["nothing", "nothing"]);
    for content in ["first", "second"] {
        let mounted = Mounted::on(&below, content);
        assert_eq!([show(), show()], [content, content]);
        // Nobody keeps it.
        drop(mounted);
        assert_eq!([show(), show()], ["nothing", "nothing"]);
    }
}

/// Shows a directory but for one path in it.
fn hiding(place: &Path, hidden: &Path) -> String {
    format!(
        "[[path]]\npath = {place:?}\naccess = \"read\"\nwhy = \"x\"\n\
         [[path]]\npath = {hidden:?}\naccess = \"hide\"\nwhy = \"x\"\n"
    )
}

fn what_is_hidden_stays_so_when_it_is_replaced() {
    let place = place();
    let path = |name: &str| place.path().join(name);
    fs::write(path("shown"), "shown\n").unwrap();
    fs::create_dir(path("directory")).unwrap();
    let rules = format!(
        "[[path]]\npath = {place:?}\naccess = \"read\"\nwhy = \"x\"\n\
         [[path]]\npath = {secret:?}\naccess = \"hide\"\nwhy = \"x\"\n\
         [[path]]\npath = {directory:?}\naccess = \"hide\"\nwhy = \"x\"\n",
        place = place.path(),
        secret = path("secret"),
        directory = path("directory"),
    );
    let script = format!("{FRAME} cd {}; cat shown secret; ls directory", place.path().display());
    let mut frames = Vec::new();
    for round in 0..4 {
        // The same file under the same name: a link to it takes its place, which uncovers it in every mount namespace.
        fs::write(path("kept"), "a secret\n").unwrap();
        let _ = fs::remove_file(path("secret"));
        fs::hard_link(path("kept"), path("secret")).unwrap();
        let output = sh("strict", &script).rules(&rules).run();
        let (frame, seen) = output.success().split_once('\n').unwrap();
        assert_eq!(seen, "shown", "round {round}");
        frames.push(frame.to_owned());
    }
    frames.dedup();
    assert_eq!(frames.len(), 1, "what is tested are later calls of one frame");
    fs::rename(path("directory"), path("aside")).unwrap();
    fs::create_dir(path("directory")).unwrap();
    fs::write(path("directory/secret"), "").unwrap();
    let output = sh("strict", &script).rules(&rules).run();
    assert_eq!(output.success().lines().skip(1).collect::<Vec<_>>(), ["shown"]);
}

fn what_is_mounted_on_the_host_and_hidden_stays_so() {
    let (real, shown) = (place(), place());
    let (source, secret) = (real.path().join("secret"), shown.path().join("secret"));
    fs::write(&source, "a secret").unwrap();
    fs::write(&secret, "").unwrap();
    rustix::mount::mount_bind(&source, &secret).unwrap();
    let mounted = Mounted(&secret);
    let rules = hiding(shown.path(), &secret);
    let script = format!("{FRAME} cat {}", secret.display());
    let mut runs = Vec::new();
    for _ in 0..3 {
        runs.push(sh("strict", &script).rules(&rules).run());
        // What was bound has another file in its place, which takes away all that is mounted on it, but not the bind.
        fs::write(real.path().join("new"), "new").unwrap();
        fs::rename(real.path().join("new"), &source).unwrap();
    }
    drop(mounted);
    assert_eq!(runs[0].success().lines().count(), 1);
    for run in &runs[1..] {
        // Nothing can be mounted on a file that has no name any more.
        let failure = run.exit.as_ref().unwrap_err();
        assert_eq!((failure.step.as_str(), failure.errno), ("mounts", Some(libc::ENOENT)));
    }
}

fn what_had_a_hidden_name_is_seen_under_another() {
    let place = place();
    let (secret, aside) = (place.path().join("secret"), place.path().join("aside"));
    let rules = hiding(place.path(), &secret);
    let script = format!("cat {} {} 2> /dev/null; true", secret.display(), aside.display());
    let show = || sh("strict", &script).rules(&rules).run().success().to_owned();
    fs::write(&secret, "once hidden").unwrap();
    assert_eq!([show(), show()], ["", ""]);
    fs::rename(&secret, &aside).unwrap();
    fs::write(&secret, "hidden now").unwrap();
    assert_eq!([show(), show()], ["once hidden", "once hidden"]);
}

fn what_is_hidden_behind_a_link_is_hidden_from_the_first_call() {
    let place = place();
    fs::create_dir(place.path().join("real")).unwrap();
    fs::write(place.path().join("real/secret"), "a secret").unwrap();
    // An absolute link: it must lead to what the sandbox shows, not to the host.
    symlink(place.path().join("real"), place.path().join("link")).unwrap();
    let rules = hiding(place.path(), &place.path().join("link/secret"));
    let script = format!("cat {}/real/secret", place.path().display());
    for _ in 0..2 {
        assert_eq!(sh("strict", &script).rules(&rules).run().success(), "");
    }
}

fn each_user_has_frames_of_its_own() {
    let frame = |user| sh("strict", FRAME).user(user).run().success().to_owned();
    let [first, second] = [frame(1001), frame(1002)];
    assert_ne!(first, second);
    assert_eq!([frame(1001), frame(1002)], [first, second]);
}

fn a_frame_in_which_nothing_was_executed_is_not_used_again() {
    let before = sh("strict", FRAME).run();
    assert!(Sandbox::new("strict", &["/no/such/program"]).run().exit.is_err());
    assert_ne!(sh("strict", FRAME).run().success(), before.success());
}

fn a_runtime_may_need_what_lies_below_dev() {
    let place = tempfile::tempdir_in("/dev").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(place.path().join("file"), "is there").unwrap();
    let script = format!("cat {}/file; ! touch {}/other", place.path().display(), place.path().display());
    for _ in 0..2 {
        let output = sh("workspace", &script).runtime_mount(place.path()).run();
        assert_eq!(output.success(), "is there");
    }
}
