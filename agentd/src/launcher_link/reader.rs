//! The way in from the launcher: a task reads the channel and gives each answer to whoever waits for it.

use std::io;

use sandbox::netns::Sockets;
use sandbox::protocol::FromLauncher;
use sandbox::protocol::channel::{QueuedChannel, ReceiveError, Received};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::questions::{Key, Pending, Told};
use crate::egress::{Egress, Opening};
use crate::redaction::Redactor;

/// Reads until the channel is closed. `readiness` says when there is something to read.
pub(super) async fn read_all(
    (channel, readiness): (&QueuedChannel, &UnixDatagram),
    pending: &Pending,
    redactor: &Redactor,
    egress: &Egress,
) {
    let receive = || match channel.receive::<FromLauncher>() {
        Ok(Received::Nothing) => Err(io::ErrorKind::WouldBlock.into()),
        received => Ok(received),
    };
    loop {
        if let Err(error) = readiness.readable().await {
            tracing::error!(%error, "the launcher's channel cannot be watched");
            return;
        }
        let Ok(received) = readiness.try_io(Interest::READABLE, receive) else { continue };
        let (message, descriptors) = match received {
            Ok(Received::Message(message, descriptors)) => (message, descriptors),
            Ok(Received::Closed) => return,
            Ok(Received::Nothing) => continue,
            Err(error @ ReceiveError::Malformed(_)) => {
                tracing::error!(%error, "a message of the launcher was dropped");
                continue;
            }
            Err(error) => {
                tracing::error!(%error, "the launcher's channel cannot be read");
                return;
            }
        };
        let (message, descriptors) = match message {
            FromLauncher::Network { call, policy, passages, ceiling } => {
                match Sockets::from_list(descriptors) {
                    Some(sockets) => egress.open(call, Opening { policy, passages, ceiling }, sockets),
                    // Nobody answers or accepts then: the call is let out to nobody.
                    None => tracing::error!(%call, "the launcher handed over too few sockets"),
                }
                continue;
            }
            other => (other, descriptors),
        };
        let mut network = None;
        let key = match &message {
            FromLauncher::Admitted { job, .. } | FromLauncher::Rejected { job, .. } => Key::Admission(*job),
            FromLauncher::Ended { call, .. } => {
                network = egress.end(*call);
                Key::End(*call)
            }
            FromLauncher::Handover { call } => Key::Handover(*call),
            FromLauncher::Sealed { call, .. } => Key::Evidence(*call),
            FromLauncher::Signed { job, call, .. } => Key::Signature(*job, *call),
            FromLauncher::Closed { job } => Key::Close(*job),
            FromLauncher::Applied { call, .. } => Key::Application(*call),
            FromLauncher::Leftovers { .. } => Key::Leftovers,
            FromLauncher::Secrets { known } => {
                if let Err(error) = redactor.add(known.clone()) {
                    // Rather no calls than calls that show them.
                    tracing::error!(%error, "the secrets cannot be looked for");
                    return;
                }
                continue;
            }
            // Taken above.
            FromLauncher::Network { .. } => continue,
            FromLauncher::Reloaded { .. } => Key::Reload,
            FromLauncher::Started { call, not_enforced } => {
                tracing::debug!(%call, ?not_enforced, "the tool runs");
                continue;
            }
            FromLauncher::Misuse { message, job, call } => {
                tracing::error!(message, "the launcher could not follow");
                pending.misused(message, *job, *call);
                continue;
            }
        };
        pending.answer(key, Ok(Told { message, descriptors, network }));
    }
}
