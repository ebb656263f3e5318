//! The server's name in a TLS ClientHello.

use rustls::server::Acceptor;
use toolproto::manifest::HostPort;

use super::{MOST_KEPT, Mismatch, is_same_host};

/// The first byte of a TLS connection: the type of its first record.
pub(super) const HANDSHAKE: u8 = 0x16;

/// A ClientHello that is being read.
pub(super) struct Hello {
    acceptor: Acceptor,
    bytes: usize,
}

impl Hello {
    pub(super) fn new() -> Self {
        Self { acceptor: Acceptor::default(), bytes: 0 }
    }

    /// Reads on. Yields whether it is complete and names the host.
    pub(super) fn read(&mut self, mut piece: &[u8], target: &HostPort) -> Result<bool, Mismatch> {
        let unclear = |reason: &str| Mismatch::Unclear(format!("its TLS cannot be looked at: {reason}"));
        self.bytes += piece.len();
        if self.bytes > MOST_KEPT {
            return Err(unclear("its ClientHello is too long"));
        }
        while !piece.is_empty() {
            self.acceptor.read_tls(&mut piece).map_err(|error| unclear(&error.to_string()))?;
            match self.acceptor.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => {
                    return match accepted.client_hello().server_name() {
                        Some(name) if is_same_host(name, target) => Ok(true),
                        Some(name) => Err(Mismatch::Other("its TLS", name.to_owned())),
                        // Clients name no addresses, and some no names without a dot.
                        None if target.address().is_some() || !target.host.contains('.') => Ok(true),
                        None => Err(unclear("it names no server")),
                    };
                }
                Err((error, _)) => return Err(unclear(&error.to_string())),
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::pki_types::ServerName;
    use rustls::{ClientConfig, ClientConnection, RootCertStore};
    use toolproto::manifest::TlsMode;
    use toolproto::receipt::Denial;

    use super::super::Inspection;
    use super::*;

    fn hello(server: &str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let name = ServerName::try_from(server.to_owned()).unwrap();
        let mut bytes = Vec::new();
        ClientConnection::new(Arc::new(config), name).unwrap().write_tls(&mut bytes).unwrap();
        bytes
    }

    fn look(target: &str, mode: TlsMode, bytes: &[u8]) -> Result<(), Denial> {
        let target = HostPort::try_from(target.to_owned()).unwrap();
        let at_once = Inspection::new(&target, mode).look(bytes);
        let mut inspection = Inspection::new(&target, mode);
        let in_pieces = bytes.iter().try_for_each(|byte| inspection.look(&[*byte]));
        assert_eq!(at_once.is_ok(), in_pieces.is_ok(), "{at_once:?} {in_pieces:?}");
        at_once
    }

    #[test]
    fn the_server_must_be_the_host() {
        for mode in [TlsMode::Auto, TlsMode::Required] {
            let mut right = hello("API.example.com");
            assert_eq!(look("api.example.com:443", mode, &right), Ok(()));
            right.extend([0xff; 100]);
            assert_eq!(look("api.example.com:443", mode, &right), Ok(()), "what follows is the server's to judge");
            let denial = look("api.example.com:443", mode, &hello("other.com")).unwrap_err();
            assert_eq!(denial.rule, "[sandbox] hosts = [\"other.com:443\"]");
        }
        assert_eq!(look("api.example.com:443", TlsMode::Off, &hello("other.com")), Ok(()));
    }

    #[test]
    fn a_client_that_names_no_server_passes_only_where_none_can_be_named() {
        let nameless = hello("10.0.0.1");
        assert_eq!(look("10.0.0.1:443", TlsMode::Required, &nameless), Ok(()));
        assert_eq!(look("localhost:443", TlsMode::Auto, &nameless), Ok(()));
        let denial = look("api.example.com:443", TlsMode::Auto, &nameless).unwrap_err();
        assert!(denial.detail.contains("names no server"), "{denial:?}");
    }

    #[test]
    fn what_only_begins_like_tls_does_not_pass() {
        assert!(look("api.example.com:443", TlsMode::Auto, b"\x16\x03\x01\x00\x05hello").is_err());
        assert!(look("api.example.com:443", TlsMode::Auto, &[0x16; MOST_KEPT + 1]).is_err());
    }
}
