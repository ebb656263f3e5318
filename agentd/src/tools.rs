//! The tools, with their schemas compiled: what calls are checked against and models are offered.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sandbox::protocol::Narrowing;
use toolproto::api::ToolView;
use toolproto::digest::Digest;
use toolproto::manifest::ToolManifest;
use toolproto::source::FileError;

use crate::extension::Extension;
use crate::model::ToolOffer;
use crate::outlines::Outlines;
use crate::runtimes::Runtime;
use crate::schema::Schema;

/// A tool, ready to be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its manifest.
    pub manifest: ToolManifest,
    /// The digest of its folder.
    pub digest: Digest,
    /// What its arguments must satisfy.
    pub input: Schema,
    /// What its result must satisfy.
    pub output: Option<Schema>,
    /// How long a call may take.
    pub time: Duration,
    /// Whether a call of it leaves no trace unless it is committed: it reaches no host, and what it writes goes into a layer.
    /// Each launch asks for that, so that it holds also when the policy has become another one meanwhile.
    pub discardable: bool,
}

/// All tools, by name, the extensions that watch over their use, and what they run on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    tools: BTreeMap<String, Arc<Tool>>,
    extensions: BTreeMap<String, Arc<Extension>>,
    runtimes: BTreeMap<String, Runtime>,
    outlines: Outlines,
}

impl Tool {
    /// A tool of the catalogue: compiles the schemas that its manifest names, in its folder.
    ///
    /// # Errors
    /// When a schema cannot be read or used.
    pub fn load(
        folder: &Path,
        manifest: ToolManifest,
        digest: Digest,
        time: Duration,
        discardable: bool,
    ) -> Result<Self, FileError> {
        let schema = |name: &Path| {
            let file = folder.join(name);
            let bytes =
                std::fs::read(&file).map_err(|error| FileError::whole(&file, format!("cannot be read: {error}")))?;
            let value = toolproto::strict_json::parse(&bytes)
                .map_err(|error| FileError::whole(&file, format!("not JSON: {error}")))?;
            Schema::compile(value).map_err(|error| FileError::whole(&file, error.to_string()))
        };
        let input = schema(&manifest.input_schema)?;
        let output = manifest.output_schema.as_deref().map(schema).transpose()?;
        Ok(Self { manifest, digest, input, output, time, discardable })
    }

    /// What each of its calls is narrowed by.
    #[must_use]
    pub fn narrowing(&self) -> Narrowing {
        Narrowing { discardable: self.discardable, ..Narrowing::default() }
    }

    /// As a model is told of it.
    #[must_use]
    pub fn offer(&self) -> ToolOffer {
        ToolOffer {
            name: self.manifest.name.clone(),
            description: self.manifest.description.clone(),
            parameters: self.input.source().clone(),
        }
    }

    /// As `GET /tools` shows it.
    #[must_use]
    pub fn view(&self) -> ToolView {
        let manifest = &self.manifest;
        ToolView {
            name: manifest.name.clone(),
            version: manifest.version,
            description: manifest.description.clone(),
            digest: self.digest,
            runtime: manifest.program.runtime.clone(),
            runtime_version: None,
            policy: manifest.program.policy.clone(),
            effects: manifest.execution.effects.as_str().to_owned(),
            exclusive: manifest.execution.exclusive,
            idempotent: manifest.execution.idempotent,
            timeout_ms: u64::try_from(self.time.as_millis()).unwrap_or(u64::MAX),
            max_response_bytes: manifest.program.max_response.0,
            spill_bytes: manifest.spill.map(|spill| spill.0),
            hosts: manifest.program.hosts.clone(),
            input_schema: self.input.source().clone(),
            output_schema: self.output.as_ref().map(|output| output.source().clone()),
            breaker: None,
        }
    }
}

impl Tools {
    /// The tool of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<Tool>> {
        self.tools.get(name)
    }

    /// Whether a call of a tool may be run again when it is not known whether it ran: it changes nothing, repeating it does no
    /// harm, or what it did was thrown away. That must hold of the tool that may be tried instead, too.
    #[must_use]
    pub fn is_repeatable(&self, name: &str) -> bool {
        let harmless = |tool: &Tool| {
            let execution = &tool.manifest.execution;
            execution.idempotent || execution.concurrent || tool.discardable
        };
        self.get(name).is_some_and(|tool| {
            let instead = tool.manifest.retry.fallback.as_deref().map(|fallback| self.get(fallback));
            harmless(tool) && instead.is_none_or(|instead| instead.is_some_and(|tool| harmless(tool)))
        })
    }

    /// All tools, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Tool>> {
        self.tools.values()
    }

    /// These tools, with extensions.
    #[must_use]
    pub fn with_extensions(self, extensions: impl IntoIterator<Item = Extension>) -> Self {
        let named = |extension: Extension| (extension.manifest.name.clone(), Arc::new(extension));
        Self { extensions: extensions.into_iter().map(named).collect(), ..self }
    }

    /// These tools, with the runtimes that can be tried.
    #[must_use]
    pub fn with_runtimes(self, runtimes: impl IntoIterator<Item = Runtime>) -> Self {
        let named = |runtime: Runtime| (runtime.name.clone(), runtime);
        Self { runtimes: runtimes.into_iter().map(named).collect(), ..self }
    }

    /// These tools, with what the plans of their calls, and of commands, say about paths.
    #[must_use]
    pub fn with_outlines(self, outlines: Outlines) -> Self {
        Self { outlines, ..self }
    }

    /// What plans say about paths.
    #[must_use]
    pub const fn outlines(&self) -> &Outlines {
        &self.outlines
    }

    /// The runtime of this name, if it can be tried.
    #[must_use]
    pub fn runtime(&self, name: &str) -> Option<&Runtime> {
        self.runtimes.get(name)
    }

    /// The extension of this name.
    #[must_use]
    pub fn extension(&self, name: &str) -> Option<&Arc<Extension>> {
        self.extensions.get(name)
    }

    /// All extensions, by name.
    pub fn extensions(&self) -> impl Iterator<Item = &Arc<Extension>> {
        self.extensions.values()
    }
}

impl FromIterator<Tool> for Tools {
    fn from_iter<I: IntoIterator<Item = Tool>>(tools: I) -> Self {
        let tools = tools.into_iter().map(|tool| (tool.manifest.name.clone(), Arc::new(tool))).collect();
        Self { tools, ..Self::default() }
    }
}
