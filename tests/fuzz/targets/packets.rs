//! What agentd sends the launcher: one packet, as a captured agentd might make it.

#![no_main]

use std::os::fd::AsFd as _;

use libfuzzer_sys::fuzz_target;
use rustix::net::SendFlags;
use sandbox::protocol::ToLauncher;
use sandbox::protocol::channel::{INLINE_LIMIT, QueuedChannel, pair};

fuzz_target!(|packet: &[u8]| {
    let (ours, theirs) = pair().expect("a pair of sockets");
    let packet = &packet[..packet.len().min(INLINE_LIMIT + 2)];
    rustix::net::send(ours.as_fd(), packet, SendFlags::empty()).expect("the packet is taken");
    // Whether it is a message or not: the launcher goes on.
    let _ = QueuedChannel::new(theirs).receive::<ToLauncher>();
});
