//! The parser for bytes that a tool or a client wrote.
//!
//! `serde_json` alone takes duplicate keys (the last wins), turns integers beyond 64 bits into doubles, and names line
//! and column where a program wants the byte. Here each of these is refused with its byte offset, and so are NaN and
//! Infinity, nesting beyond [`MAX_DEPTH`], text that is not UTF-8, and anything after the value. Every byte is looked
//! at a fixed number of times, so that the time is linear in the length whatever the bytes are.

use serde_json::{Map, Number, Value};

/// The deepest nesting that is read: `[[1]]` is two levels deep.
pub const MAX_DEPTH: usize = 64;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The bytes are not one JSON value as the protocol wants it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at byte {offset}")]
pub struct JsonError {
    /// The byte where reading stopped, counted from 0.
    pub offset: usize,
    /// What is wrong there.
    pub reason: String,
}

impl JsonError {
    fn new(offset: usize, reason: impl Into<String>) -> Self {
        Self { offset, reason: reason.into() }
    }
}

/// Reads one JSON value. A byte-order mark and white space around it (CRLF too) are tolerated.
///
/// Integers are kept exactly: those that fit neither `i64` nor `u64` are refused rather than rounded. Numbers with a
/// fraction or an exponent become the nearest double.
///
/// # Errors
/// With the byte offset: not JSON, NaN or Infinity, invalid UTF-8, a duplicate key, a number out of range, more than
/// [`MAX_DEPTH`] levels, anything after the value.
pub fn parse(bytes: &[u8]) -> Result<Value, JsonError> {
    let text = decode(bytes)?;
    let (value, end) = parse_prefix(text, start_of(text))?;
    match text.as_bytes()[end..].iter().position(|byte| !is_space(*byte)) {
        None => Ok(value),
        Some(more) => Err(JsonError::new(end + more, "unexpected bytes after the JSON value")),
    }
}

/// The bytes as text; the error's offset is the first byte that is not UTF-8.
pub(crate) fn decode(bytes: &[u8]) -> Result<&str, JsonError> {
    std::str::from_utf8(bytes).map_err(|error| JsonError::new(error.valid_up_to(), "invalid UTF-8"))
}

/// Where the text begins once a byte-order mark is passed.
pub(crate) fn start_of(text: &str) -> usize {
    if text.as_bytes().starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 }
}

/// Reads the value that begins at or, after white space, behind `start`; says where it ends. Offsets count from the
/// beginning of `text`.
pub(crate) fn parse_prefix(text: &str, start: usize) -> Result<(Value, usize), JsonError> {
    let mut parser = Parser { text, at: start };
    let value = parser.value(0)?;
    Ok((value, parser.at))
}

/// White space as JSON defines it.
pub(crate) const fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(is_space) {
            self.at += 1;
        }
    }

    fn error<T>(&self, reason: impl Into<String>) -> Result<T, JsonError> {
        Err(JsonError::new(self.at, reason))
    }

    /// What was found instead of what was expected.
    fn unexpected<T>(&self, expected: &str) -> Result<T, JsonError> {
        match self.text[self.at..].chars().next() {
            Some(found) => self.error(format!("expected {expected}, found {found:?}")),
            None => self.error(format!("expected {expected}, found the end")),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.skip_space();
        match self.peek() {
            Some(b'{') => self.object(depth + 1),
            Some(b'[') => self.array(depth + 1),
            Some(b'"') => self.string().map(Value::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => self.literal(),
        }
    }

    fn literal(&mut self) -> Result<Value, JsonError> {
        for (word, value) in [("null", Value::Null), ("true", Value::Bool(true)), ("false", Value::Bool(false))] {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        for word in ["NaN", "Infinity"] {
            if self.text[self.at..].starts_with(word) {
                return self.error(format!("{word} is no JSON number"));
            }
        }
        self.unexpected("a JSON value")
    }

    fn check_depth(&self, depth: usize) -> Result<(), JsonError> {
        if depth > MAX_DEPTH { self.error(format!("nesting deeper than {MAX_DEPTH} levels")) } else { Ok(()) }
    }

    fn array(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.check_depth(depth)?;
        self.at += 1;
        let mut items = Vec::new();
        self.skip_space();
        if self.peek() == Some(b']') {
            self.at += 1;
            return Ok(Value::Array(items));
        }
        loop {
            items.push(self.value(depth)?);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b']') => {
                    self.at += 1;
                    return Ok(Value::Array(items));
                }
                _ => return self.unexpected("`,` or `]`"),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value, JsonError> {
        self.check_depth(depth)?;
        self.at += 1;
        let mut members = Map::new();
        self.skip_space();
        if self.peek() == Some(b'}') {
            self.at += 1;
            return Ok(Value::Object(members));
        }
        loop {
            self.skip_space();
            let key_at = self.at;
            if self.peek() != Some(b'"') {
                return self.unexpected("a key in quotes");
            }
            let key = self.string()?;
            self.skip_space();
            if self.peek() != Some(b':') {
                return self.unexpected("`:`");
            }
            self.at += 1;
            if members.contains_key(&key) {
                return Err(JsonError::new(key_at, format!("duplicate key {}", shown(&key))));
            }
            let value = self.value(depth)?;
            members.insert(key, value);
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {
                    self.at += 1;
                    return Ok(Value::Object(members));
                }
                _ => return self.unexpected("`,` or `}`"),
            }
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let mut content = String::new();
        loop {
            let rest = &self.text.as_bytes()[self.at..];
            let plain = rest.iter().position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1f)).unwrap_or(rest.len());
            content.push_str(&self.text[self.at..self.at + plain]);
            self.at += plain;
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(content);
                }
                Some(b'\\') => content.push(self.escape()?),
                Some(_) => return self.error("a control character inside a string must be escaped"),
                None => return self.error("the string does not end"),
            }
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let start = self.at;
        self.at += 1;
        let character = match self.peek() {
            Some(b'u') => {
                self.at += 1;
                return self.unicode_escape(start);
            }
            Some(byte @ (b'"' | b'\\' | b'/')) => char::from(byte),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            _ => return self.unexpected("an escape (one of \" \\ / b f n r t u)"),
        };
        self.at += 1;
        Ok(character)
    }

    fn unicode_escape(&mut self, start: usize) -> Result<char, JsonError> {
        let alone = || JsonError::new(start, "half a surrogate pair is no character");
        let first = self.hex4()?;
        if !(0xd800..0xe000).contains(&first) {
            return char::from_u32(first).ok_or_else(alone);
        }
        if first >= 0xdc00 || !self.text[self.at..].starts_with("\\u") {
            return Err(alone());
        }
        self.at += 2;
        let second = self.hex4()?;
        if !(0xdc00..0xe000).contains(&second) {
            return Err(alone());
        }
        char::from_u32(0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)).ok_or_else(alone)
    }

    fn hex4(&mut self) -> Result<u32, JsonError> {
        let mut code = 0;
        for _ in 0..4 {
            let Some(digit) = self.peek().and_then(|byte| char::from(byte).to_digit(16)) else {
                return self.unexpected("a hexadecimal digit");
            };
            code = code * 16 + digit;
            self.at += 1;
        }
        Ok(code)
    }

    fn number(&mut self) -> Result<Value, JsonError> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
            if self.text[self.at..].starts_with("Infinity") {
                return Err(JsonError::new(start, "Infinity is no JSON number"));
            }
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
            if self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
                return Err(JsonError::new(start, "a number must not begin with 0 and another digit"));
            }
        } else {
            self.digits()?;
        }
        let mut is_integer = true;
        if self.peek() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            is_integer = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        let written = &self.text[start..self.at];
        let number = if is_integer && written != "-0" {
            let signed = written.parse::<i64>().map(Number::from);
            signed.or_else(|_| written.parse::<u64>().map(Number::from)).map_err(|_| {
                JsonError::new(start, "an integer beyond 64 bits would lose digits; write it as a string")
            })?
        } else {
            let nearest = written.parse::<f64>().ok().and_then(Number::from_f64);
            nearest.ok_or_else(|| JsonError::new(start, "the number is too large for a double"))?
        };
        Ok(Value::Number(number))
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        if !self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            return self.unexpected("a digit");
        }
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        Ok(())
    }
}

/// A key as it may stand in a message: at most 60 characters, controls escaped.
fn shown(key: &str) -> String {
    match key.char_indices().nth(60) {
        None => format!("{key:?}"),
        Some((end, _)) => format!("{:?}…", &key[..end]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn refused(bytes: &[u8]) -> (usize, String) {
        let error = parse(bytes).expect_err(&String::from_utf8_lossy(bytes));
        (error.offset, error.reason)
    }

    #[test]
    fn what_the_protocol_tolerates() {
        assert_eq!(parse(b"\xef\xbb\xbf{\r\n\"a\": [1, -2.5e3]\r\n}\r\n").unwrap(), json!({"a": [1, -2500.0]}));
        assert_eq!(parse(b" \t\nnull \n").unwrap(), Value::Null);
        assert_eq!(parse(r#""\u00e9\ud83d\ude00\/\b\f\n\r\t\"\\""#.as_bytes()).unwrap(), "é😀/\u{8}\u{c}\n\r\t\"\\");
        assert_eq!(parse(b"{\"a\":{\"b\":1},\"b\":{\"b\":2}}").unwrap(), json!({"a": {"b": 1}, "b": {"b": 2}}));
    }

    #[test]
    fn every_refusal_names_its_byte() {
        let cases: &[(&[u8], usize, &str)] = &[
            (b"", 0, "found the end"),
            (b"  ", 2, "found the end"),
            (b"hello", 0, "found 'h'"),
            (b"{\"a\":NaN}", 5, "NaN"),
            (b"[Infinity]", 1, "Infinity"),
            (b"[-Infinity]", 1, "Infinity"),
            (b"{\"a\":1,\"b\":2,\"a\":3}", 13, "duplicate key \"a\""),
            (b"[{\"x\":{\"a\":1,\"\\u0061\":3}}]", 13, "duplicate key \"a\""),
            (b"{\"a\":1} x", 8, "after the JSON value"),
            (b"{}{}", 2, "after the JSON value"),
            (b"{\"a\":\"\xff\"}", 6, "invalid UTF-8"),
            (b"\xfe\xff\0{", 0, "invalid UTF-8"),
            (b"{\"a\":1,}", 7, "a key in quotes"),
            (b"[1,]", 3, "a JSON value"),
            (b"[1 2]", 3, "`,` or `]`"),
            (b"{\"a\" 1}", 5, "`:`"),
            (b"{a:1}", 1, "a key in quotes"),
            (b"{\"a\":'b'}", 5, "found '\\''"),
            (b"\"a\nb\"", 2, "control character"),
            (b"\"abc", 4, "does not end"),
            (b"\"\\x\"", 2, "an escape"),
            (b"\"\\u12g4\"", 5, "hexadecimal"),
            (b"\"\\ud800\"", 1, "surrogate"),
            (b"\"\\ud800\\u0041\"", 1, "surrogate"),
            (b"\"\\udc00\\ud800\"", 1, "surrogate"),
            (b"01", 0, "begin with 0"),
            (b"-", 1, "a digit"),
            (b"1.", 2, "a digit"),
            (b"1e", 2, "a digit"),
            (b"+1", 0, "found '+'"),
            (b".5", 0, "found '.'"),
            (b"[1e400]", 1, "too large"),
            (b"[18446744073709551616]", 1, "beyond 64 bits"),
            (b"[-9223372036854775809]", 1, "beyond 64 bits"),
            (b"// no\n{}", 0, "found '/'"),
        ];
        for (bytes, offset, reason) in cases {
            let (at, why) = refused(bytes);
            let shown = String::from_utf8_lossy(bytes);
            assert_eq!(at, *offset, "{shown}: {why}");
            assert!(why.contains(reason), "{shown}: {why}");
        }
    }

    #[test]
    fn integers_of_64_bits_are_kept_exactly() {
        for text in ["9007199254740993", "-9007199254740993", "18446744073709551615", "-9223372036854775808", "0"] {
            assert_eq!(parse(text.as_bytes()).unwrap().to_string(), text);
        }
        assert_eq!(parse(b"-0").unwrap().as_f64().map(f64::to_bits), Some((-0.0_f64).to_bits()));
    }

    #[test]
    fn depth_is_bounded_and_never_overflows_the_stack() {
        let nested = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
        assert!(parse(&nested(MAX_DEPTH)).is_ok());
        assert_eq!(refused(&nested(MAX_DEPTH + 1)).0, MAX_DEPTH);
        assert_eq!(refused(&vec![b'['; 1 << 20]).0, MAX_DEPTH);
        assert_eq!(refused("{\"a\":".repeat(1 << 18).as_bytes()).0, MAX_DEPTH * 5);
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(8, 64, 8, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                proptest::collection::btree_map(any::<String>(), inner, 0..8)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(value in any_json()) {
            prop_assert_eq!(parse(&serde_json::to_vec(&value).unwrap()).unwrap(), value.clone());
            prop_assert_eq!(parse(&serde_json::to_vec_pretty(&value).unwrap()).unwrap(), value);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            if let Err(error) = parse(&bytes) {
                prop_assert!(error.offset <= bytes.len());
            }
        }

        /// What is taken here, serde_json takes too and reads the same.
        #[test]
        fn it_only_narrows_serde_json(text in r#"[\[\]{}:,"\\a-c0-9eE+\-. nulltruefalse]{0,40}"#) {
            if let Ok(value) = parse(text.as_bytes()) {
                prop_assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
            }
        }
    }
}
