//! One running router: how it is put together and how it is taken apart.
//!
//! Not here: anything it does in between.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use kvfleet_proto::pb::raft_server::RaftServer;
use kvfleet_proto::tls::callers::members_only;
use kvfleet_proto::tls::listen::incoming;
use kvfleet_proto::tls::{Identity, RENEW_EVERY, Renewal, TlsFiles, keep_renewed};
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;

use crate::background::Background;
use crate::balance;
use crate::clock::{Clock, UnixClock};
use crate::config::RouterConfig;
use crate::copies::Copies;
use crate::copies::hot::{HotCopier, Uses};
use crate::desk::Desk;
use crate::directives;
use crate::engines::metrics::EngineMetrics;
use crate::engines::{self, Engines};
use crate::error::StartError;
use crate::fits;
use crate::groups::{Group, Groups};
use crate::ingest::{Gather, Ingest};
use crate::liveness::{self, Silence};
use crate::manifests::Manifests;
use crate::metrics::Metrics;
use crate::pin_ends;
use crate::raft::boot::{self, Booted};
use crate::raft::log_store::LogGuard;
use crate::raft::network::{Envelope, Peers, RAFT_MESSAGE_BYTES_MAX};
use crate::raft::service::RaftService;
use crate::raft::{CONTROL, Cluster};
use crate::retire;
use crate::server::{RouterService, Shared};
use crate::truth::Truth;
use crate::truth::run::Meter;
use crate::view::fleet::FleetView;
use crate::view::residency::{RESIDENT_BLOCKS_MAX, Residency};
use crate::windows::Waits;
use crate::windows::tell::Teller;

/// Longest a stopping leader waits for another router to take over; an idle transfer takes under a
/// millisecond, and without it the others elect within their timeout anyway.
const HANDOVER_MAX: Duration = Duration::from_secs(1);

/// Longest a stopping router waits for calls under way.
const DRAIN_MAX: Duration = Duration::from_secs(2);

/// A ping on a connection that says nothing, and the time for its answer: a peer that vanished without a
/// word must not leave its streams here for good.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Time for the instances of a running cluster to find a router that comes back: ten reports of each.
const REPORTS_WITHIN: Duration = Duration::from_secs(2);

/// Longest it waits for the log file to be closed.
const CLOSE_MAX: Duration = Duration::from_secs(10);

/// A running router. Dropping it without [`Router::shutdown`] leaves its tasks running until the runtime
/// ends.
pub struct Router {
    local_addr: SocketAddr,
    pub(crate) groups: Groups,
    desk: Desk,
    stop: CancellationToken,
    serving: JoinHandle<()>,
    guard: LogGuard,
}

impl Router {
    /// Starts a router and returns once it serves; it may not have found a leader yet. Metrics go into
    /// `registry`, which must not hold another router's.
    ///
    /// # Errors
    /// [`StartError`]: an invalid config, certificates, a port in use, a log or snapshot that is corrupted.
    // Boxed, as is all that the whole of a router hangs on: the body of an async function is compiled where it is awaited, so every program
    // and every test that starts a router would compile consensus once more.
    pub fn start(config: RouterConfig, registry: &Registry) -> BoxFuture<'_, Result<Router, StartError>> {
        Box::pin(Router::begin(config, registry))
    }

    async fn begin(config: RouterConfig, registry: &Registry) -> Result<Router, StartError> {
        config.validate()?;
        let files = TlsFiles {
            ca: config.tls.ca.clone(),
            cert: config.tls.cert.clone(),
            key: config.tls.key.clone(),
        };
        let identity = files.load_server()?;
        let listener = listen(&config.listen).await?;
        let local_addr = listener
            .local_addr()
            .map_err(|source| StartError::Listen { listen: config.listen.clone(), source })?;
        let metrics = Metrics::register(registry)?;
        let engine_metrics = EngineMetrics::register(registry)?;
        let prepared = engines::prepare(&config.engines).await?;
        make_durably(&config.data_dir)
            .map_err(|source| StartError::DataDir { path: config.data_dir.clone(), source })?;
        let booted = boot::boot(&config, identity.clone()).await?;
        let stop = CancellationToken::new();
        // Whatever fails from here on takes the standing tasks with it.
        let started = stop.clone().drop_guard();
        let Booted { cluster, groups, peers, repairs, withheld, guard, comes_late } = booted;
        let raft_service = RaftService::new(
            Arc::clone(&cluster),
            groups.clone(),
            repairs,
            Arc::clone(&withheld),
            stop.clone(),
        );
        let parts = Parts { config: &config, groups: &groups, metrics, comes_late, stop: &stop };
        let shared = parts.assemble(cluster, peers);
        let following = Engines {
            residency: Arc::clone(&shared.residency),
            clock: shared.clock,
            unix: shared.unix.clone(),
            metrics: engine_metrics,
            stop: stop.clone(),
        }
        .start(prepared);
        let desk = Desk::new(Arc::clone(&shared), following, identity.clone());
        let serving = serve(listener, &identity, RouterService::new(shared), raft_service, stop.clone());
        let (renewal, stopped) = (Renewal::new(identity, files), stop.clone());
        tokio::spawn(async move {
            let _ = stopped.run_until_cancelled(keep_renewed(renewal, RENEW_EVERY)).await; // stopped, as asked
        });
        groups.all().iter().for_each(|group| group.consensus.raft().run());
        let router = Router { local_addr, groups, desk, stop, serving, guard };
        if let Err(error) = boot::initialize(&router.groups, &withheld, &config).await {
            router.halt().await;
            return Err(error);
        }
        started.disarm();
        tracing::info!(router = config.id, %local_addr, address = config.own_address(), "serving");
        Ok(router)
    }

    /// Where this router listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Calls made within this process.
    #[must_use]
    pub fn desk(&self) -> Desk {
        self.desk.clone()
    }

    /// Whether this router leads the control group, as far as it knows.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.groups.control().consensus.is_leader()
    }

    /// Resolves when consensus of any group has stopped for good on this router (its disk failed, say), with
    /// the reason. The process should end then: the router cannot serve fresh answers any more.
    pub fn failed(&self) -> BoxFuture<'_, String> {
        let failed = |group: &Arc<Group>| {
            let (number, consensus) = (group.number(), group.consensus.clone());
            Box::pin(async move { format!("group {number}: {}", consensus.failed().await) })
        };
        let any = futures_util::future::select_all(self.groups.all().iter().map(failed));
        Box::pin(async move { any.await.0 })
    }

    /// Hands over what this router leads, ends the calls under way, closes the log.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.leave())
    }

    async fn leave(self) {
        // From here on it neither balances nor takes on anything.
        let led: Vec<_> = self.groups.all().iter().filter(|group| group.consensus.is_leader()).collect();
        let handed_over = futures_util::future::join_all(led.iter().map(|group| group.consensus.hand_over()));
        if tokio::time::timeout(HANDOVER_MAX, handed_over).await.is_err() {
            tracing::warn!("no other router took over in time; they will elect");
        }
        self.halt().await;
    }

    /// Stops without handing over leadership, as a process that is killed does; only the log file is closed
    /// in order. For tests of leader loss.
    pub fn halt(self) -> BoxFuture<'static, ()> {
        Box::pin(self.end())
    }

    async fn end(self) {
        self.stop.cancel();
        for group in self.groups.all() {
            if let Err(error) = group.consensus.raft().shutdown().await {
                tracing::error!(group = group.number(), %error, "consensus ended badly");
            }
        }
        let Router { groups, desk, mut serving, guard, .. } = self;
        if tokio::time::timeout(DRAIN_MAX, &mut serving).await.is_err() {
            tracing::warn!("calls under way were cut off");
            serving.abort();
            drop(serving.await);
        }
        drop((groups, desk));
        let closed = tokio::task::spawn_blocking(move || guard.join());
        if tokio::time::timeout(CLOSE_MAX, closed).await.is_err() {
            tracing::error!("the raft log was not closed in time");
        }
    }
}

/// Makes a directory, with those that it lies in, and their names durable: what is in it goes with its name.
fn make_durably(directory: &Path) -> io::Result<()> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let made: Vec<&Path> = directory.ancestors().take_while(is_missing).collect();
    std::fs::create_dir_all(directory)?;
    // One that is there may have been made by a process that was killed right then.
    for path in made.into_iter().chain([directory]) {
        let Some(above) = path.parent() else { continue };
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match File::open(above).and_then(|above| above.sync_all()) {
            // Where nothing can be synced, or read, it was made by somebody else.
            Err(error) if is_of_others(&error) => {
                tracing::debug!(path = %above.display(), %error, "not synced");
            }
            synced => synced?,
        }
    }
    Ok(())
}

fn is_of_others(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, ReadOnlyFilesystem, Unsupported};
    matches!(error.kind(), InvalidInput | PermissionDenied | ReadOnlyFilesystem | Unsupported)
}

async fn listen(address: &str) -> Result<TcpListener, StartError> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => StartError::PortInUse { listen: address.into() },
        _ => StartError::Listen { listen: address.into(), source },
    })
}

/// What every part is made from.
struct Parts<'a> {
    config: &'a RouterConfig,
    groups: &'a Groups,
    metrics: Metrics,
    comes_late: bool,
    stop: &'a CancellationToken,
}

impl Parts<'_> {
    /// Starts the standing tasks and returns what calls share.
    fn assemble(&self, cluster: Arc<Cluster>, peers: Peers) -> Arc<Shared> {
        let clock = Clock::start();
        let control = self.groups.control();
        let fleet = Arc::new(FleetView::new(
            self.config.hardware(),
            self.config.limits(),
            self.config.admission.start(),
        ));
        let residency = Arc::new(RwLock::new(Residency::new(RESIDENT_BLOCKS_MAX, clock.now())));
        let silence = Arc::new(Mutex::new(Silence::new(self.config.timings.silence())));
        tokio::spawn(liveness::run(
            Arc::clone(&silence),
            Arc::clone(control),
            clock,
            self.metrics.clone(),
            self.stop.clone(),
        ));
        tokio::spawn(retire::run(self.groups.clone(), self.stop.clone()));
        let unix = UnixClock::start();
        tokio::spawn(pin_ends::run(Arc::clone(control), unix.clone(), self.stop.clone()));
        if let Some(every) = self.config.timings.balance() {
            tokio::spawn(balance::run(self.groups.clone(), every, clock, self.stop.clone()));
        }
        let copies = Arc::new(Copies::new(peers.clone(), self.metrics.clone()));
        self.run_background((&fleet, &residency, &copies), clock);
        let truth = Arc::new(Truth::new(self.config.id << 32 ^ u64::from(std::process::id())));
        let meter = Meter {
            groups: self.groups.clone(),
            peers: peers.clone(),
            envelope: Envelope { cluster: Arc::clone(&cluster), group: CONTROL },
            truth: Arc::clone(&truth),
            metrics: self.metrics.clone(),
            config: self.config.truth.clone(),
        };
        tokio::spawn(meter.run(self.stop.clone()));
        let waits = self.tell_windows(&peers, clock);
        let hot = self.copy_hot((&fleet, &copies), clock);
        Arc::new(Shared {
            truth,
            cluster,
            manifests: self.manifests(&peers, clock),
            peers,
            groups: self.groups.clone(),
            fleet,
            residency,
            silence,
            ingests: self.groups.shards().iter().map(|shard| self.ingest(shard, clock)).collect(),
            ttft_max_ms: self.config.admission.ttft_max_ms,
            tbt_max_us: self.config.admission.tbt_max_us,
            recall: Mutex::default(),
            sent: Mutex::default(),
            guessed: Mutex::default(),
            waits,
            copies,
            hot,
            fresh_shares: Mutex::default(),
            fits: fits::start(Arc::clone(control), clock, self.metrics.clone(), self.stop.clone()),
            directives: directives::start(Arc::clone(&control.published), self.stop.clone()),
            metrics: self.metrics.clone(),
            clock,
            unix,
            reported_by: clock.now().after(if self.comes_late { REPORTS_WITHIN } else { Duration::ZERO }),
            announce_blocks_max: self.config.announce.blocks_max,
            draining: self.stop.child_token(),
            stop: self.stop.clone(),
        })
    }

    fn manifests(&self, peers: &Peers, clock: Clock) -> Arc<Manifests> {
        let engines = self.config.engines.identity.manifest();
        Manifests::new(engines, self.groups.clone(), peers.clone(), clock)
    }

    fn run_background(
        &self,
        (fleet, residency, copies): (&Arc<FleetView>, &Arc<RwLock<Residency>>, &Arc<Copies>),
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

    /// What is hot, which is copied where there is a budget for it.
    fn copy_hot(&self, (fleet, copies): (&Arc<FleetView>, &Arc<Copies>), clock: Clock) -> Option<Uses> {
        let copier = HotCopier {
            groups: self.groups.clone(),
            fleet: Arc::clone(fleet),
            copies: Arc::clone(copies),
            clock,
            metrics: self.metrics.clone(),
        };
        copier.start(&self.config.hot_copies, self.stop.clone())
    }

    /// What waits, which nodes are told unless that is switched off.
    fn tell_windows(&self, peers: &Peers, clock: Clock) -> Option<Arc<Mutex<Waits>>> {
        let waits = self.config.windows.then(Arc::<Mutex<Waits>>::default)?;
        let teller = Teller {
            router: self.config.id,
            waits: Arc::clone(&waits),
            groups: self.groups.clone(),
            peers: peers.clone(),
            clock,
            metrics: self.metrics.clone(),
        };
        tokio::spawn(teller.run(self.stop.clone()));
        Some(waits)
    }

    fn ingest(&self, shard: &Group, clock: Clock) -> Ingest {
        let gather = Gather {
            window: Duration::from_millis(self.config.announce.window_ms),
            blocks_max: self.config.announce.blocks_max,
        };
        Ingest::start(gather, shard.consensus.clone(), clock, self.metrics.clone(), self.stop.clone())
    }
}

/// What of one stream may come unread, and of all of a connection: a stream of questions that is at its bound is not read, and the other calls of its connection
/// have room beside it.
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
    let raft = InterceptedService::new(raft, members_only);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .add_service(router.served())
        .add_service(raft);
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
    fn a_directory_is_made_with_those_that_it_lies_in() {
        let above = tempfile::TempDir::new().unwrap();
        let path = above.path().join("of/a/router");
        for _ in 0..2 {
            make_durably(&path).unwrap();
            assert!(path.is_dir());
        }
        make_durably(Path::new("/")).unwrap();
        std::fs::write(above.path().join("file"), b"").unwrap();
        assert!(make_durably(&above.path().join("file/router")).is_err());
    }
}
