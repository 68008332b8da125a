//! Opens paths to nodes over TCP.
//!
//! A TLS 1.3 client finishes its handshake before the server has checked the client's certificate.
//! So a path counts as open only after an answered ping. Not here: operations on a path
//! (`path.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use kvfleet_net::tls::Identity;
use rustls::ClientConfig;
use tokio::sync::watch;

use super::TcpConfig;
use super::buffers::{BufferPool, BufferSize};
use super::path::TcpPath;
use super::pool::{ConnectionPool, Connector};
use super::stream::StreamShared;
use super::watch::{ping, watch_peer};
use crate::dial::{resolve, within};
use crate::layered::LayerSupport;
use crate::{BoxFuture, Dialer, Path, PathError, wire};

/// Opens paths over TLS on TCP.
#[derive(Debug)]
pub struct TcpDialer {
    tls: Arc<ClientConfig>,
    identity: Identity,
    config: TcpConfig,
    buffers: Arc<BufferPool>,
}

impl TcpDialer {
    /// A dialer that presents `identity` and trusts its authority. Opens no socket yet.
    #[must_use]
    pub fn new(identity: &Identity, config: TcpConfig) -> TcpDialer {
        let (tls, identity) = (Arc::new(identity.tcp_client()), identity.clone());
        TcpDialer { tls, identity, config, buffers: Arc::default() }
    }

    /// Opens a path; the caller limits the time.
    ///
    /// # Errors
    /// If the peer cannot be reached, or does not trust this process.
    pub async fn open(&self, peer: &str) -> Result<TcpPath, PathError> {
        let ends = StreamShared {
            buffers: Arc::clone(&self.buffers),
            received: Arc::default(),
            min_size: BufferSize::Large,
        };
        let connector = Connector {
            peer: peer.to_owned(),
            address: resolve(peer).await?,
            tls: Arc::clone(&self.tls),
            ends: ends.clone(),
            dial_timeout: self.config.dial_timeout,
            congestion_control: self.config.congestion_control.clone(),
        };
        let unreachable = |error| match error {
            PathError::Broken { peer, cause } => PathError::Unreachable { peer, cause },
            other => other,
        };
        let (mut lifeline, chain) = connector.connect().await.map_err(unreachable)?;
        let pong = ping(&mut lifeline).await.map_err(|error| unreachable(error.at(peer)))?;
        if pong.version != wire::PROTOCOL_VERSION {
            let what = format!("a malformed message: protocol version {}", pong.version);
            return Err(PathError::Protocol { peer: peer.to_owned(), what });
        }
        let (says, lost) = watch::channel(None);
        let config = &self.config;
        let pool =
            ConnectionPool::new(connector, config.connections_per_peer, config.idle_timeout, lost.clone());
        let pool = Arc::new(pool);
        let end = self.identity.clone().server_end(chain);
        let watching = watch_peer(lifeline, ends, config.silence_max, Arc::downgrade(&pool), says, end);
        let watching = tokio::spawn(watching);
        let (sends_frames, saves_frames) = (AtomicBool::new(false), LayerSupport::default());
        let stall_timeout = config.stall_timeout;
        Ok(TcpPath {
            pool,
            lost,
            stall_timeout,
            watching,
            is_frames_only: sends_frames,
            layer_support: saves_frames,
        })
    }
}

impl Dialer for TcpDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            let open = async { Ok(Arc::new(self.open(&address).await?) as Arc<dyn Path>) };
            within(&address, self.config.dial_timeout, open).await
        })
    }
}
