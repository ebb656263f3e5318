//! Takes the values of secrets out of all text that leaves a call, so that a tool that prints what it was given does not show it
//! to the model, the receipts, the log or the caller.
//!
//! A value is found as it is and as JSON writes it. A tool that encodes it otherwise is not stopped by this: it was given
//! the secret, and what it can reach is what its policy allows.

use std::sync::{Arc, PoisonError, RwLock};

use aho_corasick::{AhoCorasick, BuildError, MatchKind};
use sandbox::protocol::KnownSecret;

/// All values that are known. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Redactor(Arc<RwLock<Known>>);

#[derive(Debug, Default)]
struct Known {
    secrets: Vec<KnownSecret>,
    patterns: Option<Patterns>,
}

#[derive(Clone, Debug)]
struct Patterns {
    finder: AhoCorasick,
    /// What stands in the place of each pattern.
    instead: Vec<String>,
}

impl Redactor {
    /// Adds values. Earlier ones stay: calls that were given them may still run.
    ///
    /// # Errors
    /// When there are too many to look for; nothing is added then.
    pub(crate) fn add(&self, known: Vec<KnownSecret>) -> Result<(), BuildError> {
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let mut secrets = held.secrets.clone();
        secrets.extend(known.into_iter().filter(|one| !held.secrets.contains(one)));
        let patterns = Patterns::of(&secrets)?;
        *held = Known { secrets, patterns };
        Ok(())
    }

    /// Text without them.
    pub(crate) fn bytes(&self, text: Vec<u8>) -> Vec<u8> {
        let patterns = self.0.read().unwrap_or_else(PoisonError::into_inner).patterns.clone();
        match patterns {
            Some(Patterns { finder, instead }) if finder.is_match(&text) => finder.replace_all_bytes(&text, &instead),
            _ => text,
        }
    }

    /// Text without them.
    pub(crate) fn text(&self, text: String) -> String {
        let patterns = self.0.read().unwrap_or_else(PoisonError::into_inner).patterns.clone();
        match patterns {
            Some(Patterns { finder, instead }) if finder.is_match(&text) => finder.replace_all(&text, &instead),
            _ => text,
        }
    }
}

impl Patterns {
    fn of(secrets: &[KnownSecret]) -> Result<Option<Self>, BuildError> {
        let (mut patterns, mut instead) = (Vec::new(), Vec::new());
        for secret in secrets {
            for spelling in spellings(secret.value.reveal()) {
                if !patterns.contains(&spelling) {
                    patterns.push(spelling);
                    // Nothing that JSON would have to escape: names are those of environment variables.
                    instead.push(format!("[secret {}]", secret.name));
                }
            }
        }
        if patterns.is_empty() {
            return Ok(None);
        }
        let finder = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&patterns)?;
        Ok(Some(Self { finder, instead }))
    }
}

/// A value as it is, and as writers of JSON spell it: with short escapes, with everything else than ASCII escaped, with
/// slashes escaped.
fn spellings(value: &str) -> Vec<String> {
    let json = serde_json::Value::from(value).to_string();
    let json = json.trim_start_matches('"').strip_suffix('"').unwrap_or(&json).to_owned();
    let mut ascii = String::new();
    for character in json.chars() {
        if character.is_ascii() {
            ascii.push(character);
        } else {
            let mut units = [0; 2];
            ascii.extend(character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    let slashes = |text: &str| text.replace('/', "\\/");
    vec![value.to_owned(), slashes(&json), slashes(&ascii), json, ascii]
}

#[cfg(test)]
mod tests {
    use sandbox::protocol::SecretText;
    use serde_json::json;

    use super::*;

    fn known(name: &str, value: &str) -> KnownSecret {
        KnownSecret { name: name.to_owned(), value: SecretText::new(value.to_owned()) }
    }

    #[test]
    fn values_are_taken_out_in_every_usual_spelling() {
        let redactor = Redactor::default();
        assert_eq!(redactor.text("sesame/öpen".to_owned()), "sesame/öpen");
        let awkward = "ses\"ame/ö\\😀\n";
        redactor.add(vec![known("TOKEN", awkward), known("OTHER", "sesame")]).unwrap();
        let ascii = "\"ses\\\"ame/\\u00f6\\\\\\ud83d\\ude00\\n\"";
        assert_eq!(serde_json::from_str::<String>(ascii).unwrap(), awkward, "what the test writes is that value");
        for text in [
            awkward.to_owned(),
            json!(awkward).to_string(),
            ascii.to_owned(),
            ascii.replace('/', "\\/"),
            format!("x{awkward}y"),
        ] {
            let shown = redactor.text(text.clone());
            assert!(shown.contains("[secret TOKEN]") && !shown.contains("ame/"), "{text}: {shown}");
            assert_eq!(redactor.bytes(text.into_bytes()), shown.into_bytes());
        }
        let reply = json!({"ok": true, "result": {"a": awkward, "b": ["sesame", 1]}}).to_string();
        let shown: serde_json::Value = serde_json::from_str(&redactor.text(reply)).unwrap();
        assert_eq!(shown["result"], json!({"a": "[secret TOKEN]", "b": ["[secret OTHER]", 1]}));
    }

    #[test]
    fn a_new_value_is_added_to_the_old_one_and_the_longest_counts() {
        let redactor = Redactor::default();
        redactor.add(vec![known("KEY", "first-value")]).unwrap();
        redactor.add(vec![known("KEY", "first-value-2")]).unwrap();
        assert_eq!(
            redactor.text("first-value-2 first-value first-valu".to_owned()),
            "[secret KEY] [secret KEY] first-valu"
        );
    }
}
