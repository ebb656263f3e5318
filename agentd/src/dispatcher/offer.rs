//! What agentd offers: agents, tools, policies, prices, and who may use them. A reload replaces all of it at once; a job that
//! runs keeps what it began with.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use toolproto::api::PolicyView;

use super::{Permits, Staffed};
use crate::agent::{Agent, Price};
use crate::guards::Guards;
use crate::model::Model;
use crate::observe::Observer;
use crate::tools::Tools;

/// What a configuration offers, before it is in force.
pub struct Catalogue {
    /// The tools.
    pub tools: Tools,
    /// The agents.
    pub agents: Vec<Staffed>,
    /// The policies, as the API shows them.
    pub policies: Vec<PolicyView>,
    /// What models cost, by name.
    pub prices: HashMap<String, Price>,
    /// Who may use what.
    pub permits: Box<Permits>,
}

/// What is in force.
pub struct Offer {
    /// The tools.
    pub tools: Tools,
    /// What stands between calls and their tools.
    pub guards: Guards,
    /// What models cost, by name.
    pub prices: HashMap<String, Price>,
    pub(super) agents: BTreeMap<String, (Arc<Agent>, Arc<dyn Model>)>,
    pub(super) policies: Vec<PolicyView>,
    pub(super) permits: Box<Permits>,
}

impl Offer {
    /// What is offered at start. The observer is told when a breaker changes.
    pub(super) fn first(catalogue: Catalogue, observer: Observer) -> Self {
        let guards = Guards::new(&catalogue.tools, observer);
        Self::guarded(catalogue, guards)
    }

    /// What is offered after a reload. Each tool's breaker and places are kept.
    pub(super) fn followed_by(&self, catalogue: Catalogue) -> Self {
        let guards = self.guards.renewed(&catalogue.tools);
        Self::guarded(catalogue, guards)
    }

    fn guarded(catalogue: Catalogue, guards: Guards) -> Self {
        let Catalogue { tools, agents, policies, prices, permits } = catalogue;
        let agents = agents.into_iter().map(|Staffed { mut agent, model }| {
            agent.price = dearest(agent.models.iter().filter_map(|one| prices.get(one.name())));
            (agent.name.clone(), (Arc::new(agent), model))
        });
        let agents = agents.collect();
        Self { tools, guards, prices, agents, policies, permits }
    }
}

fn dearest<'a>(prices: impl Iterator<Item = &'a Price>) -> Option<Price> {
    prices.copied().reduce(|a, b| Price {
        input: a.input.max(b.input),
        cached_input: a.cached_input.max(b.cached_input),
        output: a.output.max(b.output),
    })
}
