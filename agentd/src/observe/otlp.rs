//! Sends spans to a collector, by OTLP over HTTP. Best effort: what a slow or dead collector does not take is dropped.

use std::time::Duration;

use async_trait::async_trait;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// How many spans wait for the collector.
const QUEUE: usize = 4096;
/// How many are sent at once.
const BATCH: usize = 512;
/// How long a span waits for others to go with it.
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take for a batch.
const PATIENCE: Duration = Duration::from_secs(5);
/// The path of traces below a collector's address (OTLP specification, OTLP/HTTP request).
const PATH: &str = "/v1/traces";

/// The exporter cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The address.
    #[error("[telemetry] otlp_endpoint")]
    Endpoint(#[from] ExporterBuildError),
    /// The client.
    #[error("the client for traces")]
    Client(#[from] reqwest::Error),
}

/// Where spans go. The task that sends them ends when this is dropped and they are sent, or are not taken in time.
#[derive(Debug)]
pub struct Spans(mpsc::Sender<SpanData>);

impl Spans {
    /// Passes a span on; `false` when there is no room for it.
    #[must_use]
    pub fn offer(&self, span: SpanData) -> bool {
        self.0.try_send(span).is_ok()
    }
}

/// Starts the task that sends spans to a collector.
///
/// # Errors
/// When the address is none.
pub fn start(endpoint: &str, service: &str) -> Result<(Spans, JoinHandle<()>), OtlpError> {
    // Already installed is as good as installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder()
        .timeout(PATIENCE)
        .redirect(reqwest::redirect::Policy::none())
        .user_agent(concat!("agentd/", env!("CARGO_PKG_VERSION")))
        .build()?;
    let mut exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(Client(client))
        .with_endpoint(format!("{}{PATH}", endpoint.trim_end_matches('/')))
        .with_timeout(PATIENCE)
        .build()?;
    exporter.set_resource(&Resource::builder_empty().with_service_name(service.to_owned()).build());
    let (sender, receiver) = mpsc::channel(QUEUE);
    Ok((Spans(sender), tokio::spawn(send(exporter, receiver))))
}

async fn send(exporter: SpanExporter, mut spans: mpsc::Receiver<SpanData>) {
    let mut reached = true;
    let mut batch = Vec::new();
    while spans.recv_many(&mut batch, BATCH).await > 0 {
        if !spans.is_closed() {
            tokio::time::sleep(GATHER).await;
            while batch.len() < BATCH
                && let Ok(span) = spans.try_recv()
            {
                batch.push(span);
            }
        }
        let sent = exporter.export(std::mem::take(&mut batch)).await;
        // Once for each time that it goes away: a log that fills up helps nobody.
        match &sent {
            Err(error) if reached => tracing::warn!(%error, "the collector does not take traces; they are dropped"),
            Ok(()) if !reached => tracing::info!("the collector takes traces again"),
            _ => {}
        }
        reached = sent.is_ok();
    }
}

/// An HTTP client of the library that models are asked with, too: the exporter brings none of that version.
#[derive(Debug)]
struct Client(reqwest::Client);

#[async_trait]
impl HttpClient for Client {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let response = self.0.execute(request.try_into()?).await?;
        let status = response.status();
        let mut answer = Response::new(response.bytes().await?);
        *answer.status_mut() = status;
        Ok(answer)
    }
}
