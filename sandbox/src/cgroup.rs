//! Control groups, version 2: one leaf per call, born into and killed as a whole.
//!
//! ```text
//! <root>                      the delegated cgroup (systemd, Delegate=yes), else agentd-<hash of the state directory>
//! ├── supervisor              the launcher and agentd; only with delegation, since inner cgroups hold no processes
//! ├── agent-<job>.slice       a job's limits, without oom.group: a full job must not kill calls that did nothing wrong
//! │   ├── call-<sequence>     a call's limits, with oom.group: no call lives on with half of its processes
//! │   └── warm-<number>       the same for a process that was started ahead, and for the call that it serves
//! └── direct-<uid>.slice      what was started ahead for a user's direct calls
//! ```
//!
//! Source: `Documentation/admin-guide/cgroup-v2.rst` of the kernel. Version 1 hierarchies are left alone.

mod events;
mod files;
mod limits;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags, openat};

pub use self::events::Events;
use self::files::{create, directories, is_empty, keyed, read, remove, remove_recursively, wait_until_empty, write};
use self::limits::Limits;
use crate::policy::CallLimits;
use crate::protocol::SliceLimits;

/// How long the sweep waits for the processes of one leftover to be gone. They die at once, but a sandbox's PID 1 is gone only
/// when the host's PID 1 has reaped the tool that it inherited from a killed launcher, and not every host's is quick.
const SWEEP_WAIT: Duration = Duration::from_secs(15);

/// A resource that cgroups limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Controller {
    /// Processor time.
    Cpu,
    /// Memory and swap.
    Memory,
    /// Processes and threads.
    Pids,
    /// Block devices.
    Io,
}

impl Controller {
    /// All that agentd uses.
    pub const ALL: [Self; 4] = [Self::Cpu, Self::Memory, Self::Pids, Self::Io];

    /// The kernel's name for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Pids => "pids",
            Self::Io => "io",
        }
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What went wrong with a cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// This host has no version 2 hierarchy.
    #[error("no cgroup2 file system is mounted")]
    NotMounted,
    /// A directory cannot be made.
    #[error("failed to create cgroup {}", path.display())]
    Create {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be read.
    #[error("failed to read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A value is not taken.
    #[error("failed to write `{value}` to {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The value.
        value: String,
        /// Why.
        source: io::Error,
    },
    /// A directory cannot be removed.
    #[error("failed to remove cgroup {}", path.display())]
    Remove {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The place where this program may make cgroups.
#[derive(Clone, Debug)]
struct Place {
    /// The directory below which the root lies, or which is the root when delegated.
    directory: PathBuf,
    delegated: bool,
}

impl Place {
    fn find() -> Result<Self, CgroupError> {
        let mountinfo = read(Path::new("/proc/self/mountinfo"))?;
        let mount = cgroup2_mount(&mountinfo).ok_or(CgroupError::NotMounted)?;
        let own = read(Path::new("/proc/self/cgroup"))?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let own = mount.join(own);
        // A restarted launcher finds itself in its predecessor's leaf.
        let unit = if own.ends_with("supervisor") { own.parent().unwrap_or(&own).to_owned() } else { own };
        if unit != mount && is_delegated(&unit) {
            return Ok(Self { directory: unit, delegated: true });
        }
        Ok(Self { directory: mount, delegated: false })
    }
}

/// The controllers that a tree opened now could use.
///
/// # Errors
/// When there is no cgroup2 mount or it cannot be read.
pub fn available_controllers() -> Result<BTreeSet<Controller>, CgroupError> {
    controllers_in(&Place::find()?.directory.join("cgroup.controllers"))
}

/// systemd marks what it delegates with this attribute (systemd.resource-control(5), `Delegate=`).
fn is_delegated(directory: &Path) -> bool {
    ["trusted.delegate", "user.delegate"].iter().any(|name| {
        let mut value = [0; 8];
        rustix::fs::getxattr(directory, *name, &mut value).is_ok_and(|length| &value[..length] == b"1")
    })
}

fn cgroup2_mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ');
        let (root, point) = (fields.nth(3)?, fields.next()?);
        // proc(5): space, tab, newline and backslash are octal escapes; no sane cgroup mount has them.
        (file_system.starts_with("cgroup2 ") && root == "/").then(|| PathBuf::from(point))
    })
}

/// agentd's root cgroup.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    delegated: bool,
    controllers: Arc<BTreeSet<Controller>>,
}

impl Tree {
    /// Makes or opens the root that belongs to a state directory, and enables in it every controller that is to be had.
    /// With delegation the calling process moves into the `supervisor` leaf.
    ///
    /// # Errors
    /// When no cgroup2 file system is mounted or the root cannot be made.
    pub fn open(state_dir: &Path) -> Result<Self, CgroupError> {
        let place = Place::find()?;
        let root = if place.delegated {
            let supervisor = place.directory.join("supervisor");
            create(&supervisor)?;
            write(&supervisor.join("cgroup.procs"), &std::process::id().to_string())?;
            place.directory
        } else {
            let state_dir = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
            let hash = blake3::hash(state_dir.as_os_str().as_encoded_bytes());
            let root = place.directory.join(format!("agentd-{}", &hash.to_hex()[..16]));
            create(&root)?;
            enable(&place.directory);
            root
        };
        enable(&root);
        let controllers = controllers_in(&root.join("cgroup.subtree_control"))?.into();
        Ok(Self { root, delegated: place.delegated, controllers })
    }

    /// The controllers that calls are limited by.
    #[must_use]
    pub fn controllers(&self) -> &BTreeSet<Controller> {
        &self.controllers
    }

    /// The root's directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Makes a job's slice, for instance `agent-<job>.slice`, with the job's limits. Each call's PID 1 counts as one of
    /// its processes.
    ///
    /// # Errors
    /// When the directory cannot be made or a limit is refused.
    pub fn slice(&self, name: &str, limits: &SliceLimits) -> Result<Slice, CgroupError> {
        let path = self.root.join(name);
        create(&path)?;
        for controller in self.controllers.iter() {
            write(&path.join("cgroup.subtree_control"), &format!("+{controller}"))?;
        }
        let slice = Slice { path, name: name.to_owned(), controllers: Arc::clone(&self.controllers) };
        let limits = Limits {
            cpu_milli: limits.cpu_milli,
            memory: limits.memory,
            memory_high: limits.memory_high,
            swap: limits.swap,
            pids: limits.pids,
            io: limits.io,
        };
        limits.write(&slice.path, &self.controllers)?;
        Ok(slice)
    }

    /// Kills and removes every slice that an earlier run left, and returns their names. Waits for their processes to die.
    ///
    /// # Errors
    /// When a leftover cannot be killed or removed; the others are gone all the same.
    pub fn sweep(&self) -> Result<Vec<String>, CgroupError> {
        let mut swept = Vec::new();
        let mut first_error = None;
        for path in directories(&self.root)? {
            let name = path.file_name().map(OsStr::to_string_lossy).unwrap_or_default().into_owned();
            if !name.ends_with(".slice") {
                continue;
            }
            let killed = write(&path.join("cgroup.kill"), "1").and_then(|()| {
                wait_until_empty(&path, SWEEP_WAIT)?;
                remove_recursively(&path)
            });
            match killed {
                Ok(()) => swept.push(name),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(swept), Err)
    }

    /// Removes the root, unless it is delegated: then it is systemd's.
    ///
    /// # Errors
    /// When slices are left in it.
    pub fn remove(self) -> Result<(), CgroupError> {
        if self.delegated { Ok(()) } else { remove(&self.root) }
    }
}

/// A job's cgroup.
#[derive(Debug)]
pub struct Slice {
    path: PathBuf,
    name: String,
    controllers: Arc<BTreeSet<Controller>>,
}

impl Slice {
    /// Makes the leaf of one call, for instance `call-7`, with its limits.
    ///
    /// # Errors
    /// When the directory cannot be made or a limit is refused.
    pub fn leaf(&self, name: &str, limits: &CallLimits) -> Result<Leaf, CgroupError> {
        let path = self.path.join(name);
        create(&path)?;
        let open = || openat(CWD, &path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let directory = match open() {
            Ok(directory) => directory,
            Err(source) => return Err(CgroupError::Read { path, source: source.into() }),
        };
        let controllers = Arc::clone(&self.controllers);
        let leaf = Leaf { path, relative: format!("{}/{name}", self.name), directory, controllers };
        // The call's own PID 1 is not the tool's business.
        let pids = limits.pids.map(|pids| pids.saturating_add(1));
        let wanted = Limits {
            cpu_milli: limits.cpu_milli,
            memory: limits.memory,
            memory_high: limits.memory_high,
            swap: limits.swap,
            pids,
            io: limits.io,
        };
        let written = wanted.write(&leaf.path, &self.controllers).and_then(|()| {
            if self.controllers.contains(&Controller::Memory) {
                write(&leaf.path.join("memory.oom.group"), "1")?;
            }
            Ok(())
        });
        match written {
            Ok(()) => Ok(leaf),
            Err(error) => {
                leaf.remove()?;
                Err(error)
            }
        }
    }

    /// Kills everything in the slice.
    ///
    /// # Errors
    /// As writing `cgroup.kill`.
    pub fn kill(&self) -> Result<(), CgroupError> {
        write(&self.path.join("cgroup.kill"), "1")
    }

    /// Causes of trouble that concern the slice's own limits, not a leaf's.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::read(&self.path, &self.controllers)
    }

    /// Removes the slice and the empty leaves in it.
    ///
    /// # Errors
    /// EBUSY while a process lives in it.
    pub fn remove(&self) -> Result<(), CgroupError> {
        remove_recursively(&self.path)
    }
}

/// A call's cgroup.
#[derive(Debug)]
pub struct Leaf {
    path: PathBuf,
    relative: String,
    directory: OwnedFd,
    controllers: Arc<BTreeSet<Controller>>,
}

impl AsFd for Leaf {
    /// The directory, for CLONE_INTO_CGROUP.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

impl Leaf {
    /// Its path below the root, for receipts.
    #[must_use]
    pub fn relative_path(&self) -> &str {
        &self.relative
    }

    /// Kills every process in it, also frozen ones and those being born.
    ///
    /// # Errors
    /// As writing `cgroup.kill` (kernel 5.14).
    pub fn kill(&self) -> Result<(), CgroupError> {
        write(&self.path.join("cgroup.kill"), "1")
    }

    /// Whether no process is left in it. What cannot be read counts as not empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        is_empty(&self.path)
    }

    /// Whether one process is left in it, the reaped not counted. What cannot be read counts as more.
    #[must_use]
    pub fn has_one_process(&self) -> bool {
        read(&self.path.join("cgroup.procs")).is_ok_and(|processes| processes.lines().count() == 1)
    }

    /// What its processes have used so far, as far as the controllers count it.
    #[must_use]
    pub fn usage(&self) -> LeafUsage {
        // Without its controller, a file is not there.
        let text = |controller, file: &str| {
            self.controllers.contains(&controller).then(|| read(&self.path.join(file)).ok()).flatten()
        };
        let number = |controller, file: &str| text(controller, file)?.trim().parse().ok();
        let io = text(Controller::Io, "io.stat");
        let sum = |key: &str| {
            let text = io.as_ref()?;
            Some(text.split_whitespace().filter_map(|word| word.strip_prefix(key)?.parse::<u64>().ok()).sum())
        };
        LeafUsage {
            cpu_usec: keyed(&self.path.join("cpu.stat"), "usage_usec"),
            memory_peak: number(Controller::Memory, "memory.peak"),
            pids_peak: number(Controller::Pids, "pids.peak").map(|peak: u64| peak.saturating_sub(1)),
            io_read: sum("rbytes="),
            io_write: sum("wbytes="),
        }
    }

    /// Causes of trouble that concern the leaf's own limits.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::read(&self.path, &self.controllers)
    }

    /// Removes it.
    ///
    /// # Errors
    /// EBUSY while a process lives in it.
    pub fn remove(&self) -> Result<(), CgroupError> {
        remove(&self.path)
    }
}

/// Figures of one leaf; absent where no controller counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeafUsage {
    /// Processor time in microseconds, user and system.
    pub cpu_usec: Option<u64>,
    /// Highest memory use in bytes.
    pub memory_peak: Option<u64>,
    /// Most processes and threads at once, without PID 1.
    pub pids_peak: Option<u64>,
    /// Bytes read from block devices.
    pub io_read: Option<u64>,
    /// Bytes written to block devices.
    pub io_write: Option<u64>,
}

/// Asks for every controller that is there. One that is refused is missing from `cgroup.subtree_control` afterwards,
/// which is where [`Tree::open`] looks.
fn enable(directory: &Path) {
    for controller in controllers_in(&directory.join("cgroup.controllers")).unwrap_or_default() {
        if let Err(error) = write(&directory.join("cgroup.subtree_control"), &format!("+{controller}")) {
            tracing::debug!(%controller, directory = %directory.display(), %error, "controller not enabled");
        }
    }
}

fn controllers_in(file: &Path) -> Result<BTreeSet<Controller>, CgroupError> {
    let text = read(file)?;
    Ok(Controller::ALL
        .into_iter()
        .filter(|controller| text.split_whitespace().any(|word| word == controller.as_str()))
        .collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_version_2_mount_is_found_beside_version_1() {
        let hybrid = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        assert_eq!(cgroup2_mount(hybrid), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        let unified = "26 24 0:23 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(cgroup2_mount(unified), Some(PathBuf::from("/sys/fs/cgroup")));
        assert_eq!(cgroup2_mount("1 0 8:1 / / rw - ext4 /dev/vda rw\n"), None);
    }

    #[test]
    fn a_leaf_is_made_filled_killed_and_removed() {
        let state = tempfile::tempdir().unwrap();
        let tree = Tree::open(state.path()).unwrap();
        let slice = tree.slice("agent-test.slice", &SliceLimits::default()).unwrap();
        let leaf = slice.leaf("call-7", &CallLimits::default()).unwrap();
        assert_eq!(leaf.relative_path(), "agent-test.slice/call-7");
        assert!(leaf.is_empty());

        let mut sleeper = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(leaf.path.join("cgroup.procs"), sleeper.id().to_string()).unwrap();
        assert!(!leaf.is_empty());
        assert!(leaf.remove().is_err(), "a leaf with a process in it cannot be removed");
        leaf.kill().unwrap();
        sleeper.wait().unwrap();
        wait_until_empty(&leaf.path, Duration::from_secs(10)).unwrap();
        assert!(leaf.usage().cpu_usec.is_some());
        leaf.remove().unwrap();
        slice.remove().unwrap();
        let root = tree.path().to_owned();
        tree.remove().unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn the_sweep_kills_and_removes_what_an_earlier_run_left() {
        let state = tempfile::tempdir().unwrap();
        let tree = Tree::open(state.path()).unwrap();
        let slice = tree.slice("agent-left.slice", &SliceLimits::default()).unwrap();
        let leaf = slice.leaf("call-1", &CallLimits::default()).unwrap();
        let mut sleeper = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(leaf.path.join("cgroup.procs"), sleeper.id().to_string()).unwrap();
        let reaper = std::thread::spawn(move || sleeper.wait());

        assert_eq!(Tree::open(state.path()).unwrap().sweep().unwrap(), ["agent-left.slice"]);
        let status = reaper.join().unwrap().unwrap();
        assert!(!status.success(), "the sleeper was killed, not waited for");
        assert!(!slice.path.exists());
        tree.remove().unwrap();
    }
}
