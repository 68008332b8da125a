//! HTTP endpoint of a process: `/metrics` in Prometheus format, `/livez` (and `/healthz`), and
//! `/readyz`.
//!
//! Not here: the metrics (each service registers its own), and readiness (`health.rs`). The
//! endpoint shows numbers and one line of text, so it uses plain HTTP, on loopback by default.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use kvfleet_net::http::{self, ConnectionLimits, ServerControl};
use prometheus::{Encoder, Registry, TextEncoder};
use tokio::net::TcpListener;

use super::health::Health;

/// Binds and serves in the background until the runtime ends; `None` if `listen` is empty.
pub(super) async fn serve(
    listen: &str,
    registry: Registry,
    health: Health,
) -> anyhow::Result<Option<SocketAddr>> {
    if listen.is_empty() {
        return Ok(None);
    }
    let listener = TcpListener::bind(listen).await.map_err(|cause| {
        anyhow::anyhow!(
            "cannot listen on {listen} for metrics: {cause}; set process.metrics_listen to a free port, or \
             to \"\" for none"
        )
    })?;
    let bound = listener.local_addr()?;
    let app = Router::new()
        .route("/metrics", get(move || std::future::ready(render(&registry))))
        .route("/healthz", get(|| std::future::ready("ok\n")))
        .route("/livez", get(|| std::future::ready("ok\n")))
        .route("/readyz", get(move || std::future::ready(readiness(&health))));
    tokio::spawn(http::serve(listener, app, ConnectionLimits::for_small_answers(), ServerControl::default()));
    Ok(Some(bound))
}

fn readiness(health: &Health) -> (StatusCode, String) {
    match health.ready() {
        Ok(()) => (StatusCode::OK, "ready\n".to_owned()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
    }
}

fn render(registry: &Registry) -> impl IntoResponse + use<> {
    let encoder = TextEncoder::new();
    let mut text = vec![];
    if let Err(cause) = encoder.encode(&registry.gather(), &mut text) {
        tracing::warn!(%cause, "metrics cannot be written as text");
    }
    ([(CONTENT_TYPE, encoder.format_type().to_owned())], text)
}
