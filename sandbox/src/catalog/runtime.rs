//! Runtimes: the programs that run a tool's entry.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::config::{PROGRAM_PATH, RuntimeConfig};
use crate::trusted::{self, Owners};

use super::entry::OTHERS_EXECUTE;

/// What every sandbox sees of the host anyway; a program elsewhere needs its folder mounted.
const SYSTEM: [&str; 5] = ["/usr", "/bin", "/sbin", "/lib", "/lib64"];

struct BuiltIn {
    name: &'static str,
    /// None: the tool's entry is the program.
    command: Option<&'static str>,
    arguments: &'static [&'static str],
    probe: &'static [&'static str],
    install: &'static str,
}

const BUILT_IN: [BuiltIn; 5] = [
    BuiltIn { name: "exec", command: None, arguments: &[], probe: &[], install: "" },
    BuiltIn {
        name: "python",
        command: Some("python3"),
        arguments: &[],
        probe: &["--version"],
        install: "install it with the system's packages (Debian: apt install python3)",
    },
    BuiltIn {
        name: "bun",
        command: Some("bun"),
        arguments: &["run"],
        probe: &["--version"],
        install: "install it from npm (npm install bun) and name its program in [runtimes.bun] command",
    },
    BuiltIn {
        name: "node",
        command: Some("node"),
        arguments: &[],
        probe: &["--version"],
        install: "install it with the system's packages (Debian: apt install nodejs)",
    },
    BuiltIn {
        name: "java",
        command: Some("java"),
        // No files in /tmp/hsperfdata; a heap that leaves room for the JVM's own memory below the call's limit; and an end
        // instead of thrashing when it is full.
        arguments: &["-XX:-UsePerfData", "-XX:MaxRAMPercentage=70.0", "-XX:+ExitOnOutOfMemoryError", "-jar"],
        probe: &["-version"],
        install: "install it with the system's packages (Debian: apt install default-jre-headless)",
    },
];

/// A runtime that is installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Its name.
    pub name: String,
    /// The program by absolute path; none when the tool's entry is the program.
    pub command: Option<PathBuf>,
    /// Arguments before the entry.
    pub arguments: Vec<String>,
    /// Host directories that the sandbox sees read-only besides the policy's.
    pub mounts: Vec<PathBuf>,
    /// Arguments with which it shows that it works; none when it is not tried.
    pub probe: Vec<String>,
    /// How it is installed; empty when agentd does not know it.
    pub install: String,
}

/// A runtime that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("runtime `{name}`: {reason}")]
pub struct MissingRuntime {
    /// Its name.
    pub name: String,
    /// Why, and what to do.
    pub reason: String,
}

impl Runtime {
    /// The command line for an entry, by its path inside the sandbox.
    #[must_use]
    pub fn command_line(&self, entry: &Path) -> Vec<OsString> {
        let entry = entry.as_os_str().to_owned();
        let arguments = self.arguments.iter().map(OsString::from);
        self.command.iter().map(OsString::from).chain(arguments).chain([entry]).collect()
    }
}

/// Finds the built-in runtimes and those of the configuration.
pub(super) fn look_up(
    configured: &BTreeMap<String, RuntimeConfig>,
    owners: Owners,
) -> BTreeMap<String, Result<Runtime, MissingRuntime>> {
    let names = BUILT_IN.iter().map(|built_in| built_in.name).chain(configured.keys().map(String::as_str));
    let nothing = RuntimeConfig::default();
    names
        .map(|name| {
            let built_in = BUILT_IN.iter().find(|built_in| built_in.name == name);
            let config = configured.get(name).unwrap_or(&nothing);
            let found =
                find(name, built_in, config, owners).map_err(|reason| MissingRuntime { name: name.to_owned(), reason });
            (name.to_owned(), found)
        })
        .collect()
}

fn find(name: &str, built_in: Option<&BuiltIn>, config: &RuntimeConfig, owners: Owners) -> Result<Runtime, String> {
    let own = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
    let command = match (&config.command, built_in) {
        (Some(command), _) => Some(command.clone()),
        (None, Some(built_in)) => built_in.command.map(PathBuf::from),
        (None, None) => return Err(format!("it is not built in, so [runtimes.{name}] must name its command")),
    };
    let mut mounts = config.mounts.clone();
    for mount in &mounts {
        trusted::TrustedDir::open(mount, owners).map_err(|error| format!("a mount is refused: {error}"))?;
    }
    let install = built_in.map_or("", |built_in| built_in.install);
    let command = command.map(|command| locate(&command, owners, install)).transpose()?;
    if let Some(command) = &command
        && !SYSTEM.iter().chain(&["/"]).any(|system| command.parent() == Some(Path::new(system)))
        && !SYSTEM.iter().any(|system| command.starts_with(system))
        && !mounts.iter().any(|mount| command.starts_with(mount))
    {
        mounts.extend(command.parent().map(Path::to_owned));
    }
    Ok(Runtime {
        name: name.to_owned(),
        arguments: config
            .arguments
            .clone()
            .unwrap_or_else(|| built_in.map(|built_in| own(built_in.arguments)).unwrap_or_default()),
        probe: config.probe.clone().unwrap_or_else(|| built_in.map(|built_in| own(built_in.probe)).unwrap_or_default()),
        install: install.to_owned(),
        command,
        mounts,
    })
}

/// The program's path. One that lies in the system's folders keeps its name, since links there lead where a sandbox sees
/// them too; any other becomes what it leads to.
fn locate(command: &Path, owners: Owners, install: &str) -> Result<PathBuf, String> {
    let candidates: Vec<PathBuf> = if command.is_absolute() {
        vec![command.to_owned()]
    } else {
        PROGRAM_PATH.iter().map(|folder| Path::new(folder).join(command)).collect()
    };
    for candidate in &candidates {
        match trusted::file(candidate, owners) {
            Ok(resolved) => {
                let mode = resolved.metadata().map_or(0, |found| found.permissions().mode() & 0o7777);
                if mode & OTHERS_EXECUTE == 0 {
                    let program = resolved.display();
                    return Err(format!("{program} is not executable by others (mode {mode:04o}): chmod a+x"));
                }
                let in_system = |path: &Path| SYSTEM.iter().any(|system| path.starts_with(system));
                return Ok(if in_system(candidate) && in_system(&resolved) { candidate.clone() } else { resolved });
            }
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(format!("its program is refused: {error}")),
        }
    }
    let searched = if command.is_absolute() {
        format!("{} does not exist", command.display())
    } else {
        format!("`{}` is not on {}", command.display(), PROGRAM_PATH.join(":"))
    };
    Err(if install.is_empty() { searched } else { format!("{searched}; {install}") })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn configured(name: &str, config: RuntimeConfig) -> Result<Runtime, MissingRuntime> {
        look_up(&BTreeMap::from([(name.to_owned(), config)]), Owners::RootOnly).remove(name).unwrap()
    }

    #[test]
    fn the_systems_python_is_found_and_never_a_shim() {
        let python = look_up(&BTreeMap::new(), Owners::RootOnly).remove("python").unwrap().unwrap();
        let command = python.command.clone().unwrap();
        assert!(PROGRAM_PATH.contains(&command.parent().unwrap().to_str().unwrap()), "{}", command.display());
        assert!(python.mounts.is_empty());
        let line = python.command_line(Path::new("/tool/main.py"));
        assert_eq!(line, [command.into_os_string(), "/tool/main.py".into()]);
    }

    #[test]
    fn an_entry_alone_is_the_program() {
        let exec = look_up(&BTreeMap::new(), Owners::RootOnly).remove("exec").unwrap().unwrap();
        assert_eq!(exec.command_line(Path::new("/tool/bin/run")), ["/tool/bin/run"]);
    }

    #[test]
    fn a_program_elsewhere_gets_its_folder_mounted() {
        let top = tempfile::tempdir().unwrap();
        let program = top.path().canonicalize().unwrap().join("bun");
        fs::write(&program, "").unwrap();
        let config = RuntimeConfig { command: Some(program.clone()), ..RuntimeConfig::default() };
        assert!(configured("bun", config.clone()).unwrap_err().reason.contains("chmod a+x"));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let bun = configured("bun", config.clone()).unwrap();
        assert_eq!(bun.mounts, [program.parent().unwrap()]);
        assert_eq!(bun.command_line(Path::new("/tool/m.ts"))[1..], ["run", "/tool/m.ts"]);

        fs::set_permissions(&program, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(configured("bun", config).unwrap_err().reason.contains("written by others"));
    }

    #[test]
    fn a_missing_runtime_says_what_to_do() {
        let config = RuntimeConfig { command: Some("no-such-program".into()), ..RuntimeConfig::default() };
        let error = configured("node", config).unwrap_err().to_string();
        assert!(
            error.contains("not on /usr/local/bin:/usr/bin:/bin") && error.contains("apt install nodejs"),
            "{error}"
        );
        let error = configured("ruby", RuntimeConfig::default()).unwrap_err().to_string();
        assert!(error.contains("[runtimes.ruby]"), "{error}");
    }
}
