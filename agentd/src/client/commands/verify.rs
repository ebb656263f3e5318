//! `agentctl verify FILE`: receipts, or the history of keys, checked offline.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use toolproto::api::KeyList;
use toolproto::receipt::Envelope;

use super::read_input;
use crate::client::Context;
use crate::client::failure::{FAILED, Failure};
use crate::verification::{self, KeyRing, Scope};

/// The keys of this host, for those who do not name any.
const INSTALLED_KEY: &str = "/etc/agentd/receipt.pub";

/// Check a receipt, a bundle of receipts, or the history of keys.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  agentctl verify job.receipts --key receipt.pub\n  agentctl verify receipt.json --show\n  \
    agentctl verify receipt.history --key receipt.pub\n\n\
    Without --key the keys are those of /etc/agentd/receipt.pub, else the daemon's. A key inside the file is never\n\
    trusted. A key file may hold several, the one in use first.\n\
    Exit status 1 when anything is wrong."
)]
pub(crate) struct Verify {
    /// One envelope, a bundle or a history as JSON Lines; - for stdin
    file: PathBuf,
    /// The public keys as PEM, one or several
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Show first what the envelopes say
    #[arg(long)]
    show: bool,
}

impl Verify {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let bytes = read_input(&self.file)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| Failure::Input(format!("{} is not UTF-8 text", self.file.display())))?;
        let (ring, source) = ring(context, self.key.as_deref()).await?;
        let report = verification::verify(&text, &ring);
        let verdict = if report.is_valid() { "valid" } else { "invalid" };
        let statements: Vec<Value> = if self.show { statements(&text) } else { Vec::new() };
        if context.output.json {
            let mut value = serde_json::to_value(&report)
                .map_err(|error| Failure::Conversation(format!("the report has no JSON form: {error}")))?;
            if let Some(fields) = value.as_object_mut() {
                fields.insert("valid".to_owned(), json!(report.is_valid()));
                fields.insert("key_source".to_owned(), json!(source));
                if self.show {
                    fields.insert("statements".to_owned(), json!(statements));
                }
            }
            context.output.value(&value)?;
        } else {
            for statement in &statements {
                context.output.value(statement)?;
            }
            for finding in &report.findings {
                context.output.line(&finding.to_string())?;
            }
            let scope = match report.scope {
                Scope::LoneEnvelope => "a lone receipt: its signature and fields only, not its chain",
                Scope::Bundle => "a bundle: signatures, fields, chain and seal",
                Scope::KeyHistory => "a history of keys: signatures and chain",
            };
            let count = match report.scope {
                Scope::LoneEnvelope | Scope::Bundle => format!("{} receipts, ", report.receipts),
                Scope::KeyHistory => String::new(),
            };
            context.output.line(&format!("{verdict}: {count}checked as {scope}"))?;
            for key in &report.keys {
                context.output.line(&format!("key: {} from {source}, {} signed", key.key_id, key.envelopes))?;
            }
            if report.keys.is_empty() {
                context.output.line(&format!("key: {ring} from {source}"))?;
            }
        }
        Ok(if report.is_valid() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
    }
}

/// What the envelopes say. Those that cannot be read are among the report's findings.
fn statements(text: &str) -> Vec<Value> {
    let envelopes = text.lines().filter_map(|line| serde_json::from_str::<Envelope>(line).ok());
    envelopes.filter_map(|envelope| envelope.statement().ok()).collect()
}

/// The keys and where they come from.
async fn ring(context: &Context, named: Option<&Path>) -> Result<(KeyRing, String), Failure> {
    let installed = Path::new(INSTALLED_KEY);
    let (text, source) = match named.or_else(|| installed.exists().then_some(installed)) {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|error| Failure::file(file, error))?;
            (text, file.display().to_string())
        }
        None => {
            let keys: KeyList = context.daemon.get("/keys").await?;
            if keys.keys.is_empty() {
                return Err(Failure::Input("the daemon has no receipt key; name the key with --key".to_owned()));
            }
            (super::keys::key_file(&keys), "the daemon".to_owned())
        }
    };
    let ring = KeyRing::from_pem(&text).map_err(|error| Failure::Input(format!("the keys from {source}: {error}")))?;
    Ok((ring, source))
}
