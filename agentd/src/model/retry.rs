//! Who is asked next: retries of one model, then its fallbacks, within the time that there is. The only layer that repeats
//! model requests.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use serde_json::{Value, json};
use tokio::time::Instant;
use toolproto::code::Code;

use super::{Model, ModelError, Reply, Request, Retry, Watch};

/// How often one model is asked in all.
const ATTEMPTS: u32 = 4;
/// The first pause; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause, also when a server asks for a longer one: then the next model is asked at once.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Models in the order in which they are asked.
pub struct Chain {
    models: Vec<(String, Arc<dyn Model>)>,
}

impl Chain {
    /// The first, then its fallbacks, each with its name.
    #[must_use]
    pub const fn new(models: Vec<(String, Arc<dyn Model>)>) -> Self {
        Self { models }
    }

    async fn ask(&self, request: &Request, watch: &Watch) -> Result<Reply, ModelError> {
        let deadline = Instant::now() + request.time;
        let mut failures: Vec<Value> = Vec::new();
        let mut last = ModelError::lasting(Code::ModelUnavailable, "no model is configured");
        for (name, model) in &self.models {
            for attempt in 1..=ATTEMPTS {
                let left = deadline.saturating_duration_since(Instant::now());
                let timed = Request { time: left, ..request.clone() };
                let error = match tokio::time::timeout(left, model.reply(&timed, watch)).await {
                    Ok(Ok(reply)) => return Ok(reply),
                    Ok(Err(error)) => error,
                    Err(_) => ModelError::passing("the job's time ended before the model had answered"),
                };
                failures.push(json!({"model": name, "attempt": attempt, "code": error.code, "message": error.message,
                    "details": error.details}));
                let pause = pause(error.retry, attempt);
                last = error;
                let left = deadline.saturating_duration_since(Instant::now());
                match pause {
                    Some(pause) if attempt < ATTEMPTS && pause <= LONGEST_PAUSE && pause < left => {
                        tracing::warn!(model = %name, attempt, error = %last, ?pause, "model request failed, trying again");
                        tokio::time::sleep(pause).await;
                    }
                    _ => break,
                }
            }
            tracing::warn!(model = %name, error = %last, "model gave no answer");
        }
        // A job that ends for this reason should show all that was tried, not only the last.
        if failures.len() > 1 {
            last.details = json!({"attempts": failures});
        }
        Err(last)
    }
}

impl Model for Chain {
    fn reply<'a>(&'a self, request: &'a Request, watch: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
        self.ask(request, watch).boxed()
    }
}

/// How long to wait before the next attempt; `None` when there should be none. What a server asks for is the least.
fn pause(retry: Retry, attempt: u32) -> Option<Duration> {
    let backoff = FIRST_PAUSE.saturating_mul(1 << (attempt - 1).min(10));
    match retry {
        Retry::No => None,
        Retry::Backoff => Some(backoff),
        Retry::After(least) => Some(least.max(backoff)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::Thinking;
    use super::super::transcript::{Message, Transcript};
    use super::*;

    struct Scripted {
        answers: Mutex<Vec<Result<Reply, ModelError>>>,
    }

    impl Model for Scripted {
        fn reply<'a>(&'a self, _: &'a Request, _: &'a Watch) -> BoxFuture<'a, Result<Reply, ModelError>> {
            let answer = self.answers.lock().unwrap().remove(0);
            async move { answer }.boxed()
        }
    }

    fn scripted(answers: Vec<Result<Reply, ModelError>>) -> Arc<Scripted> {
        Arc::new(Scripted { answers: Mutex::new(answers) })
    }

    fn request(time: Duration) -> Request {
        Request {
            transcript: Transcript { system: String::new(), messages: vec![Message::User("goal".to_owned())] },
            tools: Vec::new(),
            note: String::new(),
            max_output: None,
            time,
            thinking: Thinking::AsConfigured,
        }
    }

    fn said(text: &str) -> Result<Reply, ModelError> {
        Ok(Reply { text: text.to_owned(), ..Reply::default() })
    }

    fn failed(retry: Retry) -> Result<Reply, ModelError> {
        Err(ModelError { retry, ..ModelError::passing("no") })
    }

    async fn ask(models: &[&Arc<Scripted>], time: Duration) -> (Result<Reply, ModelError>, Duration) {
        let models = models.iter().map(|model| ("m".to_owned(), Arc::clone(model) as Arc<dyn Model>)).collect();
        let start = Instant::now();
        let reply = Chain::new(models).reply(&request(time), &|_| ()).await;
        (reply, start.elapsed())
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test(start_paused = true)]
    async fn what_a_server_asks_for_is_the_least_pause() {
        let model = scripted(vec![failed(Retry::After(Duration::from_secs(7))), said("yes")]);
        let (reply, took) = ask(&[&model], HOUR).await;
        assert_eq!(reply.unwrap().text, "yes");
        assert!(took >= Duration::from_secs(7), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_of_days_leads_to_the_fallback_at_once() {
        let model = scripted(vec![failed(Retry::After(24 * HOUR))]);
        let fallback = scripted(vec![said("instead")]);
        let (reply, took) = ask(&[&model, &fallback], 100 * HOUR).await;
        assert_eq!(reply.unwrap().text, "instead");
        assert!(took < Duration::from_secs(1), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn attempts_end_and_all_of_them_are_told() {
        let model = scripted((0..9).map(|_| failed(Retry::Backoff)).collect());
        let (reply, _) = ask(&[&model], HOUR).await;
        let error = reply.unwrap_err();
        assert_eq!(error.details["attempts"].as_array().unwrap().len(), 4);
        assert_eq!(model.answers.lock().unwrap().len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn no_pause_outlasts_the_time() {
        let model = scripted((0..9).map(|_| failed(Retry::After(Duration::from_secs(20)))).collect());
        let (reply, took) = ask(&[&model], Duration::from_secs(30)).await;
        assert!(reply.is_err());
        assert!(took <= Duration::from_secs(30), "{took:?}");
    }
}
