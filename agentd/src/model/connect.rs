//! From an agent's settings to who answers.

use std::path::Path;
use std::sync::Arc;

use super::Model;
use super::anthropic::Anthropic;
use super::cassette::{CassetteError, Recorder};
use super::http::{SetupError, Timers};
use super::openai::OpenAi;
use super::replay::Replay;
use super::responses::Responses;
use super::retry::Chain;
use super::settings::{ModelSettings, Provider};

/// A model that cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Its cassette cannot be used.
    #[error(transparent)]
    Cassette(#[from] CassetteError),
    /// HTTP cannot be spoken.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// Those who answer for an agent, in their order. Cassettes that are recorded lie in `records`.
///
/// # Errors
/// When one of them cannot be asked.
pub fn connect(models: &[ModelSettings], timers: Timers, records: &Path) -> Result<Arc<dyn Model>, ConnectError> {
    let mut chain: Vec<(String, Arc<dyn Model>)> = Vec::new();
    for settings in models {
        let model: Arc<dyn Model> = match &settings.provider {
            Provider::OpenAi(endpoint) => Arc::new(OpenAi::new(endpoint.clone(), timers)?),
            Provider::Responses(endpoint) => Arc::new(Responses::new(endpoint.clone(), timers)?),
            Provider::Anthropic(endpoint) => Arc::new(Anthropic::new(endpoint.clone(), timers)?),
            Provider::Replay { cassette } => Arc::new(Replay::open(cassette.clone(), settings.record.is_some())?),
        };
        let model = match &settings.record {
            Some(file) => Arc::new(Recorder::new(model, records.join(file))) as Arc<dyn Model>,
            None => model,
        };
        chain.push((settings.name().to_owned(), model));
    }
    Ok(Arc::new(Chain::new(chain)))
}
