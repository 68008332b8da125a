//! What frontends and engines link: route, fetch, save, and the release that ends a request.
//!
//! [`Client`] holds the routers of a cluster and a path to every node it was sent to. Where the verbs
//! live: `route.rs` (with lookup, status and report), `fetch.rs`, `save.rs`, both for engines that compute layer by layer in `layers.rs` and `layer_save.rs`, a whole prefill beside its load in `prefill.rs`, `control.rs` (a node's own
//! calls); all of them for threads without a runtime in `completions.rs`; reports to them again and again in `report.rs`; how routers are tried in turn is `retry.rs`, and how route calls share a stream `stream.rs`; how paths are kept is `paths.rs`.
//!
//! Not here: choosing (the router does), computing, and what a block's bytes mean. The client proves
//! that a frame is the block asked; everything doubtful is a miss with a reason, never a wrong byte.

use std::sync::Arc;

use kvfleet_proto::tls::Identity;
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
mod members;
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
    Completion, CompletionQueue, Ended, LayersCame, LayersOperation, MayDecodeCall, OPERATION_BLOCKS_MAX,
    OPERATIONS_MAX, Operation, Outcome, Progress, QueueError, QueueLimits, Refused, Submission, SubmitError,
};
pub use control::ControlError;
pub use fetch::{FetchCall, FetchError, FetchOutcome, FetchedBlock, HeldLease, SourceMiss};
pub use layer_save::{LayerSave, LayerSaveCall, LayerSaveError, LayersAnswer, LayersSaved};
pub use layers::{BlockRoom, LayerEvent, LayerFetch, LayersCall, RoomBack, RoomsLeft, SourceEnd};
pub use links::LinkReader;
pub use members::{GroupMembers, Members, MembersError, Step};
pub use outcomes::RequestOutcome;
pub use prefill::{Prefill, PrefillCall, PrefillEnd};
pub use report::{InstanceLoad, Reporter, ReporterConfig};
pub use retry::RouterError;
pub use route::{MayDecode, RouteAnswer, RouteCall, RouteError};
pub use save::{
    BackgroundSave, FrameSource, SAVE_DEADLINE, SAVE_QUEUE_BYTES_MAX, SAVE_QUEUE_CALLS_MAX, SaveBusy,
    SaveCall, SaveError,
};
pub use transport::{NoTransport, RdmaSettings, Transport};

pub use kvfleet_transport::{Asker, MissReason, SaveAnswer, SaveDone, SaveRefusal, VisibleAt};

use links::Links;
use outcomes::Outcomes;
use paths::{COOL_DOWN, Paths};
use retry::Routers;
use save::SaveQueue;

/// What a client needs to know.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Routers, `host:port` each; tried in this order until one answers, then kept.
    pub routers: Vec<String>,
    /// Certificates of this process.
    pub identity: Identity,
    /// Seed of the jitter between retries; give each process its own.
    pub seed: u64,
    /// Whether route calls to a router share one stream that stays open; each is a call of its own otherwise, as it is to a router that
    /// takes no streams.
    pub route_streams: bool,
    /// Which paths are taken to nodes.
    pub transport: Transport,
    /// Settings of QUIC.
    pub quic: QuicConfig,
    /// Settings of TLS over TCP.
    pub tcp: TcpConfig,
    /// Where the sockets of this host's nodes are, and whom to believe there; nothing for no shared memory.
    pub shm: Option<ShmConfig>,
    /// Settings of RDMA.
    pub rdma: RdmaSettings,
}

impl ClientConfig {
    /// Defaults for everything but the cluster; the jitter is seeded from the process number.
    #[must_use]
    pub fn new(routers: Vec<String>, identity: Identity) -> ClientConfig {
        ClientConfig {
            routers,
            identity,
            seed: u64::from(std::process::id()),
            route_streams: true,
            transport: Transport::default(),
            quic: QuicConfig::default(),
            tcp: TcpConfig::default(),
            shm: None,
            rdma: RdmaSettings::default(),
        }
    }
}

/// Why a client cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// No router was named.
    #[error("no router is named: give at least one HOST:PORT")]
    NoRouters,
    /// Nobody said where the sockets of this host's nodes are.
    #[error("transport shm needs the directory of the nodes' sockets: give shm.dir as the nodes have it")]
    NoShmDir,
    /// There is no RDMA, and nothing else may be taken.
    #[error("transport rdma: {cause}")]
    Rdma {
        /// What is missing, and what to do.
        cause: String,
    },
    /// A router's address is not one.
    #[error("router {address:?} is not HOST:PORT: {cause}")]
    RouterAddress {
        /// What was given.
        address: String,
        /// What is wrong.
        cause: String,
    },
}

/// A handle to a cluster. Clones share connections and queues.
#[derive(Clone)]
pub struct Client {
    routers: Arc<Routers>,
    paths: Paths,
    /// Where the paths come from several kinds.
    picks: Option<Arc<PickDialer>>,
    saves: Arc<SaveQueue>,
    links: Links,
    outcomes: Outcomes,
    identity: Identity,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("routers", &self.routers.addresses()).finish_non_exhaustive()
    }
}

impl Client {
    /// Tells routers with the next reports what became of a request, which is what `kvfleet why` knows of it. Bounded, and never waits.
    pub fn tell(&self, outcome: &RequestOutcome) {
        self.outcomes.add(outcome);
    }

    /// A client over the transport that is configured. Connects when first used. Needs a tokio runtime.
    ///
    /// # Errors
    /// When no router is named, an address is malformed, or the transport needs what is not configured.
    pub fn new(config: ClientConfig) -> Result<Client, ClientError> {
        let picks = Arc::new(config.transport.dialer(&config)?);
        let client = Client::with_dialer(config, Arc::clone(&picks) as Arc<dyn Dialer>)?;
        Ok(Client { picks: Some(picks), ..client })
    }

    /// The same client, whose fetches do not count among what [`Client::link_reader`] and a reporter tell: for requests whose
    /// sources somebody named who is not to say how fast nodes are.
    #[must_use]
    pub fn with_links_apart(&self) -> Client {
        Client { links: Links::default(), ..self.clone() }
    }

    /// A client over any transport.
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
            picks: None,
            saves: Arc::new(SaveQueue::default()),
            links: Links::default(),
            outcomes: Outcomes::default(),
            identity: config.identity,
        })
    }
}

#[cfg(test)]
mod tests;
