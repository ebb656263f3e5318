//! A policy file. What is accepted has a filter that compiles, and narrowing it never allows more.

#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use sandbox::policy::Policy;

fuzz_target!(|text: &str| match Policy::load_all(&[(PathBuf::from("/etc/agentd/policies/x.toml"), text.to_owned())]) {
    Ok(policies) => {
        for policy in policies.values() {
            let narrowed = policy.limits.clone().narrowed(Some(toolproto::units::Bytes::mib(1)), Some(1));
            assert!(narrowed.memory <= policy.limits.memory.or(narrowed.memory));
            assert!(!policy.identity().name.is_empty());
        }
    }
    Err(errors) => assert!(!errors.is_empty()),
});
