//! Whether a manifest's program can be run as it lies there: what would otherwise show only at its calls, and there as no more
//! than "Permission denied" or "No such file or directory".
//!
//! What is wrong with the file itself refuses the manifest. What the host lacks, or the policy does not show, keeps the
//! program's own calls from running, and nothing else.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{Runtime, TOOL_FOLDER};
use crate::plan;
use crate::policy::{PathAccess, Policy};
use crate::trusted::{self, Owners, TrustError};

/// Sandboxes run as a uid that owns nothing and is in no group but its own.
const OTHERS_READ: u32 = 0o004;
pub(super) const OTHERS_EXECUTE: u32 = 0o001;
/// What the kernel reads of a program to find out how to run it.
const HEAD: u64 = 256;
const ELF: &[u8] = b"\x7fELF";
/// Links that are followed in a row, as the kernel does.
const MOST_LINKS: usize = 40;
/// Where a sandbox has something else than the host.
const MADE_INSIDE: [&str; 5] = ["/workspace", "/job", "/tmp", "/proc", "/dev"];

/// A program that no sandbox could run, whatever the host has.
#[derive(Debug, thiserror::Error)]
pub(super) enum EntryError {
    #[error(transparent)]
    Untrusted(#[from] TrustError),
    #[error("{} is not executable by others (mode {mode:04o}), and a tool runs as a user of its own: chmod a+x", path.display())]
    NotExecutable { path: PathBuf, mode: u32 },
    #[error("{} cannot be read by others (mode {mode:04o}), and a tool runs as a user of its own: chmod a+r", path.display())]
    NotReadable { path: PathBuf, mode: u32 },
    #[error("{} cannot be entered by others (mode {mode:04o}), and a tool runs as a user of its own: chmod a+rx", path.display())]
    Closed { path: PathBuf, mode: u32 },
    #[error(
        "{} begins neither with `#!` and an interpreter nor as a compiled program, so nothing can run it: begin it with, say, \
         `#!/bin/sh`, or name the runtime that runs it",
        path.display()
    )]
    NoInterpreter { path: PathBuf },
    #[error("the first line of {} ends with a carriage return, which the kernel takes for a part of it: save it with Unix line ends", path.display())]
    CarriageReturn { path: PathBuf },
    #[error("the first line of {} names `{interpreter}`, which is no absolute path", path.display())]
    NotAbsolute { path: PathBuf, interpreter: String },
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
}

/// Why calls of a program fail for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum Hindrance {
    #[error("{} is missing: build the program", path.display())]
    Missing { path: PathBuf },
    #[error("{} leads to {}, which policy `{policy}` does not show: put the file itself there", path.display(), target.display())]
    LeadsAway { path: PathBuf, target: PathBuf, policy: String },
    #[error(
        "the first line of {} names {}, and this host has no such program: install it, or name another one",
        path.display(), interpreter.display()
    )]
    NoSuchInterpreter { path: PathBuf, interpreter: PathBuf },
    #[error("the first line of {} has env look for `{program}`, which is not on {search}: install it, or name its path", path.display())]
    NotOnPath { path: PathBuf, program: String, search: String },
    #[error(
        "the first line of {} needs {}, which policy `{policy}` does not show: name an interpreter below a path that it shows",
        path.display(), interpreter.display()
    )]
    HiddenInterpreter { path: PathBuf, interpreter: PathBuf, policy: String },
}

/// A program, and what surrounds it in a sandbox.
pub(super) struct Entry<'a> {
    /// The manifest's folder, without symbolic links.
    pub(super) folder: &'a Path,
    /// Relative to the folder.
    pub(super) entry: &'a Path,
    /// Where env looks for programs, if the manifest says.
    pub(super) search: Option<&'a str>,
    /// Absent when there is none of that name, or it is not installed.
    pub(super) runtime: Option<&'a Runtime>,
    /// Absent when there is none of that name.
    pub(super) policy: Option<&'a Policy>,
    pub(super) owners: Owners,
}

impl Entry<'_> {
    /// Looks at the program.
    ///
    /// # Errors
    /// When the file is not what it must be; the hindrance is what the host or the policy is in the way with.
    pub(super) fn examine(&self) -> Result<Option<Hindrance>, EntryError> {
        let path = self.folder.join(self.entry);
        let resolved = match trusted::file(&path, self.owners) {
            Ok(resolved) => resolved,
            Err(error) if error.is_missing() => return Ok(Some(Hindrance::Missing { path })),
            Err(error) => return Err(error.into()),
        };
        if let Some(hindrance) = self.leads_away(&path, &resolved) {
            return Ok(Some(hindrance));
        }
        self.is_entered_by_all(&resolved)?;
        let mode = mode(&resolved)?;
        let not_readable = || EntryError::NotReadable { path: resolved.clone(), mode };
        let Some(runtime) = self.runtime else { return Ok(None) };
        if runtime.command.is_some() {
            return if mode & OTHERS_READ == 0 { Err(not_readable()) } else { Ok(None) };
        }
        if mode & OTHERS_EXECUTE == 0 {
            return Err(EntryError::NotExecutable { path: resolved, mode });
        }
        let Some(head) = head(&resolved)? else { return Ok(None) };
        let Some(line) = head.strip_prefix(b"#!") else {
            // What is neither text nor ELF may be a format that the host was taught.
            let is_text = !head.contains(&0) && !head.starts_with(ELF);
            return if is_text { Err(EntryError::NoInterpreter { path: resolved }) } else { Ok(None) };
        };
        if mode & OTHERS_READ == 0 {
            return Err(not_readable());
        }
        self.examine_script(resolved, line)
    }

    /// A link is followed inside the sandbox, which has not everything that the host has.
    fn leads_away(&self, path: &Path, resolved: &Path) -> Option<Hindrance> {
        let policy = self.policy?;
        let is_there = resolved.starts_with(self.folder) || self.shows(policy, resolved);
        (!is_there).then(|| Hindrance::LeadsAway {
            path: path.to_owned(),
            target: resolved.to_owned(),
            policy: policy.name.clone(),
        })
    }

    fn is_entered_by_all(&self, program: &Path) -> Result<(), EntryError> {
        for folder in program.ancestors().skip(1).take_while(|folder| folder.starts_with(self.folder)) {
            let mode = mode(folder)?;
            if mode & OTHERS_EXECUTE == 0 {
                return Err(EntryError::Closed { path: folder.to_owned(), mode });
            }
        }
        Ok(())
    }

    fn examine_script(&self, path: PathBuf, line: &[u8]) -> Result<Option<Hindrance>, EntryError> {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if line.ends_with(b"\r") {
            return Err(EntryError::CarriageReturn { path });
        }
        let line = line.trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let (interpreter, argument) = (Path::new(OsStr::from_bytes(&line[..end])), line[end..].trim_ascii());
        if interpreter.as_os_str().is_empty() {
            return Err(EntryError::NoInterpreter { path });
        }
        if interpreter.is_relative() {
            return Err(EntryError::NotAbsolute { path, interpreter: interpreter.display().to_string() });
        }
        if let Some(hindrance) = self.hindered_by(&path, interpreter) {
            return Ok(Some(hindrance));
        }
        let wanted = if interpreter.file_name() == Some(OsStr::new("env")) { wanted_of_env(argument) } else { None };
        Ok(wanted.and_then(|program| self.not_found_by_env(&path, &program)))
    }

    /// Whether the sandbox has a program that the host knows by this path; nothing is said of paths that only a call has.
    fn hindered_by(&self, path: &Path, interpreter: &Path) -> Option<Hindrance> {
        if MADE_INSIDE.iter().any(|made| interpreter.starts_with(made)) {
            return None;
        }
        let on_host = match interpreter.strip_prefix(TOOL_FOLDER) {
            Ok(inside) => self.folder.join(inside),
            Err(_) => interpreter.to_owned(),
        };
        let is_program = |found: fs::Metadata| found.is_file() && found.permissions().mode() & OTHERS_EXECUTE != 0;
        if !fs::metadata(&on_host).is_ok_and(is_program) {
            return Some(Hindrance::NoSuchInterpreter { path: path.to_owned(), interpreter: interpreter.to_owned() });
        }
        let policy = self.policy?;
        let hidden = steps_to(on_host).into_iter().find(|step| !self.shows(policy, step))?;
        Some(Hindrance::HiddenInterpreter { path: path.to_owned(), interpreter: hidden, policy: policy.name.clone() })
    }

    fn not_found_by_env(&self, path: &Path, program: &OsStr) -> Option<Hindrance> {
        let search = self.search.unwrap_or(plan::PATH);
        let is_found = if program.as_bytes().contains(&b'/') {
            self.hindered_by(path, Path::new(program)).is_none()
        } else {
            search.split(':').any(|folder| self.hindered_by(path, &Path::new(folder).join(program)).is_none())
        };
        (!is_found).then(|| Hindrance::NotOnPath {
            path: path.to_owned(),
            program: program.to_string_lossy().into_owned(),
            search: search.to_owned(),
        })
    }

    /// Whether a path of the host is there in a sandbox.
    fn shows(&self, policy: &Policy, path: &Path) -> bool {
        let covers = |rule: &Path| match rule.as_os_str().as_bytes().strip_suffix(b"*") {
            Some(prefix) => path.as_os_str().as_bytes().starts_with(prefix),
            None => path.starts_with(rule),
        };
        let by = |access: PathAccess| policy.paths.iter().any(|rule| rule.access == access && covers(&rule.path));
        let mounts = self.runtime.map(|runtime| runtime.mounts.as_slice()).unwrap_or_default();
        path.starts_with(self.folder)
            || (!by(PathAccess::Hide) && (by(PathAccess::Read) || mounts.iter().any(|mount| path.starts_with(mount))))
    }
}

/// The program that env is to find by the rest of a `#!` line, which comes as one argument; absent where that is not clear.
fn wanted_of_env(argument: &[u8]) -> Option<OsString> {
    let program = match argument.strip_prefix(b"-S") {
        Some(words) => words
            .split(u8::is_ascii_whitespace)
            .find(|word| !word.is_empty() && !word.contains(&b'=') && !word.starts_with(b"-"))?,
        None => argument,
    };
    let is_plain = !program.is_empty() && !program.starts_with(b"-") && !program.contains(&b'=');
    is_plain.then(|| OsStr::from_bytes(program).to_owned())
}

/// A path, and where its links lead one after the other.
fn steps_to(path: PathBuf) -> Vec<PathBuf> {
    let mut steps = vec![path];
    while let Some(last) = steps.last()
        && let Ok(target) = fs::read_link(last)
        && steps.len() < MOST_LINKS
    {
        let folder = last.parent().unwrap_or(Path::new("/"));
        // Only the kernel knows what lies above a folder that is a link itself.
        let above = target.components().any(|part| part == std::path::Component::ParentDir);
        let next = match (above, folder.canonicalize()) {
            (true, Ok(real)) => real.join(&target).canonicalize().unwrap_or_else(|_| real.join(&target)),
            _ => folder.join(&target),
        };
        steps.push(next);
    }
    steps
}

/// The begin of a file; absent where whoever checks may not read it.
fn head(path: &Path) -> Result<Option<Vec<u8>>, EntryError> {
    let mut head = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
    match read {
        Ok(_) => Ok(Some(head)),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(source) => Err(EntryError::Unreadable { path: path.to_owned(), source }),
    }
}

fn mode(path: &Path) -> Result<u32, EntryError> {
    let found = fs::metadata(path).map_err(|source| EntryError::Unreadable { path: path.to_owned(), source })?;
    Ok(found.permissions().mode() & 0o7777)
}
