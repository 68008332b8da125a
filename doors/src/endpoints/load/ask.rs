//! Asks an engine over HTTP: one request at a time, with an end to all it may take.
//!
//! Not here: what the answers mean.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// Longest answer that is read.
pub(crate) const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Longest that a connection is kept for the next question.
const KEPT: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody listens there.
    #[error("nobody listens at {authority}: is the engine running, and is it the right port?")]
    Refused {
        /// Where.
        authority: String,
    },
    /// Nothing came.
    #[error("{authority} does not answer {path} within {ms} ms")]
    Late {
        /// Where.
        authority: String,
        /// What was asked.
        path: &'static str,
        /// How long it had.
        ms: u128,
    },
    /// It answers something else.
    #[error("{authority} answers {path} with status {status}")]
    Status {
        /// Where.
        authority: String,
        /// What was asked.
        path: &'static str,
        /// How.
        status: u16,
    },
    /// There is no end to it.
    #[error("{authority} answers {path} with more than {ANSWER_BYTES_MAX} bytes")]
    Long {
        /// Where.
        authority: String,
        /// What was asked.
        path: &'static str,
    },
    /// The connection failed otherwise.
    #[error("{authority} cannot be asked for {path}: {problem}")]
    Failed {
        /// Where.
        authority: String,
        /// What was asked.
        path: &'static str,
        /// How it failed.
        problem: String,
    },
}

impl AskError {
    /// As metrics name it.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            AskError::Refused { .. } => "refused",
            AskError::Late { .. } => "late",
            AskError::Status { .. } => "status",
            AskError::Long { .. } => "long",
            AskError::Failed { .. } => "failed",
        }
    }
}

impl AskError {
    /// Whether nobody answered, rather than something that was not expected.
    pub(crate) fn is_no_answer(&self) -> bool {
        matches!(self, AskError::Refused { .. } | AskError::Late { .. } | AskError::Failed { .. })
    }
}

/// Asks one engine.
#[derive(Clone, Debug)]
pub(crate) struct Asker {
    client: Client<HttpConnector, Empty<Bytes>>,
    authority: String,
    timeout: Duration,
}

impl Asker {
    pub(crate) fn new(authority: &str, timeout: Duration) -> Asker {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(timeout));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(KEPT)
            .pool_max_idle_per_host(2)
            .build(connector);
        Asker { client, authority: authority.to_owned(), timeout }
    }

    /// Asks for a path; the whole answer has `timeout` to come.
    pub(crate) async fn get(&self, path: &'static str) -> Result<Bytes, AskError> {
        let authority = self.authority.clone();
        match tokio::time::timeout(self.timeout, self.ask(path)).await {
            Ok(answer) => answer,
            Err(_) => Err(AskError::Late { authority, path, ms: self.timeout.as_millis() }),
        }
    }

    async fn ask(&self, path: &'static str) -> Result<Bytes, AskError> {
        let authority = || self.authority.clone();
        let failed = |problem: String| AskError::Failed { authority: authority(), path, problem };
        let request = Request::get(format!("http://{}{path}", self.authority))
            .header("user-agent", "kvfleet")
            .body(Empty::new())
            .map_err(|error| failed(error.to_string()))?;
        let answer = self.client.request(request).await.map_err(|error| {
            if is_refused(&error) {
                AskError::Refused { authority: authority() }
            } else {
                failed(whole(&error))
            }
        })?;
        let status = answer.status();
        if status != StatusCode::OK {
            return Err(AskError::Status { authority: authority(), path, status: status.as_u16() });
        }
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        body.map(|body| body.to_bytes()).map_err(|error| {
            if error.is::<http_body_util::LengthLimitError>() {
                AskError::Long { authority: authority(), path }
            } else {
                failed(whole(error.as_ref()))
            }
        })
    }
}

fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = causes(error).filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.into_iter().any(|cause| cause.kind() == std::io::ErrorKind::ConnectionRefused)
}

/// An error with what it came from.
fn whole(error: &(dyn std::error::Error + 'static)) -> String {
    causes(error).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
