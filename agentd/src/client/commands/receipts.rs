//! `agentctl receipts ID`: what a job's calls did.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use toolproto::api::ReceiptList;
use toolproto::ids::JobId;
use toolproto::receipt::{Envelope, Receipt};

use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::{bytes, millis, table};

/// List a job's receipts, show what they say, or write them to a file.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl receipts 06ab3tq4k1vfl2n8o0q1r5s7tg\n  \
    agentctl receipts 06ab3tq4k1vfl2n8o0q1r5s7tg --show=2\n  \
    agentctl receipts 06ab3tq4k1vfl2n8o0q1r5s7tg --bundle job.receipts")]
pub(crate) struct Receipts {
    /// The job
    id: JobId,
    /// Write the envelopes as JSON Lines to this file
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// Show the statements inside, of all receipts and the seal or of one receipt; signatures are not checked
    #[arg(long, value_name = "SEQ", num_args = 0..=1, require_equals = true, conflicts_with = "bundle")]
    show: Option<Option<u64>>,
}

impl Receipts {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let list: ReceiptList = context.daemon.get(&format!("/jobs/{}/receipts", self.id)).await?;
        if let Some(file) = &self.bundle {
            let mut lines = String::new();
            for envelope in &list.receipts {
                let line = serde_json::to_string(envelope)
                    .map_err(|error| Failure::Conversation(format!("a receipt has no JSON form: {error}")))?;
                lines.push_str(&line);
                lines.push('\n');
            }
            std::fs::write(file, lines).map_err(|error| Failure::file(file, error))?;
            context.output.remark(&format!("{} envelopes written to {}", list.receipts.len(), file.display()));
        } else if let Some(which) = self.show {
            for statement in statements(&list, which)? {
                context.output.value(&statement)?;
            }
        } else if context.output.json {
            context.output.value(&list)?;
        } else {
            // The sealing receipt is no call's and has no row.
            let rows: Vec<[String; 8]> = list
                .receipts
                .iter()
                .filter_map(|envelope: &Envelope| envelope.receipt().ok())
                .map(|it| row(&it))
                .collect();
            let heading = ["SEQ", "TOOL", "OUTCOME", "WORKSPACE", "CHANGES", "TIME", "MEMORY", "NOT ENFORCED"];
            context.output.line(&table(heading, &rows))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What the receipts say, or the one with this number.
fn statements(list: &ReceiptList, which: Option<u64>) -> Result<Vec<Value>, Failure> {
    let mut statements = Vec::new();
    for envelope in &list.receipts {
        let statement = envelope
            .statement()
            .map_err(|error| Failure::Conversation(format!("a receipt is not as expected: {error}")))?;
        if which.is_none_or(|sequence| statement["predicate"]["sequence"] == json!(sequence)) {
            statements.push(statement);
        }
    }
    match which {
        Some(sequence) if statements.is_empty() => {
            Err(Failure::Input(format!("there is no receipt {sequence}: take a SEQ of `agentctl receipts ID`")))
        }
        _ => Ok(statements),
    }
}

/// What was let go, without the reasons in brackets: those stand in the receipt.
fn not_enforced(properties: &[String]) -> String {
    let names = properties.iter().map(|property| property.split_once(" (").map_or(property.as_str(), |(name, _)| name));
    names.collect::<Vec<_>>().join(", ")
}

fn row(receipt: &Receipt) -> [String; 8] {
    let workspace = &receipt.workspace;
    let outcome = match receipt.outcome.code {
        Some(code) => code.to_string(),
        None => "ok".to_owned(),
    };
    [
        receipt.sequence.to_string(),
        receipt.tool.name.clone(),
        outcome,
        serde_json::to_value(workspace.state)
            .ok()
            .and_then(|state| state.as_str().map(str::to_owned))
            .unwrap_or_default(),
        format!("+{} ~{} -{}", workspace.created.len(), workspace.modified.len(), workspace.deleted.len()),
        millis(receipt.usage.wall_ms),
        receipt.usage.memory_peak.map(bytes).unwrap_or_default(),
        not_enforced(&receipt.not_enforced),
    ]
}

#[cfg(test)]
mod tests {
    use toolproto::api::API_VERSION;

    use super::*;

    #[test]
    fn statements_are_read_whatever_they_state_and_one_is_found_by_its_number() {
        let envelope = |statement: &Value| Envelope {
            payload: data_encoding::BASE64.encode(statement.to_string().as_bytes()),
            payload_type: String::new(),
            signatures: Vec::new(),
        };
        let said = [1, 2].map(|sequence| json!({"predicate": {"sequence": sequence}}));
        let seal = json!({"predicate": {"count": 2}});
        let list = ReceiptList { version: API_VERSION, receipts: said.iter().chain([&seal]).map(envelope).collect() };
        assert_eq!(statements(&list, None).unwrap(), [said[0].clone(), said[1].clone(), seal]);
        assert_eq!(statements(&list, Some(2)).unwrap(), [said[1].clone()]);
        assert!(matches!(statements(&list, Some(3)), Err(Failure::Input(_))));
    }
}
