//! The shipped policies do what their examples say.

use sandbox::policy::{Expectation, WorkspaceMode};

use crate::harness::{Test, policies, sh};

pub(crate) const TESTS: &[Test] = &[("policies::examples_hold", examples_hold)];

fn examples_hold() {
    for (name, policy) in policies() {
        assert!(policy.examples.iter().any(|example| example.expect == Expectation::Allowed), "{name}");
        assert!(policy.examples.iter().any(|example| example.expect == Expectation::Refused), "{name}");
        for example in &policy.examples {
            let name: &'static str = policies().keys().find(|known| *known == name).unwrap();
            let mut sandbox = sh(name, &example.run);
            if policy.workspace == WorkspaceMode::ReadOnly {
                sandbox = sandbox.read_only();
            }
            let output = sandbox.run();
            let expected = example.expect == Expectation::Allowed;
            assert_eq!(output.is_success(), expected, "{name}: {}\n{output:?}", example.run);
            assert!(output.exit.is_ok(), "{name}: {}: the command did not even start", example.run);
        }
    }
}
