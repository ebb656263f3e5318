//! What a call would run, and under what: from the catalogue, never from a message.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::manifest::{ConfinedProgram, DEFAULT_MAX_RESPONSE, Effects, HostPort, TlsMode};
use toolproto::receipt::{EXTENSION_PREFIX, PolicyIdentity, ToolIdentity};
use toolproto::source::FileError;
use toolproto::units::Bytes;

use super::account::AccessTable;
use super::peer::Peer;
use super::secrets::Secrets;

use crate::catalog::{Catalog, Runtime, TOOL_FOLDER};
use crate::config::{Config, Subject};
use crate::egress::{self, Passage};
use crate::plan::Place;
use crate::policy::{CallLimits, Policy, ProtectRule, WorkspaceMode};
use crate::protocol::{LaunchFailure, Narrowing, Program, RUNTIME_STEP, SliceLimits};

/// The most that a probe may write.
const PROBE_OUTPUT: Bytes = Bytes::kib(64);

/// How a call sees the job's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// It does not.
    Nothing,
    /// It can read it.
    ReadOnly,
    /// What it writes goes into a layer above it, and into the workspace once it is wanted.
    Overlay,
    /// What it writes is there at once.
    Direct,
}

/// A program, ready to be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// Its policy's name.
    pub policy: String,
    /// The command line.
    pub command: Vec<OsString>,
    /// Environment variables.
    pub environment: Vec<(OsString, OsString)>,
    /// The tool's folder.
    pub folder: Option<PathBuf>,
    /// Further host paths that the runtime needs.
    pub mounts: Vec<PathBuf>,
    /// Limits of the call.
    pub limits: CallLimits,
    /// Names that it may not change in the workspace.
    pub protect: Arc<[ProtectRule]>,
    /// How it sees the workspace, if the job has one.
    pub sight: Sight,
    /// Its own time-out, if it has one.
    pub time: Option<Duration>,
    /// Cap of its stdout.
    pub max_response: Bytes,
    /// Where the workspace stands.
    pub place: Place,
    /// How many of its processes are started ahead.
    pub prewarm: u32,
    /// The hosts that it may connect to.
    pub passages: Vec<Passage>,
}

/// Who a program is, for receipts: also of one that cannot run.
#[must_use]
pub fn identify(catalog: &Catalog, program: &Program) -> (ToolIdentity, PolicyIdentity) {
    let (tool, policy) = match program {
        Program::Tool { name } => match catalog.tools.get(name) {
            Some(tool) => {
                let version = tool.manifest.version;
                let identity = ToolIdentity { name: name.clone(), version, digest: Some(tool.digest) };
                (identity, tool.manifest.program.policy.as_str())
            }
            None => (ToolIdentity { name: name.clone(), version: 0, digest: None }, "none"),
        },
        Program::Extension { name } => {
            let found = catalog.extensions.get(name);
            let identity = ToolIdentity {
                name: format!("{EXTENSION_PREFIX}{name}"),
                version: found.map_or(0, |extension| extension.manifest.version),
                digest: found.map(|extension| extension.digest),
            };
            (identity, found.map_or("none", |extension| extension.manifest.program.policy.as_str()))
        }
        Program::Adhoc { policy, .. } => {
            (ToolIdentity { name: "exec".to_owned(), version: 1, digest: None }, policy.as_str())
        }
        Program::Rollback { .. } => (ToolIdentity { name: "rollback".to_owned(), version: 1, digest: None }, "none"),
    };
    let unknown = || PolicyIdentity { name: policy.to_owned(), digest: Digest::sha256(b"") };
    (tool, catalog.policies.get(policy).map_or_else(unknown, Policy::identity))
}

/// Looks whether a program's files are those that [`identify`] names.
///
/// # Errors
/// TOOL_CHANGED when they are not.
pub fn confirm(catalog: &mut Catalog, program: &Program, now: Instant) -> Result<(), LaunchFailure> {
    let (what, name, confirmed) = match program {
        Program::Tool { name } => ("tool", name, catalog.tools.get_mut(name).map(|tool| tool.confirm(now))),
        Program::Extension { name } => {
            ("extension", name, catalog.extensions.get_mut(name).map(|extension| extension.confirm(now)))
        }
        Program::Adhoc { .. } | Program::Rollback { .. } => return Ok(()),
    };
    match confirmed {
        Some(Err(changed)) => Err(failure(Code::ToolChanged, format!("{what} `{name}`: {changed}; reload agentd"))),
        Some(Ok(())) | None => Ok(()),
    }
}

/// Looks a program up and narrows it.
///
/// # Errors
/// With the code for the caller: unknown, not permitted, not installed, or not enforceable.
pub fn resolve(
    (catalog, config, access, secrets): (&Catalog, &Config, &AccessTable, &Secrets),
    program: &Program,
    narrow: &Narrowing,
    job: &SliceLimits,
    peer: &Peer,
) -> Result<Resolved, LaunchFailure> {
    let mut resolved = match program {
        Program::Rollback { .. } => {
            return Err(failure(Code::InternalLogicError, "a rollback runs nothing".to_owned()));
        }
        Program::Tool { name } => {
            let unknown = || failure(Code::ToolUnknown, format!("there is no tool `{name}`"));
            let tool = catalog.tools.get(name).ok_or_else(unknown)?;
            let confined = Confined {
                program: &tool.manifest.program,
                folder: &tool.folder,
                hindrance: tool.hindrance.as_ref(),
                reads_only: tool.manifest.execution.effects == Effects::ReadOnly,
                place: if tool.manifest.is_prewarmed() { Place::Late } else { Place::Usual },
                prewarm: tool.manifest.prewarm,
            };
            confined.resolve(catalog, config, secrets)?
        }
        Program::Extension { name } => {
            let unknown = || failure(Code::ToolUnknown, format!("there is no extension `{name}`"));
            let extension = catalog.extensions.get(name).ok_or_else(unknown)?;
            let confined = Confined {
                program: &extension.manifest.program,
                folder: &extension.folder,
                hindrance: extension.hindrance.as_ref(),
                reads_only: true,
                place: Place::Usual,
                prewarm: 0,
            };
            confined.resolve(catalog, config, secrets)?
        }
        Program::Adhoc { policy, runtime, command, network, .. } => {
            if !access.permits(Subject::Adhoc { policy }, peer) {
                let message = format!("uid {} may not run ad-hoc commands under policy `{policy}`", peer.uid);
                return Err(failure(Code::NotPermitted, message));
            }
            adhoc(catalog, policy, runtime.as_deref(), command, network)?
        }
    };
    resolved.limits = resolved.limits.narrowed(narrow.memory, narrow.pids);
    resolved.limits.open_files = resolved.limits.open_files.min(job.open_files.unwrap_or(u64::MAX));
    if narrow.read_only && matches!(resolved.sight, Sight::Direct | Sight::Overlay) {
        resolved.sight = Sight::ReadOnly;
    }
    if narrow.discardable {
        let hosts = match program {
            Program::Tool { name } => catalog.tools.get(name).map_or(&[][..], |tool| &tool.manifest.program.hosts),
            Program::Extension { name } => {
                catalog.extensions.get(name).map_or(&[][..], |extension| &extension.manifest.program.hosts)
            }
            Program::Adhoc { network, .. } => network,
            Program::Rollback { .. } => &[],
        };
        if let Some(host) = hosts.first() {
            let message = format!("the call was to leave no trace, and may connect to {host}: restart agentd");
            return Err(failure(Code::PolicyUnenforceable, message));
        }
        if resolved.sight == Sight::Direct {
            resolved.sight = Sight::Overlay;
        }
    }
    Ok(resolved)
}

/// A program of the catalogue, and where it lies.
struct Confined<'a> {
    program: &'a ConfinedProgram,
    folder: &'a Path,
    hindrance: Option<&'a FileError>,
    reads_only: bool,
    place: Place,
    prewarm: u32,
}

impl Confined<'_> {
    fn resolve(&self, catalog: &Catalog, config: &Config, secrets: &Secrets) -> Result<Resolved, LaunchFailure> {
        let program = self.program;
        let unavailable = |message: String| failure(Code::ToolUnavailable, message);
        let runtime = runtime(catalog, &program.runtime)?;
        if let Some(hindrance) = self.hindrance {
            return Err(unavailable(format!("{hindrance}; then reload agentd")));
        }
        let policy = policy(catalog, &program.policy)?;
        let tls = |target: &HostPort| program.tls.get(target).copied().unwrap_or_default();
        let passages = passages(policy, &program.hosts, tls)?;
        let mut environment: Vec<(OsString, OsString)> =
            program.env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        for secret in &program.secrets {
            environment.push((secret.into(), secrets.get(secret).map_err(unavailable)?.reveal().into()));
        }
        Ok(Resolved {
            policy: policy.name.clone(),
            protect: Arc::clone(&policy.protect),
            command: runtime.command_line(&Path::new(TOOL_FOLDER).join(&program.entry)),
            environment,
            folder: Some(self.folder.to_owned()),
            mounts: runtime.mounts.clone(),
            limits: policy.limits.clone().narrowed(program.memory, program.pids),
            sight: sight(policy, self.reads_only)?,
            time: Some(config.timeouts.of(program.timeout)),
            max_response: program.max_response,
            place: self.place,
            prewarm: self.prewarm,
            passages,
        })
    }
}

fn adhoc(
    catalog: &Catalog,
    name: &str,
    by: Option<&str>,
    command: &[String],
    hosts: &[HostPort],
) -> Result<Resolved, LaunchFailure> {
    let policy = policy(catalog, name)?;
    if !policy.adhoc {
        return Err(failure(Code::NotPermitted, format!("policy `{name}` is not for ad-hoc commands")));
    }
    let passages = passages(policy, hosts, |_| TlsMode::default())?;
    let Some((first, arguments)) = command.split_first() else {
        return Err(failure(Code::InputInvalid, "the command is empty".to_owned()));
    };
    let by = by.map(|name| runtime(catalog, name)).transpose()?;
    let mut line = by.map_or_else(|| vec![first.into()], |runtime| runtime.command_line(Path::new(first)));
    line.extend(arguments.iter().map(OsString::from));
    Ok(Resolved {
        policy: policy.name.clone(),
        protect: Arc::clone(&policy.protect),
        command: line,
        environment: Vec::new(),
        folder: None,
        mounts: by.map(|runtime| runtime.mounts.clone()).unwrap_or_default(),
        limits: policy.limits.clone(),
        sight: sight(policy, false)?,
        time: None,
        max_response: DEFAULT_MAX_RESPONSE,
        place: Place::Usual,
        prewarm: 0,
        passages,
    })
}

/// What a runtime's own probe runs: nothing of anybody's, and under the strictest policy that there is.
///
/// # Errors
/// When the runtime is not there, or has nothing to be tried.
pub fn probe(catalog: &Catalog, name: &str) -> Result<Resolved, LaunchFailure> {
    let runtime = runtime(catalog, name)?;
    let command = runtime.command.as_ref().filter(|_| !runtime.probe.is_empty());
    let command = command.ok_or_else(|| failure(Code::InternalLogicError, format!("runtime `{name}` has no probe")))?;
    let policy = catalog
        .strictest()
        .ok_or_else(|| failure(Code::PolicyUnknown, "there is no policy to try a runtime under".to_owned()))?;
    Ok(Resolved {
        policy: policy.name.clone(),
        protect: Arc::default(),
        command: [OsString::from(command)].into_iter().chain(runtime.probe.iter().map(OsString::from)).collect(),
        environment: Vec::new(),
        folder: None,
        mounts: runtime.mounts.clone(),
        limits: policy.limits.clone(),
        sight: Sight::Nothing,
        time: None,
        max_response: PROBE_OUTPUT,
        place: Place::Usual,
        prewarm: 0,
        passages: Vec::new(),
    })
}

fn runtime<'a>(catalog: &'a Catalog, name: &str) -> Result<&'a Runtime, LaunchFailure> {
    let message = match catalog.runtimes.get(name) {
        Some(Ok(runtime)) => return Ok(runtime),
        Some(Err(missing)) => missing.to_string(),
        None => format!("runtime `{name}` is neither built in nor declared ([runtimes.{name}])"),
    };
    Err(LaunchFailure { step: RUNTIME_STEP.to_owned(), ..failure(Code::ToolUnavailable, message) })
}

fn policy<'a>(catalog: &'a Catalog, name: &str) -> Result<&'a Policy, LaunchFailure> {
    let unknown = || failure(Code::PolicyUnknown, format!("there is no policy `{name}`"));
    catalog.policies.get(name).ok_or_else(unknown)
}

/// What a policy and a tool's declaration make of the workspace: the narrower of the two.
fn sight(policy: &Policy, declares_read_only: bool) -> Result<Sight, LaunchFailure> {
    match (policy.workspace, declares_read_only) {
        (WorkspaceMode::None, _) => Ok(Sight::Nothing),
        (WorkspaceMode::ReadOnly, _) | (_, true) => Ok(Sight::ReadOnly),
        (WorkspaceMode::Direct, false) => Ok(Sight::Direct),
        (WorkspaceMode::Overlay, false) => Ok(Sight::Overlay),
    }
}

/// The places of listed hosts, if the policy lets all of them be listed.
fn passages(
    policy: &Policy,
    hosts: &[HostPort],
    tls: impl Fn(&HostPort) -> TlsMode,
) -> Result<Vec<Passage>, LaunchFailure> {
    if let Some(reason) = hosts.iter().find_map(|host| policy.keeps_from(host)) {
        return Err(failure(Code::NotPermitted, reason));
    }
    egress::passages(hosts, tls).map_err(|error| failure(Code::InputInvalid, error.to_string()))
}

/// A failure before any step.
#[must_use]
pub fn failure(code: Code, message: String) -> LaunchFailure {
    LaunchFailure { code, step: "prepare".to_owned(), errno: None, message }
}
