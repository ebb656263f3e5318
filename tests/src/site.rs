//! An installation of agentd in a temporary directory: configuration, tools, agents, state, workspaces.
//!
//! ```text
//! <site>          root 0755
//!   config/       agentd.toml, agents/, tools/, schemas/
//!   policies/     the shipped ones, copied
//!   state/        the daemon's
//!   run/          its socket
//!   work/         the only root beneath which callers may name workspaces
//! ```

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use tempfile::TempDir;

/// A directory that holds everything of one daemon. It goes with this value.
pub struct Site {
    folder: TempDir,
    /// First uid of the sandboxes; the next 99 are theirs too.
    first_uid: u32,
}

/// How many sandbox uids a site has.
const UIDS: u32 = 100;

/// A tool from inline text.
pub struct ToolText<'a> {
    /// Its name.
    pub name: &'a str,
    /// The runtime's name.
    pub runtime: &'a str,
    /// The file that is run.
    pub entry: &'a str,
    /// Its text.
    pub code: &'a [u8],
    /// Further tables of the manifest, after `[contract]`.
    pub manifest: &'a str,
}

impl Default for Site {
    fn default() -> Self {
        Self::new()
    }
}

impl Site {
    /// A site with the shipped policies and neither tools nor agents.
    ///
    /// # Panics
    /// When a file cannot be written.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("agentd-test-").tempdir().expect("a temporary directory");
        chmod(folder.path(), 0o755);
        let site = Self { folder, first_uid: next_uids() };
        for part in ["config", "config/agents", "config/tools", "config/schemas", "policies", "run", "work"] {
            fs::create_dir(site.path(part)).expect("a new directory");
            chmod(&site.path(part), 0o755);
        }
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
        for entry in fs::read_dir(&shipped).expect("the shipped policies") {
            let entry = entry.expect("an entry");
            site.write(
                &format!("policies/{}", entry.file_name().to_string_lossy()),
                &fs::read(entry.path()).expect("a policy"),
            );
        }
        for name in ["goal", "result", "any"] {
            site.write(&format!("config/schemas/{name}.json"), json!({"type": "object"}).to_string().as_bytes());
        }
        site.configure("");
        site
    }

    /// Writes agentd.toml, with further tables.
    pub fn configure(&self, tables: &str) {
        let (first, last) = (self.first_uid, self.first_uid + UIDS - 1);
        let work = self.path("work");
        let text = format!(
            "version = 1\n\n[paths]\nagents = [\"agents\"]\ntools = [\"tools\"]\npolicies = [\"../policies\"]\n\n\
             [workspace]\nroots = [\"{}\"]\n\n[uids]\nservice = 69999\nsandboxes = \"{first}-{last}\"\n\n{tables}\n",
            work.display()
        );
        self.write("config/agentd.toml", text.as_bytes());
    }

    /// A path within the site.
    pub fn path(&self, inside: &str) -> PathBuf {
        self.folder.path().join(inside)
    }

    /// The site's directory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Whether a uid belongs to this site's sandboxes.
    pub fn owns_uid(&self, uid: u32) -> bool {
        (self.first_uid..self.first_uid + UIDS).contains(&uid)
    }

    /// Writes a file that everybody can read and only root can change.
    ///
    /// # Panics
    /// When that fails.
    pub fn write(&self, inside: &str, content: &[u8]) -> PathBuf {
        let path = self.path(inside);
        fs::write(&path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        chmod(&path, 0o644);
        path
    }

    /// Adds a tool that takes and returns any object.
    pub fn tool(&self, tool: &ToolText<'_>) {
        let folder = format!("config/tools/{}", tool.name);
        fs::create_dir(self.path(&folder)).expect("a new tool's folder");
        chmod(&self.path(&folder), 0o755);
        let manifest = format!(
            "version = 1\nname = \"{}\"\ndescription = \"A tool of a test.\"\n\n[run]\nruntime = \"{}\"\nentry = \"{}\"\n\n\
             [contract]\ninput = \"input.json\"\noutput = \"output.json\"\n\n{}\n",
            tool.name, tool.runtime, tool.entry, tool.manifest
        );
        self.write(&format!("{folder}/tool.toml"), manifest.as_bytes());
        for schema in ["input", "output"] {
            self.write(&format!("{folder}/{schema}.json"), b"{\"type\":\"object\"}");
        }
        let entry = self.write(&format!("{folder}/{}", tool.entry), tool.code);
        if tool.runtime == "exec" {
            chmod(&entry, 0o755);
        }
    }

    /// Adds a Python tool; `body` sees the parsed request as `request` and its arguments as `arguments`, and prints a reply
    /// by `reply(result)`.
    pub fn python_tool(&self, name: &str, manifest: &str, body: &str) {
        let code = python(body);
        self.tool(&ToolText { name, runtime: "python", entry: "main.py", code: code.as_bytes(), manifest });
    }

    /// Adds a Python extension; `keys` stand before its tables. `body` sees the parsed request as `request` and its arguments as
    /// `arguments`, and answers by `reply(result)`.
    pub fn python_extension(&self, name: &str, keys: &str, tables: &str, body: &str) {
        for folder in ["config/extensions".to_owned(), format!("config/extensions/{name}")] {
            fs::create_dir_all(self.path(&folder)).expect("an extension's folder");
            chmod(&self.path(&folder), 0o755);
        }
        let manifest = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"An extension of a test.\"\n{keys}\n\n[run]\n\
             runtime = \"python\"\nentry = \"main.py\"\n\n{tables}\n"
        );
        self.write(&format!("config/extensions/{name}/extension.toml"), manifest.as_bytes());
        self.write(&format!("config/extensions/{name}/main.py"), python(body).as_bytes());
    }

    /// Adds an agent that asks a model server by chat completions.
    pub fn agent(&self, name: &str, base_url: &str, tools: &[&str], tables: &str) {
        let model = format!("[model]\nprovider = \"openai\"\nbase_url = \"{base_url}\"\nmodel = \"scripted\"\n");
        self.agent_with_model(name, &model, tools, tables);
    }

    /// Adds an agent with its `[model]` table in full.
    pub fn agent_with_model(&self, name: &str, model: &str, tools: &[&str], tables: &str) {
        let text = format!(
            "version = 1\nname = \"{name}\"\ndescription = \"An agent of a test.\"\nsystem_prompt = \"Do what the goal says.\"\n\
             tools = {tools:?}\n\n{model}\n[goal]\nschema = \"../schemas/goal.json\"\n\n[result]\nschema = \"../schemas/result.json\"\n\n{tables}\n"
        );
        self.write(&format!("config/agents/{name}.toml"), text.as_bytes());
    }

    /// Replaces the goal's or the result's schema.
    pub fn schema(&self, name: &str, schema: &Value) {
        self.write(&format!("config/schemas/{name}.json"), schema.to_string().as_bytes());
    }

    /// A new workspace of this owner.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn workspace(&self, name: &str, uid: u32, gid: u32) -> PathBuf {
        let path = self.path("work").join(name);
        fs::create_dir(&path).expect("a new workspace");
        chmod(&path, 0o755);
        std::os::unix::fs::chown(&path, Some(uid), Some(gid)).expect("chown of a workspace");
        path
    }
}

/// A program that reads a request and answers by `reply(result)`.
fn python(body: &str) -> String {
    format!(
        "import json, os, sys, time\nrequest = json.load(sys.stdin)\narguments = request[\"arguments\"]\n\n\
         def reply(result):\n    print(json.dumps({{\"protocol\": 1, \"call_id\": request[\"call_id\"], \"ok\": True, \"result\": result}}))\n\n{body}\n"
    )
}

/// Sets a path's mode.
///
/// # Panics
/// When that fails.
pub fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Daemons that run at the same time on one host share its uids, and with them RLIMIT_NPROC; each site takes its own hundred.
fn next_uids() -> u32 {
    static SITES: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id().wrapping_mul(7).wrapping_add(SITES.fetch_add(1, Ordering::Relaxed)) % 99;
    70_000 + number * UIDS
}
