//! Python environments of the tests' own, each with one package at a fixed version, below the build's directory.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python of every host.
const SYSTEM: &str = "/usr/bin/python3";

/// A Python that has a module: from an environment in `folder`, which is made if need be by installing `package`,
/// or from the system where that will do.
///
/// # Errors
/// With the reason why there is none.
pub fn with_module(folder: &Path, module: &str, package: &str, source: Source) -> Result<PathBuf, String> {
    let has = |python: &Path| {
        let import = format!("import {module}");
        Command::new(python).args(["-c", &import]).output().is_ok_and(|output| output.status.success())
    };
    let environment = folder.join(format!("{module}-python"));
    let (system, own) = (PathBuf::from(SYSTEM), environment.join("bin/python3"));
    if source == Source::SystemToo && has(&system) {
        return Ok(system);
    }
    if has(&own) {
        return Ok(own);
    }
    let run = |command: &mut Command| match command.output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    };
    run(Command::new(&system).args(["-m", "venv"]).arg(&environment))?;
    run(Command::new(&own).args(["-m", "pip", "install", "--quiet", package]))?;
    Ok(own)
}

/// Where a module may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the system, if that has it.
    SystemToo,
    /// From the environment alone: its version matters.
    EnvironmentOnly,
}
