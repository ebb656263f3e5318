//! Examining a tree again where something may have changed; the rest is taken over as it is known.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;
use toolproto::receipt::EntryKind;

use super::{DIRECTORY, Frame, Scanner, TreeError, TreeLimits, kind_of, mode_to_lift, permission_bits};
use crate::workspace::tree::{Node, Stamp, Tree};
use crate::workspace::watch::{Marks, Watcher};

/// A tree that was examined again.
pub(crate) struct Again {
    pub(crate) tree: Tree,
    /// The directories that were read whole since they are new, or not the known ones, with their paths.
    pub(crate) fresh: Vec<(Vec<u8>, Node)>,
}

/// Examines what is marked in a tree each of whose directories is watched.
///
/// # Errors
/// When something is not as it can be if nothing but what is marked has changed, or the tree cannot be read: then it must be
/// examined whole. Modes that were lifted are set back.
pub(crate) fn examine_again(
    dir: BorrowedFd<'_>,
    limits: &TreeLimits,
    known: &Tree,
    marks: &Marks,
    watcher: &Watcher,
) -> Result<Again, TreeError> {
    let scanner = Scanner::enter_root(dir, limits, Some(&known.root), Some(watcher))?;
    let mut examiner = Examiner { scanner, fresh: Vec::new(), buffer: Vec::new() };
    match examiner.root(&known.root, marks) {
        Ok(tree) => Ok(Again { tree, fresh: examiner.fresh }),
        Err(error) => {
            examiner.scanner.restore_modes();
            Err(error)
        }
    }
}

struct Examiner<'a> {
    scanner: Scanner<'a>,
    fresh: Vec<(Vec<u8>, Node)>,
    buffer: Vec<u8>,
}

impl Examiner<'_> {
    fn root(&mut self, known: &Node, marks: &Marks) -> Result<Tree, TreeError> {
        let stat = match self.scanner.frames.first() {
            Some(Frame { listed, watch: Some(watch), lifted: None, .. }) if known.watch() == Some(*watch) => *listed,
            _ => return Err(self.scanner.changed(b"")),
        };
        let root = self.renewed(known, &stat, marks)?;
        let limits = self.scanner.limits;
        let (entries, bytes) = (root.count_below() as u64, root.file_bytes());
        if entries > limits.entries {
            return Err(TreeError::TooManyEntries(limits.entries));
        }
        if bytes > limits.bytes {
            return Err(TreeError::TooManyBytes(limits.bytes));
        }
        Ok(Tree::new(root))
    }

    /// The directory where the scanner stands, with the watch that it had.
    fn renewed(&mut self, known: &Node, stat: &Stat, marks: &Marks) -> Result<Node, TreeError> {
        let (mode, stamp) = (permission_bits(stat), Stamp::of(stat));
        if marks.below.is_empty() {
            return Ok(known.renewed(mode, stamp));
        }
        let entries = self.entries(known, marks)?;
        Ok(Node::directory(Arc::clone(&known.name), mode, stamp, entries).watched(known.watch()))
    }

    /// The entries of the directory where the scanner stands.
    fn entries(&mut self, known: &Node, marks: &Marks) -> Result<Vec<Node>, TreeError> {
        if marks.below.keys().any(|name| known.entry(name).is_none()) {
            return self.listed_entries(known, marks);
        }
        let unmarked = known.entries().iter().filter(|entry| !marks.below.contains_key(&*entry.name));
        let mut entries: Vec<Node> = unmarked.cloned().collect();
        for (name, marks) in &marks.below {
            let before = known.entry(name);
            let name = before.map_or_else(|| Arc::from(&**name), |before| Arc::clone(&before.name));
            entries.extend(self.entry(&name, before, marks)?);
        }
        Ok(entries)
    }

    /// The same, by a listing: a name that is not known may be that of a new entry, but also, where the file system does not
    /// tell capital letters, another spelling of one that is known.
    fn listed_entries(&mut self, known: &Node, marks: &Marks) -> Result<Vec<Node>, TreeError> {
        let nothing = Marks::default();
        let mut entries = Vec::new();
        for name in self.scanner.names()? {
            let marks = marks.below.get(&*name).unwrap_or(&nothing);
            entries.extend(self.entry(&name, known.entry(&name), marks)?);
        }
        Ok(entries)
    }

    /// What lies at a name now, if anything does.
    fn entry(&mut self, name: &Arc<[u8]>, before: Option<&Node>, marks: &Marks) -> Result<Option<Node>, TreeError> {
        let scanner = &self.scanner;
        let stat = match rustix::fs::statat(&scanner.here, &**name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(scanner.io("examine", name, errno)),
        };
        let (kind, stamp, mode) = (kind_of(&stat), Stamp::of(&stat), permission_bits(&stat));
        let was_linked = before.is_some_and(|before| before.is_linked() && before.stamp.is_same_file(&stamp));
        if kind != EntryKind::Directory && stamp.is_linked && !was_linked {
            // Its other name may be one of the tree's that nothing was told about.
            return Err(scanner.changed(name));
        }
        match kind {
            EntryKind::Directory => self.directory(name, &stat, before, marks).map(Some),
            EntryKind::File => match before.filter(|before| before.is_still(&stamp, mode)) {
                Some(before) => Ok(Some(before.clone())),
                None => scanner.read_file(name, &stat, &mut self.buffer).map(Some),
            },
            kind => scanner.read_special(Arc::clone(name), kind, &stat).map(Some),
        }
    }

    fn directory(
        &mut self,
        name: &Arc<[u8]>,
        stat: &Stat,
        before: Option<&Node>,
        marks: &Marks,
    ) -> Result<Node, TreeError> {
        if let Some(known) = before
            && let Some(node) = self.known_directory(name, stat, known, marks)?
        {
            return Ok(node);
        }
        self.scanner.enter(Arc::clone(name), *stat)?;
        let node = self.scanner.walk()?;
        if node.all().any(Node::is_linked) {
            return Err(self.scanner.changed(name));
        }
        let names = self.scanner.frames.iter().map(|frame| &*frame.name).chain([&**name]);
        let path = names.filter(|name| !name.is_empty()).collect::<Vec<_>>().join(&b'/');
        self.fresh.push((path, node.clone()));
        Ok(node)
    }

    /// A directory whose watch has been on it ever since it was read: only what is marked in it is examined. None if that
    /// cannot be said of it.
    fn known_directory(
        &mut self,
        name: &Arc<[u8]>,
        stat: &Stat,
        known: &Node,
        marks: &Marks,
    ) -> Result<Option<Node>, TreeError> {
        let scanner = &mut self.scanner;
        let is_known = known.watch().is_some() && known.stamp.is_same_file(&Stamp::of(stat));
        if !is_known || mode_to_lift(stat, scanner.limits).is_some() {
            return Ok(None);
        }
        let opened = scanner.open(name, DIRECTORY, stat)?;
        // A directory that was removed took its watch along, also when another one has got its inode's number.
        let watch = scanner.watcher.and_then(|watcher| watcher.watch_of(opened.as_fd()));
        if watch != known.watch() {
            return Ok(None);
        }
        let above = std::mem::replace(&mut scanner.here, opened);
        scanner.frames.push(Frame {
            name: Arc::clone(name),
            listed: *stat,
            entries: Vec::new(),
            pending: Vec::new(),
            lifted: None,
            earlier: Some(known.clone()),
            watch,
        });
        let node = self.renewed(known, stat, marks)?;
        self.scanner.frames.pop();
        self.scanner.here = above;
        Ok(Some(node))
    }
}
