//! Reads a tree from the file system, by descriptor and without recursion; a large one by several threads.
//!
//! Nothing is followed: no symlink, no mount inside the tree. FIFOs, sockets and devices are never opened. One directory
//! is open at a time; the way up is `..`, checked against the directory that was left, so that depth costs no
//! descriptors and a directory moved meanwhile is noticed.

mod again;

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::SystemTime;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat};
use rustix::io::Errno;
use toolproto::code::Code;
use toolproto::receipt::{EntryKind, escape_path};

pub(crate) use self::again::{Again, examine_again};
use super::tree::{Node, Stamp, Tree, Watch, device_content};
use super::watch::Watcher;

/// How large a tree may be, and what to do with entries that the reader has locked itself out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeLimits {
    /// Most entries.
    pub entries: u64,
    /// Most bytes of all files together, holes counted.
    pub bytes: u64,
    /// Most directories below each other.
    pub depth: usize,
    /// Entries without read permission.
    pub unreadable: Unreadable,
}

/// What to do with an entry of the reader's own that has no read permission, such as a mode of 0000.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Fail with [`TreeError::Unreadable`].
    Refuse,
    /// Lift the mode, read, and set it back.
    Lift,
}

impl Default for TreeLimits {
    /// Two million entries, 256 GiB, depth 1000, unreadable entries refused.
    fn default() -> Self {
        Self { entries: 2_000_000, bytes: 256 << 30, depth: 1000, unreadable: Unreadable::Refuse }
    }
}

/// A tree that could not be read. Paths are below its root, escaped.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// More entries than allowed.
    #[error("more than {0} entries")]
    TooManyEntries(u64),
    /// More bytes than allowed.
    #[error("more than {0} bytes in files")]
    TooManyBytes(u64),
    /// More nesting than allowed.
    #[error("more than {0} directories below each other")]
    TooDeep(usize),
    /// No permission to read an entry.
    #[error("`{path}` cannot be read: no permission")]
    Unreadable {
        /// Which.
        path: String,
    },
    /// Something is mounted in the tree.
    #[error("something is mounted at `{path}`")]
    Mounted {
        /// Where.
        path: String,
    },
    /// An entry changed while the tree was read.
    #[error("`{path}` changed while it was read")]
    Changed {
        /// Which.
        path: String,
    },
    /// Another failure.
    #[error("failed to {action} `{path}`")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which entry.
        path: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

impl TreeError {
    /// The code of a call that fails by it.
    #[must_use]
    pub const fn code(&self) -> Code {
        match self {
            Self::TooManyEntries(_) | Self::TooManyBytes(_) | Self::TooDeep(_) => Code::WorkspaceTooLarge,
            Self::Changed { .. } => Code::WorkspaceConflict,
            Self::Unreadable { .. } | Self::Mounted { .. } | Self::Io { .. } => Code::WorkspaceUnavailable,
        }
    }
}

/// Reads everything below a directory.
///
/// # Errors
/// See [`TreeError`]. Modes that were lifted are set back in any case.
pub fn scan(dir: BorrowedFd<'_>, limits: &TreeLimits) -> Result<Tree, TreeError> {
    rescan(dir, limits, None)
}

/// Reads everything below a directory, except files that an earlier scan has read and that have not changed since by device,
/// inode, size and times.
///
/// A file whose change time lies close to the time at which it was read, or after it, is read again, since it may have
/// changed twice within one tick of the file system's clock.
///
/// # Errors
/// See [`TreeError`]. Modes that were lifted are set back in any case.
pub fn rescan(dir: BorrowedFd<'_>, limits: &TreeLimits, earlier: Option<&Tree>) -> Result<Tree, TreeError> {
    rescan_watched(dir, limits, earlier, None)
}

/// As [`rescan`]; each directory is watched from before it is listed.
pub(crate) fn rescan_watched(
    dir: BorrowedFd<'_>,
    limits: &TreeLimits,
    earlier: Option<&Tree>,
    watcher: Option<&Watcher>,
) -> Result<Tree, TreeError> {
    let mut scanner = Scanner::enter_root(dir, limits, earlier.map(|tree| &tree.root), watcher)?;
    match scanner.run() {
        Ok(root) => Ok(Tree::new(root)),
        Err(error) => {
            scanner.restore_modes();
            Err(error)
        }
    }
}

/// Reads one entry of a directory, with everything below it; what has not changed since an earlier scan is taken from the
/// directory's node of then.
pub(crate) fn read_entry(
    dir: BorrowedFd<'_>,
    name: &Arc<[u8]>,
    limits: &TreeLimits,
    earlier: Option<&Node>,
) -> Result<Node, TreeError> {
    let mut scanner = Scanner::enter_root(dir, limits, earlier, None)?;
    let result = scanner.run_entry(name);
    // On success only the directory itself is left, which may have been lifted.
    scanner.restore_modes();
    result
}

/// The most that is read of a file at once.
const READ_AT_ONCE: usize = 128 << 10;
/// Fewer files than this are not worth a thread.
const FILES_PER_THREAD: usize = 64;
/// Fewer directories than this are not worth one either.
const DIRECTORIES_PER_SPLIT: usize = 4;
/// A tree of fewer entries is read by one thread.
const SMALL_TREE: u64 = 1024;

/// A directory on the way from the root to where the scan stands.
struct Frame {
    name: Arc<[u8]>,
    listed: Stat,
    entries: Vec<Node>,
    /// Directories in it that are still to be entered, as they were listed.
    pending: Vec<(Arc<[u8]>, Stat)>,
    /// The mode to set back when the scan leaves.
    lifted: Option<Mode>,
    /// The directory in the earlier tree.
    earlier: Option<Node>,
    watch: Option<Watch>,
}

/// Directories that are still to be read, by whichever thread is free.
type Pending = Mutex<std::vec::IntoIter<(Arc<[u8]>, Stat)>>;

/// What counts against the limits, over all threads of a scan.
#[derive(Debug, Default)]
struct Counted {
    entries: AtomicU64,
    bytes: AtomicU64,
}

struct Scanner<'a> {
    limits: &'a TreeLimits,
    begun: i64,
    watcher: Option<&'a Watcher>,
    frames: Vec<Frame>,
    /// The directory of the last frame.
    here: OwnedFd,
    counted: Arc<Counted>,
    /// How many threads may read at once.
    threads: usize,
}

/// How many threads a tree is read by. Looked up once: that reads a dozen files.
static PROCESSORS: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// `O_NONBLOCK`: should the name have become a FIFO meanwhile, opening it must not wait.
const FILE: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

impl<'a> Scanner<'a> {
    fn enter_root(
        dir: BorrowedFd<'_>,
        limits: &'a TreeLimits,
        earlier: Option<&Node>,
        watcher: Option<&'a Watcher>,
    ) -> Result<Self, TreeError> {
        let at_root = |action| move |errno: Errno| io_error(action, ".".to_owned(), errno);
        let begun = now();
        let stat = rustix::fs::fstat(dir).map_err(at_root("examine"))?;
        let lifted = mode_to_lift(&stat, limits);
        if lifted.is_some() {
            let mode = Mode::from_raw_mode(stat.st_mode) | needed_to_read(EntryKind::Directory);
            rustix::fs::fchmod(dir, mode).map_err(at_root("lift the mode of"))?;
        }
        let opened = rustix::fs::openat(dir, ".", DIRECTORY, Mode::empty());
        if let (Err(_), Some(mode)) = (&opened, lifted) {
            rustix::fs::fchmod(dir, mode).map_err(at_root("set back the mode of"))?;
        }
        let here = opened.map_err(at_root("open"))?;
        let watch = watcher.and_then(|watcher| watcher.watch(here.as_fd()));
        let mut listed = stat;
        if watch.is_some() {
            match lifted {
                // Its mode must be looked at after the watch is on it: nobody above would tell.
                None => listed = rustix::fs::fstat(&here).map_err(at_root("examine"))?,
                Some(_) => watcher.into_iter().for_each(Watcher::give_up),
            }
        }
        let frame = Frame {
            name: Arc::default(),
            listed,
            entries: Vec::new(),
            pending: Vec::new(),
            lifted,
            earlier: earlier.cloned(),
            watch,
        };
        let threads = *PROCESSORS;
        Ok(Self { limits, begun, watcher, frames: vec![frame], here, counted: Arc::default(), threads })
    }

    /// Another one at the same place, for another thread: it reads what it is given, and counts with this one.
    fn beside(&self) -> Result<Self, TreeError> {
        let here = rustix::fs::openat(&self.here, ".", DIRECTORY, Mode::empty())
            .map_err(|errno| self.io("open", b"", errno))?;
        let frames = self.frames.iter().map(|frame| Frame {
            name: frame.name.clone(),
            listed: frame.listed,
            entries: Vec::new(),
            pending: Vec::new(),
            // Whoever lifted it sets it back.
            lifted: None,
            earlier: frame.earlier.clone(),
            watch: frame.watch,
        });
        Ok(Self { frames: frames.collect(), here, counted: Arc::clone(&self.counted), threads: 1, ..*self })
    }

    /// Yields the root.
    fn run(&mut self) -> Result<Node, TreeError> {
        self.list()?;
        self.walk()
    }

    /// Reads one entry of the root, with everything below it.
    fn run_entry(&mut self, name: &Arc<[u8]>) -> Result<Node, TreeError> {
        let stat = rustix::fs::statat(&self.here, &**name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| self.io("examine", name, errno))?;
        match kind_of(&stat) {
            EntryKind::Directory => {
                self.enter(name.clone(), stat)?;
                self.walk()
            }
            EntryKind::File => match self.unchanged(name, &stat) {
                Some(node) => Ok(node),
                None => self.read_file(name, &stat, &mut Vec::new()),
            },
            kind => self.read_special(name.clone(), kind, &stat),
        }
    }

    /// Walks the last frame's directory to its end; yields it.
    fn walk(&mut self) -> Result<Node, TreeError> {
        let depth = self.frames.len() - 1;
        loop {
            if self.is_worth_splitting() {
                self.read_pending_at_once()?;
            }
            match self.frames.last_mut().and_then(|frame| frame.pending.pop()) {
                Some((name, listed)) => self.enter(name, listed)?,
                None => {
                    let done = self.leave()?;
                    if self.frames.len() == depth {
                        return Ok(done);
                    }
                    if let Some(above) = self.frames.last_mut() {
                        above.entries.push(done);
                    }
                }
            }
        }
    }

    /// Whether what is pending in the last frame is enough for several threads.
    fn is_worth_splitting(&self) -> bool {
        let pending = self.frames.last().map_or(0, |frame| frame.pending.len());
        self.threads > 1
            && pending >= DIRECTORIES_PER_SPLIT
            && self.counted.entries.load(Ordering::Relaxed) + pending as u64 >= SMALL_TREE
    }

    /// Reads the directories that are pending in the last frame, by several threads.
    fn read_pending_at_once(&mut self) -> Result<(), TreeError> {
        let pending = self.frames.last_mut().map(|frame| std::mem::take(&mut frame.pending)).unwrap_or_default();
        let threads = self.threads.min(pending.len());
        let pending = Mutex::new(pending.into_iter());
        let (this, pending) = (&*self, &pending);
        let read = std::thread::scope(|scope| {
            let readers: Vec<_> = (0..threads).map(|_| scope.spawn(move || this.read_pending(pending))).collect();
            let joined = readers.into_iter().map(|reader| reader.join().unwrap_or_else(|_| Err(this.panicked())));
            joined.collect::<Vec<_>>()
        });
        for nodes in read {
            let mut nodes = nodes?;
            if let Some(frame) = self.frames.last_mut() {
                frame.entries.append(&mut nodes);
            }
        }
        Ok(())
    }

    /// One thread's part.
    fn read_pending(&self, pending: &Pending) -> Result<Vec<Node>, TreeError> {
        let next = || pending.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut scanner = self.beside()?;
        let mut nodes = Vec::new();
        while let Some((name, listed)) = next() {
            match scanner.enter(name, listed).and_then(|()| scanner.walk()) {
                Ok(node) => nodes.push(node),
                Err(error) => {
                    scanner.restore_modes();
                    // The others need not go on.
                    while next().is_some() {}
                    return Err(error);
                }
            }
        }
        Ok(nodes)
    }

    fn changed(&self, name: &[u8]) -> TreeError {
        TreeError::Changed { path: self.path(name) }
    }

    fn panicked(&self) -> TreeError {
        let source = io::Error::other("a reading thread panicked");
        TreeError::Io { action: "read", path: self.path(b""), source }
    }

    fn enter(&mut self, name: Arc<[u8]>, listed: Stat) -> Result<(), TreeError> {
        if self.frames.len() > self.limits.depth {
            return Err(TreeError::TooDeep(self.limits.depth));
        }
        let lifted = self.lift(&name, &listed)?;
        let opened = self.open(&name, DIRECTORY, &listed);
        if let (Err(_), Some(mode)) = (&opened, lifted) {
            self.set_mode(&name, &listed, mode)?;
        }
        self.here = opened?;
        let watch = self.watcher.and_then(|watcher| watcher.watch(self.here.as_fd()));
        let earlier = self.earlier_entry(&name).cloned();
        self.frames.push(Frame { name, listed, entries: Vec::new(), pending: Vec::new(), lifted, earlier, watch });
        self.list()
    }

    /// Goes back to the directory above, or ends at the root. Yields the directory that was left.
    fn leave(&mut self) -> Result<Node, TreeError> {
        let above = self.frames.len().checked_sub(2).map(|index| Stamp::of(&self.frames[index].listed));
        let up = above.map(|above| self.open_parent(&above)).transpose()?;
        let Some(frame) = self.frames.pop() else {
            return Err(TreeError::Changed { path: ".".to_owned() });
        };
        let mut stamp = Stamp::of(&frame.listed);
        if let Some(mode) = frame.lifted {
            rustix::fs::fchmod(&self.here, mode)
                .map_err(|errno| self.io("set back the mode of", &frame.name, errno))?;
            let stat = rustix::fs::fstat(&self.here).map_err(|errno| self.io("examine", &frame.name, errno))?;
            stamp = Stamp::of(&stat);
        }
        if let Some(up) = up {
            self.here = up;
        }
        Ok(Node::directory(frame.name, permission_bits(&frame.listed), stamp, frame.entries).watched(frame.watch))
    }

    fn open_parent(&self, expected: &Stamp) -> Result<OwnedFd, TreeError> {
        let up = rustix::fs::openat(&self.here, "..", DIRECTORY, Mode::empty())
            .map_err(|errno| self.io("open the directory above", b"", errno))?;
        let stat = rustix::fs::fstat(&up).map_err(|errno| self.io("examine the directory above", b"", errno))?;
        if Stamp::of(&stat).is_same_file(expected) { Ok(up) } else { Err(TreeError::Changed { path: self.path(b"") }) }
    }

    /// After a failure: climbs to the root and sets lifted modes back, as far as the way is still there.
    fn restore_modes(&mut self) {
        while let Some(frame) = self.frames.pop() {
            let up = self.frames.last().map(|above| self.open_parent(&Stamp::of(&above.listed)));
            if let Some(mode) = frame.lifted
                && rustix::fs::fchmod(&self.here, mode).is_err()
            {
                tracing::warn!("a directory's mode could not be set back after a failed scan");
            }
            match up {
                Some(Ok(up)) => self.here = up,
                Some(Err(_)) | None => return,
            }
        }
    }

    /// Reads the directory that was just entered: everything but what lies in its directories.
    fn list(&mut self) -> Result<(), TreeError> {
        let mut entries = Vec::new();
        let mut directories = Vec::new();
        let mut files = Vec::new();
        for name in self.names()? {
            let stat = rustix::fs::statat(&self.here, &*name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|errno| self.io("examine", &name, errno))?;
            if self.counted.entries.fetch_add(1, Ordering::Relaxed) >= self.limits.entries {
                return Err(TreeError::TooManyEntries(self.limits.entries));
            }
            match kind_of(&stat) {
                EntryKind::Directory => directories.push((name, stat)),
                EntryKind::File => {
                    self.count_bytes(stat.st_size.unsigned_abs())?;
                    match self.unchanged(&name, &stat) {
                        Some(node) => entries.push(node),
                        None => files.push((name, stat)),
                    }
                }
                kind => entries.push(self.read_special(name, kind, &stat)?),
            }
        }
        entries.extend(self.read_files(&files)?);
        if let Some(frame) = self.frames.last_mut() {
            frame.entries = entries;
            frame.pending = directories;
        }
        Ok(())
    }

    fn names(&self) -> Result<Vec<Arc<[u8]>>, TreeError> {
        let mut buffer = [MaybeUninit::uninit(); 32 << 10];
        let mut listing = RawDir::new(&self.here, &mut buffer);
        let mut names = Vec::new();
        while let Some(entry) = listing.next() {
            let entry = entry.map_err(|errno| self.io("list", b"", errno))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(Arc::from(name));
            }
            if names.len() as u64 > self.limits.entries {
                return Err(TreeError::TooManyEntries(self.limits.entries));
            }
        }
        Ok(names)
    }

    fn earlier_entry(&self, name: &[u8]) -> Option<&Node> {
        self.frames.last()?.earlier.as_ref()?.entry(name)
    }

    /// The file as the earlier scan read it, if it is certainly the same.
    fn unchanged(&self, name: &[u8], stat: &Stat) -> Option<Node> {
        self.earlier_entry(name).filter(|node| node.is_still(&Stamp::of(stat), permission_bits(stat))).cloned()
    }

    fn read_special(&self, name: Arc<[u8]>, kind: EntryKind, stat: &Stat) -> Result<Node, TreeError> {
        let (bytes, content) = match kind {
            EntryKind::Symlink => {
                let target = rustix::fs::readlinkat(&self.here, &*name, Vec::new())
                    .map_err(|errno| self.io("read the target of", &name, errno))?;
                (target.as_bytes().len() as u64, blake3::hash(target.as_bytes()).into())
            }
            EntryKind::CharDevice | EntryKind::BlockDevice => {
                (0, device_content(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)))
            }
            EntryKind::File | EntryKind::Directory | EntryKind::Fifo | EntryKind::Socket => (0, [0; 32]),
        };
        Ok(Node::leaf(name, kind, permission_bits(stat), bytes, content, Stamp::of(stat)))
    }

    /// Reads files of the present directory, many of them by several threads.
    fn read_files(&self, files: &[(Arc<[u8]>, Stat)]) -> Result<Vec<Node>, TreeError> {
        let read_all = |files: &[(Arc<[u8]>, Stat)]| -> Result<Vec<Node>, TreeError> {
            let mut buffer = Vec::new();
            files.iter().map(|(name, stat)| self.read_file(name, stat, &mut buffer)).collect()
        };
        let threads = self.threads.min(files.len() / FILES_PER_THREAD);
        if threads < 2 {
            return read_all(files);
        }
        std::thread::scope(|scope| {
            let read_all = &read_all;
            let parts = files.chunks(files.len().div_ceil(threads));
            let readers: Vec<_> = parts.map(|part| scope.spawn(move || read_all(part))).collect();
            let mut nodes = Vec::with_capacity(files.len());
            for reader in readers {
                let part = reader.join().map_err(|_| self.panicked())?;
                nodes.append(&mut part?);
            }
            Ok(nodes)
        })
    }

    fn read_file(&self, name: &Arc<[u8]>, stat: &Stat, buffer: &mut Vec<u8>) -> Result<Node, TreeError> {
        let mut stamp = Stamp::of(stat);
        let lifted = self.lift(name, stat)?;
        let opened = self.open(name, FILE, stat);
        if let Some(mode) = lifted {
            match &opened {
                Ok(file) => {
                    rustix::fs::fchmod(file, mode).map_err(|errno| self.io("set back the mode of", name, errno))?;
                    stamp = Stamp::of(&rustix::fs::fstat(file).map_err(|errno| self.io("examine", name, errno))?);
                }
                Err(_) => self.set_mode(name, stat, mode)?,
            }
        }
        let mut file = File::from(opened?);
        let mut hasher = blake3::Hasher::new();
        let (listed_length, mut length) = (stat.st_size.unsigned_abs(), 0);
        // With room for one byte more, so that the file's end is seen with its last byte.
        let wanted = usize::try_from(listed_length).map_or(READ_AT_ONCE, |length| length.saturating_add(1));
        if buffer.len() < wanted.min(READ_AT_ONCE) {
            buffer.resize(wanted.min(READ_AT_ONCE), 0);
        }
        loop {
            let read = match file.read(buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(TreeError::Io { action: "read", path: self.path(name), source }),
            };
            hasher.update(&buffer[..read]);
            length += read as u64;
            if read == 0 || (length == listed_length && read < buffer.len()) {
                break;
            }
            if length > self.limits.bytes {
                return Err(TreeError::TooManyBytes(self.limits.bytes));
            }
        }
        let content = hasher.finalize().into();
        let node = Node::leaf(name.clone(), EntryKind::File, permission_bits(stat), length, content, stamp);
        Ok(node.read_at(self.begun))
    }

    fn count_bytes(&self, more: u64) -> Result<(), TreeError> {
        // A file's length, and with it each addition, is below 2^63; a sum above the limit ends the scan.
        let before = self.counted.bytes.fetch_add(more, Ordering::Relaxed);
        let is_within = before.saturating_add(more) <= self.limits.bytes;
        if is_within { Ok(()) } else { Err(TreeError::TooManyBytes(self.limits.bytes)) }
    }

    /// Opens an entry of the present directory, if it is still the one that was listed.
    fn open(&self, name: &[u8], flags: OFlags, listed: &Stat) -> Result<OwnedFd, TreeError> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let opened =
            rustix::fs::openat2(&self.here, name, flags, Mode::empty(), resolve).map_err(|errno| match errno {
                Errno::ACCESS | Errno::PERM => TreeError::Unreadable { path: self.path(name) },
                Errno::XDEV => TreeError::Mounted { path: self.path(name) },
                Errno::LOOP | Errno::NOTDIR | Errno::NOENT | Errno::NXIO => {
                    TreeError::Changed { path: self.path(name) }
                }
                errno => self.io("open", name, errno),
            })?;
        let stat = rustix::fs::fstat(&opened).map_err(|errno| self.io("examine", name, errno))?;
        let same = Stamp::of(&stat).is_same_file(&Stamp::of(listed)) && kind_of(&stat) == kind_of(listed);
        if same { Ok(opened) } else { Err(TreeError::Changed { path: self.path(name) }) }
    }

    /// Lifts the mode of an own entry that its owner cannot read; returns the mode to set back.
    fn lift(&self, name: &[u8], stat: &Stat) -> Result<Option<Mode>, TreeError> {
        let Some(mode) = mode_to_lift(stat, self.limits) else { return Ok(None) };
        self.set_mode(name, stat, mode | needed_to_read(kind_of(stat)))?;
        Ok(Some(mode))
    }

    fn set_mode(&self, name: &[u8], listed: &Stat, mode: Mode) -> Result<(), TreeError> {
        let handle = self.open(name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, listed)?;
        // fchmod does not take an O_PATH descriptor, and a name could have become a symlink.
        rustix::fs::chmod(format!("/proc/self/fd/{}", handle.as_fd().as_raw_fd()), mode)
            .map_err(|errno| self.io("change the mode of", name, errno))
    }

    fn io(&self, action: &'static str, name: &[u8], errno: Errno) -> TreeError {
        match errno {
            Errno::ACCESS | Errno::PERM => TreeError::Unreadable { path: self.path(name) },
            Errno::NOENT => TreeError::Changed { path: self.path(name) },
            errno => io_error(action, self.path(name), errno),
        }
    }

    /// The path of an entry of the present directory, or with an empty name of that directory.
    fn path(&self, name: &[u8]) -> String {
        let names = self.frames.iter().map(|frame| &*frame.name);
        let parts: Vec<&[u8]> = names.chain([name]).filter(|part| !part.is_empty()).collect();
        if parts.is_empty() { ".".to_owned() } else { escape_path(&parts.join(&b'/')) }
    }
}

fn io_error(action: &'static str, path: String, errno: Errno) -> TreeError {
    TreeError::Io { action, path, source: errno.into() }
}

/// The mode of an entry that must be lifted before its owner can read it.
///
/// One with the set-group-id bit stays: its owner, when no member of the group, could not set the bit again.
fn mode_to_lift(stat: &Stat, limits: &TreeLimits) -> Option<Mode> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    let needed = needed_to_read(kind_of(stat));
    let is_own = stat.st_uid == rustix::process::geteuid().as_raw();
    let lift = limits.unreadable == Unreadable::Lift && is_own && !mode.contains(needed) && !mode.contains(Mode::SGID);
    lift.then_some(mode)
}

fn needed_to_read(kind: EntryKind) -> Mode {
    if kind == EntryKind::Directory { Mode::RUSR | Mode::XUSR } else { Mode::RUSR }
}

/// The real-time clock in whole seconds, which file times are compared with.
fn now() -> i64 {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX)
}

pub(crate) fn permission_bits(stat: &Stat) -> u16 {
    // Masked to twelve bits, so it fits.
    u16::try_from(stat.st_mode & 0o7777).unwrap_or(0)
}

pub(crate) fn kind_of(stat: &Stat) -> EntryKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Symlink,
        FileType::Fifo => EntryKind::Fifo,
        FileType::Socket => EntryKind::Socket,
        FileType::CharacterDevice => EntryKind::CharDevice,
        FileType::BlockDevice => EntryKind::BlockDevice,
        FileType::RegularFile | FileType::Unknown => EntryKind::File,
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use tempfile::TempDir;

    use super::*;

    fn tree_of(dir: &Path, limits: &TreeLimits) -> Result<Tree, TreeError> {
        scan(File::open(dir).unwrap().as_fd(), limits)
    }

    fn digest_of(dir: &Path) -> String {
        tree_of(dir, &TreeLimits::default()).unwrap().digest().to_string()
    }

    fn empty() -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        dir
    }

    fn write(path: &Path, content: &[u8], mode: u32) {
        fs::write(path, content).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn make_node(path: &Path, kind: FileType, device: u64) {
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, Mode::from_raw_mode(0o644), device).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    }

    type Edit = fn(&Path);

    /// One entry of every type; the same tree as in docs/receipts.md.
    fn every_type() -> TempDir {
        let dir = empty();
        let at = |name: &str| dir.path().join(name);
        write(&at("file"), b"hello\n", 0o644);
        write(&at("empty file"), b"", 0o600);
        fs::create_dir(at("dir")).unwrap();
        fs::set_permissions(at("dir"), fs::Permissions::from_mode(0o2750)).unwrap();
        write(&at("dir").join(OsStr::from_bytes(b"odd\n\xff")), b"\0", 0o4755);
        fs::create_dir(at("empty dir")).unwrap();
        fs::set_permissions(at("empty dir"), fs::Permissions::from_mode(0o700)).unwrap();
        symlink("dir/nowhere", at("link")).unwrap();
        make_node(&at("fifo"), FileType::Fifo, 0);
        make_node(&at("null"), FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        make_node(&at("disk"), FileType::BlockDevice, rustix::fs::makedev(7, 200));
        drop(UnixListener::bind(at("socket")).unwrap());
        fs::set_permissions(at("socket"), fs::Permissions::from_mode(0o644)).unwrap();
        dir
    }

    #[test]
    fn digests_are_those_of_the_documentation() {
        assert_eq!(digest_of(empty().path()), EMPTY);
        let dir = empty();
        write(&dir.path().join("a"), b"hello\n", 0o644);
        assert_eq!(digest_of(dir.path()), ONE_FILE);
        assert_eq!(digest_of(every_type().path()), EVERY_TYPE);
        let documentation = include_str!("../../../docs/receipts.md");
        for vector in [EMPTY, ONE_FILE, EVERY_TYPE] {
            assert!(documentation.contains(vector), "{vector}");
        }
    }

    const EMPTY: &str = "blake3:64141b58dae805d7a9cd1b1abeeab40a832681b508b3acee43815698b8e6d929";
    const ONE_FILE: &str = "blake3:09e0b3a5def3b2a938b09eed932b88fe437b1302cadaa2cbde4b80ec4c12cc05";
    const EVERY_TYPE: &str = "blake3:c4a4c6e2c66704f5b668f885ddd83b61b2813b64f8f5dd230188efbdf8c1c9c8";

    #[test]
    fn each_property_counts_and_times_do_not() {
        let edits: [(&str, Edit); 9] = [
            ("content", |dir| fs::write(dir.join("file"), "hallo\n").unwrap()),
            ("file mode", |dir| fs::set_permissions(dir.join("file"), fs::Permissions::from_mode(0o640)).unwrap()),
            ("directory mode", |dir| {
                fs::set_permissions(dir.join("empty dir"), fs::Permissions::from_mode(0o755)).unwrap();
            }),
            ("root mode", |dir| fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap()),
            ("target", |dir| {
                fs::remove_file(dir.join("link")).unwrap();
                symlink("dir/elsewhere", dir.join("link")).unwrap();
            }),
            ("name", |dir| fs::rename(dir.join("file"), dir.join("File")).unwrap()),
            ("place", |dir| fs::rename(dir.join("file"), dir.join("dir/file")).unwrap()),
            ("empty directory", |dir| fs::remove_dir(dir.join("empty dir")).unwrap()),
            ("device number", |dir| {
                fs::remove_file(dir.join("null")).unwrap();
                make_node(&dir.join("null"), FileType::CharacterDevice, rustix::fs::makedev(1, 5));
            }),
        ];
        let mut seen = vec![digest_of(every_type().path())];
        for (what, edit) in edits {
            let dir = every_type();
            edit(dir.path());
            let digest = digest_of(dir.path());
            assert!(!seen.contains(&digest), "{what}");
            seen.push(digest);
        }
        let dir = every_type();
        let file = File::options().write(true).open(dir.path().join("file")).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        std::os::unix::fs::chown(dir.path().join("file"), Some(61_234), None).unwrap();
        assert_eq!(digest_of(dir.path()), seen[0]);
    }

    #[test]
    fn an_opened_fifo_would_wait_but_is_not_opened() {
        let dir = empty();
        make_node(&dir.path().join("fifo"), FileType::Fifo, 0);
        let _listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        // Opening this one would rewind a tape or worse; reading it would fail.
        make_node(&dir.path().join("device"), FileType::CharacterDevice, rustix::fs::makedev(99, 99));
        assert_eq!(tree_of(dir.path(), &TreeLimits::default()).unwrap().len(), 3);
    }

    #[test]
    fn symlinks_are_read_and_not_followed() {
        let (dir, outside) = (empty(), empty());
        write(&outside.path().join("file"), b"x", 0o644);
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(".", dir.path().join("loop")).unwrap();
        let tree = tree_of(dir.path(), &TreeLimits::default()).unwrap();
        assert_eq!(tree.len(), 2);
        let before = tree.digest();
        write(&outside.path().join("file"), b"y", 0o600);
        assert_eq!(tree_of(dir.path(), &TreeLimits::default()).unwrap().digest(), before);
    }

    #[test]
    fn a_sparse_file_counts_with_its_holes() {
        let dir = empty();
        File::create(dir.path().join("sparse")).unwrap().set_len(1 << 40).unwrap();
        let error = tree_of(dir.path(), &TreeLimits::default()).unwrap_err();
        assert!(matches!(error, TreeError::TooManyBytes(_)), "{error:?}");
        assert_eq!(error.code(), Code::WorkspaceTooLarge);
    }

    #[test]
    fn limits_hold_exactly() {
        let dir = empty();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        write(&dir.path().join("a/b/c"), b"12345", 0o644);
        let limits = TreeLimits { entries: 3, bytes: 5, depth: 2, ..TreeLimits::default() };
        assert_eq!(tree_of(dir.path(), &limits).unwrap().len(), 3);
        let fewer =
            [TreeLimits { entries: 2, ..limits }, TreeLimits { bytes: 4, ..limits }, TreeLimits { depth: 1, ..limits }];
        for limits in fewer {
            assert_eq!(tree_of(dir.path(), &limits).unwrap_err().code(), Code::WorkspaceTooLarge);
        }
    }

    #[test]
    fn paths_longer_than_path_max_are_read() {
        let dir = empty();
        let name = "d".repeat(200);
        let mut here = OwnedFd::from(File::open(dir.path()).unwrap());
        for _ in 0..900 {
            rustix::fs::mkdirat(&here, &*name, Mode::RWXU).unwrap();
            here = rustix::fs::openat(&here, &*name, DIRECTORY, Mode::empty()).unwrap();
        }
        let file = rustix::fs::openat(&here, "file", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap();
        rustix::io::write(&file, b"deep").unwrap();
        let before = tree_of(dir.path(), &TreeLimits::default()).unwrap();
        assert_eq!(before.len(), 901);
        rustix::io::write(&file, b"er").unwrap();
        let after = tree_of(dir.path(), &TreeLimits::default()).unwrap();
        let changes = crate::workspace::changes::compare(&before, &after);
        assert_eq!(changes.modified.len(), 1);
        assert_eq!(changes.modified[0].path.len(), 201 * 900 + 4);
    }

    #[test]
    fn something_mounted_in_the_tree_is_refused() {
        let dir = empty();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        assert!(tree_of(dir.path(), &TreeLimits::default()).is_ok());
        rustix::mount::mount("none", dir.path().join("mnt"), "tmpfs", rustix::mount::MountFlags::empty(), None)
            .unwrap();
        let refused = tree_of(dir.path(), &TreeLimits::default());
        rustix::mount::unmount(dir.path().join("mnt"), rustix::mount::UnmountFlags::DETACH).unwrap();
        assert!(matches!(refused, Err(TreeError::Mounted { path }) if path == "mnt"));
    }

    #[test]
    fn hard_links_are_two_entries() {
        let dir = empty();
        write(&dir.path().join("a"), b"x", 0o644);
        fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
        let linked = digest_of(dir.path());
        fs::remove_file(dir.path().join("b")).unwrap();
        write(&dir.path().join("b"), b"x", 0o644);
        assert_eq!(digest_of(dir.path()), linked);
    }

    #[test]
    fn a_directory_of_many_files_is_read() {
        let dir = empty();
        for index in 0..5000 {
            File::create(dir.path().join(format!("a file with a name of some length {index}"))).unwrap();
        }
        assert_eq!(tree_of(dir.path(), &TreeLimits::default()).unwrap().len(), 5000);
    }

    #[test]
    fn a_settled_file_is_not_read_again_and_a_racy_one_is() {
        let dir = empty();
        fs::create_dir(dir.path().join("d")).unwrap();
        write(&dir.path().join("d/file"), b"one", 0o644);
        let rescan_after =
            |tree: &Tree| rescan(File::open(dir.path()).unwrap().as_fd(), &TreeLimits::default(), Some(tree));
        let mut earlier = tree_of(dir.path(), &TreeLimits::default()).unwrap();
        let honest = earlier.digest();
        // A wrong content in the earlier tree shows whether it was taken over.
        let d = earlier.root.entry(b"d").unwrap().clone();
        let mut file = d.entry(b"file").unwrap().clone();
        file.content = [7; 32];
        let mut replace = |file: &Node| {
            let directory = Node::directory(d.name.clone(), d.mode, d.stamp, vec![file.clone()]);
            let root = &earlier.root;
            earlier.root = Node::directory(root.name.clone(), root.mode, root.stamp, vec![directory]);
            earlier.clone()
        };
        let racy = replace(&file);
        assert!(file.is_restless());
        assert_eq!(rescan_after(&racy).unwrap().digest(), honest, "within a tick of the scan");
        // The change time is the kernel's and cannot be set back, so the earlier scan is moved forward instead.
        let settled = file.read_at(now() + 3600);
        assert!(!settled.is_restless());
        let earlier = replace(&settled);
        let taken_over = earlier.digest();
        assert_eq!(rescan_after(&earlier).unwrap().digest(), taken_over);
        // The same length and time of modification: the change time tells.
        let modified = fs::metadata(dir.path().join("d/file")).unwrap().modified().unwrap();
        fs::write(dir.path().join("d/file"), b"two").unwrap();
        File::options().write(true).open(dir.path().join("d/file")).unwrap().set_modified(modified).unwrap();
        let fresh = digest_of(dir.path());
        assert_ne!(fresh, honest.to_string());
        assert_eq!(rescan_after(&earlier).unwrap().digest().to_string(), fresh);
    }
}
