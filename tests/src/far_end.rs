//! Servers on this host's loopback, for calls that are let out to them.

use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// How long a server waits for its client: longer than any call of a test.
const PATIENCE: Duration = Duration::from_secs(120);

/// A server that handles each connection on a thread of its own. It goes with this value.
pub struct FarEnd {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<String>>>,
    stopping: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

/// What a handler may note for the test.
pub type Notes = Arc<Mutex<Vec<String>>>;

impl FarEnd {
    /// Listens on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// When there is none.
    pub fn start(handle: impl Fn(TcpStream, &Notes) -> io::Result<()> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let (seen, stopping, handle) = (Notes::default(), Arc::new(AtomicBool::new(false)), Arc::new(handle));
        let (notes, stop) = (Arc::clone(&seen), Arc::clone(&stopping));
        let acceptor = std::thread::spawn(move || {
            for connection in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(connection) = connection else { continue };
                let (notes, handle) = (Arc::clone(&notes), Arc::clone(&handle));
                std::thread::spawn(move || {
                    let outcome = connection.set_read_timeout(Some(PATIENCE)).and_then(|()| handle(connection, &notes));
                    if let Err(error) = outcome {
                        note(&notes, &format!("error: {error}"));
                    }
                });
            }
        });
        Self { address, seen, stopping, acceptor: Some(acceptor) }
    }

    /// Answers HTTP requests with what it was asked, as JSON.
    pub fn http() -> Self {
        Self::start(|connection, notes| answer_requests(connection, notes, &echo))
    }

    /// The same over TLS, with what `openssl req` wrote.
    ///
    /// # Panics
    /// When the certificate or the key cannot be used.
    pub fn https(certificate: &Path, key: &Path) -> Self {
        let chain = CertificateDer::pem_file_iter(certificate).expect("a file of certificates");
        let chain = chain.collect::<Result<Vec<_>, _>>().expect("certificates");
        let key = PrivateKeyDer::from_pem_file(key).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.expect("versions of TLS").with_no_client_auth().with_single_cert(chain, key);
        let config = Arc::new(config.expect("a certificate with its key"));
        Self::start(move |connection, notes| {
            let session = ServerConnection::new(Arc::clone(&config)).map_err(io::Error::other)?;
            answer_requests(StreamOwned::new(session, connection), notes, &echo)
        })
    }

    /// Answers GET with the files of a folder.
    pub fn files(folder: PathBuf) -> Self {
        Self::start(move |connection, notes| {
            answer_requests(connection, notes, &|asked: &Asked| {
                let path = asked.path.split('?').next().unwrap_or_default();
                fs::read(folder.join(path.trim_start_matches('/'))).ok()
            })
        })
    }

    /// Answers each HTTP request with nothing, once it was looked at.
    pub fn taking(take: impl Fn(&Asked) + Send + Sync + 'static) -> Self {
        Self::start(move |connection, notes| {
            answer_requests(connection, notes, &|asked: &Asked| {
                take(asked);
                Some(Vec::new())
            })
        })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Its address with its port, as a policy names it.
    pub fn rule(&self) -> String {
        self.address.to_string()
    }

    /// What its handlers noted, once there are so many notes: what a handler does after its last byte has arrived, it does
    /// while the client may have gone on.
    ///
    /// # Panics
    /// When they do not come.
    pub fn seen_all(&self, count: usize) -> Vec<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let seen = self.seen();
            if seen.len() >= count {
                return seen;
            }
            assert!(Instant::now() < end, "only {seen:?} was noted");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What its handlers noted until now.
    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for FarEnd {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the acceptor, which then looks; if it cannot be reached it has gone.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
    }
}

/// Notes a line.
pub fn note(notes: &Notes, line: &str) {
    notes.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
}

/// An HTTP request.
#[derive(Debug)]
pub struct Asked {
    /// Its path, with its query.
    pub path: String,
    /// Its Host.
    pub host: String,
    /// Its body.
    pub body: Vec<u8>,
}

/// The request as JSON, or for `/bytes/N` so many bytes.
#[expect(clippy::unnecessary_wraps, reason = "it stands beside one that finds nothing")]
fn echo(asked: &Asked) -> Option<Vec<u8>> {
    Some(match asked.path.strip_prefix("/bytes/").and_then(|number| number.parse().ok()) {
        Some(number) => vec![b'x'; number],
        None => serde_json::json!({"path": asked.path, "host": asked.host, "body": asked.body.len()})
            .to_string()
            .into_bytes(),
    })
}

/// Answers HTTP requests until the stream ends, and notes each.
///
/// # Errors
/// When the stream breaks.
fn answer_requests<S: io::Read + io::Write>(
    stream: S,
    notes: &Notes,
    answer: &dyn Fn(&Asked) -> Option<Vec<u8>>,
) -> io::Result<()> {
    let mut from = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if from.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split_whitespace().nth(1).unwrap_or_default().to_owned();
        let (mut host, mut length, mut is_chunked) = (String::new(), 0_usize, false);
        loop {
            let mut header = String::new();
            from.read_line(&mut header)?;
            let Some((name, value)) = header.trim_end().split_once(':') else { break };
            match name.to_ascii_lowercase().as_str() {
                "host" => value.trim().clone_into(&mut host),
                "content-length" => length = value.trim().parse().map_err(io::Error::other)?,
                "transfer-encoding" => is_chunked = true,
                _ => {}
            }
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        while is_chunked {
            let mut size = String::new();
            from.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
            let mut chunk = vec![0; size + 2];
            from.read_exact(&mut chunk)?;
            body.extend_from_slice(&chunk[..size]);
            is_chunked = size > 0;
        }
        note(notes, &format!("{} {host}", line.trim()));
        let answer = answer(&Asked { path, host, body });
        let (status, content) = answer.map_or(("404 Not Found", Vec::new()), |content| ("200 OK", content));
        let to = from.get_mut();
        let length = content.len();
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n");
        to.write_all(&[head.as_bytes(), &content].concat())?;
        to.flush()?;
    }
}
