//! A model for many jobs at once. A goal says what it does with its job: so many turns of one call, then an answer; and whether
//! the first answer is held back until the measuring lets it go.

use std::collections::BTreeMap;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::chat;

/// The tool that it calls.
const TOOL: &str = "echo_c";
/// A thread that only waits for its client needs no more.
const STACK: usize = 128 << 10;

/// A goal of one of its jobs.
pub(super) fn goal(calls: usize, held: bool) -> Value {
    json!({"calls": calls, "held": held})
}

/// The model's server; it serves until this program ends.
pub(super) struct GoalModel {
    base_url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    open: Mutex<bool>,
    opened: Condvar,
    held: AtomicUsize,
    failed: Mutex<BTreeMap<String, usize>>,
}

impl GoalModel {
    /// Listens on a free port.
    pub(super) fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("listening on the loopback interface")?;
        let base_url = format!("http://{}/v1", listener.local_addr()?);
        let state = Arc::new(State::default());
        let served = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&served);
                let thread = thread::Builder::new().stack_size(STACK).spawn(move || {
                    // A client that goes while it is held back has been stopped with its daemon.
                    if let Err(error) = answer(&stream, &state) {
                        eprintln!("the model could not answer: {error:#}");
                    }
                });
                if let Err(error) = thread {
                    eprintln!("the model cannot answer more at once: {error}");
                }
            }
        });
        Ok(Self { base_url, state })
    }

    /// The base URL to configure.
    pub(super) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// How many answers are held back.
    pub(super) fn held(&self) -> usize {
        self.state.held.load(Ordering::SeqCst)
    }

    /// The codes of the calls that failed since this was asked last, and how many of each.
    pub(super) fn take_failed(&self) -> BTreeMap<String, usize> {
        std::mem::take(&mut *self.state.failed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Holds answers back from now on, or lets them go.
    pub(super) fn set_open(&self, open: bool) {
        *self.state.open.lock().unwrap_or_else(PoisonError::into_inner) = open;
        self.state.opened.notify_all();
    }
}

fn answer(stream: &TcpStream, state: &State) -> Result<()> {
    let request = chat::read_request(stream)?;
    let messages = request["messages"].as_array().context("the request has no messages")?;
    let goal = goal_of(messages)?;
    let results: Vec<&Value> = messages.iter().filter(|message| message["role"] == "tool").collect();
    if let Some(code) = results.last().and_then(|result| failure(result)) {
        *state.failed.lock().unwrap_or_else(PoisonError::into_inner).entry(code).or_default() += 1;
    }
    if goal["held"] == true && results.is_empty() {
        state.hold();
    }
    let wanted = goal["calls"].as_u64().context("the goal says no number of calls")?;
    let message = if (results.len() as u64) < wanted {
        chat::calls("", &[(TOOL, json!({"n": results.len()}))])
    } else {
        json!({"role": "assistant", "content": "{\"done\":true}"})
    };
    // Whoever asked may have been stopped meanwhile, which is part of what is measured.
    let _ = chat::write_answer(stream, &message);
    Ok(())
}

/// The code of a call that failed.
fn failure(result: &Value) -> Option<String> {
    let content: Value = serde_json::from_str(result["content"].as_str()?).ok()?;
    (content["ok"] == false).then(|| content["error"]["code"].as_str().unwrap_or("no code").to_owned())
}

impl State {
    fn hold(&self) {
        self.held.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.opened.wait_while(open, |open| !*open));
        self.held.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The goal that the first message of a person holds.
fn goal_of(messages: &[Value]) -> Result<Value> {
    let first = messages.iter().find(|message| message["role"] == "user").context("there is no goal")?;
    let text = first["content"].as_str().context("the goal is no text")?;
    let json = text.find('{').and_then(|at| text.get(at..)).context("the goal holds no object")?;
    let mut values = serde_json::Deserializer::from_str(json).into_iter::<Value>();
    values.next().context("the goal holds no object")?.context("reading the goal")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_known_by_their_code() {
        let result = |content: Value| json!({"role": "tool", "content": content.to_string()});
        let failed = result(json!({"ok": false, "error": {"code": "OVERLOADED"}}));
        assert_eq!(failure(&failed).as_deref(), Some("OVERLOADED"));
        assert_eq!(failure(&result(json!({"ok": true, "result": 1}))), None);
    }

    #[test]
    fn goals_are_read_whatever_stands_around_them() {
        let text = format!("Goal: {} Begin.", goal(3, true));
        let messages = [json!({"role": "system", "content": "{}"}), json!({"role": "user", "content": text})];
        assert_eq!(goal_of(&messages).unwrap(), goal(3, true));
    }
}
