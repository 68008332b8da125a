//! Opening paths over RDMA: a path of TLS over TCP, and on it a first link, which shows whether there can be any. Where both ends
//! have several rails, it is on the first pair of them between which packets pass.
//!
//! Not here: what runs over a path (`path.rs`).

use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvfleet_proto::tls::Identity;
use tokio::sync::Notify;

use super::lane::{ATTACH_TIMEOUT, Lane, Lanes};
use super::link::{Asked, Link, Local};
use super::pairs::pairs;
use super::path::RdmaPath;
use super::rail::Gid;
use super::{Rdma, RdmaConfig, RdmaError};
use crate::dial::within;
use crate::tcp::{TcpConfig, TcpDialer};
use crate::{BoxFuture, Dialer, Path, PathError};

/// How long rails are tried one after the other: the second has its time when the first took all of its own.
const TRIALS_MAX: Duration = ATTACH_TIMEOUT.saturating_add(Duration::from_secs(1));

/// Opens paths over RDMA.
pub struct RdmaDialer {
    tcp: TcpDialer,
    config: TcpConfig,
    ours: Arc<Ours>,
}

/// Our end of all paths, from when there is one.
struct Ours {
    config: RdmaConfig,
    /// One for each rail, the best first.
    local: OnceLock<Vec<Arc<Local>>>,
    /// Held by whoever opens it, so that memory is registered once.
    opening: Mutex<()>,
    said: Once,
}

impl Ours {
    fn new(config: RdmaConfig) -> Ours {
        Ours { config, local: OnceLock::new(), opening: Mutex::new(()), said: Once::new() }
    }

    /// Whether there is a device, as far as can be seen without opening it.
    fn look(&self) -> Result<(), RdmaError> {
        Rdma::look(&self.config).map(drop)
    }

    /// Opens the devices if nobody did, which blocks.
    fn open(
        &self,
        open: impl FnOnce(&RdmaConfig) -> Result<Vec<Arc<Rdma>>, RdmaError>,
    ) -> Result<(), RdmaError> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.local.get().is_some() {
            return Ok(());
        }
        let local = Local::of(&open(&self.config)?)?;
        let rails: Vec<&Arc<Rdma>> = local.iter().map(|local| &local.rdma).collect();
        tracing::info!(?rails, "RDMA is used with nodes that offer it");
        self.local.get_or_init(|| local);
        Ok(())
    }
}

impl std::fmt::Debug for RdmaDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaDialer({:?})", self.rails())
    }
}

impl RdmaDialer {
    /// A dialer that shows `identity` and trusts its authority. Registers its memory, which takes a moment; opens no socket
    /// yet.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, identity: &Identity, config: TcpConfig) -> Result<RdmaDialer, RdmaError> {
        RdmaDialer::over(std::slice::from_ref(rdma), identity, config)
    }

    /// The same over several rails, the best first. Memory is registered on each; those that refuse it are left out.
    ///
    /// # Errors
    /// When the memory cannot be registered on any.
    pub fn over(
        rails: &[Arc<Rdma>],
        identity: &Identity,
        config: TcpConfig,
    ) -> Result<RdmaDialer, RdmaError> {
        let first = rails.first().map(|rdma| rdma.config.clone()).unwrap_or_default();
        let dialer = RdmaDialer::late(first, identity, config);
        dialer.ours.open(|_| Ok(rails.to_vec()))?;
        Ok(dialer)
    }

    /// What is open, the best first.
    fn rails(&self) -> Vec<&Arc<Rdma>> {
        self.ours.local.get().into_iter().flatten().map(|local| &local.rdma).collect()
    }

    /// The same, but that the device is opened and memory registered for the first node that offers RDMA. While there is no
    /// device, every dial is refused with the reason, which the log says once.
    #[must_use]
    pub fn late(rdma: RdmaConfig, identity: &Identity, config: TcpConfig) -> RdmaDialer {
        let tcp = TcpDialer::new(identity, config.clone());
        RdmaDialer { tcp, config, ours: Arc::new(Ours::new(rdma)) }
    }

    /// Our end. Whoever waits no longer leaves it open for the next.
    async fn local(&self, peer: &str) -> Result<&[Arc<Local>], PathError> {
        if self.ours.local.get().is_none() {
            self.blocking(peer, |ours| ours.open(Rdma::open_all)).await?;
        }
        let cause = || "its device was opened and is not there".to_owned();
        let none = || PathError::Unreachable { peer: peer.to_owned(), cause: cause() };
        self.ours.local.get().map(Vec::as_slice).ok_or_else(none)
    }

    /// Calls into the system, on a thread for such.
    async fn blocking(
        &self,
        peer: &str,
        call: impl FnOnce(&Ours) -> Result<(), RdmaError> + Send + 'static,
    ) -> Result<(), PathError> {
        let ours = Arc::clone(&self.ours);
        let called = tokio::task::spawn_blocking(move || call(&ours)).await;
        let none = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
        called.map_err(|ended| none(ended.to_string()))?.map_err(|error| {
            self.ours.said.call_once(|| tracing::info!("{error}"));
            none(error.to_string())
        })
    }

    async fn open(&self, peer: &str) -> Result<RdmaPath, PathError> {
        let refused = |cause: String| PathError::Unreachable { peer: peer.to_owned(), cause };
        let is_open = self.ours.local.get().is_some();
        if !is_open {
            self.blocking(peer, Ours::look).await?;
        }
        let tcp = within(peer, self.config.dial_timeout, self.tcp.open(peer)).await?;
        let offered = within(peer, self.config.dial_timeout, Link::offered(&tcp)).await?;
        let theirs = offered.map_err(refused)?;
        let local = self.local(peer).await?;
        let ours: Vec<Gid> = local.iter().map(|local| local.rdma.flights.rail().port().gid).collect();
        let config = &local[0].rdma.config;
        let told = Arc::new(Notify::new());
        let lane = |pair: super::pairs::Pair| Lane::new(&local[pair.local], pair, config.cool_down, &told);
        let lanes: Vec<Lane> = pairs(&ours, &theirs).into_iter().map(lane).collect();
        let (mut whys, begun) = (Vec::new(), Instant::now());
        for (at, lane) in lanes.iter().enumerate() {
            if begun.elapsed() > TRIALS_MAX {
                break;
            }
            match lane.attach(&tcp).await? {
                Asked::Made(first) => {
                    let limits = (config.links_per_peer, self.config.idle_timeout);
                    return Ok(RdmaPath::new(Lanes::new(tcp, (lanes, told), (at, *first), limits)));
                }
                Asked::None(why) => whys.push(why),
                Asked::Dead(why) => {
                    lane.leave_alone();
                    whys.push(why);
                }
            }
        }
        Err(refused(whys.join("; ")))
    }
}

impl Dialer for RdmaDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move { Ok(Arc::new(self.open(&address).await?) as Arc<dyn Path>) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::fake::Fabric;
    use super::*;

    #[test]
    fn the_device_is_opened_once_however_many_need_it_and_again_after_a_failure() {
        let fabric = Fabric::default();
        let config = RdmaConfig { local_bytes: 1 << 20, ..RdmaConfig::default() };
        let ours = Ours::new(config);
        let none = RdmaError::Library { cause: "no such file".to_owned() };
        assert!(ours.open(|_| Err(none)).is_err() && ours.local.get().is_none());
        let opened = AtomicU32::new(0);
        let open = |config: &RdmaConfig| {
            opened.fetch_add(1, Ordering::Relaxed);
            Ok(vec![Rdma::over(fabric.rail(1), config)?])
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| ours.open(open).unwrap()))));
        assert_eq!(opened.load(Ordering::Relaxed), 1);
        assert!(ours.local.get().is_some());
    }
}
