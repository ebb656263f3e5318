//! Whatever happens to a workspace, what is examined again is what a fresh reading finds.

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use proptest::prelude::*;
use tempfile::TempDir;
use toolproto::receipt::Change;

use super::*;
use crate::workspace::changes::compare;
use crate::workspace::commit::CallStaging;
use crate::workspace::commit::tests::{Bench, Edit, LIMITS, edit, make};
use crate::workspace::scan::scan;
use crate::workspace::tree::{Node, Stamp, Watch};

/// What happens between two examinations.
#[derive(Clone, Debug)]
enum Round {
    /// Somebody changes the workspace.
    Outside(Vec<Edit>),
    /// A call runs, and others change the workspace before its commit is prepared, and before it is carried out.
    Call { edits: Vec<Edit>, before_prepare: Vec<Edit>, before_apply: Vec<Edit> },
}

fn round() -> impl Strategy<Value = Round> {
    let edits = |most: usize| prop::collection::vec(edit(), 0..most);
    prop_oneof![
        1 => edits(6).prop_map(Round::Outside),
        1 => (edits(8), edits(2), edits(2)).prop_map(|(edits, before_prepare, before_apply)| Round::Call {
            edits,
            before_prepare,
            before_apply,
        }),
    ]
}

/// What is examined, beside what a fresh reading finds.
struct Watched {
    attention: Attention,
    known: Option<Tree>,
}

impl Watched {
    fn new(dir: &Path) -> Self {
        Self { attention: Attention::to(File::open(dir).unwrap().as_fd()), known: None }
    }

    /// Examines, and compares with a fresh reading: the digest, and the lists of what has changed.
    fn check(&mut self, dir: &Path) {
        let dir = File::open(dir).unwrap();
        let fresh = scan(dir.as_fd(), &LIMITS).unwrap();
        let tree = self.attention.examine(dir.as_fd(), &LIMITS, self.known.as_ref(), Care::Changes).unwrap();
        if let Some(known) = &self.known {
            assert_eq!(compare(known, &tree), compare(known, &fresh));
        }
        assert_eq!((tree.digest(), tree.len()), (fresh.digest(), fresh.len()), "{:?}", compare(&tree, &fresh));
        assert_eq!(tree.root.file_bytes(), fresh.root.file_bytes());
        self.known = Some(tree);
    }

    /// Examines, and ends up with whatever was found or was known before; while others change what is read, that may be nothing.
    fn look(&mut self, dir: &Path) {
        let dir = File::open(dir).unwrap();
        if let Ok(tree) = self.attention.examine(dir.as_fd(), &LIMITS, self.known.as_ref(), Care::Changes) {
            self.known = Some(tree);
        }
    }

    /// Has all files' times long past, so that none is looked at for their sake; one that is looked at is read again.
    fn calm_down(&mut self) {
        self.known = self.known.take().map(|known| Tree::new(calm(&known.root)));
    }

    /// How often less than everything was examined since everything was.
    fn examinations(&self) -> Option<u32> {
        self.attention.whole.map(|(_, count)| count)
    }
}

fn calm(node: &Node) -> Node {
    if node.is_directory() {
        let entries = node.entries().iter().map(calm).collect();
        return Node::directory(node.name.clone(), node.mode, node.stamp, entries).watched(node.watch());
    }
    let stamp = Stamp { ctime: (0, 0), ..node.stamp };
    Node::leaf(node.name.clone(), node.kind, node.mode, node.bytes, node.content, stamp).read_at(i64::MAX)
}

fn empty() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    dir
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn commits_and_changes_from_outside_are_found_exactly(
        first in prop::collection::vec(edit(), 0..12),
        rounds in prop::collection::vec(round(), 1..8),
    ) {
        let bench = Bench::new(&first);
        let place = bench.place();
        let mut watched = Watched::new(&place);
        watched.check(&place);
        for (number, round) in (1..).zip(&rounds) {
            match round {
                Round::Outside(edits) => edits.iter().for_each(|edit| make(&place, edit)),
                Round::Call { edits, before_prepare, before_apply } => {
                    bench.call(number, edits);
                    before_prepare.iter().for_each(|edit| make(&place, edit));
                    let workspace = File::open(&place).unwrap();
                    let call = CallStaging::open(bench.files(), number).unwrap();
                    let base = watched.known.as_ref().unwrap();
                    let prepared = call.prepare(workspace.as_fd(), base, &LIMITS, &[]);
                    before_apply.iter().for_each(|edit| make(&place, edit));
                    if let Ok(prepared) = prepared
                        && call.apply(workspace.as_fd(), |_| ()).is_ok()
                    {
                        watched.known = Some(prepared.tree);
                    }
                }
            }
            watched.calm_down();
            watched.check(&place);
        }
    }

    /// On the file system of temporary files, which may give a new directory the inode number of one that has gone.
    #[test]
    fn changes_from_outside_are_found_exactly(
        rounds in prop::collection::vec(prop::collection::vec(edit(), 0..8), 1..20),
    ) {
        let dir = empty();
        let mut watched = Watched::new(dir.path());
        watched.check(dir.path());
        for edits in &rounds {
            edits.iter().for_each(|edit| make(dir.path(), edit));
            watched.calm_down();
            watched.check(dir.path());
        }
    }

    /// What happens while the tree is examined is found by then or the next time.
    #[test]
    fn changes_in_the_middle_of_an_examination_are_not_lost(
        edits in prop::collection::vec(edit(), 100..400),
    ) {
        let dir = empty();
        let mut watched = Watched::new(dir.path());
        watched.check(dir.path());
        std::thread::scope(|scope| {
            let editor = scope.spawn(|| edits.iter().for_each(|edit| make(dir.path(), edit)));
            while !editor.is_finished() {
                watched.look(dir.path());
                watched.calm_down();
            }
        });
        watched.check(dir.path());
    }
}

#[test]
fn what_has_no_event_is_not_looked_at() {
    let dir = empty();
    for name in ["a/b", "c", "e"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
    }
    let mut watched = Watched::new(dir.path());
    watched.check(dir.path());
    // Entries that are not there, in the tree as it is known: whoever looks does not find them.
    let known = watched.known.take().unwrap();
    let with = |node: &Node, more: Vec<Node>, watch: Option<Watch>| {
        let entries = node.entries().iter().filter(|entry| more.iter().all(|new| new.name != entry.name));
        let entries = entries.chain(&more).cloned().collect();
        Node::directory(node.name.clone(), node.mode, node.stamp, entries).watched(watch)
    };
    let [a, c, e] = [b"a", b"c", b"e"].map(|name| known.root.entry(name).unwrap());
    let b = a.entry(b"b").unwrap();
    let ghost = || vec![with(&Node::directory(b"ghost"[..].into(), 0o755, b.stamp, Vec::new()), Vec::new(), b.watch())];
    let a = with(a, vec![with(b, ghost(), b.watch())], a.watch());
    let (c, e) = (with(c, ghost(), c.watch()), with(e, ghost(), None));
    let known = Tree::new(with(&known.root, vec![a, c, e], known.root.watch()));

    fs::write(dir.path().join("c/other"), "y").unwrap();
    fs::write(dir.path().join("a/file"), "y").unwrap();
    let handle = File::open(dir.path()).unwrap();
    let mut examined = |care| {
        let tree = watched.attention.examine(handle.as_fd(), &LIMITS, Some(&known), care).unwrap();
        let paths = |changes: Vec<Change>| changes.into_iter().map(|change| change.path).collect::<Vec<_>>();
        let changes = compare(&known, &tree);
        (paths(changes.created), paths(changes.deleted), watched.attention.whole.unwrap().1)
    };
    let (created, deleted, count) = examined(Care::Changes);
    assert_eq!((created, count), (vec!["a/file".to_owned(), "c/other".to_owned()], 1));
    // A directory with a name that was not known is listed, and one that nobody watches is read; nobody looked into a/b.
    assert_eq!(deleted, ["c/ghost", "e/ghost"]);
    assert_eq!(examined(Care::Whole).1, ["a/b/ghost", "c/ghost", "e/ghost"], "the twin: everything was looked at");
}

#[test]
fn a_commit_leaves_directories_watched_and_only_what_is_new_to_be_looked_at() {
    let bench = Bench::new(&[Edit::Directory(2), Edit::Directory(5), Edit::Write(3, 0), Edit::Write(6, 0)]);
    let mut watched = Watched::new(&bench.place());
    watched.check(&bench.place());
    watched.calm_down();
    let known = watched.known.as_ref().unwrap();
    assert_eq!(known.root.restless(), 0);
    bench.call(1, &[Edit::Write(6, 1)]);
    let workspace = File::open(bench.place()).unwrap();
    let call = CallStaging::open(bench.files(), 1).unwrap();
    let prepared = call.prepare(workspace.as_fd(), known, &LIMITS, &[]).unwrap();
    assert_eq!(prepared.tree.root.restless(), 1, "the one file");
}

#[test]
fn everything_is_examined_now_and_then_and_after_doubt() {
    let dir = empty();
    let mut watched = Watched::new(dir.path());
    for _ in 0..=MOST_EXAMINATIONS {
        watched.check(dir.path());
    }
    assert_eq!(watched.examinations(), Some(MOST_EXAMINATIONS));
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(0));
    watched.check(dir.path());
    watched.attention.doubt();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(0));
    let earlier = Instant::now().checked_sub(MOST_TIME).unwrap();
    watched.attention.whole = Some((earlier, 1));
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(0));
}

#[test]
fn a_file_of_several_names_is_looked_at_by_each() {
    let (dir, outside) = (empty(), empty());
    fs::create_dir_all(dir.path().join("d")).unwrap();
    fs::write(dir.path().join("known"), "x").unwrap();
    fs::write(dir.path().join("single"), "x").unwrap();
    fs::hard_link(dir.path().join("known"), outside.path().join("known")).unwrap();
    let mut watched = Watched::new(dir.path());
    watched.check(dir.path());
    watched.calm_down();
    fs::write(outside.path().join("known"), "changed").unwrap();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(1), "a name outside of which is known");
    fs::hard_link(dir.path().join("single"), dir.path().join("d/second")).unwrap();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(0), "the other name had no event");
    fs::write(dir.path().join("d/second"), "changed").unwrap();
    watched.calm_down();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(1));
    // In a directory that nobody has watched yet.
    fs::write(dir.path().join("third"), "x").unwrap();
    watched.check(dir.path());
    watched.calm_down();
    fs::create_dir(dir.path().join("new")).unwrap();
    fs::hard_link(dir.path().join("third"), dir.path().join("new/third")).unwrap();
    watched.check(dir.path());
    watched.calm_down();
    fs::write(dir.path().join("new/third"), "changed").unwrap();
    watched.check(dir.path());
}

#[test]
fn a_name_that_was_read_before_it_had_another_one_is_a_doubt() {
    let dir = empty();
    fs::write(dir.path().join("a"), "x").unwrap();
    fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    let tree = scan(File::open(dir.path()).unwrap().as_fd(), &LIMITS).unwrap();
    assert!(!has_hidden_links(&tree.root));
    let (a, b) = (tree.root.entry(b"a").unwrap(), tree.root.entry(b"b").unwrap());
    let early = Stamp { is_linked: false, ..a.stamp };
    let early = Node::leaf(a.name.clone(), a.kind, a.mode, a.bytes, a.content, early);
    assert!(has_hidden_links(&Node::directory(a.name.clone(), 0o755, a.stamp, vec![early, b.clone()])));
}

#[test]
fn a_directory_that_moves_takes_its_watches_along() {
    let (dir, outside) = (empty(), empty());
    fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
    let at = |path: &str| dir.path().join(path);
    let mut watched = Watched::new(dir.path());
    watched.check(dir.path());
    fs::rename(at("a/b"), at("b")).unwrap();
    fs::write(at("b/c/one"), "x").unwrap();
    watched.check(dir.path());
    fs::write(at("b/c/two"), "x").unwrap();
    watched.check(dir.path());
    // Away, changed there, and back under the same name.
    fs::rename(at("b"), outside.path().join("b")).unwrap();
    fs::write(outside.path().join("b/c/three"), "x").unwrap();
    fs::rename(outside.path().join("b"), at("b")).unwrap();
    watched.check(dir.path());
    fs::rename(at("b"), outside.path().join("b")).unwrap();
    watched.check(dir.path());
    fs::write(outside.path().join("b/c/four"), "x").unwrap();
    watched.check(dir.path());
    fs::rename(outside.path().join("b"), at("b")).unwrap();
    watched.check(dir.path());
    fs::remove_dir_all(at("b")).unwrap();
    fs::create_dir_all(at("b/c")).unwrap();
    fs::write(at("b/c/five"), "x").unwrap();
    watched.check(dir.path());
    fs::write(at("b/c/six"), "x").unwrap();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(8), "without looking at everything");
}

/// In a test's thread, which has less stack than a worker.
#[test]
fn deep_trees_take_no_more_stack_than_there_is() {
    let dir = empty();
    let limits = TreeLimits { depth: 1000, ..LIMITS };
    let mut attention = Attention::to(File::open(dir.path()).unwrap().as_fd());
    let mut known: Option<Tree> = None;
    for (depth, is_whole) in [(120, true), (120, false), (900, false), (900, true)] {
        let mut here = std::os::fd::OwnedFd::from(File::open(dir.path()).unwrap());
        for _ in 0..depth {
            let _ = rustix::fs::mkdirat(&here, "d", rustix::fs::Mode::RWXU);
            here = rustix::fs::openat(&here, "d", rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty()).unwrap();
        }
        let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::APPEND;
        let file = rustix::fs::openat(&here, "file", flags, rustix::fs::Mode::RUSR).unwrap();
        rustix::io::write(&file, b"more").unwrap();
        let handle = File::open(dir.path()).unwrap();
        let tree = attention.examine(handle.as_fd(), &limits, known.as_ref(), Care::Changes).unwrap();
        assert_eq!(tree.digest(), scan(handle.as_fd(), &limits).unwrap().digest());
        assert_eq!(attention.whole.unwrap().1 == 0, is_whole, "{depth}");
        known = Some(tree);
    }
}

#[test]
fn more_events_than_the_queue_holds_are_a_doubt() {
    let dir = empty();
    fs::create_dir(dir.path().join("d")).unwrap();
    let mut watched = Watched::new(dir.path());
    watched.check(dir.path());
    let most: usize = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
    // Each name is two events, or more.
    for index in 0..=most / 2 {
        fs::create_dir(dir.path().join(format!("d/{index}"))).unwrap();
        fs::remove_dir(dir.path().join(format!("d/{index}"))).unwrap();
    }
    fs::write(dir.path().join("last"), "x").unwrap();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), Some(0));
}

#[test]
fn where_nothing_more_can_be_watched_everything_is_examined() {
    let dir = empty();
    fs::create_dir_all(dir.path().join("a/b/c")).unwrap();
    let mut watched = Watched::new(dir.path());
    watched.check(dir.path());
    watched.attention.watches.as_ref().unwrap().watcher().give_up();
    fs::write(dir.path().join("a/b/c/file"), "x").unwrap();
    watched.check(dir.path());
    assert!(watched.attention.watches.is_none());
    fs::write(dir.path().join("a/b/c/file"), "longer").unwrap();
    watched.check(dir.path());
    assert_eq!(watched.examinations(), None);
}
