//! What a policy says about system calls, before it becomes a filter.

use serde::Serialize;

/// A comparison of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// It is this value.
    Equals(u64),
    /// It is not this value.
    Differs(u64),
    /// Its bits under the mask (first) are this value (second).
    MaskedEquals(u64, u64),
}

/// A condition on one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Condition {
    /// The argument, from 0 to 5.
    pub argument: u8,
    /// Whether only the low 32 bits count: where the kernel takes an `int`, the upper ones are noise that an attacker sets.
    pub low_bits_only: bool,
    /// The comparison.
    pub compare: Compare,
}

impl Condition {
    pub(super) const fn low_bits(argument: u8, compare: Compare) -> Self {
        Self { argument, low_bits_only: true, compare }
    }

    /// Whether it holds for these arguments.
    pub(super) fn holds(self, arguments: &[u64; 6]) -> bool {
        let bits = if self.low_bits_only { u64::from(u32::MAX) } else { u64::MAX };
        let Some(given) = arguments.get(usize::from(self.argument)).map(|given| given & bits) else { return false };
        match self.compare {
            Compare::Equals(value) => given == value & bits,
            Compare::Differs(value) => given != value & bits,
            Compare::MaskedEquals(mask, value) => given & mask == value & mask & bits,
        }
    }

    /// Whether it holds for this value of its argument only, and its argument is the call's first.
    pub(super) fn is_first(self, value: u64) -> bool {
        self.argument == 0 && self.compare == Compare::Equals(value)
    }
}

/// Permission for one system call, when all conditions hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Allow {
    /// The call's name.
    pub call: String,
    /// All of them must hold; none means always.
    pub conditions: Vec<Condition>,
}

impl Allow {
    pub(super) fn always(call: &str) -> Self {
        Self { call: call.to_owned(), conditions: Vec::new() }
    }

    pub(super) fn when(call: &str, conditions: impl Into<Vec<Condition>>) -> Self {
        Self { call: call.to_owned(), conditions: conditions.into() }
    }
}
