//! Which entries of a tree may have changed since it was read: an inotify watch on each directory, from before it is listed.
//!
//! An event is a hint where to look, and nothing more: whether something has changed, and whether by a commit of agentd's own,
//! is found by looking there and comparing with the tree as it is known. So events may come twice, late, or under a name
//! that has gone; only none may be missing. Where one could be (the queue has overflowed, a watch cannot be had, an event
//! belongs to no directory that is known), the next examination is a whole one. docs/receipts.md says which
//! changes inotify does not tell.

use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::io::Errno;

use super::tree::{Node, Watch};

/// The file systems whose changes all come through this kernel (magic numbers of statfs(2)): ext2 to ext4, XFS, Btrfs, tmpfs,
/// F2FS.
const LOCAL: [i128; 5] = [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994, 0xf2f5_2010];
/// How many watches a user may have.
const MOST_WATCHES: &str = "/proc/sys/fs/inotify/max_user_watches";
/// More than the kernel queues by default (16,384): what does not end with these does not end.
const MOST_EVENTS: usize = 65_536;
/// How deep an entry may lie that is looked at by itself: each level takes some of the stack.
const MOST_LEVELS: usize = 128;

/// The watches of one worker. They count for the workspace's owner, who may have half of what the host allows taken.
#[derive(Debug)]
pub(crate) struct Watcher {
    inotify: OwnedFd,
    most: usize,
    set: AtomicUsize,
    is_given_up: AtomicBool,
}

impl Watcher {
    /// Makes one, if directories of this one's file system can be watched. Before the worker is confined.
    pub(crate) fn start(dir: BorrowedFd<'_>) -> Option<Self> {
        if !LOCAL.contains(&i128::from(rustix::fs::fstatfs(dir).ok()?.f_type)) {
            return None;
        }
        let most: usize = std::fs::read_to_string(MOST_WATCHES).ok()?.trim().parse().ok()?;
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        Some(Self { inotify, most: most / 2, set: AtomicUsize::new(0), is_given_up: AtomicBool::new(false) })
    }

    /// Watches a directory; none once watching is given up.
    pub(crate) fn watch(&self, dir: BorrowedFd<'_>) -> Option<Watch> {
        if self.set.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.give_up();
        }
        self.watch_of(dir)
    }

    /// The watch of a directory that has one. One that has none, or has lost it, gets a new one: another.
    pub(crate) fn watch_of(&self, dir: BorrowedFd<'_>) -> Option<Watch> {
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::MOVE
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        if self.has_given_up() {
            return None;
        }
        // There is no call that takes a descriptor.
        match inotify::add_watch(&self.inotify, format!("/proc/self/fd/{}", dir.as_raw_fd()), flags) {
            Ok(watch) => Some(Watch(watch)),
            Err(_) => {
                self.give_up();
                None
            }
        }
    }

    /// Watches nothing any more.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }
}

/// Entries to look at, by their names from the root down.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    pub(crate) below: BTreeMap<Vec<u8>, Self>,
}

impl Marks {
    /// Whether it is not too deep.
    #[must_use]
    fn mark(&mut self, path: &[u8], name: &[u8]) -> bool {
        let mut place = self;
        let names = path.split(|byte| *byte == b'/').chain([name]).filter(|name| !name.is_empty());
        for (level, name) in names.enumerate() {
            if level >= MOST_LEVELS {
                return false;
            }
            place = place.below.entry(name.to_vec()).or_default();
        }
        true
    }

    /// Marks what may change without an event. Whether nothing of it is too deep.
    #[must_use]
    fn mark_restless(&mut self, node: &Node, levels: usize) -> bool {
        let mut restless = node.entries().iter().filter(|entry| entry.restless() > 0);
        restless.all(|entry| {
            levels > 0 && self.below.entry(entry.name.to_vec()).or_default().mark_restless(entry, levels - 1)
        })
    }
}

/// The watches, and which directory of the tree each is on.
#[derive(Debug)]
pub(crate) struct Watches {
    watcher: Watcher,
    places: HashMap<Watch, Vec<u8>>,
}

impl Watches {
    pub(crate) fn new(watcher: Watcher) -> Self {
        Self { watcher, places: HashMap::new() }
    }

    pub(crate) const fn watcher(&self) -> &Watcher {
        &self.watcher
    }

    /// What has to be looked at in this tree; none if that cannot be said.
    pub(crate) fn marks(&mut self, known: &Node) -> Option<Marks> {
        let mut marks = Marks::default();
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut events = inotify::Reader::new(&self.watcher.inotify, &mut buffer);
        for _ in 0..MOST_EVENTS {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return marks.mark_restless(known, MOST_LEVELS).then_some(marks),
                Err(Errno::INTR) => continue,
                Err(_) => return None,
            };
            if event.events().intersects(ReadFlags::QUEUE_OVERFLOW | ReadFlags::UNMOUNT) {
                return None;
            }
            let watch = Watch(event.wd());
            let name = event.file_name().map_or(&b""[..], |name| name.to_bytes());
            let is_over = event.events().contains(ReadFlags::IGNORED);
            match self.places.get(&watch) {
                Some(place) if marks.mark(place, name) => {}
                Some(_) => return None,
                None if is_over => {}
                None => {
                    // On a directory that an examination met and then failed; it may even lie elsewhere by now.
                    let _ = inotify::remove_watch(&self.watcher.inotify, watch.0);
                    return None;
                }
            }
            if is_over {
                self.places.remove(&watch);
            }
        }
        None
    }

    /// Before everything is read: what has happened until now will be seen then.
    pub(crate) fn forget_events(&mut self) {
        self.watcher.set.store(0, Ordering::Relaxed);
        let mut buffer = [0; 32 << 10];
        for _ in 0..MOST_EVENTS {
            match rustix::io::read(&self.watcher.inotify, &mut buffer) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
    }

    /// After everything was read: only the watches of this tree stay.
    pub(crate) fn are_of(&mut self, root: &Node) {
        let earlier = std::mem::take(&mut self.places);
        self.add(Vec::new(), root);
        for (watch, place) in earlier {
            // What has come from it already is a hint about its last place.
            if !self.places.contains_key(&watch) && inotify::remove_watch(&self.watcher.inotify, watch.0).is_ok() {
                self.places.insert(watch, place);
            }
        }
    }

    /// The watches of a directory that lies at this path, and of all below it.
    pub(crate) fn add(&mut self, path: Vec<u8>, node: &Node) {
        let mut pending = vec![(path, node)];
        while let Some((path, node)) = pending.pop() {
            for entry in node.entries().iter().filter(|entry| entry.is_directory()) {
                let mut path = path.clone();
                if !path.is_empty() {
                    path.push(b'/');
                }
                path.extend_from_slice(&entry.name);
                pending.push((path, entry));
            }
            if let Some(watch) = node.watch() {
                self.places.insert(watch, path);
            }
        }
    }
}
