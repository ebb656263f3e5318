//! As much of the chat completions API as agentd asks for: reading a request, and an answer in one piece. How pieces are put together
//! is tested elsewhere.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// How long a client may say nothing within its request.
const PATIENCE: Duration = Duration::from_secs(30);

/// Reads the request of a connection.
pub(crate) fn read_request(stream: &TcpStream) -> Result<Value> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            bail!("the request ended within its head");
        }
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().context("reading Content-Length")?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    serde_json::from_slice(&body).context("the request's body is not JSON")
}

/// Answers with a message, and says that the connection ends.
pub(crate) fn write_answer(mut stream: &TcpStream, message: &Value) -> Result<()> {
    let finish = if message.get("tool_calls").is_some() { "tool_calls" } else { "stop" };
    let choice = json!({"index": 0, "delta": message, "finish_reason": finish});
    let chunk = json!({"id": "scripted", "object": "chat.completion.chunk", "model": "scripted", "choices": [choice]});
    let body = format!("data: {chunk}\n\ndata: [DONE]\n\n");
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes())?;
    Ok(())
}

/// A message that asks for calls.
pub(crate) fn calls(text: &str, asked: &[(&str, Value)]) -> Value {
    let calls: Vec<_> = asked
        .iter()
        .enumerate()
        .map(|(index, (tool, arguments))| {
            let function = json!({"name": tool, "arguments": arguments.to_string()});
            json!({"index": index, "id": format!("call_{tool}_{index}"), "type": "function", "function": function})
        })
        .collect();
    json!({"role": "assistant", "content": text, "tool_calls": calls})
}
