//! The OpenAPI document. A route is added to the router together with its description, whose schemas come from the types that
//! the handlers read and write; so there is no route that the document does not name, and none that it makes up.

use std::collections::BTreeMap;

use axum::Router;
use axum::handler::Handler;
use axum::http::{Method, StatusCode};
use axum::routing::{MethodFilter, on};
use schemars::generate::{Contract, SchemaSettings};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use toolproto::digest::Digest;
use toolproto::ids::JobId;
use toolproto::job::Problem;

const COMPONENTS: &str = "/components/schemas";
const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// A request that the API takes, and what may come back.
pub(super) struct Operation {
    method: Method,
    path: &'static str,
    id: &'static str,
    summary: &'static str,
    query: Option<SchemaOf>,
    header: Option<(&'static str, &'static str)>,
    body: Option<SchemaOf>,
    answers: Vec<Answer>,
    refusals: Vec<StatusCode>,
}

type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

struct Answer {
    status: StatusCode,
    meaning: &'static str,
    content: Content,
}

enum Content {
    /// JSON of this schema.
    Json(SchemaOf),
    /// Text of this media type.
    Text(&'static str),
    /// None: the connection is no HTTP from then on.
    Upgraded,
}

impl Operation {
    const fn new(method: Method, path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self {
            method,
            path,
            id,
            summary,
            query: None,
            header: None,
            body: None,
            answers: Vec::new(),
            refusals: Vec::new(),
        }
    }

    /// A request that changes nothing.
    pub(super) const fn get(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::GET, path, id, summary)
    }

    /// A request that does something, with a body of this type.
    pub(super) fn post<T: JsonSchema>(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self { body: Some(SchemaGenerator::subschema_for::<T>), ..Self::bare_post(path, id, summary) }.refused(&[
            StatusCode::BAD_REQUEST,
            StatusCode::PAYLOAD_TOO_LARGE,
            StatusCode::UNPROCESSABLE_ENTITY,
        ])
    }

    /// A request that does something, without a body.
    pub(super) fn bare_post(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        // The daemon stops, or has too much to do.
        Self::new(Method::POST, path, id, summary).refused(&[StatusCode::SERVICE_UNAVAILABLE])
    }

    /// What may stand after the question mark: the fields of this type.
    pub(super) fn query<T: JsonSchema>(self) -> Self {
        Self { query: Some(T::json_schema), ..self }.refused(&[StatusCode::BAD_REQUEST])
    }

    /// A header that may be sent, and what it says.
    pub(super) fn header(self, name: &'static str, meaning: &'static str) -> Self {
        Self { header: Some((name, meaning)), ..self }.refused(&[StatusCode::BAD_REQUEST])
    }

    /// An answer with a body of this type.
    pub(super) fn answers<T: JsonSchema>(self, status: StatusCode, meaning: &'static str) -> Self {
        self.answer(status, meaning, Content::Json(SchemaGenerator::subschema_for::<T>))
    }

    /// An answer in another form.
    pub(super) fn answers_text(self, media_type: &'static str, meaning: &'static str) -> Self {
        self.answer(StatusCode::OK, meaning, Content::Text(media_type))
    }

    /// The connection is handed over.
    pub(super) fn upgrades(self, meaning: &'static str) -> Self {
        self.answer(StatusCode::SWITCHING_PROTOCOLS, meaning, Content::Upgraded)
    }

    fn answer(mut self, status: StatusCode, meaning: &'static str, content: Content) -> Self {
        self.answers.push(Answer { status, meaning, content });
        self
    }

    /// Statuses of refusals, besides those that follow from what the request holds.
    pub(super) fn refused(mut self, statuses: &[StatusCode]) -> Self {
        self.refusals.extend(statuses);
        self
    }
}

/// Routes and their descriptions.
pub(super) struct Routes<S> {
    router: Router<S>,
    document: Document,
}

impl<S: Clone + Send + Sync + 'static> Routes<S> {
    pub(super) fn new() -> Self {
        Self { router: Router::new(), document: Document::new() }
    }

    /// Adds a route.
    pub(super) fn route<H, T>(mut self, operation: &Operation, handler: H) -> Self
    where
        H: Handler<T, S>,
        T: 'static,
    {
        self.document.add(operation);
        let filter = if operation.method == Method::POST { MethodFilter::POST } else { MethodFilter::GET };
        Self { router: self.router.route(operation.path, on(filter, handler)), ..self }
    }

    /// The routes, and the document that describes them.
    pub(super) fn finish(self) -> (Router<S>, Value) {
        (self.router, self.document.finish())
    }
}

struct Document {
    paths: BTreeMap<&'static str, Map<String, Value>>,
    /// Of what clients write: what has a default may be missing.
    read: SchemaGenerator,
    /// Of what agentd writes: it is there.
    written: SchemaGenerator,
}

impl Document {
    fn new() -> Self {
        let generator = |contract| {
            let mut settings = SchemaSettings::draft2020_12();
            settings.definitions_path = COMPONENTS.into();
            settings.contract = contract;
            settings.into_generator()
        };
        Self { paths: BTreeMap::new(), read: generator(Contract::Deserialize), written: generator(Contract::Serialize) }
    }

    fn add(&mut self, operation: &Operation) {
        let mut description = json!({
            "operationId": operation.id,
            "summary": operation.summary,
            "parameters": self.parameters(operation),
            "responses": self.responses(operation),
        });
        if let Some(schema) = operation.body {
            let content = json!({JSON: {"schema": schema(&mut self.read)}});
            description["requestBody"] = json!({"required": true, "content": content});
        }
        let method = operation.method.as_str().to_ascii_lowercase();
        self.paths.entry(operation.path).or_default().insert(method, description);
    }

    fn parameters(&mut self, operation: &Operation) -> Vec<Value> {
        let mut parameters = Vec::new();
        if operation.path.contains("{id}") {
            let schema = self.read.subschema_for::<JobId>();
            parameters.push(json!({"name": "id", "in": "path", "required": true, "schema": schema}));
        }
        if operation.path.contains("{name}") {
            parameters.push(json!({"name": "name", "in": "path", "required": true, "schema": {"type": "string"}}));
        }
        if operation.path.contains("{reference}") {
            let schema = self.read.subschema_for::<Digest>();
            parameters.push(json!({"name": "reference", "in": "path", "required": true, "schema": schema}));
        }
        if let Some(schema) = operation.query {
            let schema = schema(&mut self.read);
            for (name, schema) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
                let mut schema = schema.clone();
                let description = schema.as_object_mut().and_then(|schema| schema.remove("description"));
                parameters.push(json!({"name": name, "in": "query", "description": description, "schema": schema}));
            }
        }
        if let Some((name, meaning)) = operation.header {
            let schema = json!({"type": "string"});
            parameters.push(json!({"name": name, "in": "header", "description": meaning, "schema": schema}));
        }
        parameters
    }

    fn responses(&mut self, operation: &Operation) -> Map<String, Value> {
        let mut responses = Map::new();
        for answer in &operation.answers {
            let mut response = json!({"description": answer.meaning});
            match answer.content {
                Content::Json(schema) => {
                    response["content"] = json!({JSON: {"schema": schema(&mut self.written)}});
                }
                Content::Text(media_type) => {
                    response["content"] = json!({media_type: {"schema": {"type": "string"}}});
                }
                Content::Upgraded => {}
            }
            responses.insert(answer.status.as_str().to_owned(), response);
        }
        let schema = self.written.subschema_for::<Problem>();
        let names_something = operation.path.contains('{').then_some(StatusCode::NOT_FOUND);
        // The socket's group may be asked about by anybody; whose job it is, and who may do what, is judged for each request.
        for status in operation.refusals.iter().copied().chain([StatusCode::FORBIDDEN]).chain(names_something) {
            let description = status.canonical_reason().unwrap_or_default();
            let refusal = json!({"description": description, "content": {PROBLEM: {"schema": schema}}});
            responses.insert(status.as_str().to_owned(), refusal);
        }
        responses
    }

    fn finish(mut self) -> Value {
        let mut schemas = self.read.take_definitions(true);
        schemas.extend(self.written.take_definitions(true));
        json!({
            "openapi": "3.1.0",
            "info": {
                "title": "agentd",
                "version": env!("CARGO_PKG_VERSION"),
                "description": "Agent jobs and single tool calls, over agentd's Unix socket. Refusals are RFC 9457 problem \
                    details with a `code`; unknown fields of bodies are ignored.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "servers": [{"url": "/v1"}],
            "paths": self.paths,
            "components": {"schemas": schemas},
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::scripted::ScriptedLaunch;

    /// The document in the repository, for those who write clients without a daemon at hand.
    const KEPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");

    fn document() -> Value {
        super::super::described::<Arc<ScriptedLaunch>>().finish().1
    }

    #[test]
    fn the_kept_document_is_what_the_daemon_serves() {
        let text = serde_json::to_string_pretty(&document()).unwrap() + "\n";
        if std::env::var_os("AGENTD_WRITE_DOCS").is_some() {
            std::fs::write(KEPT, &text).unwrap();
        }
        let kept = std::fs::read_to_string(KEPT).unwrap_or_default();
        assert!(
            kept == text,
            "docs/openapi.json is another one: AGENTD_WRITE_DOCS=1 cargo test --workspace --lib -- api::openapi"
        );
    }

    #[test]
    fn every_reference_leads_to_a_schema() {
        let document = document();
        let mut references = Vec::new();
        collect(&document, &mut references);
        assert!(references.len() > 20, "{references:?}");
        for reference in references {
            let pointer = reference.trim_start_matches('#');
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }

    fn collect<'a>(value: &'a Value, references: &mut Vec<&'a str>) {
        match value {
            Value::Object(object) => {
                references.extend(object.get("$ref").and_then(Value::as_str));
                object.values().for_each(|value| collect(value, references));
            }
            Value::Array(array) => array.iter().for_each(|value| collect(value, references)),
            _ => {}
        }
    }

    #[test]
    fn a_type_that_is_read_and_written_has_one_schema() {
        let mut routes = super::super::described::<Arc<ScriptedLaunch>>();
        let read = routes.document.read.take_definitions(true);
        let written = routes.document.written.take_definitions(true);
        for (name, schema) in &read {
            assert!(written.get(name).is_none_or(|other| other == schema), "{name} has two schemas");
        }
    }

    #[test]
    fn what_a_client_may_leave_out_is_not_required_and_what_agentd_writes_is() {
        let document = document();
        let required = |name: &str| document["components"]["schemas"][name]["required"].clone();
        assert_eq!(required("JobRequest"), json!(["version", "agent", "goal"]));
        assert!(required("Health").as_array().unwrap().contains(&json!("jobs_queued")));
        let parameters = document["paths"]["/jobs"]["get"]["parameters"].as_array().unwrap();
        assert!(parameters.iter().any(|one| one["name"] == "before" && one["in"] == "query"), "{parameters:?}");
    }
}
