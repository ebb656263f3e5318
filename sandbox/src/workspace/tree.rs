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
}

impl Stamp {
    pub(crate) const fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            ctime: (stat.st_ctime, stat.st_ctime_nsec),
        }
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
    entries: Option<Arc<Entries>>,
}

/// A directory's entries, sorted by name.
#[derive(Debug, Default)]
struct Entries {
    nodes: Vec<Node>,
    /// How many lie in it and below.
    count: usize,
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
    /// An entry that is no directory.
    pub(crate) const fn leaf(
        name: Arc<[u8]>,
        kind: EntryKind,
        mode: u16,
        bytes: u64,
        content: [u8; 32],
        stamp: Stamp,
    ) -> Self {
        Self { name, kind, mode, bytes, content, stamp, entries: None }
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
        let entries = Some(Arc::new(Entries { nodes: entries, count }));
        Self { name, kind: EntryKind::Directory, mode, bytes: 0, content, stamp, entries }
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
    /// When reading began, in seconds of the real-time clock: an entry that changed later than shortly before may have
    /// changed again unnoticed.
    pub(crate) read_at: i64,
}

impl Tree {
    pub(crate) fn new(root: Node, read_at: i64) -> Self {
        let entries = root.count_below();
        Self { root, entries, read_at }
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
