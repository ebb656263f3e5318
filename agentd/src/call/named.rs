//! Denied paths, from what a failing tool says itself.
//!
//! ```text
//!   a call did not end well ──▶ its error reply, the end of its stderr ──▶ paths beside words such as "permission denied"
//!                                                                                        │
//!   denied, with the rule that would allow it ◀── the plan keeps the call from it ◀──────┘
//! ```
//!
//! The kernel tells nobody which path it refused, and to trace calls would cost those that end well, too. So this is a
//! hint and no record: a tool can name what it never tried, and be silent about what it did. The text of the plan alone
//! decides, never the host's files.

use std::path::Path;

use sandbox::outline::{Failure, Outline};
use serde_json::Value;
use toolproto::receipt::{Denial, OutcomeKind, Witness};

use super::Answered;
use crate::launch::Ended;

/// The most paths that are named.
const MOST: usize = 16;
/// How much of a reply is looked at, and of stderr from its end.
const SCANNED: usize = 16 << 10;
/// The longest path that is looked at; the kernel's PATH_MAX is as long.
const LONGEST: usize = 4096;

/// Words of a failed attempt, in small letters, from the most telling to the least.
const FAILURES: [(Failure, &[&str]); 3] = [
    (Failure::ReadOnly, &["read-only file", "readonlyfilesystem", "erofs"]),
    (
        Failure::Forbidden,
        &[
            "permission denied",
            "permissiondenied",
            "eacces",
            "access denied",
            "accessdenied",
            "not permitted",
            "eperm",
            "resource busy",
            "ebusy",
        ],
    ),
    (
        Failure::Absent,
        &["no such file", "nosuchfile", "enoent", "not found", "notfound", "does not exist", "doesn't exist"],
    ),
];

/// What a request line of HTTP begins with: what follows is no file.
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];

/// The paths that a call which did not end well named itself, and from which its plan keeps it. `said` is the end of its
/// stderr.
pub(super) fn denied(outline: &Outline, ended: &Ended, answered: &Answered, said: &str) -> Vec<Denial> {
    let has_exited = ended.outcome.kind == OutcomeKind::Exited && ended.outcome.exit_status == Some(0);
    let mut found = Found { outline, denied: Vec::new() };
    match answered {
        Answered::Success { .. } if has_exited => return Vec::new(),
        Answered::Success { .. } => {}
        // What never ran said nothing.
        Answered::Failure(_) if ended.failure.is_some() => return Vec::new(),
        Answered::Failure(error) => {
            if let Some(own) = error.details.get("tool_error") {
                found.read_reply(&error.message, own);
            }
        }
    }
    let start = said.len().saturating_sub(SCANNED);
    let end = said.get(said.ceil_char_boundary(start)..).unwrap_or_default();
    for line in end.lines() {
        found.read_line(line);
    }
    found.denied
}

/// Adds them to what a failure says.
pub(super) fn tell(answered: &mut Answered, denied: &[Denial]) {
    let Answered::Failure(error) = answered else { return };
    let Ok(Value::Array(further)) = serde_json::to_value(denied) else { return };
    if further.is_empty() {
        return;
    }
    if error.details.is_null() {
        error.details = Value::Object(serde_json::Map::new());
    }
    match error.details.get_mut("denied") {
        Some(Value::Array(all)) => all.extend(further),
        _ => error.details["denied"] = Value::Array(further),
    }
}

struct Found<'a> {
    outline: &'a Outline,
    denied: Vec<Denial>,
}

impl Found<'_> {
    /// A tool's own error: its words, and beside them details that are nothing but a path.
    fn read_reply(&mut self, message: &str, own: &Value) {
        let (mut words, mut details, mut room) = (Vec::new(), Vec::new(), SCANNED);
        for text in [own.get("code").and_then(Value::as_str).unwrap_or_default(), message] {
            take(text, &mut room, &mut words);
        }
        strings(own.get("details").unwrap_or(&Value::Null), &mut room, &mut details);
        let of_all = words.iter().chain(&details).filter_map(|text| failure(text)).max();
        for text in words {
            text.lines().for_each(|line| self.read_line(line));
        }
        for text in details {
            match of_all {
                Some(failure) if text.starts_with('/') && self::failure(text).is_none() => self.look(text, failure),
                _ => text.lines().for_each(|line| self.read_line(line)),
            }
        }
    }

    fn read_line(&mut self, line: &str) {
        let Some(failure) = failure(line) else { return };
        let mut before = "";
        let mut named = Vec::new();
        for word in words(line) {
            let is_named = if word.starts_with('/') {
                !METHODS.contains(&before)
            } else {
                self.outline.protects(Path::new(word), failure).is_some()
            };
            if is_named {
                named.push(word);
            }
            before = word;
        }
        // Who complains is no object: `/tool/run: 3: cannot create /usr/x: …`.
        if let [first, _, ..] = named.as_slice()
            && line.trim_start().strip_prefix(first).is_some_and(|rest| rest.starts_with(':'))
        {
            named.remove(0);
        }
        for path in named {
            self.look(path, failure);
        }
    }

    fn look(&mut self, path: &str, failure: Failure) {
        if self.denied.len() >= MOST || path.len() > LONGEST {
            return;
        }
        let kept = if path.starts_with('/') {
            self.outline.keeps(Path::new(path), failure)
        } else {
            self.outline.protects(Path::new(path), failure)
        };
        let Some(kept) = kept else { return };
        let detail = format!("{}: {}", path.escape_debug(), kept.how);
        if self.denied.iter().all(|earlier| earlier.detail != detail) {
            self.denied.push(Denial { witness: Some(Witness::Tool), ..Denial::seen(kept.what, detail, kept.rule) });
        }
    }
}

/// The most telling failure that a text speaks of.
fn failure(text: &str) -> Option<Failure> {
    let text = text.to_lowercase();
    FAILURES.into_iter().find(|(_, words)| words.iter().any(|word| text.contains(word))).map(|(failure, _)| failure)
}

/// All strings in a value, as far as there is room.
fn strings<'a>(value: &'a Value, room: &mut usize, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => take(text, room, texts),
        Value::Array(items) => items.iter().for_each(|item| strings(item, room, texts)),
        Value::Object(fields) => fields.values().for_each(|field| strings(field, room, texts)),
        _ => {}
    }
}

fn take<'a>(text: &'a str, room: &mut usize, texts: &mut Vec<&'a str>) {
    let text = &text[..text.floor_char_boundary(*room)];
    *room -= text.len();
    if !text.is_empty() {
        texts.push(text);
    }
}

/// What a line consists of besides punctuation. Between quotation marks a path may hold anything.
fn words(line: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        let after = &rest[first.len_utf8()..];
        if let Some((quoted, behind)) = closing(first).and_then(|close| after.split_once(close))
            && quoted.starts_with('/')
        {
            found.push(quoted);
            rest = behind;
        } else if is_between(first) {
            rest = after;
        } else {
            let end = rest.find(is_between).unwrap_or(rest.len());
            found.push(rest[..end].trim_end_matches('.'));
            rest = &rest[end..];
        }
    }
    // An address's path: `//host/path` is left of it.
    found.retain(|word| !word.is_empty() && !word.starts_with("//"));
    found
}

const fn closing(mark: char) -> Option<char> {
    match mark {
        '\'' | '"' | '`' => Some(mark),
        '‘' => Some('’'),
        '“' => Some('”'),
        '«' => Some('»'),
        _ => None,
    }
}

fn is_between(character: char) -> bool {
    character.is_whitespace() || character.is_control() || "'\"`‘’“”«»()[]{}<>,;:=|".contains(character)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use sandbox::policy::Policy;
    use serde_json::json;
    use toolproto::code::Code;
    use toolproto::receipt::{Outcome, Usage};

    use super::*;
    use crate::call::failure as call_failure;

    fn outline() -> Outline {
        let text = "version = 1\nname = \"p\"\nworkspace = \"overlay\"\n[[path]]\npath = \"/usr\"\naccess = \"read\"\n\
                    why = \"x\"\n[[protect]]\nname = \".git/hooks\"\nwhy = \"x\"\n";
        let policies = Policy::load_all(&[(PathBuf::from("p.toml"), text.to_owned())]).unwrap();
        Outline::of(&policies["p"])
    }

    fn ended(status: i32) -> Ended {
        Ended {
            outcome: Outcome { kind: OutcomeKind::Exited, code: None, exit_status: Some(status), signal: None },
            failure: None,
            stdout: Vec::new(),
            stdout_overflowed: false,
            stderr_tail: String::new(),
            usage: Usage::default(),
            denied: Vec::new(),
            network: None,
        }
    }

    fn crashed() -> Answered {
        Answered::Failure(call_failure(Code::ToolCrashed, "it crashed", Value::Null))
    }

    fn said(text: &str) -> Vec<String> {
        let denied = denied(&outline(), &ended(1), &crashed(), text);
        assert!(denied.iter().all(|one| one.witness == Some(Witness::Tool)), "{denied:?}");
        denied.into_iter().map(|one| one.detail).collect()
    }

    #[test]
    fn runtimes_and_programs_are_understood() {
        for line in [
            "FileNotFoundError: [Errno 2] No such file or directory: '/etc/shadow'",
            "cat: /etc/shadow: No such file or directory",
            "Error: ENOENT: no such file or directory, open '/etc/shadow'",
            "java.nio.file.NoSuchFileException: /etc/shadow",
            "java.io.FileNotFoundException: /etc/shadow (No such file or directory)",
            "open /etc/shadow: no such file or directory",
            "sh: 1: cannot open /etc/shadow: No such file",
            "ls: cannot access \"/etc/shadow\": Permission denied",
            "tool: can't open '/etc/shadow': No such file or directory.",
            "/tool/run: line 3: /etc/shadow: No such file or directory",
        ] {
            assert_eq!(said(line), ["/etc/shadow: not shown"], "{line}");
        }
        for line in [
            "OSError: [Errno 30] Read-only file system: '/usr/x'",
            "PermissionError: [Errno 13] Permission denied: '/usr/x'",
            "/usr/bin/ld: cannot open output file /usr/x: Read-only file system",
            "java.nio.file.AccessDeniedException: /usr/x",
            "error: EROFS: read-only file system, open '/usr/x'",
        ] {
            assert_eq!(said(line), ["/usr/x: read-only"], "{line}");
        }
        for line in [
            "sh: 1: cannot create .git/hooks/pre-commit: Read-only file system",
            "OSError: [Errno 30] Read-only file system: './.git/hooks/pre-commit'",
        ] {
            let path = line.split(['\'', ' ']).find(|word| word.contains(".git")).unwrap().trim_end_matches(':');
            assert_eq!(said(line), [format!("{path}: protected")], "{line}");
        }
        assert_eq!(said("'/home/a b/c': No such file or directory"), ["/home/a b/c: not shown"]);
    }

    #[test]
    fn what_is_no_failed_attempt_is_not_named() {
        for line in [
            "  File \"/usr/lib/python3.11/pathlib.py\", line 1044, in open",
            "  File \"/srv/elsewhere.py\", line 3, in <module>",
            "looking at /etc/shadow",
            "GET /v1/items: 404 not found",
            "https://example.com/a/b: not found",
            "/workspace/x: No such file or directory",
            "/usr/share/nothing: No such file or directory",
            "/tmp/x: Permission denied",
            "module.name not found, 1/2 does not exist",
        ] {
            assert_eq!(said(line), Vec::<String>::new(), "{line}");
        }
    }

    #[test]
    fn a_call_that_ends_well_or_never_ran_names_none() {
        let text = "cat: /etc/shadow: No such file or directory";
        let success = || Answered::Success { result: json!({}), artifacts: Vec::new() };
        assert_eq!(denied(&outline(), &ended(0), &success(), text), []);
        assert_eq!(denied(&outline(), &ended(1), &success(), text).len(), 1, "a command's status");
        let failed = sandbox::protocol::LaunchFailure {
            code: Code::LaunchFailed,
            step: "exec".to_owned(),
            errno: None,
            message: String::new(),
        };
        let unstarted = Ended { failure: Some(failed), ..ended(1) };
        assert_eq!(denied(&outline(), &unstarted, &crashed(), text), []);
    }

    #[test]
    fn a_reply_is_read_with_its_code_and_details() {
        let reply = |own: Value, message: &str| {
            let answered = Answered::Failure(call_failure(Code::ToolFailed, message, json!({"tool_error": own})));
            let denied = denied(&outline(), &ended(1), &answered, "");
            denied.into_iter().map(|one| one.detail).collect::<Vec<_>>()
        };
        let own = json!({"code": "ENOENT", "details": {"paths": ["/etc/shadow", "/workspace/x", "/home/me/a b"]}});
        assert_eq!(reply(own, "it is missing"), ["/etc/shadow: not shown", "/home/me/a b: not shown"]);
        let own = json!({"code": "FAILED", "details": {"path": "/etc/shadow"}});
        assert_eq!(reply(own, "odd"), Vec::<String>::new(), "nothing says that an attempt failed");
        assert_eq!(reply(json!({"code": "X"}), "/usr/x: Permission denied"), ["/usr/x: read-only"]);
        // A trace in the message: only its last line speaks of a failure.
        let trace = "Traceback\n  File \"/usr/lib/x.py\", line 3\nPermissionError: Permission denied: '/usr/y'";
        assert_eq!(reply(json!({"code": "X"}), trace), ["/usr/y: read-only"]);
    }

    #[test]
    fn hostile_text_is_bounded_shown_and_listed_once() {
        let many: String = (0..1000).map(|number| format!("/home/{}: ENOENT\n", number % 100)).collect();
        assert_eq!(said(&many).len(), MOST);
        assert_eq!(said(&"cat: /home/x: ENOENT\n".repeat(100)), ["/home/x: not shown"]);
        let all = said("'/home/\u{1b}[2J\u{202e}x': ENOENT");
        assert_eq!(all.len(), 1);
        assert!(!all[0].contains(char::is_control) && !all[0].contains('\u{202e}'), "{all:?}");
        assert_eq!(said(&format!("/{}: ENOENT", "x".repeat(LONGEST))), Vec::<String>::new());
        // The end counts, and a character is not cut in two.
        let late = format!("/home/early: ENOENT\n{}\n/home/late: ENOENT", "ü".repeat(SCANNED));
        assert_eq!(said(&late), ["/home/late: not shown"]);
        for mark in ["'", "\"", "`", "‘", "/", "//", ":"] {
            let _ = said(&format!("{} ENOENT", mark.repeat(SCANNED)));
        }
    }

    #[test]
    fn a_failure_tells_them_beside_what_was_seen() {
        let named = denied(&outline(), &ended(1), &crashed(), "/etc/shadow: ENOENT");
        let mut answered = crashed();
        tell(&mut answered, &named);
        let Answered::Failure(error) = &answered else { panic!() };
        assert_eq!(error.details["denied"][0]["witness"], "tool");
        let mut answered =
            Answered::Failure(call_failure(Code::ToolCrashed, "x", json!({"denied": [{"what": "syscall"}]})));
        tell(&mut answered, &named);
        let Answered::Failure(error) = &answered else { panic!() };
        assert_eq!(error.details["denied"].as_array().unwrap().len(), 2);
        let mut untouched = crashed();
        tell(&mut untouched, &[]);
        assert_eq!(untouched, crashed());
    }
}
