//! Digests as values: `sha256:` of messages, envelopes and results, `blake3:` of files and trees; and the canonical JSON
//! that is hashed.
//!
//! Canonical JSON is RFC 8785 with one difference. The RFC rounds every number to a double, so that 9007199254740993 and
//! 9007199254740992 would have one digest; here integers that fit 64 bits are written with all their digits. Below
//! 2^53 both ways write the same bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};
use sha2::Digest as _;

/// Which hash function made a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// SHA-256: JSON values, envelopes, results.
    Sha256,
    /// BLAKE3, 256 bits: files and trees.
    Blake3,
}

impl Algorithm {
    const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Blake3 => "blake3",
        }
    }
}

/// A 256-bit digest with its algorithm, printed as `sha256:HEX` or `blake3:HEX`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest {
    algorithm: Algorithm,
    bytes: [u8; 32],
}

/// The text is not a digest.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not a digest: expected sha256: or blake3: and 64 lower-case hexadecimal characters")]
pub struct DigestError(String);

/// The value has no canonical JSON form.
#[derive(Debug, thiserror::Error)]
#[error("the value has no canonical JSON form")]
pub struct CanonicalError(#[from] serde_json::Error);

impl Digest {
    /// SHA-256 of these bytes.
    #[must_use]
    pub fn sha256(bytes: &[u8]) -> Self {
        Self { algorithm: Algorithm::Sha256, bytes: sha2::Sha256::digest(bytes).into() }
    }

    /// SHA-256 of the value's [`canonical_json`].
    ///
    /// # Errors
    /// As [`canonical_json`].
    pub fn of_json(value: &impl Serialize) -> Result<Self, CanonicalError> {
        canonical_json(value).map(|bytes| Self::sha256(&bytes))
    }

    /// BLAKE3 of these bytes.
    #[must_use]
    pub fn blake3(bytes: &[u8]) -> Self {
        blake3::hash(bytes).into()
    }

    /// The digest's 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// The function that made it.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

/// The value as canonical JSON: RFC 8785, but integers of 64 bits keep all their digits (see the module's text).
///
/// # Errors
/// When the value cannot be JSON: a map whose keys are not strings, an integer beyond 64 bits.
pub fn canonical_json(value: &impl Serialize) -> Result<Vec<u8>, CanonicalError> {
    let mut written = Vec::with_capacity(128);
    write_canonical(&serde_json::to_value(value)?, &mut written)?;
    Ok(written)
}

fn write_canonical(value: &Value, to: &mut Vec<u8>) -> Result<(), CanonicalError> {
    match value {
        Value::Null => to.extend_from_slice(b"null"),
        Value::Bool(flag) => to.extend_from_slice(if *flag { b"true" } else { b"false" }),
        Value::Number(number) => write_number(number, to)?,
        // serde_json escapes exactly what the RFC wants escaped, and in the same way.
        Value::String(text) => serde_json::to_writer(to, text)?,
        Value::Array(items) => {
            to.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    to.push(b',');
                }
                write_canonical(item, to)?;
            }
            to.push(b']');
        }
        Value::Object(members) => {
            let mut sorted: Vec<_> = members.iter().collect();
            // By UTF-16 code units, as the RFC says: beyond the basic plane this is not the order of UTF-8.
            sorted.sort_by(|(a, _), (b, _)| {
                if a.is_ascii() && b.is_ascii() { a.cmp(b) } else { a.encode_utf16().cmp(b.encode_utf16()) }
            });
            to.push(b'{');
            for (index, (key, member)) in sorted.into_iter().enumerate() {
                if index > 0 {
                    to.push(b',');
                }
                serde_json::to_writer(&mut *to, key)?;
                to.push(b':');
                write_canonical(member, to)?;
            }
            to.push(b'}');
        }
    }
    Ok(())
}

fn write_number(number: &Number, to: &mut Vec<u8>) -> Result<(), CanonicalError> {
    if number.is_f64() {
        to.extend_from_slice(&serde_jcs::to_vec(number)?);
    } else {
        to.extend_from_slice(number.to_string().as_bytes());
    }
    Ok(())
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self { algorithm: Algorithm::Blake3, bytes: hash.into() }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), data_encoding::HEXLOWER.encode(&self.bytes))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let parse = || {
            let (name, hex) = text.split_once(':')?;
            let algorithm = [Algorithm::Sha256, Algorithm::Blake3].into_iter().find(|known| known.name() == name)?;
            let bytes = data_encoding::HEXLOWER.decode(hex.as_bytes()).ok()?.try_into().ok()?;
            Some(Self { algorithm, bytes })
        };
        parse().ok_or_else(|| DigestError(text.to_owned()))
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        assert_eq!(
            Digest::sha256(b"abc").to_string(),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            Digest::blake3(b"").to_string(),
            "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
    }

    #[test]
    fn json_digest_ignores_key_order_and_spacing() {
        let a: serde_json::Value = serde_json::from_str(r#"{"b":1,"a":[1.0,"é"]}"#).unwrap();
        let b: serde_json::Value = serde_json::from_str("{ \"a\": [1, \"\\u00e9\"], \"b\": 1 }").unwrap();
        assert_eq!(Digest::of_json(&a).unwrap(), Digest::of_json(&b).unwrap());
    }

    #[test]
    fn canonical_json_is_that_of_the_rfc() {
        let canonical = |text: &str| {
            let value: Value = serde_json::from_str(text).unwrap();
            String::from_utf8(canonical_json(&value).unwrap()).unwrap()
        };
        // RFC 8785, sections 3.2.2 and 3.2.3.
        assert_eq!(
            canonical(
                r#"{"numbers":[333333333.33333329,1E30,4.50,2e-3,0.000000000000000000000000001],
                "string":"\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/","literals":[null,true,false]}"#
            ),
            r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#
        );
        assert_eq!(
            canonical(r#"{"\u20ac":1,"\r":2,"\ufb33":3,"1":4,"\ud83d\ude00":5,"\u0080":6,"\u00f6":7}"#),
            "{\"\\r\":2,\"1\":4,\"\u{80}\":6,\"ö\":7,\"€\":1,\"😀\":5,\"\u{fb33}\":3}"
        );
        assert_eq!(canonical("[-0.0, 1.0, 1e21, 100000000000000000000.0]"), "[0,1,1e+21,100000000000000000000]");
    }

    #[test]
    fn large_integers_keep_their_digits() {
        let digests = [u64::MAX, u64::MAX - 1, 9_007_199_254_740_993, 9_007_199_254_740_992, 9_007_199_254_740_991]
            .map(|integer| Digest::of_json(&integer).unwrap());
        for (index, digest) in digests.iter().enumerate() {
            assert!(!digests[..index].contains(digest), "two integers have one digest");
        }
        assert_eq!(canonical_json(&i64::MIN).unwrap(), b"-9223372036854775808");
        assert!(canonical_json(&u128::MAX).is_err());
        // Where a double is exact, both ways of writing a number agree.
        assert_eq!(Digest::of_json(&4_f64).unwrap(), Digest::of_json(&4_u8).unwrap());
    }

    proptest::proptest! {
        #[test]
        fn below_two_to_the_53_it_is_what_serde_jcs_writes(
            members: std::collections::BTreeMap<String, (i32, f64, Option<String>)>,
        ) {
            proptest::prop_assert_eq!(canonical_json(&members).unwrap(), serde_jcs::to_vec(&members).unwrap());
        }
    }

    #[test]
    fn text_round_trips_and_nonsense_is_refused() {
        let digest = Digest::sha256(b"x");
        assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
        for text in ["", "sha256", "sha256:", "md5:00", "sha256:zz", &digest.to_string().to_uppercase()] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
