//! Policies: what a tool may do, from `policies/NAME.toml` to a checked value with a compiled filter.
//!
//! A policy that `extends` another takes over all that it does not say itself: single values and limits are replaced, path
//! rules of the same path are replaced, other lists grow. Examples are a file's own.

mod file;
mod limits;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use toolproto::digest::Digest;
use toolproto::manifest::HostPort;
use toolproto::receipt::PolicyIdentity;
use toolproto::source::FileError;

use self::file::{Source, inherited, lineage};
pub use self::limits::CallLimits;
use crate::egress::{Ceiling, NetworkRule};
use crate::host::Mechanism;
use crate::seccomp::{self, Allow, Condition, Program};

/// How a call sees the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceMode {
    /// Not at all: an empty, size-limited tmpfs that is thrown away.
    None,
    /// It can read it.
    ReadOnly,
    /// Changes are collected and applied as a whole, or not at all.
    Overlay,
    /// Changes reach the workspace at once.
    Direct,
}

/// Whether a call may name hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NetworkMode {
    /// It has only loopback, private to the call.
    None,
    /// It may connect to the hosts that the tool or the request lists, below `network_allow`.
    Listed,
}

/// What a path of the host is inside the sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathAccess {
    /// Read-only, with everything below it. A last component `*` or `name*` stands for every match; what the host does
    /// not have is left out; a symbolic link is copied as a link.
    Read,
    /// An empty, read-only stand-in, below a path that can be read.
    Hide,
}

/// One path rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathRule {
    /// The path, the same on the host and inside.
    pub path: PathBuf,
    /// What it is inside.
    pub access: PathAccess,
    /// The reason.
    pub why: String,
}

/// A name that no call may create or change in the workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProtectRule {
    /// A relative path such as `.git/hooks`; it counts at any depth, with all that lies in it.
    pub name: String,
    /// The reason.
    pub why: String,
    /// Names of files, `*` standing for any beginning, that a call may make there all the same, together with the directory
    /// that the path begins with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allow_new: Vec<String>,
    /// Only what is no directory is protected, and not what lies in it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unless_directory: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// One system call rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SyscallRule {
    /// Names of calls and groups.
    pub allow: Vec<String>,
    /// Conditions that must hold on the arguments of each.
    pub arguments: Vec<Condition>,
    /// The reason.
    pub why: String,
}

/// A property that the host must keep, by any of several mechanisms.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Requirement {
    /// Mechanisms, each of which keeps it.
    pub any_of: Vec<String>,
    /// The reason.
    pub why: String,
    #[serde(skip)]
    mechanisms: Vec<Mechanism>,
}

impl Requirement {
    /// The mechanisms, each of which keeps the property.
    #[must_use]
    pub fn mechanisms(&self) -> &[Mechanism] {
        &self.mechanisms
    }
}

/// What an example command must meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expectation {
    /// It exits with 0.
    Allowed,
    /// It exits with another status.
    Refused,
}

/// An example of what a policy allows or refuses; the tests run it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Example {
    /// A command for `/bin/sh -c`.
    pub run: String,
    /// What must become of it.
    pub expect: Expectation,
    /// What it shows.
    pub why: String,
}

/// A checked policy.
#[derive(Clone, Debug, Serialize)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// Whether `exec` and `tools check` may use it.
    pub adhoc: bool,
    /// How a call sees the workspace.
    pub workspace: WorkspaceMode,
    /// Whether a call may name hosts.
    pub network: NetworkMode,
    /// The ceiling of listed hosts; none means public addresses on any port.
    pub network_allow: Vec<NetworkRule>,
    /// What nobody may list or reach; goes before `network_allow`.
    pub network_deny: Vec<NetworkRule>,
    /// Whether its processes may talk TCP to each other over loopback.
    pub loopback: bool,
    /// Paths of the host.
    pub paths: Vec<PathRule>,
    /// Protected names.
    pub protect: Arc<[ProtectRule]>,
    /// System calls.
    pub syscalls: Vec<SyscallRule>,
    /// Limits of a call.
    pub limits: CallLimits,
    /// Properties that the host must keep.
    pub require: BTreeMap<String, Requirement>,
    /// What the tests run.
    #[serde(skip)]
    pub examples: Vec<Example>,
    #[serde(skip)]
    identity: PolicyIdentity,
    #[serde(skip)]
    program: Arc<Program>,
}

impl Policy {
    /// Reads a set of policy files and resolves what they extend.
    ///
    /// # Errors
    /// Every error of every file.
    pub fn load_all(files: &[(PathBuf, String)]) -> Result<BTreeMap<String, Self>, Vec<FileError>> {
        let mut errors = Vec::new();
        let mut sources: BTreeMap<String, Source<'_>> = BTreeMap::new();
        for (file, text) in files {
            match Source::parse(file, text) {
                Ok(source) => match sources.get(&source.raw.name) {
                    Some(earlier) => errors.push(source.refuse(
                        "",
                        "name",
                        format!("policy `{}` stands in {} too", source.raw.name, earlier.file.display()),
                    )),
                    None => {
                        sources.insert(source.raw.name.clone(), source);
                    }
                },
                Err(error) => errors.push(error),
            }
        }
        let mut policies = BTreeMap::new();
        for source in sources.values() {
            match lineage(source, &sources).and_then(|lineage| Self::from_lineage(&lineage)) {
                Ok(policy) => {
                    policies.insert(policy.name.clone(), policy);
                }
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() { Ok(policies) } else { Err(errors) }
    }

    /// Its name and the digest of its effective form.
    #[must_use]
    pub fn identity(&self) -> PolicyIdentity {
        self.identity.clone()
    }

    /// What hosts may be listed, and which addresses they may lead to.
    #[must_use]
    pub fn ceiling(&self) -> Ceiling {
        Ceiling { allow: self.network_allow.clone(), deny: self.network_deny.clone() }
    }

    /// Why no tool may list this host under it; absent when it may.
    #[must_use]
    pub fn keeps_from(&self, host: &HostPort) -> Option<String> {
        let reason = match self.network {
            NetworkMode::None => "network = \"none\"".to_owned(),
            NetworkMode::Listed => self.ceiling().admit(host).err()?.to_string(),
        };
        Some(format!("policy `{}` lets nobody out to {host}: {reason}", self.name))
    }

    /// The compiled system call filter.
    #[must_use]
    pub fn program(&self) -> Arc<Program> {
        Arc::clone(&self.program)
    }

    /// From the policy itself (first) to the one that extends nothing (last).
    fn from_lineage(lineage: &[&Source<'_>]) -> Result<Self, FileError> {
        let own = lineage[0];
        let mut paths: Vec<PathRule> = Vec::new();
        let mut protect: Vec<ProtectRule> = Vec::new();
        let mut syscalls = Vec::new();
        let mut limits = CallLimits::default();
        let mut require = BTreeMap::new();
        let mut network_allow = Vec::new();
        let mut network_deny = Vec::new();
        for source in lineage.iter().rev() {
            for rule in source.paths()? {
                paths.retain(|earlier| earlier.path != rule.path);
                paths.push(rule);
            }
            for rule in source.protected()? {
                protect.retain(|earlier| earlier.name != rule.name);
                protect.push(rule);
            }
            syscalls.extend(source.syscalls()?);
            source.limit(&mut limits)?;
            require.extend(source.requirements()?);
            if let Some(allow) = &source.raw.network_allow {
                network_allow.clone_from(allow);
            }
            network_deny.extend(source.raw.network_deny.iter().cloned());
        }
        let program = compile(&syscalls).map_err(|error| FileError::whole(own.file, error.to_string()))?;
        let mut policy = Self {
            name: own.raw.name.clone(),
            adhoc: inherited(lineage, |raw| raw.adhoc).unwrap_or(false),
            workspace: inherited(lineage, |raw| raw.workspace).ok_or_else(|| {
                FileError::whole(own.file, "workspace is missing: none, read_only, overlay or direct")
            })?,
            network: inherited(lineage, |raw| raw.network).unwrap_or(NetworkMode::None),
            network_allow,
            network_deny,
            loopback: inherited(lineage, |raw| raw.loopback).unwrap_or(false),
            paths,
            protect: protect.into(),
            syscalls,
            limits,
            require,
            examples: own.raw.example.clone(),
            identity: PolicyIdentity { name: own.raw.name.clone(), digest: Digest::blake3(&[]) },
            program: Arc::new(program),
        };
        policy.identity.digest =
            Digest::of_json(&policy).map_err(|error| FileError::whole(own.file, error.to_string()))?;
        Ok(policy)
    }
}

fn compile(rules: &[SyscallRule]) -> Result<Program, seccomp::CompileError> {
    let mut allowed = Vec::new();
    for rule in rules {
        for name in &rule.allow {
            allowed.extend(seccomp::expand(name)?.into_iter().map(|allow| Allow {
                conditions: allow.conditions.into_iter().chain(rule.arguments.iter().copied()).collect(),
                ..allow
            }));
        }
    }
    Program::compile(&allowed)
}

/// Places inside that are made new for each sandbox, so no path of the host can stand there.
pub(crate) const OWN_PLACES: [&str; 10] =
    ["/proc", "/dev", "/sys", "/tmp", "/run", "/var/tmp", "/var/run", "/workspace", "/job", "/tool"];
/// Files that are made new for each sandbox. The host's would tell its users, its names, its servers.
pub(crate) const MADE_FILES: [&str; 7] = [
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/shells",
];

#[cfg(test)]
mod tests {
    use toolproto::units::{Bytes, DiskRates};

    use proptest::prelude::*;

    use super::*;
    use crate::seccomp::Compare;

    const BASE: &str = r#"version = 1
name = "base"
adhoc = true
workspace = "read_only"
[[path]]
path = "/usr"
access = "read"
why = "programs"
[[syscall]]
allow = ["@base"]
why = "no program runs without"
[limits]
why = "enough"
cpu = "1.5"
memory = "64MiB"
[require.files]
any_of = ["mount_namespace"]
why = "the host's files"
"#;

    fn load(texts: &[&str]) -> Result<BTreeMap<String, Policy>, Vec<FileError>> {
        let files: Vec<_> = texts
            .iter()
            .enumerate()
            .map(|(n, text)| (PathBuf::from(format!("{n}.toml")), (*text).to_owned()))
            .collect();
        Policy::load_all(&files)
    }

    fn error(text: &str) -> FileError {
        load(&[text]).unwrap_err().remove(0)
    }

    #[test]
    fn a_policy_takes_over_what_it_does_not_say() {
        let child = "version = 1\nname = \"child\"\nextends = \"base\"\nworkspace = \"direct\"\n\
                     [[path]]\npath = \"/opt\"\naccess = \"read\"\nwhy = \"more programs\"\n\
                     [limits]\nwhy = \"more\"\nmemory = \"1GiB\"\n";
        let policies = load(&[child, BASE]).unwrap();
        let child = &policies["child"];
        assert!(child.adhoc);
        assert_eq!(child.workspace, WorkspaceMode::Direct);
        assert_eq!((child.limits.cpu_milli, child.limits.memory), (Some(1500), Some(Bytes::gib(1))));
        let paths: Vec<_> = child.paths.iter().map(|rule| rule.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/usr", "/opt"]);
        assert_eq!(child.require["files"].mechanisms(), [Mechanism::MountNamespace]);
        assert_eq!(child.program(), policies["base"].program());
        assert_ne!(child.identity().digest, policies["base"].identity().digest);
        assert_eq!(policies["base"].identity(), load(&[BASE]).unwrap()["base"].identity());
    }

    #[test]
    fn rates_and_the_soft_limit_are_taken_over_one_by_one() {
        let with = |name: &str, parent: &str, limits: &str| {
            format!("version = 1\nname = \"{name}\"\nextends = \"{parent}\"\n[limits]\nwhy = \"less\"\n{limits}\n")
        };
        let child = with("child", "base", "memory_high = \"48MiB\"\nio = { read = \"8MiB\", write = \"4MiB\" }");
        let grandchild = with("grandchild", "child", "io = { write = \"2MiB\" }");
        let limits = load(&[BASE, &child, &grandchild]).unwrap()["grandchild"].limits.clone();
        assert_eq!(limits.io, DiskRates { read: Some(Bytes::mib(8)), write: Some(Bytes::mib(2)) });
        assert_eq!((limits.memory_high, limits.memory), (Some(Bytes::mib(48)), Some(Bytes::mib(64))));
    }

    #[test]
    fn a_rule_of_the_same_path_is_replaced() {
        let child = "version = 1\nname = \"child\"\nextends = \"base\"\n\
                     [[path]]\npath = \"/usr\"\naccess = \"hide\"\nwhy = \"no programs\"\n";
        let policies = load(&[BASE, child]).unwrap();
        assert_eq!(policies["child"].paths.len(), 1);
        assert_eq!(policies["child"].paths[0].access, PathAccess::Hide);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        let cases = [
            ("name = \"base\"", "name = \"Base!\"", 2, "no name"),
            ("\"read_only\"", "\"readonly\"", 4, "did you mean `read_only`"),
            ("path = \"/usr\"", "path = \"usr\"", 6, "absolute"),
            ("path = \"/usr\"", "path = \"/usr/../etc\"", 6, "without . and .."),
            ("path = \"/usr\"", "path = \"/proc/sys\"", 6, "of its own"),
            ("path = \"/usr\"", "path = \"/\"", 6, "whole host"),
            ("path = \"/usr\"", "path = \"/var/tmp/x\"", 6, "of its own"),
            ("path = \"/usr\"", "path = \"/etc\"", 6, "name what is needed"),
            ("path = \"/usr\"", "path = \"/etc/hosts\"", 6, "of its own"),
            ("why = \"programs\"", "why = \" \"", 8, "why is empty"),
            ("\"@base\"", "\"@bas\"", 10, "did you mean `@base`"),
            ("\"@base\"", "\"reead\"", 10, "did you mean `read`"),
            ("cpu = \"1.5\"", "cpu = \"1,5\"", 14, "number of processors"),
            ("cpu = \"1.5\"", "pids = 0", 14, "not even the tool"),
            ("cpu = \"1.5\"", "memory_high = \"64MiB\"", 14, "less than memory"),
            ("cpu = \"1.5\"", "io = { read = \"0B\" }", 14, "io.read is zero"),
            ("cpu = \"1.5\"", "io = { reads = \"1MiB\" }", 14, "unknown field `reads`"),
            ("\"mount_namespace\"", "\"mount_namespaces\"", 17, "did you mean `mount_namespace`"),
            ("any_of = [\"mount_namespace\"]", "any_of = []", 17, "no host could keep it"),
            ("version = 1", "version = 2", 1, "version 2 is unknown"),
        ];
        for (from, to, line, words) in cases {
            let error = error(&BASE.replacen(from, to, 1));
            assert!(error.reason.contains(words), "{to}: {error}");
            assert_eq!(error.line, Some(line), "{to}: {error}");
        }
    }

    #[test]
    fn circles_and_unknown_parents_are_refused() {
        let circle = [
            "version = 1\nname = \"a\"\nextends = \"b\"\nworkspace = \"none\"\n",
            "version = 1\nname = \"b\"\nextends = \"a\"\n",
        ];
        assert!(load(&circle).unwrap_err()[0].reason.contains("extends itself"));
        let orphan = "version = 1\nname = \"a\"\nextends = \"bse\"\n";
        let errors = load(&[orphan, BASE]).unwrap_err();
        assert!(errors[0].reason.contains("did you mean `base`"), "{errors:?}");
        assert_eq!(errors[0].line, Some(3));
        assert!(load(&[BASE, BASE]).unwrap_err()[0].reason.contains("stands in"));
    }

    #[test]
    fn conditions_are_read() {
        let rule = "[[syscall]]\nallow = [\"ptrace\"]\nwhy = \"debuggers\"\n\
                    arguments = [{ argument = 0, equals = 0 }, { argument = 1, mask = 0xf, equals = 1, low_bits_only = true }]\n";
        let policies = load(&[&format!("{BASE}{rule}")]).unwrap();
        let arguments = &policies["base"].syscalls[1].arguments;
        assert_eq!(arguments[0], Condition { argument: 0, low_bits_only: false, compare: Compare::Equals(0) });
        assert_eq!(
            arguments[1],
            Condition { argument: 1, low_bits_only: true, compare: Compare::MaskedEquals(0xf, 1) }
        );
        for wrong in ["{ argument = 6, equals = 0 }", "{ argument = 0 }", "{ argument = 0, mask = 1, differs = 1 }"] {
            let rule = format!("[[syscall]]\nallow = [\"ptrace\"]\nwhy = \"x\"\narguments = [{wrong}]\n");
            assert!(load(&[&format!("{BASE}{rule}")]).is_err(), "{wrong}");
        }
    }

    proptest! {
        /// What is narrowed never allows more, and never allows less than both say.
        #[test]
        fn narrowing_never_raises_a_limit(
            memory in proptest::option::of(1_u64..1 << 40),
            pids in proptest::option::of(1_u32..5000),
            to_memory in proptest::option::of(1_u64..1 << 40),
            to_pids in proptest::option::of(1_u32..5000),
        ) {
            let limits = CallLimits { memory: memory.map(Bytes), pids, ..CallLimits::default() };
            let narrowed = limits.clone().narrowed(to_memory.map(Bytes), to_pids);
            let unlimited = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
            let memory_now = unlimited(narrowed.memory.map(|bytes| bytes.0));
            prop_assert_eq!(memory_now, unlimited(memory).min(unlimited(to_memory)));
            let pids_now = unlimited(narrowed.pids.map(u64::from));
            prop_assert_eq!(pids_now, unlimited(pids.map(u64::from)).min(unlimited(to_pids.map(u64::from))));
            prop_assert_eq!(
                CallLimits { memory: None, pids: None, ..narrowed },
                CallLimits { memory: None, pids: None, ..limits }
            );
        }
    }
}
