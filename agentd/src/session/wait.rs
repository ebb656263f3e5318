//! `wait`: the tool by which a plan says that what follows is to happen later (`[wait]` in an agent). It runs nothing and leaves no
//! receipt.
//!
//! A plan says how long, never until when: a model knows no clock, and a moment that it wrote down would be wrong after every
//! pause. The moment is reckoned when the call's turn comes in EXECUTING. The wait itself is measured in the job's time, which no
//! setting of the host's clock changes. At its end the two are compared: when the host's clock has gone otherwise by more than
//! [`DRIFT`], because it was set or because agentd did not run meanwhile, what was planned for that moment may be wrong by now, so
//! that the call fails and the model plans again.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use toolproto::code::Code;
use toolproto::ids::CallId;

use super::event::{BuiltIn, CallRecord, Event, Refusal};
use super::{BatchCall, Progress};
use crate::model::ToolOffer;
use crate::model::transcript::Arguments;

/// The tool's name. No tool of the catalogue that an agent uses may have it where it is offered.
pub const NAME: &str = "wait";
/// How far the host's clock and the job's time may differ at the end of a wait.
pub const DRIFT: SignedDuration = SignedDuration::from_secs(30);

/// A wait that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// When it ends, in the job's time.
    pub until: Duration,
    /// When it ends by the host's clock, as that stood when the wait began.
    pub due: Timestamp,
}

/// What a wait needs next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// That it begins.
    Begin(Duration),
    /// That the host's clock is looked at, since its time is over.
    End(Waiting),
    /// Nothing but time.
    Goes,
    /// That it is refused.
    Refused(Box<Event>),
}

/// As a model is told of it.
#[must_use]
pub fn offer(longest: Duration) -> ToolOffer {
    ToolOffer {
        name: NAME.to_owned(),
        description:
            "Waits before the calls after it in the same answer, and before the next turn. The time of the job goes on."
                .to_owned(),
        parameters: json!({
            "type": "object",
            "properties": {
                "delay_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": longest.as_secs_f64()},
            },
            "required": ["delay_seconds"],
            "additionalProperties": false,
        }),
    }
}

fn delay(arguments: &Arguments) -> Option<Duration> {
    let Arguments::Object(arguments) = arguments else { return None };
    let seconds = arguments.get("delay_seconds")?.as_f64().filter(|seconds| *seconds > 0.0)?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Why a wait cannot be planned.
#[must_use]
pub fn refusal(arguments: &Arguments, longest: Duration) -> Option<Refusal> {
    let message = match (delay(arguments), arguments) {
        (Some(delay), _) if delay <= longest => return None,
        (Some(_), _) => format!("/delay_seconds: the longest wait is {} s", longest.as_secs_f64()),
        (None, Arguments::Malformed { reason, .. }) => reason.clone(),
        (None, Arguments::Object(_)) => "/delay_seconds: it must be a number of seconds that is more than 0".to_owned(),
    };
    Some(Refusal { code: Code::ArgumentsInvalid, message })
}

/// What a wait whose turn it is needs when the job has run for `now` and may run for `left`; `None` for other calls.
#[must_use]
pub fn step(one: &BatchCall, now: Duration, left: Duration) -> Option<Step> {
    let is_wait = one.planned.built_in == Some(BuiltIn::Wait) && one.planned.refusal.is_none();
    if !is_wait || one.progress != Progress::Pending {
        return None;
    }
    match one.waiting {
        Some(waiting) if now >= waiting.until => return Some(Step::End(waiting)),
        Some(_) => return Some(Step::Goes),
        None => {}
    }
    let delay = delay(&one.planned.arguments)?;
    if delay < left {
        return Some(Step::Begin(delay));
    }
    let message = format!("the job has {} s left; a wait of {} s would end it", left.as_secs(), delay.as_secs_f64());
    Some(Step::Refused(Box::new(failed(one.planned.call, Code::ArgumentsInvalid, &message))))
}

/// How a wait ends, the job having run for `now` and the host's clock showing `wall`.
#[must_use]
pub fn ended(call: CallId, waiting: Waiting, now: Duration, wall: Timestamp) -> Event {
    let late = SignedDuration::try_from(now.saturating_sub(waiting.until)).unwrap_or(SignedDuration::ZERO);
    let drift = wall.duration_since(waiting.due).saturating_sub(late);
    if drift.abs() <= DRIFT {
        let record = CallRecord::of_no_tool(None, json!({"ok": true, "result": {"waited": true}}));
        return Event::ToolCompleted { call, record };
    }
    let (by, how) = (drift.abs().as_secs(), if drift.is_negative() { "less" } else { "more" });
    let message = format!(
        "{by} s {how} than planned have passed by the host's clock: it was set, or agentd did not run meanwhile. Look at what is so \
         now, and plan again"
    );
    failed(call, Code::ClockDrift, &message)
}

fn failed(call: CallId, code: Code, message: &str) -> Event {
    let told = json!({"ok": false, "error": {"code": code, "message": message}});
    Event::ToolFailed { call, record: CallRecord::of_no_tool(Some(code), told) }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn end(late: u64, wall: i64) -> (Option<Code>, Value) {
        let waiting = Waiting { until: Duration::from_secs(100), due: Timestamp::from_second(1_000_000).unwrap() };
        let now = Duration::from_secs(100 + late);
        let wall = Timestamp::from_second(1_000_000 + wall).unwrap();
        match ended(CallId::from_u128(1), waiting, now, wall) {
            Event::ToolCompleted { record, .. } | Event::ToolFailed { record, .. } => (record.code, record.content),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_clock_that_went_otherwise_means_that_the_plan_is_made_again() {
        for (late, wall) in [(0, 0), (0, 30), (0, -30), (500, 500), (500, 525)] {
            assert_eq!(end(late, wall).0, None, "{late} s late, {wall} s after it was due");
        }
        for (late, wall, words) in [(0, 31, "31 s more"), (0, -3600, "3600 s less"), (500, 0, "500 s less")] {
            let (code, content) = end(late, wall);
            assert_eq!(code, Some(Code::ClockDrift));
            assert!(content["error"]["message"].as_str().unwrap().starts_with(words), "{content}");
        }
    }

    #[test]
    fn what_is_no_length_of_time_is_refused() {
        let longest = Duration::from_secs(60);
        let refused = |delay: Value| refusal(&Arguments::Object(json!({"delay_seconds": delay})), longest);
        for delay in [json!(0), json!(-1), json!("5"), json!(null), json!(61), json!(1e300)] {
            assert!(refused(delay.clone()).is_some(), "{delay}");
        }
        assert_eq!((refused(json!(0.5)), refused(json!(60))), (None, None));
    }
}
