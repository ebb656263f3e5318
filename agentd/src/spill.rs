//! Results that are too large for a conversation. Each is kept apart; a preview stands for it, with a reference that later calls
//! of the same job may take as an argument.
//!
//! ```text
//!   result ──▶ over the tool's `spill`? ──▶ ledger: (job, sha256) ──▶ the model: {"$spilled": "sha256:…", "preview": …}
//!                                                 │
//!   arguments with {"$spilled": "sha256:…"} ──▶ looked up there ──▶ input schema ──▶ tool
//! ```
//!
//! Conversation and events hold the reference; the tool, and the receipt's digest of the arguments, see the value. A value is
//! stored before the event that tells of it, so that a job that goes on after a crash finds whatever its conversation names.
//! A reference is the digest of what it stands for: the same result has the same one each time, so that repetition is still seen
//! as such. What is put in is not looked through for further references, since a tool wrote it.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use toolproto::code::Code;
use toolproto::digest::Digest;
use toolproto::request::MAX_ARGUMENTS;
use toolproto::strict_json::{self, MAX_DEPTH};
use toolproto::units::Bytes;

use crate::call::{self, Answered, Asked, Ran};
use crate::ledger::{Ledger, LedgerError};
use crate::model::transcript::Arguments;
use crate::session::event::Refusal;

/// The member that makes an object a reference.
pub const REFERENCE: &str = "$spilled";
/// The other members of what stands for a result. Whoever passes all of it on means the reference.
const BESIDE: [&str; 5] = ["bytes", "digest", "hint", "media_type", "preview"];
/// How many bytes of a result its preview holds at most.
const PREVIEW: usize = 2048;
/// How much is kept for one job.
const ROOM: Bytes = Bytes::mib(256);

/// A result that is kept apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spilled {
    /// The SHA-256 of its text.
    pub digest: Digest,
    /// Its JSON.
    pub text: String,
}

/// Whether a call's result may be kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spilling {
    /// It goes into the conversation, whatever its size.
    Never,
    /// It is kept apart if its JSON is larger than this.
    Over(Bytes),
    /// It is kept apart.
    Done,
}

impl Spilled {
    /// A result whose JSON is larger than `limit`.
    #[must_use]
    pub fn over(limit: Bytes, result: &Value) -> Option<Self> {
        let text = result.to_string();
        (text.len() as u64 > limit.0).then(|| Self { digest: Digest::sha256(text.as_bytes()), text })
    }

    /// What stands for it.
    #[must_use]
    pub fn notice(&self) -> Value {
        let end = (0..=PREVIEW.min(self.text.len())).rev().find(|end| self.text.is_char_boundary(*end));
        let hint = format!(
            "The result is kept whole. In the arguments of a later call of this job, {} stands for it.",
            json!({REFERENCE: self.digest})
        );
        json!({
            REFERENCE: self.digest,
            "digest": self.digest,
            "bytes": self.text.len(),
            "media_type": "application/json",
            "preview": &self.text[..end.unwrap_or(0)],
            "hint": hint,
        })
    }
}

/// Keeps the result of a call apart if it is larger than its tool allows. It must be called before the call gets its receipt.
///
/// # Errors
/// When the ledger cannot be written.
pub async fn keep(ledger: &Ledger, ran: Ran) -> Result<Ran, LedgerError> {
    keep_within(ledger, ran, ROOM).await
}

async fn keep_within(ledger: &Ledger, mut ran: Ran, room: Bytes) -> Result<Ran, LedgerError> {
    let (Spilling::Over(limit), Answered::Success { result, .. }) = (ran.spilling, &mut ran.answered) else {
        return Ok(ran);
    };
    let Some(spilled) = Spilled::over(limit, result) else { return Ok(ran) };
    let (notice, bytes) = (spilled.notice(), Bytes(spilled.text.len() as u64));
    if ledger.spill(ran.asked.job, spilled, room).await? {
        *result = notice;
        ran.spilling = Spilling::Done;
    } else {
        let message =
            format!("the result of {bytes} has no room beside what is kept of this job already, {room} at most");
        ran.answered = Answered::Failure(call::failure(Code::ResponseTooLarge, message, Value::Null));
        ran.commit = false;
    }
    Ok(ran)
}

/// Puts kept results where a call's arguments refer to them. A reference that leads nowhere refuses the call.
///
/// # Errors
/// When the ledger cannot be read.
pub async fn resolve(ledger: &Ledger, asked: Asked) -> Result<Asked, LedgerError> {
    resolve_within(ledger, asked, MAX_ARGUMENTS).await
}

async fn resolve_within(ledger: &Ledger, mut asked: Asked, most: Bytes) -> Result<Asked, LedgerError> {
    let Arguments::Object(arguments) = &mut asked.arguments else { return Ok(asked) };
    let mut references = Vec::new();
    let found = look_through(arguments, &mut String::new(), &mut references);
    if references.is_empty() && found.is_ok() {
        return Ok(asked);
    }
    let values = match found {
        Ok(()) => {
            let written = arguments.to_string().len() as u64;
            look_up(ledger, asked.job, &references, written, most).await?
        }
        Err(misfit) => Err(misfit),
    };
    match values {
        Ok(values) => put_in(arguments, &values),
        Err(Misfit { pointer, reason }) => {
            let at = if pointer.is_empty() { "the arguments".to_owned() } else { pointer };
            let refusal = Refusal { code: Code::ArgumentsInvalid, message: format!("{at}: {reason}") };
            asked.refusal.get_or_insert(refusal);
        }
    }
    Ok(asked)
}

/// A place in arguments that stands for a kept result.
struct Reference {
    pointer: String,
    digest: Digest,
}

/// A place in arguments that cannot be followed.
struct Misfit {
    pointer: String,
    reason: String,
}

fn look_through(value: &Value, pointer: &mut String, found: &mut Vec<Reference>) -> Result<(), Misfit> {
    let mut below = |value: &Value, step: &str, found: &mut Vec<Reference>| {
        let length = pointer.len();
        pointer.push('/');
        pointer.push_str(&step.replace('~', "~0").replace('/', "~1"));
        look_through(value, pointer, found)?;
        pointer.truncate(length);
        Ok(())
    };
    match value {
        Value::Object(members) => match reference(members) {
            None => members.iter().try_for_each(|(name, member)| below(member, name, found)),
            Some(Ok(digest)) => {
                found.push(Reference { pointer: pointer.clone(), digest });
                Ok(())
            }
            Some(Err(reason)) => Err(Misfit { pointer: pointer.clone(), reason }),
        },
        Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(index, item)| below(item, &index.to_string(), found))
        }
        _ => Ok(()),
    }
}

/// What an object refers to, if it is a reference.
fn reference(members: &Map<String, Value>) -> Option<Result<Digest, String>> {
    let named = members.get(REFERENCE)?;
    if let Some(other) = members.keys().find(|name| *name != REFERENCE && !BESIDE.contains(&name.as_str())) {
        return Some(Err(format!("`{other}` stands beside `{REFERENCE}`; a reference stands alone")));
    }
    let digest = named.as_str().and_then(|text| text.parse().ok());
    Some(digest.ok_or_else(|| format!("{named} is no reference: `{REFERENCE}` holds what a spilled result gave")))
}

/// The value of each reference. Together with what is `written` they may have `most` bytes.
async fn look_up(
    ledger: &Ledger,
    job: toolproto::ids::JobId,
    references: &[Reference],
    written: u64,
    most: Bytes,
) -> Result<Result<HashMap<Digest, Value>, Misfit>, LedgerError> {
    let (mut values, mut sizes, mut bytes) = (HashMap::new(), HashMap::new(), written);
    for Reference { pointer, digest } in references {
        let misfit = |reason: String| Ok(Err(Misfit { pointer: pointer.clone(), reason }));
        let text = match sizes.get(digest) {
            Some(_) => None,
            None => match ledger.spilled(job, *digest).await? {
                Some(text) => Some(text),
                None => return misfit(format!("no result of this job is kept as {digest}; call its tool again")),
            },
        };
        let size = *sizes.entry(*digest).or_insert(text.as_ref().map_or(0, String::len) as u64);
        bytes = bytes.saturating_add(size);
        if bytes > most.0 {
            return misfit(format!(
                "with this result of {} the arguments have more than {most}, the most that a tool is given",
                Bytes(size)
            ));
        }
        if let Some(text) = text {
            let row = |reason: String| LedgerError::Row { what: "spilled result", job: job.to_string(), reason };
            let value = strict_json::parse(text.as_bytes()).map_err(|error| row(error.to_string()))?;
            values.insert(*digest, value);
        }
        let levels = pointer.matches('/').count() + values.get(digest).map_or(0, depth);
        if levels > MAX_DEPTH {
            return misfit(format!("with this result the arguments are nested deeper than {MAX_DEPTH} levels"));
        }
    }
    Ok(Ok(values))
}

/// How many levels of arrays and objects a value has.
fn depth(value: &Value) -> usize {
    let deepest = match value {
        Value::Object(members) => members.values().map(depth).max(),
        Value::Array(items) => items.iter().map(depth).max(),
        _ => return 0,
    };
    deepest.unwrap_or(0) + 1
}

fn put_in(value: &mut Value, values: &HashMap<Digest, Value>) {
    match value {
        Value::Object(members) => {
            match reference(members).and_then(Result::ok).and_then(|digest| values.get(&digest)) {
                Some(kept) => *value = kept.clone(),
                None => members.values_mut().for_each(|member| put_in(member, values)),
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| put_in(item, values)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::Timestamp;
    use sandbox::protocol::Program;
    use toolproto::ids::{CallId, JobId};
    use toolproto::manifest::Effects;

    use super::*;
    use crate::ledger::{JobKind, NewJob};

    async fn ledger(folder: &tempfile::TempDir, jobs: &[JobId]) -> Ledger {
        let ledger = Ledger::open(folder.path()).unwrap();
        for job in jobs {
            let row = NewJob {
                id: *job,
                kind: JobKind::Agent,
                uid: 1000,
                agent: "worker".to_owned(),
                request: json!({}),
                idempotency_key: None,
                request_digest: Digest::sha256(b""),
                workspace: None,
                priority: 0,
                labels: std::collections::BTreeMap::new(),
                submitted: Timestamp::now(),
            };
            ledger.insert(row).await.unwrap();
        }
        ledger
    }

    fn asked(job: JobId, arguments: Value) -> Asked {
        Asked {
            job,
            call: CallId::from_u128(7),
            attempt_of: CallId::from_u128(7),
            tool: "read".to_owned(),
            arguments: Arguments::Object(arguments),
            refusal: None,
            time: Duration::from_secs(1),
            idempotency_key: String::new(),
            watcher: None,
            recorded: crate::launch::Recorded::default(),
        }
    }

    fn ran(job: JobId, result: Value) -> Ran {
        Ran {
            asked: asked(job, json!({})),
            program: Program::Tool { name: "read".to_owned() },
            effects: Effects::ReadOnly,
            ended: None,
            answered: Answered::Success { result, artifacts: Vec::new() },
            commit: true,
            notes: Vec::new(),
            spilling: Spilling::Over(Bytes(100)),
            named: Vec::new(),
        }
    }

    /// Keeps a result, and says what stands for it.
    async fn kept(ledger: &Ledger, job: JobId, result: Value) -> Value {
        match keep(ledger, ran(job, result)).await.unwrap().answered {
            Answered::Success { result, .. } => result,
            Answered::Failure(error) => panic!("{error:?}"),
        }
    }

    fn refusal(asked: &Asked) -> &str {
        let refusal = asked.refusal.as_ref().expect("nothing was refused");
        assert_eq!(refusal.code, Code::ArgumentsInvalid);
        &refusal.message
    }

    #[test]
    fn a_preview_ends_at_a_character_and_names_what_it_stands_for() {
        let text = format!("a{}", "漢".repeat(5000));
        let whole = json!(text).to_string();
        let spilled = Spilled::over(Bytes(100), &json!(text)).unwrap();
        let notice = spilled.notice();
        let preview = notice["preview"].as_str().unwrap();
        assert!(whole.starts_with(preview) && (PREVIEW - 3..=PREVIEW).contains(&preview.len()), "{}", preview.len());
        assert_eq!(notice["bytes"], whole.len());
        assert_eq!(notice["digest"], Digest::sha256(whole.as_bytes()).to_string());
        assert_eq!(notice[REFERENCE], notice["digest"]);
        assert_eq!(notice["media_type"], "application/json");
        assert!(notice["hint"].as_str().unwrap().contains(&json!({REFERENCE: spilled.digest}).to_string()), "{notice}");
        assert_eq!(Spilled::over(Bytes(whole.len() as u64), &json!(text)), None, "what fits is left alone");
    }

    #[tokio::test]
    async fn a_reference_is_replaced_wherever_it_stands() {
        let (folder, job) = (tempfile::tempdir().unwrap(), JobId::from_u128(1));
        let ledger = ledger(&folder, &[job]).await;
        // A number that a careless reader of JSON would round, and text that must not be taken for a reference.
        let big = json!({"rows": vec![0.1 + 0.2; 40], "whole": 1.0, "text": {REFERENCE: "sha256:00"}});
        let notice = kept(&ledger, job, big.clone()).await;
        let reference = json!({REFERENCE: notice[REFERENCE]});
        let given = asked(job, json!({"a": [1, reference], "b": {"c/~": notice}, "d": "x"}));
        let resolved = resolve(&ledger, given).await.unwrap();
        assert_eq!(resolved.refusal, None);
        let expected = json!({"a": [1, big], "b": {"c/~": big}, "d": "x"});
        assert_eq!(resolved.arguments, Arguments::Object(expected));
        let whole = resolve(&ledger, asked(job, reference)).await.unwrap();
        assert_eq!(whole.arguments, Arguments::Object(big));
    }

    #[tokio::test]
    async fn what_leads_nowhere_is_refused_with_its_place() {
        let (folder, job, other) = (tempfile::tempdir().unwrap(), JobId::from_u128(1), JobId::from_u128(2));
        let ledger = ledger(&folder, &[job, other]).await;
        let notice = kept(&ledger, other, json!(vec![1; 100])).await;
        let foreign = json!({REFERENCE: notice[REFERENCE]});
        for (arguments, words) in [
            (json!({"a": {"b/c": [0, foreign]}}), "/a/b~1c/1: no result of this job is kept as sha256:"),
            (json!({"a": {REFERENCE: 5}}), "/a: 5 is no reference"),
            (json!({"a": {REFERENCE: "sha256:00"}}), "/a: \"sha256:00\" is no reference"),
            (json!({"a": {REFERENCE: notice[REFERENCE], "rows": 1}}), "/a: `rows` stands beside"),
            (foreign.clone(), "the arguments: no result of this job"),
        ] {
            let refused = resolve(&ledger, asked(job, arguments.clone())).await.unwrap();
            assert!(refusal(&refused).starts_with(words), "{}", refusal(&refused));
            assert_eq!(refused.arguments, Arguments::Object(arguments));
        }
    }

    #[tokio::test]
    async fn neither_arguments_nor_what_is_kept_grow_without_end() {
        let (folder, job) = (tempfile::tempdir().unwrap(), JobId::from_u128(1));
        let ledger = ledger(&folder, &[job]).await;
        let big = json!("x".repeat(998));
        let reference = json!({REFERENCE: kept(&ledger, job, big.clone()).await[REFERENCE]});
        let often = json!({"a": vec![reference; 10]});
        let written = often.to_string().len() as u64;
        let fits = resolve_within(&ledger, asked(job, often.clone()), Bytes(written + 10_000)).await.unwrap();
        assert_eq!(fits.refusal, None);
        let refused = resolve_within(&ledger, asked(job, often), Bytes(written + 9_999)).await.unwrap();
        assert!(refusal(&refused).starts_with("/a/9: with this result of 1000"), "{}", refusal(&refused));

        let deep = (0..MAX_DEPTH).fold(json!("x".repeat(100)), |inner, _| json!([inner]));
        let deep = json!({REFERENCE: kept(&ledger, job, deep).await[REFERENCE]});
        assert_eq!(resolve(&ledger, asked(job, deep.clone())).await.unwrap().refusal, None);
        let refused = resolve(&ledger, asked(job, json!({"a": deep}))).await.unwrap();
        assert!(
            refusal(&refused).starts_with("/a: with this result the arguments are nested"),
            "{}",
            refusal(&refused)
        );

        let again = keep_within(&ledger, ran(job, big), Bytes(1500)).await.unwrap();
        assert_eq!(again.spilling, Spilling::Done, "what is kept already needs no room");
        let full = keep_within(&ledger, ran(job, json!("y".repeat(998))), Bytes(1500)).await.unwrap();
        let Answered::Failure(error) = &full.answered else { panic!("{:?}", full.answered) };
        assert_eq!((error.code, full.commit), (Code::ResponseTooLarge, false));
        assert!(error.message.contains("no room"), "{}", error.message);
    }
}
