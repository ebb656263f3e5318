//! Servers on this host's loopback: one that a client measures its connections with, and a plain CONNECT proxy.
//!
//! A connection's first line says what it is for: `echo` gives each further byte back, `send N` gets N bytes.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use anyhow::{Context as _, Result};

/// How much is copied at a time.
const CHUNK: usize = 256 << 10;

/// A server's port; it serves until this program ends.
pub(super) fn start() -> Result<u16> {
    serve(|connection| {
        connection.set_nodelay(true)?;
        let mut from = BufReader::new(connection.try_clone()?);
        let mut to = connection;
        let mut line = String::new();
        from.read_line(&mut line)?;
        match line.trim_end().strip_prefix("send ").map(str::parse::<u64>) {
            Some(Ok(count)) => send(&mut to, count),
            _ => echo(&mut from, &mut to),
        }
    })
}

/// A proxy's port; it serves until this program ends.
pub(super) fn start_proxy() -> Result<u16> {
    serve(|client| {
        client.set_nodelay(true)?;
        let mut from = BufReader::new(client.try_clone()?);
        let (mut line, mut rest) = (String::new(), String::new());
        from.read_line(&mut line)?;
        while from.read_line(&mut rest)? > 2 {
            rest.clear();
        }
        let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let server = TcpStream::connect(target)?;
        server.set_nodelay(true)?;
        (&client).write_all(b"HTTP/1.1 200 Connection established\r\n\r\n")?;
        let (back_from, back_to) = (server.try_clone()?, client);
        let back = thread::spawn(move || copy(back_from, &back_to));
        let forth = copy(from, &server);
        // Whichever direction broke, the other is told of it by its own end.
        back.join().unwrap_or(Ok(())).and(forth)
    })
}

fn serve(handle: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening on the loopback interface")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let handle = handle.clone();
            // A connection that breaks is its client's to report.
            thread::spawn(move || drop(handle(connection)));
        }
    });
    Ok(port)
}

fn send(to: &mut TcpStream, mut left: u64) -> io::Result<()> {
    let chunk = vec![b'x'; CHUNK];
    while left > 0 {
        let next = chunk.len().min(usize::try_from(left).unwrap_or(CHUNK));
        to.write_all(chunk.get(..next).unwrap_or_default())?;
        left -= next as u64;
    }
    Ok(())
}

fn echo(from: &mut BufReader<TcpStream>, to: &mut TcpStream) -> io::Result<()> {
    let mut byte = [0];
    while from.read(&mut byte)? > 0 {
        to.write_all(&byte)?;
    }
    Ok(())
}

fn copy(mut from: impl io::Read, mut to: &TcpStream) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let count = from.read(&mut chunk)?;
        if count == 0 {
            return to.shutdown(Shutdown::Write);
        }
        to.write_all(chunk.get(..count).unwrap_or_default())?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_through_the_proxy_in_both_directions() {
        let (port, proxy) = (start().unwrap(), start_proxy().unwrap());
        let ask = |what: &str| {
            let mut through = BufReader::new(TcpStream::connect(("127.0.0.1", proxy)).unwrap());
            write!(through.get_mut(), "CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n").unwrap();
            let mut line = String::new();
            while through.read_line(&mut line).unwrap() > 2 {}
            through.get_mut().write_all(what.as_bytes()).unwrap();
            through.get_mut().shutdown(Shutdown::Write).unwrap();
            let mut all = String::new();
            through.read_to_string(&mut all).unwrap();
            all
        };
        assert_eq!(ask("send 600000\n").len(), 600_000);
        assert_eq!(ask("echo\nabc"), "abc");
    }
}
