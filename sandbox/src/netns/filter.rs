//! Classic packet filters that let through what the kernel answers when it refuses: the reset to a connection request, and the
//! ICMP error to a datagram. A connection that is let in causes neither, so it costs nothing but the filter's first lines.
//!
//! Such a reset carries sequence number 0, since the request acknowledged nothing (RFC 9293, 3.10.7.1); one that ends an
//! established connection does not.

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_IND, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_LDX, BPF_MSH, BPF_RET,
    BPF_W,
};

use crate::sys::net::Instruction;

/// How much of a packet is passed on: all headers, and within an ICMP error those of the datagram.
pub(super) const LENGTH: u32 = 128;

const TCP: u32 = libc::IPPROTO_TCP as u32;
const ICMP: u32 = libc::IPPROTO_ICMP as u32;
const ICMPV6: u32 = libc::IPPROTO_ICMPV6 as u32;
/// SYN, RST and ACK of the TCP header's flags, and what a refusal has of them.
const FLAGS: u32 = 0x16;
const RESET: u32 = 0x14;
/// "Destination unreachable" of ICMP and of ICMPv6.
const UNREACHABLE: u32 = 3;
const UNREACHABLE_6: u32 = 1;

const fn load(size: u32, mode: u32, at: u32) -> Instruction {
    (BPF_LD | size | mode, 0, 0, at)
}

const fn jump_equal(value: u32, yes: u8, no: u8) -> Instruction {
    (BPF_JMP | BPF_JEQ | BPF_K, yes, no, value)
}

const fn and(mask: u32) -> Instruction {
    (BPF_ALU | BPF_AND | BPF_K, 0, 0, mask)
}

const fn pass(length: u32) -> Instruction {
    (BPF_RET | BPF_K, 0, 0, length)
}

/// Offsets count from the IPv4 header.
pub(super) const REFUSED_IPV4: &[Instruction] = &[
    load(BPF_B, BPF_ABS, 9),
    jump_equal(ICMP, 10, 0),
    jump_equal(TCP, 0, 8),
    // A later fragment has no TCP header.
    load(BPF_W, BPF_ABS, 4),
    (BPF_JMP | BPF_JSET | BPF_K, 6, 0, 0x1fff),
    (BPF_LDX | BPF_B | BPF_MSH, 0, 0, 0),
    load(BPF_B, BPF_IND, 13),
    and(FLAGS),
    jump_equal(RESET, 0, 2),
    load(BPF_W, BPF_IND, 4),
    jump_equal(0, 4, 0),
    pass(0),
    // ICMP:
    (BPF_LDX | BPF_B | BPF_MSH, 0, 0, 0),
    load(BPF_B, BPF_IND, 0),
    jump_equal(UNREACHABLE, 0, 1),
    pass(LENGTH),
    pass(0),
];

/// Offsets count from the IPv6 header, which the kernel's own answers follow with no extension.
pub(super) const REFUSED_IPV6: &[Instruction] = &[
    load(BPF_B, BPF_ABS, 6),
    jump_equal(ICMPV6, 6, 0),
    jump_equal(TCP, 0, 7),
    load(BPF_B, BPF_ABS, 40 + 13),
    and(FLAGS),
    jump_equal(RESET, 0, 4),
    load(BPF_W, BPF_ABS, 40 + 4),
    jump_equal(0, 3, 2),
    load(BPF_B, BPF_ABS, 40),
    jump_equal(UNREACHABLE_6, 1, 0),
    pass(0),
    pass(LENGTH),
];
