//! A tool's tool.toml.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use toolproto::manifest::ToolManifest;

fuzz_target!(|text: &str| {
    if let Err(error) = ToolManifest::parse(Path::new("/etc/agentd/tools/x/tool.toml"), text) {
        assert!(!error.to_string().is_empty());
    }
});
