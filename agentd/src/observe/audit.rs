//! `audit.log`: JSON Lines, one per phase entered, call, refusal and act of a person, for administrators to read.
//!
//! A line holds no arguments, no results and no secrets: what a call did stands in its receipt.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use jiff::{Timestamp, Unit};
use serde::Serialize;
use toolproto::api::{EventBody, Phase};
use toolproto::code::Code;
use toolproto::ids::{CallId, JobId, RequestId};
use toolproto::job::{JobUsage, Verdict};
use toolproto::receipt::Usage;

use super::Observation;

/// The file's name.
pub const FILE_NAME: &str = "audit.log";

/// The log, open for appending.
#[derive(Debug)]
pub struct AuditLog {
    path: PathBuf,
    file: File,
    size: u64,
    max_bytes: u64,
    keep: u32,
    /// When each running job entered its phase.
    entered: HashMap<JobId, Timestamp>,
    /// Whether the last write failed; one line in the journal for many failures.
    failing: bool,
}

/// What a job or a breaker was in, and is in now; which key signed, and signs now.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
enum Stood<'a> {
    Phase(Phase),
    Breaker(&'static str),
    Key(&'a str),
}

/// One line. What does not apply is left out.
#[derive(Debug, Default, Serialize)]
struct Line<'a> {
    time: String,
    event: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    severity: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    actor: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    job_id: Option<JobId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<CallId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<RequestId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<Stood<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<Stood<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<Code>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<JobUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<&'a Usage>,
}

impl AuditLog {
    /// Opens the log in a directory, and goes on with what is there.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(directory: &Path, max_bytes: u64, keep: u32) -> io::Result<Self> {
        let path = directory.join(FILE_NAME);
        let file = append(&path)?;
        let size = file.metadata()?.len();
        Ok(Self { path, file, size, max_bytes, keep, entered: HashMap::new(), failing: false })
    }

    /// Writes the line of an observation, if it has one. A failure is logged and forgotten: no job waits for this log.
    pub fn record(&mut self, observation: &Observation) {
        match self.write(observation) {
            Ok(()) => self.failing = false,
            Err(error) if self.failing => tracing::debug!(%error, "the audit log cannot be written"),
            Err(error) => {
                self.failing = true;
                tracing::error!(%error, path = %self.path.display(), "the audit log cannot be written");
            }
        }
    }

    fn write(&mut self, observation: &Observation) -> io::Result<()> {
        let Some(line) = self.line(observation) else { return Ok(()) };
        let mut bytes = serde_json::to_vec(&line)?;
        bytes.push(b'\n');
        if self.size > 0 && self.size + bytes.len() as u64 > self.max_bytes {
            self.rotate()?;
        }
        self.file.write_all(&bytes)?;
        self.size += bytes.len() as u64;
        Ok(())
    }

    fn line<'a>(&mut self, observation: &'a Observation) -> Option<Line<'a>> {
        let now = || in_microseconds(Timestamp::now());
        Some(match observation {
            Observation::Job { uid, event, .. } => {
                let line = Line {
                    time: in_microseconds(event.time),
                    event: event.body.name(),
                    actor: Some(actor(*uid)),
                    job_id: Some(event.job_id),
                    ..Line::default()
                };
                match &event.body {
                    EventBody::Phase { from, to, reason, usage } => {
                        let since = self.entered.insert(event.job_id, event.time);
                        if *to == Phase::Idle {
                            self.entered.remove(&event.job_id);
                        }
                        Line {
                            from: Some(Stood::Phase(*from)),
                            to: Some(Stood::Phase(*to)),
                            duration_ms: since.map(|since| millis(since, event.time)),
                            reason: Some(reason),
                            usage: Some(*usage),
                            ..line
                        }
                    }
                    EventBody::CallStarted { call_id, tool, .. } => {
                        Line { call_id: Some(*call_id), tool: Some(tool), ..line }
                    }
                    EventBody::CallEnded { call_id, tool, code, usage, .. } => Line {
                        call_id: Some(*call_id),
                        tool: Some(tool),
                        code: *code,
                        severity: severity(*code),
                        duration_ms: usage.as_ref().map(|usage| usage.wall_ms),
                        used: usage.as_ref(),
                        ..line
                    },
                    EventBody::ApprovalRequested { call_id, tool, .. } => {
                        Line { call_id: Some(*call_id), tool: Some(tool), ..line }
                    }
                    EventBody::QuestionAsked { call_id, .. } => Line { call_id: Some(*call_id), ..line },
                    EventBody::JobEnded { result } => {
                        let (code, reason) = match &result.verdict {
                            Verdict::Success { .. } => (None, "success"),
                            Verdict::Failed { error_code, message, .. } => (Some(*error_code), message.as_str()),
                        };
                        Line { severity: severity(code), code, reason: Some(reason), usage: Some(result.usage), ..line }
                    }
                    EventBody::ModelDelta { .. } | EventBody::CallProgress { .. } => return None,
                }
            }
            Observation::Direct { uid, job, call, tool, code, usage } => Line {
                time: now(),
                event: "call.ended",
                actor: Some(actor(*uid)),
                job_id: Some(*job),
                call_id: Some(*call),
                tool: Some(tool),
                code: *code,
                severity: severity(*code),
                duration_ms: usage.as_ref().map(|usage| usage.wall_ms),
                used: usage.as_ref(),
                ..Line::default()
            },
            Observation::Refused { uid, request, head: _, code, detail } => Line {
                time: now(),
                event: "request.refused",
                actor: uid.map(actor),
                request_id: Some(*request),
                code: Some(*code),
                reason: Some(detail),
                ..Line::default()
            },
            Observation::Breaker { uid, breaker, from, to, reason } => Line {
                time: now(),
                event: "breaker.changed",
                actor: uid.map(actor),
                tool: Some(breaker),
                from: Some(Stood::Breaker(from.as_str())),
                to: Some(Stood::Breaker(to.as_str())),
                reason: Some(reason),
                ..Line::default()
            },
            Observation::KeyChanged { from, to, reason } => Line {
                time: now(),
                event: "key.changed",
                from: Some(Stood::Key(from)),
                to: Some(Stood::Key(to)),
                reason: Some(reason),
                ..Line::default()
            },
            Observation::Act { uid, job, act } => {
                Line { time: now(), event: act, actor: Some(actor(*uid)), job_id: Some(*job), ..Line::default() }
            }
        })
    }

    /// `audit.log` becomes `audit.log.1`, that becomes `audit.log.2`, and the oldest goes.
    fn rotate(&mut self) -> io::Result<()> {
        let numbered = |number: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        for number in (1..self.keep).rev() {
            match std::fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if self.keep == 0 {
            std::fs::remove_file(&self.path)?;
        } else {
            std::fs::rename(&self.path, numbered(1))?;
        }
        self.file = append(&self.path)?;
        self.size = 0;
        Ok(())
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// What agentd did wrong itself is for a person to look at.
fn severity(code: Option<Code>) -> Option<&'static str> {
    (code == Some(Code::InternalLogicError)).then_some("critical")
}

fn actor(uid: u32) -> String {
    format!("uid:{uid}")
}

fn in_microseconds(time: Timestamp) -> String {
    let time = time.round(Unit::Microsecond).unwrap_or(time);
    format!("{time:.6}")
}

fn millis(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.as_millisecond() - from.as_millisecond()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::Value;
    use toolproto::api::{API_VERSION, EventView};

    use super::*;
    use crate::observe::Performer;

    fn performer() -> Performer {
        Performer { agent: "clerk".to_owned(), provider: "openai", model: "small".to_owned() }
    }

    fn phase(second: i64, from: Phase, to: Phase) -> Observation {
        let body = EventBody::Phase { from, to, reason: "ON_X".to_owned(), usage: JobUsage::default() };
        let time = Timestamp::from_second(second).unwrap();
        let event = EventView { version: API_VERSION, sequence: Some(1), job_id: JobId::from_u128(1), time, body };
        Observation::Job { uid: 1000, performer: Arc::new(performer()), event }
    }

    fn lines(folder: &Path) -> Vec<Value> {
        let text = std::fs::read_to_string(folder.join(FILE_NAME)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn phases_are_timed_and_refusals_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = AuditLog::open(folder.path(), 1 << 20, 2).unwrap();
        log.record(&phase(10, Phase::Idle, Phase::Planning));
        log.record(&phase(13, Phase::Planning, Phase::Executing));
        log.record(&Observation::Refused {
            uid: Some(1001),
            request: RequestId::from_u128(3),
            head: "POST /v1/jobs".to_owned(),
            code: Code::NotPermitted,
            detail: "agent `x` is not for this caller".to_owned(),
        });
        let lines = lines(folder.path());
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0]["time"], "1970-01-01T00:00:10.000000Z");
        assert_eq!(lines[0].get("duration_ms"), None);
        assert_eq!((&lines[1]["from"], &lines[1]["duration_ms"]), (&"PLANNING".into(), &3000.into()));
        assert_eq!((&lines[2]["actor"], &lines[2]["code"]), (&"uid:1001".into(), &"NOT_PERMITTED".into()));
    }

    #[test]
    fn a_call_that_agentd_got_wrong_is_critical() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = AuditLog::open(folder.path(), 1 << 20, 2).unwrap();
        let ended = |code| {
            let (call_id, tool) = (CallId::from_u128(2), "write".to_owned());
            let body = EventBody::CallEnded { call_id, tool, ok: false, code: Some(code), usage: None };
            let (job_id, time) = (JobId::from_u128(1), Timestamp::UNIX_EPOCH);
            let event = EventView { version: API_VERSION, sequence: Some(1), job_id, time, body };
            Observation::Job { uid: 1000, performer: Arc::new(performer()), event }
        };
        let direct = Observation::Direct {
            uid: 1000,
            job: JobId::from_u128(1),
            call: CallId::from_u128(2),
            tool: "write".to_owned(),
            code: Some(Code::InternalLogicError),
            usage: None,
        };
        for observation in [ended(Code::InternalLogicError), direct, ended(Code::WorkspaceTooLarge)] {
            log.record(&observation);
        }
        let severities: Vec<Value> = lines(folder.path()).iter().map(|line| line["severity"].clone()).collect();
        assert_eq!(severities, ["critical".into(), "critical".into(), Value::Null]);
    }

    #[test]
    fn the_log_is_rotated_by_size_and_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let mut log = AuditLog::open(folder.path(), 700, 2).unwrap();
            for second in 0..4 {
                log.record(&phase(second, Phase::Idle, Phase::Planning));
            }
        }
        let mut names: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["audit.log", "audit.log.1", "audit.log.2"]);
        for name in names {
            assert!(std::fs::metadata(folder.path().join(name)).unwrap().len() <= 700);
        }
    }
}
