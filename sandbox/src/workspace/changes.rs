//! What differs between two trees of one workspace.

use serde::{Deserialize, Serialize};
use toolproto::receipt::{Change, escape_path};

use super::tree::{Node, Tree};

/// The entries that differ, parents before what lies in them and siblings in the order of their raw names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Exist after and not before.
    pub created: Vec<Change>,
    /// Exist in both, with another type, mode, content or target.
    pub modified: Vec<Change>,
    /// Exist before and not after.
    pub deleted: Vec<Change>,
}

impl Changes {
    /// Whether the trees are the same.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.created.is_empty() && self.modified.is_empty() && self.deleted.is_empty()
    }

    fn push(&mut self, path: &[u8], before: Option<&Node>, after: Option<&Node>) {
        let old = before.map(Node::state);
        let new = after.map(Node::state);
        let list = match (&old, &new) {
            (None, _) => &mut self.created,
            (_, None) => &mut self.deleted,
            _ => &mut self.modified,
        };
        let path = if path.is_empty() { ".".to_owned() } else { escape_path(path) };
        list.push(Change { path, old, new });
    }
}

/// Compares two trees; what both share costs nothing. The root itself, when its mode differs, is the path `.`. An entry of
/// another type than before counts as modified, and what lay in it or lies in it now as deleted or created.
#[must_use]
pub fn compare(before: &Tree, after: &Tree) -> Changes {
    let mut changes = Changes::default();
    let mut path = Vec::new();
    let mut pending = vec![Pair { before: Some(&before.root), after: Some(&after.root), parent_length: 0 }];
    while let Some(Pair { before, after, parent_length }) = pending.pop() {
        path.truncate(parent_length);
        let Some(name) = after.or(before).map(|node| &node.name) else { continue };
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        let both = before.zip(after);
        if !both.is_some_and(|(old, new)| old.is_same_entry(new)) {
            changes.push(&path, before, after);
        }
        if !both.is_some_and(|(old, new)| old.kind == new.kind && old.content == new.content) {
            let first = pending.len();
            let old = before.map_or(&[][..], Node::entries);
            let new = after.map_or(&[][..], Node::entries);
            pending.extend(pair_up(old, new).map(|(before, after)| Pair { before, after, parent_length: path.len() }));
            pending[first..].reverse();
        }
    }
    changes
}

/// An entry in one tree or both, with the length of its directory's path.
struct Pair<'a> {
    before: Option<&'a Node>,
    after: Option<&'a Node>,
    parent_length: usize,
}

/// Merges two sorted lists of entries by name.
pub(crate) fn pair_up<'a>(
    mut old: &'a [Node],
    mut new: &'a [Node],
) -> impl Iterator<Item = (Option<&'a Node>, Option<&'a Node>)> {
    std::iter::from_fn(move || {
        let order = match (old.first(), new.first()) {
            (None, None) => return None,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(a), Some(b)) => a.name.cmp(&b.name),
        };
        let before = if order.is_le() { old.split_off_first() } else { None };
        let after = if order.is_ge() { new.split_off_first() } else { None };
        Some((before, after))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
    use std::path::Path;

    use proptest::prelude::*;
    use toolproto::receipt::EntryKind;

    use super::*;
    use crate::workspace::scan::{TreeLimits, scan};

    #[derive(Clone, Debug)]
    enum Edit {
        Write(usize, u8),
        Directory(usize),
        Link(usize, u8),
        Remove(usize),
        Mode(usize, u32),
        Rename(usize, usize),
        HardLink(usize, usize),
    }

    const PATHS: [&str; 12] = ["a", "b", "d", "d/a", "d/b", "d/d", "d/d/a", "d/d/b", "d-", "d.x", "e", "e/d"];

    fn edit() -> impl Strategy<Value = Edit> {
        let path = 0..PATHS.len();
        prop_oneof![
            (path.clone(), 0..3u8).prop_map(|(path, content)| Edit::Write(path, content)),
            path.clone().prop_map(Edit::Directory),
            (path.clone(), 0..3u8).prop_map(|(path, target)| Edit::Link(path, target)),
            path.clone().prop_map(Edit::Remove),
            (path.clone(), prop_oneof![Just(0o600), Just(0o644), Just(0o755), Just(0o700)])
                .prop_map(|(path, mode)| Edit::Mode(path, mode)),
            (path.clone(), path.clone()).prop_map(|(from, to)| Edit::Rename(from, to)),
            (path.clone(), path).prop_map(|(from, to)| Edit::HardLink(from, to)),
        ]
    }

    /// Edits that cannot be done (no such directory, not empty) leave the tree as it is.
    fn apply(dir: &Path, edit: &Edit) {
        let at = |index: &usize| dir.join(PATHS[*index]);
        let _ = match edit {
            Edit::Write(path, content) => fs::write(at(path), [*content]),
            Edit::Directory(path) => fs::create_dir(at(path)),
            Edit::Link(path, target) => symlink([*target + b'a'].escape_ascii().to_string(), at(path)),
            Edit::Remove(path) => fs::remove_file(at(path)).or_else(|_| fs::remove_dir_all(at(path))),
            Edit::Mode(path, mode) => match fs::symlink_metadata(at(path)) {
                Ok(metadata) if !metadata.is_symlink() => {
                    fs::set_permissions(at(path), fs::Permissions::from_mode(*mode))
                }
                _ => Ok(()),
            },
            Edit::Rename(from, to) => fs::rename(at(from), at(to)),
            Edit::HardLink(from, to) => fs::hard_link(at(from), at(to)),
        };
    }

    type Listing = BTreeMap<Vec<String>, (EntryKind, u32, Vec<u8>)>;

    /// What a reader without any cleverness sees, by path in components.
    fn list(dir: &Path, prefix: &[String], listing: &mut Listing) {
        for entry in fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let metadata = fs::symlink_metadata(entry.path()).unwrap();
            let mut path = prefix.to_vec();
            path.push(entry.file_name().into_string().unwrap());
            let (kind, content) = if metadata.is_dir() {
                list(&entry.path(), &path, listing);
                (EntryKind::Directory, Vec::new())
            } else if metadata.is_symlink() {
                let target = fs::read_link(entry.path()).unwrap();
                (EntryKind::Symlink, target.into_os_string().into_encoded_bytes())
            } else {
                (EntryKind::File, fs::read(entry.path()).unwrap())
            };
            listing.insert(path, (kind, metadata.mode() & 0o7777, content));
        }
    }

    fn paths(changes: &[Change]) -> Vec<&str> {
        changes.iter().map(|change| change.path.as_str()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn random_edits_are_found_exactly(
            first in prop::collection::vec(edit(), 0..20),
            second in prop::collection::vec(edit(), 0..10),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let read = || {
                let tree = scan(File::open(dir.path()).unwrap().as_fd(), &TreeLimits::default()).unwrap();
                let mut listing = Listing::new();
                list(dir.path(), &[], &mut listing);
                (tree, listing)
            };
            first.iter().for_each(|edit| apply(dir.path(), edit));
            let (before, old) = read();
            second.iter().for_each(|edit| apply(dir.path(), edit));
            let (after, new) = read();

            let changes = compare(&before, &after);
            let joined = |wanted: &dyn Fn(&Vec<String>) -> bool, listing: &Listing| -> Vec<String> {
                listing.keys().filter(|path| wanted(path)).map(|path| path.join("/")).collect()
            };
            prop_assert_eq!(paths(&changes.created), joined(&|path| !old.contains_key(path), &new));
            prop_assert_eq!(paths(&changes.deleted), joined(&|path| !new.contains_key(path), &old));
            prop_assert_eq!(
                paths(&changes.modified),
                joined(&|path| old.get(path).is_some_and(|before| new[path] != *before), &new)
            );
            prop_assert_eq!(before.digest() == after.digest(), old == new);
            prop_assert_eq!(changes.is_empty(), old == new);
            for change in changes.created.iter().chain(&changes.modified) {
                let path: Vec<String> = change.path.split('/').map(str::to_owned).collect();
                let (kind, mode, content) = &new[&path];
                let state = change.new.as_ref().unwrap();
                prop_assert_eq!(state.kind, *kind);
                prop_assert_eq!(&state.mode, &format!("{mode:04o}"));
                let digest = (*kind != EntryKind::Directory).then(|| toolproto::digest::Digest::blake3(content));
                prop_assert_eq!(state.digest, digest);
            }
        }
    }

    #[test]
    fn the_directory_itself_is_a_dot() {
        let dir = tempfile::tempdir().unwrap();
        let read = || scan(File::open(dir.path()).unwrap().as_fd(), &TreeLimits::default()).unwrap();
        let before = read();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let changes = compare(&before, &read());
        assert_eq!(paths(&changes.modified), ["."]);
        assert_eq!(changes.modified[0].new.as_ref().unwrap().mode, "0711");
    }
}
