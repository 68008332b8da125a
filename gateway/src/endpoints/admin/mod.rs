//! Admin API: lists, adds, drains and removes engines.
//!
//! Engines that it adds live as long as the process, on this router only, so callers must tell
//! every router. Not here: engines from the configuration or Kubernetes; the API lists them, and
//! they are changed at their source.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::EndpointRegistry;
use crate::config::{ConfigError, refuse};
use handlers::AdminState;
use kvfleet_net::http::{ConnectionLimits, ServerControl, WhenFull, serve};
use kvfleet_net::secrets::{self, SecretError};
use removals::PendingRemovals;

mod handlers;
mod removals;
#[cfg(test)]
mod tests;

/// Shortest secret.
const TOKEN_BYTES_MIN: usize = 16;

/// Longest secret.
const TOKEN_BYTES_MAX: usize = 4_096;

/// Calls are few and short, and may come from untrusted clients.
const CONNECTION_LIMITS: ConnectionLimits = ConnectionLimits {
    connections: 256,
    when_full: WhenFull::Wait,
    head_timeout: Duration::from_secs(10),
    write_stall_timeout: Duration::from_secs(10),
};

/// Admin API for engines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Listening address, `ip:port`; empty disables the API.
    pub listen: String,
    /// File with the secret that callers give as `Authorization: Bearer`, made at the first start.
    pub token_file: PathBuf,
}

/// Why the admin API did not start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The listener cannot be opened.
    #[error(
        "cannot listen on {listen} for the admin API: {source}; set gateway.admin.listen to a free port, or \
         to \"\" to disable it"
    )]
    Listen {
        /// Configured address.
        listen: String,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The secret cannot be read or made.
    #[error("gateway.admin.token_file: {0}")]
    TokenFile(#[from] SecretError),
    /// The secret is invalid.
    #[error("{} does not hold a secret, which is one line with {TOKEN_BYTES_MIN} characters or more, without \
        spaces", path.display())]
    Token {
        /// Path of the secret.
        path: PathBuf,
    },
}

impl AdminConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.listen.is_empty() {
            return Ok(());
        }
        if self.listen.parse::<SocketAddr>().is_err() {
            let text = format!(
                "{:?} is not ip:port; \"127.0.0.1:7480\" is usual, and \"\" disables the API",
                self.listen
            );
            return refuse("admin.listen", text);
        }
        if self.token_file.as_os_str().is_empty() {
            let text = "is not set: name a file for the secret of callers, which is made if it is not there; web pages \
                        and other users of this host can reach the API too";
            return refuse("admin.token_file", text.to_owned());
        }
        Ok(())
    }

    fn token(&self) -> Result<String, AdminError> {
        let token = secrets::load_or_create(&self.token_file)?;
        let is_one = token.bytes().all(|byte| byte.is_ascii_graphic())
            && (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len());
        if is_one { Ok(token) } else { Err(AdminError::Token { path: self.token_file.clone() }) }
    }
}

/// Starts the admin API. Returns its address, or `None` if it is disabled.
///
/// # Errors
/// [`AdminError`]: a file that cannot be read, a port in use.
pub(crate) async fn start(
    config: &AdminConfig,
    endpoints: &EndpointRegistry,
    stop: &CancellationToken,
) -> Result<Option<SocketAddr>, AdminError> {
    if config.listen.is_empty() {
        return Ok(None);
    }
    let token = config.token()?;
    let listen_error = |source| AdminError::Listen { listen: config.listen.clone(), source };
    let listener = TcpListener::bind(&config.listen).await.map_err(listen_error)?;
    let bound = listener.local_addr().map_err(listen_error)?;
    let removals = PendingRemovals::new(endpoints.clone());
    tokio::spawn(removals.clone().run(stop.clone()));
    let is_local = bound.ip().is_loopback();
    let state = Arc::new(AdminState { endpoints: endpoints.clone(), removals, token, is_local });
    let app = Router::new()
        .route("/instances", get(handlers::list).post(handlers::add))
        .route("/instances/{instance}", get(handlers::show).delete(handlers::remove))
        .route("/instances/{instance}/drain", post(handlers::drain))
        .route("/instances/{instance}/resume", post(handlers::resume))
        .fallback(handlers::not_found)
        .layer(from_fn_with_state(state.clone(), handlers::authorize))
        .with_state(state);
    let stop = stop.clone();
    let orders = ServerControl { close: stop.clone(), abort: stop, ..ServerControl::default() };
    tokio::spawn(serve(listener, app, CONNECTION_LIMITS, orders));
    tracing::info!(%bound, "the admin API is listening");
    Ok(Some(bound))
}
