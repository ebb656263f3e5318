//! What else starts a program in a sandbox. bubblewrap and the runtimes of containers show it as much of the host as agentd's `strict`
//! does; two agents' own sandboxes are taken as they are.
//!
//! What is not there is installed where apt or npm can, and else named with the reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::json;

use super::launch::timed;
use crate::process::{self, Conversation};
use crate::project;

/// bubblewrap, in the table.
pub(super) const BUBBLEWRAP: &str = "`bwrap --unshare-all` with the same view";
/// What bubblewrap is told.
pub(super) const BWRAP: &str = "--unshare-all --die-with-parent --new-session --ro-bind /usr /usr --symlink usr/bin /bin \
                     --symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --tmpfs /tmp /usr/bin/true";
/// npm's packages of two agents' sandboxes.
const NPM: [&str; 2] = ["@anthropic-ai/sandbox-runtime@0.0.83", "@openai/codex@0.171.0"];
/// How long one launch may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Starts `true` in some sandbox.
pub(super) struct Sandbox {
    /// How it is called in the table.
    pub(super) name: &'static str,
    /// Whether it takes so long that fewer launches are enough.
    pub(super) is_slow: bool,
    start: Start,
}

enum Start {
    Command {
        line: Vec<String>,
        environment: Vec<(&'static str, PathBuf)>,
    },
    /// A shell that starts it, with a number of its own, when told to.
    Shell {
        shell: Conversation,
        number: usize,
    },
}

/// One that cannot be measured here, and why.
pub(super) struct Missing {
    /// How it is called in the table.
    pub(super) name: &'static str,
    /// Why not.
    pub(super) reason: String,
}

impl Sandbox {
    /// Starts it once, until its end is known.
    pub(super) fn launch(&mut self) -> Result<Duration> {
        match &mut self.start {
            Start::Command { line, environment } => {
                let [program, arguments @ ..] = line.as_slice() else { bail!("{} has no program", self.name) };
                timed(Command::new(program).args(arguments).envs(environment.iter().map(|(key, value)| (key, value))))
            }
            Start::Shell { shell, number } => {
                *number += 1;
                let start = Instant::now();
                shell.say(&number.to_string())?;
                let status = shell.hear(PATIENCE)?.with_context(|| format!("{} does not end", self.name))?;
                let took = start.elapsed();
                if status != "0" {
                    bail!("{} ended with status {status}", self.name);
                }
                Ok(took)
            }
        }
    }
}

/// All that there are.
pub(super) struct Sandboxes {
    /// Those that run here.
    pub(super) found: Vec<Sandbox>,
    /// Those that do not.
    pub(super) missing: Vec<Missing>,
    // After the others, whose programs may still run.
    _hierarchy: Hierarchy,
}

/// Looks for all of them.
pub(super) fn find(folder: &Path) -> Result<Sandboxes> {
    let hierarchy = Hierarchy::as_it_is();
    let mut found = Vec::new();
    let mut missing = Vec::new();
    let mut add = |name: &'static str, is_slow: bool, start: Result<Start>| {
        let sandbox = start.and_then(|start| {
            let mut sandbox = Sandbox { name, is_slow, start };
            // Also so that no measured launch is the first.
            sandbox.launch()?;
            Ok(sandbox)
        });
        match sandbox {
            Ok(sandbox) => found.push(sandbox),
            Err(error) => {
                eprintln!("{name} is left out: {error:#}");
                missing.push(Missing { name, reason: format!("{error:#}").replace(['\n', '|'], " ") });
            }
        }
    };
    add(BUBBLEWRAP, false, bubblewrap());
    let bundle = bundle(folder)?;
    add("`crun run` with the same view", false, runtime("crun", &bundle));
    add("`runc run` with the same view", true, runtime("runc", &bundle));
    add("`srt`, npm's `@anthropic-ai/sandbox-runtime`", true, anthropic(folder));
    add("`codex sandbox`, out of npm's `@openai/codex`", true, codex());
    process::check_interrupt()?;
    Ok(Sandboxes { found, missing, _hierarchy: hierarchy })
}

/// Which controllers the host's control groups hand down. Runtimes of containers change that, and leave it so.
struct Hierarchy {
    file: &'static str,
    before: String,
}

impl Hierarchy {
    fn as_it_is() -> Self {
        let file = ["/sys/fs/cgroup/cgroup.subtree_control", "/sys/fs/cgroup/unified/cgroup.subtree_control"]
            .into_iter()
            .find(|file| Path::new(file).exists())
            .unwrap_or_default();
        Self { file, before: fs::read_to_string(file).unwrap_or_default() }
    }
}

impl Drop for Hierarchy {
    fn drop(&mut self) {
        for added in fs::read_to_string(self.file).unwrap_or_default().split_whitespace() {
            let was_there = self.before.split_whitespace().any(|known| known == added);
            if !was_there && let Err(error) = fs::write(self.file, format!("-{added}")) {
                eprintln!("{added} stays in {}: {error}", self.file);
            }
        }
    }
}

fn bubblewrap() -> Result<Start> {
    installed("bwrap", "bubblewrap", "--version")?;
    let line = std::iter::once("bwrap").chain(BWRAP.split_whitespace()).map(str::to_owned).collect();
    Ok(Start::Command { line, environment: Vec::new() })
}

/// Fails when a program is not there, and apt cannot install it. It ends with 0 on that option.
fn installed(program: &str, package: &str, option: &str) -> Result<()> {
    let there = || {
        let mut ask = Command::new(program);
        ask.arg(option).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        ask.status().is_ok_and(|status| status.success())
    };
    if !there() && Path::new("/usr/bin/apt-get").exists() {
        eprintln!("installing {package}");
        let mut apt = Command::new("apt-get");
        apt.args(["install", "--yes", "--quiet", "--no-install-recommends", package]).stdout(Stdio::null());
        process::run(apt.env("DEBIAN_FRONTEND", "noninteractive"))?;
    }
    if there() { Ok(()) } else { bail!("{program} is not there; install {package}") }
}

/// Where a host has control groups of both versions, runtimes are shown those of version 2 alone, which are what agentd uses and
/// the only ones that crun takes.
const SHELL: &str = r#"
if [ -e /sys/fs/cgroup/unified/cgroup.procs ]; then mount --bind /sys/fs/cgroup/unified /sys/fs/cgroup || exit; fi
while read -r number; do "$@" "agentd-bench-$$-$number" < /dev/null 1>&2; echo "$?"; done
"#;

/// A runtime of containers that is started by a shell which waits in a mount namespace of its own.
fn runtime(name: &'static str, bundle: &Path) -> Result<Start> {
    installed(name, name, "--version")?;
    let state = bundle.with_extension(name);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", SHELL, "sh", name, "--root"]).arg(state);
    command.args(["run", "--bundle"]).arg(bundle);
    Ok(Start::Shell { shell: Conversation::start(&mut command)?, number: 0 })
}

/// A bundle with the view that bubblewrap gives.
fn bundle(folder: &Path) -> Result<PathBuf> {
    let bundle = folder.join("bundle");
    let root = bundle.join("rootfs");
    for directory in ["usr", "proc", "dev", "tmp"] {
        fs::create_dir_all(root.join(directory))?;
    }
    for (link, to) in [("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")] {
        std::os::unix::fs::symlink(to, root.join(link))?;
    }
    let mount = |destination: &str, kind: &str, source: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": source, "options": options});
    let namespaces = ["pid", "network", "ipc", "uts", "mount", "cgroup"].map(|kind| json!({"type": kind}));
    let config = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false, "user": {"uid": 65534, "gid": 65534}, "args": ["/usr/bin/true"], "env": ["PATH=/usr/bin"],
            "cwd": "/", "noNewPrivileges": true,
        },
        "root": {"path": "rootfs", "readonly": true},
        "hostname": "bench",
        "mounts": [
            mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
            mount("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755"]),
            mount("/usr", "none", "/usr", &["rbind", "ro"]),
            mount("/tmp", "tmpfs", "tmpfs", &["nosuid", "nodev"]),
        ],
        "linux": {"namespaces": namespaces, "cgroupsPath": "/agentd-bench"},
    });
    fs::write(bundle.join("config.json"), config.to_string())?;
    Ok(bundle)
}

/// npm's packages, installed once below the target directory.
fn npm() -> Result<PathBuf> {
    let folder = project::target()?.join("tools/sandboxes");
    // Made last, so that an installation that broke off is made again.
    let complete = folder.join("complete");
    if !complete.exists() {
        eprintln!("installing {} into {}", NPM.join(" and "), folder.display());
        fs::create_dir_all(&folder)?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix"]).arg(&folder).args(NPM);
        process::run(npm.stdout(Stdio::null()))?;
        fs::write(&complete, "")?;
    }
    Ok(folder)
}

fn anthropic(folder: &Path) -> Result<Start> {
    installed("socat", "socat", "-V")?;
    installed("rg", "ripgrep", "--version")?;
    let settings = folder.join("srt.json");
    let nothing = json!({
        "network": {"allowedDomains": [], "deniedDomains": []},
        "filesystem": {"denyRead": [], "allowWrite": [], "denyWrite": []},
    });
    fs::write(&settings, nothing.to_string())?;
    let program = npm()?.join("node_modules/.bin/srt");
    let line = [program, "-s".into(), settings, "/usr/bin/true".into()];
    Ok(Start::Command { line: line.map(|word| word.display().to_string()).into(), environment: Vec::new() })
}

/// The program that its agent runs, without the Node.js around it.
fn codex() -> Result<Start> {
    let vendor = npm()?.join("node_modules/@openai/codex-linux-x64/vendor");
    let program = vendor.join("x86_64-unknown-linux-musl/bin/codex");
    // It refuses one below the place for temporary files.
    let home = project::target()?.join("tools/sandboxes/codex-home");
    fs::create_dir_all(&home)?;
    let line = vec![program.display().to_string(), "sandbox".into(), "--".into(), "/usr/bin/true".into()];
    Ok(Start::Command { line, environment: vec![("CODEX_HOME", home)] })
}
