//! The `[model]` section of an agent: who is asked, and who instead.

use std::path::{Path, PathBuf};

use secrecy::SecretString;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Thinking;

/// One model, as it is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSettings {
    /// Who answers.
    pub provider: Provider,
    /// The cassette that its conversations are added to: a file name in the ledger's directory.
    pub record: Option<PathBuf>,
}

/// Who answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Provider {
    /// A server that speaks chat completions.
    OpenAi(Endpoint),
    /// A server that speaks OpenAI Responses.
    Responses(Endpoint),
    /// A server that speaks Anthropic Messages.
    Anthropic(Endpoint),
    /// A recorded conversation.
    Replay {
        /// The cassette's file.
        cassette: PathBuf,
    },
}

impl Provider {
    /// The provider's and the model's name in traces: `gen_ai.provider.name` and `gen_ai.request.model` of OpenTelemetry's
    /// conventions.
    #[must_use]
    pub fn names(&self) -> (&'static str, &str) {
        match self {
            Self::OpenAi(endpoint) | Self::Responses(endpoint) => ("openai", &endpoint.model),
            Self::Anthropic(endpoint) => ("anthropic", &endpoint.model),
            Self::Replay { .. } => ("replay", "replay"),
        }
    }
}

/// A model behind HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// Where; without a slash at the end.
    pub base_url: String,
    /// The model's name there; also the name of its `[model.NAME]` in agentd.toml.
    pub model: String,
    /// Where the key is, if one is needed.
    pub api_key: Option<Credential>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Nucleus sampling.
    pub top_p: Option<f64>,
    /// The most tokens of one answer.
    pub max_output_tokens: Option<u64>,
    /// What is added to a request in which the model is not to think.
    pub thinking_off: Map<String, Value>,
}

impl Endpoint {
    /// Adds to a request's body what turns thinking off, if it is to be off.
    pub(super) fn switch(&self, thinking: Thinking, body: &mut Value) {
        if let (Thinking::Off, Some(body)) = (thinking, body.as_object_mut()) {
            body.extend(self.thinking_off.clone());
        }
    }
}

/// A reference to a secret; never the secret itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Credential {
    /// `env:NAME`: a variable of agentd's environment.
    Environment(String),
    /// `credential:NAME`: a file in `$CREDENTIALS_DIRECTORY` (systemd.exec(5), LoadCredential=).
    File(String),
}

/// A secret that is not there.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    /// The variable is not set.
    #[error("the environment variable `{0}` is not set")]
    Unset(String),
    /// There is no directory of credentials.
    #[error("credential `{0}` is asked for, but CREDENTIALS_DIRECTORY is not set")]
    NoDirectory(String),
    /// The file cannot be read.
    #[error("credential `{name}` cannot be read")]
    Unreadable {
        /// Its name.
        name: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

impl Credential {
    /// Looks the secret up.
    ///
    /// # Errors
    /// When it is not there.
    pub fn reveal(&self) -> Result<SecretString, CredentialError> {
        match self {
            Self::Environment(name) => {
                std::env::var(name).map(SecretString::from).map_err(|_| CredentialError::Unset(name.clone()))
            }
            Self::File(name) => {
                let directory = std::env::var_os("CREDENTIALS_DIRECTORY")
                    .ok_or_else(|| CredentialError::NoDirectory(name.clone()))?;
                std::fs::read_to_string(Path::new(&directory).join(name))
                    .map(|text| SecretString::from(text.trim_end_matches(['\r', '\n']).to_owned()))
                    .map_err(|source| CredentialError::Unreadable { name: name.clone(), source })
            }
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let plain = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
        };
        let (kind, name) = text.split_once(':')?;
        match kind {
            "env" if plain(name) => Some(Self::Environment(name.to_owned())),
            "credential" if plain(name) && name != ".." && name != "." => Some(Self::File(name.to_owned())),
            _ => None,
        }
    }
}

impl ModelSettings {
    /// The model's name at its server; `replay` for a recorded conversation.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.provider {
            Provider::OpenAi(endpoint) | Provider::Responses(endpoint) | Provider::Anthropic(endpoint) => {
                &endpoint.model
            }
            Provider::Replay { .. } => "replay",
        }
    }
}

/// `[model]` as it stands in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFile {
    provider: ProviderName,
    base_url: Option<String>,
    model: Option<String>,
    api_key: Option<String>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    max_output_tokens: Option<u64>,
    thinking_off: Option<Map<String, Value>>,
    cassette: Option<PathBuf>,
    record: Option<PathBuf>,
    #[serde(default)]
    fallback: Vec<ModelFile>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ProviderName {
    #[serde(rename = "openai")]
    OpenAi,
    Anthropic,
    Responses,
    Replay,
}

/// What is wrong with a `[model]` section.
#[derive(Debug)]
pub struct Misfit {
    /// The table.
    pub table: &'static str,
    /// The key.
    pub key: &'static str,
    /// In words.
    pub reason: String,
}

impl ModelFile {
    /// The models that the section names: the first, then its fallbacks.
    ///
    /// # Errors
    /// When a key is missing or does not belong to the provider.
    pub fn checked(self, folder: &Path) -> Result<Vec<ModelSettings>, Misfit> {
        let fallbacks = self.fallback;
        let mut models = vec![Self { fallback: Vec::new(), ..self }.one(folder, "model")?];
        for fallback in fallbacks {
            if !fallback.fallback.is_empty() {
                let reason = "a fallback has no fallbacks of its own; list them one after the other".to_owned();
                return Err(Misfit { table: "model.fallback", key: "fallback", reason });
            }
            models.push(fallback.one(folder, "model.fallback")?);
        }
        Ok(models)
    }

    fn one(self, folder: &Path, table: &'static str) -> Result<ModelSettings, Misfit> {
        let misfit = |key: &'static str, reason: &str| Misfit { table, key, reason: reason.to_owned() };
        if let Some(record) = &self.record
            && (record.components().count() != 1 || record.file_name().is_none())
        {
            return Err(misfit("record", "record must be a plain file name; it lies in the state directory's ledger/"));
        }
        let record = self.record.clone();
        let provider = match self.provider {
            ProviderName::Replay => {
                for (key, given) in [
                    ("base_url", self.base_url.is_some()),
                    ("model", self.model.is_some()),
                    ("api_key", self.api_key.is_some()),
                    ("temperature", self.temperature.is_some()),
                    ("top_p", self.top_p.is_some()),
                    ("max_output_tokens", self.max_output_tokens.is_some()),
                    ("thinking_off", self.thinking_off.is_some()),
                ] {
                    if given {
                        return Err(misfit(key, &format!("{key} means nothing to provider `replay`; remove it")));
                    }
                }
                let cassette = self.cassette.ok_or_else(|| misfit("provider", "provider `replay` needs a cassette"))?;
                Provider::Replay { cassette: folder.join(cassette) }
            }
            ProviderName::OpenAi => Provider::OpenAi(self.endpoint(&misfit)?),
            ProviderName::Anthropic => Provider::Anthropic(self.endpoint(&misfit)?),
            ProviderName::Responses => Provider::Responses(self.endpoint(&misfit)?),
        };
        Ok(ModelSettings { provider, record })
    }

    fn endpoint(self, misfit: &dyn Fn(&'static str, &str) -> Misfit) -> Result<Endpoint, Misfit> {
        if self.cassette.is_some() {
            return Err(misfit("cassette", "a cassette belongs to provider `replay`; remove it, or use `record`"));
        }
        let base_url = self.base_url.ok_or_else(|| misfit("provider", "base_url is missing"))?;
        let is_url = reqwest::Url::parse(&base_url).is_ok_and(|url| matches!(url.scheme(), "http" | "https"));
        if !is_url {
            return Err(misfit("base_url", "base_url must be a URL that begins with https:// or http://"));
        }
        let api_key = match self.api_key.as_deref().map(Credential::parse) {
            None => None,
            Some(Some(credential)) => Some(credential),
            // The text is not repeated: it may be a key.
            Some(None) => {
                let reason = "api_key must be a reference, `env:NAME` or `credential:NAME`, never the key itself";
                return Err(misfit("api_key", reason));
            }
        };
        if self.max_output_tokens == Some(0) {
            return Err(misfit("max_output_tokens", "max_output_tokens must be at least 1"));
        }
        Ok(Endpoint {
            base_url: base_url.trim_end_matches('/').to_owned(),
            model: self.model.ok_or_else(|| misfit("provider", "model is missing"))?,
            api_key,
            temperature: self.temperature,
            top_p: self.top_p,
            max_output_tokens: self.max_output_tokens,
            thinking_off: self.thinking_off.unwrap_or_else(|| default_switch(self.provider)),
        })
    }
}

/// How most servers of a format are told that a model is not to think.
fn default_switch(provider: ProviderName) -> Map<String, Value> {
    let switch = match provider {
        ProviderName::OpenAi => json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ProviderName::Responses => json!({"reasoning": {"effort": "none"}}),
        ProviderName::Anthropic => json!({"thinking": {"type": "disabled"}}),
        ProviderName::Replay => Value::Null,
    };
    match switch {
        Value::Object(switch) => switch,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<Vec<ModelSettings>, Misfit> {
        toml::from_str::<ModelFile>(text).unwrap().checked(Path::new("/etc/agentd/agents"))
    }

    #[test]
    fn models_come_in_the_order_in_which_they_are_asked() {
        let models = checked(
            "provider = \"openai\"\nbase_url = \"https://a.example/v1/\"\nmodel = \"m\"\napi_key = \"env:KEY\"\n\
             [[fallback]]\nprovider = \"replay\"\ncassette = \"c.jsonl\"\nrecord = \"out.jsonl\"\n",
        )
        .unwrap();
        assert_eq!(models.iter().map(ModelSettings::name).collect::<Vec<_>>(), ["m", "replay"]);
        let Provider::OpenAi(endpoint) = &models[0].provider else { panic!("another provider") };
        assert_eq!(endpoint.base_url, "https://a.example/v1");
        assert_eq!(endpoint.api_key, Some(Credential::Environment("KEY".to_owned())));
    }

    #[test]
    fn keys_in_files_and_meaningless_settings_are_refused() {
        let cases = [
            ("provider = \"openai\"\nbase_url = \"https://a\"\nmodel = \"m\"\napi_key = \"sk-123\"", "api_key"),
            ("provider = \"openai\"\nbase_url = \"ftp://a\"\nmodel = \"m\"", "base_url"),
            ("provider = \"openai\"\nbase_url = \"https://a\"", "provider"),
            ("provider = \"replay\"\ncassette = \"c\"\ntemperature = 0.5", "temperature"),
            ("provider = \"replay\"", "provider"),
            ("provider = \"replay\"\ncassette = \"c\"\nrecord = \"../x\"", "record"),
        ];
        for (text, key) in cases {
            let misfit = checked(text).unwrap_err();
            assert_eq!(misfit.key, key, "{text}");
            assert!(!misfit.reason.contains("sk-123"));
        }
    }
}
