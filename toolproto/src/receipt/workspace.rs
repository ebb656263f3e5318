//! What a call did to its workspace.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// What kind of file an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// One version of an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryState {
    /// What kind of file it is.
    #[serde(rename = "type")]
    pub kind: EntryKind,
    /// Permission bits, as an octal string such as `0644`.
    pub mode: String,
    /// The digest of a file's content or a symlink's target; absent for other kinds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub digest: Option<Digest>,
    /// A file's length, a symlink's target length.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bytes: Option<u64>,
}

/// One entry that differs between before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The path below the workspace, escaped as [`escape_path`] does.
    pub path: String,
    /// The version before; absent when created.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub old: Option<EntryState>,
    /// The version after; absent when deleted.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub new: Option<EntryState>,
}

/// What became of the call's effect on the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceState {
    /// All changes are in the workspace.
    Committed,
    /// None of them are.
    Discarded,
    /// The call could not change it.
    ReadOnly,
    /// The call had no workspace, or an empty one that was thrown away.
    None,
    /// The call wrote to it directly: what it changed stays, whatever the outcome.
    Direct,
    /// A conflict with changes from outside; both versions are kept.
    Conflict,
    /// An earlier state was restored.
    RolledBack,
}

/// The workspace's part of a receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspaceChange {
    /// What became of the call's effect.
    pub state: WorkspaceState,
    /// The tree's digest before the call; absent without a workspace.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub before: Option<Digest>,
    /// The tree's digest after the call.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub after: Option<Digest>,
    /// Entries that exist after and not before, by path.
    #[serde(default)]
    pub created: Vec<Change>,
    /// Entries that differ, by path.
    #[serde(default)]
    pub modified: Vec<Change>,
    /// Entries that exist before and not after, by path.
    #[serde(default)]
    pub deleted: Vec<Change>,
    /// Entries that changed between calls by nobody agentd knows, by path.
    #[serde(default)]
    pub unattributed: Vec<Change>,
}

impl WorkspaceChange {
    /// For a call without a workspace.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            state: WorkspaceState::None,
            before: None,
            after: None,
            created: Vec::new(),
            modified: Vec::new(),
            deleted: Vec::new(),
            unattributed: Vec::new(),
        }
    }

    /// Whether it proves what the call did to the workspace: where something of the call may be in it, the trees before and after
    /// are known, and what differs between them.
    #[must_use]
    pub fn is_attested(&self) -> bool {
        match self.state {
            WorkspaceState::None | WorkspaceState::ReadOnly | WorkspaceState::Discarded | WorkspaceState::Conflict => {
                true
            }
            WorkspaceState::Committed | WorkspaceState::Direct | WorkspaceState::RolledBack => {
                let trees = self.before.zip(self.after);
                trees.is_some_and(|(before, after)| before == after || self.is_changed())
            }
        }
    }

    /// How many entries it names.
    #[must_use]
    pub const fn entries(&self) -> usize {
        self.created.len() + self.modified.len() + self.deleted.len() + self.unattributed.len()
    }

    /// Whether the call left the tree other than it was.
    #[must_use]
    pub const fn is_changed(&self) -> bool {
        !(self.created.is_empty() && self.modified.is_empty() && self.deleted.is_empty())
    }
}

/// A path as it stands in change lists: UTF-8 as it is, except that a backslash, control characters and bytes that are
/// not UTF-8 become `\xHH`, so that every path is one line of text and none collides with another.
#[must_use]
pub fn escape_path(raw: &[u8]) -> String {
    let mut escaped = String::with_capacity(raw.len());
    for chunk in raw.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character == '\\' || character.is_control() {
                let mut buffer = [0; 4];
                for byte in character.encode_utf8(&mut buffer).bytes() {
                    push_hex(&mut escaped, byte);
                }
            } else {
                escaped.push(character);
            }
        }
        for byte in chunk.invalid() {
            push_hex(&mut escaped, *byte);
        }
    }
    escaped
}

fn push_hex(text: &mut String, byte: u8) {
    text.push_str("\\x");
    text.push_str(&data_encoding::HEXLOWER.encode(&[byte]));
}
