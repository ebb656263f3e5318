//! What an answer to a probe violates.

use jsonschema::Validator;
use serde_json::Value;
use toolproto::manifest::Effects;
use toolproto::receipt::OutcomeKind;
use toolproto::reply::{self, Answer, UNSUPPORTED};

use super::probe::{Aim, Probe};
use super::subject::{Subject, WORKSPACE_FOLDER};
use super::{Finding, abbreviated};

/// The most characters of a value in a finding.
const LONGEST_VALUE: usize = 80;

/// What a probe's run showed.
#[derive(Clone, Debug)]
pub struct Seen {
    /// How the process ended.
    pub kind: OutcomeKind,
    /// Its exit status, if it exited.
    pub status: Option<i32>,
    /// Why it was not started, if it was not.
    pub failure: Option<String>,
    /// What it wrote to stdout, at most one byte more than its cap.
    pub stdout: Vec<u8>,
    /// The end of what it wrote to stderr.
    pub stderr: String,
    /// Paths that it created, changed or deleted in the workspace.
    pub changed: Vec<String>,
}

/// Judges what a probe showed.
#[must_use]
pub fn judge(subject: &Subject, probe: &Probe, seen: &Seen) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut violated = |what: String| findings.push(Finding::violation(what));
    match seen.kind {
        OutcomeKind::Exited => {}
        OutcomeKind::TimedOut => violated(format!("it did not end within {:?}", subject.time)),
        OutcomeKind::Signalled => violated(with_stderr("it was ended by a signal", seen)),
        OutcomeKind::OutOfMemory => violated("it reached its memory limit".to_owned()),
        _ => {
            let why = seen.failure.as_ref().map(|failure| format!(": {failure}")).unwrap_or_default();
            violated(with_stderr(&format!("it could not be started{why}"), seen));
        }
    }
    if seen.stdout.len() as u64 > subject.manifest.program.max_response.0 {
        violated(format!("it wrote more than its cap of {} bytes to stdout", subject.manifest.program.max_response.0));
    }
    if subject.manifest.execution.effects == Effects::ReadOnly {
        let own = format!("{WORKSPACE_FOLDER}/");
        if let Some(path) = seen.changed.iter().find(|path| !path.starts_with(&own)) {
            violated(format!("it declares read_only and changed {path} in the workspace"));
        }
    }
    if seen.kind == OutcomeKind::Exited && findings.is_empty() {
        answer(subject, probe, seen, &mut findings);
    }
    findings
}

fn answer(subject: &Subject, probe: &Probe, seen: &Seen, findings: &mut Vec<Finding>) {
    let status = seen.status.unwrap_or(-1);
    if probe.aim == Aim::NoRequest {
        if status == 0 {
            findings.push(Finding::advice("it exited with status 0 although stdin held no request"));
        }
        return;
    }
    let read = match reply::read(&seen.stdout, probe.call, status) {
        Ok(read) => read,
        Err(error) => {
            findings.push(Finding::violation(with_stderr(&error.to_string(), seen)));
            return;
        }
    };
    findings.extend(read.notes.into_iter().map(Finding::advice));
    match (probe.aim, read.answer) {
        (Aim::WorkingCall, Answer::Failure(error)) => {
            let what = format!("it failed with {} though check/ provides its files: {}", error.code, error.message);
            findings.push(Finding::violation(with_stderr(&what, seen)));
        }
        (Aim::Call | Aim::WorkingCall, Answer::Success { result, .. }) => {
            findings.extend(subject.output.as_ref().and_then(|output| misfit(output, &result)));
        }
        (Aim::Introspection("describe"), Answer::Success { result, .. }) => match result.get("name") {
            Some(Value::String(_)) => findings.extend(described_schemas(&result)),
            _ => findings.push(Finding::violation("/result/name: `describe` must name the tool")),
        },
        (Aim::Introspection(_), Answer::Success { result, .. })
            if !result.get("healthy").is_some_and(Value::is_boolean) =>
        {
            findings.push(Finding::violation("/result/healthy: `health` must say true or false"));
        }
        (Aim::Introspection(_) | Aim::UnknownOperation, Answer::Failure(error)) if error.code != UNSUPPORTED => {
            let what =
                format!("an operation that it does not know must be answered with {UNSUPPORTED}, not {}", error.code);
            findings.push(Finding::violation(what));
        }
        (Aim::UnknownOperation, Answer::Success { .. }) => {
            findings.push(Finding::violation(format!(
                "it succeeded at an operation that does not exist; answer {UNSUPPORTED} to those that it does not know"
            )));
        }
        (Aim::UnknownProtocol, Answer::Success { .. }) => {
            findings.push(Finding::advice(format!(
                "it answered a request of another protocol; refuse it with {UNSUPPORTED}"
            )));
        }
        _ => {}
    }
}

fn misfit(schema: &Validator, result: &Value) -> Option<Finding> {
    let error = schema.iter_errors(result).next()?;
    let (value, message) = (error.instance().to_string(), error.to_string());
    let message = message.replace(&value, &abbreviated(&value, LONGEST_VALUE));
    Some(Finding::violation(format!("/result{}: {message} (output schema)", error.instance_path())))
}

fn described_schemas(result: &Value) -> Option<Finding> {
    ["input", "output"].iter().find_map(|member| {
        let schema = result.get(*member)?;
        let error = jsonschema::draft202012::new(schema).err()?;
        Some(Finding::violation(format!("/result/{member}: is no JSON Schema 2020-12: {error}")))
    })
}

fn with_stderr(what: &str, seen: &Seen) -> String {
    match seen.stderr.trim().lines().last() {
        Some(line) => format!("{what} (stderr ends: {})", abbreviated(line, LONGEST_VALUE)),
        None => what.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::{Gravity, probes};
    use super::*;

    fn subject() -> Subject {
        Subject::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/tools/word_frequency")).unwrap()
    }

    fn named<'a>(probes: &'a [Probe], name: &str) -> &'a Probe {
        probes.iter().find(|probe| probe.name == name).unwrap()
    }

    fn exited(status: i32, stdout: String) -> Seen {
        Seen {
            kind: OutcomeKind::Exited,
            status: Some(status),
            failure: None,
            stdout: stdout.into_bytes(),
            stderr: String::new(),
            changed: Vec::new(),
        }
    }

    fn succeeded(probe: &Probe, result: &Value) -> Seen {
        exited(0, json!({"protocol": 1, "call_id": probe.call, "ok": true, "result": result}).to_string())
    }

    fn failed(probe: &Probe, code: &str) -> Seen {
        let error = json!({"code": code, "message": "m"});
        exited(1, json!({"protocol": 1, "call_id": probe.call, "ok": false, "error": error}).to_string())
    }

    #[test]
    fn each_kind_of_fault_is_found_and_good_answers_pass() {
        let subject = subject();
        let all = probes(&subject);
        assert!(all.len() >= 11, "{}", all.len());
        let good = json!({"distinct": 0, "words": []});
        let gravities = |name: &str, seen: fn(&Probe) -> Seen| -> Vec<Gravity> {
            let probe = named(&all, name);
            judge(&subject, probe, &seen(probe)).into_iter().map(|finding| finding.gravity).collect()
        };
        let violation = vec![Gravity::Violation];
        let advice = vec![Gravity::Advice];
        let call = "a valid call";
        assert!(judge(&subject, named(&all, call), &succeeded(named(&all, call), &good)).is_empty());
        assert_eq!(gravities(call, |probe| failed(probe, "NO_SUCH_FILE")), violation);
        let other = "members that it does not know";
        assert!(gravities(other, |probe| failed(probe, "NO_SUCH_FILE")).is_empty());
        assert_eq!(gravities(call, |probe| succeeded(probe, &json!({"words": 1}))), violation);
        assert_eq!(gravities(call, |_| exited(0, "done".to_owned())), violation);
        assert_eq!(gravities(call, |_| exited(0, "x".repeat(300_000))), violation);
        assert_eq!(gravities(call, |probe| Seen { kind: OutcomeKind::TimedOut, ..failed(probe, "A") }), violation);
        assert_eq!(gravities(call, |probe| Seen { kind: OutcomeKind::Signalled, ..failed(probe, "A") }), violation);
        assert_eq!(gravities(call, |probe| Seen { changed: vec!["a".to_owned()], ..failed(probe, "A") }), violation);
        assert!(
            gravities(other, |probe| Seen { changed: vec![".tool/__pycache__/a".to_owned()], ..failed(probe, "A") })
                .is_empty()
        );
        let noisy = |probe: &Probe| {
            let stdout = [b"loading\n".to_vec(), failed(probe, "A").stdout].concat();
            Seen { stdout, ..failed(probe, "A") }
        };
        assert_eq!(gravities(other, noisy), advice);

        assert!(gravities("describe", |probe| failed(probe, UNSUPPORTED)).is_empty());
        assert!(gravities("describe", |probe| succeeded(probe, &json!({"name": "a", "input": {}}))).is_empty());
        assert_eq!(gravities("describe", |probe| succeeded(probe, &json!({}))), violation);
        assert_eq!(gravities("describe", |probe| succeeded(probe, &json!({"name": "a", "input": 7}))), violation);
        assert_eq!(gravities("describe", |probe| failed(probe, "WHAT")), violation);
        assert!(gravities("health", |probe| succeeded(probe, &json!({"healthy": false}))).is_empty());
        assert_eq!(gravities("health", |probe| succeeded(probe, &json!({"healthy": "yes"}))), violation);

        let unknown = "an operation that it does not know";
        assert!(gravities(unknown, |probe| failed(probe, UNSUPPORTED)).is_empty());
        assert_eq!(gravities(unknown, |probe| succeeded(probe, &json!({}))), violation);
        let protocol = "a protocol that it does not speak";
        assert_eq!(gravities(protocol, |probe| succeeded(probe, &json!({}))), advice);
        assert!(gravities("an empty stdin", |_| exited(2, String::new())).is_empty());
        assert_eq!(gravities("an empty stdin", |_| exited(0, String::new())), advice);
    }

    #[test]
    fn findings_say_what_is_wrong_without_filling_the_screen() {
        let subject = subject();
        let all = probes(&subject);
        let probe = named(&all, "a valid call");
        let found = |seen: Seen| judge(&subject, probe, &seen).remove(0).what;
        let long = "é".repeat(9_000);
        let what = found(succeeded(probe, &json!({"distinct": long, "words": []})));
        assert!(
            what.starts_with("/result/distinct: \"éé") && what.contains("é… (9002 characters) is not of type"),
            "{what}"
        );
        assert!(what.chars().count() < 200, "{what}");
        let error = json!({"code": "A", "message": "m".repeat(2_000)});
        let reply = json!({"protocol": 1, "call_id": probe.call, "ok": false, "error": error});
        let what = found(exited(1, reply.to_string()));
        assert!(what.ends_with(" characters)") && what.chars().count() < 700, "{what}");
        let what = found(Seen { stderr: long, ..exited(1, String::new()) });
        assert!(what.contains("(9000 characters)") && what.chars().count() < 400, "{what}");
        let seen = Seen {
            kind: OutcomeKind::LaunchFailed,
            failure: Some("exec: Permission denied".to_owned()),
            ..exited(1, String::new())
        };
        assert_eq!(found(seen), "it could not be started: exec: Permission denied");
    }

    #[test]
    fn probes_name_their_calls_and_are_requests() {
        let subject = subject();
        for probe in probes(&subject).iter().filter(|probe| probe.aim != Aim::NoRequest) {
            let request = toolproto::strict_json::parse(&probe.stdin.concat()).unwrap();
            assert_eq!(request["call_id"], json!(probe.call), "{}", probe.name);
            assert!(request["operation"] != "call" || subject.input.is_valid(&request["arguments"]), "{}", probe.name);
        }
    }
}
