//! Just enough of HTTP/1.1 to serve one client and to break the connection at any byte.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The most that a request may hold; a longer one closes the connection.
const REQUEST_LIMIT: usize = 64 << 20;

/// A request as it came.
#[derive(Clone, Debug)]
pub(super) struct HttpRequest {
    pub(super) method: String,
    pub(super) path: String,
    /// Names in lower case.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
}

impl HttpRequest {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// One client's connection.
pub(super) struct Connection {
    stream: TcpStream,
    stopped: Arc<AtomicBool>,
    pending: Vec<u8>,
}

/// The connection is of no more use: the client has gone, spoke no HTTP, or the server stops.
#[derive(Debug)]
pub(super) struct Gone;

impl From<std::io::Error> for Gone {
    fn from(_: std::io::Error) -> Self {
        Gone
    }
}

impl Connection {
    pub(super) fn new(stream: TcpStream, stopped: Arc<AtomicBool>) -> Result<Self, Gone> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        stream.set_write_timeout(Some(Duration::from_secs(30)))?;
        Ok(Self { stream, stopped, pending: Vec::new() })
    }

    /// The next request on this connection.
    pub(super) fn read_request(&mut self) -> Result<HttpRequest, Gone> {
        loop {
            if let Some((mut request, head, body)) = parse_head(&self.pending)? {
                if request.header("expect").is_some_and(|value| value.eq_ignore_ascii_case("100-continue")) {
                    self.write(b"HTTP/1.1 100 Continue\r\n\r\n")?;
                }
                while self.pending.len() < head + body {
                    self.fill()?;
                }
                request.body = self.pending[head..head + body].to_vec();
                self.pending.drain(..head + body);
                return Ok(request);
            }
            self.fill()?;
        }
    }

    fn fill(&mut self) -> Result<(), Gone> {
        let mut buffer = [0; 16 << 10];
        loop {
            if self.stopped.load(Ordering::Relaxed) || self.pending.len() > REQUEST_LIMIT {
                return Err(Gone);
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(Gone),
                Ok(count) => {
                    self.pending.extend_from_slice(&buffer[..count]);
                    return Ok(());
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Err(Gone),
            }
        }
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        self.stream.write_all(bytes)?;
        Ok(())
    }

    /// A whole response.
    pub(super) fn respond(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        content_type: &str,
        body: &[u8],
    ) -> Result<(), Gone> {
        let mut head = format!("HTTP/1.1 {status} {}\r\n", reason(status));
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-type: {content_type}\r\ncontent-length: {}\r\n\r\n", body.len()));
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.write(&bytes)
    }

    /// The head of a response whose body comes in chunks.
    pub(super) fn begin_stream(&mut self) -> Result<(), Gone> {
        self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n",
        )
    }

    /// One chunk of the body.
    pub(super) fn chunk(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        self.write(&framed)
    }

    /// The end of the body.
    pub(super) fn end_stream(&mut self) -> Result<(), Gone> {
        self.write(b"0\r\n\r\n")
    }

    /// Waits, unless the server stops meanwhile.
    pub(super) fn wait(&self, time: Duration) -> Result<(), Gone> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            if self.stopped.load(Ordering::Relaxed) {
                return Err(Gone);
            }
            std::thread::sleep(Duration::from_millis(20).min(end.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }
}

fn parse_head(bytes: &[u8]) -> Result<Option<(HttpRequest, usize, usize)>, Gone> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Request::new(&mut headers);
    let head = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(_) => return Err(Gone),
    };
    let headers: Vec<(String, String)> = parsed
        .headers
        .iter()
        .map(|header| (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).into_owned()))
        .collect();
    let request = HttpRequest {
        method: parsed.method.unwrap_or_default().to_owned(),
        path: parsed.path.unwrap_or_default().to_owned(),
        headers,
        body: Vec::new(),
    };
    // A client that knows its body sends its length; chunked requests are not needed by any of the three formats.
    let length = match request.header("content-length") {
        Some(text) => text.trim().parse().map_err(|_| Gone)?,
        None if request.header("transfer-encoding").is_some() => return Err(Gone),
        None => 0,
    };
    if length > REQUEST_LIMIT {
        return Err(Gone);
    }
    Ok(Some((request, head, length)))
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Payload Too Large",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        529 => "Overloaded",
        _ => "Status",
    }
}
