//! `cargo xtask docs`: runs every shell command that the documentation shows, on a daemon of its own.
//!
//! | a block that begins with three backticks and | is |
//! |---|---|
//! | `sh` | run by bash; a command that fails fails the page |
//! | `sh in-background` | started, and ended with the page; what follows waits until `run/agentd.sock` below it answers |
//! | `sh not-run: REASON` | not run, and the reason is printed |
//!
//! The blocks of a page are run in its order, as if typed into one shell, in a scratch directory. They find the project's
//! programs on PATH, the daemon through AGENTD_SOCKET, in `$WORKSPACE` a workspace with the example's records, and the checkout in
//! `$CHECKOUT`.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::demo::{self, Daemon};
use crate::example::Staged;
use crate::process::{self, Running};
use crate::project::{self, Profile};

/// How long a daemon of a page's may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs the commands of all pages.
pub(crate) fn run() -> Result<()> {
    let folder = project::target()?.join("docs");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    }
    let workspace = folder.join("work");
    fs::create_dir_all(&workspace)?;
    let staged = Staged::prepare(&folder, None)?;
    fs::copy(staged.input(), workspace.join("birdstrikes.csv"))?;
    let daemon = Daemon::start(&staged, &folder.join("agentd.log"), Profile::Debug)?;
    for page in pages()? {
        let text = fs::read_to_string(&page).with_context(|| format!("reading {}", page.display()))?;
        let mut shell = Shell::new(&staged, &daemon, &workspace)?;
        for block in blocks(&text) {
            let place = format!("{}:{}", page.strip_prefix(project::root()).unwrap_or(&page).display(), block.line);
            println!("{place}: {}", shell.run(&block).with_context(|| format!("{place}\n{}", block.script))?);
        }
    }
    Ok(())
}

/// One page's shell: a scratch directory, and what earlier blocks exported.
struct Shell<'a> {
    // First, so that what runs there ends before the directory goes.
    background: Vec<Running>,
    scratch: TempDir,
    staged: &'a Staged,
    daemon: &'a Daemon,
    workspace: &'a Path,
}

impl<'a> Shell<'a> {
    fn new(staged: &'a Staged, daemon: &'a Daemon, workspace: &'a Path) -> Result<Self> {
        let scratch = tempfile::Builder::new().prefix("agentd-docs-").tempdir()?;
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self { background: Vec::new(), scratch, staged, daemon, workspace })
    }

    /// Runs a block and says what became of it.
    fn run(&mut self, block: &Block) -> Result<String> {
        match &block.kind {
            Kind::NotRun(reason) => return Ok(format!("not run: {reason}")),
            Kind::Background => {
                let log = File::create(self.scratch.path().join("background.log"))?;
                let mut command = self.bash(&block.script)?;
                command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
                self.background.push(Running::start(&mut command)?);
                self.await_socket()?;
            }
            Kind::Run => {
                let (status, output) = process::capture(self.bash(&block.script)?.stdin(Stdio::null()))?;
                if !status.success() {
                    bail!("{status}\n{output}");
                }
            }
        }
        Ok("ok".to_owned())
    }

    /// bash in the state in which the block before left it.
    fn bash(&self, script: &str) -> Result<Command> {
        let programs = project::target()?.join("debug");
        let path = std::env::var("PATH").unwrap_or_default();
        let state = self.scratch.path().join(".state");
        let (before, after) = (". \"$STATE\"; cd \"$PWD\"", "export -p > \"$STATE\"");
        let before = if state.exists() { before } else { "true" };
        let mut command = Command::new("bash");
        command
            .args(["-euo", "pipefail", "-c", &format!("{before}\n{script}\n{after}")])
            .current_dir(self.scratch.path())
            .env("STATE", &state)
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("HOME", self.scratch.path())
            .env("AGENTD_SOCKET", self.daemon.socket())
            .env("CONFIG", self.staged.config())
            .env("CHECKOUT", project::root())
            .env("WORKSPACE", self.workspace);
        Ok(command)
    }

    fn await_socket(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let below = sockets(self.scratch.path())?;
            if below.iter().any(|socket| demo::answers(socket)) {
                return Ok(());
            }
            let ended = self.background.last_mut().map(Running::ended).transpose()?.flatten();
            if ended.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.scratch.path().join("background.log")).unwrap_or_default();
                bail!("no daemon answers\n{log}");
            }
            process::check_interrupt()?;
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Where a daemon of the page's may listen: `run/agentd.sock` in the scratch directory or one below.
fn sockets(scratch: &Path) -> Result<Vec<PathBuf>> {
    let mut places = vec![scratch.join("run/agentd.sock")];
    for entry in fs::read_dir(scratch)? {
        places.push(entry?.path().join("run/agentd.sock"));
    }
    Ok(places)
}

fn pages() -> Result<Vec<PathBuf>> {
    let root = project::root();
    let mut pages: Vec<_> = ["README.md", "CONTRIBUTING.md"].iter().map(|name| root.join(name)).collect();
    let mut docs: Vec<_> = fs::read_dir(root.join("docs"))?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    docs.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    docs.sort();
    pages.append(&mut docs);
    Ok(pages)
}

/// One block of shell commands.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    line: usize,
    script: String,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    Run,
    Background,
    NotRun(String),
}

impl Kind {
    fn of(info: &str) -> Option<Self> {
        match info {
            "sh" => Some(Self::Run),
            "sh in-background" => Some(Self::Background),
            _ => info.strip_prefix("sh not-run: ").map(|reason| Self::NotRun(reason.to_owned())),
        }
    }
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let body: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| !line.starts_with("```")).collect();
        if let Some(kind) = Kind::of(info) {
            blocks.push(Block { line: number + 1, script: body.join("\n"), kind });
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_blocks_are_found_and_others_are_not() {
        let page = "a\n```sh\none\ntwo\n```\n```json\n{}\n```\n```sh not-run: needs systemd\nthree\n```\n";
        let block = |line, script: &str, kind| Block { line, script: script.to_owned(), kind };
        let reason = || Kind::NotRun("needs systemd".to_owned());
        assert_eq!(blocks(page), [block(2, "one\ntwo", Kind::Run), block(9, "three", reason())]);
    }
}
