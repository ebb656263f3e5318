//! What a tool writes to stdout.

#![no_main]

use libfuzzer_sys::fuzz_target;
use toolproto::ids::CallId;
use toolproto::reply;

fuzz_target!(|input: (bool, &[u8])| {
    let (failed, stdout) = input;
    let call: CallId = "00000000000000000000000000".parse().expect("an id");
    if let Err(error) = reply::read(stdout, call, i32::from(failed)) {
        assert!(!error.to_string().is_empty());
    }
});
