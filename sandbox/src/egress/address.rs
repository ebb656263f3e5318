//! Addresses that are not public: nobody outside answers there, or somebody who trusts whoever asks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// What kind of address it is, if it is no public one. From IANA's special-purpose registries, and what clouds use beside them.
#[must_use]
pub fn special(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => special_v4(address),
        IpAddr::V6(address) => special_v6(address),
    }
}

fn special_v4(address: Ipv4Addr) -> Option<&'static str> {
    match address.octets() {
        [0, ..] => Some("an address of no host"),
        [127, ..] => Some("a loopback address"),
        [10, ..] | [172, 16..=31, ..] | [192, 168, ..] => Some("a private address"),
        [100, 100, 100, 200] | [169, 254, 169, 254] => Some("a cloud's metadata service"),
        [168, 63, 129, 16] => Some("a cloud's own service"),
        [100, 64..=127, ..] => Some("an address behind a provider's NAT"),
        [169, 254, ..] => Some("a link-local address"),
        [192, 0, 0, _] => Some("an address of protocols"),
        [192, 0, 2, _] | [198, 51, 100, _] | [203, 0, 113, _] => Some("an address for documentation"),
        [192, 88, 99, _] => Some("a relay's address"),
        [198, 18..=19, ..] => Some("an address for measurements"),
        [224..=239, ..] => Some("a multicast address"),
        [240..=255, ..] => Some("a reserved address"),
        _ => None,
    }
}

fn special_v6(address: Ipv6Addr) -> Option<&'static str> {
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("an address of no host"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("a loopback address"),
        [0, 0, 0, 0, 0, 0xffff | 0, _, _] => Some("an IPv4 address in IPv6's clothes"),
        // Whole networks reach the IPv4 Internet that way, so what counts is where it leads.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => special_v4(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low))),
        [0x2001, 0x0000..=0x01ff, ..] | [0x2002, ..] => Some("an address of protocols or tunnels"),
        [0x2001, 0x0db8, ..] | [0x3fff, 0x0000..=0x0fff, ..] => Some("an address for documentation"),
        [0xfc00..=0xfdff, ..] => Some("a private address"),
        [0xfe80..=0xfebf, ..] => Some("a link-local address"),
        [0xff00..=0xffff, ..] => Some("a multicast address"),
        [0x2000..=0x3fff, ..] => None,
        _ => Some("a reserved address"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_public_addresses_are_public() {
        for address in [
            "0.1.2.3",
            "10.255.255.255",
            "100.64.0.1",
            "100.127.255.255",
            "100.100.100.200",
            "127.0.0.53",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.251",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:8.8.8.8",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:0a00:0001::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(special(address.parse().unwrap()).is_some(), "{address}");
        }
        for address in [
            "1.1.1.1",
            "9.255.255.255",
            "100.63.255.255",
            "100.128.0.1",
            "172.15.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "198.17.0.1",
            "223.255.255.255",
            "64:ff9b::8.8.8.8",
            "2001:4860:4860::8888",
            "2606:4700::1111",
            "2a00:1450::1",
        ] {
            assert_eq!(special(address.parse().unwrap()), None, "{address}");
        }
    }
}
