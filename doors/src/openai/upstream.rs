//! Connections to engines, kept alive between requests.
//!
//! Not here: which engine, and what its failure means (`forward.rs`).

use std::time::Duration;

use axum::http::{HeaderMap, Method, Request, Response, Uri, Version};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// A connection that was idle for longer is not used again: engines behind uvicorn close theirs after five seconds, and a request must not meet that.
const IDLE: Duration = Duration::from_secs(4);

/// Idle connections that are kept for one engine.
const IDLE_CONNECTIONS_MAX: usize = 512;

/// Sends requests to engines.
#[derive(Clone, Debug)]
pub(super) struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Failure {
    /// Nobody took the connection.
    #[error("it takes no connection: {0}")]
    Connect(String),
    /// No byte in time.
    #[error("it sent no byte of an answer for {} ms", after.as_millis())]
    Late {
        /// How long it was waited for.
        after: Duration,
        /// Whether it had the request.
        had_it: bool,
    },
    /// The connection broke before the answer began.
    #[error("it broke off before its answer began: {0}")]
    Broken(String),
    /// Who would go on has more to decode by now than the request allows. It is no engine's failure.
    #[error("{reason}")]
    Paced {
        /// What would come too slowly.
        reason: String,
        /// When to ask again.
        retry_after: Duration,
    },
}

impl Failure {
    /// As metrics call it.
    pub(super) fn cause(&self) -> &'static str {
        match self {
            Failure::Connect(_) => "connect",
            Failure::Late { .. } => "late",
            Failure::Broken(_) => "broken",
            Failure::Paced { .. } => "paced",
        }
    }
}

impl Upstream {
    pub(super) fn new(connect: Duration) -> Upstream {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(connect));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .build(connector);
        Upstream { client }
    }

    /// A request to an engine.
    pub(super) fn request(
        method: Method,
        authority: &str,
        path_and_query: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, Failure> {
        let uri = Uri::builder().scheme("http").authority(authority).path_and_query(path_and_query).build();
        let uri = uri.map_err(|error| Failure::Connect(format!("{authority} is no address: {error}")))?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a request, and waits for the head of its answer.
    pub(super) async fn send(&self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Failure> {
        self.client.request(request).await.map_err(|error| {
            let text = causes(&error);
            if error.is_connect() { Failure::Connect(text) } else { Failure::Broken(text) }
        })
    }
}

/// An error with all that it was caused by.
pub(super) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
