//! Frames of roots that one sandbox leaves to the next: what a call sees is the same as without.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::harness::{Test, clear_away, content, end, sh, wait_for_exec};

pub(crate) const TESTS: &[Test] = &[
    ("frames::a_frame_is_used_again_and_by_one_sandbox_at_a_time", a_frame_is_used_again_and_by_one_sandbox_at_a_time),
    ("frames::the_user_is_each_calls_own", the_user_is_each_calls_own),
    ("frames::what_a_call_has_of_its_own_is_new", what_a_call_has_of_its_own_is_new),
    ("frames::nothing_of_a_frame_can_be_changed_from_inside", nothing_of_a_frame_can_be_changed_from_inside),
    ("frames::what_is_replaced_on_the_host_is_seen", what_is_replaced_on_the_host_is_seen),
    ("frames::what_is_mounted_on_the_host_is_seen", what_is_mounted_on_the_host_is_seen),
    ("frames::what_is_hidden_stays_so_when_it_is_replaced", what_is_hidden_stays_so_when_it_is_replaced),
];

/// On the host, and nowhere that every sandbox has of its own.
fn place() -> tempfile::TempDir {
    let place = tempfile::tempdir_in("/srv").unwrap();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).unwrap();
    place
}

/// Names the frame: the file system of its root.
const FRAME: &str = "stat -c %d /; ";

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
        if round % 2 == 1 {
            fs::rename(path("directory"), path("aside")).unwrap();
            fs::create_dir(path("directory")).unwrap();
            fs::write(path("directory/secret"), "").unwrap();
            fs::remove_dir_all(path("aside")).unwrap();
        }
        let output = sh("strict", &script).rules(&rules).run();
        let (frame, seen) = output.success().split_once('\n').unwrap();
        assert_eq!(seen, "shown", "round {round}");
        frames.push(frame.to_owned());
    }
    frames.dedup();
    assert_eq!(frames.len(), 1, "what is tested are later calls of one frame");
}
