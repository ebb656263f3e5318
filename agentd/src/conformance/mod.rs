//! The conformance checks of `agentctl tools check DIR`: requests that a tool must cope with, and what its answers violate.
//!
//! ```text
//! folder ─▶ Subject ─▶ probes ─▶ (each in a sandbox) ─▶ Seen ─▶ judge ─▶ findings
//! ```
//!
//! Pure but for the reading of the folder: who runs the probes brings back what was seen.

mod judge;
mod probe;
mod subject;

use serde::Serialize;

pub use self::judge::{Seen, judge};
pub use self::probe::{Probe, probes};
pub use self::subject::{Subject, WORKSPACE_FOLDER};

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gravity {
    /// The tool breaks the protocol or its own contract.
    Violation,
    /// It works, but something could be better.
    Advice,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How grave it is.
    pub gravity: Gravity,
    /// What was found and what to do.
    pub what: String,
}

impl Finding {
    fn violation(what: impl Into<String>) -> Self {
        Self { gravity: Gravity::Violation, what: abbreviated(&what.into(), LONGEST_FINDING) }
    }

    fn advice(what: impl Into<String>) -> Self {
        Self { gravity: Gravity::Advice, what: abbreviated(&what.into(), LONGEST_FINDING) }
    }
}

/// The most characters of a finding; tools are sent, and send, values that fill many screens.
const LONGEST_FINDING: usize = 600;

/// The begin of a text that is longer than that many characters, and how long it is.
fn abbreviated(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}… ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}

/// What one probe came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// The probe's name.
    pub probe: &'static str,
    /// What was found; empty when all is well.
    pub findings: Vec<Finding>,
}

/// What all probes came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The format's version: 1.
    pub version: u32,
    /// The tool.
    pub tool: String,
    /// Whether nothing was violated.
    pub passed: bool,
    /// Each probe, in order.
    pub probes: Vec<Checked>,
}

impl Report {
    /// A report of these probes.
    #[must_use]
    pub fn new(tool: String, probes: Vec<Checked>) -> Self {
        let is_violated = |checked: &Checked| checked.findings.iter().any(|one| one.gravity == Gravity::Violation);
        Self { version: 1, tool, passed: !probes.iter().any(is_violated), probes }
    }
}
