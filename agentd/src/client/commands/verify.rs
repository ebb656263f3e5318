//! `agentctl verify FILE`: receipts checked offline.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use serde_json::json;
use toolproto::api::KeyList;

use super::read_input;
use crate::client::Context;
use crate::client::failure::{FAILED, Failure};
use crate::verification::{self, Scope};

/// The key of this host, for those who do not name one.
const INSTALLED_KEY: &str = "/etc/agentd/receipt.pub";

/// Check a receipt or a bundle of receipts.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  agentctl verify job.receipts --key receipt.pub\n  agentctl verify receipt.json\n\n\
    Without --key the key is /etc/agentd/receipt.pub, else the daemon's. A key inside the file is never trusted.\n\
    Exit status 1 when anything is wrong."
)]
pub(crate) struct Verify {
    /// One envelope, or a bundle as JSON Lines; - for stdin
    file: PathBuf,
    /// The public key as PEM
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

impl Verify {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let bytes = read_input(&self.file)?;
        let text = String::from_utf8(bytes)
            .map_err(|_| Failure::Input(format!("{} is not UTF-8 text", self.file.display())))?;
        let (key, source) = key(context, self.key.as_deref()).await?;
        let report = verification::verify(&text, &key);
        let verdict = if report.is_valid() { "valid" } else { "invalid" };
        if context.output.json {
            let mut value = serde_json::to_value(&report)
                .map_err(|error| Failure::Conversation(format!("the report has no JSON form: {error}")))?;
            if let Some(fields) = value.as_object_mut() {
                fields.insert("valid".to_owned(), json!(report.is_valid()));
                fields.insert("key_source".to_owned(), json!(source));
            }
            context.output.value(&value)?;
        } else {
            for finding in &report.findings {
                context.output.line(&finding.to_string())?;
            }
            let scope = match report.scope {
                Scope::LoneEnvelope => "a lone receipt: its signature and fields only, not its chain",
                Scope::Bundle => "a bundle: signatures, fields, chain and seal",
            };
            context.output.line(&format!("{verdict}: {} receipts, checked as {scope}", report.receipts))?;
            context.output.line(&format!("key: {} from {source}", report.key_id))?;
        }
        Ok(if report.is_valid() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
    }
}

/// The key and where it comes from.
async fn key(context: &Context, named: Option<&Path>) -> Result<(VerifyingKey, String), Failure> {
    let installed = Path::new(INSTALLED_KEY);
    if let Some(file) = named.or_else(|| installed.exists().then_some(installed)) {
        let pem = std::fs::read_to_string(file).map_err(|error| Failure::file(file, error))?;
        return Ok((parse(&pem, &file.display().to_string())?, file.display().to_string()));
    }
    let keys: KeyList = context.daemon.get("/keys").await?;
    let key = keys
        .keys
        .first()
        .ok_or_else(|| Failure::Input("the daemon has no receipt key; name the key with --key".to_owned()))?;
    Ok((parse(&key.public_key, "the daemon")?, "the daemon".to_owned()))
}

fn parse(pem: &str, source: &str) -> Result<VerifyingKey, Failure> {
    VerifyingKey::from_public_key_pem(pem)
        .map_err(|error| Failure::Input(format!("the key from {source} is no Ed25519 public key as PEM: {error}")))
}
