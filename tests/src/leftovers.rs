//! What a daemon may leave behind and must not: processes, cgroups, mounts. Only this site's own are looked at, since others
//! run daemons on the same host.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::site::Site;

/// The variable that marks all processes of a site, but for tools, whose environment is their own.
pub const MARK: &str = "AGENTD_TEST_SITE";

/// A process of the host.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its id.
    pub id: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: u32,
    /// Its state's letter.
    pub state: char,
}

/// Something that is left.
#[derive(Clone, Debug)]
pub enum Leftover {
    /// A process of the daemon or of a sandbox.
    Process(Process),
    /// A cgroup directory.
    Cgroup(PathBuf),
    /// A mount, as /proc/self/mountinfo has it.
    Mount(String),
}

/// All processes of the host.
pub fn processes() -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    // One that ends meanwhile is no process any more.
    ids.filter_map(process).collect()
}

fn process(id: u32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let uid = fs::metadata(format!("/proc/{id}")).ok().map_or(0, |metadata| metadata.uid());
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    // /proc/ID of a process that is not dumpable belongs to root; its status tells the truth.
    let real = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse().ok());
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Process { id, parent, name: name.to_owned(), uid: real.unwrap_or(uid), state })
}

/// The site's processes: by sandbox uid, or by the mark in their environment.
pub fn site_processes(site: &Site) -> Vec<Process> {
    let mark = format!("{MARK}={}", site.folder().display());
    processes()
        .into_iter()
        // One that waits for the host's PID 1 to look at it has ended.
        .filter(|process| process.state != 'Z' || (site.owns_uid(process.uid) && process.parent != 1))
        .filter(|process| {
            site.owns_uid(process.uid)
                || fs::read(format!("/proc/{}/environ", process.id))
                    .is_ok_and(|bytes| bytes.split(|byte| *byte == 0).any(|pair| pair == mark.as_bytes()))
        })
        .filter(|process| process.id != std::process::id())
        .collect()
}

/// Waits until no process of the site is left.
///
/// # Panics
/// When one stays; with what the kernel tells of it.
pub fn await_no_process(site: &Site, within: Duration) {
    let end = Instant::now() + within;
    loop {
        let left = site_processes(site);
        if left.is_empty() {
            return;
        }
        if Instant::now() > end {
            let told: Vec<String> = left.iter().map(whereabouts).collect();
            clear(site);
            panic!("not gone within {within:?}:\n{}", told.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Where a process is: what tells a test that failed once, elsewhere, which process it was that stayed.
fn whereabouts(process: &Process) -> String {
    let about = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", process.id)).unwrap_or_default();
    let command = about("cmdline").replace('\0', " ");
    let namespaces = about("status").lines().find(|line| line.starts_with("NSpid:")).unwrap_or_default().to_owned();
    let (waits, call) = (about("wchan"), about("syscall"));
    format!("{process:?} {command:?} {namespaces} waits in {waits}, system call {}", call.trim_end())
}

/// The cgroup directory that a daemon on this site makes where no service manager delegates one.
pub fn cgroup_root(site: &Site) -> Option<PathBuf> {
    let mount = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        .into_iter()
        .find(|place| Path::new(place).join("cgroup.controllers").exists())?;
    let state = site.path("state");
    let state = fs::canonicalize(&state).unwrap_or(state);
    let hash = blake3::hash(state.as_os_str().as_encoded_bytes()).to_hex();
    Some(Path::new(mount).join(format!("agentd-{}", &hash[..16])))
}

/// Everything below a cgroup, the deepest first.
pub fn cgroups_below(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten().filter(|entry| entry.path().is_dir()) {
        found.extend(cgroups_below(&entry.path()));
        found.push(entry.path());
    }
    found
}

/// What is left of a site's daemon.
pub fn find(site: &Site) -> Vec<Leftover> {
    let mut left: Vec<Leftover> = site_processes(site).into_iter().map(Leftover::Process).collect();
    if let Some(root) = cgroup_root(site) {
        left.extend(cgroups_below(&root).into_iter().map(Leftover::Cgroup));
        if root.exists() {
            left.push(Leftover::Cgroup(root));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let folder = site.folder().display().to_string();
    left.extend(mounts.lines().filter(|line| line.contains(&folder)).map(|line| Leftover::Mount(line.to_owned())));
    left
}

/// Proves that nothing is left, with a moment for what the kernel does by itself.
///
/// # Panics
/// When something is left.
pub fn assert_none(site: &Site) {
    let end = Instant::now() + Duration::from_secs(5);
    loop {
        let left = find(site);
        if left.is_empty() {
            return;
        }
        if Instant::now() > end {
            clear(site);
            panic!("left behind: {left:#?}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Ends and removes what a failed test left, so that it disturbs no other.
pub fn clear(site: &Site) {
    for process in site_processes(site) {
        if let Ok(id) = i32::try_from(process.id) {
            // It may have ended meanwhile.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(id), nix::sys::signal::Signal::SIGKILL);
        }
    }
    if let Some(root) = cgroup_root(site).filter(|root| root.exists()) {
        let end = Instant::now() + Duration::from_secs(5);
        // Directories can be removed once the kernel has seen their processes off.
        while root.exists() && Instant::now() < end {
            for directory in cgroups_below(&root) {
                let _ = fs::remove_dir(directory);
            }
            let _ = fs::remove_dir(&root);
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
