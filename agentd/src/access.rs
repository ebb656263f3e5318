//! Who may use what: the rules of `[access]` and the administrators' group, looked up in the account database once.

use std::io;

use sandbox::config::{Config, Subject};
use sandbox::launcher::account::{AccessTable, Account};
use sandbox::launcher::peer::Peer;

use crate::caller::{Caller, Standing};

/// The rules with their names looked up.
#[derive(Debug)]
pub struct Gate {
    access: AccessTable,
    admin_group: Option<u32>,
}

impl Gate {
    /// Looks up everybody whom the configuration names.
    ///
    /// # Errors
    /// When the account database cannot be asked.
    pub fn look_up(config: &Config) -> io::Result<Self> {
        let admin_group = Account::look_up(config)?.admin_group;
        Ok(Self { access: AccessTable::look_up(&config.access)?, admin_group })
    }

    /// Who somebody with these numbers is here. The first group is the effective one.
    #[must_use]
    pub fn caller(&self, uid: u32, groups: Vec<u32>) -> Caller {
        let is_admin = uid == 0 || self.admin_group.is_some_and(|gid| groups.contains(&gid));
        Caller { uid, groups, standing: if is_admin { Standing::Admin } else { Standing::Member } }
    }

    /// Whether the caller may have it.
    #[must_use]
    pub fn permits(&self, caller: &Caller, subject: Subject<'_>) -> bool {
        // Nobody is in no group at all; should it be, then this number is nobody's group either.
        let gid = caller.groups.first().copied().unwrap_or(u32::MAX);
        let peer = Peer { uid: caller.uid, gid, groups: caller.groups.clone(), pidfd: None };
        self.access.permits(subject, &peer)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn gate(text: &str) -> Gate {
        Gate::look_up(&Config::parse(Path::new("/e/agentd.toml"), &format!("version = 1\n{text}")).unwrap()).unwrap()
    }

    #[test]
    fn admins_are_root_and_the_admin_group() {
        let gate = gate("[service]\nadmin_group = \"daemon\"\n");
        assert_eq!(gate.caller(0, vec![0]).standing, Standing::Admin);
        assert_eq!(gate.caller(1000, vec![1000, 1]).standing, Standing::Admin, "a supplementary group counts");
        assert_eq!(gate.caller(1000, vec![1000]).standing, Standing::Member);
    }

    #[test]
    fn rules_count_for_supplementary_groups_too() {
        let gate = gate("[access]\ntools = { stats = [\"group:bin\"] }\n");
        let may = |groups| gate.permits(&gate.caller(1000, groups), Subject::Tool("stats"));
        assert!(may(vec![1000, 2]));
        assert!(!may(vec![1000, 3]));
    }
}
