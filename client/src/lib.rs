//! The client library that frontends and engines link: route, fetch, save, and release.
//!
//! [`Client`] holds the routers of a cluster and a path to every node that a router named. The
//! calls are in these files:
//!
//! - `route.rs`: route, lookup, status, load report; `retry.rs` chooses the router, and `stream.rs`
//!   lets route calls share a stream.
//! - `fetch.rs` and `save.rs`: whole blocks. `layers.rs` and `layer_save.rs`: the same layer by
//!   layer.
//! - `prefill.rs`: a prefill that overlaps with its load.
//! - `completions.rs`: all of these for threads without a runtime.
//! - `report.rs`: periodic reports to routers. `control.rs`: a node's own control calls.
//! - `paths.rs`: how paths to nodes are opened and kept.
//!
//! Not here: choosing an instance (the router does), computing, and the meaning of a block's bytes.
//! The client verifies that a frame is the requested block; any doubt is a miss with a reason,
//! never a wrong byte.

use std::sync::Arc;

use kvfleet_net::tls::Identity;
use kvfleet_transport::Dialer;
use kvfleet_transport::pick::PickDialer;
use kvfleet_transport::quic::QuicConfig;
use kvfleet_transport::shm::ShmConfig;
use kvfleet_transport::tcp::TcpConfig;

mod completions;
mod control;
mod fetch;
mod layer_save;
mod layers;
mod links;
mod membership;
mod outcomes;
mod paths;
mod prefill;
mod report;
mod retry;
mod route;
mod save;
mod stream;
mod transport;

pub use completions::{
    AdmitDecodeCall, Completion, CompletionQueue, FetchLayersOperation, LayerFetchResult,
    OPERATION_BLOCKS_MAX, OPERATIONS_MAX, Operation, OperationEnd, OperationOutcome, Progress, QueueError,
    QueueLimits, RejectedBatch, Submission, SubmitError,
};
pub use control::ControlError;
pub use fetch::{FetchCall, FetchError, FetchOutcome, FetchedBlock, HeldLease, SourceMiss};
pub use layer_save::{LayerSave, LayerSaveAnswer, LayerSaveCall, LayerSaveError, PendingLayerSave};
pub use layers::{
    BufferReturns, LayerEvent, LayerFetch, LayerFetchCall, ReturnedBuffer, SliceBuffer, SourceEnd,
};
pub use links::LinkReader;
pub use membership::{GroupMembers, MembersError, MembershipClient, MembershipStep};
pub use outcomes::RequestOutcome;
pub use prefill::{Prefill, PrefillCall, PrefillResult};
pub use report::{InstanceLoad, Reporter, ReporterConfig};
pub use retry::RouterError;
pub use route::{DecodeAdmission, RouteAnswer, RouteCall, RouteError};
pub use save::{
    BackgroundSave, FrameSource, SAVE_DEADLINE, SAVE_QUEUE_BYTES_MAX, SAVE_QUEUE_CALLS_MAX, SaveBusy,
    SaveCall, SaveError,
};
pub use transport::{RdmaSettings, Transport, TransportNameError};

pub use kvfleet_transport::pick::{NetworkNameError, NetworkPreference};
pub use kvfleet_transport::{
    AnnouncePosition, MissReason, RequestContext, SaveAnswer, SaveDone, SaveRefusal,
};

use links::LinkStats;
use outcomes::Outcomes;
use paths::{COOL_DOWN, Paths};
use retry::Routers;
use save::SaveQueue;

/// Configuration of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Addresses of routers, `host:port` each. They are tried in this order until one answers; that
    /// one is asked first from then on.
    pub routers: Vec<String>,
    /// Certificates of this process.
    pub identity: Identity,
    /// Seed of the jitter between retries; use a different one for each process.
    pub seed: u64,
    /// Whether route calls to a router share one long-lived stream. If false, or if the router does
    /// not support streams, each call is a unary RPC.
    pub route_streams: bool,
    /// Kinds of paths to nodes.
    pub transport: Transport,
    /// The network path that [`Transport::Auto`] prefers.
    pub network: NetworkPreference,
    /// Settings of QUIC.
    pub quic: QuicConfig,
    /// Settings of TLS over TCP.
    pub tcp: TcpConfig,
    /// Directory of the local nodes' sockets and the accepted peer identity; `None` disables shared
    /// memory.
    pub shm: Option<ShmConfig>,
    /// Settings of RDMA.
    pub rdma: RdmaSettings,
}

impl ClientConfig {
    /// Default values for everything except the cluster. The jitter seed is the process id.
    #[must_use]
    pub fn new(routers: Vec<String>, identity: Identity) -> ClientConfig {
        ClientConfig {
            routers,
            identity,
            seed: u64::from(std::process::id()),
            route_streams: true,
            transport: Transport::default(),
            network: NetworkPreference::default(),
            quic: QuicConfig::default(),
            tcp: TcpConfig::default(),
            shm: None,
            rdma: RdmaSettings::default(),
        }
    }
}

/// Error of creating a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The list of routers is empty.
    #[error("no router is configured: give at least one HOST:PORT")]
    NoRouters,
    /// The transport is shared memory, but no socket directory is configured.
    #[error("transport shm needs the directory of the nodes' sockets: give shm.dir as the nodes have it")]
    NoShmDir,
    /// The transport is RDMA only, and RDMA is not available.
    #[error("transport rdma: {cause}")]
    Rdma {
        /// The missing part, and the remedy.
        cause: String,
    },
    /// A router's address is malformed.
    #[error("router {address:?} is not HOST:PORT: {cause}")]
    RouterAddress {
        /// The address.
        address: String,
        /// Description of the problem.
        cause: String,
    },
}

/// A handle to a cluster. Clones share connections and queues.
#[derive(Clone)]
pub struct Client {
    routers: Arc<Routers>,
    paths: Paths,
    /// The dialer that picks among several kinds of paths; `None` if the caller supplied its own
    /// dialer.
    pick_dialer: Option<Arc<PickDialer>>,
    saves: Arc<SaveQueue>,
    links: LinkStats,
    outcomes: Outcomes,
    identity: Identity,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("routers", &self.routers.addresses()).finish_non_exhaustive()
    }
}

impl Client {
    /// Queues a request's outcome for the next reports to routers; `kvfleet why` shows it. Bounded,
    /// and never blocks.
    pub fn record_outcome(&self, outcome: &RequestOutcome) {
        self.outcomes.add(outcome);
    }

    /// A client over the configured transport. It connects at first use. Needs a tokio runtime.
    ///
    /// # Errors
    /// If no router is named, an address is malformed, or the transport lacks configuration.
    pub fn new(config: ClientConfig) -> Result<Client, ClientError> {
        let picks = Arc::new(config.transport.dialer(&config)?);
        let client = Client::with_dialer(config, Arc::clone(&picks) as Arc<dyn Dialer>)?;
        Ok(Client { pick_dialer: Some(picks), ..client })
    }

    /// The same client with link statistics of its own, which [`Client::link_reader`] and reporters
    /// do not include. For requests with sources from a third party, which must not bias the
    /// measured speed of nodes.
    #[must_use]
    pub fn with_separate_link_stats(&self) -> Client {
        Client { links: LinkStats::default(), ..self.clone() }
    }

    /// A client over a given transport.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn with_dialer(config: ClientConfig, dialer: Arc<dyn Dialer>) -> Result<Client, ClientError> {
        Ok(Client {
            routers: Arc::new(Routers::new(
                &config.routers,
                &config.identity,
                config.seed,
                config.route_streams,
            )?),
            paths: Paths::new(dialer, COOL_DOWN),
            pick_dialer: None,
            saves: Arc::new(SaveQueue::default()),
            links: LinkStats::default(),
            outcomes: Outcomes::default(),
            identity: config.identity,
        })
    }
}

#[cfg(test)]
mod tests;
