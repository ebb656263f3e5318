//! What tasks wait for: each question leaves a sender under the key of its answer.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sandbox::protocol::FromLauncher;
use tokio::sync::oneshot;
use toolproto::ids::{CallId, JobId};
use toolproto::receipt::NetworkClaims;

use crate::launch::LinkError;

/// What a waiting task waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Admission(JobId),
    Handover(CallId),
    End(CallId),
    Evidence(CallId),
    Signature(JobId, Option<CallId>),
    Close(JobId),
    Application(CallId),
    Leftovers,
    Reload,
}

pub(super) type Answer = Result<Told, LinkError>;

/// What the launcher said.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) message: FromLauncher,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Of a call that has ended: what its network comes to, if it had one.
    pub(super) network: Option<oneshot::Receiver<NetworkClaims>>,
}

/// Who waits, while the channel is open.
#[derive(Debug)]
pub(super) struct Pending(Mutex<Option<HashMap<Key, oneshot::Sender<Answer>>>>);

impl Pending {
    pub(super) fn open() -> Self {
        Self(Mutex::new(Some(HashMap::new())))
    }

    /// No table any more: the channel is closed.
    fn table(&self) -> MutexGuard<'_, Option<HashMap<Key, oneshot::Sender<Answer>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, key: Key) {
        if let Some(table) = self.table().as_mut() {
            table.remove(&key);
        }
    }

    pub(super) fn insert(&self, key: Key, sender: oneshot::Sender<Answer>) -> Result<(), LinkError> {
        self.table().as_mut().ok_or(LinkError::Closed)?.insert(key, sender);
        Ok(())
    }

    pub(super) fn answer(&self, key: Key, answer: Answer) {
        let sender = self.table().as_mut().and_then(|table| table.remove(&key));
        match sender {
            // The task may have gone; then nobody wants the answer.
            Some(sender) => drop(sender.send(answer)),
            None => tracing::warn!(?key, "the launcher answered what nobody asked"),
        }
    }

    /// A message that the launcher could not follow names a call or a job; whatever waits for it is answered so.
    pub(super) fn misused(&self, message: &str, job: Option<JobId>, call: Option<CallId>) {
        let concerned = |key: &Key| match (*key, call) {
            (
                Key::Handover(waiting)
                | Key::End(waiting)
                | Key::Evidence(waiting)
                | Key::Application(waiting)
                | Key::Signature(_, Some(waiting)),
                Some(call),
            ) => waiting == call,
            (Key::Admission(waiting) | Key::Close(waiting) | Key::Signature(waiting, None), None) => {
                Some(waiting) == job
            }
            _ => false,
        };
        let mut table = self.table();
        for (_, sender) in table.iter_mut().flat_map(|table| table.extract_if(|key, _| concerned(key))) {
            drop(sender.send(Err(LinkError::Misuse(message.to_owned()))));
        }
    }

    pub(super) fn close(&self) {
        *self.table() = None;
    }
}

/// An answer that may come, and is waited for no longer than this value lives.
pub(super) struct Expected<'a> {
    pending: &'a Pending,
    key: Key,
    pub(super) answer: oneshot::Receiver<Answer>,
}

impl<'a> Expected<'a> {
    pub(super) fn new(pending: &'a Pending, key: Key) -> Result<Self, LinkError> {
        let (sender, answer) = oneshot::channel();
        pending.insert(key, sender)?;
        Ok(Self { pending, key, answer })
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.pending.forget(self.key);
    }
}
