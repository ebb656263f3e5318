//! `agentctl keys`: what signs receipts, and what has signed them before.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use toolproto::api::{KeyList, KeyView};
use toolproto::key_history::{OldSignature, change_in};

use crate::client::Context;
use crate::client::failure::Failure;
use crate::client::output::table;

/// List the keys that sign or signed receipts, or write them to a file.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  agentctl keys\n  agentctl keys --file receipt.pub\n\n\
    The file is one for `agentctl verify --key`: the key in use first, then the former ones.")]
pub(crate) struct Keys {
    /// Where to write the public keys as PEM
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

impl Keys {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let list: KeyList = context.daemon.get("/keys").await?;
        if let Some(file) = &self.file {
            std::fs::write(file, key_file(&list)).map_err(|error| Failure::file(file, error))?;
        } else if context.output.json {
            context.output.value(&list)?;
        } else {
            let rows: Vec<[String; 4]> = list.keys.iter().map(row).collect();
            context.output.line(&table(["KEY", "FROM", "UNTIL", "VOUCHED FOR BY"], &rows))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// All keys as a file that `verify` takes.
pub(super) fn key_file(list: &KeyList) -> String {
    list.keys.iter().map(|key| format!("{}\n", key.public_key.trim_end())).collect()
}

fn row(key: &KeyView) -> [String; 4] {
    let time = |time: Option<jiff::Timestamp>, absent: &str| {
        time.map_or_else(|| absent.to_owned(), |time| format!("{time:.0}"))
    };
    let change = key.record.as_ref().and_then(|record| change_in(record).ok());
    let voucher = match change.map(|change| change.old.map(|old| old.signature)) {
        Some(Some(OldSignature::Present)) => "itself and the key before",
        Some(Some(OldSignature::Missing)) => "itself alone",
        Some(None) => "itself, the first",
        None => "no record",
    };
    [key.key_id.clone(), time(key.from, "unknown"), time(key.until, "in use"), voucher.to_owned()]
}
