//! Names that no call may create or change: a veto over what differs between two trees.
//!
//! The veto looks at the trees before and after, not at what the call did. So it does not matter by which detour an entry
//! got its name: written in place, renamed with a directory above it, linked, or deleted and made again as something else.
//!
//! A rule counts at any depth: `.git/hooks` holds for `.git/hooks` at the top and in every directory, and for all that lies
//! in it. What a symbolic link of that name leads to within the workspace is protected as well.

use std::path::{Component, Path};

use toolproto::receipt::{Change, EntryKind};

use super::changes::Changes;
use super::tree::{Node, Tree};
use crate::policy::ProtectRule;

/// A change that a rule forbids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Veto {
    /// The entry, escaped.
    pub(crate) path: String,
    /// The rule's name.
    pub(crate) rule: String,
    /// The rule's reason.
    pub(crate) why: String,
}

/// The first change that a rule forbids. `read_link` yields the target of a symbolic link of the tree before.
pub(crate) fn veto(
    rules: &[ProtectRule],
    before: &Tree,
    changes: &Changes,
    mut read_link: impl FnMut(&[u8]) -> Option<Vec<u8>>,
) -> Option<Veto> {
    if rules.is_empty() || changes.is_empty() {
        return None;
    }
    let elsewhere = led_elsewhere(rules, before, &mut read_link);
    let lists = [&changes.created, &changes.modified, &changes.deleted];
    lists.into_iter().flatten().find_map(|change| {
        let path = unescaped(&change.path);
        let parts: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let by_name = rules.iter().find(|rule| forbids(rule, before, &parts, change));
        let by_link = || elsewhere.iter().find(|(place, _)| parts.starts_with(&split(place))).map(|(_, rule)| *rule);
        let rule = by_name.or_else(by_link)?;
        Some(Veto { path: change.path.clone(), rule: rule.name.clone(), why: rule.why.clone() })
    })
}

fn split(path: &[Vec<u8>]) -> Vec<&[u8]> {
    path.iter().map(Vec::as_slice).collect()
}

fn names_of(rule: &ProtectRule) -> Vec<&[u8]> {
    rule.name.split('/').filter(|name| !name.is_empty()).map(str::as_bytes).collect()
}

fn forbids(rule: &ProtectRule, before: &Tree, parts: &[&[u8]], change: &Change) -> bool {
    let names = names_of(rule);
    let places = parts.windows(names.len()).enumerate().filter(|(_, window)| *window == names).map(|(place, _)| place);
    places.into_iter().any(|place| {
        let is_itself = place + names.len() == parts.len();
        if rule.unless_directory {
            let kind = change.new.as_ref().or(change.old.as_ref()).map(|state| state.kind);
            return is_itself && kind != Some(EntryKind::Directory);
        }
        // What holds the protected name, such as a repository, was made by the call itself.
        let is_fresh = find(before, &parts[..=place]).is_none();
        !(is_fresh && is_allowed_when_new(rule, parts.last().copied().unwrap_or_default(), change))
    })
}

fn is_allowed_when_new(rule: &ProtectRule, name: &[u8], change: &Change) -> bool {
    if rule.allow_new.is_empty() {
        return false;
    }
    match change.new.as_ref().map(|state| state.kind) {
        Some(EntryKind::Directory) => true,
        Some(EntryKind::File) => rule.allow_new.iter().any(|pattern| match pattern.strip_prefix('*') {
            Some(end) => name.ends_with(end.as_bytes()),
            None => name == pattern.as_bytes(),
        }),
        _ => false,
    }
}

fn find<'a>(tree: &'a Tree, parts: &[&[u8]]) -> Option<&'a Node> {
    parts.iter().try_fold(&tree.root, |node, part| node.entry(part))
}

/// Places in the workspace that a symbolic link with a protected name, or on the way to one, leads to.
fn led_elsewhere<'a>(
    rules: &'a [ProtectRule],
    before: &Tree,
    read_link: &mut impl FnMut(&[u8]) -> Option<Vec<u8>>,
) -> Vec<(Vec<Vec<u8>>, &'a ProtectRule)> {
    let mut found = Vec::new();
    let mut pending: Vec<(Vec<Vec<u8>>, &Node)> = vec![(Vec::new(), &before.root)];
    while let Some((path, directory)) = pending.pop() {
        for entry in directory.entries() {
            if !matches!(entry.kind, EntryKind::Directory | EntryKind::Symlink) {
                continue;
            }
            let mut path = path.clone();
            path.push(entry.name.to_vec());
            if entry.is_directory() {
                pending.push((path, entry));
                continue;
            }
            for rule in rules.iter().filter(|rule| !rule.unless_directory) {
                let names = names_of(rule);
                // How many of the rule's names the link's path ends with.
                let reached = (1..=names.len()).find(|count| ends_with(&path, &names[..*count]));
                let Some(count) = reached else { continue };
                let Some(target) = read_link(&path.join(&b'/')) else { continue };
                if let Some(mut place) = resolved(&path[..path.len() - 1], &target) {
                    place.extend(names[count..].iter().map(|name| name.to_vec()));
                    found.push((place, rule));
                }
            }
        }
    }
    found
}

fn ends_with(path: &[Vec<u8>], names: &[&[u8]]) -> bool {
    path.len() >= names.len() && path[path.len() - names.len()..].iter().map(Vec::as_slice).eq(names.iter().copied())
}

/// Where a relative link leads within the workspace; none if it leads out of it.
fn resolved(directory: &[Vec<u8>], target: &[u8]) -> Option<Vec<Vec<u8>>> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut place = directory.to_vec();
    for part in Path::new(std::ffi::OsStr::from_bytes(target)).components() {
        match part {
            Component::Normal(name) => place.push(name.as_bytes().to_vec()),
            Component::ParentDir => drop(place.pop()?),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    (!place.is_empty()).then_some(place)
}

/// The raw bytes of an escaped path.
pub(crate) fn unescaped(path: &str) -> Vec<u8> {
    let mut raw = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escape = after.strip_prefix(b"x").and_then(|digits| digits.get(..2));
        let byte = escape
            .filter(|_| *first == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        match byte {
            Some(byte) => {
                raw.push(byte);
                rest = &after[3..];
            }
            None => {
                raw.push(*first);
                rest = after;
            }
        }
    }
    raw
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsFd as _;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use toolproto::receipt::escape_path;

    use super::*;
    use crate::workspace::changes::compare;
    use crate::workspace::scan::{TreeLimits, scan};

    fn rules() -> Vec<ProtectRule> {
        let rule = |name: &str, allow_new: &[&str], unless_directory: bool| ProtectRule {
            name: name.to_owned(),
            why: "a test".to_owned(),
            allow_new: allow_new.iter().map(|name| (*name).to_owned()).collect(),
            unless_directory,
        };
        vec![
            rule(".git/hooks", &["*.sample"], false),
            rule(".git/config", &["config"], false),
            rule(".git", &[], true),
            rule(".bashrc", &[], false),
        ]
    }

    /// The path and the rule of the veto over an edit of a directory with a repository, a start-up file and links.
    fn edited(edit: impl FnOnce(&Path)) -> Option<(String, String)> {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        fs::create_dir_all(top.join("sub/.git/hooks")).unwrap();
        fs::write(top.join("sub/.git/config"), "[core]").unwrap();
        fs::write(top.join(".bashrc"), "").unwrap();
        fs::create_dir_all(top.join("dotfiles")).unwrap();
        fs::write(top.join("dotfiles/real"), "").unwrap();
        fs::create_dir_all(top.join("linked/store/hooks")).unwrap();
        symlink("store", top.join("linked/.git")).unwrap();
        fs::create_dir(top.join("home")).unwrap();
        symlink("../dotfiles/real", top.join("home/.bashrc")).unwrap();
        let tree = || scan(File::open(top).unwrap().as_fd(), &TreeLimits::default()).unwrap();
        let before = tree();
        let links = [("linked/.git", "store"), ("home/.bashrc", "../dotfiles/real")];
        edit(top);
        let link = |path: &[u8]| Some(links.iter().find(|(name, _)| name.as_bytes() == path)?.1.as_bytes().to_vec());
        veto(&rules(), &before, &compare(&before, &tree()), link).map(|veto| (veto.path, veto.rule))
    }

    fn is(path: &str, rule: &str) -> Option<(String, String)> {
        Some((path.to_owned(), rule.to_owned()))
    }

    #[test]
    fn no_detour_leads_to_a_protected_name() {
        let hook = ".git/hooks";
        assert_eq!(edited(|top| fs::write(top.join("sub/.git/hooks/x"), "").unwrap()), is("sub/.git/hooks/x", hook));
        assert_eq!(
            edited(|top| fs::write(top.join("sub/.git/config"), "x").unwrap()),
            is("sub/.git/config", ".git/config")
        );
        assert_eq!(edited(|top| fs::remove_file(top.join(".bashrc")).unwrap()), is(".bashrc", ".bashrc"));
        // A directory above is renamed, the entry changed, the directory renamed back.
        let renamed = edited(|top| {
            fs::rename(top.join("sub"), top.join("elsewhere")).unwrap();
            fs::write(top.join("elsewhere/.git/hooks/x"), "").unwrap();
            fs::rename(top.join("elsewhere"), top.join("sub")).unwrap();
        });
        assert_eq!(renamed, is("sub/.git/hooks/x", hook));
        // A file becomes a directory of the name, a directory a link.
        let replaced = edited(|top| {
            fs::remove_file(top.join(".bashrc")).unwrap();
            fs::create_dir(top.join(".bashrc")).unwrap();
        });
        assert_eq!(replaced, is(".bashrc", ".bashrc"));
        let linked = edited(|top| {
            fs::remove_dir(top.join("sub/.git/hooks")).unwrap();
            symlink("../..", top.join("sub/.git/hooks")).unwrap();
        });
        assert_eq!(linked, is("sub/.git/hooks", hook));
        // Something harmless gets the name by a rename or a hard link.
        let made = edited(|top| {
            fs::write(top.join("harmless"), "").unwrap();
            fs::hard_link(top.join("harmless"), top.join("dotfiles/.bashrc")).unwrap();
        });
        assert_eq!(made, is("dotfiles/.bashrc", ".bashrc"));
        // What a link of that name leads to.
        assert_eq!(edited(|top| fs::write(top.join("dotfiles/real"), "x").unwrap()), is("dotfiles/real", ".bashrc"));
        let store = edited(|top| fs::write(top.join("linked/store/hooks/x"), "x").unwrap());
        assert_eq!(store, is("linked/store/hooks/x", hook));
        // Git is led to another directory.
        let led = edited(|top| {
            fs::create_dir(top.join("new")).unwrap();
            fs::write(top.join("new/.git"), "gitdir: ../other").unwrap();
        });
        assert_eq!(led, is("new/.git", ".git"));
    }

    #[test]
    fn what_has_another_name_is_free_and_a_new_repository_has_its_own_configuration() {
        let free = edited(|top| {
            fs::write(top.join("hooks"), "").unwrap();
            fs::write(top.join(".bashrc.old"), "").unwrap();
            fs::write(top.join("sub/.git/HEAD"), "").unwrap();
            fs::create_dir_all(top.join("new/.git/hooks")).unwrap();
            fs::write(top.join("new/.git/config"), "").unwrap();
            fs::write(top.join("new/.git/hooks/pre-commit.sample"), "").unwrap();
        });
        assert_eq!(free, None);
        let hook = edited(|top| {
            fs::create_dir_all(top.join("new/.git/hooks")).unwrap();
            fs::write(top.join("new/.git/hooks/pre-commit"), "").unwrap();
        });
        assert_eq!(hook, is("new/.git/hooks/pre-commit", ".git/hooks"));
        // A repository is not new because its name is not plain.
        let odd = std::ffi::OsStr::from_bytes(b"o\\d\xff\n");
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join(odd).join(".git")).unwrap();
        let tree = || scan(File::open(dir.path()).unwrap().as_fd(), &TreeLimits::default()).unwrap();
        let before = tree();
        fs::write(dir.path().join(odd).join(".git/config"), "").unwrap();
        assert!(veto(&rules(), &before, &compare(&before, &tree()), |_| None).is_some());
    }

    #[test]
    fn escaping_is_undone() {
        for raw in [&b"plain/path"[..], b"o\\d\xff\n/x", b"\\x41", b"\\", b"\xc3\xa4"] {
            assert_eq!(unescaped(&escape_path(raw)), raw, "{raw:?}");
        }
    }
}
