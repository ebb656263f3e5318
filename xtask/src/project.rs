//! Where things lie: the checkout, and what may be thrown away below its target directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

/// The checkout.
pub(crate) fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// The target directory of the build that this program comes from.
pub(crate) fn target() -> Result<PathBuf> {
    let program = std::env::current_exe().context("finding this program's own file")?;
    let target = program.ancestors().nth(2).context("this program lies in no target directory")?;
    Ok(target.to_owned())
}

/// How the project's programs are built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// As tests and the demo use them.
    Debug,
    /// As they are installed; for measurements.
    Release,
}

impl Profile {
    /// Its folder within the target directory.
    pub(crate) const fn folder(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Release => "release",
        }
    }
}

/// One of the project's own programs, built before.
pub(crate) fn program(name: &str, profile: Profile) -> Result<PathBuf> {
    Ok(target()?.join(profile.folder()).join(name))
}

/// cargo, as it was called, at the checkout.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    // `cargo run` tells its program about the package that it comes from. Build scripts look at these variables: left in
    // place, they make cargo build half of the dependencies anew whenever it is called the other way.
    for (name, _) in std::env::vars_os() {
        let is_of_package = |prefix: &str| name.to_str().is_some_and(|name| name.starts_with(prefix));
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
            .into_iter()
            .any(is_of_package)
        {
            command.env_remove(&name);
        }
    }
    command
}
