//! Drain endpoint of a process: `POST /drain?within_ms=…` on a loopback address, for callers in the
//! same network namespace.
//!
//! Not here: the effect of draining (`health.rs`), and the command that calls this
//! (`crate::probe`).

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::routing::post;
use kvfleet_net::http::{self, ConnectionLimits, ServerControl, WhenFull};
use tokio::net::TcpListener;

use super::health::Health;

/// Default time for draining.
const DRAIN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(20);

/// Longest time for draining.
const DRAIN_TIMEOUT_MAX: Duration = Duration::from_secs(3_600);

/// Binds and serves in the background until the runtime ends; `None` if `listen` is empty.
pub(super) async fn serve(listen: &str, health: Health) -> anyhow::Result<Option<SocketAddr>> {
    if listen.is_empty() {
        return Ok(None);
    }
    let listener = TcpListener::bind(listen).await.map_err(|cause| {
        anyhow::anyhow!(
            "cannot listen on {listen} for requests to drain: {cause}; set process.drain_listen to a free \
             port, or to \"\" for none"
        )
    })?;
    let bound = listener.local_addr()?;
    let app = Router::new().route("/drain", post(move |uri: Uri| answer(health.clone(), uri)));
    // A call to drain answers when draining is done, so it must not give way to later ones.
    let limits = ConnectionLimits { when_full: WhenFull::Wait, ..ConnectionLimits::for_small_answers() };
    tokio::spawn(http::serve(listener, app, limits, ServerControl::default()));
    Ok(Some(bound))
}

async fn answer(health: Health, uri: Uri) -> (StatusCode, String) {
    let Some(within) = parse_timeout(uri.query().unwrap_or_default()) else {
        let most = DRAIN_TIMEOUT_MAX.as_millis();
        return (StatusCode::BAD_REQUEST, format!("write /drain?within_ms=N with N from 1 to {most}\n"));
    };
    // Draining continues if the caller disconnects.
    match tokio::spawn(async move { health.drain(within).await }).await {
        Ok(Ok(done)) => (StatusCode::OK, done + "\n"),
        Ok(Err(rest)) => (StatusCode::SERVICE_UNAVAILABLE, rest + "\n"),
        Err(cause) => (StatusCode::INTERNAL_SERVER_ERROR, format!("draining ended: {cause}\n")),
    }
}

fn parse_timeout(query: &str) -> Option<Duration> {
    if query.is_empty() {
        return Some(DRAIN_TIMEOUT_DEFAULT);
    }
    let millis = query.strip_prefix("within_ms=")?.parse().ok().map(Duration::from_millis)?;
    (!millis.is_zero() && millis <= DRAIN_TIMEOUT_MAX).then_some(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_the_drain_timeout() {
        assert_eq!(parse_timeout(""), Some(DRAIN_TIMEOUT_DEFAULT));
        assert_eq!(parse_timeout("within_ms=250"), Some(Duration::from_millis(250)));
        for wrong in
            ["within_ms=", "within_ms=0", "within_ms=-1", "within_ms=3600001", "x=1", "within_ms=1&x"]
        {
            assert_eq!(parse_timeout(wrong), None, "{wrong}");
        }
    }
}
