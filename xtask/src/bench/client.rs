//! As much of HTTP as measuring needs: one request per connection over the daemon's socket.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Sends a request and gives the answer's body. Anything but a 2xx status is an error.
pub(crate) fn request(socket: &Path, method: &str, path: &str, body: &Value) -> Result<Value> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: agentd\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    read_answer(BufReader::new(stream)).with_context(|| format!("{method} {path}"))
}

fn read_answer(mut reader: BufReader<UnixStream>) -> Result<Value> {
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
