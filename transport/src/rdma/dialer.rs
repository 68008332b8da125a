//! Opening paths over RDMA: a path of TLS over TCP, and on it a first link, which shows whether there can be any.
//!
//! Not here: what runs over a path (`path.rs`).

use std::sync::Arc;

use kvfleet_proto::tls::Identity;

use super::link::{Link, Local};
use super::path::RdmaPath;
use super::{Rdma, RdmaError};
use crate::dial::within;
use crate::tcp::{TcpConfig, TcpDialer};
use crate::{BoxFuture, Dialer, Path, PathError};

/// Opens paths over RDMA.
pub struct RdmaDialer {
    tcp: TcpDialer,
    config: TcpConfig,
    local: Arc<Local>,
}

impl std::fmt::Debug for RdmaDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RdmaDialer({:?})", self.local.rdma)
    }
}

impl RdmaDialer {
    /// A dialer that shows `identity` and trusts its authority. Registers its memory, which takes a moment; opens no socket
    /// yet.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn new(rdma: &Arc<Rdma>, identity: &Identity, config: TcpConfig) -> Result<RdmaDialer, RdmaError> {
        let tcp = TcpDialer::new(identity, config.clone());
        Ok(RdmaDialer { tcp, config, local: Local::new(rdma)? })
    }

    async fn open(&self, peer: &str) -> Result<RdmaPath, PathError> {
        let tcp = self.tcp.open(peer).await?;
        let offers_none = |cause: String| PathError::Unreachable {
            peer: peer.to_owned(),
            cause: format!("it offers no RDMA ({cause})"),
        };
        let first = match Link::attach(&tcp, &self.local).await {
            Ok(Some(first)) => first,
            Ok(None) => return Err(offers_none("as many connections as it allows have it".to_owned())),
            Err(PathError::Broken { cause, .. }) => return Err(offers_none(cause)),
            Err(other) => return Err(other),
        };
        let limits = (self.local.rdma.config.links_per_peer, self.config.idle_timeout);
        Ok(RdmaPath::new(tcp, Arc::clone(&self.local), first, limits))
    }
}

impl Dialer for RdmaDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            let open = async { Ok(Arc::new(self.open(&address).await?) as Arc<dyn Path>) };
            within(&address, self.config.dial_timeout, open).await
        })
    }
}
