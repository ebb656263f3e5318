//! What `agentctl` prints: results on stdout, everything about them on stderr.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;
use serde_json::Value;
use toolproto::api::{EventBody, EventView};
use toolproto::job::{JobResult, Verdict};

use super::failure::Failure;

/// Where and how to print.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) json: bool,
    colours: bool,
}

/// A colour for a word on a terminal.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Colour {
    /// Something worked.
    Good,
    /// Something did not work.
    Bad,
    /// Beside the point.
    Faint,
}

impl Output {
    /// Colours only on a terminal, and never against NO_COLOR (<https://no-color.org>).
    pub(crate) fn new(json: bool) -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { json, colours: !refused && io::stderr().is_terminal() }
    }

    /// One line on stdout.
    pub(crate) fn line(&self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        written(writeln!(stdout, "{text}").and_then(|()| stdout.flush()))
    }

    /// A value on stdout: one line under `--json`, else indented for people.
    pub(crate) fn value(&self, value: &impl Serialize) -> Result<(), Failure> {
        let text = if self.json { serde_json::to_string(value) } else { serde_json::to_string_pretty(value) };
        let text = text.map_err(|error| Failure::Conversation(format!("the answer has no JSON form: {error}")))?;
        self.line(&inert(&text))
    }

    /// A line about what happens, on stderr.
    pub(crate) fn remark(&self, text: &str) {
        // A closed stderr is no reason to give up the command.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// Why the command failed: for programs on stdout, for people on stderr with what to do next.
    pub(crate) fn failure(&self, failure: &Failure) {
        if self.json {
            let value = match failure {
                Failure::Refused(problem) => serde_json::to_value(problem).unwrap_or(Value::Null),
                other => serde_json::json!({"error": other.to_string(), "recovery_suggestion": other.next_step()}),
            };
            // The exit status still tells, should stdout be closed.
            let _ = self.line(&value.to_string());
            return;
        }
        self.remark(&format!("{} {failure}", self.paint("agentctl:", Colour::Bad)));
        if let Failure::Refused(problem) = failure {
            for violation in &problem.violations {
                self.remark(&format!(
                    "  at {}: {} ({})",
                    pointer(&violation.pointer),
                    violation.message,
                    violation.rule
                ));
            }
            self.remark(&format!("  code: {}", problem.code));
        }
        if let Some(next) = failure.next_step() {
            self.remark(&format!("  what to do: {next}"));
        }
    }

    /// A word in colour, where colours are wanted.
    pub(crate) fn paint(&self, text: &str, colour: Colour) -> String {
        if !self.colours {
            return text.to_owned();
        }
        let number = match colour {
            Colour::Good => 32,
            Colour::Bad => 31,
            Colour::Faint => 2,
        };
        format!("\x1b[{number}m{text}\x1b[0m")
    }

    /// A line of progress, or none for events that are not worth one.
    pub(crate) fn progress(&self, event: &EventView) -> Option<String> {
        let line = match &event.body {
            EventBody::Phase { from: _, to, reason, usage } => format!(
                "{} {} {}",
                self.paint(&format!("turn {}", usage.turns), Colour::Faint),
                phase_name(*to),
                self.paint(reason, Colour::Faint)
            ),
            EventBody::CallStarted { tool, .. } => format!("  {tool} started"),
            EventBody::CallProgress { progress, message, .. } => {
                let share = progress.map(|share| format!(" {:.0} %", share * 100.0)).unwrap_or_default();
                let words = message.as_deref().map(|words| format!(" {}", printable(words))).unwrap_or_default();
                format!("   {share}{words}")
            }
            EventBody::CallEnded { tool, ok, code, usage, .. } => {
                let verdict = match (ok, code) {
                    (true, _) => self.paint("ok", Colour::Good),
                    (false, Some(code)) => self.paint(code.as_str(), Colour::Bad),
                    (false, None) => self.paint("failed", Colour::Bad),
                };
                let used = usage.as_ref().map(|usage| {
                    let memory = usage.memory_peak.map(|peak| format!(", {}", bytes(peak))).unwrap_or_default();
                    format!(" in {}{memory}", millis(usage.wall_ms))
                });
                format!("  {tool} {verdict}{}", used.unwrap_or_default())
            }
            EventBody::ApprovalRequested { call_id, tool, .. } => {
                format!("  {tool} waits for approval: call {call_id}")
            }
            EventBody::QuestionAsked { call_id, text, .. } => format!("  question of call {call_id}: {text}"),
            EventBody::JobEnded { result } => self.ended(result),
            EventBody::ModelDelta { .. } => return None,
        };
        Some(line)
    }

    fn ended(&self, result: &JobResult) -> String {
        let usage = &result.usage;
        let verdict = match &result.verdict {
            Verdict::Success { .. } => self.paint("success", Colour::Good),
            Verdict::Failed { error_code, .. } => self.paint(&format!("failed: {error_code}"), Colour::Bad),
        };
        format!(
            "{verdict} after {} turns, {} calls, {} tokens, {:.4} USD, {:.1} s",
            usage.turns,
            usage.tool_calls,
            usage.input_tokens + usage.output_tokens,
            usage.cost_usd,
            usage.wall_seconds
        )
    }
}

/// A phase in the words of people.
pub(crate) fn phase_name(phase: toolproto::api::Phase) -> &'static str {
    match phase {
        toolproto::api::Phase::Idle => "idle",
        toolproto::api::Phase::Planning => "planning",
        toolproto::api::Phase::Executing => "executing",
        toolproto::api::Phase::Observing => "observing",
    }
}

/// The whole value has an empty pointer; a person wants to see something there.
fn pointer(pointer: &str) -> &str {
    if pointer.is_empty() { "the top" } else { pointer }
}

/// A size for people.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut whole = count;
    while whole >= 10_240 && unit + 1 < UNITS.len() {
        whole /= 1024;
        unit += 1;
    }
    format!("{whole} {}", UNITS[unit])
}

/// A duration for people.
pub(crate) fn millis(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} ms"),
        10_000..600_000 => format!("{} s", count / 1000),
        _ => format!("{} min", count / 60_000),
    }
}

/// Rows under a heading, columns as wide as their widest cell. Control characters in cells become `?`: what a tool or a
/// job's owner named must not steer the terminal.
pub(crate) fn table<const N: usize>(heading: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = heading.map(|cell| cell.chars().count());
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(|cell| printable(cell))).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: [&str; N]| {
        let padded: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(heading)];
    lines.extend(rows.iter().map(|row| line(row.each_ref().map(String::as_str))));
    lines.join("\n")
}

/// The text without what a terminal would obey.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|character| if character.is_control() { '?' } else { character }).collect()
}

/// JSON in which nothing is left that a terminal would obey: what JSON lets stand in strings is escaped, too.
fn inert(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_control() && character != '\n' {
            text.push_str(&format!("\\u{:04x}", u32::from(character)));
        } else {
            text.push(character);
        }
    }
    text
}

/// A reader that has gone (`agentctl jobs | head`) is no failure of ours, but there is nothing left to do either.
fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => Err(Failure::file(std::path::Path::new("stdout"), error)),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_terminals_are_not_steered() {
        let rows = [["a".to_owned(), "long one".to_owned()], ["bcd\x1b[2J".to_owned(), "é".to_owned()]];
        assert_eq!(table(["ID", "NAME"], &rows), "ID       NAME\na        long one\nbcd?[2J  é");
    }

    #[test]
    fn json_says_the_same_and_steers_no_terminal() {
        let value = serde_json::json!({"said": "a\u{9b}2J\u{7f}\u{1b}é\n"});
        let text = inert(&serde_json::to_string_pretty(&value).unwrap());
        assert_eq!(text, "{\n  \"said\": \"a\\u009b2J\\u007f\\u001bé\\n\"\n}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn figures_are_for_people() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(10 << 20), "10 MiB");
        assert_eq!(bytes(u64::MAX), "16777215 TiB");
        assert_eq!(millis(1234), "1234 ms");
        assert_eq!(millis(61_000), "61 s");
        assert_eq!(millis(601_000), "10 min");
    }
}
