//! Starting and stopping a node: checks everything that can be wrong before anything is served.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kv_core::evict::{self, BlockKey, Policy};
use kv_core::id::{InstanceId, NodeId, TenantId, Timestamp};
use kv_core::index::command::NodeRecord;
use kv_core::tier::{Book, Capacity, Found, Limits};
use kvfleet_proto::pb::node_control_server::NodeControlServer;
use kvfleet_proto::tls::{Identity, TlsError, TlsFiles};
use kvfleet_transport::quic::{BindError, QuicServer};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::announce::link::Link;
use crate::arena::{self, Arena};
use crate::config::{ConfigError, NodeConfig};
use crate::metrics::Metrics;
use crate::serve::Service;
use crate::server::Control;
use crate::store::{self, Capacities, Parts, Shared, Store, StoreHandle};
use crate::tiers::ssd::{self, Done, FoundBlock, ScanReport, Ssd, SsdConfig, SsdError, SsdFaults, format};

/// Slots beyond the DRAM capacity for blocks being loaded from SSD; saves never take them, so the two
/// tiers can trade places even when both are full.
const LOAD_SLOTS: usize = 16;

/// Slots beyond the DRAM capacity for saves whose room is still being made by demotions.
const SAVE_SLOTS: usize = 16;

/// Leases at once. A lease is one request; a node serves some thousand at a time, and an abandoned one
/// lives for ten seconds.
const LEASES_MAX: usize = 65_536;

/// Why a node cannot start. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A value in the configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A certificate file.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address that is none.
    #[error("{key} is {got:?}: give an address and a port, for example 127.0.0.1:7400")]
    Address {
        /// The key.
        key: &'static str,
        /// What was given.
        got: String,
    },
    /// The control port.
    #[error("control_listen {address}: {cause}; choose a free port or stop the process that holds it")]
    ControlListen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The data port.
    #[error("data_listen: {0}")]
    DataListen(#[from] BindError),
    /// The memory for blocks.
    #[error("cannot map {bytes} bytes for the DRAM tier: {cause}; lower dram_bytes or dram_blocks")]
    Arena {
        /// How much.
        bytes: u64,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The SSD directory.
    #[error(transparent)]
    Ssd(#[from] SsdError),
    /// The SSD directory was still being read when the process was told to stop.
    #[error("reading the SSD directory was interrupted")]
    Interrupted,
    /// The metrics registry holds a node already.
    #[error("cannot register metrics: {0}; give each node its own registry")]
    Metrics(#[from] prometheus::Error),
    /// The control server's certificate.
    #[error("control server: {0}")]
    Control(#[from] tonic::transport::Error),
}

/// A running node. Dropping it stops it without ceremony, as a crash would; [`Node::shutdown`] waits.
#[derive(Debug)]
pub struct Node {
    data: QuicServer,
    data_addr: SocketAddr,
    control_addr: SocketAddr,
    tasks: Vec<JoinHandle<()>>,
    stop: CancellationToken,
    _guard: DropGuard,
}

impl Node {
    /// Checks the configuration, opens everything and serves.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub async fn start(config: NodeConfig, registry: &prometheus::Registry) -> Result<Node, StartError> {
        Node::start_with_faults(config, registry, Arc::default()).await
    }

    /// [`Node::start`] with a hand on the SSD's faults, for tests.
    ///
    /// # Errors
    /// As [`Node::start`].
    pub async fn start_with_faults(
        config: NodeConfig,
        registry: &prometheus::Registry,
        faults: Arc<SsdFaults>,
    ) -> Result<Node, StartError> {
        config.validate()?;
        let tls = &config.tls;
        let files = TlsFiles { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() };
        let identity = files.load()?;
        let data_listen = address("data_listen", &config.data_listen)?;
        let control = listen(&config.control_listen).await?;
        let control_addr = local(&control)?;
        let metrics = Metrics::new(registry)?;
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let arena = open_arena(&config)?;
        let shared = Arc::new(Shared::new(NodeId(config.id)));
        let parts = open_parts(&config, arena.clone(), shared, metrics.clone(), faults).await?;
        let (store, store_task) = Store::start(parts, stop.clone());
        let service = service(&config, store.clone(), arena, metrics);
        let data = QuicServer::bind(data_listen, &identity, Arc::new(service))?;
        let data_addr = data.local_addr();
        let mut tasks = vec![store_task];
        tasks.push(serve_control(control, &identity, store.clone(), &stop)?);
        let record = record(&config, data_addr, control_addr);
        let link = Link { record, routers: config.routers, identity, store };
        tasks.push(tokio::spawn(link.run(stop.clone())));
        tracing::info!(node = config.id, %data_addr, %control_addr, "node serves");
        Ok(Node { data, data_addr, control_addr, tasks, stop, _guard: guard })
    }

    /// Where block bytes are served.
    #[must_use]
    pub fn data_addr(&self) -> SocketAddr {
        self.data_addr
    }

    /// Where control calls are served.
    #[must_use]
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// Stops serving, ends what is under way and waits until everything is closed.
    pub async fn shutdown(self) {
        self.data.close().await;
        self.stop.cancel();
        for task in self.tasks {
            if let Err(cause) = task.await
                && cause.is_panic()
            {
                tracing::error!(%cause, "a task of the node ended with a panic");
            }
        }
    }
}

fn address(key: &'static str, text: &str) -> Result<SocketAddr, StartError> {
    text.parse().map_err(|_| StartError::Address { key, got: text.to_owned() })
}

async fn listen(text: &str) -> Result<TcpListener, StartError> {
    let address = address("control_listen", text)?;
    TcpListener::bind(address).await.map_err(|cause| StartError::ControlListen { address, cause })
}

fn local(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
    listener.local_addr().map_err(|cause| StartError::ControlListen { address: unknown, cause })
}

fn open_arena(config: &NodeConfig) -> Result<Arena, StartError> {
    let slot = arena::slot_bytes(config.frame_bytes_max());
    let tier = match config.dram_capacity() {
        Capacity::Bytes(bytes) => bytes,
        Capacity::Blocks(blocks) => blocks.saturating_mul(slot as u64),
    };
    let bytes = tier.saturating_add(((LOAD_SLOTS + SAVE_SLOTS) * slot) as u64);
    let failed = |cause| StartError::Arena { bytes, cause };
    let length = usize::try_from(bytes).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
    Arena::new(length, LOAD_SLOTS * slot).map_err(failed)
}

async fn open_parts(
    config: &NodeConfig,
    arena: Arena,
    shared: Arc<Shared>,
    metrics: Metrics,
    faults: Arc<SsdFaults>,
) -> Result<Parts, StartError> {
    let started = Instant::now();
    let mut book = book(config);
    let (send, done) = mpsc::unbounded_channel();
    let (mut ssd, report) = open_ssd(config, send, faults).await?;
    let rows = restore(&mut book, ssd.as_mut(), &report.blocks, config.ssd_capacity());
    let quotas = config.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes));
    book.set_quotas(quotas, Timestamp(0));
    if ssd.is_some() {
        let (blocks, damaged) = (rows.len(), report.damaged_slots);
        tracing::info!(blocks, damaged, quarantined = report.quarantined.len(), "SSD tier read");
    }
    let frame_bytes_max = config.frame_bytes_max();
    let capacities = Capacities {
        dram: config.dram_capacity(),
        ssd: config.ssd_capacity(),
        dram_slot: arena::slot_bytes(frame_bytes_max) as u64,
        ssd_slot: format::slot_bytes(frame_bytes_max) as u64,
    };
    let (policy, quarantined) = (config.policy.clone(), report.quarantined.len() as u64);
    Ok(Parts {
        book,
        policy,
        arena,
        ssd,
        done,
        rows,
        frame_bytes_max,
        capacities,
        quarantined,
        shared,
        metrics,
        started,
    })
}

fn book(config: &NodeConfig) -> Book {
    let limits = Limits {
        dram: config.limits(config.dram_capacity()),
        ssd: config.limits(config.ssd_capacity()),
        lease: config.lease(),
        leases_max: LEASES_MAX,
        seed: hash_seed(),
    };
    Book::new(&limits, policy(&config.policy), policy(&config.policy))
}

fn policy(name: &str) -> Box<dyn Policy> {
    evict::by_name(name, 0).expect("the configuration was validated: the policy exists")
}

/// Different in every process, so that nobody can prepare hashes that meet in one bucket.
fn hash_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

async fn open_ssd(
    config: &NodeConfig,
    done: mpsc::UnboundedSender<Done>,
    faults: Arc<SsdFaults>,
) -> Result<(Option<Ssd>, ScanReport), StartError> {
    let capacity = config.ssd_capacity();
    if capacity.amount() == 0 {
        return Ok((None, ScanReport::default()));
    }
    let (dir, identity) = (config.data_dir.clone(), config.identity.manifest().digest());
    let ssd = SsdConfig { dir, identity, capacity, uring: config.io_uring, faults };
    let opened = tokio::task::spawn_blocking(move || Ssd::open(&ssd, done)).await;
    let (ssd, report) = opened.map_err(|_| StartError::Interrupted)??;
    Ok((Some(ssd), report))
}

/// Hands the found blocks to the book, oldest first; when they are too many the oldest go.
fn restore(
    book: &mut Book,
    ssd: Option<&mut Ssd>,
    found: &[FoundBlock],
    capacity: Capacity,
) -> Vec<(BlockKey, ssd::SlotId)> {
    let Some(ssd) = ssd else { return Vec::new() };
    let mut left = capacity.amount();
    let fitting = found.iter().rev().take_while(|block| {
        let cost = capacity.cost(store::charge(block.header.traits.bytes).ssd);
        let fits = cost <= left;
        left = left.saturating_sub(cost);
        fits
    });
    let skipped = found.len() - fitting.count();
    let mut rows = Vec::new();
    for (position, block) in found.iter().enumerate() {
        let header = block.header;
        let charge = store::charge(header.traits.bytes);
        let known = Found {
            hash: header.hash,
            parent: header.parent,
            tenant: header.tenant,
            traits: header.traits,
            charge,
        };
        match (position >= skipped).then(|| book.restore(known, Timestamp(0))).flatten() {
            Some(key) => rows.push((key, block.slot)),
            None => ssd.free(block.slot),
        }
    }
    rows
}

fn service(config: &NodeConfig, store: StoreHandle, arena: Arena, metrics: Metrics) -> Service {
    let identity = config.identity.manifest().digest();
    Service::new(store, arena, identity, config.frame_bytes_max(), config.fetch_inflight_bytes, metrics)
}

fn serve_control(
    listener: TcpListener,
    identity: &Identity,
    store: StoreHandle,
    stop: &CancellationToken,
) -> Result<JoinHandle<()>, StartError> {
    let mut server = tonic::transport::Server::builder().tls_config(identity.server_tls())?;
    let router = server.add_service(NodeControlServer::new(Control { store }));
    let stop = stop.clone();
    Ok(tokio::spawn(async move {
        let incoming = TcpListenerStream::new(listener);
        let ended = router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
        if let Err(cause) = ended {
            tracing::error!(%cause, "the control server ended");
        }
    }))
}

fn record(config: &NodeConfig, data: SocketAddr, control: SocketAddr) -> NodeRecord {
    let reach = |local: SocketAddr| match config.advertise.as_str() {
        "" => local.to_string(),
        host => format!("{host}:{}", local.port()),
    };
    NodeRecord {
        node: NodeId(config.id),
        data_address: reach(data),
        control_address: reach(control),
        host: config.host.clone(),
        instance: config.instance.map(InstanceId),
        identity: config.identity.manifest().digest(),
        block_bytes: config.block_bytes,
    }
}
