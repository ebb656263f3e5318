//! The example, made ready to run: a root-owned copy of its folders in a temporary directory, since agentd refuses
//! configuration that others could change, with what a checkout does not hold (Bun, the jar) put in.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::project;
use crate::runtimes;

/// The name of the example's agent.
pub(crate) const AGENT: &str = "quarterly-report";

/// A model server that is asked instead of the recorded conversation.
pub(crate) struct ModelServer {
    /// The base URL of an OpenAI-compatible API.
    pub(crate) base_url: String,
    /// The model's name there.
    pub(crate) model: String,
    /// Where agentd finds the key, as the agent's file refers to it; never the key itself.
    pub(crate) api_key: Option<String>,
}

/// The variable of agentd's environment that holds the key.
const KEY_VARIABLE: &str = "AGENTD_DEMO_API_KEY";

impl ModelServer {
    /// The server that the environment names, if it names one.
    pub(crate) fn from_environment() -> Result<Option<Self>> {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        match (text("AGENTD_DEMO_BASE_URL"), text(KEY_VARIABLE)) {
            (None, None) => Ok(None),
            (Some(base_url), Some(_)) => {
                let model = text("AGENTD_DEMO_MODEL").context(
                    "AGENTD_DEMO_BASE_URL is set; set AGENTD_DEMO_MODEL to the name of a model that it serves, too",
                )?;
                Ok(Some(Self { base_url, model, api_key: Some(format!("env:{KEY_VARIABLE}")) }))
            }
            _ => bail!("set AGENTD_DEMO_BASE_URL and {KEY_VARIABLE}, both or neither"),
        }
    }
}

/// The example in a temporary directory; gone with this value.
pub(crate) struct Staged {
    folder: TempDir,
}

impl Staged {
    /// Copies the example, compiles and fetches what it lacks, and lets jobs name workspaces below `root`.
    pub(crate) fn prepare(root: &Path, server: Option<&ModelServer>) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("agentd-demo-").tempdir().context("making a temporary directory")?;
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let staged = Self { folder };
        for part in ["examples/config", "examples/quarterly-report", "policies"] {
            copy_tree(&project::root().join(part), &staged.path(part))?;
        }
        let sources = project::root().join("examples/config/tools/pack_report/src");
        copy_file(
            &runtimes::jar(&[&sources, &runtimes::java_library()], "PackReport")?,
            &staged.path("examples/config/tools/pack_report/pack_report.jar"),
            0o644,
        )?;
        make_directory(&staged.path("runtimes"))?;
        copy_file(&runtimes::bun()?, &staged.path("runtimes/bun"), 0o755)?;
        staged.name_root_and_bun(root)?;
        if let Some(server) = server {
            staged.ask_server(server)?;
        }
        Ok(staged)
    }

    /// The configuration directory.
    pub(crate) fn config(&self) -> PathBuf {
        self.path("examples/config")
    }

    /// Where the daemon keeps its state.
    pub(crate) fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// The daemon's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.path("run/agentd.sock")
    }

    /// The records that the job works on.
    pub(crate) fn input(&self) -> PathBuf {
        self.path("examples/quarterly-report/birdstrikes.csv")
    }

    /// The goal of the example's job.
    pub(crate) fn goal(&self) -> Result<serde_json::Value> {
        let file = self.path("examples/quarterly-report/goal.json");
        serde_json::from_slice(&fs::read(&file)?).with_context(|| format!("reading {}", file.display()))
    }

    /// A file or folder of the copy.
    pub(crate) fn path(&self, inside: &str) -> PathBuf {
        self.folder.path().join(inside)
    }

    fn name_root_and_bun(&self, root: &Path) -> Result<()> {
        let file = self.config().join("agentd.toml");
        let mut config = read_toml(&file)?;
        let mut roots = toml::Table::new();
        roots.insert("roots".into(), toml::Value::Array(vec![text(root)?]));
        config.insert("workspace".into(), roots.into());
        let mut bun = toml::Table::new();
        bun.insert("command".into(), text(&self.path("runtimes/bun"))?);
        let mut runtimes = toml::Table::new();
        runtimes.insert("bun".into(), bun.into());
        config.insert("runtimes".into(), runtimes.into());
        fs::write(&file, config.to_string()).with_context(|| format!("writing {}", file.display()))
    }

    fn ask_server(&self, server: &ModelServer) -> Result<()> {
        let mut model = toml::Table::new();
        model.insert("provider".into(), "openai".into());
        model.insert("base_url".into(), server.base_url.clone().into());
        model.insert("model".into(), server.model.clone().into());
        if let Some(reference) = &server.api_key {
            model.insert("api_key".into(), reference.clone().into());
        }
        self.change_agent(|agent| {
            agent.insert("model".into(), model.into());
            Ok(())
        })
    }

    /// Lets the agent's conversations be added to a file of that name in the ledger's directory.
    pub(crate) fn record_into(&self, name: &str) -> Result<()> {
        self.change_agent(|agent| {
            let model = agent.get_mut("model").and_then(toml::Value::as_table_mut).context("the agent has no model")?;
            model.insert("record".into(), name.into());
            Ok(())
        })
    }

    fn change_agent(&self, change: impl FnOnce(&mut toml::Table) -> Result<()>) -> Result<()> {
        let file = self.config().join(format!("agents/{AGENT}.toml"));
        let mut agent = read_toml(&file)?;
        change(&mut agent)?;
        fs::write(&file, agent.to_string()).with_context(|| format!("writing {}", file.display()))
    }
}

fn read_toml(file: &Path) -> Result<toml::Table> {
    let content = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    content.parse().with_context(|| format!("reading {}", file.display()))
}

fn text(path: &Path) -> Result<toml::Value> {
    Ok(path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))?.into())
}

/// Copies regular files and folders, readable by everyone and writable by root alone, whatever the umask is.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    make_directory(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_tree(&source, &target)?;
        } else {
            // Others' writing is what a checkout's umask may have left; whether it is a program is the file's own.
            let executable = entry.metadata()?.permissions().mode() & 0o111 != 0;
            copy_file(&source, &target, if executable { 0o755 } else { 0o644 })?;
        }
    }
    Ok(())
}

/// Copies one file and sets its mode.
pub(crate) fn copy_file(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| format!("changing {}", to.display()))
}

fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("making {}", path.display()))?;
    // Parents made on the way get the same mode.
    for made in
        path.ancestors().take_while(|made| made.starts_with(std::env::temp_dir()) && *made != std::env::temp_dir())
    {
        fs::set_permissions(made, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}
