//! A small synchronous HTTP/1.1 client over any stream, so that a test sees exactly what came.

use std::io::{self, BufRead, BufReader, Read, Write};

use serde_json::Value;

/// A response whose body has been read to its end.
#[derive(Clone, Debug)]
pub struct Response {
    /// The status.
    pub status: u16,
    /// Names in lower case, with values.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Response {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none, with the body in the message.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in the body of a {}: {}", self.status, self.text()))
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A response whose body is still to be read.
pub struct Incoming<S> {
    /// The status.
    pub status: u16,
    /// Names in lower case, with values.
    pub headers: Vec<(String, String)>,
    reader: BufReader<S>,
    framing: Framing,
}

enum Framing {
    /// Bytes left.
    Length(u64),
    /// Bytes left of the present chunk.
    Chunked(u64),
    ToEnd,
    Over,
}

/// Sends a request and reads the head of its response.
///
/// # Errors
/// The stream's, and `InvalidData` for what is not HTTP.
pub fn send<S: Read + Write>(
    mut stream: S,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<Incoming<S>> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: agentd\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(body);
    // A server that refuses a request may close its end before it has read the whole of it, and yet have answered.
    match stream.write_all(&bytes).and_then(|()| stream.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error),
        _ => {}
    }
    read_head(BufReader::new(stream))
}

fn read_head<S: Read>(mut reader: BufReader<S>) -> io::Result<Incoming<S>> {
    let mut bytes = Vec::new();
    loop {
        let before = bytes.len();
        reader.read_until(b'\n', &mut bytes)?;
        if bytes.len() == before {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the connection ended before the response's head",
            ));
        }
        if bytes.ends_with(b"\r\n\r\n") {
            break;
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut parsed = httparse::Response::new(&mut headers);
    parsed.parse(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    let status = parsed.code.unwrap_or_default();
    let headers: Vec<(String, String)> = parsed
        .headers
        .iter()
        .map(|header| (header.name.to_ascii_lowercase(), String::from_utf8_lossy(header.value).into_owned()))
        .collect();
    let framing = match (find(&headers, "transfer-encoding"), find(&headers, "content-length")) {
        (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => Framing::Chunked(0),
        (_, Some(length)) => Framing::Length(length.trim().parse().map_err(|_| invalid("content-length"))?),
        _ if status == 101 || status == 204 => Framing::Over,
        _ => Framing::ToEnd,
    };
    Ok(Incoming { status, headers, reader, framing })
}

fn find<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("bad {what}"))
}

impl<S: Read> Incoming<S> {
    /// Reads the rest.
    ///
    /// # Errors
    /// Also when the connection ends before the body does.
    pub fn finish(mut self) -> io::Result<Response> {
        let mut body = Vec::new();
        self.read_to_end(&mut body)?;
        Ok(Response { status: self.status, headers: self.headers, body })
    }

    /// The stream after an upgrade, with what was read ahead.
    pub fn into_upgraded(self) -> BufReader<S> {
        self.reader
    }

    fn next_chunk(&mut self) -> io::Result<u64> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended within the body"));
        }
        let size = u64::from_str_radix(line.trim(), 16).map_err(|_| invalid("chunk size"))?;
        if size == 0 {
            self.reader.read_line(&mut line)?;
            self.framing = Framing::Over;
        } else {
            self.framing = Framing::Chunked(size);
        }
        Ok(size)
    }
}

impl<S: Read> Read for Incoming<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = match self.framing {
            Framing::Over | Framing::Length(0) => return Ok(0),
            Framing::ToEnd => return self.reader.read(buffer),
            Framing::Length(left) => left,
            Framing::Chunked(0) => match self.next_chunk()? {
                0 => return Ok(0),
                left => left,
            },
            Framing::Chunked(left) => left,
        };
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.reader.read(&mut buffer[..most])?;
        if count == 0 && most > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended within the body"));
        }
        let left = left - count as u64;
        self.framing = match self.framing {
            Framing::Length(_) => Framing::Length(left),
            _ => Framing::Chunked(left),
        };
        if left == 0 && matches!(self.framing, Framing::Chunked(_)) {
            let mut line = String::new();
            self.reader.read_line(&mut line)?;
        }
        Ok(count)
    }
}

/// One event of a Server-Sent Events stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SseEvent {
    /// Its id, if it has one.
    pub id: Option<String>,
    /// Its name; `message` when none was given.
    pub name: String,
    /// Its data lines, joined by line breaks.
    pub data: String,
}

/// Reads the next event; `None` at the stream's proper end. Comments are passed over.
///
/// # Errors
/// The stream's.
pub fn next_event(reader: &mut impl BufRead) -> io::Result<Option<SseEvent>> {
    let mut event = SseEvent::default();
    let mut data: Vec<String> = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let line = line.trim_end_matches(['\r', '\n']);
        if line.is_empty() {
            if data.is_empty() {
                continue;
            }
            event.data = data.join("\n");
            if event.name.is_empty() {
                event.name = "message".to_owned();
            }
            return Ok(Some(event));
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => event.id = Some(value.to_owned()),
            "event" => event.name = value.to_owned(),
            "data" => data.push(value.to_owned()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(text: &'static str) -> io::Result<Incoming<&'static [u8]>> {
        read_head(BufReader::new(text.as_bytes()))
    }

    #[test]
    fn reads_both_framings_and_notices_a_cut() {
        let whole = incoming("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello, and more").unwrap();
        assert_eq!(whole.finish().unwrap().body, b"hello");
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n";
        assert_eq!(incoming(chunked).unwrap().finish().unwrap().body, b"hello");
        let cut = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel";
        assert_eq!(incoming(cut).unwrap().finish().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(incoming("").err().map(|error| error.kind()), Some(io::ErrorKind::UnexpectedEof));
    }

    #[test]
    fn reads_events() {
        let mut stream = ": beat\n\nid: 3\nevent: job.phase\ndata: {\"a\":\ndata: 1}\n\ndata:x\r\n\r\n".as_bytes();
        let first = next_event(&mut stream).unwrap().unwrap();
        assert_eq!(
            (first.id.as_deref(), first.name.as_str(), first.data.as_str()),
            (Some("3"), "job.phase", "{\"a\":\n1}")
        );
        let second = next_event(&mut stream).unwrap().unwrap();
        assert_eq!((second.name.as_str(), second.data.as_str()), ("message", "x"));
        assert_eq!(next_event(&mut stream).unwrap(), None);
    }
}
