//! The accounts of the configuration, as numbers.

use std::collections::BTreeMap;

use nix::unistd::{Group, User};

use super::peer::Peer;
use crate::config::{Access, Config, Subject, Who};

/// The account that agentd runs as, and the groups that count for the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// agentd's uid.
    pub uid: u32,
    /// agentd's gid.
    pub gid: u32,
    /// The group that may use the socket.
    pub socket_group: u32,
    /// The group whose members see everybody's jobs.
    pub admin_group: Option<u32>,
}

impl Account {
    /// Looks the service account up. Where it does not exist, the configured number stands in for it, and only root may
    /// call.
    ///
    /// # Errors
    /// When the account database cannot be asked.
    pub fn look_up(config: &Config) -> nix::Result<Self> {
        let service = &config.service;
        let group = |name: &str| Group::from_name(name).map(|group| group.map(|group| group.gid.as_raw()));
        let user = User::from_name(&service.user)?;
        let socket_group = group(&service.group)?;
        let (uid, gid) = match user {
            Some(user) if !user.uid.is_root() => (user.uid.as_raw(), user.gid.as_raw()),
            other => {
                let why = if other.is_some() { "is root" } else { "does not exist" };
                tracing::warn!(
                    user = service.user,
                    uid = config.uids.service,
                    "the service account {why}; agentd runs under the number of [uids] service, and only root may call"
                );
                (config.uids.service, config.uids.service)
            }
        };
        Ok(Self { uid, gid, socket_group: socket_group.unwrap_or(gid), admin_group: group(&service.admin_group)? })
    }
}

/// The rules of `[access]` with their names looked up.
#[derive(Clone, Debug)]
pub struct AccessTable {
    access: Access,
    numbers: BTreeMap<Who, u32>,
}

impl AccessTable {
    /// Looks up everybody whom a rule names. A name that does not exist matches nobody, and is logged.
    ///
    /// # Errors
    /// When the account database cannot be asked.
    pub fn look_up(access: &Access) -> nix::Result<Self> {
        let mut numbers = BTreeMap::new();
        for who in access.named() {
            let number = match who {
                Who::User(name) => User::from_name(name)?.map(|user| user.uid.as_raw()),
                Who::Group(name) => Group::from_name(name)?.map(|group| group.gid.as_raw()),
                Who::Everybody | Who::Uid(_) | Who::Gid(_) => continue,
            };
            match number {
                Some(number) => {
                    numbers.insert(who.clone(), number);
                }
                None => tracing::info!(?who, "[access] names an account that does not exist"),
            }
        }
        Ok(Self { access: access.clone(), numbers })
    }

    /// Whether the caller may have it.
    #[must_use]
    pub fn permits(&self, subject: Subject<'_>, peer: &Peer) -> bool {
        self.access.permits(subject, peer.uid, |who| match who {
            Who::Everybody => true,
            Who::Uid(uid) => peer.uid == *uid,
            Who::Gid(gid) => peer.has_group(*gid),
            Who::User(_) => self.numbers.get(who).is_some_and(|uid| peer.uid == *uid),
            Who::Group(_) => self.numbers.get(who).is_some_and(|gid| peer.has_group(*gid)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(Path::new("/e/agentd.toml"), &format!("version = 1\n{text}")).unwrap()
    }

    fn peer(uid: u32, groups: &[u32]) -> Peer {
        Peer { uid, gid: uid, groups: groups.to_vec(), pidfd: None }
    }

    #[test]
    fn a_missing_account_becomes_the_configured_number() {
        let account =
            Account::look_up(&config("[service]\nuser = \"no-such-user\"\ngroup = \"no-such-group\"\n")).unwrap();
        assert_eq!((account.uid, account.gid, account.socket_group), (69_999, 69_999, 69_999));
        let account = Account::look_up(&config("[service]\nuser = \"daemon\"\ngroup = \"daemon\"\n")).unwrap();
        assert_eq!((account.uid, account.gid, account.socket_group), (1, 1, 1));
    }

    #[test]
    fn the_daemon_never_runs_as_root() {
        let account = Account::look_up(&config("[service]\nuser = \"root\"\n")).unwrap();
        assert_eq!(account.uid, 69_999);
    }

    #[test]
    fn names_count_by_their_numbers() {
        let access =
            config("[access]\ntools = { \"*\" = [\"user:daemon\", \"group:bin\", \"user:no-such-user\"] }\n").access;
        let table = AccessTable::look_up(&access).unwrap();
        let may = |peer: &Peer| table.permits(Subject::Tool("t"), peer);
        assert!(may(&peer(1, &[])), "the user daemon");
        assert!(may(&peer(1000, &[2])), "a member of bin");
        assert!(may(&peer(0, &[])));
        assert!(!may(&peer(1000, &[1])));
    }
}
