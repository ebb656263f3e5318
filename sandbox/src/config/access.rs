//! `[access]`: who may use which agent, tool and policy.
//!
//! Each of `agents`, `tools` and `policies` maps a name, or `*` for those not named, to a list of users and groups;
//! `adhoc` lists who may run ad-hoc commands at all. Root may do everything. Without the section, members of the service
//! group may use everything but ad-hoc commands, which are for root and the admin group.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use toolproto::source::FileError;

use super::Service;

/// A user or a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub enum Who {
    /// Everybody who reaches the socket.
    Everybody,
    /// A user by name.
    User(String),
    /// A user by uid.
    Uid(u32),
    /// The members of a group, by name.
    Group(String),
    /// The members of a group, by gid.
    Gid(u32),
}

/// The text names nobody.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` names nobody: write user:NAME, group:NAME or *")]
pub struct WhoError(String);

impl TryFrom<String> for Who {
    type Error = WhoError;

    fn try_from(text: String) -> Result<Self, WhoError> {
        if text == "*" {
            return Ok(Self::Everybody);
        }
        let refused = || WhoError(text.clone());
        let (kind, name) = text.split_once(':').ok_or_else(refused)?;
        if name.is_empty() {
            return Err(refused());
        }
        let number = name.bytes().all(|byte| byte.is_ascii_digit()).then(|| name.parse().map_err(|_| refused()));
        match (kind, number.transpose()?) {
            ("user", None) => Ok(Self::User(name.to_owned())),
            ("user", Some(uid)) => Ok(Self::Uid(uid)),
            ("group", None) => Ok(Self::Group(name.to_owned())),
            ("group", Some(gid)) => Ok(Self::Gid(gid)),
            _ => Err(refused()),
        }
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject<'a> {
    /// An agent.
    Agent(&'a str),
    /// A tool, called directly.
    Tool(&'a str),
    /// An ad-hoc command under a policy.
    Adhoc {
        /// The policy.
        policy: &'a str,
    },
}

/// Who may use what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    agents: Rules,
    tools: Rules,
    policies: Rules,
    adhoc: BTreeSet<Who>,
}

type Rules = BTreeMap<String, BTreeSet<Who>>;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AccessSection {
    agents: Option<Rules>,
    tools: Option<Rules>,
    policies: Option<Rules>,
    adhoc: Option<BTreeSet<Who>>,
}

impl AccessSection {
    pub(super) fn check(self, refuse: impl Fn(&str, String) -> FileError) -> Result<Access, FileError> {
        for (key, rules) in [("agents", &self.agents), ("tools", &self.tools), ("policies", &self.policies)] {
            let names = rules.iter().flat_map(BTreeMap::keys);
            if let Some(name) = names.into_iter().find(|name| *name != "*" && !toolproto::manifest::is_name(name)) {
                return Err(refuse(key, format!("`{name}` is neither a name nor *")));
            }
        }
        // What the section leaves out is for nobody but root: a rule is never wider than it is written.
        Ok(Access {
            agents: self.agents.unwrap_or_default(),
            tools: self.tools.unwrap_or_default(),
            policies: self.policies.unwrap_or_default(),
            adhoc: self.adhoc.unwrap_or_default(),
        })
    }
}

impl Access {
    pub(super) fn for_service(service: &Service) -> Self {
        let everything = || Rules::from([("*".to_owned(), BTreeSet::from([Who::Everybody]))]);
        Self {
            agents: everything(),
            tools: everything(),
            policies: everything(),
            adhoc: BTreeSet::from([Who::Group(service.admin_group.clone())]),
        }
    }

    /// Whether a caller may have it. `is` says whether a user or group is the caller; root is always allowed.
    pub fn permits(&self, subject: Subject<'_>, uid: u32, mut is: impl FnMut(&Who) -> bool) -> bool {
        let mut any = |who: &BTreeSet<Who>| who.iter().any(|who| *who == Who::Everybody || is(who));
        let mut any_of = |rules: &Rules, name: &str| rules.get(name).or_else(|| rules.get("*")).is_some_and(&mut any);
        uid == 0
            || match subject {
                Subject::Agent(name) => any_of(&self.agents, name),
                Subject::Tool(name) => any_of(&self.tools, name),
                Subject::Adhoc { policy } => any_of(&self.policies, policy) && any(&self.adhoc),
            }
    }

    /// Everybody whom a rule names, to be looked up once.
    pub fn named(&self) -> impl Iterator<Item = &Who> {
        [&self.agents, &self.tools, &self.policies].into_iter().flat_map(BTreeMap::values).flatten().chain(&self.adhoc)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn access(section: &str) -> Access {
        Config::parse(Path::new("/e/agentd.toml"), &format!("version = 1\n{section}")).unwrap().access
    }

    #[test]
    fn without_the_section_adhoc_is_for_root_and_admins() {
        let access = access("");
        let admin = |who: &Who| *who == Who::Group("agentd-admin".to_owned());
        let nobody = |_: &Who| false;
        assert!(access.permits(Subject::Agent("a"), 1000, nobody));
        assert!(access.permits(Subject::Tool("t"), 1000, nobody));
        assert!(!access.permits(Subject::Adhoc { policy: "strict" }, 1000, nobody));
        assert!(access.permits(Subject::Adhoc { policy: "strict" }, 1000, admin));
        assert!(access.permits(Subject::Adhoc { policy: "strict" }, 0, nobody));
    }

    #[test]
    fn a_named_rule_replaces_the_one_for_all() {
        let access = access("[access]\nagents = { \"*\" = [\"*\"], payroll = [\"user:alice\"] }\n");
        let alice = |who: &Who| *who == Who::User("alice".to_owned());
        let bob = |who: &Who| *who == Who::User("bob".to_owned());
        assert!(access.permits(Subject::Agent("report"), 1000, bob));
        assert!(access.permits(Subject::Agent("payroll"), 1000, alice));
        assert!(!access.permits(Subject::Agent("payroll"), 1000, bob));
        assert!(access.permits(Subject::Agent("payroll"), 0, bob), "root");
        assert!(!access.permits(Subject::Tool("t"), 1000, alice), "what is left out is for nobody");
    }

    #[test]
    fn adhoc_needs_the_policy_too() {
        let access = access("[access]\nadhoc = [\"group:100\"]\npolicies = { strict = [\"*\"] }\n");
        let member = |who: &Who| *who == Who::Gid(100);
        assert!(access.permits(Subject::Adhoc { policy: "strict" }, 1000, member));
        assert!(!access.permits(Subject::Adhoc { policy: "build" }, 1000, member));
        assert!(!access.permits(Subject::Adhoc { policy: "strict" }, 1000, |_| false));
    }
}
