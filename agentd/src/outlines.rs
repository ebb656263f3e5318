//! What the plans of calls say about paths, for those that did not end well.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sandbox::catalog::Catalog;
use sandbox::outline::Outline;
use toolproto::manifest::{Effects, ToolManifest};

/// What decides, by the names of policies and runtimes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outlines {
    policies: BTreeMap<String, Outline>,
    mounts: BTreeMap<String, Vec<PathBuf>>,
}

/// What lets a tool that declares `read_only` write to the workspace.
const DECLARED: &str = "[execution] read_only = false in tool.toml";

impl Outlines {
    /// Of all policies and runtimes of a catalogue.
    #[must_use]
    pub fn of(catalog: &Catalog) -> Self {
        let policies = catalog.policies.iter().map(|(name, policy)| (name.clone(), Outline::of(policy)));
        let runtimes = catalog.runtimes.iter().filter_map(|(name, runtime)| Some((name, runtime.as_ref().ok()?)));
        let mounts = runtimes.map(|(name, runtime)| (name.clone(), runtime.mounts.clone()));
        Self { policies: policies.collect(), mounts: mounts.collect() }
    }

    /// Of a tool's calls.
    #[must_use]
    pub fn of_tool(&self, manifest: &ToolManifest) -> Option<Outline> {
        let outline = self.under(&manifest.program.policy, Some(&manifest.program.runtime))?;
        let reads_only = manifest.execution.effects == Effects::ReadOnly;
        Some(if reads_only { outline.reading_unless(DECLARED) } else { outline })
    }

    /// Of a command.
    #[must_use]
    pub fn under(&self, policy: &str, runtime: Option<&str>) -> Option<Outline> {
        let outline = self.policies.get(policy)?.clone();
        let mounts = runtime.and_then(|name| self.mounts.get(name));
        Some(mounts.into_iter().fold(outline, |outline, mounts| outline.with_mounts(mounts)))
    }
}
