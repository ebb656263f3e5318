//! agentd.toml. Only root writes it, and a mistake in it must be told, not end the launcher.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sandbox::config::Config;

fuzz_target!(|text: &str| {
    if let Err(error) = Config::parse(Path::new("/etc/agentd/agentd.toml"), text) {
        assert!(!error.to_string().is_empty());
    }
});
