//! Everything that one sandbox needs, decided before anything starts: mounts, rules, limits, identity, program.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toolproto::code::Code;
use toolproto::manifest::{LATE_WORKSPACE, WORKSPACE};

use crate::egress::RESOLVER;
use crate::file_identity::FileIdentity;
use crate::host::{Host, LimitsMode, Mechanism};
use crate::landlock::{self, Tcp};
use crate::listings::Listings;
use crate::mounts::frame::{Accounts, Entry, Framing, Layout};
use crate::mounts::{Root, ScratchPlace};
use crate::namespaces::Namespaces;
use crate::netns::Furnished;
use crate::netns::bare::Bare;
use crate::policy::{CallLimits, MADE_FILES, PathAccess, PathRule, Policy};
use crate::protocol::LaunchFailure;
use crate::rlimits::Rlimits;
use crate::seccomp::{Program, Told};
use crate::steps;

/// The search path inside a sandbox.
pub const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The workspace, as the sandbox sees it.
#[derive(Debug)]
pub enum View {
    /// An empty, size-limited tmpfs that goes with the call.
    Empty,
    /// A detached mount, made where the launcher lives.
    Tree(OwnedFd),
    /// A mount that comes when the program runs already.
    Later,
}

/// Where the workspace stands, and where the program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// At [`WORKSPACE`], where the program starts.
    Usual,
    /// At [`LATE_WORKSPACE`], so that a view may come later: a Landlock rule on a mount point does not cover what is mounted
    /// there afterwards, one on the directory above does. [`WORKSPACE`] is a link that leads there. The program starts in `/`,
    /// since a working directory does not move to a mount that is made on top of it.
    Late,
}

impl Place {
    /// Inside the sandbox.
    #[must_use]
    pub fn path(self) -> &'static Path {
        Path::new(match self {
            Self::Usual => WORKSPACE,
            Self::Late => LATE_WORKSPACE,
        })
    }

    /// From the root, without the leading slash.
    pub(crate) fn in_root(self) -> PathBuf {
        relative(self.path())
    }

    /// The directory whose Landlock rule covers the workspace.
    fn covered_by(self) -> &'static Path {
        match self {
            Self::Usual => self.path(),
            Self::Late => self.path().parent().unwrap_or(self.path()),
        }
    }
}

/// What a plan is made from.
#[derive(Debug)]
pub struct Inputs<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The program and its arguments. A program without a slash is looked for on [`PATH`].
    pub command: &'a [OsString],
    /// Environment, besides PATH, HOME, TMPDIR, USER and LANG, which it may replace.
    pub env: &'a [(OsString, OsString)],
    /// The tool's folder, read-only at /tool.
    pub tool_folder: Option<&'a Path>,
    /// Further paths of the host that the runtime needs, read-only at their own names.
    pub runtime_mounts: &'a [PathBuf],
    /// The uid of whose call it is.
    pub user: u32,
    /// uid and gid of this sandbox, which no other live sandbox has.
    pub sandbox_id: u32,
    /// The workspace.
    pub view: View,
    /// Where it stands.
    pub place: Place,
    /// Whether Landlock refuses writing to the workspace, whatever the view would allow.
    pub workspace_read_only: bool,
    /// Limits.
    pub limits: CallLimits,
    /// The network with the places of listed hosts; without listed hosts a new one with nothing but loopback.
    pub network: Option<Furnished>,
}

/// A sandbox, ready to be started.
#[derive(Debug)]
pub struct Plan {
    /// What the kernel will enforce, by mechanism.
    pub enforced: Vec<String>,
    /// What the policy requires and this host cannot enforce (best effort only).
    pub not_enforced: Vec<String>,
    pub(crate) sandbox_id: u32,
    pub(crate) command: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    pub(crate) places: Vec<CString>,
    pub(crate) view: View,
    pub(crate) root: Root,
    pub(crate) namespaces: Namespaces,
    pub(crate) network: Option<Furnished>,
    pub(crate) bare: Option<Bare>,
    pub(crate) framing: Framing,
    pub(crate) rlimits: Rlimits,
    pub(crate) landlock: landlock::Abi,
    pub(crate) access: landlock::Rules,
    pub(crate) program: Arc<Program>,
    /// Whether refused system calls are recorded.
    pub(crate) name_denials: bool,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// POLICY_UNENFORCEABLE when the host lacks what the policy requires, LAUNCH_FAILED when a path of the host cannot be
    /// looked at or the command holds a NUL byte.
    pub fn build(host: &Host, listings: &Listings, inputs: Inputs<'_>) -> Result<Self, LaunchFailure> {
        let unenforceable = |what: &str| LaunchFailure {
            code: Code::PolicyUnenforceable,
            step: "plan".to_owned(),
            errno: None,
            message: format!("policy `{}` requires what this host cannot enforce: {what}", inputs.policy.name),
        };
        let egress = inputs.network.is_some().then_some(Mechanism::Egress);
        if let Some(mechanism) = INDISPENSABLE.into_iter().chain(egress).find(|mechanism| !host.has(*mechanism)) {
            let reason = host.missing(mechanism).unwrap_or_default();
            return Err(unenforceable(&format!("{mechanism}: {reason}")));
        }
        let mut not_enforced = missing(host, inputs.policy, &inputs.limits);
        not_enforced.extend(inputs.network.as_ref().and_then(|_| open_loopback(host, inputs.policy)));
        if let Some(first) = not_enforced.first()
            && host.mode() == LimitsMode::Required
        {
            return Err(unenforceable(first));
        }
        let places_failed = |error: io::Error| LaunchFailure {
            code: Code::LaunchFailed,
            step: "plan".to_owned(),
            errno: error.raw_os_error(),
            message: format!("a path of the host that the sandbox shows cannot be looked at: {error}"),
        };
        let entries = entries(&inputs, listings).map_err(places_failed)?;
        let access = access(&inputs, &entries);
        let scratch = scratch(&inputs);
        let is_within = |entry: &Entry| scratch.iter().any(|place| entry.target().starts_with(&place.target));
        let (within_scratch, entries) = entries.into_iter().partition(is_within);
        let (command, environment) = strings(&inputs)?;
        let Some(program) = command.first() else {
            return Err(unusable("the command is empty"));
        };
        let path = inputs.env.iter().rev().find(|(name, _)| name == "PATH").and_then(|(_, value)| value.to_str());
        let places = steps::places(program, path.unwrap_or(PATH));
        let has = |mechanism| host.has(mechanism);
        let by_cgroup = has(Mechanism::CgroupPids);
        Ok(Self {
            enforced: enforced(host, &inputs.limits, inputs.network.is_some()),
            not_enforced,
            sandbox_id: inputs.sandbox_id,
            places,
            command,
            environment,
            root: Root {
                layout: Layout { entries, place: inputs.place, user: inputs.user },
                accounts: Accounts::of(inputs.sandbox_id),
                scratch,
                within_scratch,
                guarded: guarded(&inputs),
                show_cgroup: has(Mechanism::CgroupNamespace),
            },
            // Where Landlock does not keep a call off its own loopback, an interface that is down does.
            namespaces: Namespaces::where_possible(has)
                .with_loopback(inputs.policy.loopback || has(Mechanism::LandlockTcp)),
            rlimits: Rlimits {
                open_files: inputs.limits.open_files,
                // The sandbox's PID 1 has the same uid.
                processes: inputs.limits.pids.filter(|_| !by_cgroup).map(|pids| u64::from(pids) + 1),
            },
            landlock: host.landlock().only(has),
            access,
            program: inputs.policy.program(),
            name_denials: has(Mechanism::SeccompNotify),
            view: inputs.view,
            network: inputs.network,
            bare: None,
            framing: Framing::Own,
        })
    }
}

impl Plan {
    /// Whether the tool makes itself a network with nothing in it but loopback.
    #[must_use]
    pub const fn makes_bare_network(&self) -> bool {
        self.network.is_none() && self.bare.is_none() && self.namespaces.have_bare_network()
    }

    /// Has the tool enter such a network instead, which was made ahead.
    pub fn enter_network(&mut self, bare: Bare) {
        self.bare = Some(bare);
    }

    /// What PID 1 is told of, if it can be: of sockets only where the network may serve again.
    pub(crate) fn told(&self) -> Option<Told> {
        let serves_again = self.bare.is_some() && self.program.tells_of_sockets();
        self.name_denials.then_some(if serves_again { Told::Sockets } else { Told::Refusals })
    }

    /// The uid of whose call it is.
    #[must_use]
    pub fn user(&self) -> u32 {
        self.root.layout.user
    }

    /// What the frame of its root is made of.
    pub(crate) const fn layout(&self) -> &Layout {
        &self.root.layout
    }

    /// Has it come by the frame of its root so.
    pub(crate) fn begin_with(&mut self, framing: Framing) {
        self.framing = framing;
    }

    /// The network that was made ahead, if one was.
    pub(crate) fn network_ahead(&self) -> Option<BorrowedFd<'_>> {
        self.network.as_ref().map(Furnished::namespace).or_else(|| self.bare.as_ref().map(Bare::namespace))
    }

    /// Paths in the workspace that can only be read.
    #[must_use]
    pub fn guarded(&self) -> &[PathBuf] {
        &self.root.guarded
    }
}

/// Without these there is no sandbox to speak of, so they are required whatever the policy and the mode say.
const INDISPENSABLE: [Mechanism; 3] = [Mechanism::MountNamespace, Mechanism::PidNamespace, Mechanism::Seccomp];

/// What a policy requires and the host lacks, in words: under [`LimitsMode::Required`] its calls are refused then.
#[must_use]
pub fn unenforceable(host: &Host, policy: &Policy) -> Vec<String> {
    let indispensable = INDISPENSABLE
        .into_iter()
        .filter_map(|mechanism| host.missing(mechanism).map(|reason| format!("{mechanism}: {reason}")));
    indispensable.chain(missing(host, policy, &policy.limits)).collect()
}

/// What the policy requires and the host lacks, in words.
fn missing(host: &Host, policy: &Policy, limits: &CallLimits) -> Vec<String> {
    let lacks = |name: &str, any_of: &[Mechanism]| {
        if any_of.iter().any(|mechanism| host.has(*mechanism)) {
            return None;
        }
        let reasons: Vec<_> = any_of
            .iter()
            .map(|mechanism| format!("{mechanism}: {}", host.missing(*mechanism).unwrap_or_default()))
            .collect();
        Some(format!("{name} ({})", reasons.join("; ")))
    };
    let properties = policy.require.iter().filter_map(|(name, required)| lacks(name, required.mechanisms()));
    let limit = |given: bool, name: &str, any_of: &[Mechanism]| if given { lacks(name, any_of) } else { None };
    let limits = [
        limit(limits.memory.is_some(), "limit of memory", &[Mechanism::CgroupMemory]),
        limit(limits.memory_high.is_some(), "memory from which on a call is slowed down", &[Mechanism::CgroupMemory]),
        limit(limits.io.is_limited(), "rate of disk traffic", &[Mechanism::CgroupIo]),
        limit(limits.swap.is_some(), "limit of swap", &[Mechanism::CgroupMemory]),
        limit(limits.pids.is_some(), "limit of processes", &[Mechanism::CgroupPids, Mechanism::RlimitPids]),
        limit(limits.cpu_milli.is_some(), "limit of processor time", &[Mechanism::CgroupCpu]),
    ];
    properties.chain(limits.into_iter().flatten()).collect()
}

/// What keeps a call that lists hosts off its own loopback, if the host lacks it: the hosts' places are there, too, so it is up.
fn open_loopback(host: &Host, policy: &Policy) -> Option<String> {
    let reason = host.missing(Mechanism::LandlockTcp).filter(|_| !policy.loopback)?;
    Some(format!("loopback = false beside listed hosts ({}: {reason})", Mechanism::LandlockTcp))
}

/// The names of everything that the kernel will enforce on this call.
fn enforced(host: &Host, limits: &CallLimits, is_let_out: bool) -> Vec<String> {
    let limited = |mechanism| match mechanism {
        Mechanism::Egress => is_let_out,
        Mechanism::CgroupCpu => limits.cpu_milli.is_some(),
        Mechanism::CgroupMemory => limits.memory.is_some() || limits.memory_high.is_some(),
        Mechanism::CgroupIo => limits.io.is_limited(),
        Mechanism::CgroupPids => limits.pids.is_some(),
        Mechanism::RlimitPids => limits.pids.is_some() && !host.has(Mechanism::CgroupPids),
        // It sees, but forbids nothing.
        Mechanism::SeccompNotify => false,
        _ => true,
    };
    let mechanisms = Mechanism::ALL.iter().filter(|mechanism| host.has(**mechanism) && limited(**mechanism));
    let always = ["own_uid", "no_capabilities", "no_new_privileges", "rlimits", "closed_descriptors"];
    mechanisms.map(|mechanism| mechanism.as_str()).chain(always).map(str::to_owned).collect()
}

pub(crate) fn entries(inputs: &Inputs<'_>, listings: &Listings) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let hidden =
        |path: &Path| inputs.policy.paths.iter().any(|rule| rule.access == PathAccess::Hide && rule.path == path);
    for rule in inputs.policy.paths.iter().filter(|rule| rule.access == PathAccess::Read) {
        for path in matches(rule, listings)?.into_iter().filter(|path| !hidden(path) && !is_made(path)) {
            entries.extend(mirror(&path)?);
        }
    }
    for path in inputs.runtime_mounts {
        if !is_below_any(path, &entries) {
            entries.extend(mirror(path)?);
        }
    }
    if let Some(folder) = inputs.tool_folder {
        // One that is not there is missed when it is opened.
        let file = folder.symlink_metadata().as_ref().map(FileIdentity::from).unwrap_or_default();
        entries.push(Entry::Bind { source: folder.to_owned(), file, target: "tool".into() });
    }
    entries.extend(made_files(inputs.network.is_some()));
    for rule in inputs.policy.paths.iter().filter(|rule| rule.access == PathAccess::Hide) {
        if let Ok(metadata) = rule.path.symlink_metadata()
            && is_below_any(&rule.path, &entries)
        {
            entries.push(Entry::Hide { file: FileIdentity::from(&metadata), target: relative(&rule.path) });
        }
    }
    Ok(entries)
}

/// The private file systems.
pub(crate) fn scratch(inputs: &Inputs<'_>) -> Vec<ScratchPlace> {
    let owner = (inputs.sandbox_id, inputs.sandbox_id);
    let place = |target: PathBuf, size, limit, mode| ScratchPlace { target, size, limit, mode, owner };
    let mut places = vec![
        place("tmp".into(), inputs.limits.tmp, "tmp", 0o1777),
        place("dev/shm".into(), inputs.limits.shm, "shm", 0o1777),
    ];
    if matches!(inputs.view, View::Empty) {
        places.push(place(inputs.place.in_root(), inputs.limits.empty_workspace, "empty_workspace", 0o755));
    }
    places
}

/// Protected names at the workspace's top, which a tool learns early that it cannot change.
fn guarded(inputs: &Inputs<'_>) -> Vec<PathBuf> {
    let rules = inputs.policy.protect.iter().filter(|rule| !rule.unless_directory && !inputs.workspace_read_only);
    rules.map(|rule| PathBuf::from(&rule.name)).collect()
}

/// The paths that a rule stands for, of those that the host has.
fn matches(rule: &PathRule, listings: &Listings) -> io::Result<Vec<PathBuf>> {
    let name = rule.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match (name.strip_suffix('*'), rule.path.parent()) {
        (Some(prefix), Some(parent)) => listings.beginning_with(parent, prefix),
        _ => Ok(vec![rule.path.clone()]),
    }
}

/// A path of the host at its own name: a link as a link, everything else bound, and nothing for what is not there.
fn mirror(path: &Path) -> io::Result<Option<Entry>> {
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let target = relative(path);
    Ok(Some(if metadata.is_symlink() {
        Entry::Link { target, to: fs::read_link(path)? }
    } else {
        Entry::Bind { source: path.to_owned(), file: FileIdentity::from(&metadata), target }
    }))
}

fn is_below_any(path: &Path, entries: &[Entry]) -> bool {
    entries.iter().any(|entry| matches!(entry, Entry::Bind { target, .. } if relative(path).starts_with(target)))
}

fn relative(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

/// Whether a path is made new for each sandbox, though a rule with `*` stands for it, too.
fn is_made(path: &Path) -> bool {
    MADE_FILES.iter().any(|made| Path::new(made) == path)
}

/// The [`MADE_FILES`] that all calls have alike: all but the [`Accounts`].
fn made_files(is_let_out: bool) -> Vec<Entry> {
    let resolver = if is_let_out { format!("nameserver {RESOLVER}\n") } else { String::new() };
    let files = [
        ("etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n"),
        ("etc/hostname", "sandbox\n"),
        ("etc/resolv.conf", &resolver),
        ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        ("etc/shells", "/bin/sh\n"),
    ];
    files.into_iter().map(|(path, content)| Entry::File { target: path.into(), content: content.to_owned() }).collect()
}

/// Directories of the root itself that may be read, with all that stands in them.
const OWN_DIRECTORIES: [&str; 5] = ["/etc", "/proc", "/sys", "/var", "/run"];
/// Links in them.
const OWN_LINKS: [&str; 2] = ["/var/tmp", "/var/run"];

/// Whether the rule on one of the root's own directories covers a path: a rule holds for all that lies below, also where
/// something else is mounted (landlock(7)). A link, or a tree of the host, on the way may lead elsewhere.
fn is_implied(path: &Path, entries: &[Entry]) -> bool {
    let is_on_the_way = |above: &Path| path != above && path.starts_with(above);
    OWN_DIRECTORIES.iter().any(|own| is_on_the_way(Path::new(own)))
        && !OWN_LINKS.iter().any(|link| is_on_the_way(Path::new(link)))
        && !entries.iter().any(|entry| is_on_the_way(&Path::new("/").join(entry.target())))
}

/// The Landlock rules that follow from what is mounted.
pub(crate) fn access(inputs: &Inputs<'_>, entries: &[Entry]) -> landlock::Rules {
    let mut read: BTreeSet<PathBuf> = OWN_DIRECTORIES.map(PathBuf::from).into();
    read.extend(entries.iter().filter_map(|entry| match entry {
        Entry::Bind { target, .. } => Some(Path::new("/").join(target)),
        _ => None,
    }));
    let mut write = vec![PathBuf::from("/tmp"), PathBuf::from("/dev/shm")];
    if inputs.workspace_read_only {
        read.insert(inputs.place.covered_by().to_owned());
    } else {
        write.push(inputs.place.covered_by().to_owned());
    }
    read.retain(|path| !is_implied(path, entries));
    landlock::Rules {
        list: vec!["/".into()],
        read: read.into_iter().collect(),
        write,
        devices: vec!["/dev".into()],
        tcp: match (&inputs.network, inputs.policy.loopback) {
            (_, true) => Tcp::Unrestricted,
            (Some(network), false) => Tcp::ConnectTo(network.ports().clone()),
            (None, false) => Tcp::ConnectTo(BTreeSet::new()),
        },
    }
}

fn strings(inputs: &Inputs<'_>) -> Result<(Vec<CString>, Vec<CString>), LaunchFailure> {
    let string =
        |text: Vec<u8>| CString::new(text).map_err(|_| unusable("the command or its environment holds a NUL byte"));
    let command = inputs.command.iter().map(|word| string(word.clone().into_vec())).collect::<Result<_, _>>()?;
    let own = [("PATH", PATH), ("HOME", "/tmp"), ("TMPDIR", "/tmp"), ("USER", "agent"), ("LANG", "C.UTF-8")];
    let given = |name: &str| inputs.env.iter().any(|(key, _)| key == name);
    let own =
        own.into_iter().filter(|(name, _)| !given(name)).map(|(name, value)| format!("{name}={value}").into_bytes());
    let passed = inputs.env.iter().map(|(name, value)| {
        let mut pair = name.clone().into_vec();
        pair.push(b'=');
        pair.extend_from_slice(value.as_encoded_bytes());
        pair
    });
    let environment = own.chain(passed).map(string).collect::<Result<_, _>>()?;
    Ok((command, environment))
}

fn unusable(message: &str) -> LaunchFailure {
    LaunchFailure { code: Code::LaunchFailed, step: "plan".to_owned(), errno: None, message: message.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_implied_only_where_nothing_leads_elsewhere() {
        let link = |target: &str| Entry::Link { target: target.into(), to: "/srv".into() };
        let bind = |target: &str| Entry::Bind {
            source: Path::new("/").join(target),
            file: FileIdentity::default(),
            target: target.into(),
        };
        let entries = [link("etc/link"), bind("etc/tree"), bind("opt/tree")];
        let implied = ["/etc/hosts", "/etc/ssl/certs", "/etc/tree", "/var/lib/x", "/run/x"];
        let own =
            ["/etc", "/usr", "/opt/tree/x", "/etc/link/x", "/etc/tree/x", "/var/tmp/x", "/var/run/x", "/etcetera"];
        for (paths, expected) in [(&implied[..], true), (&own[..], false)] {
            for path in paths {
                assert_eq!(is_implied(Path::new(path), &entries), expected, "{path}");
            }
        }
    }
}
