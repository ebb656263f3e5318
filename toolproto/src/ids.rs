//! Identifiers: UUIDv7 in 26 lower-case base32 characters (RFC 4648 section 7, "base32hex"), which sort as the ids do.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE32_DNSSEC;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The text is not an id.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an id: expected 26 characters of 0-9 and a-v")]
pub struct IdError(String);

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Uuid);

        impl $name {
            /// A new id: time-ordered, unique on this host and beyond.
            #[must_use]
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }

            /// The id with these 128 bits; for tests and for ids derived from others.
            #[must_use]
            pub const fn from_u128(bits: u128) -> Self {
                Self(Uuid::from_u128(bits))
            }

            /// The id's 128 bits.
            #[must_use]
            pub const fn as_u128(self) -> u128 {
                self.0.as_u128()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&BASE32_DNSSEC.encode(self.0.as_bytes()))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                let refused = || IdError(text.to_owned());
                let bytes = BASE32_DNSSEC.decode(text.as_bytes()).map_err(|_| refused())?;
                let bytes: [u8; 16] = bytes.try_into().map_err(|_| refused())?;
                let id = Self(Uuid::from_bytes(bytes));
                // One spelling only, so that an id can be compared as text, also in file names.
                if id.to_string() == text { Ok(id) } else { Err(refused()) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.to_string()
            }
        }
    };
}

id! {
    /// One accepted job; a direct call or `exec` is a job of one call.
    JobId
}
id! {
    /// One tool call within a job.
    CallId
}
id! {
    /// One request to the API, for logs and problem reports.
    RequestId
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_26_characters_and_round_trip() {
        let id = JobId::generate();
        let text = id.to_string();
        assert_eq!(text.len(), 26);
        assert_eq!(text.parse::<JobId>().unwrap(), id);
    }

    #[test]
    fn text_order_is_id_order() {
        let ids = [0, 1, 31, 32, u128::MAX >> 1, u128::MAX].map(CallId::from_u128);
        assert!(ids.windows(2).all(|pair| pair[0].to_string() < pair[1].to_string()));
    }

    #[test]
    fn other_spellings_are_refused() {
        let id = JobId::from_u128(7).to_string();
        let mut trailing_bits = JobId::from_u128(0).to_string();
        trailing_bits.replace_range(25.., "1");
        for text in
            ["", "x", "v0000000-0000-7000-8000-00000", &format!("{id}0"), &trailing_bits, "../../../../../../etc/pass"]
        {
            assert!(text.parse::<JobId>().is_err(), "{text} was taken for an id");
        }
        let capital = JobId::from_u128(u128::MAX).to_string().to_uppercase();
        assert!(capital.parse::<JobId>().is_err(), "{capital} was taken for an id");
    }
}
