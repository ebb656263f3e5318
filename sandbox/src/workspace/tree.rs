//! A tree as it was at one moment, and its digest: Merkle, BLAKE3, over names, types, permission bits, contents, symlink
//! targets and empty directories. No times, no owners, no extended attributes. docs/receipts.md has it byte for byte:
//!
//! ```text
//! entry      = type (1 byte) ‖ mode (2) ‖ length of name (4) ‖ name ‖ content (32)      numbers big-endian
//! content    = file       BLAKE3(bytes)
//!              symlink    BLAKE3(target)
//!              device     BLAKE3(major (4) ‖ minor (4))
//!              directory  BLAKE3-derive-key("agentd tree v1 directory", its entries, sorted by name)
//!              FIFO and socket: zeros
//! digest     = BLAKE3-derive-key("agentd tree v1 root", the root's entry with an empty name)
//! ```

use std::sync::Arc;

use rustix::fs::Stat;
use toolproto::digest::Digest;
use toolproto::receipt::{EntryKind, EntryState};

/// The derive-key context of a directory's content digest.
const DIRECTORY_CONTEXT: &str = "agentd tree v1 directory";
/// The derive-key context of the whole tree's digest.
const ROOT_CONTEXT: &str = "agentd tree v1 root";

/// What tells, without reading it, that a file is still the one that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) device: u64,
    pub(crate) inode: u64,
    pub(crate) size: i64,
    pub(crate) mtime: (i64, u64),
    pub(crate) ctime: (i64, u64),
    /// Whether it has more than one name.
    pub(crate) is_linked: bool,
}

/// File times closer than this to the time of reading, in seconds, do not prove that a file is unchanged.
const RACY_SECONDS: i64 = 2;

impl Stamp {
    pub(crate) const fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
            is_linked: stat.st_nlink > 1,
        }
    }

    /// Whether whoever read the file at that time, in seconds of the real-time clock, would see by its times that it has changed since.
    pub(crate) fn is_settled(&self, read_at: i64) -> bool {
        self.ctime.0.max(self.mtime.0).saturating_add(RACY_SECONDS) < read_at
    }

    /// Whether both are of one file, whatever happened to it meanwhile.
    pub(crate) const fn is_same_file(&self, other: &Self) -> bool {
        self.device == other.device && self.inode == other.inode
    }
}

/// One entry of a tree. Clones share what lies below.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Raw bytes; empty for the root.
    pub(crate) name: Arc<[u8]>,
    pub(crate) kind: EntryKind,
    /// The twelve permission bits; 0777 for symlinks.
    pub(crate) mode: u16,
    /// A file's or a symlink target's length, else 0.
    pub(crate) bytes: u64,
    pub(crate) content: [u8; 32],
    /// As it was when the entry was read.
    pub(crate) stamp: Stamp,
    /// When a file's reading began, or earlier, in seconds of the real-time clock: one that changed later than shortly before may
    /// have changed again unnoticed.
    read_at: i64,
    /// What tells of changes in a directory, since before it was listed.
    watch: Option<Watch>,
    entries: Option<Arc<Entries>>,
}

/// A watch on a directory, by its number among those of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Watch(pub(crate) i32);

/// A directory's entries, sorted by name.
#[derive(Debug, Default)]
struct Entries {
    nodes: Vec<Node>,
    /// How many lie in it and below.
    count: usize,
    /// The bytes of all files in it and below.
    bytes: u64,
    /// How many entries in it may change without a watch telling, see [`Node::is_restless`].
    restless: usize,
}

impl Drop for Entries {
    /// Without recursion, since trees can be deep.
    fn drop(&mut self) {
        let mut pending = std::mem::take(&mut self.nodes);
        while let Some(node) = pending.pop() {
            if let Some(mut entries) = node.entries.and_then(Arc::into_inner) {
                pending.append(&mut entries.nodes);
            }
        }
    }
}

impl Node {
    /// An entry that is no directory, read at no known time.
    pub(crate) const fn leaf(
        name: Arc<[u8]>,
        kind: EntryKind,
        mode: u16,
        bytes: u64,
        content: [u8; 32],
        stamp: Stamp,
    ) -> Self {
        Self { name, kind, mode, bytes, content, stamp, read_at: i64::MIN, watch: None, entries: None }
    }

    /// The entry with the time at which its reading began.
    #[must_use]
    pub(crate) const fn read_at(mut self, time: i64) -> Self {
        self.read_at = time;
        self
    }

    /// The directory with the watch that was on it before it was listed.
    #[must_use]
    pub(crate) const fn watched(mut self, watch: Option<Watch>) -> Self {
        self.watch = watch;
        self
    }

    /// A directory of these entries, in any order.
    pub(crate) fn directory(name: Arc<[u8]>, mode: u16, stamp: Stamp, mut entries: Vec<Self>) -> Self {
        entries.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut hasher = blake3::Hasher::new_derive_key(DIRECTORY_CONTEXT);
        for entry in &entries {
            entry.hash_into(&mut hasher);
        }
        let content = hasher.finalize().into();
        let count = entries.iter().map(|entry| 1 + entry.count_below()).sum();
        let bytes = entries.iter().map(Self::file_bytes).fold(0, u64::saturating_add);
        let restless = entries.iter().map(Self::restless).sum();
        let entries = Some(Arc::new(Entries { nodes: entries, count, bytes, restless }));
        let kind = EntryKind::Directory;
        Self { name, kind, mode, bytes: 0, content, stamp, read_at: i64::MIN, watch: None, entries }
    }

    /// The directory with another mode and stamp; what lies in it is the same.
    #[must_use]
    pub(crate) fn renewed(&self, mode: u16, stamp: Stamp) -> Self {
        Self { mode, stamp, ..self.clone() }
    }

    /// A directory's entries, sorted by name; none of anything else.
    pub(crate) fn entries(&self) -> &[Self] {
        self.entries.as_ref().map_or(&[], |entries| &entries.nodes)
    }

    /// A directory's entry of that name.
    pub(crate) fn entry(&self, name: &[u8]) -> Option<&Self> {
        let entries = self.entries();
        entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok().map(|index| &entries[index])
    }

    /// The watch on a directory.
    pub(crate) const fn watch(&self) -> Option<Watch> {
        self.watch
    }

    /// Whether a file with this stamp and mode is certainly the one that was read here.
    pub(crate) fn is_still(&self, stamp: &Stamp, mode: u16) -> bool {
        self.kind == EntryKind::File && self.stamp == *stamp && stamp.is_settled(self.read_at) && self.mode == mode
    }

    /// Whether an entry must be looked at although no watch has told of it: a directory that is not watched; what has another
    /// name, by which it may be changed; a file whose times do not prove yet that it was read as it is.
    pub(crate) fn is_restless(&self) -> bool {
        match self.kind {
            EntryKind::Directory => self.watch.is_none(),
            EntryKind::File => self.is_linked() || !self.stamp.is_settled(self.read_at),
            _ => self.is_linked(),
        }
    }

    /// How many entries here and below are restless.
    pub(crate) fn restless(&self) -> usize {
        self.entries.as_ref().map_or(0, |entries| entries.restless) + usize::from(self.is_restless())
    }

    /// The entry and all below it.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Self> {
        let mut pending = vec![self];
        std::iter::from_fn(move || {
            let node = pending.pop()?;
            pending.extend(node.entries());
            Some(node)
        })
    }

    /// Whether it is no directory and has another name.
    pub(crate) const fn is_linked(&self) -> bool {
        self.stamp.is_linked && !self.is_directory()
    }

    /// The bytes of all files here and below.
    pub(crate) fn file_bytes(&self) -> u64 {
        match &self.entries {
            Some(entries) => entries.bytes,
            None if self.kind == EntryKind::File => self.bytes,
            None => 0,
        }
    }

    pub(crate) const fn is_directory(&self) -> bool {
        matches!(self.kind, EntryKind::Directory)
    }

    /// The node as it stands in change lists.
    pub(crate) fn state(&self) -> EntryState {
        let has_content = !matches!(self.kind, EntryKind::Directory | EntryKind::Fifo | EntryKind::Socket);
        let has_length = matches!(self.kind, EntryKind::File | EntryKind::Symlink);
        EntryState {
            kind: self.kind,
            mode: format!("{:04o}", self.mode),
            digest: has_content.then(|| blake3::Hash::from_bytes(self.content).into()),
            bytes: has_length.then_some(self.bytes),
        }
    }

    /// Whether the entry itself, apart from what lies in a directory, is the same.
    pub(crate) fn is_same_entry(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.mode == other.mode
            && (self.is_directory() || (self.content == other.content && self.bytes == other.bytes))
    }

    /// Whether the entry and everything below it is the same.
    pub(crate) fn is_same_tree(&self, other: &Self) -> bool {
        self.is_same_entry(other) && self.content == other.content
    }

    /// How many entries lie below this one.
    pub(crate) fn count_below(&self) -> usize {
        self.entries.as_ref().map_or(0, |entries| entries.count)
    }

    fn hash_into(&self, hasher: &mut blake3::Hasher) {
        // A name is at most 255 bytes long, so the length fits.
        let length = u32::try_from(self.name.len()).unwrap_or(u32::MAX);
        hasher.update(&[type_byte(self.kind)]);
        hasher.update(&self.mode.to_be_bytes());
        hasher.update(&length.to_be_bytes());
        hasher.update(&self.name);
        hasher.update(&self.content);
    }
}

/// A directory with everything below it, as it was read. Clones share everything.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The directory itself.
    pub(crate) root: Node,
    /// How many entries it has, its root not counted.
    entries: usize,
}

impl Tree {
    pub(crate) fn new(root: Node) -> Self {
        let entries = root.count_below();
        Self { root, entries }
    }

    /// The tree's digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        self.root.hash_into(&mut hasher);
        hasher.finalize().into()
    }

    /// How many entries the tree has, its root not counted.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries
    }

    /// Whether nothing lies in it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries == 0
    }
}

/// The content digest of a device: its number.
pub(crate) fn device_content(major: u32, minor: u32) -> [u8; 32] {
    let mut number = [0; 8];
    number[..4].copy_from_slice(&major.to_be_bytes());
    number[4..].copy_from_slice(&minor.to_be_bytes());
    blake3::hash(&number).into()
}

const fn type_byte(kind: EntryKind) -> u8 {
    match kind {
        EntryKind::File => b'f',
        EntryKind::Directory => b'd',
        EntryKind::Symlink => b'l',
        EntryKind::Fifo => b'p',
        EntryKind::Socket => b's',
        EntryKind::CharDevice => b'c',
        EntryKind::BlockDevice => b'b',
    }
}
