//! Starts and stops one router.
//!
//! Not here: its work in between.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use kv_core::id::RouterId;
use kvfleet_net::tls::access::AccessService;
use kvfleet_net::tls::listen::{CONNECTION_AGE_GRACE, CONNECTION_AGE_MAX, incoming};
use kvfleet_net::tls::{Identity, RENEW_INTERVAL, Renewal, Role, TlsFiles, keep_renewed};
use kvfleet_proto::pb::raft_server::RaftServer;
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::anti_entropy::AntiEntropy;
use crate::anti_entropy::run::AntiEntropyTask;
use crate::background::Background;
use crate::balance;
use crate::clock::{Clock, UnixClock};
use crate::config::RouterConfig;
use crate::copies::CopyDispatcher;
use crate::copies::hot::{HotCopier, RemoteReadQueue};
use crate::directives;
use crate::engines::metrics::EngineMetrics;
use crate::engines::tenants::Tenants;
use crate::engines::{self, FollowContext};
use crate::error::StartError;
use crate::fleet_reuse_stats::{self, FleetReuseStats};
use crate::groups::{Group, Groups};
use crate::handle::RouterHandle;
use crate::ingest::{BatchPolicy, Ingest};
use crate::liveness::{self, SilenceTracker};
use crate::manifests::Manifests;
use crate::metrics::Metrics;
use crate::pin_expiry;
use crate::raft::boot::{self, BootedConsensus};
use crate::raft::log_store::LogGuard;
use crate::raft::network::{Envelope, Peers, RAFT_MESSAGE_BYTES_MAX};
use crate::raft::service::RaftService;
use crate::raft::{CONTROL, ClusterIdentity};
use crate::retire;
use crate::server::history::RequestHistory;
use crate::server::lifecycle::Lifecycle;
use crate::server::limits::CallLimits;
use crate::server::node_intake::NodeIntake;
use crate::server::{RouterService, ServerState};
use crate::view::fleet::FleetView;
use crate::view::residency::{RESIDENT_BLOCKS_MAX, Residency};
use crate::windows::QueuedRequests;
use crate::windows::publish::WindowPublisher;

/// Longest time a stopping leader waits for another router to take over. An idle transfer takes
/// under a millisecond; without it the others elect within their timeout.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(1);

/// Longest time a stopping router waits for outstanding calls.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Ping interval of an idle connection, and timeout of the answer: a vanished peer must not keep
/// its streams open.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Time that the instances of a running cluster need to find a returning router: ten reports of
/// each.
const REPORTS_GRACE: Duration = Duration::from_secs(2);

/// Longest wait for the log file to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// A running router. Dropping it without [`Router::shutdown`] leaves its tasks running until the runtime
/// ends.
pub struct Router {
    local_addr: SocketAddr,
    pub(crate) groups: Groups,
    handle: RouterHandle,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    guard: LogGuard,
}

impl Router {
    /// Starts a router and returns once it serves; it may not have found a leader yet. Metrics go
    /// into `registry`, which must not hold another router's.
    ///
    /// # Errors
    /// [`StartError`]: an invalid configuration or certificate, a port in use, a corrupted log or snapshot.
    // Boxed, as are the other async entry points: the body of an async function is compiled where
    // it is awaited, so every caller would compile consensus once more.
    pub fn start(config: RouterConfig, registry: &Registry) -> BoxFuture<'_, Result<Router, StartError>> {
        Box::pin(Router::start_inner(config, registry))
    }

    async fn start_inner(config: RouterConfig, registry: &Registry) -> Result<Router, StartError> {
        config.validate()?;
        let files = TlsFiles {
            ca: config.tls.ca.clone(),
            cert: config.tls.cert.clone(),
            key: config.tls.key.clone(),
        };
        let identity = files.load_server(&Role::Router(Some(RouterId(config.id))))?;
        let listener = listen(&config.listen).await?;
        let local_addr = listener
            .local_addr()
            .map_err(|source| StartError::Listen { listen: config.listen.clone(), source })?;
        let metrics = Metrics::register(registry)?;
        let engine_metrics = EngineMetrics::register(registry)?;
        let prepared = engines::prepare(&config.engines).await?;
        create_dir_durable(&config.data_dir)
            .map_err(|source| StartError::DataDir { path: config.data_dir.clone(), source })?;
        let booted = boot::boot(&config, identity.clone()).await?;
        let stop = CancellationToken::new();
        // A failure from here on also stops the tasks that run already.
        let started = stop.clone().drop_guard();
        let BootedConsensus {
            cluster,
            groups,
            peers,
            repairs,
            withheld,
            guard,
            joins_running_cluster: comes_late,
        } = booted;
        let raft_service = RaftService::new(
            Arc::clone(&cluster),
            groups.clone(),
            repairs,
            Arc::clone(&withheld),
            stop.clone(),
        );
        let parts = RouterParts {
            config: &config,
            groups: &groups,
            metrics,
            joins_running_cluster: comes_late,
            tenants: config.engines.has_hash_key().then(|| prepared.tenants()),
            stop: &stop,
        };
        let shared = parts.assemble(cluster, peers);
        let following = FollowContext {
            residency: Arc::clone(&shared.residency),
            clock: shared.clock,
            unix: shared.unix.clone(),
            metrics: engine_metrics,
            stop: stop.clone(),
        }
        .start(prepared);
        let handle = RouterHandle::new(Arc::clone(&shared), following, identity.clone());
        let serving = serve(listener, &identity, RouterService::new(shared), raft_service, stop.clone());
        let (renewal, stopped) = (Renewal::new(identity, files), stop.clone());
        tokio::spawn(async move {
            let _ = stopped.run_until_cancelled(keep_renewed(renewal, RENEW_INTERVAL)).await; // cancelled by shutdown
        });
        groups.all().iter().for_each(|group| group.consensus.raft().run());
        let router = Router { local_addr, groups, handle, stop, serving, guard };
        if let Err(error) = boot::initialize(&router.groups, &withheld, &config).await {
            router.halt().await;
            return Err(error);
        }
        started.disarm();
        tracing::info!(router = config.id, %local_addr, address = config.own_address(), "serving");
        Ok(router)
    }

    /// Address on which this router listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Handle for calls from inside this process.
    #[must_use]
    pub fn handle(&self) -> RouterHandle {
        self.handle.clone()
    }

    /// Whether this router leads the control group, as far as it knows.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.groups.control().consensus.is_leader()
    }

    /// Resolves with the reason when consensus of any group has stopped for good, for example after
    /// a disk failure. The process should then exit, since the router can no longer serve fresh
    /// answers.
    pub fn failed(&self) -> BoxFuture<'_, String> {
        let failed = |group: &Arc<Group>| {
            let (number, consensus) = (group.number(), group.consensus.clone());
            Box::pin(async move { format!("group {number}: {}", consensus.failed().await) })
        };
        let any = futures_util::future::select_all(self.groups.all().iter().map(failed));
        Box::pin(async move { any.await.0 })
    }

    /// Hands over leadership, ends outstanding calls and closes the log.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.shutdown_inner())
    }

    async fn shutdown_inner(self) {
        // From here on it neither balances nor takes on groups.
        let led: Vec<_> = self.groups.all().iter().filter(|group| group.consensus.is_leader()).collect();
        let handed_over = futures_util::future::join_all(led.iter().map(|group| group.consensus.hand_over()));
        if tokio::time::timeout(HANDOVER_TIMEOUT, handed_over).await.is_err() {
            tracing::warn!("no other router took over in time; they will elect");
        }
        self.halt().await;
    }

    /// Stops without a leadership handover, as a killed process does, but closes the log file
    /// cleanly. For tests of leader loss.
    pub fn halt(self) -> BoxFuture<'static, ()> {
        Box::pin(self.halt_inner())
    }

    async fn halt_inner(self) {
        self.stop.cancel();
        self.guard.stop_waiting();
        for group in self.groups.all() {
            if let Err(error) = group.consensus.raft().shutdown().await {
                tracing::error!(group = group.number(), %error, "consensus ended badly");
            }
        }
        let Router { groups, handle: desk, mut serving, guard, .. } = self;
        if tokio::time::timeout(DRAIN_TIMEOUT, &mut serving).await.is_err() {
            tracing::warn!("outstanding calls were cut off");
            serving.abort();
            drop(serving.await);
        }
        drop((groups, desk));
        let closed = tokio::task::spawn_blocking(move || guard.join());
        if tokio::time::timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::error!("the raft log was not closed in time");
        }
    }
}

/// Creates a directory with its parents and syncs their names, since contents are lost without a
/// durable name.
fn create_dir_durable(directory: &Path) -> io::Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let made: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
    std::fs::create_dir_all(directory)?;
    // An existing one may come from a process that was killed before the sync.
    for path in made.into_iter().chain([directory]) {
        let Some(above) = path.parent() else { continue };
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match File::open(above).and_then(|above| above.sync_all()) {
            // A parent that cannot be synced or read was not created by this process.
            Err(error) if is_unsyncable(&error) => {
                tracing::debug!(path = %above.display(), %error, "not synced");
            }
            synced => synced?,
        }
    }
    Ok(())
}

fn is_unsyncable(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, ReadOnlyFilesystem, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | ReadOnlyFilesystem | Unsupported)
}

async fn listen(address: &str) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::PortInUse { listen: address.into() },
        _ => StartError::Listen { listen: address.into(), source },
    })
}

/// Inputs of the router's tasks and shared state.
struct RouterParts<'a> {
    config: &'a RouterConfig,
    groups: &'a Groups,
    metrics: Metrics,
    joins_running_cluster: bool,
    tenants: Option<Arc<Tenants>>,
    stop: &'a CancellationToken,
}

impl RouterParts<'_> {
    /// Starts the background tasks and returns the state shared by calls.
    fn assemble(&self, cluster: Arc<ClusterIdentity>, peers: Peers) -> Arc<ServerState> {
        let clock = Clock::start();
        let control = self.groups.control();
        let fleet = Arc::new(FleetView::new(
            self.config.hardware_profile(),
            self.config.limits(),
            self.config.admission.admission(),
        ));
        let residency = Arc::new(RwLock::new(Residency::new(RESIDENT_BLOCKS_MAX, clock.now())));
        let silence = Arc::new(Mutex::new(SilenceTracker::new(self.config.timings.silence_limit())));
        tokio::spawn(liveness::run(
            Arc::clone(&silence),
            Arc::clone(control),
            clock,
            self.metrics.clone(),
            self.stop.clone(),
        ));
        tokio::spawn(retire::run(self.groups.clone(), self.stop.clone()));
        let unix = UnixClock::start();
        tokio::spawn(pin_expiry::run(Arc::clone(control), unix.clone(), self.stop.clone()));
        if let Some(every) = self.config.timings.balance_interval() {
            tokio::spawn(balance::run(self.groups.clone(), every, clock, self.stop.clone()));
        }
        let copies = Arc::new(CopyDispatcher::new(peers.clone(), self.metrics.clone()));
        self.spawn_background(&fleet, &residency, &copies, clock);
        let truth = Arc::new(AntiEntropy::new(self.config.id << 32 ^ u64::from(std::process::id())));
        let meter = AntiEntropyTask {
            groups: self.groups.clone(),
            peers: peers.clone(),
            envelope: Envelope { cluster: Arc::clone(&cluster), group: CONTROL },
            anti_entropy: Arc::clone(&truth),
            metrics: self.metrics.clone(),
            config: self.config.anti_entropy.clone(),
        };
        tokio::spawn(meter.run(self.stop.clone()));
        let history = RequestHistory::new(
            self.start_window_publisher(&peers, clock),
            self.start_hot_copies(&fleet, &copies, clock),
        );
        let nodes = NodeIntake::new(
            silence,
            self.groups.shards().iter().map(|shard| self.start_ingest(shard, clock)).collect(),
            truth,
            directives::start(Arc::clone(&control.published), self.stop.clone()),
            self.start_reuse_stats(clock),
        );
        let admission = &self.config.admission;
        Arc::new(ServerState {
            cluster,
            manifests: self.manifests(&peers, clock),
            tenants: self.tenants.clone(),
            peers,
            groups: self.groups.clone(),
            fleet,
            residency,
            metrics: self.metrics.clone(),
            clock,
            unix,
            copies,
            nodes,
            history,
            limits: CallLimits::new(
                admission.ttft_max_ms,
                admission.tbt_max_us,
                self.config.announce.blocks_max,
            ),
            lifecycle: Lifecycle::new(clock.now().after(self.reports_grace()), self.stop.clone()),
        })
    }

    fn manifests(&self, peers: &Peers, clock: Clock) -> Arc<Manifests> {
        let engines = self.config.engines.identity.manifest();
        Manifests::new(engines, self.groups.clone(), peers.clone(), clock)
    }

    fn spawn_background(
        &self,
        fleet: &Arc<FleetView>,
        residency: &Arc<RwLock<Residency>>,
        copies: &Arc<CopyDispatcher>,
        clock: Clock,
    ) {
        let background = Background {
            groups: self.groups.clone(),
            fleet: Arc::clone(fleet),
            copies: Arc::clone(copies),
            residency: Arc::clone(residency),
            clock,
            metrics: self.metrics.clone(),
            price_links: self.config.price_links,
        };
        tokio::spawn(background.run(self.stop.clone()));
    }

    /// Starts hot-prefix copies if they have a budget.
    fn start_hot_copies(
        &self,
        fleet: &Arc<FleetView>,
        copies: &Arc<CopyDispatcher>,
        clock: Clock,
    ) -> Option<RemoteReadQueue> {
        let copier = HotCopier {
            groups: self.groups.clone(),
            fleet: Arc::clone(fleet),
            copies: Arc::clone(copies),
            clock,
            metrics: self.metrics.clone(),
        };
        copier.start(&self.config.hot_copies, self.stop.clone())
    }

    /// Time until instances must have reported: none in a cluster that starts with this router.
    fn reports_grace(&self) -> Duration {
        if self.joins_running_cluster { REPORTS_GRACE } else { Duration::ZERO }
    }

    /// Starts sharing the reuse statistics of nodes.
    fn start_reuse_stats(&self, clock: Clock) -> FleetReuseStats {
        let control = Arc::clone(self.groups.control());
        fleet_reuse_stats::start(control, clock, self.metrics.clone(), self.stop.clone())
    }

    /// Starts prefetch windows unless they are disabled.
    fn start_window_publisher(&self, peers: &Peers, clock: Clock) -> Option<Arc<Mutex<QueuedRequests>>> {
        let queued = self.config.windows.then(Arc::<Mutex<QueuedRequests>>::default)?;
        let publisher = WindowPublisher {
            router: self.config.id,
            queued: Arc::clone(&queued),
            groups: self.groups.clone(),
            peers: peers.clone(),
            clock,
            metrics: self.metrics.clone(),
        };
        tokio::spawn(publisher.run(self.stop.clone()));
        Some(queued)
    }

    fn start_ingest(&self, shard: &Group, clock: Clock) -> Ingest {
        let gather = BatchPolicy {
            window: Duration::from_millis(self.config.announce.window_ms),
            blocks_max: self.config.announce.blocks_max,
        };
        Ingest::start(gather, shard.consensus.clone(), clock, self.metrics.clone(), self.stop.clone())
    }
}

/// Flow control windows of one stream and of one connection, in bytes. A route stream at its bound
/// is not read, and the connection keeps room for other calls.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;

/// Serves control and Raft calls on one port until `stop`.
fn serve(
    listener: TcpListener,
    identity: &Identity,
    router: RouterService,
    raft: RaftService,
    stop: CancellationToken,
) -> JoinHandle<()> {
    let raft = RaftServer::new(raft)
        .max_decoding_message_size(RAFT_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(RAFT_MESSAGE_BYTES_MAX);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .max_connection_age(CONNECTION_AGE_MAX)
        .max_connection_age_grace(CONNECTION_AGE_GRACE)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .add_service(router.into_service())
        .add_service(AccessService::new(raft));
    let incoming = incoming(listener, identity);
    tokio::spawn(async move {
        let ended = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned()).await;
        if let Err(error) = ended {
            tracing::error!(%error, "the control server ended");
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::unwrap_used)]
    fn a_directory_is_created_with_its_parents() {
        let above = tempfile::TempDir::new().unwrap();
        let path = above.path().join("of/a/router");
        for _ in 0..2 {
            create_dir_durable(&path).unwrap();
            assert!(path.is_dir());
        }
        create_dir_durable(Path::new("/")).unwrap();
        std::fs::write(above.path().join("file"), b"").unwrap();
        assert!(create_dir_durable(&above.path().join("file/router")).is_err());
    }
}
