//! Starting and stopping a node. All checks that can fail run before anything is served.

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::evict::{self, BlockKey, Policy};
use kv_core::id::{InstanceId, NodeId, TenantId, Tier, Timestamp};
use kv_core::index::command::NodeRecord;
use kv_core::tier::{Book, BookLimits, Capacity, GPU_PROMOTIONS_MAX, RecoveredBlock, TierLimits};
use kvfleet_net::tls::access::AccessService;
use kvfleet_net::tls::listen::{CONNECTION_AGE_GRACE, CONNECTION_AGE_MAX, incoming};
use kvfleet_net::tls::{Identity, Renewal, Role, TlsError, TlsFiles};
use kvfleet_proto::pb::node_control_server::NodeControlServer;
use kvfleet_proto::{convert, pb};
use kvfleet_transport::renew::keep_renewed;
use kvfleet_transport::shm::{ShmBindError, ShmServer};
use kvfleet_transport::{BlockService, BoxFuture};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::announce::link::RouterLink;
use crate::arena::{Arena, ArenaShape, SizeClasses};
use crate::block_service::{FrameSpec, Service, ServiceLimits};
use crate::config::{ConfigError, NodeConfig};
use crate::copies::{self, Copier};
use crate::drain::DrainWorker;
use crate::host;
use crate::listen::{DataServers, ListenError};
use crate::low_latency::LowLatencyThread;
use crate::membership::{Membership, MembershipReporter};
use crate::memory::MemoryBound;
use crate::metrics::{self, Metrics};
use crate::rdma;
use crate::scope::Scope;
use crate::server::ControlService;
use crate::store::{
    Capacities, GPU_READS_MAX, GPU_RETRY, Gpu, LoadBudget, SharedState, SlotSizes, Store, StoreHandle,
    StoreParts,
};
use crate::tiers::gpu::thread::{GpuReport, GpuThread};
use crate::tiers::gpu::{CHUNK_BYTES, CHUNKS, GpuShape, JOBS_MAX};
use crate::tiers::ssd::budget::WriteBudget;
use crate::tiers::ssd::pace::ScrubPace;
use crate::tiers::ssd::{
    Depth, Report, ScanReport, ScannedBlock, SsdConfig, SsdError, SsdFaults, SsdRecord, SsdTier,
};

/// Slots of any class beyond the DRAM capacity for loads from SSD. Saves never take them, so blocks
/// can move between the tiers even if both are full.
const LOAD_SLOTS: usize = 16;

/// Slots of any class beyond the DRAM capacity for saves that wait for demotions to finish.
const SAVE_SLOTS: usize = 16;

/// Maximum leases. A lease is one request; a node serves some thousand at a time, and an abandoned
/// lease lives for ten seconds.
pub(crate) const LEASES_MAX: usize = 65_536;

/// Why a node cannot start. Each message contains a remedy.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An invalid configuration value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An invalid certificate file.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An invalid address.
    #[error("{key} is {got:?}: give an address and a port, for example 127.0.0.1:7400")]
    Address {
        /// The key.
        key: &'static str,
        /// The given value.
        got: String,
    },
    /// The control port is not available.
    #[error("control_listen {address}: {cause}; choose a free port or stop the process that holds it")]
    ControlListen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The data port is not available.
    #[error(transparent)]
    DataListen(#[from] ListenError),
    /// The memory for blocks is not available.
    #[error(
        "cannot map {bytes} bytes for the DRAM tier: {cause}; lower dram_bytes or dram_blocks, or end \
         processes that still read the memory of a node that ended"
    )]
    Arena {
        /// Requested bytes.
        bytes: u64,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The SSD directory cannot be used.
    #[error(transparent)]
    Ssd(#[from] SsdError),
    /// The process was told to stop while the SSD directory was being read.
    #[error("reading the SSD directory was interrupted")]
    Interrupted,
    /// The socket for processes of this host cannot be opened.
    #[error("shm.dir: {0}")]
    Shm(#[from] ShmBindError),
    /// No thread for the store.
    #[error("cannot start a thread for the store: {0}; raise the limit on threads")]
    QuickThread(std::io::Error),
    /// No thread for the GPU.
    #[error("cannot start a thread for the GPU: {0}; raise the limit on threads")]
    GpuThread(std::io::Error),
    /// The metrics registry already contains a node.
    #[error("cannot register metrics: {0}; give each node its own registry")]
    Metrics(#[from] prometheus::Error),
    /// The control server's certificate is invalid.
    #[error("control server: {0}")]
    Control(#[from] tonic::transport::Error),
}

/// A running node. Dropping it stops it abruptly, as a crash would; [`Node::shutdown`] waits.
#[derive(Debug)]
pub struct Node {
    service: Arc<Service>,
    data: DataServers,
    host: Option<Arc<ShmServer>>,
    store_thread: Option<LowLatencyThread>,
    data_addr: SocketAddr,
    control_addr: SocketAddr,
    membership: Membership,
    tasks: Vec<JoinHandle<()>>,
    stop: CancellationToken,
    failed: CancellationToken,
    _guard: DropGuard,
}

impl Node {
    /// Checks the configuration, opens all parts and serves.
    ///
    /// # Errors
    /// [`StartError`]; no task or thread is left running.
    pub fn start(
        config: NodeConfig,
        registry: &prometheus::Registry,
    ) -> BoxFuture<'_, Result<Node, StartError>> {
        Node::start_with_faults(config, registry, Arc::default())
    }

    /// [`Node::start`] with injectable SSD faults, for tests.
    ///
    /// # Errors
    /// As [`Node::start`].
    // Boxed, so that the node is compiled here once, and not in every program and test that starts
    // one.
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
        let identity = files.load_server(&Role::Node(Some(NodeId(config.id))))?;
        let data_listen = address("data_listen", &config.data_listen)?;
        host::make_dir(&config)?;
        let control = listen(&config.control_listen).await?;
        let control_addr = local(&control)?;
        let metrics = Metrics::new(registry)?;
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let arena = open_arena(&config)?;
        let shared = Arc::new(SharedState::new(NodeId(config.id)));
        let parts = open_parts(&config, arena.clone(), shared, metrics.clone(), faults).await?;
        // Local clients are answered on the store's own thread; another thread would add a second
        // wake-up.
        let quick = config.shm.dir.as_ref().map(|_| LowLatencyThread::start("kvfleet-store")).transpose();
        let quick = quick.map_err(StartError::QuickThread)?;
        let runtime = quick.as_ref().map_or_else(Handle::current, |quick| quick.handle().clone());
        let (store, store_task) = Store::start_on(&runtime, parts, stop.clone());
        let service = Arc::new(service(&config, store.clone(), arena.clone(), metrics.clone()));
        let blocks = Arc::clone(&service) as Arc<dyn BlockService>;
        let offer = rdma::open(&config, &arena).await;
        let data = DataServers::bind(data_listen, &identity, &config, &blocks, offer.clone())?;
        metrics::register_path_metrics(registry, data.carried())?;
        metrics::register_class_metrics(registry, data.room())?;
        let (data_addr, failed) = (data.local_addr(), CancellationToken::new());
        let mut tasks = vec![tokio::spawn(watch_store(store_task, stop.clone(), failed.clone()))];
        if let Some(offer) = offer {
            let epochs = rdma::publish_epochs(offer, store.shared.joined.subscribe());
            tasks.push(tokio::spawn(until_stopped(stop.clone(), epochs)));
        }
        let takes_no_copies = stop.child_token();
        let calls = control_calls(&config, &service, &store, &identity, &metrics, &takes_no_copies);
        tasks.push(serve_control(control, &identity, calls, &stop));
        let (record, manifest) = (record(&config, data_addr, control_addr), manifest(&config));
        let host = match &quick {
            Some(quick) => host::serve(&config, &record.data_address, arena, blocks, quick)?,
            None => None,
        };
        if let Some(host) = &host {
            tasks.push(tokio::spawn(host::report_metrics(Arc::clone(host), metrics, stop.clone())));
        }
        tasks.extend(renew_certificates(&config, Renewal::new(identity.clone(), files), &stop));
        let evacuator = |life| DrainWorker::new(&config, identity.clone(), store.clone(), life);
        let (membership, MembershipReporter { registration, leave_requested, has_left }) =
            Membership::new(evacuator, takes_no_copies);
        let routers = config.routers;
        let link = RouterLink { record, manifest, routers, identity, store, registration, leave_requested };
        tasks.push(tokio::spawn(run_until_left(link.run(stop.clone()), has_left)));
        tracing::info!(node = config.id, %data_addr, %control_addr, "node serves");
        Ok(Node {
            service,
            data,
            host,
            store_thread: quick,
            data_addr,
            control_addr,
            membership,
            tasks,
            stop,
            failed,
            _guard: guard,
        })
    }

    /// The block service for callers in this process, by reference. The caller must apply the
    /// limits that the network servers apply otherwise (bytes in flight, time).
    #[must_use]
    pub fn blocks(&self) -> Arc<dyn BlockService> {
        Arc::clone(&self.service) as Arc<dyn BlockService>
    }

    /// Address of the block service.
    #[must_use]
    pub fn data_addr(&self) -> SocketAddr {
        self.data_addr
    }

    /// Address of the control service.
    #[must_use]
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// The node's cluster membership.
    #[must_use]
    pub fn membership(&self) -> Membership {
        self.membership.clone()
    }

    /// Returns when the node cannot go on, after it logged the reason and left the cluster. Pending
    /// while it serves. The process should then exit with an error.
    pub async fn failed(&self) -> NodeFailed {
        self.failed.cancelled().await;
        NodeFailed
    }

    /// Stops serving, ends the operations in flight and waits until everything is closed.
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
        if let Some(quick) = self.store_thread {
            quick.end().await;
        }
    }
}

/// The store task ended although the node was not stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the node failed: the task that owns its blocks ended; its log says why. Start it again")]
pub struct NodeFailed;

/// Runs the link, then signals that the node has left the cluster or never joined.
async fn run_until_left(linked: impl Future<Output = ()>, left: CancellationToken) {
    linked.await;
    left.cancel();
}

/// Waits for the store task. A node that lost it can neither fetch nor save, so it must not keep
/// its membership.
async fn watch_store(store: JoinHandle<()>, stop: CancellationToken, failed: CancellationToken) {
    let ended = store.await;
    // Its thread ended with the node, before the task saw the stop.
    let is_stopped = ended.as_ref().is_err_and(tokio::task::JoinError::is_cancelled);
    if is_stopped || stop.is_cancelled() && ended.is_ok() {
        return;
    }
    let cause = ended.err().map_or_else(|| "it returned".to_owned(), |cause| cause.to_string());
    tracing::error!(cause, "the task that owns all blocks ended; the node stops");
    failed.cancel();
    stop.cancel();
}

/// Renews certificates from their files until the node stops, unless the configuration says never.
fn renew_certificates(
    config: &NodeConfig,
    renewal: Renewal,
    stop: &CancellationToken,
) -> Option<JoinHandle<()>> {
    let every = Duration::from_millis(config.tls_renew_ms);
    let renewing = (!every.is_zero()).then(|| keep_renewed(renewal, every))?;
    Some(tokio::spawn(until_stopped(stop.clone(), renewing)))
}

/// Runs `work` until the node stops.
async fn until_stopped(stop: CancellationToken, work: impl Future<Output = ()>) {
    let _ = stop.run_until_cancelled_owned(work).await; // stopped, as requested
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

/// Shape of the arena, and the number of slabs that belong to the DRAM tier.
pub(crate) fn arena_shape(config: &NodeConfig) -> (ArenaShape, usize) {
    let classes = SizeClasses::new(&config.frame_bytes());
    let tier = match config.dram_capacity() {
        Capacity::Bytes(bytes) => bytes.div_ceil(classes.slab_bytes() as u64),
        Capacity::Blocks(blocks) => blocks.div_ceil(classes.largest_per_slab() as u64),
    };
    let tier = usize::try_from(tier).unwrap_or(usize::MAX);
    // A block promoted to the GPU stays in DRAM until it arrived, and a block read from the GPU
    // passes through DRAM.
    let gpu = if config.gpu_bytes == 0 { 0 } else { GPU_PROMOTIONS_MAX + GPU_READS_MAX };
    (ArenaShape::for_tier(classes, tier, LOAD_SLOTS, SAVE_SLOTS + gpu), tier)
}

/// Shape of the GPU tier's memory.
pub(crate) struct GpuTierLayout {
    pub(crate) shape: GpuShape,
    /// Bytes that blocks may take: all but the slots for promotions that wait for demotions.
    pub(crate) capacity: Capacity,
}

/// Minimum useful GPU memory, in bytes.
pub(crate) fn gpu_bytes_min(config: &NodeConfig) -> usize {
    let classes = SizeClasses::new(&config.frame_bytes());
    (classes.slabs_for(GPU_PROMOTIONS_MAX) + 1).saturating_mul(classes.slab_bytes())
}

pub(crate) fn gpu_shape(config: &NodeConfig) -> GpuTierLayout {
    let classes = SizeClasses::new(&config.frame_bytes());
    let slab_bytes = classes.slab_bytes();
    let slabs = usize::try_from(config.gpu_bytes).unwrap_or(usize::MAX) / slab_bytes.max(1);
    let beside = classes.slabs_for(GPU_PROMOTIONS_MAX);
    let capacity = Capacity::Bytes((slabs.saturating_sub(beside) * slab_bytes) as u64);
    let shape = GpuShape { classes, slabs, chunk_bytes: CHUNK_BYTES, chunks: CHUNKS, jobs_max: JOBS_MAX };
    GpuTierLayout { shape, capacity }
}

pub(crate) fn open_arena(config: &NodeConfig) -> Result<Arena, StartError> {
    let (shape, tier_slabs) = arena_shape(config);
    let slab = shape.classes.slab_bytes() as u64;
    let bytes = (shape.slabs as u64).saturating_mul(slab);
    let beside = ((shape.slabs - tier_slabs) as u64).saturating_mul(slab);
    tracing::info!(
        bytes,
        beside,
        slab,
        "arena mapped; it exceeds the DRAM tier by slots for blocks in flight"
    );
    Arena::new(shape).map_err(|cause| StartError::Arena { bytes, cause })
}

pub(crate) async fn open_parts(
    config: &NodeConfig,
    arena: Arena,
    shared: Arc<SharedState>,
    metrics: Metrics,
    faults: Arc<SsdFaults>,
) -> Result<StoreParts, StartError> {
    let started = Instant::now();
    let (send, reports) = mpsc::unbounded_channel();
    let (mut ssd, report) = open_ssd(config, send, arena.clone(), faults).await?;
    let mut book = book(config).with_generation(report.generation);
    let frame_bytes_max = config.frame_bytes_max();
    let slots = SlotSizes::new(&config.frame_bytes());
    let rows = restore(&mut book, ssd.as_mut(), &report.blocks, config.ssd_capacity(), &slots);
    let quotas = config.quotas.iter().map(|quota| (TenantId(quota.tenant), quota.bytes));
    book.set_quotas(quotas);
    if ssd.is_some() {
        let (blocks, damaged, torn) = (rows.len(), report.damaged, report.torn);
        let (generation, void) = (report.generation, report.invalidated);
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
    Ok(StoreParts {
        book,
        policy,
        arena,
        ssd,
        reports,
        gpu,
        gpu_reports,
        locations: rows,
        frame_bytes_max,
        budget: LoadBudget::new(config.fetch_inflight_bytes),
        capacities,
        writes: WriteBudget::new(config.ssd_write_bytes_per_day),
        scrub: ScrubPace::new(config.scrub_bytes_per_second),
        quarantined,
        memory_bytes_max: memory.total(),
        shared,
        metrics,
        started,
    })
}

fn book(config: &NodeConfig) -> Book {
    let limits = BookLimits {
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
    // Promotion and demotion both compare times of last use and swap one block for one, so no space
    // is kept free.
    let mut book = book.with_gpu(TierLimits::exact(gpu), policy("lru"));
    // No promotion before the device has allocated its memory.
    book.set_admitting(Tier::Gpu, false);
    book
}

/// Starts the GPU thread if a GPU tier is configured. The thread finds out whether the GPU exists.
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
    // The configuration was refused if it asked for a GPU.
    #[cfg(not(feature = "gpu"))]
    let open = || Ok(None::<crate::tiers::gpu::device::NoDevice>);
    let thread = GpuThread::start(open, layout.shape, reports).map_err(StartError::GpuThread)?;
    Ok(Some(Gpu::new(thread, GPU_RETRY)))
}

fn policy(name: &str) -> Box<dyn Policy> {
    evict::by_name(name, 0).expect("the configuration was validated: the policy exists")
}

/// Different in every process, so that callers cannot prepare hashes that collide.
fn hash_seed() -> u64 {
    RandomState::new().hash_one(std::process::id())
}

async fn open_ssd(
    config: &NodeConfig,
    reports: mpsc::UnboundedSender<Report>,
    arena: Arena,
    faults: Arc<SsdFaults>,
) -> Result<(Option<SsdTier>, ScanReport), StartError> {
    let capacity = config.ssd_capacity();
    if capacity.amount() == 0 {
        return Ok((None, ScanReport::default()));
    }
    let (dirs, identity) = (config.ssd_dirs(), config.identity.manifest().digest());
    let (frame_bytes_max, uring, seed) = (config.frame_bytes_max(), config.io_uring, hash_seed());
    let (arena, depth) = (Some(arena), Depth::for_frames(frame_bytes_max));
    let ssd = SsdConfig { dirs, identity, capacity, frame_bytes_max, depth, uring, seed, arena, faults };
    let opened = tokio::task::spawn_blocking(move || SsdTier::open(&ssd, &reports)).await;
    let (ssd, report) = opened.map_err(|_| StartError::Interrupted)??;
    Ok((Some(ssd), report))
}

/// Adds the recovered blocks to the book, oldest first; excess oldest blocks are freed. Each gets
/// its own time: with one time for all, their order would depend on offsets instead of age, and
/// each insertion would search for its position.
fn restore(
    book: &mut Book,
    ssd: Option<&mut SsdTier>,
    found: &[ScannedBlock],
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
        let known = RecoveredBlock {
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
    let keeps = FrameSpec { identity, key_form, frame_bytes_max: config.frame_bytes_max() };
    let (shape, tier_slabs) = arena_shape(config);
    let tier_bytes = shape.classes.slab_bytes().saturating_mul(tier_slabs);
    let terms = ServiceLimits { tier_bytes, lease: config.lease() };
    // As secret as the seed of the book's hash table.
    let scope = Scope::for_process(RandomState::new());
    let locals = config.shm.local_users(rustix::process::geteuid().as_raw());
    let service = Service::new(store, arena, keeps, terms, metrics, scope, locals);
    service.with_rdma_reads_in_place(config.rdma.enabled && config.rdma.in_place)
}

fn control_calls(
    config: &NodeConfig,
    service: &Arc<Service>,
    store: &StoreHandle,
    identity: &Identity,
    metrics: &Metrics,
    takes_no_copies: &CancellationToken,
) -> ControlService {
    // The configuration was validated before.
    let network = config.network_preference().unwrap_or_default();
    let dialer = copies::dialer(identity, network);
    let (service, is_closed) = (Arc::clone(service), takes_no_copies.clone());
    let copier = Arc::new(Copier::new(service, dialer, config.copies, metrics.clone(), is_closed));
    let manifest = manifest(config);
    ControlService { store: store.clone(), manifest, copier }
}

fn serve_control(
    listener: TcpListener,
    identity: &Identity,
    control: ControlService,
    stop: &CancellationToken,
) -> JoinHandle<()> {
    let mut server = tonic::transport::Server::builder()
        .max_connection_age(CONNECTION_AGE_MAX)
        .max_connection_age_grace(CONNECTION_AGE_GRACE);
    let incoming = incoming(listener, identity);
    let control = AccessService::new(NodeControlServer::new(control));
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
    async fn node_stops_when_its_store_ends() {
        let (stop, failed) = (CancellationToken::new(), CancellationToken::new());
        let broken = tokio::spawn(async { panic!("a defect in the store") });
        watch_store(broken, stop.clone(), failed.clone()).await;
        assert!(stop.is_cancelled() && failed.is_cancelled());
    }

    #[tokio::test]
    async fn stopped_node_has_not_failed() {
        let (stop, failed) = (CancellationToken::new(), CancellationToken::new());
        stop.cancel();
        watch_store(tokio::spawn(async {}), stop, failed.clone()).await;
        assert!(!failed.is_cancelled());
    }
}
