//! Starting and stopping a node: checks everything that can be wrong before anything is served.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::evict::{self, BlockKey, Policy};
use kv_core::id::{InstanceId, NodeId, TenantId, Tier, Timestamp};
use kv_core::index::command::NodeRecord;
use kv_core::tier::{Book, Capacity, Found, LIFTS_MAX, Limits, TierLimits};
use kvfleet_proto::pb::node_control_server::NodeControlServer;
use kvfleet_proto::tls::callers::members_only;
use kvfleet_proto::tls::listen::incoming;
use kvfleet_proto::tls::{Identity, Renewal, TlsError, TlsFiles};
use kvfleet_proto::{convert, pb};
use kvfleet_transport::renew::keep_renewed;
use kvfleet_transport::shm::{ShmBindError, ShmServer};
use kvfleet_transport::{BlockService, BoxFuture};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::announce::link::Link;
use crate::arena::{Arena, ArenaShape, SizeClasses};
use crate::config::{ConfigError, NodeConfig};
use crate::copies::{self, Copier};
use crate::evacuate::Evacuator;
use crate::host;
use crate::listen::{DataServers, ListenError};
use crate::memory::MemoryBound;
use crate::metrics::{self, Metrics};
use crate::quick::QuickThread;
use crate::rdma;
use crate::scope::Scope;
use crate::serve::{Keeps, Service, Terms};
use crate::server::Control;
use crate::standing::{Reports, Standing};
use crate::store::{
    Capacities, GPU_READS_MAX, GPU_RETRY, Gpu, LoadBudget, Parts, Shared, SlotSizes, Store, StoreHandle,
};
use crate::tiers::gpu::thread::{GpuReport, GpuThread};
use crate::tiers::gpu::{CHUNK_BYTES, CHUNKS, GpuShape, JOBS_MAX};
use crate::tiers::ssd::budget::WriteBudget;
use crate::tiers::ssd::pace::Pace;
use crate::tiers::ssd::{
    Depth, FoundBlock, Report, ScanReport, Ssd, SsdConfig, SsdError, SsdFaults, SsdRecord,
};

/// Slots of any class beyond the DRAM capacity for blocks being loaded from SSD; saves never take them, so the two
/// tiers can trade places even when both are full.
const LOAD_SLOTS: usize = 16;

/// Slots of any class beyond the DRAM capacity for saves whose room is still being made by demotions.
const SAVE_SLOTS: usize = 16;

/// Leases at once. A lease is one request; a node serves some thousand at a time, and an abandoned one
/// lives for ten seconds.
pub(crate) const LEASES_MAX: usize = 65_536;

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
    #[error(transparent)]
    DataListen(#[from] ListenError),
    /// The memory for blocks.
    #[error(
        "cannot map {bytes} bytes for the DRAM tier: {cause}; lower dram_bytes or dram_blocks, or end processes that still \
         read the memory of a node that ended"
    )]
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
    /// The socket for processes of this host.
    #[error("shm.dir: {0}")]
    Shm(#[from] ShmBindError),
    /// No thread for the store.
    #[error("cannot start a thread for the store: {0}; raise the limit on threads")]
    QuickThread(std::io::Error),
    /// No thread for the GPU.
    #[error("cannot start a thread for the GPU: {0}; raise the limit on threads")]
    GpuThread(std::io::Error),
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
    service: Arc<Service>,
    data: DataServers,
    host: Option<Arc<ShmServer>>,
    quick: Option<QuickThread>,
    data_addr: SocketAddr,
    control_addr: SocketAddr,
    standing: Standing,
    tasks: Vec<JoinHandle<()>>,
    stop: CancellationToken,
    failed: CancellationToken,
    _guard: DropGuard,
}

impl Node {
    /// Checks the configuration, opens everything and serves.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running.
    pub fn start(
        config: NodeConfig,
        registry: &prometheus::Registry,
    ) -> BoxFuture<'_, Result<Node, StartError>> {
        Node::start_with_faults(config, registry, Arc::default())
    }

    /// [`Node::start`] with a hand on the SSD's faults, for tests.
    ///
    /// # Errors
    /// As [`Node::start`].
    // Boxed, so that all of a node is compiled here, and not once more in every program and test that starts one.
    pub fn start_with_faults(
        config: NodeConfig,
        registry: &prometheus::Registry,
        faults: Arc<SsdFaults>,
    ) -> BoxFuture<'_, Result<Node, StartError>> {
        Box::pin(Node::begin(config, registry, faults))
    }

    async fn begin(
        config: NodeConfig,
        registry: &prometheus::Registry,
        faults: Arc<SsdFaults>,
    ) -> Result<Node, StartError> {
        config.validate()?;
        let tls = &config.tls;
        let files = TlsFiles { ca: tls.ca.clone(), cert: tls.cert.clone(), key: tls.key.clone() };
        let identity = files.load_server()?;
        let data_listen = address("data_listen", &config.data_listen)?;
        host::make_dir(&config)?;
        let control = listen(&config.control_listen).await?;
        let control_addr = local(&control)?;
        let metrics = Metrics::new(registry)?;
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let arena = open_arena(&config)?;
        let shared = Arc::new(Shared::new(NodeId(config.id)));
        let parts = open_parts(&config, arena.clone(), shared, metrics.clone(), faults).await?;
        // Processes of this host are answered on the thread that knows what is held: from another it would be woken twice.
        let quick = config.shm.dir.as_ref().map(|_| QuickThread::start("kvfleet-store")).transpose();
        let quick = quick.map_err(StartError::QuickThread)?;
        let runtime = quick.as_ref().map_or_else(Handle::current, |quick| quick.handle().clone());
        let (store, store_task) = Store::start_on(&runtime, parts, stop.clone());
        let service = Arc::new(service(&config, store.clone(), arena.clone(), metrics.clone()));
        let blocks = Arc::clone(&service) as Arc<dyn BlockService>;
        let offer = rdma::open(&config, &arena).await;
        let data = DataServers::bind(data_listen, &identity, &config, &blocks, offer.clone())?;
        metrics::watch_paths(registry, data.carried())?;
        metrics::watch_classes(registry, data.room())?;
        let (data_addr, failed) = (data.local_addr(), CancellationToken::new());
        let mut tasks = vec![tokio::spawn(watch(store_task, stop.clone(), failed.clone()))];
        if let Some(offer) = offer {
            let epochs = rdma::tell_epochs(offer, store.shared.joined.subscribe());
            tasks.push(tokio::spawn(until_stopped(stop.clone(), epochs)));
        }
        let takes_no_copies = stop.child_token();
        let calls = control_calls(&config, &service, (&store, &identity), &metrics, &takes_no_copies);
        tasks.push(serve_control(control, calls, &stop));
        let (record, manifest) = (record(&config, data_addr, control_addr), manifest(&config));
        let host =
            quick.as_ref().map(|quick| host::serve(&config, &record.data_address, arena, blocks, quick));
        let host = host.transpose()?.flatten();
        if let Some(host) = &host {
            tasks.push(tokio::spawn(host::tell(Arc::clone(host), metrics, stop.clone())));
        }
        let renew = Duration::from_millis(config.tls_renew_ms);
        if !renew.is_zero() {
            let renewing = keep_renewed(Renewal::new(identity.clone(), files), renew);
            tasks.push(tokio::spawn(until_stopped(stop.clone(), renewing)));
        }
        let evacuator = |life| Evacuator::new(&config, identity.clone(), store.clone(), life);
        let (standing, Reports { life, leaving, left }) = Standing::new(evacuator, takes_no_copies);
        let link = Link { record, manifest, routers: config.routers, identity, store, life, leaving };
        tasks.push(tokio::spawn(until_left(link.run(stop.clone()), left)));
        tracing::info!(node = config.id, %data_addr, %control_addr, "node serves");
        Ok(Node {
            service,
            data,
            host,
            quick,
            data_addr,
            control_addr,
            standing,
            tasks,
            stop,
            failed,
            _guard: guard,
        })
    }

    /// Block bytes for whoever shares this process: what peers get over the network, by reference. What the network's end
    /// bounds (how much arrives at once, and for how long) is the caller's to bound.
    #[must_use]
    pub fn blocks(&self) -> Arc<dyn BlockService> {
        Arc::clone(&self.service) as Arc<dyn BlockService>
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

    /// Its standing in the cluster, for whoever asks while it serves.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing.clone()
    }

    /// Returns once the node cannot go on, after it said why in the log and left the cluster; never while
    /// it serves. The process should then end with an error.
    pub async fn failed(&self) -> NodeFailed {
        self.failed.cancelled().await;
        NodeFailed
    }

    /// Stops serving, ends what is under way and waits until everything is closed.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.end())
    }

    async fn end(self) {
        if let Some(host) = self.host {
            host.close().await;
        }
        self.data.close().await;
        self.stop.cancel();
        for task in self.tasks {
            if let Err(cause) = task.await
                && cause.is_panic()
            {
                tracing::error!(%cause, "a task of the node ended with a panic");
            }
        }
        if let Some(quick) = self.quick {
            quick.end().await;
        }
    }
}

/// The task that owns every block ended although nobody stopped the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node failed: the task that owns its blocks ended; its log says why. Start it again")]
pub struct NodeFailed;

/// Tells whoever waits that the node has left the cluster, or never was in one.
async fn until_left(linked: impl Future<Output = ()>, left: CancellationToken) {
    linked.await;
    left.cancel();
}

/// Waits for the store's task. Without it nothing can be fetched or saved, so a node that lost it must not
/// go on telling the routers that it is there.
async fn watch(store: JoinHandle<()>, stop: CancellationToken, failed: CancellationToken) {
    let ended = store.await;
    // Its thread ended with the node, before it could see that it should.
    let is_stopped = ended.as_ref().is_err_and(tokio::task::JoinError::is_cancelled);
    if is_stopped || stop.is_cancelled() && ended.is_ok() {
        return;
    }
    let cause = ended.err().map_or_else(|| "it returned".to_owned(), |cause| cause.to_string());
    tracing::error!(cause, "the task that owns all blocks ended; the node stops");
    failed.cancel();
    stop.cancel();
}

/// Works until the node stops.
async fn until_stopped(stop: CancellationToken, work: impl Future<Output = ()>) {
    let _ = stop.run_until_cancelled_owned(work).await; // stopped, as asked
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

/// How the arena is cut, and how many of its slabs are the DRAM tier's.
pub(crate) fn arena_shape(config: &NodeConfig) -> (ArenaShape, usize) {
    let classes = SizeClasses::new(&config.frame_bytes());
    let tier = match config.dram_capacity() {
        Capacity::Bytes(bytes) => bytes.div_ceil(classes.slab_bytes() as u64),
        Capacity::Blocks(blocks) => blocks.div_ceil(classes.largest_per_slab() as u64),
    };
    let tier = usize::try_from(tier).unwrap_or(usize::MAX);
    // What is lifted lies in DRAM until it is on the GPU, and what is read from there passes through it.
    let gpu = if config.gpu_bytes == 0 { 0 } else { LIFTS_MAX + GPU_READS_MAX };
    (ArenaShape::around(classes, tier, LOAD_SLOTS, SAVE_SLOTS + gpu), tier)
}

/// How the memory of a GPU is cut.
pub(crate) struct GpuLayout {
    pub(crate) shape: GpuShape,
    /// What blocks may take of it: all but the slots of those that come while others have not left yet.
    pub(crate) capacity: Capacity,
}

/// Least GPU memory that is of use, in bytes.
pub(crate) fn gpu_bytes_min(config: &NodeConfig) -> usize {
    let classes = SizeClasses::new(&config.frame_bytes());
    (classes.slabs_for(LIFTS_MAX) + 1).saturating_mul(classes.slab_bytes())
}

pub(crate) fn gpu_shape(config: &NodeConfig) -> GpuLayout {
    let classes = SizeClasses::new(&config.frame_bytes());
    let slab_bytes = classes.slab_bytes();
    let slabs = usize::try_from(config.gpu_bytes).unwrap_or(usize::MAX) / slab_bytes.max(1);
    let beside = classes.slabs_for(LIFTS_MAX);
    let capacity = Capacity::Bytes((slabs.saturating_sub(beside) * slab_bytes) as u64);
    let shape = GpuShape { classes, slabs, chunk_bytes: CHUNK_BYTES, chunks: CHUNKS, jobs_max: JOBS_MAX };
    GpuLayout { shape, capacity }
}

pub(crate) fn open_arena(config: &NodeConfig) -> Result<Arena, StartError> {
    let (shape, tier_slabs) = arena_shape(config);
    let slab = shape.classes.slab_bytes() as u64;
    let bytes = (shape.slabs as u64).saturating_mul(slab);
    let beside = ((shape.slabs - tier_slabs) as u64).saturating_mul(slab);
    tracing::info!(bytes, beside, slab, "the arena has room beside the DRAM tier for blocks on their way");
    Arena::new(shape).map_err(|cause| StartError::Arena { bytes, cause })
}

pub(crate) async fn open_parts(
    config: &NodeConfig,
    arena: Arena,
    shared: Arc<Shared>,
    metrics: Metrics,
    faults: Arc<SsdFaults>,
) -> Result<Parts, StartError> {
    let started = Instant::now();
    let (send, reports) = mpsc::unbounded_channel();
    let (mut ssd, report) = open_ssd(config, send, arena.clone(), faults).await?;
    let mut book = book(config).of_generation(report.generation);
    let frame_bytes_max = config.frame_bytes_max();
    let slots = SlotSizes::new(&config.frame_bytes());
    let rows = restore(&mut book, ssd.as_mut(), &report.blocks, config.ssd_capacity(), &slots);
    let quotas = config.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes));
    book.set_quotas(quotas);
    if ssd.is_some() {
        let (blocks, damaged, torn) = (rows.len(), report.damaged, report.torn);
        let (generation, void) = (report.generation, report.void);
        let quarantined = report.quarantined.len();
        tracing::info!(blocks, %generation, void, damaged, torn, quarantined, "SSD tier read");
    }
    let memory = MemoryBound::of(config);
    tracing::info!(total = memory.total(), ?memory, "memory that this node may take, in bytes");
    let (dram, ssd_capacity, gpu_capacity) =
        (config.dram_capacity(), config.ssd_capacity(), gpu_shape(config).capacity);
    let capacities = Capacities { dram, ssd: ssd_capacity, gpu: gpu_capacity, slots };
    let (gpu_send, gpu_reports) = mpsc::unbounded_channel();
    let gpu = open_gpu(config, gpu_send)?;
    let (policy, quarantined) = (config.policy.clone(), report.quarantined.len() as u64);
    Ok(Parts {
        book,
        policy,
        arena,
        ssd,
        reports,
        gpu,
        gpu_reports,
        rows,
        frame_bytes_max,
        budget: LoadBudget::new(config.fetch_inflight_bytes),
        capacities,
        writes: WriteBudget::new(config.ssd_write_bytes_per_day),
        scrub: Pace::new(config.scrub_bytes_per_second),
        quarantined,
        memory_bytes_max: memory.total(),
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
    let book = Book::new(&limits, policy(&config.policy), policy(&config.policy));
    let book = book.with_ssd_reuse_min(config.ssd_reuse_min);
    let gpu = gpu_shape(config).capacity;
    if gpu.amount() == 0 {
        return book;
    }
    // What comes up is chosen by times of last use, and so is what leaves: one block for one, so nothing is kept free.
    let mut book = book.with_gpu(TierLimits::exact(gpu), policy("lru"));
    // Nothing comes up before the device has its memory.
    book.set_admitting(Tier::Gpu, false);
    book
}

/// The GPU's thread, where the node is to have one. That no GPU is there is found out on the thread.
fn open_gpu(
    config: &NodeConfig,
    reports: mpsc::UnboundedSender<GpuReport>,
) -> Result<Option<Gpu>, StartError> {
    let layout = gpu_shape(config);
    if layout.capacity.amount() == 0 {
        return Ok(None);
    }
    #[cfg(feature = "gpu")]
    let open = {
        let number = config.gpu_device as usize;
        move || crate::tiers::gpu::cuda::CudaDevice::open(number)
    };
    // The configuration was refused if it asked for one.
    #[cfg(not(feature = "gpu"))]
    let open = || Ok(None::<crate::tiers::gpu::device::NoDevice>);
    let thread = GpuThread::start(open, layout.shape, reports).map_err(StartError::GpuThread)?;
    Ok(Some(Gpu::new(thread, GPU_RETRY)))
}

fn policy(name: &str) -> Box<dyn Policy> {
    evict::by_name(name, 0).expect("the configuration was validated: the policy exists")
}

/// Different in every process, so that nobody can prepare hashes that meet in one bucket.
fn hash_seed() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

async fn open_ssd(
    config: &NodeConfig,
    reports: mpsc::UnboundedSender<Report>,
    arena: Arena,
    faults: Arc<SsdFaults>,
) -> Result<(Option<Ssd>, ScanReport), StartError> {
    let capacity = config.ssd_capacity();
    if capacity.amount() == 0 {
        return Ok((None, ScanReport::default()));
    }
    let (dirs, identity) = (config.ssd_dirs(), config.identity.manifest().digest());
    let (frame_bytes_max, uring, seed) = (config.frame_bytes_max(), config.io_uring, hash_seed());
    let (arena, depth) = (Some(arena), Depth::of(frame_bytes_max));
    let ssd = SsdConfig { dirs, identity, capacity, frame_bytes_max, depth, uring, seed, arena, faults };
    let opened = tokio::task::spawn_blocking(move || Ssd::open(&ssd, &reports)).await;
    let (ssd, report) = opened.map_err(|_| StartError::Interrupted)??;
    Ok((Some(ssd), report))
}

/// Hands the found blocks to the book, oldest first; when they are too many the oldest go. Each gets a
/// time of its own: one time for all would make their place in the order a matter of offsets, not of age,
/// and each of a million blocks a search for that place.
fn restore(
    book: &mut Book,
    ssd: Option<&mut Ssd>,
    found: &[FoundBlock],
    capacity: Capacity,
    slots: &SlotSizes,
) -> Vec<(BlockKey, SsdRecord)> {
    let Some(ssd) = ssd else { return Vec::new() };
    let fitting =
        usize::try_from(capacity.amount() / capacity.cost(slots.largest().ssd)).unwrap_or(usize::MAX);
    let skipped = found.len().saturating_sub(fitting);
    let mut rows = Vec::new();
    for (position, block) in found.iter().enumerate() {
        let header = block.header;
        let charge = slots.charge(header.traits.bytes);
        let known = Found {
            hash: header.hash,
            parent: header.parent,
            tenant: header.tenant,
            traits: header.traits,
            charge,
        };
        match (position >= skipped).then(|| book.restore(known, Timestamp(position as u64))).flatten() {
            Some(key) => {
                ssd.set_owner(block.record, key.0);
                rows.push((key, block.record));
            }
            None => ssd.free(block.record),
        }
    }
    rows
}

pub(crate) fn service(config: &NodeConfig, store: StoreHandle, arena: Arena, metrics: Metrics) -> Service {
    let manifest = config.identity.manifest();
    let (identity, key_form) = (manifest.digest(), manifest.key_form.into());
    let keeps = Keeps { identity, key_form, frame_bytes_max: config.frame_bytes_max() };
    let (shape, tier_slabs) = arena_shape(config);
    let tier_bytes = shape.classes.slab_bytes().saturating_mul(tier_slabs);
    let terms = Terms { tier_bytes, lease: config.lease() };
    // Like the seed of the book's hashes: nobody outside knows it.
    let scope = Scope::own(RandomState::new());
    let locals = config.shm.locals(rustix::process::geteuid().as_raw());
    let service = Service::new(store, arena, keeps, terms, metrics, scope, locals);
    service.lending_in_place(config.rdma.enabled && config.rdma.in_place)
}

fn control_calls(
    config: &NodeConfig,
    service: &Arc<Service>,
    (store, identity): (&StoreHandle, &Identity),
    metrics: &Metrics,
    takes_no_copies: &CancellationToken,
) -> Control {
    let dialer = copies::dialer(identity);
    let (service, is_closed) = (Arc::clone(service), takes_no_copies.clone());
    let copier = Arc::new(Copier::new(service, dialer, config.copies, metrics.clone(), is_closed));
    let manifest = manifest(config);
    Control { store: store.clone(), identity: identity.clone(), manifest, copier }
}

fn serve_control(listener: TcpListener, control: Control, stop: &CancellationToken) -> JoinHandle<()> {
    let mut server = tonic::transport::Server::builder();
    let incoming = incoming(listener, &control.identity);
    let control = NodeControlServer::with_interceptor(control, members_only);
    let (router, stop) = (server.add_service(control), stop.clone());
    tokio::spawn(async move {
        let ended = router.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
        if let Err(cause) = ended {
            tracing::error!(%cause, "the control server ended");
        }
    })
}

fn manifest(config: &NodeConfig) -> pb::Manifest {
    convert::manifest_to_pb(&config.identity.manifest())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_node_whose_store_ends_stops_and_says_so() {
        let (stop, failed) = (CancellationToken::new(), CancellationToken::new());
        let broken = tokio::spawn(async { panic!("a defect in the store") });
        watch(broken, stop.clone(), failed.clone()).await;
        assert!(stop.is_cancelled() && failed.is_cancelled());
    }

    #[tokio::test]
    async fn a_node_that_was_stopped_did_not_fail() {
        let (stop, failed) = (CancellationToken::new(), CancellationToken::new());
        stop.cancel();
        watch(tokio::spawn(async {}), stop, failed.clone()).await;
        assert!(!failed.is_cancelled());
    }
}
