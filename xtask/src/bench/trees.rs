//! Large workspaces: the digest of a whole tree beside `sha256sum`, and a call that changes one file in it beside git.
//!
//! A direct call's worker knows nothing yet: it reads the whole tree, as a job does once at its begin. A job's later calls examine what
//! may have changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::launch::timed;
use super::samples::{Samples, milliseconds};
use super::{Bench, Row, jobs};
use crate::demo::Daemon;
use crate::process;

/// The largest tree's files.
const LARGEST: usize = 1_000_000;
/// Files per directory.
const FILES: usize = 100;
/// How often each is measured: a round reads the tree several times.
const ROUNDS: usize = 9;
/// How often the largest is, of which a round takes a minute.
const ROUNDS_OF_LARGEST: usize = 3;

/// A million files and their directories are more than a workspace may have unless it is allowed.
const LIMITS: &str = "[workspace]\nmax_entries = 2000000\n";

/// Measures trees of so many files.
pub(super) fn measure(bench: &Bench) -> Result<Vec<Row>> {
    let (daemon, folder) = (&bench.daemon("trees", LIMITS)?, bench.folder.as_path());
    let empty = folder.join("workspace-empty");
    fs::create_dir(&empty)?;
    let mut rows = Vec::new();
    for files in [1_000, 100_000, LARGEST] {
        if files > bench.effort.files {
            break;
        }
        rows.extend(one(daemon, folder, &empty, files)?);
    }
    Ok(rows)
}

fn one(daemon: &Daemon, folder: &Path, empty: &Path, files: usize) -> Result<Vec<Row>> {
    let rounds = if files < LARGEST { ROUNDS } else { ROUNDS_OF_LARGEST };
    eprintln!("trees of {files} files, {rounds} rounds");
    let tree = filled(folder, files)?;
    let repository = folder.join(format!("repository-{files}"));
    let git = |arguments: &[&str]| {
        let mut git = Command::new("git");
        git.arg("--git-dir").arg(&repository).arg("--work-tree").arg(&tree).args(arguments);
        git
    };
    process::run(Command::new("git").args(["init", "--quiet", "--bare"]).arg(&repository))?;
    process::run(&mut git(&["add", "-A"]))?;

    let (mut digest, mut summed, mut called, mut alone, mut indexed) =
        <(Samples, Samples, Samples, Samples, Samples)>::default();
    let (mut later, mut later_alone) = <(Samples, Samples)>::default();
    for round in 0..rounds {
        process::check_interrupt()?;
        digest.push(timed(daemon.agentctl(["digest"])?.arg(&tree))?);
        let sum = "find \"$0\" -type f -print0 | xargs -0 sha256sum";
        summed.push(timed(Command::new("sh").args(["-c", sum]).arg(&tree))?);
        called.push(call(daemon, &tree, round)?);
        alone.push(call(daemon, empty, round)?);
        // The call has just changed the file that git has to find now.
        indexed.push(timed(&mut git(&["add", "-A"]))? + timed(&mut git(&["write-tree"]))?);
        later.push(jobs::later_edit(daemon, &tree)?);
        later_alone.push(jobs::later_edit(daemon, empty)?);
    }
    fs::remove_dir_all(&tree)?;
    fs::remove_dir_all(&repository)?;
    let more = called.p50().saturating_sub(alone.p50());
    let later_more = later.p50().saturating_sub(later_alone.p50());
    let times_git = |more: std::time::Duration| {
        let git = indexed.p50().as_secs_f64();
        format!("{:.3} × `git add -A && git write-tree` ({})", more.as_secs_f64() / git, indexed.text())
    };
    Ok(vec![
        Row::new(
            format!("`agentctl digest` of {files} files"),
            digest.text(),
            format!("{:.2} × sha256sum ({})", digest.times(&summed), summed.text()),
        ),
        Row::new(
            format!("a direct call that changes one of {files} files: what it takes more than in an empty workspace"),
            format!("{:.2} ms", milliseconds(more)),
            times_git(more),
        ),
        Row::new(
            format!(
                "a later turn of a job that changes one of {files} files: what it takes more than in an empty workspace"
            ),
            format!("{:.2} ms (of {:.2} ms)", milliseconds(later_more), milliseconds(later.p50())),
            times_git(later_more),
        ),
    ])
}

fn call(daemon: &Daemon, workspace: &Path, round: usize) -> Result<std::time::Duration> {
    let mut exec = daemon.agentctl(["exec", "--policy", "workspace", "--workspace"])?;
    let script = format!("echo {round} > changed");
    timed(exec.arg(workspace).args(["--", "sh", "-c", &script]))
}

/// A tree of files between one and four KiB, in the page cache as it was just written.
fn filled(folder: &Path, files: usize) -> Result<PathBuf> {
    let tree = folder.join(format!("workspace-{files}"));
    let mut content = vec![0; 4096];
    for number in 0..files {
        let directory = tree.join(format!("{}/{}", number / FILES / FILES, number / FILES));
        if number % FILES == 0 {
            fs::create_dir_all(&directory)?;
        }
        content[..8].copy_from_slice(&number.to_le_bytes());
        let path = directory.join(number.to_string());
        let length = 1024 + number * 1021 % 3072;
        fs::write(&path, &content[..length]).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(tree)
}
