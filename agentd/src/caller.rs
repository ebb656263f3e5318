//! Who asks: what the kernel says about the other end of a connection, and what that makes of it here.

/// What a caller may see beyond its own jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// A member of the service's group: its own jobs.
    Member,
    /// Root or a member of the administrators' group: everybody's jobs.
    Admin,
}

/// The other end of an API connection, as the kernel recorded it when the connection was made (unix(7), SO_PEERCRED).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Its effective user.
    pub uid: u32,
    /// Its effective group and its supplementary groups.
    pub groups: Vec<u32>,
    /// What it may see.
    pub standing: Standing,
}

impl Caller {
    /// Whether a job of `owner` may be seen and steered by this caller.
    #[must_use]
    pub fn may_see(&self, owner: u32) -> bool {
        self.standing == Standing::Admin || self.uid == owner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_see_their_own_and_admins_see_all() {
        let caller = |standing| Caller { uid: 1000, groups: vec![1000], standing };
        assert!(caller(Standing::Member).may_see(1000));
        assert!(!caller(Standing::Member).may_see(1001));
        assert!(caller(Standing::Admin).may_see(1001));
    }
}
