//! Connection pool to engines.
//!
//! Not here: the choice of an engine, and how failures count (`forward.rs`).

use std::time::Duration;

use axum::http::{HeaderMap, Method, Request, Response, Uri, Version};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::endpoints::Endpoint;
use crate::upstream::EngineAccess;

/// Idle connections are dropped after this time, because uvicorn closes its side after five seconds
/// and a request would meet the close.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Most idle connections per engine.
const IDLE_CONNECTIONS_MAX: usize = 512;

/// HTTP client for engines.
#[derive(Clone, Debug)]
pub(super) struct EngineClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    access: EngineAccess,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UpstreamError {
    /// The connection failed.
    #[error("connection failed: {0}")]
    Connect(String),
    /// No byte of an answer within the limit.
    #[error("no byte of an answer within {} ms", after.as_millis())]
    Timeout {
        /// Time that was waited.
        after: Duration,
        /// Whether the connection was established.
        connected: bool,
    },
    /// The connection broke before the answer began.
    #[error("connection broke before the answer began: {0}")]
    Broken(String),
    /// The decode engine of a pair cannot meet the request's limits now. This is not a failure of
    /// the engine.
    #[error("{reason}")]
    DecodeBusy {
        /// Limit that would be exceeded.
        reason: String,
        /// Delay before a retry.
        retry_after: Duration,
    },
}

impl UpstreamError {
    /// Value of the metric label.
    pub(super) fn cause(&self) -> &'static str {
        match self {
            UpstreamError::Connect(_) => "connect",
            UpstreamError::Timeout { .. } => "late",
            UpstreamError::Broken(_) => "broken",
            UpstreamError::DecodeBusy { .. } => "paced",
        }
    }
}

impl EngineClient {
    pub(super) fn new(access: EngineAccess, connect: Duration) -> EngineClient {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_MAX)
            .build(access.connector(connect));
        EngineClient { client, access }
    }

    /// Builds a request to an engine, with the key that engines ask for.
    pub(super) fn request(
        &self,
        method: Method,
        endpoint: &Endpoint,
        path_and_query: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, UpstreamError> {
        let (scheme, authority) =
            (if endpoint.is_tls { "https" } else { "http" }, endpoint.authority.as_str());
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(path_and_query).build();
        let uri =
            uri.map_err(|error| UpstreamError::Connect(format!("{authority} is not an address: {error}")))?;
        self.access.authorize(&mut headers);
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.version_mut() = Version::HTTP_11;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a request, and waits for the head of the answer.
    pub(super) async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, UpstreamError> {
        self.client.request(request).await.map_err(|error| {
            let text = error_chain(&error);
            if error.is_connect() { UpstreamError::Connect(text) } else { UpstreamError::Broken(text) }
        })
    }
}

/// Text of an error with its chain of causes.
pub(super) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
