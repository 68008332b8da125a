//! Opening paths over RDMA: a path of TLS over TCP, and on it a first link, which shows whether there can be any.
//!
//! Not here: what runs over a path (`path.rs`).

use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::Duration;

use kvfleet_proto::tls::Identity;
use tokio::time::timeout;

use super::link::{Asked, Link, Local};
use super::path::RdmaPath;
use super::{Rdma, RdmaConfig, RdmaError};
use crate::dial::within;
use crate::tcp::{TcpConfig, TcpDialer};
use crate::{BoxFuture, Dialer, Path, PathError};

/// Time for a first link beside that of the connection below. Cards take milliseconds for it; some seconds are what they try to
/// reach a peer that does not answer, and what their emulation takes.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens paths over RDMA.
pub struct RdmaDialer {
    tcp: TcpDialer,
    config: TcpConfig,
    ours: Arc<Ours>,
}

/// Our end of all paths, from when there is one.
struct Ours {
    config: RdmaConfig,
    local: OnceLock<Arc<Local>>,
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

    /// Opens the device if nobody did, which blocks.
    fn open(&self, open: impl FnOnce(&RdmaConfig) -> Result<Arc<Rdma>, RdmaError>) -> Result<(), RdmaError> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.local.get().is_some() {
            return Ok(());
        }
        let local = Local::new(&open(&self.config)?)?;
        tracing::info!(rdma = ?local.rdma, "RDMA is used with nodes that offer it");
        self.local.get_or_init(|| local);
        Ok(())
    }
}

impl std::fmt::Debug for RdmaDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaDialer({:?})", self.ours.local.get().map(|local| &local.rdma))
    }
}

impl RdmaDialer {
    /// A dialer that shows `identity` and trusts its authority. Registers its memory, which takes a moment; opens no socket
    /// yet.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, identity: &Identity, config: TcpConfig) -> Result<RdmaDialer, RdmaError> {
        let dialer = RdmaDialer::late(rdma.config.clone(), identity, config);
        dialer.ours.open(|_| Ok(Arc::clone(rdma)))?;
        Ok(dialer)
    }

    /// The same, but that the device is opened and memory registered for the first node that offers RDMA. While there is no
    /// device, every dial is refused with the reason, which the log says once.
    #[must_use]
    pub fn late(rdma: RdmaConfig, identity: &Identity, config: TcpConfig) -> RdmaDialer {
        let tcp = TcpDialer::new(identity, config.clone());
        RdmaDialer { tcp, config, ours: Arc::new(Ours::new(rdma)) }
    }

    /// Our end. Whoever waits no longer leaves it open for the next.
    async fn local(&self, peer: &str) -> Result<Arc<Local>, PathError> {
        if self.ours.local.get().is_none() {
            self.blocking(peer, |ours| ours.open(Rdma::open)).await?;
        }
        let cause = || "its device was opened and is not there".to_owned();
        let none = || PathError::Unreachable { peer: peer.to_owned(), cause: cause() };
        self.ours.local.get().cloned().ok_or_else(none)
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
        if !is_open && let Some(why) = within(peer, self.config.dial_timeout, Link::refusal(&tcp)).await? {
            return Err(refused(why));
        }
        let local = self.local(peer).await?;
        let asked = timeout(ATTACH_TIMEOUT, Link::attach(&tcp, &local)).await;
        let first = match asked.map_err(|_| refused("its RDMA answers too slowly".to_owned()))?? {
            Asked::Made(first) => *first,
            Asked::None(why) => return Err(refused(why)),
        };
        let limits = (local.rdma.config.links_per_peer, self.config.idle_timeout);
        Ok(RdmaPath::new(tcp, local, first, limits))
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
            Rdma::over(fabric.rail(1), config)
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(|| ours.open(open).unwrap()))));
        assert_eq!(opened.load(Ordering::Relaxed), 1);
        assert!(ours.local.get().is_some());
    }
}
