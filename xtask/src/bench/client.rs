//! As much of HTTP as measuring needs: requests over the daemon's socket, one after the other.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sends a request over a connection of its own and gives the answer's body. Anything but a 2xx status is an error.
pub(crate) fn request(socket: &Path, method: &str, path: &str, body: &Value) -> Result<Value> {
    Client::connect(socket)?.ask("close", method, path, body)
}

/// A connection that is kept.
pub(crate) struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects to the daemon.
    pub(crate) fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request and gives the answer's body. Anything but a 2xx status is an error.
    pub(crate) fn request(&mut self, method: &str, path: &str, body: &Value) -> Result<Value> {
        self.ask("keep-alive", method, path, body)
    }

    fn ask(&mut self, connection: &str, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let message = format!(
            "{method} {path} HTTP/1.1\r\nHost: agentd\r\nConnection: {connection}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.0.get_mut().write_all(message.as_bytes())?;
        read_answer(&mut self.0).with_context(|| format!("{method} {path}"))
    }
}

fn read_answer(reader: &mut BufReader<UnixStream>) -> Result<Value> {
    let mut status = String::new();
    reader.read_line(&mut status)?;
    let mut length = None;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            bail!("the answer ended within its head");
        }
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = Some(value.trim().parse::<usize>()?);
        }
    }
    let mut body = vec![0; length.context("the answer has no Content-Length")?];
    reader.read_exact(&mut body)?;
    if status.split(' ').nth(1).is_none_or(|code| !code.starts_with('2')) {
        bail!("{}: {}", status.trim_end(), String::from_utf8_lossy(&body));
    }
    serde_json::from_slice(&body).context("the answer is not JSON")
}
