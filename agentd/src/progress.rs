//! What a running tool says about how far it is: read from its pipe at a bounded pace, and passed on to those who watch.
//!
//! A courtesy: the pipe never makes the tool wait, lines that are no events are skipped, and of many events in a moment only
//! the last is passed on.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use toolproto::progress::{MAX_LINE, Progress};

use crate::feed::CallFeed;
use crate::redaction::Redactor;

/// Between two readings: what a tool may say in that time is one event to those who watch.
const PAUSE: Duration = Duration::from_millis(50);
/// How much is read at a time.
const PIECE: usize = 16 << 10;
/// How long the rest may take once the call is over; no process has the other end then.
const REST: Duration = Duration::from_secs(1);

/// Reads the progress of one call. Reading ends with this value.
#[derive(Debug)]
pub(crate) struct Reader {
    task: JoinHandle<()>,
    over: CancellationToken,
}

impl Reader {
    /// A reader, and the descriptor for the tool. To be called within the runtime.
    ///
    /// # Errors
    /// As pipe(2).
    pub(crate) fn new(watcher: CallFeed, redactor: Redactor) -> std::io::Result<(Self, OwnedFd)> {
        // The tool's end does not block either: a tool that says much must not wait for us.
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok((Self::of(reader, watcher, redactor)?, writer))
    }

    /// A reader of a pipe that the tool has already. To be called within the runtime.
    ///
    /// # Errors
    /// When it is no pipe.
    pub(crate) fn of(pipe: OwnedFd, watcher: CallFeed, redactor: Redactor) -> std::io::Result<Self> {
        let pipe = Receiver::from_owned_fd(pipe)?;
        let over = CancellationToken::new();
        let task = tokio::spawn(follow(pipe, over.clone(), move |mut event| {
            event.message = event.message.map(|words| redactor.text(words));
            watcher.progress(event);
        }));
        Ok(Self { task, over })
    }

    /// Reads what is left, once the call is over.
    pub(crate) async fn finish(mut self) {
        self.over.cancel();
        if tokio::time::timeout(REST, &mut self.task).await.is_err() {
            tracing::warn!("a call is over and its progress is not");
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(mut pipe: Receiver, over: CancellationToken, tell: impl Fn(Progress)) {
    let mut lines = Lines::default();
    let mut piece = vec![0; PIECE];
    loop {
        let length = match pipe.read(&mut piece).await {
            Ok(0) => return,
            Ok(length) => length,
            Err(error) => {
                tracing::warn!(%error, "a call's progress cannot be read");
                return;
            }
        };
        if let Some(event) = lines.last_event(piece.get(..length).unwrap_or_default()) {
            tell(event);
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = over.cancelled() => {}
        }
    }
}

/// Puts lines together out of pieces; of a line that is too long only that it is there is kept.
#[derive(Debug, Default)]
struct Lines {
    begun: Vec<u8>,
}

impl Lines {
    /// The last event among the lines that end in this piece.
    fn last_event(&mut self, piece: &[u8]) -> Option<Progress> {
        let mut last = None;
        let mut rest = piece;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, after) = rest.split_at(end);
            self.add(line);
            // What is no event says nothing.
            last = Progress::read(&self.begun).ok().or(last);
            self.begun.clear();
            rest = after.get(1..).unwrap_or_default();
        }
        self.add(rest);
        last
    }

    fn add(&mut self, part: &[u8]) {
        let room = (MAX_LINE + 1).saturating_sub(self.begun.len()).min(part.len());
        self.begun.extend_from_slice(part.get(..room).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn lines_are_put_together_and_the_last_event_counts() {
        let mut lines = Lines::default();
        assert_eq!(lines.last_event(b"{\"progress\":0.1}\n{\"progress\":"), Some(share(0.1)));
        assert_eq!(lines.last_event(b"0.2}\nnot an event\n{\"progress\":0.3"), Some(share(0.2)));
        let long = vec![b'x'; 3 * MAX_LINE];
        assert_eq!(lines.last_event(&long), None);
        assert!(lines.begun.len() <= MAX_LINE + 1);
        assert_eq!(lines.last_event(b"\n{\"progress\":0.4}\n"), Some(share(0.4)));
    }

    fn share(progress: f64) -> Progress {
        Progress { progress: Some(progress), message: None }
    }

    #[tokio::test]
    async fn a_flood_is_read_to_its_end_and_told_a_few_times() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let told = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let (over, seen) = (CancellationToken::new(), std::sync::Arc::clone(&told));
        let pipe = Receiver::from_owned_fd(reader).unwrap();
        let task = tokio::spawn(follow(pipe, over.clone(), move |event| seen.lock().unwrap().push(event)));
        let flood = std::thread::spawn(move || {
            let mut writer = std::fs::File::from(writer);
            for number in 0..2000 {
                writeln!(writer, "{{\"message\":\"{number}\"}}").unwrap();
            }
        });
        tokio::task::spawn_blocking(|| flood.join().unwrap()).await.unwrap();
        over.cancel();
        task.await.unwrap();
        let told = told.lock().unwrap();
        assert!((1..20).contains(&told.len()), "{}", told.len());
        assert_eq!(told.last().unwrap().message.as_deref(), Some("1999"));
    }
}
