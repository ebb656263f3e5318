//! Programs of others that tasks use, from crates.io at pinned versions, kept below the target directory.

use std::path::PathBuf;

use anyhow::Result;

use crate::process;
use crate::project;

/// A program from crates.io.
pub(crate) struct Tool {
    /// The crate's and the program's name.
    pub(crate) name: &'static str,
    /// The crate's version.
    pub(crate) version: &'static str,
    /// What cargo is told of its features.
    pub(crate) features: &'static [&'static str],
}

impl Tool {
    /// The program, built if it is not there. Without optimisation: it runs for seconds and is built for minutes.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        let folder = project::target()?.join(format!("tools/{}-{}", self.name, self.version));
        let program = folder.join("bin").join(self.name);
        if !program.exists() {
            eprintln!("installing {} {} into {}", self.name, self.version, folder.display());
            let mut install = project::cargo(["install", self.name, "--version", self.version, "--locked", "--debug"]);
            install.args(self.features).arg("--root").arg(&folder);
            // Names and line numbers of its code help nobody here, and are half of what is written.
            install.env("CARGO_PROFILE_DEV_DEBUG", "false");
            process::run(&mut install)?;
        }
        Ok(program)
    }
}
