//! The door through which engines are named by calls: listed, added, drained, removed.
//!
//! What is added here lives as long as the process, and on this router only: whoever adds an engine tells every router. Not here: engines
//! that the configuration or Kubernetes names, which are listed, and changed where they are named.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Endpoints;
use crate::config::{ConfigError, refuse};
use crate::serve::{Limits, Orders, serve};
use answer::Door;
use removals::Removals;

mod answer;
mod removals;
#[cfg(test)]
mod tests;

/// Shortest secret that is taken.
const TOKEN_BYTES_MIN: usize = 16;

/// Longest file with one.
const TOKEN_BYTES_MAX: usize = 4_096;

/// Calls are few and short, and who makes them may be anybody.
const LIMITS: Limits =
    Limits { connections: 256, head: Duration::from_secs(10), unread: Duration::from_secs(10) };

/// The door for calls that name engines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Where it is, `ip:port`. Empty: nowhere.
    pub listen: String,
    /// File with the secret that callers give as `Authorization: Bearer`. Empty: none, and then it is at the loopback only.
    pub token_file: PathBuf,
}

/// Why the door does not open.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The port.
    #[error(
        "cannot listen on {listen} for calls that name engines: {source}; set doors.admin.listen to a free port, or to \"\" for none"
    )]
    Listen {
        /// Where.
        listen: String,
        /// Why not.
        source: std::io::Error,
    },
    /// The file.
    #[error("cannot read the secret {}: {source}; set doors.admin.token_file to a file that this process may read", path.display())]
    TokenFile {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// What is in it.
    #[error("{} is no secret of one line with {TOKEN_BYTES_MIN} characters or more, without spaces", path.display())]
    Token {
        /// Which.
        path: PathBuf,
    },
}

impl AdminConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.listen.is_empty() {
            return Ok(());
        }
        let Ok(address) = self.listen.parse::<SocketAddr>() else {
            let text =
                format!("{:?} is not ip:port; \"127.0.0.1:7480\" is usual, and \"\" is nowhere", self.listen);
            return refuse("admin.listen", text);
        };
        if !address.ip().is_loopback() && self.token_file.as_os_str().is_empty() {
            let text = format!(
                "{address} can be reached from other hosts; give admin.token_file, or listen on 127.0.0.1"
            );
            return refuse("admin.listen", text);
        }
        Ok(())
    }

    fn token(&self) -> Result<Option<String>, AdminError> {
        if self.token_file.as_os_str().is_empty() {
            return Ok(None);
        }
        let path = || self.token_file.clone();
        let text = std::fs::read_to_string(&self.token_file)
            .map_err(|source| AdminError::TokenFile { path: path(), source })?;
        let token = text.trim();
        let is_one = token.bytes().all(|byte| byte.is_ascii_graphic())
            && (TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&token.len());
        if is_one { Ok(Some(token.to_owned())) } else { Err(AdminError::Token { path: path() }) }
    }
}

/// Opens the door; where it is, if anywhere.
///
/// # Errors
/// [`AdminError`]: a file that cannot be read, a port in use.
pub(crate) async fn open(
    config: &AdminConfig,
    endpoints: &Endpoints,
    stop: &CancellationToken,
) -> Result<Option<SocketAddr>, AdminError> {
    if config.listen.is_empty() {
        return Ok(None);
    }
    let token = config.token()?;
    let failed = |source| AdminError::Listen { listen: config.listen.clone(), source };
    let listener = TcpListener::bind(&config.listen).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    let removals = Removals::new(endpoints.clone());
    tokio::spawn(removals.clone().run(stop.clone()));
    let door = Arc::new(Door { endpoints: endpoints.clone(), removals, token });
    let app = Router::new()
        .route("/instances", get(answer::list).post(answer::add))
        .route("/instances/{instance}", get(answer::show).delete(answer::remove))
        .route("/instances/{instance}/drain", post(answer::drain))
        .route("/instances/{instance}/resume", post(answer::resume))
        .fallback(answer::nothing)
        .with_state(door);
    let stop = stop.clone();
    let orders = Orders { close: stop.clone(), abort: stop, ..Orders::default() };
    tokio::spawn(serve(listener, app, LIMITS, orders));
    tracing::info!(%bound, "calls that name engines are taken");
    Ok(Some(bound))
}
