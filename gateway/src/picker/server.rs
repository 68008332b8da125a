//! Listener of the endpoint picker.
//!
//! Not here: the answers (`service.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvfleet_net::tls::{ClientVerifier, TlsError, listen};
use kvfleet_proto::envoy::ext_proc::external_processor_server::ExternalProcessorServer;
use kvfleet_proto::health::health_server::HealthServer;
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::{Router, TcpIncoming};

use super::config::PickerConfig;
use super::exchange::ExchangeRules;
use super::health::HealthService;
use super::metrics::PickerMetrics;
use super::pick::EndpointPicker;
use super::service::{PickerService, PickerState};
use crate::decide::Decider;
use crate::prompt::RequestReader;

/// Interval of HTTP/2 keepalive pings to idle clients, and timeout of each.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// Bytes of a message besides the body: headers and metadata.
const MESSAGE_OVERHEAD_BYTES_MAX: usize = 2 << 20;

/// HTTP/2 windows. A small window per stream is enough, because Envoy sends in small chunks.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Longest time that requests in flight may take after the router is asked to stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the endpoint picker did not start.
#[derive(Debug, thiserror::Error)]
pub enum PickerError {
    /// The listener cannot be opened.
    #[error(
        "cannot listen on {listen} for Envoy: {cause}; set gateway.picker.listen to a free address, or to \
         \"\" to disable the picker"
    )]
    Listen {
        /// Configured address.
        listen: String,
        /// Error of the operating system.
        cause: String,
    },
    /// The CAs of clients cannot be used.
    #[error("gateway.picker.client_ca: {0}")]
    ClientCa(#[from] TlsError),
    /// Metrics are already registered, for example by a second picker in the process.
    #[error("metrics of the endpoint picker cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// A running endpoint picker. Dropping it closes it at once.
#[derive(Debug)]
pub(crate) struct PickerServer {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl PickerServer {
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for requests in flight, for a limited time; `stop` must have been cancelled before.
    pub(crate) async fn drain(mut self) {
        if tokio::time::timeout(DRAIN_TIMEOUT, &mut self.serving).await.is_err() {
            tracing::warn!("Envoy requests were still arriving when the router stopped");
        }
    }
}

impl Drop for PickerServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Runs the picker until `stop` is cancelled; `None` if it is disabled.
pub(crate) async fn serve(
    config: &PickerConfig,
    decider: &Decider,
    reader: &Arc<RequestReader>,
    block_tokens: u32,
    registry: &Registry,
    stop: &CancellationToken,
) -> Result<Option<PickerServer>, PickerError> {
    if config.listen.is_empty() {
        return Ok(None);
    }
    let refused = |error: std::io::Error| PickerError::Listen {
        listen: config.listen.clone(),
        cause: error.to_string(),
    };
    let has_ca = !config.client_ca.as_os_str().is_empty();
    let clients = has_ca.then(|| ClientVerifier::load(&config.client_ca)).transpose()?;
    let listener = TcpListener::bind(&config.listen).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let shared = PickerState {
        picks: EndpointPicker::new(
            decider.clone(),
            Arc::clone(reader),
            block_tokens,
            config.endpoints_max,
            first_request_number(),
        ),
        rules: ExchangeRules { body_bytes_max: config.body_bytes_max, conformance: config.conformance },
        metrics: PickerMetrics::register(registry)?,
        streams: Arc::new(Semaphore::new(config.streams_max.min(Semaphore::MAX_PERMITS))),
        held: Arc::new(AtomicUsize::new(0)),
        held_bytes_max: config.held_bytes_max,
        arrival_max: Duration::from_millis(config.arrival_ms),
        stop: stop.clone(),
    };
    let router = build_router(config, shared, decider, stop);
    let (identity, ended) = (config.tls.then(|| decider.router().identity()), stop.clone().cancelled_owned());
    let serving = tokio::spawn(async move {
        let served = match identity {
            Some(identity) => {
                let incoming = listen::incoming_from_outsiders(listener, &identity, clients);
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
            None => {
                let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
        };
        if let Err(error) = served {
            tracing::error!(%error, "the server for Envoy failed");
        }
    });
    Ok(Some(PickerServer { address, serving }))
}

fn build_router(
    config: &PickerConfig,
    shared: PickerState,
    decider: &Decider,
    stop: &CancellationToken,
) -> Router {
    let picker = ExternalProcessorServer::new(PickerService { shared: Arc::new(shared) })
        .max_decoding_message_size(config.body_bytes_max + MESSAGE_OVERHEAD_BYTES_MAX);
    let health = HealthServer::new(HealthService { router: decider.router().clone(), stop: stop.clone() });
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .initial_stream_window_size(Some(STREAM_WINDOW_BYTES))
        .initial_connection_window_size(Some(CONNECTION_WINDOW_BYTES))
        // A limit above streams_max, so that surplus streams are refused instead of queued.
        .max_concurrent_streams(u32::try_from(config.streams_max).ok().and_then(|max| max.checked_add(64)))
        .add_service(picker)
        .add_service(health)
}

/// First request number, derived from the time so that numbers of two starts differ: 2048 numbers
/// per microsecond since 1970.
fn first_request_number() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or_default() << 11
}
