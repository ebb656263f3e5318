//! The way out to the launcher: a message is sent by the task that has it, and only what the socket does not take at once waits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use sandbox::protocol::ToLauncher;
use sandbox::protocol::channel::{QueuedChannel, SendError};

use crate::launch::LinkError;

/// The channel's sending side. Messages arrive in the order in which they were given.
#[derive(Clone, Debug)]
pub(super) struct Outbox(Arc<Mutex<Sending>>);

#[derive(Debug)]
struct Sending {
    channel: QueuedChannel,
    /// Whether a thread sees to what is queued.
    is_flushing: bool,
}

impl Outbox {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self(Arc::new(Mutex::new(Sending { channel: QueuedChannel::new(socket), is_flushing: false })))
    }

    /// Sends a message, or queues it behind those that the socket has not taken yet. Does not block.
    pub(super) fn send(&self, message: &ToLauncher, descriptors: Vec<OwnedFd>) -> Result<(), LinkError> {
        let mut sending = self.sending();
        sending.channel.send(message, descriptors).map_err(|error| match error {
            SendError::Closed => LinkError::Closed,
            error => LinkError::Exchange(error.to_string()),
        })?;
        if sending.channel.has_queued() && !sending.is_flushing {
            let outbox = self.clone();
            let flusher = std::thread::Builder::new().name("launcher-writer".to_owned());
            let started = flusher.spawn(move || outbox.flush());
            started.map_err(|error| LinkError::Exchange(format!("no thread for what is queued: {error}")))?;
            sending.is_flushing = true;
        }
        Ok(())
    }

    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is queued until nothing is. The launcher may be long about what it was sent before.
    fn flush(&self) {
        let socket = self.sending().channel.as_fd().try_clone_to_owned();
        let emptied = socket.and_then(|socket| {
            loop {
                await_room(&socket)?;
                let mut sending = self.sending();
                sending.channel.flush().map_err(io::Error::other)?;
                if !sending.channel.has_queued() {
                    sending.is_flushing = false;
                    return Ok(());
                }
            }
        });
        if let Err(error) = emptied {
            // If the channel is closed the reader finds that, too, and tells all who wait.
            tracing::error!(%error, "messages to the launcher are not sent");
            self.sending().is_flushing = false;
        }
    }
}

fn await_room(socket: &OwnedFd) -> io::Result<()> {
    match poll(&mut [PollFd::new(socket, PollFlags::OUT)], None) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use sandbox::protocol::channel::{Channel, Received, pair};
    use toolproto::ids::{CallId, JobId};

    use super::*;

    /// More than a socket buffers by itself.
    const MANY: u128 = 2000;

    fn message(number: u128) -> ToLauncher {
        ToLauncher::Sign { job: JobId::from_u128(number), call: None, payload: "x".repeat(2000) }
    }

    #[test]
    fn what_the_socket_does_not_take_at_once_arrives_later_and_in_order() {
        let (ours, theirs) = pair().unwrap();
        let (outbox, launcher) = (Outbox::new(ours), Channel::new(theirs));
        (0..MANY).for_each(|number| outbox.send(&message(number), Vec::new()).unwrap());
        assert!(outbox.sending().is_flushing, "the socket took all of it; the test needs more");
        for number in 0..MANY {
            let Received::Message(received, _) = launcher.receive::<ToLauncher>().unwrap() else { panic!("{number}") };
            assert!(received == message(number), "{number}");
        }
        let last = ToLauncher::Stop { call: CallId::from_u128(1) };
        outbox.send(&last, Vec::new()).unwrap();
        assert!(matches!(launcher.receive(), Ok(Received::Message(received, _)) if last == received));
    }

    #[test]
    fn a_launcher_that_has_gone_is_found() {
        let (ours, theirs) = pair().unwrap();
        let outbox = Outbox::new(ours);
        drop(theirs);
        assert!(matches!(outbox.send(&message(0), Vec::new()), Err(LinkError::Closed)));
    }
}
