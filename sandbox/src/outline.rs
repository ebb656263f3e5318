//! What the mount plan of a call says about a path, from the policy's text alone.
//!
//! Nothing here looks at the host: what is said of a path that no rule shows is the same whether the host has it or not, so
//! that nobody learns from it what the host has.

use std::path::{Component, Path, PathBuf};

use toolproto::manifest::{LATE_WORKSPACE, WORKSPACE};

use crate::catalog::TOOL_FOLDER;
use crate::policy::{MADE_FILES, OWN_PLACES, PathAccess, PathRule, Policy, WorkspaceMode};

/// Where every call may write.
const SCRATCH: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// The part of a call's plan that decides about paths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    policy: String,
    paths: Vec<PathRule>,
    protect: Vec<String>,
    mounts: Vec<PathBuf>,
    /// The rule that keeps it from writing to the workspace; absent when it may.
    reads_workspace_by: Option<String>,
}

/// How an attempt at a path failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// The path is not there.
    Absent,
    /// It may not be done.
    Forbidden,
    /// The path cannot be written.
    ReadOnly,
}

/// How a call is kept from a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The kind of denial: `path` or `protected_name`.
    pub what: &'static str,
    /// In a few words.
    pub how: &'static str,
    /// The rule that would allow it.
    pub rule: String,
}

impl Outline {
    /// Of a command under this policy.
    #[must_use]
    pub fn of(policy: &Policy) -> Self {
        let reads_only = policy.workspace == WorkspaceMode::ReadOnly;
        let protect = policy.protect.iter().filter(|rule| !rule.unless_directory);
        Self {
            policy: policy.name.clone(),
            paths: policy.paths.clone(),
            protect: protect.map(|rule| rule.name.clone()).collect(),
            mounts: Vec::new(),
            reads_workspace_by: reads_only.then(|| format!("workspace = \"overlay\" in policy `{}`", policy.name)),
        }
    }

    /// With paths of the host that its runtime needs.
    #[must_use]
    pub fn with_mounts(mut self, mounts: &[PathBuf]) -> Self {
        self.mounts.extend_from_slice(mounts);
        self
    }

    /// Of a program that does not write to the workspace, unless this rule is set.
    #[must_use]
    pub fn reading_unless(mut self, rule: &str) -> Self {
        self.reads_workspace_by.get_or_insert_with(|| rule.to_owned());
        self
    }

    /// What keeps a call from an absolute path, if an attempt at it failed so; nothing where the plan explains no such failure.
    #[must_use]
    pub fn keeps(&self, path: &Path, failure: Failure) -> Option<Kept> {
        let path = resolved(path);
        let read_only = |rule: String| {
            let kept = Kept { what: "path", how: "read-only", rule };
            (failure != Failure::Absent).then_some(kept)
        };
        if let Some(inside) = [WORKSPACE, LATE_WORKSPACE].iter().find_map(|place| path.strip_prefix(place).ok()) {
            return match &self.reads_workspace_by {
                Some(rule) => read_only(rule.clone()),
                None => self.protects(inside, failure),
            };
        }
        if SCRATCH.iter().any(|place| path.starts_with(place)) {
            return None;
        }
        if path.starts_with(TOOL_FOLDER) {
            return read_only("none: a tool's own folder is read-only".to_owned());
        }
        let not_shown = |rule: String| match failure {
            // What is not there can be made nowhere but where everything can be written.
            Failure::ReadOnly => Some(Kept { what: "path", how: "read-only", rule: SHOWN_READ_ONLY.to_owned() }),
            Failure::Absent | Failure::Forbidden => Some(Kept { what: "path", how: "not shown", rule }),
        };
        if let Some(place) = OWN_PLACES.iter().find(|place| path.starts_with(place)) {
            return not_shown(format!("none: every call has {place} of its own"));
        }
        if let Some(rule) = self.hides(&path) {
            let hidden = rule.path.display();
            return not_shown(format!(
                "no [[path]] path = \"{hidden}\", access = \"hide\" in policy `{}`",
                self.policy
            ));
        }
        if self.shows(&path) {
            return read_only(SHOWN_READ_ONLY.to_owned());
        }
        let named = path.display().to_string();
        not_shown(format!("[[path]] path = {named:?}, access = \"read\" in policy `{}`", self.policy))
    }

    /// The same for a path below the workspace: the protected name that it holds.
    #[must_use]
    pub fn protects(&self, path: &Path, failure: Failure) -> Option<Kept> {
        if failure == Failure::Absent || self.reads_workspace_by.is_some() {
            return None;
        }
        let path = resolved(path);
        let parts: Vec<Component<'_>> = path.components().collect();
        let holds = |name: &str| {
            let name: Vec<Component<'_>> = Path::new(name).components().collect();
            parts.windows(name.len()).any(|window| window == name)
        };
        let name = self.protect.iter().find(|name| holds(name))?;
        let rule = format!("no [[protect]] name = \"{name}\" in policy `{}`", self.policy);
        Some(Kept { what: "protected_name", how: "protected", rule })
    }

    fn hides(&self, path: &Path) -> Option<&PathRule> {
        self.paths.iter().find(|rule| rule.access == PathAccess::Hide && path.starts_with(&rule.path))
    }

    /// Whether something stands there, or would if the host had it: shown by a rule, or on the way to what is.
    fn shows(&self, path: &Path) -> bool {
        let rules = self.paths.iter().filter(|rule| rule.access == PathAccess::Read).map(|rule| rule.path.as_path());
        let mut shown = rules.chain(self.mounts.iter().map(PathBuf::as_path));
        shown.any(|rule| covers(rule, path) || rule.starts_with(path))
            || MADE_FILES.iter().any(|made| Path::new(made).starts_with(path))
    }
}

const SHOWN_READ_ONLY: &str = "none: only the workspace, /tmp and /dev/shm can be written";

/// Whether a path lies at or below one for which a rule stands. `name*` stands for every name that begins so.
fn covers(rule: &Path, path: &Path) -> bool {
    let (Some(name), Some(parent)) = (rule.file_name().and_then(|name| name.to_str()), rule.parent()) else {
        return path.starts_with(rule);
    };
    let Some(prefix) = name.strip_suffix('*') else { return path.starts_with(rule) };
    let first = path.strip_prefix(parent).ok().and_then(|rest| rest.components().next());
    first.is_some_and(|first| first.as_os_str().as_encoded_bytes().starts_with(prefix.as_bytes()))
}

/// A path without `.` and `..`, as far as its text tells.
fn resolved(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::listings::Listings;
    use crate::mounts::frame::{Accounts, Entry};
    use crate::plan::{Inputs, Place, View, access, entries, scratch};

    fn shipped() -> BTreeMap<String, Policy> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies");
        let files: Vec<(PathBuf, String)> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .map(|path| (path.clone(), std::fs::read_to_string(&path).unwrap()))
            .collect();
        Policy::load_all(&files).unwrap()
    }

    fn policy(rules: &str) -> Policy {
        let text = format!("version = 1\nname = \"p\"\nworkspace = \"overlay\"\n{rules}");
        Policy::load_all(&[("p.toml".into(), text)]).unwrap().remove("p").unwrap()
    }

    fn rule_of(outline: &Outline, path: &str, failure: Failure) -> Option<(&'static str, String)> {
        outline.keeps(Path::new(path), failure).map(|kept| (kept.how, kept.rule))
    }

    /// What it says of paths is what the plan makes of them.
    #[test]
    fn it_agrees_with_the_plan_of_every_shipped_policy() {
        for policy in shipped().values() {
            for workspace_read_only in [policy.workspace == WorkspaceMode::ReadOnly, true] {
                let inputs = Inputs {
                    policy,
                    command: &["true".into()],
                    env: &[],
                    tool_folder: Some(Path::new("/srv/tool")),
                    runtime_mounts: &["/opt/runtime".into()],
                    user: 0,
                    sandbox_id: 1,
                    view: View::Empty,
                    place: Place::Usual,
                    workspace_read_only,
                    limits: policy.limits.clone(),
                    network: None,
                };
                let mut outline = Outline::of(policy).with_mounts(inputs.runtime_mounts);
                if workspace_read_only {
                    outline = outline.reading_unless("a rule");
                }
                let how = |path: &Path, failure| outline.keeps(path, failure).map(|kept| kept.how);
                let planned = entries(&inputs, &Listings::default()).unwrap();
                for entry in &planned {
                    let path = Path::new("/").join(entry.target());
                    let name = format!("{}: {}", policy.name, path.display());
                    match entry {
                        Entry::Hide { .. } => assert_eq!(how(&path, Failure::Absent), Some("not shown"), "{name}"),
                        _ => {
                            assert_eq!(how(&path, Failure::Absent), None, "{name}");
                            assert_eq!(how(&path, Failure::ReadOnly), Some("read-only"), "{name}");
                        }
                    }
                }
                for place in scratch(&inputs) {
                    // Whether it can be written is Landlock's, below.
                    let path = Path::new("/").join(place.target);
                    assert_eq!(how(&path, Failure::Absent), None, "{}: {}", policy.name, path.display());
                }
                let made = planned.iter().filter(|entry| matches!(entry, Entry::File { .. })).map(Entry::target);
                let accounts = Accounts::of(1);
                let made: BTreeSet<&Path> = made.chain(accounts.files().map(Path::new)).collect();
                let all: BTreeSet<_> =
                    MADE_FILES.iter().map(|path| Path::new(path).strip_prefix("/").unwrap()).collect();
                assert_eq!(made, all, "{}", policy.name);
                let access = access(&inputs, &planned);
                for path in access.write {
                    assert_eq!(how(&path, Failure::Forbidden), None, "{}: {}", policy.name, path.display());
                }
                for path in access.read.iter().filter(|path| path.starts_with(WORKSPACE)) {
                    assert_eq!(how(path, Failure::Forbidden), Some("read-only"), "{}", policy.name);
                }
            }
        }
    }

    #[test]
    fn a_path_that_no_rule_shows_is_named_with_the_rule_that_would() {
        let outline = Outline::of(&shipped()["workspace"]);
        let shadow = "[[path]] path = \"/etc/shadow\", access = \"read\" in policy `workspace`".to_owned();
        for path in ["/etc/shadow", "/etc/./x/../shadow", "/workspace/../etc/shadow", "/../etc/shadow"] {
            assert_eq!(rule_of(&outline, path, Failure::Absent), Some(("not shown", shadow.clone())), "{path}");
        }
        for path in ["/root", "/home/me/.ssh/id", "/var/lib/agentd", "/etcetera", "/etc/ssl/private/key"] {
            assert!(matches!(rule_of(&outline, path, Failure::Forbidden), Some(("not shown", _))), "{path}");
        }
        let (_, rule) = rule_of(&outline, "/proc/1/environ", Failure::Forbidden).unwrap();
        assert_eq!(rule, "none: every call has /proc of its own");
        for path in
            ["/usr/lib/nothing", "/lib64/x", "/etc/java-99/x", "/etc/passwd", "/etc", "/", "/tmp/x", "/workspace/x"]
        {
            assert_eq!(rule_of(&outline, path, Failure::Absent), None, "{path}");
        }
    }

    #[test]
    fn what_can_only_be_read_is_named_when_writing_failed() {
        let outline = Outline::of(&shipped()["workspace"]).with_mounts(&["/opt/bun".into()]);
        for path in ["/usr/x", "/etc/passwd", "/etc", "/opt/bun/x", "/tool/x", "/lib64/x"] {
            assert!(matches!(rule_of(&outline, path, Failure::ReadOnly), Some(("read-only", _))), "{path}");
            assert!(matches!(rule_of(&outline, path, Failure::Forbidden), Some(("read-only", _))), "{path}");
        }
        assert_eq!(
            rule_of(&outline, "/srv/new", Failure::ReadOnly),
            Some(("read-only", "none: only the workspace, /tmp and /dev/shm can be written".to_owned()))
        );
        for path in ["/tmp/x", "/var/tmp/x", "/dev/shm/x", "/workspace/x", "/job/workspace/x", "/workspace"] {
            assert_eq!(rule_of(&outline, path, Failure::ReadOnly), None, "{path}");
        }
    }

    #[test]
    fn a_workspace_that_can_only_be_read_names_what_would_change_that() {
        let strict = Outline::of(&shipped()["strict"]).reading_unless("the tool's own rule");
        let by_policy = Some(("read-only", "workspace = \"overlay\" in policy `strict`".to_owned()));
        assert_eq!(rule_of(&strict, "/workspace/x", Failure::ReadOnly), by_policy);
        assert_eq!(rule_of(&strict, "/workspace/x", Failure::Absent), None);
        let declared = Outline::of(&shipped()["workspace"]).reading_unless("the tool's own rule");
        let by_tool = Some(("read-only", "the tool's own rule".to_owned()));
        for path in ["/workspace/x", "/job/workspace/.git/config"] {
            assert_eq!(rule_of(&declared, path, Failure::Forbidden), by_tool, "{path}");
        }
    }

    #[test]
    fn protected_names_count_at_any_depth_and_hidden_ones_below_what_is_shown() {
        let rules = "[[path]]\npath = \"/usr\"\naccess = \"read\"\nwhy = \"x\"\n[[path]]\npath = \"/usr/secret\"\n\
                     access = \"hide\"\nwhy = \"x\"\n[[protect]]\nname = \".git/hooks\"\nwhy = \"x\"\n\
                     [[protect]]\nname = \".git\"\nunless_directory = true\nwhy = \"x\"\n";
        let outline = Outline::of(&policy(rules));
        let protected = Some(("protected", "no [[protect]] name = \".git/hooks\" in policy `p`".to_owned()));
        for path in ["/workspace/.git/hooks/pre-commit", "/workspace/a/b/.git/hooks", "/job/workspace/.git/hooks"] {
            assert_eq!(rule_of(&outline, path, Failure::ReadOnly), protected, "{path}");
            assert_eq!(rule_of(&outline, path, Failure::Absent), None, "{path}");
        }
        assert_eq!(rule_of(&outline, "/workspace/.git/hook", Failure::ReadOnly), None);
        assert_eq!(rule_of(&outline, "/workspace/.git/objects/x", Failure::Forbidden), None);
        assert!(outline.protects(Path::new("./.git/hooks/x"), Failure::Forbidden).is_some());
        let (how, rule) = rule_of(&outline, "/usr/secret/key", Failure::Absent).unwrap();
        assert_eq!(
            (how, rule.as_str()),
            ("not shown", "no [[path]] path = \"/usr/secret\", access = \"hide\" in policy `p`")
        );
    }
}
