//! Where in a file something is wrong: errors of TOML files with file, line, reason and the nearest known name.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

/// A configuration file that is refused: `FILE:LINE: reason`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct FileError {
    /// The file as it was named.
    pub file: PathBuf,
    /// The line, counted from 1; absent when the reason concerns the whole file.
    pub line: Option<usize>,
    /// What is wrong and what to do about it.
    pub reason: String,
}

impl FileError {
    /// An error about the whole file.
    pub fn whole(file: &Path, reason: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: None, reason: reason.into() }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.file.display(), self.reason),
            None => write!(f, "{}: {}", self.file.display(), self.reason),
        }
    }
}

/// Reads a raw serde shape from TOML text.
///
/// # Errors
/// When the text is not TOML or does not fit the shape; the error names file and line, and for an unknown field the
/// nearest known one.
pub fn parse_toml<T: DeserializeOwned>(file: &Path, text: &str) -> Result<T, FileError> {
    toml::from_str(text).map_err(|error| FileError {
        file: file.to_owned(),
        line: error.span().map(|span| line_of(text, span.start)),
        reason: with_nearest_name(error.message()),
    })
}

/// The line, counted from 1, of a `key` (optionally below `[table]`), for errors found after parsing.
#[must_use]
pub fn line_of_key(text: &str, table: &str, key: &str) -> Option<usize> {
    let mut current = String::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(header) = line.strip_prefix('[') {
            header.trim_matches(['[', ']', ' ']).clone_into(&mut current);
            if key.is_empty() && current == table {
                return Some(index + 1);
            }
        } else if current == table
            && line.strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with(['=', '.']))
        {
            return Some(index + 1);
        }
    }
    None
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

/// Serde says "unknown field `x`, expected one of `a`, `b`"; the nearest of them is what was most likely meant.
fn with_nearest_name(message: &str) -> String {
    let message = message.trim().replace('\n', ", ");
    let mut quoted = message.split('`').skip(1).step_by(2);
    if !message.starts_with("unknown field") && !message.starts_with("unknown variant") {
        return message;
    }
    let Some(written) = quoted.next() else { return message };
    match nearest(written, quoted) {
        Some(name) => format!("{message}; did you mean `{name}`?"),
        None => message,
    }
}

/// How many known names are listed where none is near.
const MOST_LISTED: usize = 12;

/// What could have been meant by an unknown name, as the end of its message: the names that there are, as long as they are few,
/// and the nearest of them.
pub fn alternatives<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    let near = nearest(written, known.iter().copied()).map(|name| format!("; did you mean `{name}`?"));
    let listed = if known.is_empty() {
        "; there is none".to_owned()
    } else if known.len() <= MOST_LISTED || near.is_none() {
        let names: Vec<_> = known.iter().take(MOST_LISTED).map(|name| format!("`{name}`")).collect();
        let others = known.len() - names.len();
        let others = if others == 0 { String::new() } else { format!(" and {others} others") };
        format!("; known: {}{others}", names.join(", "))
    } else {
        String::new()
    };
    listed + &near.unwrap_or_default()
}

/// The known name nearest to what was written, if one is near enough to be meant.
pub fn nearest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (written.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|name| (strsim::levenshtein(written, name), name))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only the shape matters")]
    struct Shape {
        memory: String,
        pids: u32,
    }

    #[test]
    fn errors_name_file_line_and_the_nearest_field() {
        let error =
            parse_toml::<Shape>(Path::new("tools/x/tool.toml"), "memory = \"1MiB\"\n\nmemry = 3\n").unwrap_err();
        assert_eq!(error.line, Some(3));
        assert!(error.to_string().starts_with("tools/x/tool.toml:3: unknown field `memry`"), "{error}");
        assert!(error.to_string().ends_with("did you mean `memory`?"), "{error}");
    }

    #[test]
    fn broken_toml_names_its_line() {
        let error = parse_toml::<Shape>(Path::new("a.toml"), "memory = \"x\"\npids = = 2\n").unwrap_err();
        assert_eq!(error.line, Some(2));
    }

    #[test]
    fn a_key_is_found_in_its_table_only() {
        let text = "name = \"a\"\n[run]\nentry = \"m\"\n[limits]\nname = \"b\"\n";
        assert_eq!(line_of_key(text, "", "name"), Some(1));
        assert_eq!(line_of_key(text, "limits", "name"), Some(5));
        assert_eq!(line_of_key(text, "run", "name"), None);
        assert_eq!(line_of_key(text, "limits", ""), Some(4));
    }

    #[test]
    fn far_names_are_not_suggested() {
        assert_eq!(nearest("sandbax", ["run", "sandbox"]), Some("sandbox"));
        assert_eq!(nearest("colour", ["run", "sandbox"]), None);
    }

    #[test]
    fn an_unknown_names_alternatives_are_listed_while_they_are_few() {
        assert_eq!(alternatives("exek", ["bun", "exec"]), "; known: `bun`, `exec`; did you mean `exec`?");
        assert_eq!(alternatives("ruby", ["bun", "exec"]), "; known: `bun`, `exec`");
        assert_eq!(alternatives("ruby", []), "; there is none");
        let many: Vec<String> = (0..20).map(|number| format!("tool_{number}")).collect();
        let many = || many.iter().map(String::as_str);
        assert_eq!(alternatives("tool_77", many()), "; did you mean `tool_7`?");
        assert!(alternatives("else", many()).ends_with("`tool_10`, `tool_11` and 8 others"));
    }
}
