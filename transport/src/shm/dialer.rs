//! Opening connections to nodes of this host.
//!
//! Both ends look who the other is: a node decides whom it serves, and a client believes only a node of its own user, of
//! root, or of users that it was told. Not here: what runs over a connection (`link.rs`, `path.rs`).

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_core::lend::Extent;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use tokio::time::timeout;

use super::guess::Guess;
use super::link::{Link, Lost, Parts};
use super::map::Mapping;
use super::packet::{ToClient, ToNode, Welcome};
use super::path::ShmPath;
use super::seqpacket::{Got, Seqpacket};
use super::{AWAKE, PACKET_BYTES_MAX, socket_path};
use crate::layered::FramesOnly;
use crate::{BoxFuture, Dialer, Path, PathError};

/// The user that may act for everyone.
const ROOT: u32 = 0;

/// Memory made present at one go, in bytes: less than a millisecond each.
const POPULATE_STEP_BYTES: u64 = 64 << 20;

/// How a client reaches nodes of its host.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Directory that nodes and clients of this host share.
    pub dir: PathBuf,
    /// Users whose nodes are believed, beside this process's own and root.
    pub server_uids: Vec<u32>,
    /// Whether to read in place where the node allows it; otherwise all is copied.
    pub maps: bool,
    /// How long to wait for an answer without sleeping, while such waits are worth it.
    pub awake: Duration,
    /// How long opening may take.
    pub dial_timeout: Duration,
    /// How long a node may leave an operation other than a fetch unanswered.
    pub stall_timeout: Duration,
}

impl ShmConfig {
    /// The settings that suit most, for nodes whose sockets lie in `dir`.
    #[must_use]
    pub fn new(dir: PathBuf) -> ShmConfig {
        // With one processor, who waits without sleeping keeps the node from answering.
        let is_alone = std::thread::available_parallelism().is_ok_and(|cores| cores.get() == 1);
        ShmConfig {
            dir,
            server_uids: Vec::new(),
            maps: true,
            awake: if is_alone { Duration::ZERO } else { AWAKE },
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
    /// A dialer; opens nothing yet.
    #[must_use]
    pub fn new(config: ShmConfig) -> ShmDialer {
        ShmDialer { config: Arc::new(config) }
    }

    async fn open(&self, peer: String) -> Result<Arc<dyn Path>, PathError> {
        let unreachable = |cause: String| PathError::Unreachable { peer: peer.clone(), cause };
        let at = socket_path(&self.config.dir, &peer);
        let socket =
            Seqpacket::connect(&at).map_err(|error| unreachable(format!("{} at {}", error, at.display())))?;
        self.believe(&socket, &peer)?;
        let hello = ToNode::Hello { maps: self.config.maps };
        // The queue of a fresh connection is empty.
        socket.send(&hello.encode(), &[]).map_err(|error| unreachable(error.to_string()))?;
        let (socket, welcome, files) = welcome(socket, &peer).await?;
        let link = self.link(socket, &peer, &welcome, files)?;
        let tray_in_bytes = welcome.tray_in_bytes;
        let (stall_timeout, at_once) = (self.config.stall_timeout, Guess::default());
        let saves_frames = FramesOnly::default();
        Ok(Arc::new(ShmPath { link, stall_timeout, tray_in_bytes, at_once, saves_frames }))
    }

    /// A checksum says that bytes are whole, not who wrote them: any user could listen under a node's name.
    fn believe(&self, socket: &Seqpacket, peer: &str) -> Result<(), PathError> {
        let server = socket.peer().map_err(|error| Lost::Broken(error.to_string()).at(peer))?;
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
    ) -> Result<Arc<Link>, PathError> {
        let wrong = |what: String| PathError::Protocol { peer: peer.to_owned(), what };
        if welcome.address != peer {
            return Err(wrong(format!("a welcome as {}: two nodes share one socket name", welcome.address)));
        }
        let frame_bytes_max = welcome.frame_bytes_max;
        if frame_bytes_max as usize > FRAME_BYTES_MAX {
            return Err(wrong(format!("a largest frame of {frame_bytes_max} bytes")));
        }
        let mut files = files.into_iter();
        let tray_bytes = welcome.tray_in_bytes.checked_add(welcome.tray_out_bytes);
        let (Some(tray), Some(tray_bytes)) = (files.next(), tray_bytes) else {
            return Err(wrong("a welcome without a tray".to_owned()));
        };
        let refused = |error| wrong(format!("memory that is no such: {error}"));
        let tray = Arc::new(Mapping::to_write(&tray, tray_bytes).map_err(refused)?);
        let arena = match (files.next(), welcome.arena_bytes) {
            (None, 0) => None,
            (Some(arena), bytes) if bytes > 0 => {
                Some(Arc::new(Mapping::to_read(&arena, bytes).map_err(refused)?))
            }
            _ => return Err(wrong("a welcome whose memory is not what it says".to_owned())),
        };
        if let Some(arena) = &arena {
            populate(Arc::clone(arena));
        }
        let extent =
            Extent { arena_bytes: welcome.arena_bytes, tray_bytes: welcome.tray_out_bytes, frame_bytes_max };
        Ok(Link::new(Parts {
            socket,
            peer: peer.to_owned(),
            arena,
            tray,
            tray_in_bytes: welcome.tray_in_bytes,
            extent,
            awake: self.config.awake,
        }))
    }
}

/// Behind the dial: reading needs it not, and is quicker with it.
fn populate(arena: Arc<Mapping>) {
    tokio::task::spawn_blocking(move || {
        let mut at = 0;
        // Nobody else has it any more: the connection is gone.
        while at < arena.len_bytes() && Arc::strong_count(&arena) > 1 {
            let len = POPULATE_STEP_BYTES.min(arena.len_bytes() - at);
            arena.populate(at, len);
            at += len;
        }
    });
}

async fn welcome(socket: Seqpacket, peer: &str) -> Result<(Seqpacket, Welcome, Vec<OwnedFd>), PathError> {
    let broken = |error: std::io::Error| Lost::Broken(error.to_string()).at(peer);
    let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
    let socket = socket.watched().map_err(broken)?;
    loop {
        let mut ready = socket.readable().await.map_err(broken)?;
        match ready.get_inner().recv(&mut buffer).map_err(broken)? {
            Got::Later => ready.clear_ready(),
            Got::Ended => return Err(Lost::Broken("it ended the connection".to_owned()).at(peer)),
            Got::Packet(len, files) => {
                drop(ready);
                return match ToClient::decode(&buffer[..len]) {
                    Ok(ToClient::Welcome(welcome)) => Ok((socket.into_inner(), welcome, files)),
                    Ok(ToClient::Closing(why)) => {
                        Err(PathError::Unreachable { peer: peer.to_owned(), cause: why.cause().to_owned() })
                    }
                    Ok(other) => Err(Lost::Protocol(format!("{other:?} instead of a welcome")).at(peer)),
                    Err(error) => Err(Lost::Protocol(error.to_string()).at(peer)),
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
