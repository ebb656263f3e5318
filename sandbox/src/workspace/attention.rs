//! What is examined before a call, and how thoroughly: everything at first and now and then, in between what a watch tells of.
//!
//! ```text
//!           ┌── first, doubt, direct call, every 100 examinations or 5 minutes ──▶ everything, each directory watched
//! examine ──┤
//!           └── else ──▶ what has events, what is restless (see `tree`); the rest is taken over
//! ```

use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use super::scan::{Again, TreeError, TreeLimits, examine_again, rescan_watched};
use super::tree::{Node, Tree};
use super::watch::{Watcher, Watches};

/// How many examinations may follow one of everything.
const MOST_EXAMINATIONS: u32 = 100;
/// How long they may.
const MOST_TIME: Duration = Duration::from_secs(300);
/// How many restless entries are examined one by one, whatever their share.
const MOST_RESTLESS: usize = 1024;

/// How thoroughly a tree is examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Care {
    /// Everything.
    Whole,
    /// What may have changed, if that is known.
    Changes,
}

/// A worker's attention to its workspace.
#[derive(Debug)]
pub(crate) struct Attention {
    /// None where nothing can be watched.
    watches: Option<Watches>,
    /// When everything was examined, and how often less since; none while there is doubt.
    whole: Option<(Instant, u32)>,
}

impl Attention {
    /// Before the worker is confined.
    pub(crate) fn to(dir: BorrowedFd<'_>) -> Self {
        Self { watches: Watcher::start(dir).map(Watches::new), whole: None }
    }

    /// Everything is examined next time.
    pub(crate) const fn doubt(&mut self) {
        self.whole = None;
    }

    /// The tree as it is now. `known` is the tree as it was examined last, with what agentd has done to it since.
    ///
    /// # Errors
    /// See [`TreeError`].
    pub(crate) fn examine(
        &mut self,
        dir: BorrowedFd<'_>,
        limits: &TreeLimits,
        known: Option<&Tree>,
        care: Care,
    ) -> Result<Tree, TreeError> {
        if care == Care::Changes
            && let Some(known) = known
            && let Some(tree) = self.again(dir, limits, known)
        {
            return Ok(tree);
        }
        self.whole = None;
        let Some(watches) = &mut self.watches else { return rescan_watched(dir, limits, known, None) };
        watches.forget_events();
        let begun = Instant::now();
        let tree = rescan_watched(dir, limits, known, Some(watches.watcher()))?;
        if watches.watcher().has_given_up() {
            // With its watches, which others may need.
            self.watches = None;
        } else {
            watches.are_of(&tree.root);
            self.whole = (!has_hidden_links(&tree.root)).then_some((begun, 0));
        }
        Ok(tree)
    }

    /// Examines only what may have changed; none if it is not known what that is.
    fn again(&mut self, dir: BorrowedFd<'_>, limits: &TreeLimits, known: &Tree) -> Option<Tree> {
        let (since, count) = self.whole.as_mut()?;
        if *count >= MOST_EXAMINATIONS || since.elapsed() >= MOST_TIME {
            return None;
        }
        *count += 1;
        // Several threads read everything; this is done by one.
        let restless = known.root.restless();
        if restless > MOST_RESTLESS && restless > known.len() / 4 {
            return None;
        }
        let watches = self.watches.as_mut()?;
        let marks = watches.marks(&known.root)?;
        let Again { tree, fresh } = examine_again(dir, limits, known, &marks, watches.watcher()).ok()?;
        if watches.watcher().has_given_up() {
            return None;
        }
        for (path, node) in fresh {
            watches.add(path, &node);
        }
        Some(tree)
    }
}

/// Whether something was read before it got the other name under which it was read as well: then it does not look like what
/// must always be looked at.
fn has_hidden_links(root: &Node) -> bool {
    let linked: HashSet<_> = root.all().filter(|node| node.is_linked()).map(|node| node.stamp.inode).collect();
    !linked.is_empty()
        && root.all().any(|node| !node.is_directory() && !node.is_linked() && linked.contains(&node.stamp.inode))
}

#[cfg(test)]
mod tests;
