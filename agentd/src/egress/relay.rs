//! Two connections as one: what comes in on one side goes out on the other, each direction ends by itself, and what breaks
//! on one side breaks on the other.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use toolproto::manifest::{HostPort, TlsMode};
use toolproto::receipt::Denial;

use super::inspect::Inspection;
use super::tally::{Tally, unreachable};

/// How much is on its way in each direction.
const BUFFER: usize = 16 << 10;
/// The beginning of an answer that switches protocols (RFC 9110, 15.2.2).
const SWITCHED: &[u8] = b"HTTP/1.1 101";

/// Why two connections are no longer one.
#[derive(Debug)]
enum Broken {
    /// The tool's end: its own business.
    Tool,
    /// The listed host's.
    Upstream(io::Error),
    /// It is not for the listed host.
    Refused(Denial),
}

/// Copies until both directions have ended, or one broke; then both sides are reset. Once the call is `ending`, only what the
/// tool had still sent is passed on.
pub(super) async fn relay(
    mut tool: TcpStream,
    mut upstream: TcpStream,
    (target, mode): (&HostPort, TlsMode),
    tally: &Tally,
    ending: &CancellationToken,
) {
    // What is small and waited for should not wait here.
    for side in [&tool, &upstream] {
        if let Err(error) = side.set_nodelay(true) {
            tracing::debug!(%error, "a connection will be slower");
        }
    }
    let (switched, answer) = watch::channel(None);
    let all_sent = CancellationToken::new();
    let broken = {
        let (from_tool, to_tool) = tool.split();
        let (from_upstream, to_upstream) = upstream.split();
        let up = async {
            up(from_tool, to_upstream, Inspection::new(target, mode), answer, tally).await?;
            all_sent.cancel();
            Ok(())
        };
        let both = async { tokio::try_join!(up, down(from_upstream, to_tool, switched, tally)).map(|_| ()) };
        tokio::select! {
            ended = both => ended.err(),
            () = async { ending.cancelled().await; all_sent.cancelled().await } => None,
        }
    };
    match broken {
        None => return,
        Some(Broken::Tool) => {}
        Some(Broken::Refused(denial)) => tally.deny(denial),
        Some(Broken::Upstream(error)) => tally.deny(unreachable(target, &format!("its connection broke: {error}"))),
    }
    reset(tool);
    reset(upstream);
}

/// Ends a connection so that the other side sees an error, not an end.
pub(super) fn reset(connection: TcpStream) {
    if let Err(error) = connection.set_zero_linger() {
        tracing::debug!(%error, "a connection is ended as if nothing were wrong");
    }
}

async fn up(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut inspection: Inspection<'_>,
    mut answer: watch::Receiver<Option<bool>>,
    tally: &Tally,
) -> Result<(), Broken> {
    let mut buffer = vec![0; BUFFER];
    loop {
        if inspection.awaits_answer() {
            // Without an answer there is nothing to wait for any more.
            let switched = answer.wait_for(Option::is_some).await.ok().and_then(|switched| *switched);
            inspection.answered(switched.unwrap_or(false)).map_err(Broken::Refused)?;
        }
        let length = from.read(&mut buffer).await.map_err(|_| Broken::Tool)?;
        if length == 0 {
            return to.shutdown().await.map_err(Broken::Upstream);
        }
        inspection.look(&buffer[..length]).map_err(Broken::Refused)?;
        to.write_all(&buffer[..length]).await.map_err(Broken::Upstream)?;
        tally.sent(length);
    }
}

async fn down(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    switched: watch::Sender<Option<bool>>,
    tally: &Tally,
) -> Result<(), Broken> {
    let mut buffer = vec![0; BUFFER];
    let mut beginning = Vec::with_capacity(SWITCHED.len());
    loop {
        let length = from.read(&mut buffer).await.map_err(Broken::Upstream)?;
        if length == 0 {
            switched.send_replace(Some(false));
            return to.shutdown().await.map_err(|_| Broken::Tool);
        }
        if beginning.len() < SWITCHED.len() {
            let missing = (SWITCHED.len() - beginning.len()).min(length);
            beginning.extend_from_slice(&buffer[..missing]);
            if beginning.len() == SWITCHED.len() {
                switched.send_replace(Some(beginning == SWITCHED));
            }
        }
        to.write_all(&buffer[..length]).await.map_err(|_| Broken::Tool)?;
        tally.received(length);
    }
}

/// How long what a tool had sent may take to be passed on once the tool is gone.
pub(super) const LINGER: Duration = Duration::from_millis(500);
