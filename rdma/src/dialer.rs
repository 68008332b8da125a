//! Opens RDMA paths: a TLS over TCP path, and on it a first link, which shows whether RDMA works.
//! With several rails, the first link uses the first rail pair that lets packets pass.
//!
//! Not here: operations over a path (`path.rs`).

use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvfleet_net::tls::Identity;
use kvfleet_transport::tcp::{TcpConfig, TcpDialer};
use kvfleet_transport::upgrade::within;
use kvfleet_transport::{BoxFuture, Dialer, Path, PathError};
use tokio::sync::Notify;

use super::link::{AttachOutcome, LocalRail, RdmaLink};
use super::path::RdmaPath;
use super::rail::Gid;
use super::rail_match::match_rails;
use super::rail_pair::{ATTACH_TIMEOUT, RailPair, RailPairs};
use super::{Rdma, RdmaConfig, RdmaError};

/// Time limit for probes of rails, one after the other. The second is probed even if the first used
/// all its time.
const PROBES_TIMEOUT: Duration = ATTACH_TIMEOUT.saturating_add(Duration::from_secs(1));

/// Opens paths over RDMA.
pub struct RdmaDialer {
    tcp: TcpDialer,
    config: TcpConfig,
    local: Arc<LocalRails>,
}

/// The local rails for all paths, opened on first use.
struct LocalRails {
    config: RdmaConfig,
    /// One for each rail, the best first.
    rails: OnceLock<Vec<Arc<LocalRail>>>,
    /// Held while the rails are opened, so that memory is registered once.
    opening: Mutex<()>,
    log_once: Once,
}

impl LocalRails {
    fn new(config: RdmaConfig) -> LocalRails {
        LocalRails { config, rails: OnceLock::new(), opening: Mutex::new(()), log_once: Once::new() }
    }

    /// Whether a device exists, as far as that is visible without opening it.
    fn find_device(&self) -> Result<(), RdmaError> {
        Rdma::find_candidates(&self.config).map(drop)
    }

    /// Opens the devices unless they are open already. Blocks.
    fn open_once(
        &self,
        open: impl FnOnce(&RdmaConfig) -> Result<Vec<Arc<Rdma>>, RdmaError>,
    ) -> Result<(), RdmaError> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.rails.get().is_some() {
            return Ok(());
        }
        let local = LocalRail::register_all(&open(&self.config)?)?;
        let rails: Vec<&Arc<Rdma>> = local.iter().map(|local| &local.rdma).collect();
        tracing::info!(?rails, "using RDMA with nodes that offer it");
        self.rails.get_or_init(|| local);
        Ok(())
    }
}

impl std::fmt::Debug for RdmaDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaDialer({:?})", self.rails())
    }
}

impl RdmaDialer {
    /// A dialer that presents `identity` and trusts its authority. Registers its memory, which
    /// takes a moment; opens no socket yet.
    ///
    /// # Errors
    /// If the memory cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, identity: &Identity, config: TcpConfig) -> Result<RdmaDialer, RdmaError> {
        RdmaDialer::with_rails(std::slice::from_ref(rdma), identity, config)
    }

    /// Like `new` over several rails, the best first. Memory is registered on each; rails that
    /// refuse it are skipped.
    ///
    /// # Errors
    /// If the memory cannot be registered on any rail.
    pub fn with_rails(
        rails: &[Arc<Rdma>],
        identity: &Identity,
        config: TcpConfig,
    ) -> Result<RdmaDialer, RdmaError> {
        let first = rails.first().map(|rdma| rdma.config.clone()).unwrap_or_default();
        let dialer = RdmaDialer::lazy(first, identity, config);
        dialer.local.open_once(|_| Ok(rails.to_vec()))?;
        Ok(dialer)
    }

    /// The open rails, the best first.
    fn rails(&self) -> Vec<&Arc<Rdma>> {
        self.local.rails.get().into_iter().flatten().map(|local| &local.rdma).collect()
    }

    /// A dialer that opens the device and registers memory for the first node that offers RDMA.
    /// Without a device it refuses every dial with the reason, and logs that once.
    #[must_use]
    pub fn lazy(rdma: RdmaConfig, identity: &Identity, config: TcpConfig) -> RdmaDialer {
        let tcp = TcpDialer::new(identity, config.clone());
        RdmaDialer { tcp, config, local: Arc::new(LocalRails::new(rdma)) }
    }

    /// The local rails, opened if needed. A cancelled caller leaves them open for the next one.
    async fn local_rails(&self, peer: &str) -> Result<&[Arc<LocalRail>], PathError> {
        if self.local.rails.get().is_none() {
            self.run_blocking(peer, |ours| ours.open_once(Rdma::open_all)).await?;
        }
        let cause = || "its RDMA device is not open".to_owned();
        let none = || PathError::Unreachable { peer: peer.to_owned(), cause: cause() };
        self.local.rails.get().map(Vec::as_slice).ok_or_else(none)
    }

    /// Runs a blocking call on a thread for such calls.
    async fn run_blocking(
        &self,
        peer: &str,
        call: impl FnOnce(&LocalRails) -> Result<(), RdmaError> + Send + 'static,
    ) -> Result<(), PathError> {
        let ours = Arc::clone(&self.local);
        let called = tokio::task::spawn_blocking(move || call(&ours)).await;
        let none = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
        called.map_err(|ended| none(ended.to_string()))?.map_err(|error| {
            self.local.log_once.call_once(|| tracing::info!("{error}"));
            none(error.to_string())
        })
    }

    async fn open_path(&self, peer: &str) -> Result<RdmaPath, PathError> {
        let refused = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
        let is_open = self.local.rails.get().is_some();
        if !is_open {
            self.run_blocking(peer, LocalRails::find_device).await?;
        }
        let tcp = within(peer, self.config.dial_timeout, self.tcp.open(peer)).await?;
        let offered = within(peer, self.config.dial_timeout, RdmaLink::query_rails(&tcp)).await?;
        let theirs = offered.map_err(refused)?;
        let local = self.local_rails(peer).await?;
        let ours: Vec<Gid> = local.iter().map(|local| local.rdma.transfers.rail().port().gid).collect();
        let config = &local[0].rdma.config;
        let told = Arc::new(Notify::new());
        let lane = |pair: super::rail_match::RailMatch| {
            RailPair::new(&local[pair.local], pair, config.cool_down, &told)
        };
        let lanes: Vec<RailPair> = match_rails(&ours, &theirs).into_iter().map(lane).collect();
        let (mut whys, begun) = (Vec::new(), Instant::now());
        for (at, lane) in lanes.iter().enumerate() {
            if begun.elapsed() > PROBES_TIMEOUT {
                break;
            }
            match lane.attach(&tcp).await? {
                AttachOutcome::Attached(first) => {
                    let (links_max, idle) = (config.links_per_peer, self.config.idle_timeout);
                    let pairs = RailPairs::new(tcp, lanes, told, at, *first, links_max, idle);
                    return Ok(RdmaPath::new(pairs));
                }
                AttachOutcome::Unavailable(why) => whys.push(why),
                AttachOutcome::Unreachable(why) => {
                    lane.suspend();
                    whys.push(why);
                }
            }
        }
        Err(refused(whys.join("; ")))
    }
}

impl Dialer for RdmaDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move { Ok(Arc::new(self.open_path(&address).await?) as Arc<dyn Path>) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::fake::Fabric;
    use super::*;

    #[test]
    fn the_device_is_opened_once_and_again_after_a_failure() {
        let fabric = Fabric::default();
        let config = RdmaConfig { local_bytes: 1 << 20, ..RdmaConfig::default() };
        let ours = LocalRails::new(config);
        let none = RdmaError::Library { cause: "no such file".to_owned() };
        assert!(ours.open_once(|_| Err(none)).is_err() && ours.rails.get().is_none());
        let opened = AtomicU32::new(0);
        let open = |config: &RdmaConfig| {
            opened.fetch_add(1, Ordering::Relaxed);
            Ok(vec![Rdma::from_rail(fabric.rail(1), config)?])
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| ours.open_once(open).unwrap()))));
        assert_eq!(opened.load(Ordering::Relaxed), 1);
        assert!(ours.rails.get().is_some());
    }
}
