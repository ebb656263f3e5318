//! A policy's file as it is written, before what it extends is known.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toolproto::manifest::is_name;
use toolproto::source::{FileError, alternatives, line_of_key, nearest, parse_toml};
use toolproto::units::{Bytes, DiskRates, thousandths};

use super::{
    CallLimits, Example, MADE_FILES, NetworkMode, OWN_PLACES, PathAccess, PathRule, ProtectRule, Requirement,
    SyscallRule, WorkspaceMode,
};
use crate::egress::NetworkRule;
use crate::host::Mechanism;
use crate::seccomp::{self, Compare, Condition};

pub(super) fn inherited<T>(lineage: &[&Source<'_>], value: impl Fn(&PolicyFile) -> Option<T>) -> Option<T> {
    lineage.iter().find_map(|source| value(&source.raw))
}

pub(super) fn lineage<'a, 'text>(
    source: &'a Source<'text>,
    sources: &'a BTreeMap<String, Source<'text>>,
) -> Result<Vec<&'a Source<'text>>, FileError> {
    let mut lineage = vec![source];
    let mut seen = BTreeSet::from([source.raw.name.as_str()]);
    let mut youngest = source;
    while let Some(parent) = &youngest.raw.extends {
        let Some(found) = sources.get(parent) else {
            let known = sources.keys().map(String::as_str);
            let reason = format!("policy `{parent}` is unknown{}", alternatives(parent, known));
            return Err(youngest.refuse("", "extends", reason));
        };
        if !seen.insert(&found.raw.name) {
            return Err(source.refuse("", "extends", format!("policy `{}` extends itself", source.raw.name)));
        }
        lineage.push(found);
        youngest = found;
    }
    Ok(lineage)
}

/// A file that fits the shape.
pub(super) struct Source<'text> {
    pub(super) file: &'text Path,
    pub(super) text: &'text str,
    pub(super) raw: PolicyFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyFile {
    pub(super) version: u32,
    pub(super) name: String,
    pub(super) extends: Option<String>,
    pub(super) adhoc: Option<bool>,
    pub(super) workspace: Option<WorkspaceMode>,
    pub(super) network: Option<NetworkMode>,
    pub(super) network_allow: Option<Vec<NetworkRule>>,
    #[serde(default)]
    pub(super) network_deny: Vec<NetworkRule>,
    pub(super) loopback: Option<bool>,
    #[serde(default)]
    path: Vec<PathSection>,
    #[serde(default)]
    pub(super) protect: Vec<ProtectRule>,
    #[serde(default)]
    syscall: Vec<SyscallSection>,
    limits: Option<LimitsSection>,
    #[serde(default)]
    require: BTreeMap<String, RequireSection>,
    #[serde(default)]
    pub(super) example: Vec<Example>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PathSection {
    path: PathBuf,
    access: PathAccess,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SyscallSection {
    allow: Vec<String>,
    #[serde(default)]
    arguments: Vec<ArgumentSection>,
    why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ArgumentSection {
    argument: u8,
    #[serde(default)]
    low_bits_only: bool,
    mask: Option<u64>,
    equals: Option<u64>,
    differs: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsSection {
    why: String,
    cpu: Option<String>,
    memory: Option<Bytes>,
    memory_high: Option<Bytes>,
    swap: Option<Bytes>,
    pids: Option<u32>,
    io: Option<DiskRates>,
    open_files: Option<u64>,
    tmp: Option<Bytes>,
    shm: Option<Bytes>,
    empty_workspace: Option<Bytes>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequireSection {
    any_of: Vec<String>,
    why: String,
}

impl<'text> Source<'text> {
    pub(super) fn parse(file: &'text Path, text: &'text str) -> Result<Self, FileError> {
        let source = Self { file, text, raw: parse_toml(file, text)? };
        if source.raw.version != 1 {
            let reason = format!("version {} is unknown; this agentd reads version 1", source.raw.version);
            return Err(source.refuse("", "version", reason));
        }
        if !is_name(&source.raw.name) {
            return Err(source.refuse("", "name", format!("`{}` is no name of a policy", source.raw.name)));
        }
        for (table, whys) in [
            ("path", source.raw.path.iter().map(|rule| &rule.why).collect::<Vec<_>>()),
            ("protect", source.raw.protect.iter().map(|rule| &rule.why).collect()),
            ("syscall", source.raw.syscall.iter().map(|rule| &rule.why).collect()),
            ("limits", source.raw.limits.iter().map(|rule| &rule.why).collect()),
            ("example", source.raw.example.iter().map(|rule| &rule.why).collect()),
        ] {
            if whys.iter().any(|why| why.trim().is_empty()) {
                return Err(source.refuse(table, "why", "why is empty; every rule says its reason".to_owned()));
            }
        }
        Ok(source)
    }

    pub(super) fn refuse(&self, table: &str, key: &str, reason: String) -> FileError {
        FileError { file: self.file.to_owned(), line: line_of_key(self.text, table, key), reason }
    }

    /// An error about a value that stands in the file as it is quoted.
    fn refuse_value(&self, value: &str, reason: String) -> FileError {
        let quoted = format!("\"{value}\"");
        let line = self.text.lines().position(|line| line.contains(&quoted)).map(|index| index + 1);
        FileError { file: self.file.to_owned(), line, reason }
    }

    pub(super) fn paths(&self) -> Result<Vec<PathRule>, FileError> {
        self.raw
            .path
            .iter()
            .map(|rule| {
                let plain =
                    rule.path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
                let path = rule.path.to_string_lossy();
                if !rule.path.is_absolute() || !plain {
                    return Err(self.refuse_value(&path, format!("path `{path}` must be absolute, without . and ..")));
                }
                if let Some(own) = OWN_PLACES.iter().find(|own| rule.path.starts_with(own)) {
                    let reason = format!("path `{path}` lies in {own}, which every sandbox has of its own");
                    return Err(self.refuse_value(&path, reason));
                }
                if rule.path == Path::new("/") {
                    return Err(
                        self.refuse_value(&path, "path `/` would show the whole host; name what is needed".to_owned())
                    );
                }
                if let Some(made) = MADE_FILES.iter().find(|made| Path::new(made).starts_with(&rule.path)) {
                    let reason =
                        format!("path `{path}` holds {made}, which every sandbox has of its own; name what is needed");
                    return Err(self.refuse_value(&path, reason));
                }
                Ok(PathRule { path: rule.path.clone(), access: rule.access, why: rule.why.clone() })
            })
            .collect()
    }

    pub(super) fn protected(&self) -> Result<Vec<ProtectRule>, FileError> {
        for rule in &self.raw.protect {
            let path = Path::new(&rule.name);
            if path.components().next().is_none() || !path.components().all(|part| matches!(part, Component::Normal(_)))
            {
                let reason = format!("protected name `{}` must be a relative path, without . and ..", rule.name);
                return Err(self.refuse_value(&rule.name, reason));
            }
            if rule.unless_directory && !rule.allow_new.is_empty() {
                let reason = format!("protected name `{}` has both unless_directory and allow_new", rule.name);
                return Err(self.refuse_value(&rule.name, reason));
            }
        }
        Ok(self.raw.protect.clone())
    }

    pub(super) fn syscalls(&self) -> Result<Vec<SyscallRule>, FileError> {
        self.raw
            .syscall
            .iter()
            .map(|rule| {
                for name in &rule.allow {
                    if let Err(error) = seccomp::expand(name) {
                        let hint = nearest(name, seccomp::known_names());
                        let hint = hint.map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
                        return Err(self.refuse_value(name, format!("{error}{hint}")));
                    }
                }
                let arguments =
                    rule.arguments.iter().map(|argument| self.condition(argument)).collect::<Result<_, _>>()?;
                Ok(SyscallRule { allow: rule.allow.clone(), arguments, why: rule.why.clone() })
            })
            .collect()
    }

    fn condition(&self, raw: &ArgumentSection) -> Result<Condition, FileError> {
        let compare = match (raw.mask, raw.equals, raw.differs) {
            (None, Some(value), None) => Compare::Equals(value),
            (None, None, Some(value)) => Compare::Differs(value),
            (Some(mask), Some(value), None) => Compare::MaskedEquals(mask, value),
            _ => {
                let reason = "an argument has either `equals`, `differs`, or `mask` with `equals`".to_owned();
                return Err(self.refuse("syscall", "arguments", reason));
            }
        };
        if raw.argument > 5 {
            let reason = format!("argument {} does not exist; they count from 0 to 5", raw.argument);
            return Err(self.refuse("syscall", "arguments", reason));
        }
        Ok(Condition { argument: raw.argument, low_bits_only: raw.low_bits_only, compare })
    }

    pub(super) fn limit(&self, limits: &mut CallLimits) -> Result<(), FileError> {
        let Some(raw) = &self.raw.limits else { return Ok(()) };
        if let Some(cpu) = &raw.cpu {
            let reason = || format!("cpu `{cpu}` is not a number of processors, such as \"2\" or \"0.5\"");
            limits.cpu_milli = Some(thousandths(cpu).ok_or_else(|| self.refuse("limits", "cpu", reason()))?);
        }
        if raw.pids == Some(0) {
            return Err(self.refuse("limits", "pids", "pids is zero; not even the tool itself could start".to_owned()));
        }
        limits.memory = raw.memory.or(limits.memory);
        limits.memory_high = raw.memory_high.or(limits.memory_high);
        if let (Some(high), Some(memory)) = (limits.memory_high, limits.memory)
            && (high.0 == 0 || high >= memory)
        {
            let reason =
                format!("memory_high {high} must be more than 0 and less than memory, {memory}, which ends the call");
            return Err(self.refuse("limits", "memory_high", reason));
        }
        if let Some(io) = raw.io {
            if let Some(direction) = io.zero() {
                let reason = format!("io.{direction} is zero: nothing could ever go from or to a disk");
                return Err(self.refuse("limits", "io", reason));
            }
            limits.io = DiskRates { read: io.read.or(limits.io.read), write: io.write.or(limits.io.write) };
        }
        limits.swap = raw.swap.or(limits.swap);
        limits.pids = raw.pids.or(limits.pids);
        limits.open_files = raw.open_files.unwrap_or(limits.open_files);
        limits.tmp = raw.tmp.unwrap_or(limits.tmp);
        limits.shm = raw.shm.unwrap_or(limits.shm);
        limits.empty_workspace = raw.empty_workspace.unwrap_or(limits.empty_workspace);
        Ok(())
    }

    pub(super) fn requirements(&self) -> Result<BTreeMap<String, Requirement>, FileError> {
        self.raw
            .require
            .iter()
            .map(|(property, raw)| {
                let mechanisms = raw.any_of.iter().map(|name| {
                    Mechanism::from_name(name).ok_or_else(|| {
                        let known = Mechanism::ALL.iter().map(|mechanism| mechanism.as_str());
                        self.refuse_value(name, format!("`{name}` is no mechanism{}", alternatives(name, known)))
                    })
                });
                let mechanisms = mechanisms.collect::<Result<Vec<_>, _>>()?;
                if mechanisms.is_empty() {
                    let reason = format!("{property} names no mechanism, so no host could keep it");
                    return Err(self.refuse(&format!("require.{property}"), "any_of", reason));
                }
                let requirement = Requirement { any_of: raw.any_of.clone(), why: raw.why.clone(), mechanisms };
                Ok((property.clone(), requirement))
            })
            .collect()
    }
}
