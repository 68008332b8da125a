//! The node's end of the path within one host: listens, checks access, and gives each connection
//! its bounce buffer.
//!
//! Not here: the operations of connections (`connection.rs`).

use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use kvfleet_net::accept_limits::AcceptWarnings;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connection::Connection;
use super::grants::{ConnectionGrants, GrantBudget, GrantResources};
use super::mapping::{Mapping, memory_file};
use super::packet::{ClientPacket, CloseReason, NodePacket, Welcome};
use super::seqpacket::{PeerProcess, RecvOutcome, Seqpacket};
use super::serving::OperationContext;
use super::{CONNECTIONS_MAX, CONNECTIONS_PER_PROCESS_MAX, PACKET_BYTES_MAX, bounce_part_bytes};
use crate::{BlockService, Caller, CallerAdmission, SharedArena};

/// Time limit for a client's hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for a refused client, which is only read so that it receives the reason.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(200);

/// Maximum concurrent refused clients. Further ones are dropped without a message.
const REFUSED_MAX: usize = 8;

/// Time limit for connections to send their last packet when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause after a failed accept: most likely no descriptors are left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error(
        "cannot listen at {path}: {cause}; make the directory writable for this user, or choose another",
        path = path.display()
    )]
pub struct ShmBindError {
    /// Socket path.
    pub path: PathBuf,
    /// The system's error.
    pub cause: std::io::Error,
}

/// Limits and settings of a server.
#[derive(Clone, Debug)]
pub struct ShmServerConfig {
    /// Address at which the node serves other hosts (`host:port`); clients identify it by this.
    pub address: String,
    /// The largest frame in either direction, in bytes.
    pub frame_bytes_max: u32,
    /// Maximum granted bytes over all connections; one connection may have half of them.
    pub granted_bytes_max: u64,
    /// Maximum memory of all bounce buffers, in bytes.
    pub bounce_bytes_max: u64,
    /// How long the node keeps a lease that is not renewed.
    pub lease: Duration,
    /// How long a save may make no progress, and how long a client may leave packets in its queue.
    pub stall_timeout: Duration,
    /// How long to spin for a client's next packet, while spins pay off. Zero with one processor.
    pub spin_wait: Duration,
    /// Whether users other than this process's own may connect and be checked.
    pub serves_other_users: bool,
}

/// Runtimes of a server.
#[derive(Clone, Debug)]
pub struct ShmRuntimes {
    /// For connections and operations: best a single dedicated thread.
    pub event_loop: Handle,
    /// Whether `event_loop` is one dedicated thread, which may move to another processor than its
    /// client's.
    pub may_move: bool,
    /// For long copies.
    pub bulk: Handle,
}

/// Current grants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShmStats {
    /// Connected clients.
    pub connections: usize,
    /// Number of grants.
    pub grants: usize,
    /// Granted bytes.
    pub granted_bytes: u64,
    /// The oldest grant.
    pub oldest: Option<OldestGrant>,
}

/// The oldest grant and its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldestGrant {
    /// Age of the grant.
    pub age: Duration,
    /// User of the client process.
    pub uid: u32,
    /// Its process number; 0 if not visible from here.
    pub pid: i32,
}

/// Serves a node's blocks to processes of its host until closed or dropped.
pub struct ShmServer {
    path: PathBuf,
    /// Inode of the socket, because another server may listen at the path by now.
    inode: u64,
    shared: Arc<ShmServerState>,
    closing: watch::Sender<bool>,
}

impl std::fmt::Debug for ShmServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmServer").field("path", &self.path).finish_non_exhaustive()
    }
}

struct ShmServerState {
    config: ShmServerConfig,
    arena: Option<Arc<dyn SharedArena>>,
    service: Arc<dyn BlockService>,
    runtimes: ShmRuntimes,
    budget: Arc<GrantBudget>,
    bounce_bytes: AtomicU64,
    /// Served connections, and refused ones that wait for the reason.
    served: AtomicUsize,
    refused: AtomicUsize,
    since: Instant,
    connections: Mutex<Vec<Weak<ConnectionGrants>>>,
    /// Each is logged once.
    is_refusal_logged: AtomicBool,
    is_full_logged: AtomicBool,
    is_violation_logged: Arc<AtomicBool>,
    /// Processes with a live connection.
    peers: Mutex<Vec<PeerProcess>>,
}

impl ShmServer {
    /// Listens at `path` and replaces a socket of an earlier server. Clients may map `arena`, if
    /// there is one and the service allows it.
    ///
    /// # Errors
    /// If it cannot listen there.
    pub fn bind(
        path: &Path,
        config: ShmServerConfig,
        arena: Option<Arc<dyn SharedArena>>,
        service: Arc<dyn BlockService>,
        ends: ShmRuntimes,
    ) -> Result<ShmServer, ShmBindError> {
        let failed = |cause| ShmBindError { path: path.to_owned(), cause };
        let (listener, inode) = listen(path, config.serves_other_users).map_err(failed)?;
        let shared = Arc::new(ShmServerState {
            budget: GrantBudget::new(config.granted_bytes_max),
            config,
            arena,
            service,
            bounce_bytes: AtomicU64::new(0),
            since: Instant::now(),
            connections: Mutex::default(),
            is_refusal_logged: AtomicBool::new(false),
            is_full_logged: AtomicBool::new(false),
            is_violation_logged: Arc::default(),
            peers: Mutex::default(),
            runtimes: ends,
            served: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        });
        let (closes, closed) = watch::channel(false);
        shared.runtimes.event_loop.spawn(accept(listener, Arc::clone(&shared), closed));
        Ok(ShmServer { path: path.to_owned(), inode, shared, closing: closes })
    }

    /// Current grants.
    #[must_use]
    pub fn stats(&self) -> ShmStats {
        let connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let mut numbers = ShmStats::default();
        for lending in connections.iter().filter_map(Weak::upgrade) {
            let (loans, bytes, oldest) = lending.stats();
            numbers.connections += 1;
            numbers.grants += loans;
            numbers.granted_bytes += bytes;
            numbers.oldest = [numbers.oldest, oldest].into_iter().flatten().max_by_key(|oldest| oldest.age);
        }
        numbers
    }

    /// Tells every client to leave and accepts no more; returns when all were told, or after a
    /// second. Blocks that clients still read stay unchanged until the clients are gone.
    pub async fn close(&self) {
        self.closing.send_replace(true);
        // Each connection keeps a receiver until it has sent its last packet.
        if timeout(CLOSE_TIMEOUT, self.closing.closed()).await.is_err() {
            tracing::debug!("clients of this host are slow to learn that the node stops");
        }
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.closing.send_replace(true);
        if std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens under a temporary name first, so that a client finds either the old socket or one that
/// answers.
fn listen(path: &Path, serves_others: bool) -> std::io::Result<(Seqpacket, u64)> {
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let listen = || {
        let listener = Seqpacket::listen(&fresh)?;
        if serves_others {
            // Connecting requires write permission. The peer's identity decides about access.
            std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o666))?;
        }
        let inode = std::fs::metadata(&fresh)?.ino();
        std::fs::rename(&fresh, path)?;
        Ok((listener, inode))
    };
    listen().inspect_err(|_| {
        let _ = std::fs::remove_file(&fresh);
    })
}

async fn accept(listener: Seqpacket, shared: Arc<ShmServerState>, mut closes: watch::Receiver<bool>) {
    let listener = match listener.into_async() {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "cannot serve clients of this host"),
    };
    let (mut connections, mut refused) = (JoinSet::new(), AcceptWarnings::default());
    for number in 0_u64.. {
        let socket = tokio::select! {
            accepted = accept_next(&listener, &mut refused) => accepted,
            _ = closes.wait_for(|closes| *closes) => break,
        };
        while connections.try_join_next().is_some() {}
        let Ok(peer) = socket.peer() else { continue };
        let caller = Caller::Local { uid: peer.uid, pid: peer.pid, connection: number };
        let (shared, closes) = (Arc::clone(&shared), closes.clone());
        let (service, may_map) = match shared.service.admit(&caller) {
            CallerAdmission::Unscoped => (Arc::clone(&shared.service), false),
            CallerAdmission::Scoped { service, may_map: maps } => (service, maps),
            CallerAdmission::Refused => {
                if let Some(one) = CountedConnection::take(&shared, |shared| &shared.refused, REFUSED_MAX) {
                    connections.spawn(log_failure(async move { one.0.refuse(socket, peer).await }));
                }
                continue;
            }
        };
        // Served connections, and as many that wait for a welcome. Further clients get no message:
        // they would not retry anyway.
        if connections.len() < 2 * CONNECTIONS_MAX + REFUSED_MAX {
            let newcomer =
                AcceptedClient { process: ConnectedProcess::new(&shared, peer), socket, service, may_map };
            connections.spawn(log_failure(shared.welcome(newcomer, closes)));
        }
    }
    // Each connection sends its last packet by itself, and waits for clients that still read.
    connections.detach_all();
}

async fn accept_next(listener: &AsyncFd<Seqpacket>, refused: &mut AcceptWarnings) -> Seqpacket {
    loop {
        let Ok(mut ready) = listener.readable().await else { return std::future::pending().await };
        match ready.get_inner().accept() {
            Ok(Some(socket)) => return socket,
            Ok(None) => ready.clear_ready(),
            Err(error) => {
                if refused.should_warn() {
                    tracing::warn!(%error, "cannot accept a client of this host");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn log_failure(connection: impl Future<Output = std::io::Result<()>>) {
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a connection of a client of this host ended early");
    }
}

/// A client that the service admits, before its hello.
struct AcceptedClient {
    process: ConnectedProcess,
    socket: Seqpacket,
    service: Arc<dyn BlockService>,
    may_map: bool,
}

impl ShmServerState {
    async fn welcome(
        self: Arc<Self>,
        newcomer: AcceptedClient,
        closes: watch::Receiver<bool>,
    ) -> std::io::Result<()> {
        let AcceptedClient { process: present, socket, service, may_map } = newcomer;
        let peer = present.peer;
        // Read the hello before sending: closing a socket with unread data discards the packets
        // sent over it.
        let socket = socket.into_async()?;
        let wants_map = timeout(HELLO_TIMEOUT, receive_hello(&socket)).await??;
        let part = bounce_part_bytes(self.config.frame_bytes_max);
        let welcomed = CountedConnection::take(&self, |shared| &shared.served, CONNECTIONS_MAX);
        let welcomed = welcomed.filter(|_| !present.exceeds_process_limit());
        let (Some(_welcomed), Some(_tray_bytes)) = (welcomed, BounceMemory::take(&self, 2 * part)) else {
            return self.reject_full(socket.get_ref());
        };
        let file = memory_file(2 * part)?;
        let tray = Arc::new(Mapping::read_write(&file, 2 * part).map_err(std::io::Error::other)?);
        let arena = self.arena.clone().filter(|_| may_map && wants_map);
        let reader = arena.as_ref().map(|arena| arena.reader()).transpose();
        let reader =
            reader.inspect_err(|error| tracing::warn!(%error, "cannot share the arena; clients get copies"));
        let reader = reader.ok().flatten();
        let arena = arena.filter(|_| reader.is_some());
        let welcome = Welcome {
            arena_bytes: arena.as_ref().map_or(0, |arena| arena.len_bytes()),
            bounce_in_bytes: part,
            bounce_out_bytes: part,
            frame_bytes_max: self.config.frame_bytes_max,
            address: self.config.address.clone(),
        };
        let descriptors: Vec<_> =
            std::iter::once(file.as_fd()).chain(reader.iter().map(|r| r.as_fd())).collect();
        // The queue of a new connection is empty, so this send does not block.
        socket.get_ref().send(&NodePacket::Welcome(welcome).encode(), &descriptors)?;
        tracing::debug!(?peer, maps = arena.is_some(), "a client of this host is connected");
        let stock = GrantResources {
            bounce: tray,
            bounce_out_offset: part,
            bounce_out_bytes: part,
            arena,
            budget: Arc::clone(&self.budget),
            granted_bytes_max: self.config.granted_bytes_max / 2,
            bulk: self.runtimes.bulk.clone(),
            peer,
            lease: self.config.lease,
            since: self.since,
        };
        let lending = ConnectionGrants::new(socket.into_inner(), stock)?;
        self.register(&lending);
        let serving = OperationContext {
            grants: lending,
            service,
            frame_bytes_max: self.config.frame_bytes_max,
            stall_timeout: self.config.stall_timeout,
            spin_wait: self.config.spin_wait,
            may_move: self.runtimes.may_move,
            is_violation_logged: Arc::clone(&self.is_violation_logged),
            bulk: self.runtimes.bulk.clone(),
        };
        Connection::new(serving).serve(closes, self.config.lease).await;
        Ok(())
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, Vec<PeerProcess>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, lending: &Arc<ConnectionGrants>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(lending));
    }

    async fn refuse(&self, socket: Seqpacket, peer: PeerProcess) -> std::io::Result<()> {
        if !self.is_refusal_logged.swap(true, Ordering::Relaxed) {
            let (uid, pid) = (peer.uid, peer.pid);
            tracing::warn!(
                uid,
                pid,
                "a process of this host is not served; to serve it, name its user in shm.peers"
            );
        }
        let socket = socket.into_async()?;
        timeout(REFUSED_TIMEOUT, receive_hello(&socket)).await??;
        socket.get_ref().send(&NodePacket::Closing(CloseReason::Refused).encode(), &[]).map(|_| ())
    }

    fn reject_full(&self, socket: &Seqpacket) -> std::io::Result<()> {
        if !self.is_full_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no further clients of this host are served over shared memory; they use the network. Raise \
                 shm.bounce_buffer_bytes, or run fewer"
            );
        }
        socket.send(&NodePacket::Closing(CloseReason::Full).encode(), &[]).map(|_| ())
    }
}

async fn receive_hello(socket: &AsyncFd<Seqpacket>) -> std::io::Result<bool> {
    let wrong = |what: &str| Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_owned()));
    loop {
        let mut ready = socket.readable().await?;
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        match ready.get_inner().recv(&mut buffer)? {
            RecvOutcome::WouldBlock => ready.clear_ready(),
            RecvOutcome::Closed => return wrong("the client left before its hello"),
            RecvOutcome::Packet(len, descriptors) => {
                let packet = ClientPacket::decode(&buffer[..len]);
                let is_bare = descriptors.is_empty();
                return match packet {
                    Ok(ClientPacket::Hello { wants_mapping: maps }) if is_bare => Ok(maps),
                    Ok(_) => wrong("expected a hello"),
                    Err(error) => {
                        let _ =
                            socket.get_ref().send(&NodePacket::Closing(CloseReason::Protocol).encode(), &[]);
                        wrong(&error.to_string())
                    }
                };
            }
        }
    }
}

/// A connected process, until dropped.
struct ConnectedProcess {
    shared: Arc<ShmServerState>,
    peer: PeerProcess,
}

impl ConnectedProcess {
    fn new(shared: &Arc<ShmServerState>, peer: PeerProcess) -> ConnectedProcess {
        shared.peers().push(peer);
        ConnectedProcess { shared: Arc::clone(shared), peer }
    }

    /// Whether this process has too many connections. An unknown process has no limit.
    fn exceeds_process_limit(&self) -> bool {
        let same = self.shared.peers().iter().filter(|peer| **peer == self.peer).count();
        self.peer.pid != 0 && same > CONNECTIONS_PER_PROCESS_MAX
    }
}

impl Drop for ConnectedProcess {
    fn drop(&mut self) {
        let mut peers = self.shared.peers();
        if let Some(at) = peers.iter().position(|peer| *peer == self.peer) {
            peers.swap_remove(at);
        }
    }
}

/// Counts one connection of a kind, until dropped.
struct CountedConnection(Arc<ShmServerState>, fn(&ShmServerState) -> &AtomicUsize);

impl CountedConnection {
    fn take(
        shared: &Arc<ShmServerState>,
        of: fn(&ShmServerState) -> &AtomicUsize,
        most: usize,
    ) -> Option<CountedConnection> {
        let one_more = |count: usize| (count < most).then_some(count + 1);
        of(shared).fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(CountedConnection(Arc::clone(shared), of))
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        (self.1)(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

/// One connection's share of the bounce buffer memory.
struct BounceMemory {
    shared: Arc<ShmServerState>,
    bytes: u64,
}

impl BounceMemory {
    fn take(shared: &Arc<ShmServerState>, bytes: u64) -> Option<BounceMemory> {
        let max = shared.config.bounce_bytes_max;
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= max);
        shared.bounce_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(BounceMemory { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for BounceMemory {
    fn drop(&mut self) {
        self.shared.bounce_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
