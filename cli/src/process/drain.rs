//! Where a process is asked to drain: `POST /drain?within_ms=…` on an address of the loopback, for whoever is on the machine
//! (in the same network namespace) already.
//!
//! Not here: what draining is (`health.rs`) and the command that asks (`crate::probe`).

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::routing::post;
use tokio::net::TcpListener;

use super::health::Health;

/// How long draining may take where nobody says.
const WITHIN: Duration = Duration::from_secs(20);

/// Longest that may be asked for.
const WITHIN_MAX: Duration = Duration::from_secs(3_600);

/// Binds and serves in the background until the runtime ends; `None` when `listen` is empty.
pub(super) async fn serve(listen: &str, health: Health) -> anyhow::Result<Option<SocketAddr>> {
    if listen.is_empty() {
        return Ok(None);
    }
    let listener = TcpListener::bind(listen).await.map_err(|cause| {
        anyhow::anyhow!("cannot listen on {listen} for requests to drain: {cause}; set process.drain_listen to a free port, or to \"\" for none")
    })?;
    let bound = listener.local_addr()?;
    let app = Router::new().route("/drain", post(move |uri: Uri| answer(health.clone(), uri)));
    tokio::spawn(async move {
        if let Err(cause) = axum::serve(listener, app).await {
            tracing::warn!(%cause, "the endpoint for draining stopped");
        }
    });
    Ok(Some(bound))
}

async fn answer(health: Health, uri: Uri) -> (StatusCode, String) {
    let Some(within) = within(uri.query().unwrap_or_default()) else {
        let most = WITHIN_MAX.as_millis();
        return (StatusCode::BAD_REQUEST, format!("write /drain?within_ms=N with N from 1 to {most}\n"));
    };
    // Goes on where whoever asked hangs up.
    match tokio::spawn(async move { health.drain(within).await }).await {
        Ok(Ok(done)) => (StatusCode::OK, done + "\n"),
        Ok(Err(rest)) => (StatusCode::SERVICE_UNAVAILABLE, rest + "\n"),
        Err(cause) => (StatusCode::INTERNAL_SERVER_ERROR, format!("draining ended: {cause}\n")),
    }
}

fn within(query: &str) -> Option<Duration> {
    if query.is_empty() {
        return Some(WITHIN);
    }
    let millis = query.strip_prefix("within_ms=")?.parse().ok().map(Duration::from_millis)?;
    (!millis.is_zero() && millis <= WITHIN_MAX).then_some(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_given_in_milliseconds_or_not_at_all() {
        assert_eq!(within(""), Some(WITHIN));
        assert_eq!(within("within_ms=250"), Some(Duration::from_millis(250)));
        for wrong in
            ["within_ms=", "within_ms=0", "within_ms=-1", "within_ms=3600001", "x=1", "within_ms=1&x"]
        {
            assert_eq!(within(wrong), None, "{wrong}");
        }
    }
}
