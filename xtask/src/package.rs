//! `cargo xtask package`: agentd's Debian package, by cargo-deb from `[package.metadata.deb]` of agentd/Cargo.toml.
//!
//! cargo-deb takes programs from `release` in the target directory only. It is given a target directory of its own below
//! ours, in which this task lays out programs of any profile, and what the programs themselves write: manual pages and completions.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::demo;
use crate::example::copy_file;
use crate::process;
use crate::project::{self, Profile};
use crate::tools::Tool;

const CARGO_DEB: Tool = Tool { name: "cargo-deb", version: "3.8.0", features: &[] };

const PROGRAMS: [&str; 3] = ["agentd", "agentctl", "agentd-launcher"];

/// Each shell, and the file in which it looks for how to complete agentctl.
const COMPLETIONS: [(&str, &str); 3] = [("bash", "agentctl"), ("zsh", "_agentctl"), ("fish", "agentctl.fish")];

/// Builds the programs and packs them, once for each revision. The folder, which holds `agentd-REVISION.deb`.
pub(crate) fn build(profile: Profile, revisions: &[u32]) -> Result<PathBuf> {
    demo::build(profile)?;
    let folder = project::target()?.join("package").join(profile.folder());
    lay_out(profile, &folder.join("release"))?;
    for revision in revisions {
        let mut command = Command::new(CARGO_DEB.program()?);
        command.current_dir(project::root()).env("CARGO_TARGET_DIR", &folder);
        command.args(["--manifest-path", "agentd/Cargo.toml", "--locked", "--no-build", "--no-strip", "--quiet"]);
        if profile == Profile::Debug {
            command.arg("--fast");
        }
        command.arg("--deb-revision").arg(revision.to_string());
        command.arg("--output").arg(folder.join(format!("agentd-{revision}.deb")));
        process::run(&mut command)?;
    }
    Ok(folder)
}

/// What the package holds and no checkout does.
fn lay_out(profile: Profile, release: &Path) -> Result<()> {
    if release.exists() {
        fs::remove_dir_all(release).with_context(|| format!("removing {}", release.display()))?;
    }
    let (manual, completions) = (release.join("man"), release.join("completions"));
    for folder in [&manual, &completions] {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    for name in PROGRAMS {
        copy_file(&project::program(name, profile)?, &release.join(name), 0o755)?;
        process::run(Command::new("strip").arg(release.join(name)))?;
    }
    for name in ["agentd", "agentctl"] {
        process::run(Command::new(release.join(name)).arg("man").arg(&manual))?;
    }
    // cargo-deb would do it itself, with much more effort.
    process::run(Command::new("gzip").args(["-9", "--no-name", "--recursive"]).arg(&manual))?;
    for (shell, file) in COMPLETIONS {
        let script = process::output(Command::new(release.join("agentctl")).args(["completions", shell]))?;
        fs::write(completions.join(file), script).with_context(|| format!("writing {file}"))?;
    }
    Ok(())
}
