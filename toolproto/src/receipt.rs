//! Receipts: what one call did, as agentd's launcher saw it.
//!
//! A receipt is an in-toto Statement v1 (<https://in-toto.io/Statement/v1>) in a DSSE envelope. Its predicate names the
//! call, what was enforced, the outcome, the workspace's digests before and after with every change between, and the
//! usage. Receipts of a job are chained: each names the sha256 of the previous envelope's payload and signatures.
//!
//! Inside stands the launcher's own [`Evidence`]: what the privileged side saw and measured itself, beside the digests
//! that the unprivileged daemon supplied, marked as claims.

mod draft;
mod envelope;
mod workspace;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::code::Code;
use crate::digest::Digest;
use crate::ids::{CallId, JobId};

pub use self::draft::Draft;
pub use self::envelope::{Envelope, EnvelopeError, PAYLOAD_TYPE, Signature, key_id, pre_authentication_encoding};
pub use self::workspace::{Change, EntryKind, EntryState, WorkspaceChange, WorkspaceState, escape_path};

/// The `predicateType` of a receipt.
pub const PREDICATE_TYPE: &str = "https://agentd.dev/receipt/v1";
/// The `predicateType` of the sealing receipt that closes a job's chain.
pub const SEAL_PREDICATE_TYPE: &str = "https://agentd.dev/seal/v1";
/// The `_type` of an in-toto Statement v1.
pub const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// What stands before an evidence record's canonical JSON when it is signed, so that no signature over evidence can be
/// taken for one over an envelope.
pub const EVIDENCE_DOMAIN: &[u8] = b"agentd evidence v1\n";

/// The bytes that the launcher's signature over an evidence record covers: [`EVIDENCE_DOMAIN`], then the record's
/// canonical JSON.
#[must_use]
pub fn evidence_signing_bytes(canonical: &[u8]) -> Vec<u8> {
    [EVIDENCE_DOMAIN, canonical].concat()
}

/// What became of the call's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutcomeKind {
    /// It exited by itself.
    Exited,
    /// A signal ended it that agentd did not send.
    Signalled,
    /// Its deadline passed.
    TimedOut,
    /// Its memory limit was reached.
    OutOfMemory,
    /// It was cancelled.
    Cancelled,
    /// The sandbox could not be set up, or the program could not be executed.
    LaunchFailed,
    /// agentd's policy refused it before anything started.
    Refused,
    /// agentd ended while it ran.
    Interrupted,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Outcome {
    /// What became of the process.
    pub kind: OutcomeKind,
    /// The failure's code; absent on success.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code: Option<Code>,
    /// The status the process exited with.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exit_status: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub signal: Option<i32>,
}

/// Which resource figure stands behind `memory_peak`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MemorySource {
    /// `memory.peak` of the call's cgroup: everything in it.
    Cgroup,
    /// `ru_maxrss` of the tool's process and the children it waited for: the largest single one.
    Rusage,
}

/// What a call used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Usage {
    /// Wall-clock milliseconds from launch to end.
    pub wall_ms: u64,
    /// Processor time in microseconds, user and system.
    pub cpu_usec: u64,
    /// Highest memory use, in bytes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory_peak: Option<u64>,
    /// Where `memory_peak` comes from.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub memory_source: Option<MemorySource>,
    /// Most processes and threads at once.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub pids_peak: Option<u64>,
    /// Bytes read from block devices.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub io_read: Option<u64>,
    /// Bytes written to block devices.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub io_write: Option<u64>,
    /// Bytes sent through egress.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub net_sent: Option<u64>,
    /// Bytes received through egress.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub net_received: Option<u64>,
}

/// One thing that was refused during the call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denial {
    /// What kind of thing: `path`, `host`, `syscall`, `limit`, `protected_name`.
    pub what: String,
    /// Which one.
    pub detail: String,
    /// The rule that would allow it.
    pub rule: String,
    /// Who says so, where neither the kernel nor agentd saw it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub witness: Option<Witness>,
}

/// Who a denial is known from, besides those who refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Witness {
    /// The tool, which failed and named a path that its policy keeps from it. That it tried it is not proven.
    Tool,
}

impl Denial {
    /// Something that was seen to be refused.
    #[must_use]
    pub fn seen(what: impl Into<String>, detail: impl Into<String>, rule: impl Into<String>) -> Self {
        Self { what: what.into(), detail: detail.into(), rule: rule.into(), witness: None }
    }
}

/// What stands before an extension's name in its receipts. No tool's name has a colon.
pub const EXTENSION_PREFIX: &str = "extension:";

/// A tool's program, by name and content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolIdentity {
    /// The tool's name; `exec` for ad-hoc commands, `rollback`, or [`EXTENSION_PREFIX`] and an extension's name.
    pub name: String,
    /// The manifest's version.
    pub version: u32,
    /// The tree digest of its folder; absent for ad-hoc commands.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub digest: Option<Digest>,
}

/// A policy, by name and content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyIdentity {
    /// The policy's name.
    pub name: String,
    /// The digest of its effective form as canonical JSON, after `extends`.
    pub digest: Digest,
}

/// What the tool's manifest says about its effects, and what was seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Semantics {
    /// What was declared: `read_only`, `mutates_workspace`, `stateful_action`, or `undeclared`.
    pub declared: String,
    /// What was seen: `unchanged` or `changed`.
    pub observed: String,
}

/// Digests that the unprivileged daemon supplies: the launcher records them without having seen what is behind them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// Of the arguments as canonical JSON.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub arguments_digest: Option<Digest>,
    /// Of the result as the model sees it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result_digest: Option<Digest>,
    /// The code that agentd gave the call after reading the reply.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub code: Option<Code>,
    /// What went through agentd to listed hosts; absent when none were listed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub network: Option<NetworkClaims>,
    /// Paths that a tool which did not end well named itself, and which its policy keeps from it.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub named: Vec<Denial>,
}

/// What agentd saw of a call's network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkClaims {
    /// Bytes from the tool to listed hosts.
    pub sent: u64,
    /// Bytes from listed hosts to the tool.
    pub received: u64,
    /// What was not let out, or could not be reached.
    pub denied: Vec<Denial>,
}

/// The launcher's record of a call: what the privileged side saw and measured itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Version of this record's layout.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// The call.
    pub call_id: CallId,
    /// The call's number within the job, from 1.
    pub sequence: u64,
    /// Digest of the previous evidence record of the job; absent for the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub previous: Option<Digest>,
    /// The caller's uid.
    pub uid: u32,
    /// The program.
    pub tool: ToolIdentity,
    /// The policy it ran under.
    pub policy: PolicyIdentity,
    /// What the kernel really enforced, by property name.
    pub enforced: Vec<String>,
    /// What the policy requires and the host could not enforce (only under `--limits best-effort`).
    pub not_enforced: Vec<String>,
    /// When the launch began.
    pub started: Timestamp,
    /// When the last process of the tool's had gone.
    pub ended: Timestamp,
    /// How the process ended. Its code is the launcher's own view, without the reply's content.
    pub outcome: Outcome,
    /// The workspace before and after.
    pub workspace: WorkspaceChange,
    /// What was refused.
    pub denied: Vec<Denial>,
    /// What was used.
    pub usage: Usage,
    /// The call's cgroup below the delegated root, or `none`.
    pub cgroup: String,
    /// The call whose record said that its changes are in the workspace, and whose changes did not get there: this one
    /// takes that back. Absent in every other record.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub withdraws: Option<CallId>,
    /// What agentd supplied.
    pub claims: Claims,
}

impl Evidence {
    /// What was refused, by the kernel and by agentd, and what the tool named itself.
    #[must_use]
    pub fn all_denied(&self) -> Vec<Denial> {
        let by_agentd = self.claims.network.iter().flat_map(|network| &network.denied);
        self.denied.iter().chain(by_agentd).chain(&self.claims.named).cloned().collect()
    }

    /// What was used, with what went through agentd.
    #[must_use]
    pub fn all_usage(&self) -> Usage {
        let network = self.claims.network.as_ref();
        Usage {
            net_sent: network.map(|network| network.sent).or(self.usage.net_sent),
            net_received: network.map(|network| network.received).or(self.usage.net_received),
            ..self.usage.clone()
        }
    }
}

/// What the model was given of the tool's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultIdentity {
    /// sha256 of the result as canonical JSON.
    pub digest: Digest,
    /// Bytes that the tool wrote.
    pub bytes: u64,
    /// `complete`, or `partial` when a preview stands for it.
    pub completeness: String,
}

/// The predicate of a call's receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Receipt {
    /// Version of the receipt's layout.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// The call.
    pub call_id: CallId,
    /// The call's number within the job, from 1.
    pub sequence: u64,
    /// sha256 of the previous envelope; absent for the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub previous: Option<Digest>,
    /// The program.
    pub tool: ToolIdentity,
    /// sha256 of the arguments as canonical JSON.
    pub arguments_digest: Digest,
    /// Declared and seen effects.
    pub semantics: Semantics,
    /// The policy it ran under.
    pub policy: PolicyIdentity,
    /// What the kernel really enforced.
    pub enforced: Vec<String>,
    /// What best-effort let go.
    pub not_enforced: Vec<String>,
    /// When the launch began.
    pub started: Timestamp,
    /// When the last process of the tool's had gone.
    pub ended: Timestamp,
    /// How the call ended, the reply's content included.
    pub outcome: Outcome,
    /// What the model was given.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<ResultIdentity>,
    /// The workspace before and after.
    pub workspace: WorkspaceChange,
    /// The call whose receipt this one takes back; absent in every other receipt.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub withdraws: Option<CallId>,
    /// The launcher's own record.
    pub evidence: SignedEvidence,
    /// What was refused.
    pub denied: Vec<Denial>,
    /// What was used.
    pub usage: Usage,
    /// The host's name.
    pub host: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// agentd's version.
    pub agentd_version: String,
    /// The key that signed it; absent until receipts are signed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub key_id: Option<String>,
    /// Remarks that are no failures, such as stray lines before the reply.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub notes: Vec<String>,
}

/// An evidence record and its signature over the record's canonical JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedEvidence {
    /// The record.
    pub record: Evidence,
    /// Ed25519 over the domain separator and the record's canonical JSON, base64; absent until receipts are signed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub signature: Option<String>,
}

/// The predicate of a job's sealing receipt: how many receipts there are and which is the last, so that a bundle that was
/// cut short is seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Version of the seal's layout.
    pub version: u32,
    /// The job.
    pub job_id: JobId,
    /// How many receipts the job has, without the seal.
    pub count: u64,
    /// sha256 of the last receipt's envelope; absent when there is none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub previous: Option<Digest>,
    /// Digest of the last evidence record as canonical JSON; absent when there is none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub evidence_head: Option<Digest>,
    /// When the job ended.
    pub sealed: Timestamp,
    /// The key that signed it; absent until receipts are signed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub key_id: Option<String>,
}

/// What the receipt is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// `workspace`.
    pub name: String,
    /// Algorithm name to hexadecimal digest.
    pub digest: std::collections::BTreeMap<String, String>,
}

/// An in-toto Statement v1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statement<P> {
    /// [`STATEMENT_TYPE`].
    #[serde(rename = "_type")]
    pub kind: String,
    /// The workspace after the call; empty without one.
    pub subject: Vec<Subject>,
    /// [`PREDICATE_TYPE`] or [`SEAL_PREDICATE_TYPE`].
    #[serde(rename = "predicateType")]
    pub predicate_type: String,
    /// The receipt.
    pub predicate: P,
}

impl Statement<Receipt> {
    /// The statement around a receipt.
    #[must_use]
    pub fn about(receipt: Receipt) -> Self {
        let subject = receipt.workspace.after.map(|digest| Subject {
            name: "workspace".to_owned(),
            digest: [("blake3".to_owned(), data_encoding::HEXLOWER.encode(digest.as_bytes()))].into(),
        });
        Self {
            kind: STATEMENT_TYPE.to_owned(),
            subject: subject.into_iter().collect(),
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate: receipt,
        }
    }
}

impl Statement<Seal> {
    /// The statement around a seal.
    #[must_use]
    pub fn sealing(seal: Seal) -> Self {
        Self {
            kind: STATEMENT_TYPE.to_owned(),
            subject: Vec::new(),
            predicate_type: SEAL_PREDICATE_TYPE.to_owned(),
            predicate: seal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_the_dsse_specification() {
        // The specification's own example.
        let encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world");
        assert_eq!(encoded, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    }

    #[test]
    fn what_stays_in_the_workspace_is_attested_by_both_trees_and_what_differs() {
        let tree = |text: &str| Some(Digest::sha256(text.as_bytes()));
        let change = Change { path: "x".to_owned(), old: None, new: None };
        let attested = |state, before, after, created: &[&Change]| {
            let created = created.iter().map(|change| (*change).clone()).collect();
            WorkspaceChange { state, before, after, created, ..WorkspaceChange::none() }.is_attested()
        };
        for state in [WorkspaceState::Committed, WorkspaceState::Direct, WorkspaceState::RolledBack] {
            assert!(attested(state, tree("a"), tree("b"), &[&change]));
            assert!(attested(state, tree("a"), tree("a"), &[]));
            assert!(!attested(state, tree("a"), tree("b"), &[]), "what differs is not listed");
            assert!(!attested(state, tree("a"), None, &[]) && !attested(state, None, tree("b"), &[&change]));
        }
        for state in
            [WorkspaceState::None, WorkspaceState::ReadOnly, WorkspaceState::Discarded, WorkspaceState::Conflict]
        {
            assert!(attested(state, None, None, &[]), "nothing of the call is there");
        }
    }

    #[test]
    fn odd_names_are_escaped_without_collision() {
        assert_eq!(escape_path("a/é b".as_bytes()), "a/é b");
        assert_eq!(escape_path(b"a\nb"), r"a\x0ab");
        assert_eq!(escape_path(b"a\\x0ab"), r"a\x5cx0ab");
        assert_eq!(escape_path(b"\xff\xfe"), r"\xff\xfe");
    }
}
