//! What this kernel can enforce: each mechanism is tried once at start, in a child that is thrown away.
//!
//! A kernel may claim an interface that it does not keep (disabled at boot, patched, filtered by an outer container), so
//! nothing is concluded from version numbers.

use std::collections::BTreeMap;
use std::fmt;

use crate::cgroup::{self, Controller};
use crate::{landlock, namespaces, netns, seccomp};

/// What happens to a call whose policy requires what the host cannot enforce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitsMode {
    /// It is refused with POLICY_UNENFORCEABLE.
    Required,
    /// It runs, and its receipt lists what was let go.
    BestEffort,
}

macro_rules! mechanisms {
    ($($variant:ident = $text:literal, $meaning:literal;)*) => {
        /// One thing that the kernel can enforce. Its name stands in policies (`[require]`) and receipts (`enforced`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Mechanism {
            $(#[doc = $meaning] $variant,)*
        }

        impl Mechanism {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// What it keeps, in one sentence.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* }
            }

            /// The mechanism of that name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|mechanism| mechanism.as_str() == name)
            }
        }
    };
}

mechanisms! {
    MountNamespace = "mount_namespace", "The tool sees only the files of its own root.";
    PidNamespace = "pid_namespace", "The tool sees and signals only its own processes, and none outlives the call.";
    NetNamespace = "net_namespace", "The tool has a network of its own with nothing but loopback.";
    IpcNamespace = "ipc_namespace", "System V IPC and POSIX queues are the call's own.";
    UtsNamespace = "uts_namespace", "The host's name is not shown.";
    CgroupNamespace = "cgroup_namespace", "The tool sees its own cgroup as the root.";
    LandlockFiles = "landlock_files", "Files are reached only below the paths of the policy.";
    LandlockTcp = "landlock_tcp", "TCP ports are bound and connected to only where the policy says.";
    LandlockAbstractSockets = "landlock_abstract_sockets", "No abstract Unix socket outside the sandbox is reached.";
    LandlockSignals = "landlock_signals", "No process outside the sandbox is signalled.";
    Seccomp = "seccomp", "Only the system calls of the policy reach the kernel.";
    Egress = "egress", "Connections lead to listed hosts only, by name, through agentd.";
    SeccompNotify = "seccomp_notify", "Refused system calls are named in the receipt.";
    CgroupKill = "cgroup_kill", "All processes of a call are killed at once.";
    CgroupCpu = "cgroup_cpu", "Processor time is limited.";
    CgroupMemory = "cgroup_memory", "Memory is limited.";
    CgroupPids = "cgroup_pids", "Processes are limited by cgroup.";
    CgroupIo = "cgroup_io", "Block device traffic is counted and, where a rate is set, limited.";
    RlimitPids = "rlimit_pids", "Processes are limited by RLIMIT_NPROC, which counts the sandbox's own uid.";
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What this host can enforce.
#[derive(Clone, Debug)]
pub struct Host {
    mode: LimitsMode,
    /// Absent mechanisms carry the reason.
    mechanisms: BTreeMap<Mechanism, Result<(), String>>,
    landlock: landlock::Abi,
}

impl Host {
    /// Tries every mechanism. Forks, so the calling process must have no other threads.
    #[must_use]
    pub fn probe(mode: LimitsMode) -> Self {
        let mut mechanisms = BTreeMap::new();
        mechanisms.extend(namespaces::probe());
        mechanisms.extend([netns::probe()]);
        let landlock = landlock::probe();
        mechanisms.extend(landlock.mechanisms());
        mechanisms.extend(seccomp::probe());
        mechanisms.extend(probe_cgroups());
        mechanisms.insert(Mechanism::RlimitPids, Ok(()));
        Self { mode, mechanisms, landlock }
    }

    /// What happens when the host cannot enforce what a policy requires.
    #[must_use]
    pub const fn mode(&self) -> LimitsMode {
        self.mode
    }

    /// Whether the mechanism works here.
    #[must_use]
    pub fn has(&self, mechanism: Mechanism) -> bool {
        matches!(self.mechanisms.get(&mechanism), Some(Ok(())))
    }

    /// Why the mechanism does not work here; absent when it does.
    #[must_use]
    pub fn missing(&self, mechanism: Mechanism) -> Option<&str> {
        match self.mechanisms.get(&mechanism) {
            Some(Ok(())) => None,
            Some(Err(reason)) => Some(reason),
            None => Some("not probed"),
        }
    }

    /// The Landlock interface that really works.
    #[must_use]
    pub const fn landlock(&self) -> landlock::Abi {
        self.landlock
    }

    /// This host as if a mechanism were missing, for tests of what a lesser host does.
    #[must_use]
    pub fn without(mut self, mechanism: Mechanism) -> Self {
        self.mechanisms.insert(mechanism, Err("taken away".to_owned()));
        self
    }

    /// This host with another mode.
    #[must_use]
    pub const fn with_mode(mut self, mode: LimitsMode) -> Self {
        self.mode = mode;
        self
    }
}

fn probe_cgroups() -> Vec<(Mechanism, Result<(), String>)> {
    let controllers = cgroup::available_controllers().map_err(|error| error.to_string());
    let by_controller = [
        (Mechanism::CgroupCpu, Controller::Cpu),
        (Mechanism::CgroupMemory, Controller::Memory),
        (Mechanism::CgroupPids, Controller::Pids),
        (Mechanism::CgroupIo, Controller::Io),
    ];
    let mut found: Vec<_> = by_controller
        .into_iter()
        .map(|(mechanism, controller)| {
            let verdict = match &controllers {
                Ok(controllers) if controllers.contains(&controller) => Ok(()),
                Ok(_) => Err(format!(
                    "cgroup2 has no {controller} controller here; boot with cgroup v1 turned off, or delegate it"
                )),
                Err(error) => Err(error.clone()),
            };
            (mechanism, verdict)
        })
        .collect();
    found.push((Mechanism::CgroupKill, controllers.map(|_| ())));
    found
}
