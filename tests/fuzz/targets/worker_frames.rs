//! What a workspace worker sends the launcher: it runs as a user, who may have taken it over.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = sandbox::workspace::worker::read_frames(bytes);
});
