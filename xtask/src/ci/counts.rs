//! What tests say: how many passed, and which failed.

use anyhow::{Result, bail};

/// Test results, read from the test harness's lines.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Counts {
    passed: u64,
    failed: Vec<String>,
}

impl Counts {
    /// Reads one more line.
    pub(super) fn read(&mut self, line: &str) {
        if let Some(summary) = line.strip_prefix("test result: ") {
            let passed =
                summary.split("; ").next().and_then(|part| part.split_whitespace().rev().nth(1)?.parse::<u64>().ok());
            self.passed += passed.unwrap_or(0);
        } else if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed.push(name.to_owned());
        }
    }

    /// How many passed, or which did not.
    pub(super) fn judge(self, succeeded: bool, what: &str) -> Result<u64> {
        if !self.failed.is_empty() {
            bail!("failed: {}", self.failed.join(", "));
        }
        if !succeeded {
            bail!("{what} failed");
        }
        if self.passed == 0 {
            bail!("{what} ran no test");
        }
        Ok(self.passed)
    }

    /// How many have passed so far.
    pub(super) const fn passed(&self) -> u64 {
        self.passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(lines: &[&str]) -> Counts {
        let mut counts = Counts::default();
        lines.iter().for_each(|line| counts.read(line));
        counts
    }

    #[test]
    fn results_of_several_test_programs_are_added_up() {
        let read = counts(&[
            "running 2 tests",
            "test ids::tests::a ... ok",
            "test result: ok. 41 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.03s",
            "test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ]);
        assert_eq!(read.judge(true, "tests").unwrap(), 42);
    }

    #[test]
    fn failed_tests_are_named_and_so_are_tests_that_did_not_run() {
        let read = counts(&[
            "test a::b ... FAILED",
            "test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.03s",
        ]);
        assert_eq!(read.judge(false, "tests").unwrap_err().to_string(), "failed: a::b");
        assert_eq!(counts(&[]).judge(false, "tests").unwrap_err().to_string(), "tests failed");
        assert_eq!(counts(&[]).judge(true, "tests").unwrap_err().to_string(), "tests ran no test");
    }
}
