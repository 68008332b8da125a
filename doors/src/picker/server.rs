//! The port at which Envoy asks.
//!
//! Not here: what it is answered (`service.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvfleet_proto::envoy::ext_proc::external_processor_server::ExternalProcessorServer;
use kvfleet_proto::health::health_server::HealthServer;
use kvfleet_proto::tls::listen;
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::transport::server::{Router, TcpIncoming};

use super::config::PickerConfig;
use super::exchange::Rules;
use super::health::Readiness;
use super::metrics::Metrics;
use super::pick::Picks;
use super::service::{Service, Shared};
use crate::decide::Decider;
use crate::prompt::Reader;

/// Between two questions to a caller who says nothing, and how long its answer may take.
const KEEPALIVE: Duration = Duration::from_secs(20);

/// What a message has besides the body in it: headers, metadata.
const BESIDES_BYTES_MAX: usize = 2 << 20;

/// What one stream may have on its way to us: Envoy's own default is more than any other client's.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// How long requests that are under way may still take when a router stops.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Why the door does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The port cannot be had.
    #[error(
        "cannot listen on {listen} for Envoy: {cause}; set doors.picker.listen to a free address, or to \"\" for no such door"
    )]
    Listen {
        /// The address.
        listen: String,
        /// What the system said.
        cause: String,
    },
    /// Its numbers are there already: two doors in one process.
    #[error("the numbers of the endpoint picker cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// The door, open. Dropped, it closes at once.
#[derive(Debug)]
pub(crate) struct Open {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Open {
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for what is under way, for a while; `stop` is cancelled before.
    pub(crate) async fn ended(mut self) {
        if tokio::time::timeout(ENDS_WITHIN, &mut self.serving).await.is_err() {
            tracing::warn!("requests of Envoy were still arriving when the router stopped");
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Opens the door until `stop`; nothing where the configuration has none.
pub(crate) async fn serve(
    config: &PickerConfig,
    decider: &Decider,
    reader: &Arc<Reader>,
    block_tokens: u32,
    registry: &Registry,
    stop: &CancellationToken,
) -> Result<Option<Open>, OpenError> {
    if config.listen.is_empty() {
        return Ok(None);
    }
    let refused =
        |error: std::io::Error| OpenError::Listen { listen: config.listen.clone(), cause: error.to_string() };
    let listener = TcpListener::bind(&config.listen).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    let shared = Shared {
        picks: Picks::new(
            decider.clone(),
            Arc::clone(reader),
            block_tokens,
            config.endpoints_max,
            first_request(),
        ),
        rules: Rules { body_bytes_max: config.body_bytes_max, conformance: config.conformance },
        metrics: Metrics::register(registry)?,
        streams: Arc::new(Semaphore::new(config.streams_max.min(Semaphore::MAX_PERMITS))),
        held: Arc::new(AtomicUsize::new(0)),
        held_bytes_max: config.held_bytes_max,
        arrival_max: Duration::from_millis(config.arrival_ms),
        stop: stop.clone(),
    };
    let router = routed(config, shared, decider, stop);
    let (identity, ended) = (config.tls.then(|| decider.desk().identity()), stop.clone().cancelled_owned());
    let serving = tokio::spawn(async move {
        let served = match identity {
            Some(identity) => {
                let incoming = listen::incoming_of_anyone(listener, &identity);
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
            None => {
                let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
        };
        if let Err(error) = served {
            tracing::error!(%error, "the server for Envoy ended");
        }
    });
    Ok(Some(Open { address, serving }))
}

fn routed(config: &PickerConfig, shared: Shared, decider: &Decider, stop: &CancellationToken) -> Router {
    let picker = ExternalProcessorServer::new(Service { shared: Arc::new(shared) })
        .max_decoding_message_size(config.body_bytes_max + BESIDES_BYTES_MAX);
    let health = HealthServer::new(Readiness { desk: decider.desk().clone(), stop: stop.clone() });
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .initial_stream_window_size(Some(STREAM_WINDOW_BYTES))
        .initial_connection_window_size(Some(CONNECTION_WINDOW_BYTES))
        // One too many is told so, and does not wait for another to end.
        .max_concurrent_streams(u32::try_from(config.streams_max).ok().and_then(|max| max.checked_add(64)))
        .add_service(picker)
        .add_service(health)
}

/// So that numbers of two starts are not the same: a few thousand requests for each microsecond since 1970 have theirs.
fn first_request() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or_default() << 11
}
