//! The programs under test, as cargo built them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A program of the project, built if cargo is at hand.
///
/// # Panics
/// When it is missing or cannot be built, with what to do.
pub fn find(name: &str) -> PathBuf {
    static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
    if let Err(reason) = BUILT.get_or_init(build) {
        panic!("{reason}");
    }
    let path = folder().join(name);
    assert!(path.exists(), "{} is missing; build it first: cargo build --workspace --bins", path.display());
    path
}

/// Copies a program to where it is to be run. Another process does it: one that another thread of the test starts at the same
/// time inherits what this one has open for writing, and a program that is open for writing cannot be executed.
///
/// # Panics
/// When it cannot be copied.
pub fn copy(program: &Path, to: &Path) {
    let output = Command::new("install").args(["-m", "755"]).arg(program).arg(to).output().expect("install runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Tests lie in `target/PROFILE/deps`, programs in `target/PROFILE`.
fn folder() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let folder = test.parent().expect("a program lies in a directory");
    if folder.ends_with("deps") { folder.parent().unwrap_or(folder).to_owned() } else { folder.to_owned() }
}

/// A test's own build does not build the programs of other packages.
fn build() -> Result<(), String> {
    let Some(cargo) = std::env::var_os("CARGO") else { return Ok(()) };
    let mut command = Command::new(cargo);
    // The whole workspace, as everywhere: a part of it would be built with other features, and most dependencies again.
    command.args(["build", "--quiet", "--workspace", "--bins"]);
    if folder().ends_with("release") {
        command.arg("--release");
    }
    // What cargo says to this test about its package is not meant for another build: build scripts look at it.
    let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
    for (name, _) in std::env::vars_os() {
        if of_package.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    let output = command.output().map_err(|error| format!("cannot run cargo: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("cannot build the programs under test:\n{}", String::from_utf8_lossy(&output.stderr)))
}
