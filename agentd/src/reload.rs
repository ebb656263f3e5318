//! From files to what the dispatcher offers: at start, and again at SIGHUP. A reload is taken whole or not at all, by the
//! daemon and the launcher alike.
//!
//! ```text
//!   SIGHUP ─▶ launcher ─▶ daemon: everything reads and fits? ─▶ launcher: so it does for me? ─▶ both take it
//!                              └── no: the error is logged, ◀──────────┘ no
//!                                  and what was in force stays
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use sandbox::config::Subject;
use sandbox::trusted::Owners;

use crate::access::Gate;
use crate::caller::Caller;
use crate::dispatcher::offer::Catalogue;
use crate::dispatcher::{Dispatcher, Staffed};
use crate::installation::Installation;
use crate::launcher_link::LauncherLink;
use crate::model::connect::connect;
use crate::model::http::Timers;

/// Where what is offered comes from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The configuration directory.
    pub config_dir: PathBuf,
    /// Where models keep recordings.
    pub records: PathBuf,
}

impl Source {
    /// Reads and checks all files.
    ///
    /// # Errors
    /// With every file that is wrong.
    pub fn installation(&self) -> anyhow::Result<Installation> {
        Installation::load(&self.config_dir, Owners::RootOnly).map_err(|errors| {
            let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
            anyhow::anyhow!("the configuration is not valid:\n{}", lines.join("\n"))
        })
    }

    /// What an installation offers, to those whom `gate` lets have it.
    ///
    /// # Errors
    /// When a model cannot be connected or a policy has no JSON form.
    pub fn catalogue(&self, installation: Installation, gate: Arc<Gate>) -> anyhow::Result<Catalogue> {
        let (prices, policies) = (installation.prices(), installation.policies().context("the policies")?);
        let Installation { config, catalog: _, tools, agents } = installation;
        let timers = Timers::of_tier(config.timeouts.model);
        let mut staff = Vec::new();
        for agent in agents {
            let model = connect(&agent.models, timers, &self.records);
            let model = model.with_context(|| format!("the model of {}", agent.name))?;
            staff.push(Staffed { agent, model });
        }
        let permits = Box::new(move |caller: &Caller, subject: Subject<'_>| gate.permits(caller, subject));
        Ok(Catalogue { tools, agents: staff, policies, prices, permits })
    }
}

/// Takes the files as they are now, if they are right. Says in the log what came of it.
pub async fn reload(source: &Source, dispatcher: &Dispatcher<LauncherLink>) {
    match replace(source, dispatcher).await {
        Ok(taken) => tracing::info!(agents = taken.agents, tools = taken.tools, "configuration reloaded"),
        Err(error) => tracing::error!("not reloaded, what was in force stays: {error:#}"),
    }
}

struct Taken {
    agents: usize,
    tools: usize,
}

async fn replace(source: &Source, dispatcher: &Dispatcher<LauncherLink>) -> anyhow::Result<Taken> {
    let own = source.clone();
    let read = tokio::task::spawn_blocking(move || {
        let installation = own.installation()?;
        let gate = Arc::new(Gate::look_up(&installation.config).context("the accounts")?);
        own.catalogue(installation, gate)
    });
    let catalogue = read.await.context("reading the configuration")??;
    let taken = Taken { agents: catalogue.agents.len(), tools: catalogue.tools.iter().count() };
    // Asked last: when the launcher has taken the files, nothing can fail any more.
    if let Some(refused) = dispatcher.launch().reload().await.context("the launcher")? {
        anyhow::bail!("the launcher refuses the configuration: {refused}");
    }
    dispatcher.reload(catalogue);
    Ok(taken)
}

/// The directory of recordings within a state directory.
#[must_use]
pub fn records(state_dir: &Path) -> PathBuf {
    state_dir.join("ledger")
}
