//! Landlock: which files, ports, sockets and processes the tool reaches, checked by the kernel on each access
//! (landlock(7)). It keeps what the fresh root keeps, a second time and independently.
//!
//! A rule on a mountpoint does not cover what is mounted on it later, one on its parent does; so the rules are opened
//! after everything is mounted, and a place that is mounted on later gets its rule on a parent that holds nothing else.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fstat, openat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use crate::host::Mechanism;
use crate::namespaces::try_in_child;
use crate::steps::errno_of;
use crate::sys::clone::Birth;

/// The Landlock interface that works on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abi {
    version: ABI,
    tcp: bool,
    abstract_sockets: bool,
    signals: bool,
}

impl Abi {
    /// The interface's version; 0 when Landlock does not work.
    #[must_use]
    pub fn version(self) -> u8 {
        self.version as u8
    }

    /// The same interface without the parts that are not to be used.
    pub(crate) fn only(self, used: impl Fn(Mechanism) -> bool) -> Self {
        Self {
            version: if used(Mechanism::LandlockFiles) { self.version } else { ABI::Unsupported },
            tcp: self.tcp && used(Mechanism::LandlockTcp),
            abstract_sockets: self.abstract_sockets && used(Mechanism::LandlockAbstractSockets),
            signals: self.signals && used(Mechanism::LandlockSignals),
        }
    }

    /// What it can enforce.
    pub(crate) fn mechanisms(self) -> [(Mechanism, Result<(), String>); 4] {
        let verdict = |works: bool, since: &str| {
            if works { Ok(()) } else { Err(format!("this kernel's Landlock does not enforce it (needs {since})")) }
        };
        [
            (Mechanism::LandlockFiles, verdict(self.version > ABI::Unsupported, "Linux 5.13 with lsm=landlock")),
            (Mechanism::LandlockTcp, verdict(self.tcp, "Linux 6.7")),
            (Mechanism::LandlockAbstractSockets, verdict(self.abstract_sockets, "Linux 6.12")),
            (Mechanism::LandlockSignals, verdict(self.signals, "Linux 6.12")),
        ]
    }
}

/// From the newest to the oldest that this program knows.
const VERSIONS: [ABI; 10] = [ABI::V10, ABI::V9, ABI::V8, ABI::V7, ABI::V6, ABI::V5, ABI::V4, ABI::V3, ABI::V2, ABI::V1];

/// Finds the newest version whose files part the kernel accepts and enforces, then tries each further part.
pub(crate) fn probe() -> Abi {
    let refuses_files = |version| {
        try_in_child(Birth::default(), || {
            let ruleset = Ruleset::default()
                .set_compatibility(CompatLevel::HardRequirement)
                .handle_access(AccessFs::from_all(version));
            enforce(ruleset.and_then(Ruleset::create).map_err(io::Error::other)?)?;
            expect_refused(rustix::fs::open("/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()))
        })
        .is_ok()
    };
    let Some(version) = VERSIONS.into_iter().find(|version| refuses_files(*version)) else {
        return Abi { version: ABI::Unsupported, tcp: false, abstract_sockets: false, signals: false };
    };
    Abi { version, tcp: refuses_tcp(version), abstract_sockets: refuses_abstract_sockets(), signals: refuses_signals() }
}

fn refuses_tcp(version: ABI) -> bool {
    try_in_child(Birth::default(), || {
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::HardRequirement)
            .handle_access(AccessNet::from_all(version))
            .and_then(Ruleset::create);
        enforce(ruleset.map_err(io::Error::other)?)?;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        expect_refused(bind(&socket, &std::net::SocketAddr::from(([127, 0, 0, 1], 0))))
    })
    .is_ok()
}

fn scoped(scope: Scope) -> io::Result<()> {
    let ruleset =
        Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(scope).and_then(Ruleset::create);
    enforce(ruleset.map_err(io::Error::other)?)
}

fn refuses_abstract_sockets() -> bool {
    try_in_child(Birth::default(), || {
        let open = || socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let listener = open()?;
        let name = format!("agentd-probe-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        bind(&listener, &address)?;
        listen(&listener, 1)?;
        scoped(Scope::AbstractUnixSocket)?;
        expect_refused(connect(open()?, &address))
    })
    .is_ok()
}

fn refuses_signals() -> bool {
    try_in_child(Birth::default(), || {
        let parent = rustix::process::getppid().ok_or(io::ErrorKind::NotFound)?;
        scoped(Scope::Signal)?;
        expect_refused(rustix::process::test_kill_process(parent))
    })
    .is_ok()
}

fn expect_refused<T>(result: rustix::io::Result<T>) -> io::Result<()> {
    match result {
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) => Ok(()),
        _ => Err(io::ErrorKind::Unsupported.into()),
    }
}

/// TCP ports that may be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tcp {
    /// All of what the network namespace has.
    Unrestricted,
    /// None is bound, and only these are connected to.
    ConnectTo(BTreeSet<u16>),
}

/// What the tool may reach. Paths are those inside the sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    /// Directories that may be listed, with all below them.
    pub(crate) list: Vec<PathBuf>,
    /// Trees that may be read and executed.
    pub(crate) read: Vec<PathBuf>,
    /// Trees where everything is allowed.
    pub(crate) write: Vec<PathBuf>,
    /// Trees of devices: read, written and controlled, but nothing is created.
    pub(crate) devices: Vec<PathBuf>,
    /// Ports.
    pub(crate) tcp: Tcp,
}

/// Confines the calling process. The files behind its descriptors 0, 1 and 2 stay usable as they were opened, also when
/// they are opened again by their names in /dev.
pub(crate) fn restrict(abi: Abi, rules: &Rules) -> io::Result<()> {
    if abi.version == ABI::Unsupported {
        return Ok(());
    }
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(abi.version))
        .map_err(io::Error::other)?;
    let ports = match &rules.tcp {
        Tcp::ConnectTo(ports) if abi.tcp => Some(ports),
        _ => None,
    };
    if ports.is_some() {
        ruleset = ruleset.handle_access(AccessNet::from_all(abi.version)).map_err(io::Error::other)?;
    }
    if abi.abstract_sockets {
        ruleset = ruleset.scope(Scope::AbstractUnixSocket).map_err(io::Error::other)?;
    }
    if abi.signals {
        ruleset = ruleset.scope(Scope::Signal).map_err(io::Error::other)?;
    }
    let mut created = ruleset.create().map_err(io::Error::other)?;
    for port in ports.into_iter().flatten() {
        created = created.add_rule(NetPort::new(*port, AccessNet::ConnectTcp)).map_err(io::Error::other)?;
    }

    let all = AccessFs::from_all(abi.version);
    let read = AccessFs::from_read(abi.version);
    // Nobody in a sandbox makes devices.
    let write = all & !(AccessFs::MakeChar | AccessFs::MakeBlock);
    let change = all & (AccessFs::WriteFile | AccessFs::Truncate);
    let devices = read | change | (all & AccessFs::IoctlDev);
    let list = AccessFs::ReadDir.into();
    let trees = [(&rules.list, list), (&rules.read, read), (&rules.write, write), (&rules.devices, devices)];
    for (paths, access) in trees {
        for path in paths {
            created = allow(created, open(path)?, access, abi)?;
        }
    }
    for descriptor in [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()] {
        // Pipes and sockets have no path to check.
        if FileType::from_raw_mode(fstat(descriptor)?.st_mode) == FileType::RegularFile {
            let access = match fcntl_getfl(descriptor)? & OFlags::RWMODE {
                OFlags::WRONLY => change,
                OFlags::RDWR => change | AccessFs::ReadFile,
                _ => AccessFs::ReadFile.into(),
            };
            // A file that lies in no reachable file system, such as a memfd, takes no rule and needs none (EBADFD).
            match allow(created.try_clone()?, descriptor.try_clone_to_owned()?, access, abi) {
                Ok(with_rule) => created = with_rule,
                Err(error) if errno_of(&error) == Some(libc::EBADFD) => {}
                Err(error) => return Err(error),
            }
        }
    }
    enforce(created)
}

fn open(path: &PathBuf) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

fn allow(ruleset: RulesetCreated, file: OwnedFd, access: BitFlags<AccessFs>, abi: Abi) -> io::Result<RulesetCreated> {
    let kind = FileType::from_raw_mode(fstat(file.as_fd())?.st_mode);
    // Rights that make no sense for a file are refused by the kernel.
    let access = if kind == FileType::Directory { access } else { access & AccessFs::from_file(abi.version) };
    ruleset.add_rule(PathBeneath::new(file, access)).map_err(io::Error::other)
}

fn enforce(ruleset: RulesetCreated) -> io::Result<()> {
    let status = ruleset.restrict_self().map_err(io::Error::other)?;
    if status.ruleset == RulesetStatus::FullyEnforced { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}
