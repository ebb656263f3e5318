//! A strict model server that answers from a script.
//!
//! It speaks OpenAI chat completions, OpenAI Responses and Anthropic Messages, streaming or not, checks every request as the
//! real provider does (and answers what that would refuse with the provider's own error), and goes wrong where the script
//! says so. Tests start it within their process; `scripted-model` is the same by hand.
//!
//! ```text
//! request → path and key → JSON → the format's checks → the script's turn → its faults, one per attempt → the answer
//!              401, 404     400          400                 400 when over
//! ```
//!
//! A refused request uses no turn. Everything that came is kept for the test to look at.

mod answer;
mod chat;
mod http;
mod messages;
mod refusal;
mod responses;
mod script;
mod shape;

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use answer::Answer;
use http::{Connection, Gone, HttpRequest};
pub use refusal::Refusal;
pub use script::{
    Call, Conversation, Dialect, Expect, Fault, Order, Pace, Quirk, Script, ScriptError, Tokens, Trouble, Turn,
};

/// A wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenAI chat completions, `/v1/chat/completions`.
    Chat,
    /// OpenAI Responses, `/v1/responses`.
    Responses,
    /// Anthropic Messages, `/v1/messages`.
    Messages,
}

/// A request that the server got, and what became of it.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The format.
    pub format: Format,
    /// Header names in lower case, with values.
    pub headers: Vec<(String, String)>,
    /// The body; null when it was not JSON.
    pub body: Value,
    /// Since the server's start.
    pub at: Duration,
    /// How it was answered.
    pub reply: Reply,
}

/// How a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// With the turn of this number, counted from 0.
    Turn(usize),
    /// With a fault before the turn of this number.
    Fault(usize),
    /// As the client's mistake.
    Refused(Refusal),
}

/// One event of a stream.
#[derive(Clone, Debug)]
struct Event {
    name: Option<String>,
    data: String,
}

impl Event {
    fn unnamed(data: String) -> Self {
        Self { name: None, data }
    }

    fn bytes(&self, turn: &Turn) -> Vec<u8> {
        let end = if turn.has(Quirk::Crlf) { "\r\n" } else { "\n" };
        let colon = if turn.has(Quirk::NoSpace) { ":" } else { ": " };
        let mut text = String::new();
        if let Some(name) = &self.name {
            text.push_str(&format!("event{colon}{name}{end}"));
        }
        let data = match self.data.strip_prefix('{') {
            Some(rest) if turn.has(Quirk::SplitData) => format!("{{{end}data{colon}{rest}"),
            _ => self.data.clone(),
        };
        text.push_str(&format!("data{colon}{data}{end}{end}"));
        text.into_bytes()
    }
}

/// What the server has given to its clients, to know it again.
#[derive(Debug, Default)]
struct Issued {
    /// Call id → reasoning text and reasoning item's id.
    calls: HashMap<String, (String, String)>,
}

impl Issued {
    fn note(&mut self, answer: &Answer) {
        if answer.reasoning.is_empty() {
            return;
        }
        for id in answer.calls.iter().filter_map(|call| call.id.as_ref()) {
            self.calls.insert(id.clone(), (answer.reasoning.clone(), responses::reasoning_id(answer)));
        }
    }

    fn reasoning_of(&self, call: &str) -> Option<&str> {
        self.calls.get(call).map(|(reasoning, _)| reasoning.as_str())
    }

    fn reasoning_item_of(&self, call: &str) -> Option<&str> {
        self.calls.get(call).map(|(_, item)| item.as_str())
    }
}

struct State {
    script: Script,
    /// Per conversation (`None` is the script's own turns): the next turn.
    next: HashMap<Option<usize>, usize>,
    /// Attempts so far at a turn.
    attempts: HashMap<(Option<usize>, usize), usize>,
    issued: Issued,
    requests: Vec<Recorded>,
    answers: u64,
}

/// Sees each request when its reply is decided.
pub type Observer = Box<dyn Fn(&Recorded) + Send + Sync>;

struct Shared {
    state: Mutex<State>,
    stopped: Arc<AtomicBool>,
    started: Instant,
    observer: Option<Observer>,
}

impl Shared {
    /// A test that panicked while it looked at the requests must not hide what the others see.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running server; it stops when dropped.
pub struct ModelServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl ModelServer {
    /// Starts on a free port of 127.0.0.1.
    pub fn start(script: Script) -> io::Result<Self> {
        Self::listen(script, SocketAddr::from(([127, 0, 0, 1], 0)), None)
    }

    /// Starts on an address.
    pub fn listen(script: Script, address: SocketAddr, observer: Option<Observer>) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let state = State {
            script,
            next: HashMap::new(),
            attempts: HashMap::new(),
            issued: Issued::default(),
            requests: Vec::new(),
            answers: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            stopped: Arc::new(AtomicBool::new(false)),
            started: Instant::now(),
            observer,
        });
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::Builder::new().name("model-server".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                if accepting.stopped.load(Ordering::Relaxed) {
                    break;
                }
                if let Ok(stream) = stream {
                    let shared = Arc::clone(&accepting);
                    std::thread::spawn(move || serve(stream, &shared));
                }
            }
        })?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What a client of OpenAI's formats takes as base URL; Anthropic's clients leave out the `/v1`.
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.state().requests.clone()
    }

    /// The requests that were refused as the client's mistake. Empty after a good test.
    pub fn refusals(&self) -> Vec<Refusal> {
        let state = self.shared.state();
        let replies = state.requests.iter().map(|recorded| &recorded.reply);
        replies
            .filter_map(|reply| if let Reply::Refused(refusal) = reply { Some(refusal.clone()) } else { None })
            .collect()
    }

    /// How many turns of the script's own conversation have not been given yet.
    pub fn turns_left(&self) -> usize {
        let state = self.shared.state();
        state.script.turns.len() - state.next.get(&None).copied().unwrap_or(0).min(state.script.turns.len())
    }

    /// Adds a turn to the end of the script's own conversation.
    pub fn push(&self, turn: Turn) {
        self.shared.state().script.turns.push(turn);
    }

    /// Waits until the server is stopped from elsewhere: for the program.
    pub fn wait(mut self) {
        if let Some(acceptor) = self.acceptor.take() {
            // The thread ends only with the process, or with a panic that was printed already.
            let _ = acceptor.join();
        }
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            // Wakes the acceptor; where that fails it has gone already.
            let _ = TcpStream::connect(self.address);
            let _ = acceptor.join();
        }
    }
}

fn serve(stream: TcpStream, shared: &Shared) {
    let Ok(mut connection) = Connection::new(stream, Arc::clone(&shared.stopped)) else { return };
    while let Ok(request) = connection.read_request() {
        if answer_request(&mut connection, &request, shared).is_err() {
            return;
        }
    }
}

fn answer_request(connection: &mut Connection, request: &HttpRequest, shared: &Shared) -> Result<(), Gone> {
    let path = request.path.split('?').next().unwrap_or_default();
    let format = match path.strip_prefix("/v1").unwrap_or(path) {
        "/chat/completions" => Format::Chat,
        "/responses" => Format::Responses,
        "/messages" => Format::Messages,
        "/models" if request.method == "GET" => {
            let models =
                json!({"object": "list", "data": [{"id": "scripted", "object": "model", "owned_by": "tests"}]});
            return respond_json(connection, 200, &[], &models);
        }
        other => {
            let refusal = Refusal::bad(format!("Invalid URL ({} {other})", request.method)).with_status(404);
            return respond_json(connection, 404, &[], &refusal.body(Format::Chat));
        }
    };
    if request.method != "POST" {
        let refusal = Refusal::bad(format!("Not allowed to {} on {path}.", request.method)).with_status(405);
        return respond_json(connection, 405, &[("allow", "POST")], &refusal.body(format));
    }
    let parsed = parse(request, format);
    let body = parsed.as_ref().map_or(Value::Null, Value::clone);
    let decided = decide(parsed, request, format, shared);
    let reply = match &decided {
        Ok(Decided::Answer(turn, _)) => Reply::Turn(*turn),
        Ok(Decided::Fault(turn, _, _)) => Reply::Fault(*turn),
        Err(refusal) => Reply::Refused(refusal.clone()),
    };
    let recorded =
        Recorded { format, headers: request.headers.clone(), body: body.clone(), at: shared.started.elapsed(), reply };
    if let Some(observer) = &shared.observer {
        observer(&recorded);
    }
    shared.state().requests.push(recorded);
    match decided {
        Ok(Decided::Answer(_, answer)) => send(connection, format, &body, &answer, None),
        Ok(Decided::Fault(_, answer, fault)) => send_fault(connection, format, &body, &answer, &fault),
        Err(refusal) => respond_json(connection, refusal.status, &[], &refusal.body(format)),
    }
}

fn parse(request: &HttpRequest, format: Format) -> Result<Value, Refusal> {
    let is_json = request.header("content-type").is_some_and(|kind| kind.starts_with("application/json"));
    if !is_json {
        return Err(Refusal::bad("Unsupported content type: expected 'application/json'."));
    }
    if format == Format::Messages && request.header("anthropic-version").is_none() {
        return Err(Refusal::at("anthropic-version", "header is required"));
    }
    toolproto::strict_json::parse(&request.body)
        .map_err(|error| Refusal::bad(format!("We could not parse the JSON body of your request: {error}")))
}

enum Decided {
    Answer(usize, Box<Answer>),
    Fault(usize, Box<Answer>, Fault),
}

fn decide(
    parsed: Result<Value, Refusal>,
    request: &HttpRequest,
    format: Format,
    shared: &Shared,
) -> Result<Decided, Refusal> {
    let mut guard = shared.state();
    let state = &mut *guard;
    check_key(request, format, state.script.api_key.as_deref())?;
    let body = parsed?;
    let dialect = state.script.dialect.clone();
    match format {
        Format::Chat => chat::check(&body, &dialect, &state.issued)?,
        Format::Responses => responses::check(&body, &state.issued)?,
        Format::Messages => messages::check(&body, &dialect, &state.issued)?,
    }
    let transcript = strings(body.get(if format == Format::Responses { "input" } else { "messages" }));
    let first = first_user_text(&body, format);
    let conversation = state.script.conversations.iter().position(|one| first.contains(&one.when));
    let turns = match conversation {
        Some(index) => &state.script.conversations[index].turns,
        None => &state.script.turns,
    };
    let number = match state.script.order {
        Order::Request => state.next.get(&conversation).copied().unwrap_or(0),
        Order::Transcript if format == Format::Responses => responses::assistant_turns(&body),
        Order::Transcript => chat::assistant_turns(&body),
    };
    let Some(turn) = turns.get(number) else {
        return Err(Refusal::bad(format!(
            "The script has {} turns; this would be number {}.",
            turns.len(),
            number + 1
        ))
        .with_code("script_exhausted"));
    };
    check_expectations(turn, &transcript, &body, number)?;
    let model = body["model"].as_str().unwrap_or_default();
    let answer = Answer::new(turn, state.answers + 1, model, format, dialect.id_length);
    let attempts = state.attempts.entry((conversation, number)).or_default();
    let fault = turn.before.get(*attempts).cloned();
    *attempts += 1;
    match fault {
        Some(fault) => Ok(Decided::Fault(number, Box::new(answer), fault)),
        None => {
            state.next.insert(conversation, number + 1);
            state.answers += 1;
            state.issued.note(&answer);
            Ok(Decided::Answer(number, Box::new(answer)))
        }
    }
}

fn check_key(request: &HttpRequest, format: Format, wanted: Option<&str>) -> Result<(), Refusal> {
    let bearer = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
    let given = if format == Format::Messages { request.header("x-api-key").or(bearer) } else { bearer };
    match (wanted, given) {
        (None, _) => Ok(()),
        (Some(wanted), Some(given)) if wanted == given => Ok(()),
        (Some(_), Some(_)) if format == Format::Messages => Err(Refusal::bad("invalid x-api-key").with_status(401)),
        (Some(_), Some(_)) => {
            Err(Refusal::bad("Incorrect API key provided.").with_code("invalid_api_key").with_status(401))
        }
        (Some(_), None) => Err(Refusal::bad("You didn't provide an API key.").with_status(401)),
    }
}

fn check_expectations(turn: &Turn, transcript: &[String], body: &Value, number: usize) -> Result<(), Refusal> {
    let found = |text: &String| transcript.iter().any(|string| string.contains(text));
    if let Some(text) = turn.expect.contains.iter().find(|text| !found(text)) {
        return Err(Refusal::bad(format!("The script's turn {} wants {text:?} in the transcript.", number + 1))
            .with_code("script_expectation"));
    }
    if let Some(text) = turn.expect.lacks.iter().find(|text| found(text)) {
        return Err(Refusal::bad(format!("The script's turn {} wants no {text:?} in the transcript.", number + 1))
            .with_code("script_expectation"));
    }
    if let Some(wanted) = &turn.expect.tools {
        let mut wanted = wanted.clone();
        let tools = body.get("tools").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let names = tools.iter().filter_map(|tool| tool.get("name").or(tool.pointer("/function/name")));
        let mut given: Vec<String> = names.filter_map(Value::as_str).map(str::to_owned).collect();
        wanted.sort();
        given.sort();
        if wanted != given {
            return Err(Refusal::bad(format!(
                "The script's turn {} wants the tools {wanted:?}, not {given:?}.",
                number + 1
            ))
            .with_code("script_expectation"));
        }
    }
    Ok(())
}

/// All strings below a value.
fn strings(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::String(text)) => vec![text.clone()],
        Some(Value::Array(items)) => items.iter().flat_map(|item| strings(Some(item))).collect(),
        Some(Value::Object(map)) => map.values().flat_map(|item| strings(Some(item))).collect(),
        _ => Vec::new(),
    }
}

fn first_user_text(body: &Value, format: Format) -> String {
    let messages = if format == Format::Responses { &body["input"] } else { &body["messages"] };
    if let Some(text) = messages.as_str() {
        return text.to_owned();
    }
    let first = messages.as_array().and_then(|messages| messages.iter().find(|message| message["role"] == "user"));
    strings(first.map(|message| &message["content"])).join("\n")
}

fn respond_json(connection: &mut Connection, status: u16, headers: &[(&str, &str)], body: &Value) -> Result<(), Gone> {
    connection.respond(status, headers, "application/json", body.to_string().as_bytes())
}

fn events(format: Format, answer: &Answer, body: &Value) -> Vec<Event> {
    match format {
        Format::Chat => chat::stream(answer, body),
        Format::Responses => responses::stream(answer, body),
        Format::Messages => messages::stream(answer),
    }
}

/// Sends an answer, or only its first events.
fn send(
    connection: &mut Connection,
    format: Format,
    body: &Value,
    answer: &Answer,
    only: Option<usize>,
) -> Result<(), Gone> {
    connection.wait(Duration::from_millis(answer.turn.pace.first_ms))?;
    if body.get("stream") != Some(&Value::Bool(true)) {
        let whole = match format {
            Format::Chat => chat::whole(answer),
            Format::Responses => responses::whole(answer, body),
            Format::Messages => messages::whole(answer),
        };
        return respond_json(connection, 200, &[], &whole);
    }
    connection.begin_stream()?;
    let events = events(format, answer, body);
    for event in events.iter().take(only.unwrap_or(events.len())) {
        send_event(connection, event, &answer.turn)?;
    }
    if only.is_none() {
        connection.end_stream()?;
    }
    Ok(())
}

fn send_event(connection: &mut Connection, event: &Event, turn: &Turn) -> Result<(), Gone> {
    let mut bytes = Vec::new();
    if turn.pace.heartbeats {
        bytes.extend_from_slice(b": ping\n\n");
    }
    bytes.extend(event.bytes(turn));
    let size = if turn.pace.write_bytes == 0 { bytes.len() } else { turn.pace.write_bytes };
    for part in bytes.chunks(size) {
        connection.chunk(part)?;
        connection.wait(Duration::from_millis(turn.pace.between_ms))?;
    }
    Ok(())
}

/// A fault whose effect needs a stream closes the connection of a client that asked for none.
fn send_fault(
    connection: &mut Connection,
    format: Format,
    body: &Value,
    answer: &Answer,
    fault: &Fault,
) -> Result<(), Gone> {
    let streams = body.get("stream") == Some(&Value::Bool(true));
    let begin = |connection: &mut Connection, count: usize| {
        if streams { send(connection, format, body, answer, Some(count)) } else { Err(Gone) }
    };
    match fault {
        Fault::Status { error, status, retry_after, body } => {
            let status = status.unwrap_or_else(|| error.status(format));
            let headers: Vec<(&str, &str)> = retry_after.iter().map(|value| ("retry-after", value.as_str())).collect();
            match body {
                Some(body) => connection.respond(status, &headers, "text/html", body.as_bytes()),
                None => respond_json(connection, status, &headers, &error.body(format)),
            }
        }
        Fault::HangUp => Err(Gone),
        Fault::Silence { ms } => {
            connection.wait(Duration::from_millis(*ms))?;
            Err(Gone)
        }
        Fault::Stall { after_events, ms, heartbeat_ms } => {
            begin(connection, *after_events)?;
            let end = Instant::now() + Duration::from_millis(*ms);
            while Instant::now() < end {
                let left = end.saturating_duration_since(Instant::now());
                connection.wait(heartbeat_ms.map_or(left, |beat| Duration::from_millis(beat).min(left)))?;
                if heartbeat_ms.is_some() {
                    connection.chunk(b": keep-alive\n\n")?;
                }
            }
            Err(Gone)
        }
        Fault::Cut { after_events, bytes } => {
            begin(connection, *after_events)?;
            if let Some(next) = events(format, answer, body).get(*after_events) {
                let next = next.bytes(&answer.turn);
                connection.chunk(&next[..(*bytes).min(next.len())])?;
            }
            Err(Gone)
        }
        Fault::EndsEarly { after_events } => {
            begin(connection, *after_events)?;
            connection.end_stream()
        }
        Fault::Error { after_events, error } => {
            begin(connection, *after_events)?;
            let events = match format {
                Format::Chat => chat::error_events(*error),
                Format::Responses => responses::error_events(*error),
                Format::Messages => messages::error_events(*error),
            };
            for event in events {
                send_event(connection, &event, &answer.turn)?;
            }
            connection.end_stream()
        }
        Fault::Garbage { after_events, text } => {
            begin(connection, *after_events)?;
            send_event(connection, &Event::unnamed(text.clone()), &answer.turn)?;
            for event in events(format, answer, body).iter().skip(*after_events) {
                send_event(connection, event, &answer.turn)?;
            }
            connection.end_stream()
        }
        Fault::NotJson { text } => connection.respond(200, &[], "text/plain", text.as_bytes()),
    }
}
