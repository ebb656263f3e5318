//! Random trees, random edits through a real overlay, crashes between any two steps.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, lchown, symlink};
use std::path::Path;

use proptest::prelude::*;
use rustix::mount::{MoveMountFlags, UnmountFlags, move_mount, unmount};
use rustix::process::{Signal, WaitId, WaitIdOptions};
use tempfile::TempDir;

use super::*;
use crate::sys::worker_process::fork_running;
use crate::workspace::Owner;
use crate::workspace::scan::{Unreadable, scan};
use crate::workspace::staging::{self, WorkspaceStaging};
use crate::workspace::view;

const OWNER: Owner = Owner { uid: 61_250, gid: 61_251 };
const SANDBOX: u32 = 77_778;
pub(crate) const LIMITS: TreeLimits =
    TreeLimits { entries: 10_000, bytes: 1 << 30, depth: 50, unreadable: Unreadable::Lift };

#[derive(Clone, Debug)]
pub(crate) enum Edit {
    Write(usize, u8),
    /// Replace by renaming a new file over it, as editors do.
    Save(usize, u8),
    Directory(usize),
    Link(usize, u8),
    Fifo(usize),
    Remove(usize),
    Mode(usize, u32),
    Rename(usize, usize),
    HardLink(usize, usize),
}

const PATHS: [&str; 11] = ["a", "b", "d", "d/a", "d/b", "d/d", "d/d/a", "d/d/b", "d-", "e", "e/d"];

pub(crate) fn edit() -> impl Strategy<Value = Edit> {
    let path = 0..PATHS.len();
    prop_oneof![
        3 => (path.clone(), 0..3u8).prop_map(|(path, content)| Edit::Write(path, content)),
        1 => (path.clone(), 0..3u8).prop_map(|(path, content)| Edit::Save(path, content)),
        3 => path.clone().prop_map(Edit::Directory),
        1 => (path.clone(), 0..3u8).prop_map(|(path, target)| Edit::Link(path, target)),
        1 => path.clone().prop_map(Edit::Fifo),
        2 => path.clone().prop_map(Edit::Remove),
        2 => (path.clone(), prop_oneof![Just(0o600), Just(0o644), Just(0o755), Just(0o555), Just(0o000), Just(0o4755)])
            .prop_map(|(path, mode)| Edit::Mode(path, mode)),
        2 => (path.clone(), path.clone()).prop_map(|(from, to)| Edit::Rename(from, to)),
        1 => (path.clone(), path).prop_map(|(from, to)| Edit::HardLink(from, to)),
    ]
}

/// Edits that cannot be done leave the tree as it is.
pub(crate) fn make(dir: &Path, edit: &Edit) {
    let at = |index: &usize| dir.join(PATHS[*index]);
    let _ = match edit {
        // Opening a FIFO would wait for a reader.
        Edit::Write(path, _) if fs::metadata(at(path)).is_ok_and(|found| found.file_type().is_fifo()) => Ok(()),
        Edit::Write(path, content) => fs::write(at(path), [*content]),
        Edit::Save(path, content) => {
            fs::write(dir.join("temporary"), [*content]).and_then(|()| fs::rename(dir.join("temporary"), at(path)))
        }
        Edit::Directory(path) => fs::create_dir(at(path)),
        Edit::Link(path, target) => symlink(format!("target{target}"), at(path)),
        Edit::Fifo(path) => rustix::fs::mknodat(rustix::fs::CWD, at(path), rustix::fs::FileType::Fifo, Mode::RWXU, 0)
            .map_err(io::Error::from),
        Edit::Remove(path) => fs::remove_file(at(path)).or_else(|_| fs::remove_dir_all(at(path))),
        Edit::Mode(path, mode) => match fs::symlink_metadata(at(path)) {
            Ok(metadata) if !metadata.is_symlink() => fs::set_permissions(at(path), Permissions::from_mode(*mode)),
            _ => Ok(()),
        },
        Edit::Rename(from, to) => fs::rename(at(from), at(to)),
        Edit::HardLink(from, to) => fs::hard_link(at(from), at(to)),
    };
    let _ = fs::remove_file(dir.join("temporary"));
}

/// Runs in a process of its own with these ids and no capabilities; panics there are failures here.
fn as_user(id: u32, group: u32, action: impl FnOnce()) {
    let child = fork_running(|| {
        let parent = rustix::process::getppid();
        assert!(parent.is_some());
        nix::unistd::setgroups(&[]).unwrap();
        nix::unistd::setresgid(group.into(), group.into(), group.into()).unwrap();
        nix::unistd::setresuid(id.into(), id.into(), id.into()).unwrap();
        rustix::process::umask(Mode::empty());
        action();
        0
    })
    .unwrap();
    let status = rustix::process::waitid(WaitId::PidFd(child.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
    let killed_itself = status.terminating_signal() == Some(Signal::KILL.as_raw());
    assert!(status.exit_status() == Some(0) || killed_itself, "the process failed: {status:?}");
}

/// A workspace of a user's, with its staging directory beside it.
pub(crate) struct Bench {
    dir: TempDir,
    staging: WorkspaceStaging,
}

impl Bench {
    pub(crate) fn new(edits: &[Edit]) -> Self {
        // In memory: hundreds of crashes would otherwise wait for as many writes to disk.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let workspace = dir.path().join("workspace");
        fs::create_dir(&workspace).unwrap();
        fs::set_permissions(&workspace, Permissions::from_mode(0o755)).unwrap();
        lchown(&workspace, Some(OWNER.uid), Some(OWNER.gid)).unwrap();
        as_user(OWNER.uid, OWNER.gid, || edits.iter().for_each(|edit| make(&workspace, edit)));
        let root = staging::root(File::open(dir.path()).unwrap().as_fd(), ".agentd-staging").unwrap();
        let staging = WorkspaceStaging::open(root.as_fd(), "job", OWNER).unwrap();
        Self { dir, staging }
    }

    /// Where the workspace lies.
    pub(crate) fn place(&self) -> std::path::PathBuf {
        self.dir.path().join("workspace")
    }

    /// Where the layers lie.
    pub(crate) fn files(&self) -> BorrowedFd<'_> {
        self.staging.files()
    }

    fn workspace(&self) -> File {
        File::open(self.place()).unwrap()
    }

    fn digest(&self) -> Digest {
        scan(self.workspace().as_fd(), &LIMITS).unwrap().digest()
    }

    /// Runs edits as a call's sandbox would; yields the tree's digest as the sandbox leaves it.
    pub(crate) fn call(&self, number: u64, edits: &[Edit]) -> Digest {
        self.call_with(number, |view| edits.iter().for_each(|edit| make(view, edit)))
    }

    fn call_with(&self, number: u64, action: impl FnOnce(&Path)) -> Digest {
        let layer = self.staging.make_layer(number, self.workspace().as_fd()).unwrap();
        let mount = view::overlay(self.workspace().as_fd(), self.staging.dir(), &layer, OWNER, SANDBOX).unwrap();
        let place = self.dir.path().join("view");
        fs::create_dir_all(&place).unwrap();
        move_mount(&mount, "", rustix::fs::CWD, &place, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).unwrap();
        drop(mount);
        as_user(SANDBOX, SANDBOX, || action(&place));
        let seen = scan(File::open(&place).unwrap().as_fd(), &LIMITS).unwrap();
        // Detached, since a child that another test forks meanwhile may hold a copy of a descriptor in it.
        unmount(&place, UnmountFlags::DETACH).unwrap();
        without_set_id(&seen)
    }

    /// Works on a call as the owner.
    fn worker(&self, number: u64, action: impl FnOnce(&CallStaging, BorrowedFd<'_>)) {
        let workspace = self.workspace();
        as_user(OWNER.uid, OWNER.gid, || {
            action(&CallStaging::open(self.staging.files(), number).unwrap(), workspace.as_fd());
        });
    }

    fn base(&self) -> Tree {
        scan(self.workspace().as_fd(), &LIMITS).unwrap()
    }
}

/// The digest once the set-id bits of files are gone, which a commit takes away.
fn without_set_id(tree: &Tree) -> Digest {
    use crate::workspace::tree::Node;
    fn strip(node: &Node) -> Node {
        if node.is_directory() {
            let entries = node.entries().iter().map(strip).collect();
            Node::directory(node.name.clone(), node.mode, node.stamp, entries)
        } else {
            let mode = if node.kind == toolproto::receipt::EntryKind::File { node.mode & 0o1777 } else { node.mode };
            Node::leaf(node.name.clone(), node.kind, mode, node.bytes, node.content, node.stamp)
        }
    }
    Tree::new(strip(&tree.root)).digest()
}

/// Modes of the first edits may carry set-id bits that no commit touches; only the second edits' count.
fn plain(edits: Vec<Edit>) -> Vec<Edit> {
    edits.into_iter().filter(|edit| !matches!(edit, Edit::Mode(_, 0o4755))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_crash_at_any_step_leaves_the_old_or_the_new_state(
        first in prop::collection::vec(edit(), 0..20).prop_map(plain),
        second in prop::collection::vec(edit(), 0..12),
        crash in 0..40_usize,
        crash_back in 0..40_usize,
    ) {
        let bench = Bench::new(&first);
        let base = bench.base();
        let before = base.digest();
        let after = bench.call(1, &second);
        prop_assert_eq!(bench.digest(), before, "the workspace while the call runs");
        bench.worker(1, |call, workspace| {
            let prepared = call.prepare(workspace, &base, &LIMITS, &[]).unwrap();
            assert_eq!(prepared.before, before);
            assert_eq!(prepared.after, after, "the digest that is computed from the layer");
        });
        prop_assert_eq!(bench.digest(), before, "the workspace once prepared");
        let stopped_at = |step: usize| move |index: usize| {
            if index == step {
                rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
            }
        };
        bench.worker(1, |call, workspace| drop(call.apply(workspace, stopped_at(crash))));
        let undecided = Journal::prepared(journal_dir(&bench).as_fd()).unwrap().is_some();
        if undecided {
            bench.worker(1, |call, workspace| call.take_back(workspace, stopped_at(crash_back)).unwrap());
            bench.worker(1, |call, workspace| call.take_back(workspace, |_| ()).unwrap());
            prop_assert_eq!(bench.digest(), before, "taken back after a crash at step {}", crash);
            bench.worker(1, |call, workspace| drop(call.apply(workspace, stopped_at(crash))));
            bench.worker(1, |call, workspace| call.apply(workspace, |_| ()).unwrap());
        }
        prop_assert_eq!(bench.digest(), after, "carried on after a crash at step {}", crash);
        // And back, and forth once more.
        bench.worker(1, |call, workspace| call.take_back(workspace, |_| ()).unwrap());
        prop_assert_eq!(bench.digest(), before, "taken back once applied");
        bench.worker(1, |call, workspace| call.apply(workspace, |_| ()).unwrap());
        prop_assert_eq!(bench.digest(), after, "applied again");
    }
}

#[test]
fn an_undo_that_meets_a_strange_file_leaves_the_commit_carried_out() {
    let bench = Bench::new(&[Edit::Write(0, 0), Edit::Write(1, 0)]);
    let base = bench.base();
    bench.call(1, &[Edit::Save(0, 1), Edit::Save(1, 1), Edit::Directory(2), Edit::Save(3, 1), Edit::Save(9, 1)]);
    bench.worker(1, |call, workspace| drop(call.prepare(workspace, &base, &LIMITS, &[]).unwrap()));
    bench.worker(1, |call, workspace| call.apply(workspace, |_| ()).unwrap());
    for path in [1, 9] {
        // Another file in its place.
        as_user(OWNER.uid, OWNER.gid, || make(&bench.place(), &Edit::Save(path, 2)));
        let now = bench.digest();
        bench.worker(1, |call, workspace| {
            let error = call.undo(workspace).unwrap_err();
            assert!(error.leaves_nothing(), "{error:?}");
        });
        assert_eq!(bench.digest(), now);
        let dir = journal_dir(&bench);
        assert!(Journal::applied(dir.as_fd()).unwrap().is_some());
        assert!(Journal::prepared(dir.as_fd()).unwrap().is_none());
    }
}

fn journal_dir(bench: &Bench) -> File {
    File::open(bench.dir.path().join(".agentd-staging/job/files/1")).unwrap()
}
