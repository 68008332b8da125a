//! Opens connections to nodes of this host.
//!
//! Both ends check the identity of the other: a node decides which users it serves, and a client
//! trusts only a node of its own user, of root, or of configured users. Not here: operations over a
//! connection (`link.rs`, `path.rs`).

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_core::lease_grant::MemoryExtent;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use tokio::time::timeout;

use super::adaptive_toggle::AdaptiveToggle;
use super::link::{LinkFailure, LinkParts, ShmLink};
use super::mapping::Mapping;
use super::packet::{ClientPacket, NodePacket, Welcome};
use super::path::ShmPath;
use super::seqpacket::{RecvOutcome, Seqpacket};
use super::{PACKET_BYTES_MAX, SPIN_WAIT, socket_path};
use crate::layered::LayerSupport;
use crate::{BoxFuture, Dialer, Path, PathError};

/// The superuser.
const ROOT: u32 = 0;

/// Bytes populated in one step: less than a millisecond each.
const POPULATE_STEP_BYTES: u64 = 64 << 20;

/// How a client reaches nodes of its host.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Directory that nodes and clients of this host share.
    pub dir: PathBuf,
    /// Trusted users of nodes, besides this process's own and root.
    pub server_uids: Vec<u32>,
    /// Whether to read in place if the node allows it; otherwise all blocks are copied.
    pub maps_arena: bool,
    /// How long to spin for an answer, while spins pay off.
    pub spin_wait: Duration,
    /// Time limit to open a connection.
    pub dial_timeout: Duration,
    /// How long a node may leave an operation other than a fetch unanswered.
    pub stall_timeout: Duration,
}

impl ShmConfig {
    /// Default settings, for nodes with sockets in `dir`.
    #[must_use]
    pub fn new(dir: PathBuf) -> ShmConfig {
        // With one processor, a client that spins keeps the node from answering.
        let is_alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        ShmConfig {
            dir,
            server_uids: Vec::new(),
            maps_arena: true,
            spin_wait: if is_alone { Duration::ZERO } else { SPIN_WAIT },
            dial_timeout: Duration::from_secs(5),
            stall_timeout: Duration::from_secs(10),
        }
    }
}

/// Opens paths to nodes of this host.
#[derive(Clone, Debug)]
pub struct ShmDialer {
    config: Arc<ShmConfig>,
}

impl ShmDialer {
    /// A dialer; opens no connection yet.
    #[must_use]
    pub fn new(config: ShmConfig) -> ShmDialer {
        ShmDialer { config: Arc::new(config) }
    }

    async fn open(&self, peer: String) -> Result<Arc<dyn Path>, PathError> {
        let unreachable = |cause: String| PathError::Unreachable { peer: peer.clone(), cause };
        let at = socket_path(&self.config.dir, &peer);
        let socket =
            Seqpacket::connect(&at).map_err(|error| unreachable(format!("{} at {}", error, at.display())))?;
        self.check_server_user(&socket, &peer)?;
        let hello = ClientPacket::Hello { wants_mapping: self.config.maps_arena };
        // The queue of a new connection is empty, so this send does not block.
        socket.send(&hello.encode(), &[]).map_err(|error| unreachable(error.to_string()))?;
        let (socket, welcome, files) = receive_welcome(socket, &peer).await?;
        let link = self.link(socket, &peer, &welcome, files)?;
        let tray_in_bytes = welcome.bounce_in_bytes;
        let (stall_timeout, at_once) = (self.config.stall_timeout, AdaptiveToggle::default());
        let saves_frames = LayerSupport::default();
        Ok(Arc::new(ShmPath {
            link,
            stall_timeout,
            bounce_in_bytes: tray_in_bytes,
            eager_saves: at_once,
            saves_frames,
        }))
    }

    /// A checksum proves that bytes are intact, not which process wrote them: any user could listen
    /// under a node's name.
    fn check_server_user(&self, socket: &Seqpacket, peer: &str) -> Result<(), PathError> {
        let server = socket.peer().map_err(|error| LinkFailure::Broken(error.to_string()).at(peer))?;
        let own = rustix::process::geteuid().as_raw();
        if [own, ROOT].contains(&server.uid) || self.config.server_uids.contains(&server.uid) {
            return Ok(());
        }
        let cause = format!(
            "its socket is that of process {} of user {}, which is not believed: name that user in shm.server_uids \
             if its node is meant",
            server.pid, server.uid
        );
        Err(PathError::Unreachable { peer: peer.to_owned(), cause })
    }

    fn link(
        &self,
        socket: Seqpacket,
        peer: &str,
        welcome: &Welcome,
        files: Vec<OwnedFd>,
    ) -> Result<Arc<ShmLink>, PathError> {
        let wrong = |what: String| PathError::Protocol { peer: peer.to_owned(), what };
        if welcome.address != peer {
            return Err(wrong(format!("a welcome as {}: two nodes share one socket name", welcome.address)));
        }
        let frame_bytes_max = welcome.frame_bytes_max;
        if frame_bytes_max as usize > FRAME_BYTES_MAX {
            return Err(wrong(format!("a largest frame of {frame_bytes_max} bytes")));
        }
        let mut files = files.into_iter();
        let bounce_buffer_bytes = welcome.bounce_in_bytes.checked_add(welcome.bounce_out_bytes);
        let (Some(tray), Some(bounce_buffer_bytes)) = (files.next(), bounce_buffer_bytes) else {
            return Err(wrong("a welcome without a tray".to_owned()));
        };
        let refused = |error| wrong(format!("memory that cannot be mapped: {error}"));
        let tray = Arc::new(Mapping::read_write(&tray, bounce_buffer_bytes).map_err(refused)?);
        let arena = match (files.next(), welcome.arena_bytes) {
            (None, 0) => None,
            (Some(arena), bytes) if bytes > 0 => {
                Some(Arc::new(Mapping::read_only(&arena, bytes).map_err(refused)?))
            }
            _ => return Err(wrong("a welcome with memory that differs from its description".to_owned())),
        };
        if let Some(arena) = &arena {
            populate(Arc::clone(arena));
        }
        let extent = MemoryExtent {
            arena_bytes: welcome.arena_bytes,
            bounce_buffer_bytes: welcome.bounce_out_bytes,
            frame_bytes_max,
        };
        Ok(ShmLink::new(LinkParts {
            socket,
            peer: peer.to_owned(),
            arena,
            bounce: tray,
            bounce_in_bytes: welcome.bounce_in_bytes,
            extent,
            spin_wait: self.config.spin_wait,
        }))
    }
}

/// Runs in the background after the dial: reading works without it, but is faster with it.
fn populate(arena: Arc<Mapping>) {
    tokio::task::spawn_blocking(move || {
        let mut at = 0;
        // Stops once the connection is gone.
        while at < arena.len_bytes() && Arc::strong_count(&arena) > 1 {
            let len = POPULATE_STEP_BYTES.min(arena.len_bytes() - at);
            arena.populate(at, len);
            at += len;
        }
    });
}

async fn receive_welcome(
    socket: Seqpacket,
    peer: &str,
) -> Result<(Seqpacket, Welcome, Vec<OwnedFd>), PathError> {
    let broken = |error: std::io::Error| LinkFailure::Broken(error.to_string()).at(peer);
    let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
    let socket = socket.into_async().map_err(broken)?;
    loop {
        let mut ready = socket.readable().await.map_err(broken)?;
        match ready.get_inner().recv(&mut buffer).map_err(broken)? {
            RecvOutcome::WouldBlock => ready.clear_ready(),
            RecvOutcome::Closed => {
                return Err(LinkFailure::Broken("it ended the connection".to_owned()).at(peer));
            }
            RecvOutcome::Packet(len, files) => {
                drop(ready);
                return match NodePacket::decode(&buffer[..len]) {
                    Ok(NodePacket::Welcome(welcome)) => Ok((socket.into_inner(), welcome, files)),
                    Ok(NodePacket::Closing(why)) => {
                        Err(PathError::Unreachable { peer: peer.to_owned(), cause: why.cause().to_owned() })
                    }
                    Ok(other) => {
                        Err(LinkFailure::Protocol(format!("{other:?} instead of a welcome")).at(peer))
                    }
                    Err(error) => Err(LinkFailure::Protocol(error.to_string()).at(peer)),
                };
            }
        }
    }
}

impl Dialer for ShmDialer {
    fn dial(&self, address: String) -> BoxFuture<'_, Result<Arc<dyn Path>, PathError>> {
        Box::pin(async move {
            let after = self.config.dial_timeout;
            let opened = timeout(after, self.open(address.clone())).await;
            opened.unwrap_or_else(|_| Err(PathError::TimedOut { peer: address, after }))
        })
    }
}
