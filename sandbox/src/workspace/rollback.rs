//! Going back to an earlier state of a workspace, or forth again, over the layers of the commits that made it.
//!
//! ```text
//! layers   1 applied   2 applied   3 applied   4 undone   5 undone
//!                          │           ▲ now
//!   to 2:  3 is taken back ┘
//!   to 4:  4 is applied again
//! ```
//!
//! Each applied layer holds what gave way to it, so going back costs what was changed since, not what exists. Layers that are
//! taken back stay as *undone* until the next commit, so that going back can itself be undone.
//!
//! [`foresee`] computes what a rollback would make of the workspace without touching it: its digest and its list of changes
//! are in a receipt before anything is moved. [`carry_out`] can be repeated after a crash at any instant.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use toolproto::receipt::{Change, EntryKind, EntryState, escape_path};

use super::apply::ApplyError;
use super::changes::{Changes, compare};
use super::commit::{CallStaging, CommitError, Prepared};
use super::journal::Journal;
use super::protect::unescaped;
use super::reach;
use super::staging::Standing;
use super::tree::{Node, Stamp, Tree};

/// A layer on the way, in the order in which it is carried out.
struct Step {
    number: u64,
    direction: Way,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Back,
    Forth,
}

/// What the layers between now and `to` would make of the workspace, whose tree is `now`.
///
/// # Errors
/// [`CommitError::Apply`] with a conflict when somebody else has changed what would be moved.
pub(crate) fn foresee(
    files: BorrowedFd<'_>,
    workspace: BorrowedFd<'_>,
    now: &Tree,
    to: u64,
) -> Result<Prepared, CommitError> {
    let mut edits = Edit::default();
    let mut touched: Vec<Vec<u8>> = Vec::new();
    for Step { number, direction } in way(files, to)? {
        let call = CallStaging::open(files, number)?;
        let journal = call.journal()?.ok_or(CommitError::NoSuchCommit)?;
        // What an earlier step of the way moves lies elsewhere by then.
        let is_first = |path: &[u8]| !touched.iter().any(|before| is_within(path, before) || is_within(before, path));
        match direction {
            Way::Back => call.is_due_backward(workspace, &journal, is_first)?,
            Way::Forth => call.is_due_forward(workspace, &journal, is_first)?,
        }
        for change in changes_of(&journal) {
            let path = unescaped(&change.path);
            let (from, then) = match direction {
                Way::Back => (&change.new, &change.old),
                Way::Forth => (&change.old, &change.new),
            };
            edits.add(&path, from.as_ref(), then.as_ref());
            touched.push(path);
        }
    }
    let root = edits.rebuild(Some(&now.root), &now.root.name, &mut Vec::new())?;
    let root = root.unwrap_or_else(|| now.root.clone());
    let tree = Tree::new(root);
    let (before, after, changes) = (now.digest(), tree.digest(), compare(now, &tree));
    Ok(Prepared { before, after, changes, tree })
}

/// Goes to `to`. When a layer cannot be moved, those that were are moved back, to `from`.
///
/// # Errors
/// See [`CommitError`].
pub(crate) fn carry_out(
    files: BorrowedFd<'_>,
    workspace: BorrowedFd<'_>,
    from: u64,
    to: u64,
) -> Result<(), CommitError> {
    // What was committed after the rollback was prepared is none of its business.
    let ceiling = from.max(to);
    match go(files, workspace, to, ceiling) {
        Err(first) if first.leaves_nothing() => match go(files, workspace, from, ceiling) {
            Ok(()) => Err(first),
            Err(CommitError::Apply(second)) => Err(CommitError::Stuck { first: Box::new(first), second }),
            // Whatever it is, it is not so that nothing has happened.
            Err(CommitError::Sync(error)) => Err(CommitError::Unsynced(error)),
            Err(other) => Err(other),
        },
        other => other,
    }
}

fn go(files: BorrowedFd<'_>, workspace: BorrowedFd<'_>, to: u64, ceiling: u64) -> Result<(), CommitError> {
    for Step { number, direction } in way(files, to)?.into_iter().filter(|step| step.number <= ceiling) {
        let call = CallStaging::open(files, number)?;
        match direction {
            Way::Back => call.undo(workspace)?,
            Way::Forth => call.redo(workspace)?,
        }
    }
    Ok(())
}

/// Layers that are in the way, in order. One that a crash left between counts for both directions.
fn way(files: BorrowedFd<'_>, to: u64) -> Result<Vec<Step>, CommitError> {
    let dir = rustix::fs::openat(files, ".", reach::DIRECTORY, rustix::fs::Mode::empty());
    let dir = dir.map_err(|errno| CommitError::Staging(errno.into()))?;
    let (mut back, mut forth) = (Vec::new(), Vec::new());
    for name in reach::names(dir).map_err(|errno| CommitError::Staging(errno.into()))? {
        let Some(number) = std::str::from_utf8(&name).ok().and_then(|name| name.parse::<u64>().ok()) else { continue };
        match Standing::of(files, number) {
            Standing::Applied | Standing::Prepared if number > to => back.push(number),
            Standing::Undone | Standing::Prepared if number <= to => forth.push(number),
            _ => {}
        }
    }
    back.sort_unstable_by(|a, b| b.cmp(a));
    forth.sort_unstable();
    let back = back.into_iter().map(|number| Step { number, direction: Way::Back });
    Ok(back.chain(forth.into_iter().map(|number| Step { number, direction: Way::Forth })).collect())
}

fn changes_of(journal: &Journal) -> impl Iterator<Item = &Change> {
    let Changes { created, modified, deleted } = &journal.changes;
    created.iter().chain(modified).chain(deleted)
}

fn is_within(path: &[u8], directory: &[u8]) -> bool {
    directory == b"." || path == directory || path.strip_prefix(directory).is_some_and(|rest| rest.starts_with(b"/"))
}

/// What becomes of an entry and of what lies in it.
#[derive(Debug, Default)]
struct Edit {
    /// The entry as it must be now and as it is afterwards; absent when only something in it changes.
    own: Option<(Option<EntryState>, Option<EntryState>)>,
    below: BTreeMap<Vec<u8>, Edit>,
}

impl Edit {
    fn add(&mut self, path: &[u8], from: Option<&EntryState>, then: Option<&EntryState>) {
        let mut place = self;
        for name in path.split(|byte| *byte == b'/').filter(|_| path != b".") {
            place = place.below.entry(name.to_vec()).or_default();
        }
        match &mut place.own {
            Some((_, last)) => *last = then.cloned(),
            own @ None => *own = Some((from.cloned(), then.cloned())),
        }
    }

    /// The entry afterwards; none if it is gone.
    fn rebuild(&self, now: Option<&Node>, name: &Arc<[u8]>, path: &mut Vec<u8>) -> Result<Option<Node>, CommitError> {
        let conflict = |path: &[u8]| CommitError::Apply(ApplyError::Conflict { path: escape_path(path) });
        let then = match &self.own {
            Some((from, then)) => {
                if now.map(Node::state) != *from {
                    return Err(conflict(path));
                }
                then.clone()
            }
            None => Some(now.ok_or_else(|| conflict(path))?.state()),
        };
        let mut entries = Vec::new();
        for entry in now.map_or(&[][..], Node::entries) {
            if !self.below.contains_key(&*entry.name) {
                entries.push(entry.clone());
            }
        }
        for (name, edit) in &self.below {
            let name: Arc<[u8]> = name.as_slice().into();
            let length = path.len();
            if length > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            entries.extend(edit.rebuild(now.and_then(|node| node.entry(&name)), &name, path)?);
            path.truncate(length);
        }
        let Some(state) = then else {
            // Somebody has put something into a directory that would go.
            return match entries.first() {
                None => Ok(None),
                Some(left) => Err(conflict(&left.name)),
            };
        };
        let stamp = now.map_or(Stamp::default(), |node| node.stamp);
        let mode = u16::from_str_radix(&state.mode, 8).unwrap_or_default();
        if state.kind == EntryKind::Directory {
            return Ok(Some(Node::directory(name.clone(), mode, stamp, entries)));
        }
        if let Some(left) = entries.first() {
            return Err(conflict(&left.name));
        }
        let content = state.digest.map_or([0; 32], |digest| *digest.as_bytes());
        // What it was read from lies elsewhere by then: it is read again.
        Ok(Some(Node::leaf(name.clone(), state.kind, mode, state.bytes.unwrap_or_default(), content, Stamp::default())))
    }
}
