//! Sizes and durations as people write them: `512MiB`, `1500ms`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The text is not a size or a duration.
#[derive(Debug, thiserror::Error)]
pub enum UnitError {
    /// Not a byte size.
    #[error("`{0}` is not a size: write a whole number with B, KiB, MiB, GiB or TiB, such as \"512MiB\"")]
    Size(String),
    /// Not a duration.
    #[error("`{0}` is not a duration: write a whole number with ms, s, m or h, such as \"1500ms\"")]
    Duration(String),
}

/// A number of bytes. In files: a whole number and a unit (`B`, `KiB`, `MiB`, `GiB`, `TiB`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` KiB.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }
    /// `n` MiB.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
    /// `n` GiB.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }
}

const SIZES: [(&str, u64); 5] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

impl FromStr for Bytes {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let refused = || UnitError::Size(text.to_owned());
        let (number, factor) =
            SIZES.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor))).ok_or_else(refused)?;
        whole_number(number).and_then(|n| n.checked_mul(*factor)).map(Self).ok_or_else(refused)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, factor) =
            SIZES.iter().find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor)).unwrap_or(&("B", 1));
        write!(f, "{}{unit}", self.0 / factor)
    }
}

impl TryFrom<String> for Bytes {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> Self {
        bytes.to_string()
    }
}

/// What may go from and to each disk of the host, per second. In files: `{ read = "50MiB", write = "20MiB" }`; what is absent is
/// not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskRates {
    /// Bytes read per second.
    pub read: Option<Bytes>,
    /// Bytes written per second.
    pub write: Option<Bytes>,
}

impl DiskRates {
    /// Whether a rate is given.
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        self.read.is_some() || self.write.is_some()
    }

    /// The given rate that is zero, by name: nothing could ever be read or written then.
    #[must_use]
    pub fn zero(&self) -> Option<&'static str> {
        let is_zero = |rate: Option<Bytes>| rate == Some(Bytes(0));
        if is_zero(self.read) {
            return Some("read");
        }
        is_zero(self.write).then_some("write")
    }
}

/// `"1.5"` as 1500: a number of processors in thousandths of one. Absent when it is no such number, or zero.
#[must_use]
pub fn thousandths(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if whole.is_empty() || !(1..=3).contains(&fraction.len()) {
        return None;
    }
    let fraction = whole_number(&format!("{fraction:0<3}"))?;
    whole_number(whole)?.checked_mul(1000)?.checked_add(fraction).filter(|milli| *milli > 0)
}

/// A length of time. In files: a whole number and a unit (`ms`, `s`, `m`, `h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span(pub Duration);

impl Span {
    /// `n` milliseconds.
    #[must_use]
    pub const fn millis(n: u64) -> Self {
        Self(Duration::from_millis(n))
    }
    /// `n` seconds.
    #[must_use]
    pub const fn secs(n: u64) -> Self {
        Self(Duration::from_secs(n))
    }
}

const SPANS: [(&str, u64); 4] = [("ms", 1), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];

impl FromStr for Span {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let refused = || UnitError::Duration(text.to_owned());
        let (number, factor) =
            SPANS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, factor))).ok_or_else(refused)?;
        let millis = whole_number(number).and_then(|n| n.checked_mul(*factor)).ok_or_else(refused)?;
        Ok(Self::millis(millis))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        for (unit, factor) in [("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
            if millis >= factor && millis.is_multiple_of(factor) {
                return write!(f, "{}{unit}", millis / factor);
            }
        }
        write!(f, "{millis}ms")
    }
}

impl TryFrom<String> for Span {
    type Error = UnitError;

    fn try_from(text: String) -> Result<Self, UnitError> {
        text.parse()
    }
}

impl From<Span> for String {
    fn from(span: Span) -> Self {
        span.to_string()
    }
}

/// `u64::from_str` alone would take a sign.
fn whole_number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_read_in_thousandths() {
        for (text, milli) in [("2", 2000), ("0.5", 500), ("1.25", 1250), ("0.001", 1)] {
            assert_eq!(thousandths(text), Some(milli), "{text}");
        }
        for text in ["", "0", "0.0", ".5", "1.", "1.2345", "-1", "1.-5", "two", "1e3", "99999999999999999999"] {
            assert_eq!(thousandths(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_read_and_print() {
        for (text, bytes) in [("1B", 1), ("64KiB", 65_536), ("512MiB", 512 << 20), ("4GiB", 4 << 30), ("0B", 0)] {
            assert_eq!(text.parse::<Bytes>().unwrap(), Bytes(bytes));
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn durations_read_and_print() {
        for (text, millis) in [("1500ms", 1500), ("30s", 30_000), ("10m", 600_000), ("2h", 7_200_000), ("0ms", 0)] {
            assert_eq!(text.parse::<Span>().unwrap(), Span::millis(millis));
            assert_eq!(Span::millis(millis).to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for text in
            ["", "1", "MiB", "-1MiB", "+1MiB", "1.5GiB", "1 MiB", "1MB", "99999999999TiB", "18446744073709551616B"]
        {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
        for text in ["", "1", "s", "-1s", "1.5s", "1 s", "1d", "99999999999999999999s"] {
            assert!(text.parse::<Span>().is_err(), "{text}");
        }
    }
}
