//! Everything that the configuration directory names, read and checked: the daemon starts with it, `agentd check` judges it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use sandbox::catalog::Catalog;
use sandbox::config::{Config, Directories};
use sandbox::policy::{Policy, WorkspaceMode};
use sandbox::trusted::Owners;
use toolproto::api::PolicyView;
use toolproto::manifest::{Effects, ToolManifest};
use toolproto::source::{FileError, alternatives, line_of_key};

use crate::agent::{Agent, Price};
use crate::extension::Extension;
use crate::outlines::Outlines;
use crate::runtimes::Runtime;
use crate::tools::{Tool, Tools};

/// A configuration without faults.
#[derive(Debug)]
pub struct Installation {
    /// `agentd.toml`.
    pub config: Config,
    /// Tools, runtimes and policies as files say.
    pub catalog: Catalog,
    /// The tools, with their schemas compiled.
    pub tools: Tools,
    /// The agents.
    pub agents: Vec<Agent>,
}

impl Installation {
    /// Reads everything.
    ///
    /// # Errors
    /// Every file that is wrong, with line and reason.
    pub fn load(config_dir: &Path, owners: Owners) -> Result<Self, Vec<FileError>> {
        let config = Config::load(config_dir).map_err(|error| vec![error])?;
        let catalog = Catalog::load(&config, owners)?;
        let mut errors = Vec::new();
        let mut tools = Vec::new();
        for tool in catalog.tools.values() {
            let time = config.timeouts.of(tool.manifest.program.timeout);
            let discardable = is_discardable(&tool.manifest, &catalog);
            match Tool::load(&tool.folder, tool.manifest.clone(), tool.digest, time, discardable) {
                Ok(tool) => tools.push(tool),
                Err(error) => errors.push(error),
            }
        }
        let extensions = catalog.extensions.values().map(|extension| Extension {
            manifest: extension.manifest.clone(),
            digest: extension.digest,
            time: config.timeouts.of(extension.manifest.program.timeout),
        });
        let extensions: Vec<Extension> = extensions.collect();
        let mut agents = Vec::new();
        for file in files(&config.paths.agents, &mut errors) {
            match Agent::load(&file) {
                Ok(mut agent) => {
                    errors.extend(unknown_name(&file, "tool", &agent.tools, &catalog.tools));
                    errors.extend(unknown_name(&file, "extension", &agent.extensions, &catalog.extensions));
                    errors.extend(unpriced(&agent, &file, &config));
                    errors.extend(spilling_verification(&agent, &file, &catalog));
                    agent.max_parallel = config.limits.max_parallel as usize;
                    agents.push(agent);
                }
                Err(error) => errors.push(error),
            }
        }
        if errors.is_empty() {
            let tools = tools.into_iter().collect::<Tools>().with_extensions(extensions);
            let runtimes = catalog.runtimes.values().filter_map(|runtime| Runtime::of(runtime.as_ref().ok()?));
            let tools = tools.with_runtimes(runtimes).with_outlines(Outlines::of(&catalog));
            Ok(Self { config, catalog, tools, agents })
        } else {
            Err(errors)
        }
    }

    /// The policies as `GET /policies` shows them.
    ///
    /// # Errors
    /// When a policy has no JSON form.
    pub fn policies(&self) -> serde_json::Result<Vec<PolicyView>> {
        self.catalog.policies.values().map(view).collect()
    }

    /// What models cost, by name, as `[model.NAME.price]` says.
    #[must_use]
    pub fn prices(&self) -> HashMap<String, Price> {
        let priced = self.config.models.iter().filter_map(|(name, model)| Some((name.clone(), model.price?)));
        priced
            .map(|(name, price)| {
                let cached_input = price.cached_input.unwrap_or(price.input);
                (name, Price { input: price.input, cached_input, output: price.output })
            })
            .collect()
    }
}

fn view(policy: &Policy) -> serde_json::Result<PolicyView> {
    let effective = serde_json::to_value(policy)?;
    let word = |field: &str| effective[field].as_str().unwrap_or_default().to_owned();
    Ok(PolicyView {
        name: policy.name.clone(),
        digest: policy.identity().digest,
        adhoc: policy.adhoc,
        workspace: word("workspace"),
        network: word("network"),
        effective,
    })
}

/// The `.toml` files of a list of directories. A missing default directory is skipped.
fn files(directories: &Directories, errors: &mut Vec<FileError>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for directory in &directories.list {
        match std::fs::read_dir(directory) {
            Ok(entries) => {
                let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
                files.extend(paths.filter(|path| path.extension().is_some_and(|extension| extension == "toml")));
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !directories.named => {}
            Err(error) => errors.push(FileError::whole(directory, format!("cannot be read: {error}"))),
        }
    }
    files.sort();
    files
}

/// Whether a call leaves no trace unless it is committed, as policy and manifest stand.
fn is_discardable(manifest: &ToolManifest, catalog: &Catalog) -> bool {
    let policy = catalog.policies.get(&manifest.program.policy);
    let layered = policy.is_some_and(|policy| policy.workspace != WorkspaceMode::Direct);
    layered && manifest.program.hosts.is_empty() && manifest.execution.effects != Effects::StatefulAction
}

/// A verification passes by what its result says, and that must be in the conversation's events.
fn spilling_verification(agent: &Agent, file: &Path, catalog: &Catalog) -> Option<FileError> {
    let tool = |name: &str| catalog.tools.get(name).map(|tool| &tool.manifest);
    let with_fallback = |name: &String| {
        let fallback = tool(name).and_then(|manifest| manifest.retry.fallback.clone());
        [Some(name.clone()), fallback].into_iter().flatten().collect::<Vec<_>>()
    };
    let mut verifying = agent.completion.verification.iter().flat_map(with_fallback);
    let spilling = verifying.find(|name| tool(name).is_some_and(|manifest| manifest.spill.is_some()))?;
    let reason = format!(
        "completion.require_verification looks at the results of `{spilling}`, which spills them: take `spill` out of its [limits]"
    );
    Some(FileError::whole(file, reason))
}

/// A budget in dollars means nothing for a model without a price.
fn unpriced(agent: &Agent, file: &Path, config: &Config) -> Option<FileError> {
    agent.budget.max_cost_usd?;
    let has_price = |name: &str| config.models.get(name).is_some_and(|model| model.price.is_some());
    let without = agent.models.iter().map(crate::model::settings::ModelSettings::name).find(|name| !has_price(name))?;
    let reason = format!("budget.max_cost_usd is set, but [model.{without}.price] in agentd.toml is not");
    Some(FileError::whole(file, reason))
}

/// The first name in an agent's list that the catalogue does not have.
fn unknown_name<T>(file: &Path, what: &str, names: &[String], known: &BTreeMap<String, T>) -> Option<FileError> {
    let name = names.iter().find(|name| !known.contains_key(*name))?;
    let hint = alternatives(name, known.keys().map(String::as_str));
    let line = std::fs::read_to_string(file).ok().and_then(|text| line_of_key(&text, "", &format!("{what}s")));
    Some(FileError { file: file.to_owned(), line, reason: format!("there is no {what} `{name}`{hint}") })
}
