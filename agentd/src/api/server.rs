//! Connections: accepting them, how many there may be, and how long they may say nothing.

use std::collections::HashMap;
use std::convert::Infallible;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::peer::Connection;
use crate::access::Gate;

/// Bounds of the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once. More wait in the kernel's queue.
    pub connections: usize,
    /// Connections of one user at once. More are closed at once.
    pub per_user: usize,
    /// How long a connection may take to send a request's head, and so how long it may be idle between requests.
    pub head_time: Duration,
    /// How long open connections have to end once the daemon stops.
    pub drain_time: Duration,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            connections: 1024,
            per_user: 256,
            head_time: Duration::from_secs(15),
            drain_time: Duration::from_secs(5),
        }
    }
}

/// Serves the API on the listener until `stopping` is cancelled; then lets requests that run end for a while.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    gate: Arc<Gate>,
    bounds: Bounds,
    stopping: CancellationToken,
) {
    let places = Arc::new(Semaphore::new(bounds.connections));
    let users = Arc::new(Users::default());
    let tasks = TaskTracker::new();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, stream) = tokio::select! {
            () = stopping.cancelled() => break,
            (place, accepted) = accepted => match accepted {
                Ok((stream, _)) => (place, stream),
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    // Out of descriptors or memory: others must end first.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let connection = match Connection::of(stream.as_fd(), &gate) {
            Ok(connection) => connection,
            Err(error) => {
                tracing::info!(%error, "a connection was closed because the kernel does not say whose it is");
                continue;
            }
        };
        let Some(seat) = Users::seat(&users, connection.caller().uid, bounds.per_user) else {
            tracing::warn!(uid = connection.caller().uid, "a connection was closed: the user has too many");
            continue;
        };
        let serving = serve_one(stream, router.clone(), connection, bounds.head_time, stopping.clone());
        tasks.spawn(async move {
            serving.await;
            drop((place, seat));
        });
    }
    tasks.close();
    if tokio::time::timeout(bounds.drain_time, tasks.wait()).await.is_err() {
        tracing::warn!("connections were still open when the time for ending them was over");
    }
}

async fn serve_one(
    stream: UnixStream,
    router: Router,
    connection: Connection,
    head_time: Duration,
    stopping: CancellationToken,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(connection.clone());
        let answer = router.call(request.map(Body::new));
        async move { Ok::<_, Infallible>(answer.await.unwrap_or_else(|never| match never {})) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_time)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Clients hang up, send nonsense or nothing; that is theirs to mend.
        tracing::debug!(%error, "a connection broke");
    }
}

/// How many connections each user has.
#[derive(Debug, Default)]
struct Users(Mutex<HashMap<u32, usize>>);

/// One connection of a user; given back when dropped.
#[derive(Debug)]
struct Seat {
    users: Arc<Users>,
    uid: u32,
}

impl Users {
    fn seat(users: &Arc<Self>, uid: u32, limit: usize) -> Option<Seat> {
        let mut table = users.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = table.entry(uid).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(Seat { users: Arc::clone(users), uid })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut table = self.users.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = table.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_all_connections() {
        let users = Arc::new(Users::default());
        let first = Users::seat(&users, 1000, 2).unwrap();
        let second = Users::seat(&users, 1000, 2).unwrap();
        assert!(Users::seat(&users, 1000, 2).is_none());
        assert!(Users::seat(&users, 1001, 2).is_some());
        drop(first);
        assert!(Users::seat(&users, 1000, 2).is_some());
        drop(second);
        assert!(users.0.lock().unwrap().is_empty());
    }
}
