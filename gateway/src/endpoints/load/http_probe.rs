//! HTTP client of the probers: one request at a time, bounded in time and size.
//!
//! Not here: the meaning of answers.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::endpoints::Endpoint;
use crate::upstream::EngineAccess;

/// Longest answer in bytes.
pub(crate) const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Longest time that a connection stays open between probes.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a probe has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProbeError {
    /// The connection was refused.
    #[error("connection refused by {authority}: is the engine running, and is the port right?")]
    Refused {
        /// Address of the engine.
        authority: String,
    },
    /// The engine did not answer in time.
    #[error("{authority} did not answer {path} within {ms} ms")]
    Timeout {
        /// Address of the engine.
        authority: String,
        /// Path of the request.
        path: &'static str,
        /// Time limit in milliseconds.
        ms: u128,
    },
    /// The status is not 200.
    #[error("{authority} answered {path} with status {status}")]
    Status {
        /// Address of the engine.
        authority: String,
        /// Path of the request.
        path: &'static str,
        /// Status of the answer.
        status: u16,
    },
    /// The answer is too long.
    #[error("{authority} answered {path} with more than {ANSWER_BYTES_MAX} bytes")]
    TooLong {
        /// Address of the engine.
        authority: String,
        /// Path of the request.
        path: &'static str,
    },
    /// The connection failed otherwise.
    #[error("{authority} failed on {path}: {problem}")]
    Failed {
        /// Address of the engine.
        authority: String,
        /// Path of the request.
        path: &'static str,
        /// Text of the failure.
        problem: String,
    },
}

impl ProbeError {
    /// Value of the metric label.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            ProbeError::Refused { .. } => "refused",
            ProbeError::Timeout { .. } => "late",
            ProbeError::Status { .. } => "status",
            ProbeError::TooLong { .. } => "long",
            ProbeError::Failed { .. } => "failed",
        }
    }
}

impl ProbeError {
    /// Whether the engine did not answer at all.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, ProbeError::Refused { .. } | ProbeError::Timeout { .. } | ProbeError::Failed { .. })
    }
}

/// Client for one engine.
#[derive(Clone, Debug)]
pub(crate) struct ProbeClient {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    access: EngineAccess,
    authority: String,
    /// Base URL of requests.
    url: String,
    timeout: Duration,
}

impl ProbeClient {
    pub(crate) fn new(endpoint: &Endpoint, access: EngineAccess, timeout: Duration) -> ProbeClient {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(2)
            .build(access.connector(timeout));
        let (authority, url) = (endpoint.authority.clone(), endpoint.url());
        ProbeClient { client, access, authority, url, timeout }
    }

    /// Requests a path; the time limit covers the whole answer.
    pub(crate) async fn get(&self, path: &'static str) -> Result<Bytes, ProbeError> {
        let authority = self.authority.clone();
        match tokio::time::timeout(self.timeout, self.send(path)).await {
            Ok(answer) => answer,
            Err(_) => Err(ProbeError::Timeout { authority, path, ms: self.timeout.as_millis() }),
        }
    }

    async fn send(&self, path: &'static str) -> Result<Bytes, ProbeError> {
        let authority = || self.authority.clone();
        let failed = |problem: String| ProbeError::Failed { authority: authority(), path, problem };
        let mut request = Request::get(format!("{}{path}", self.url))
            .header("user-agent", "kvfleet")
            .body(Empty::new())
            .map_err(|error| failed(error.to_string()))?;
        self.access.authorize(request.headers_mut());
        let answer = self.client.request(request).await.map_err(|error| {
            if is_refused(&error) {
                ProbeError::Refused { authority: authority() }
            } else {
                failed(error_chain(&error))
            }
        })?;
        let status = answer.status();
        if status != StatusCode::OK {
            return Err(ProbeError::Status { authority: authority(), path, status: status.as_u16() });
        }
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                ProbeError::TooLong { authority: authority(), path }
            } else {
                failed(error_chain(error.as_ref()))
            }
        })
    }
}

fn error_sources<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = error_sources(error).filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.into_iter().any(|cause| cause.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// Text of an error with its chain of causes.
fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    error_sources(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
