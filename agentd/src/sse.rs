//! Reading server-sent events (the event stream format of the WHATWG HTML standard), bounded.

/// The largest message that is read: a result with everything in it.
const MAX_MESSAGE: usize = 16 << 20;

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The last id that was sent, in this message or before.
    pub id: Option<String>,
    /// The event's name; `message` when none was sent.
    pub event: String,
    /// The data lines, joined by line feeds.
    pub data: String,
}

/// The stream is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// A message outgrew its cap.
    #[error("an event of more than {MAX_MESSAGE} bytes")]
    TooLarge,
    /// A line is not UTF-8.
    #[error("an event that is not UTF-8")]
    Encoding,
}

/// Takes bytes as they arrive and gives messages as they become whole. Comments are left out.
#[derive(Debug, Default)]
pub struct Parser {
    buffer: Vec<u8>,
    /// How much of `buffer` is known to hold no line end.
    searched: usize,
    id: Option<String>,
    event: String,
    data: Option<String>,
}

impl Parser {
    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// When the stream is of no use.
    pub fn next_message(&mut self) -> Result<Option<Message>, SseError> {
        while let Some(line) = self.next_line()? {
            if line.is_empty() {
                let event = std::mem::take(&mut self.event);
                if let Some(data) = self.data.take() {
                    let event = if event.is_empty() { "message".to_owned() } else { event };
                    return Ok(Some(Message { id: self.id.clone(), event, data }));
                }
            } else {
                self.field(&line);
            }
            if self.data.as_ref().is_some_and(|data| data.len() > MAX_MESSAGE) {
                return Err(SseError::TooLarge);
            }
        }
        Ok(None)
    }

    fn field(&mut self, line: &str) {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            "event" => value.clone_into(&mut self.event),
            "id" if !value.contains('\0') => self.id = Some(value.to_owned()),
            _ => {}
        }
    }

    fn next_line(&mut self) -> Result<Option<String>, SseError> {
        let unread = self.buffer.get(self.searched..).unwrap_or_default();
        let Some(end) = unread.iter().position(|byte| *byte == b'\n').map(|end| self.searched + end) else {
            self.searched = self.buffer.len();
            return if self.buffer.len() > MAX_MESSAGE { Err(SseError::TooLarge) } else { Ok(None) };
        };
        self.searched = 0;
        let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        String::from_utf8(line).map(Some).map_err(|_| SseError::Encoding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, cut: usize) -> Vec<Message> {
        let mut parser = Parser::default();
        let mut messages = Vec::new();
        for piece in text.as_bytes().chunks(cut) {
            parser.push(piece);
            while let Some(message) = parser.next_message().unwrap() {
                messages.push(message);
            }
        }
        messages
    }

    #[test]
    fn messages_survive_any_cutting() {
        let text = ": hello\n\nid: 7\nevent: job.phase\ndata: {\"a\":1}\n\ndata:é\r\ndata: b\r\n\r\nevent: nothing\n\n";
        let whole = read(text, text.len());
        assert_eq!(whole.len(), 2);
        assert_eq!((whole[0].id.as_deref(), whole[0].event.as_str()), (Some("7"), "job.phase"));
        assert_eq!((whole[1].event.as_str(), whole[1].data.as_str()), ("message", "é\nb"));
        for cut in 1..9 {
            assert_eq!(read(text, cut), whole);
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = Parser::default();
        parser.push(&vec![b'x'; MAX_MESSAGE + 1]);
        assert_eq!(parser.next_message(), Err(SseError::TooLarge));
        let mut parser = Parser::default();
        parser.push(b"data: \xff\n");
        assert_eq!(parser.next_message(), Err(SseError::Encoding));
    }
}
