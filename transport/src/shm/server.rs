//! The node's end of the path within one host: listens, asks who may come, and gives each connection its tray.
//!
//! Not here: what connections do (`connection.rs`).

use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use kvfleet_proto::accepting::Refused;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::connection::Connection;
use super::lending::{Account, Lending, Stock};
use super::map::{Mapping, memory_file};
use super::packet::{Closing, ToClient, ToNode, Welcome};
use super::seqpacket::{Got, Peer, Seqpacket};
use super::serving::Serving;
use super::{CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX, PACKET_BYTES_MAX, tray_part_bytes};
use crate::{Admission, BlockService, Caller, SharedArena};

/// How long a client may take to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one that is not served may take: it is only listened to so that it hears why.
const REFUSED_TIMEOUT: Duration = Duration::from_millis(200);

/// Those that are not served, at one time. More are dropped without a word.
const REFUSED_MAX: usize = 8;

/// How long connections have to say goodbye when the server closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause after the system could not accept a connection: it has no descriptors left, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen at {path}: {cause}; make the directory writable for this user, or choose another", path = path.display())]
pub struct ShmBindError {
    /// Where.
    pub path: PathBuf,
    /// What the system said.
    pub cause: std::io::Error,
}

/// What a server may give.
#[derive(Clone, Debug)]
pub struct ShmServerConfig {
    /// Where the node serves others (`host:port`), by which clients know it.
    pub address: String,
    /// The largest frame it takes or gives, in bytes.
    pub frame_bytes_max: u32,
    /// Bytes lent at one time over all connections; one may have half of them.
    pub lent_bytes_max: u64,
    /// Memory of all trays, in bytes.
    pub tray_bytes_max: u64,
    /// How long the node keeps a lease that nobody renews.
    pub lease: Duration,
    /// How long a save may stand still, and how long a client may leave what it is sent in its queue.
    pub stall_timeout: Duration,
    /// How long to wait for a client's next packet without sleeping, while such waits are worth it. With one processor, zero.
    pub awake: Duration,
    /// Whether users other than this process's own may come as far as being asked who they are.
    pub serves_others: bool,
}

/// Where a server runs.
#[derive(Clone, Debug)]
pub struct ShmEnds {
    /// Connections and operations: best the thread that answers them.
    pub quick: Handle,
    /// Whether `quick` is one thread of its own, which may move to another processor than its client's.
    pub may_move: bool,
    /// Long copies.
    pub bulk: Handle,
}

/// What is lent now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShmNumbers {
    /// Clients that are connected.
    pub connections: usize,
    /// Loans that are out.
    pub loans: usize,
    /// Their bytes.
    pub lent_bytes: u64,
    /// The oldest of them.
    pub oldest: Option<OldestLoan>,
}

/// A loan that is out longer than all others, and who has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OldestLoan {
    /// For how long.
    pub age: Duration,
    /// User of the process that has it.
    pub uid: u32,
    /// Its number; 0 when it cannot be seen from here.
    pub pid: i32,
}

/// Serves a node's blocks to processes of its host until closed or dropped.
pub struct ShmServer {
    path: PathBuf,
    /// The socket's own number: another server may listen at the path by now.
    inode: u64,
    shared: Arc<Shared>,
    closes: watch::Sender<bool>,
}

impl std::fmt::Debug for ShmServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmServer").field("path", &self.path).finish_non_exhaustive()
    }
}

struct Shared {
    config: ShmServerConfig,
    arena: Option<Arc<dyn SharedArena>>,
    service: Arc<dyn BlockService>,
    ends: ShmEnds,
    account: Arc<Account>,
    tray_bytes: AtomicU64,
    /// Connections that are served, and those that wait to hear that they are not.
    welcomed: AtomicUsize,
    refused: AtomicUsize,
    since: Instant,
    connections: Mutex<Vec<Weak<Lending>>>,
    /// Said once each.
    said_refused: AtomicBool,
    said_full: AtomicBool,
    said_broken: Arc<AtomicBool>,
    /// Those that connected and did not end.
    peers: Mutex<Vec<Peer>>,
}

impl ShmServer {
    /// Listens at `path`, over what a server that ended left there. Clients may map `arena`, if there is one and the service
    /// lets them.
    ///
    /// # Errors
    /// When nothing can listen there.
    pub fn bind(
        path: &Path,
        config: ShmServerConfig,
        arena: Option<Arc<dyn SharedArena>>,
        service: Arc<dyn BlockService>,
        ends: ShmEnds,
    ) -> Result<ShmServer, ShmBindError> {
        let failed = |cause| ShmBindError { path: path.to_owned(), cause };
        let (listener, inode) = listen(path, config.serves_others).map_err(failed)?;
        let shared = Arc::new(Shared {
            account: Account::new(config.lent_bytes_max),
            config,
            arena,
            service,
            tray_bytes: AtomicU64::new(0),
            since: Instant::now(),
            connections: Mutex::default(),
            said_refused: AtomicBool::new(false),
            said_full: AtomicBool::new(false),
            said_broken: Arc::default(),
            peers: Mutex::default(),
            ends,
            welcomed: AtomicUsize::new(0),
            refused: AtomicUsize::new(0),
        });
        let (closes, closed) = watch::channel(false);
        shared.ends.quick.spawn(accept(listener, Arc::clone(&shared), closed));
        Ok(ShmServer { path: path.to_owned(), inode, shared, closes })
    }

    /// What is lent now.
    #[must_use]
    pub fn numbers(&self) -> ShmNumbers {
        let connections = self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let mut numbers = ShmNumbers::default();
        for lending in connections.iter().filter_map(Weak::upgrade) {
            let (loans, bytes, oldest) = lending.numbers();
            numbers.connections += 1;
            numbers.loans += loans;
            numbers.lent_bytes += bytes;
            numbers.oldest = [numbers.oldest, oldest].into_iter().flatten().max_by_key(|oldest| oldest.age);
        }
        numbers
    }

    /// Tells every client to go and takes in no more; returns when all were told, or a second has passed. What they read
    /// stays as it is until they are gone.
    pub async fn close(&self) {
        self.closes.send_replace(true);
        // Each connection keeps a receiver until it has said goodbye.
        if timeout(CLOSE_TIMEOUT, self.closes.closed()).await.is_err() {
            tracing::debug!("clients of this host are slow to hear that the node stops");
        }
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.closes.send_replace(true);
        if std::fs::metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Listens under a name of its own first, so that a client finds either the old socket or one that answers.
fn listen(path: &Path, serves_others: bool) -> std::io::Result<(Seqpacket, u64)> {
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let listen = || {
        let listener = Seqpacket::listen(&fresh)?;
        if serves_others {
            // To connect is to write. Who may is decided by who it is.
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

async fn accept(listener: Seqpacket, shared: Arc<Shared>, mut closes: watch::Receiver<bool>) {
    let listener = match listener.watched() {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "clients of this host cannot be served"),
    };
    let (mut connections, mut refused) = (JoinSet::new(), Refused::default());
    for number in 0_u64.. {
        let socket = tokio::select! {
            accepted = next(&listener, &mut refused) => accepted,
            _ = closes.wait_for(|closes| *closes) => break,
        };
        while connections.try_join_next().is_some() {}
        let Ok(peer) = socket.peer() else { continue };
        let caller = Caller::Local { uid: peer.uid, pid: peer.pid, connection: number };
        let (shared, closes) = (Arc::clone(&shared), closes.clone());
        let (service, may_map) = match shared.service.admit(&caller) {
            Admission::Same => (Arc::clone(&shared.service), false),
            Admission::Scoped { service, maps } => (service, maps),
            Admission::Refused => {
                if let Some(one) = Counted::take(&shared, |shared| &shared.refused, REFUSED_MAX) {
                    connections.spawn(said(async move { one.0.refuse(socket, peer).await }));
                }
                continue;
            }
        };
        // Those that are served, and as many that wait for a welcome. More are not even told: these are no clients that
        // come again after a while.
        if connections.len() < 2 * CONNECTIONS_MAX + REFUSED_MAX {
            let newcomer = Newcomer { present: Present::new(&shared, peer), socket, service, may_map };
            connections.spawn(said(shared.welcome(newcomer, closes)));
        }
    }
    // Each says goodbye by itself, and waits for the end of who reads on.
    connections.detach_all();
}

async fn next(listener: &AsyncFd<Seqpacket>, refused: &mut Refused) -> Seqpacket {
    loop {
        let Ok(mut ready) = listener.readable().await else { return std::future::pending().await };
        match ready.get_inner().accept() {
            Ok(Some(socket)) => return socket,
            Ok(None) => ready.clear_ready(),
            Err(error) => {
                if refused.is_to_be_said() {
                    tracing::warn!(%error, "a client of this host cannot be accepted");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn said(connection: impl Future<Output = std::io::Result<()>>) {
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a client of this host did not get far");
    }
}

/// A client that the service lets in, before its hello.
struct Newcomer {
    present: Present,
    socket: Seqpacket,
    service: Arc<dyn BlockService>,
    may_map: bool,
}

impl Shared {
    async fn welcome(
        self: Arc<Self>,
        newcomer: Newcomer,
        closes: watch::Receiver<bool>,
    ) -> std::io::Result<()> {
        let Newcomer { present, socket, service, may_map } = newcomer;
        let peer = present.peer;
        // Heard before anything is said: a socket that is closed over what was not read takes what it said with it.
        let socket = socket.watched()?;
        let wants_map = timeout(HELLO_TIMEOUT, hello(&socket)).await??;
        let part = tray_part_bytes(self.config.frame_bytes_max);
        let welcomed = Counted::take(&self, |shared| &shared.welcomed, CONNECTIONS_MAX);
        let welcomed = welcomed.filter(|_| !present.is_one_too_many());
        let (Some(_welcomed), Some(_tray_bytes)) = (welcomed, TrayBytes::take(&self, 2 * part)) else {
            return self.full(socket.get_ref());
        };
        let file = memory_file(2 * part)?;
        let tray = Arc::new(Mapping::to_write(&file, 2 * part).map_err(std::io::Error::other)?);
        let arena = self.arena.clone().filter(|_| may_map && wants_map);
        let reader = arena.as_ref().map(|arena| arena.reader()).transpose();
        let reader = reader.inspect_err(|error| tracing::warn!(%error, "clients get copies"));
        let reader = reader.ok().flatten();
        let arena = arena.filter(|_| reader.is_some());
        let welcome = Welcome {
            arena_bytes: arena.as_ref().map_or(0, |arena| arena.len_bytes()),
            tray_in_bytes: part,
            tray_out_bytes: part,
            frame_bytes_max: self.config.frame_bytes_max,
            address: self.config.address.clone(),
        };
        let descriptors: Vec<_> =
            std::iter::once(file.as_fd()).chain(reader.iter().map(|r| r.as_fd())).collect();
        // The queue of a fresh connection is empty.
        socket.get_ref().send(&ToClient::Welcome(welcome).encode(), &descriptors)?;
        tracing::debug!(?peer, maps = arena.is_some(), "a client of this host is connected");
        let stock = Stock {
            tray,
            tray_out_at: part,
            tray_out_bytes: part,
            arena,
            account: Arc::clone(&self.account),
            lent_bytes_max: self.config.lent_bytes_max / 2,
            bulk: self.ends.bulk.clone(),
            peer,
            lease: self.config.lease,
            since: self.since,
        };
        let lending = Lending::new(socket.into_inner(), stock)?;
        self.register(&lending);
        let serving = Serving {
            lending,
            service,
            frame_bytes_max: self.config.frame_bytes_max,
            stall_timeout: self.config.stall_timeout,
            awake: self.config.awake,
            may_move: self.ends.may_move,
            said_broken: Arc::clone(&self.said_broken),
            bulk: self.ends.bulk.clone(),
        };
        Connection::new(serving).serve(closes, self.config.lease).await;
        Ok(())
    }

    fn peers(&self) -> std::sync::MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, lending: &Arc<Lending>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Arc::downgrade(lending));
    }

    async fn refuse(&self, socket: Seqpacket, peer: Peer) -> std::io::Result<()> {
        if !self.said_refused.swap(true, Ordering::Relaxed) {
            let (uid, pid) = (peer.uid, peer.pid);
            tracing::warn!(
                uid,
                pid,
                "a process of this host is not served; to serve it, name its user in shm.peers"
            );
        }
        let socket = socket.watched()?;
        timeout(REFUSED_TIMEOUT, hello(&socket)).await??;
        socket.get_ref().send(&ToClient::Closing(Closing::Refused).encode(), &[]).map(|_| ())
    }

    fn full(&self, socket: &Seqpacket) -> std::io::Result<()> {
        if !self.said_full.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "no more clients of this host are served over shared memory; they use the network. Raise \
                 shm.tray_bytes, or run fewer"
            );
        }
        socket.send(&ToClient::Closing(Closing::Full).encode(), &[]).map(|_| ())
    }
}

async fn hello(socket: &AsyncFd<Seqpacket>) -> std::io::Result<bool> {
    let wrong = |what: &str| Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_owned()));
    loop {
        let mut ready = socket.readable().await?;
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        match ready.get_inner().recv(&mut buffer)? {
            Got::Later => ready.clear_ready(),
            Got::Ended => return wrong("gone before its hello"),
            Got::Packet(len, descriptors) => {
                let packet = ToNode::decode(&buffer[..len]);
                let is_bare = descriptors.is_empty();
                return match packet {
                    Ok(ToNode::Hello { maps }) if is_bare => Ok(maps),
                    Ok(_) => wrong("no hello"),
                    Err(error) => {
                        let _ = socket.get_ref().send(&ToClient::Closing(Closing::Protocol).encode(), &[]);
                        wrong(&error.to_string())
                    }
                };
            }
        }
    }
}

/// A process that is connected, until dropped.
struct Present {
    shared: Arc<Shared>,
    peer: Peer,
}

impl Present {
    fn new(shared: &Arc<Shared>, peer: Peer) -> Present {
        shared.peers().push(peer);
        Present { shared: Arc::clone(shared), peer }
    }

    /// Whether this process has more connections than one may. Which process it is may not be known.
    fn is_one_too_many(&self) -> bool {
        let same = self.shared.peers().iter().filter(|peer| **peer == self.peer).count();
        self.peer.pid != 0 && same > CONNECTIONS_OF_ONE_MAX
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut peers = self.shared.peers();
        if let Some(at) = peers.iter().position(|peer| *peer == self.peer) {
            peers.swap_remove(at);
        }
    }
}

/// One of those that a server counts, until dropped.
struct Counted(Arc<Shared>, fn(&Shared) -> &AtomicUsize);

impl Counted {
    fn take(shared: &Arc<Shared>, of: fn(&Shared) -> &AtomicUsize, most: usize) -> Option<Counted> {
        let one_more = |count: usize| (count < most).then_some(count + 1);
        of(shared).fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok()?;
        Some(Counted(Arc::clone(shared), of))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.1)(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory of one connection's tray on the account of all.
struct TrayBytes {
    shared: Arc<Shared>,
    bytes: u64,
}

impl TrayBytes {
    fn take(shared: &Arc<Shared>, bytes: u64) -> Option<TrayBytes> {
        let max = shared.config.tray_bytes_max;
        let fits = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= max);
        shared.tray_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(TrayBytes { shared: Arc::clone(shared), bytes })
    }
}

impl Drop for TrayBytes {
    fn drop(&mut self) {
        self.shared.tray_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
