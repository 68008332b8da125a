//! The client's end of one upgraded connection: two queue pairs, and the memory that the node lets
//! it reach.
//!
//! One queue pair reaches the node's arena, if the node allows that. The other reaches the
//! connection's bounce buffer. At the node each is in its own protection domain. Dropping a link
//! destroys both, and only then releases the memory that they may still write. Not here: the
//! messages of an operation (`fetch.rs`, `save.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::lease_grant::{GrantClient, GrantMemory, MemoryExtent};
use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use kvfleet_transport::upgrade::{PooledConnection, TcpPath};
use kvfleet_transport::{MissReason, PathError};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::fetch::{FetchStop, GrantTerms};
use super::memory::{ALIGN_BYTES, PooledBuffer, RdmaBufferPool, RdmaMemory};
use super::messages::{self, MalformedMessage, RemoteWindow, U24_MAX, outcome};
use super::rail::{
    Access, Direction, Gid, MemoryRegion, ProtectionDomain, QueuePair, QueuePairAddress, Role,
};
use super::rail_match::RAILS_MAX;
use super::rail_pair::SuspectFlag;
use super::transfers::{PendingTransfer, QpHandle, RemoteAddress, TransferError};
use super::{Rdma, RdmaError};

/// Bytes of the epoch word.
pub(super) const EPOCH_WORD_BYTES: u32 = 8;

/// Memory for epoch words, one cache line each: more than the links of any process.
const EPOCH_WORDS_BYTES: u64 = 256 << 10;

/// Bytes that are read before a link counts as working: more than the largest packet, so that a
/// network that loses large packets is detected.
pub(super) const PROBE_BYTES: u32 = 8 << 10;

/// Memory for probes. A few links are made at once, and a dead one keeps its buffer until the card
/// gives up.
const PROBE_BUFFERS_BYTES: u64 = 32 * PROBE_BYTES as u64;

/// Registered memory of a dialer, which its cards read and write.
pub(super) struct LocalRail {
    pub(super) rdma: Arc<Rdma>,
    domain: Arc<dyn ProtectionDomain>,
    registered: Box<dyn MemoryRegion>,
    /// For frames that callers keep in the buffer that received them.
    retained: Arc<RdmaBufferPool>,
    /// For frames in flight that are copied on; these buffers always return.
    pub(super) transient: Arc<RdmaBufferPool>,
    /// For epoch words, which live as long as their links and would fragment the other pools.
    epoch_words: Arc<RdmaBufferPool>,
    /// For probes of links: a probe that waits behind other fetches would wrongly report that no
    /// packets pass.
    probe_buffers: Arc<RdmaBufferPool>,
}

impl LocalRail {
    /// One for each rail, all with the same memory, so that every rail can use every buffer. Skips
    /// rails that refuse the memory.
    ///
    /// # Errors
    /// If all of them refuse.
    pub(super) fn register_all(rails: &[Arc<Rdma>]) -> Result<Vec<Arc<LocalRail>>, RdmaError> {
        let Some(first) = rails.first() else {
            return Err(RdmaError::NoDevice { there: "none".to_owned() });
        };
        let local_bytes = first.config.local_bytes;
        let half = (local_bytes as u64 / 2).next_multiple_of(ALIGN_BYTES);
        let bytes = usize::try_from(2 * half + EPOCH_WORDS_BYTES + PROBE_BUFFERS_BYTES).unwrap_or(usize::MAX);
        let failed = |cause| RdmaError::register(first.device(), bytes as u64, cause);
        let memory = Arc::new(RdmaMemory::zeroed(bytes).map_err(failed)?);
        let (kept, passing) =
            (RdmaBufferPool::new(&memory, 0..half), RdmaBufferPool::new(&memory, half..2 * half));
        let boards_end = 2 * half + EPOCH_WORDS_BYTES;
        let boards = RdmaBufferPool::new(&memory, 2 * half..boards_end);
        let trials = RdmaBufferPool::new(&memory, boards_end..boards_end + PROBE_BUFFERS_BYTES);
        let local = |rdma: &Arc<Rdma>| {
            let domain = rdma.domain()?;
            let registered = rdma.register(domain.as_ref(), &memory, Access::Local)?;
            let [kept, passing, boards, trials] = [&kept, &passing, &boards, &trials].map(Arc::clone);
            Ok(Arc::new(LocalRail {
                rdma: Arc::clone(rdma),
                domain,
                registered,
                retained: kept,
                transient: passing,
                epoch_words: boards,
                probe_buffers: trials,
            }))
        };
        super::keep_usable(rails.iter().map(local))
    }

    #[cfg(test)]
    pub(super) fn new(rdma: &Arc<Rdma>) -> Result<Arc<LocalRail>, RdmaError> {
        LocalRail::register_all(std::slice::from_ref(rdma)).map(|mut local| local.remove(0))
    }

    /// The largest frame that is read or written over RDMA; larger ones use the connection.
    pub(super) fn frame_bytes_max(&self) -> u32 {
        // Half of it, so that two frames fit despite fragmentation.
        let most = (self.transient.len_bytes() / 2).min(FRAME_BYTES_MAX as u64);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// A buffer for a frame, and whether the frame may stay there.
    pub(super) fn take_buffer(&self, len: u32) -> Option<(PooledBuffer, bool)> {
        let kept = self.retained.take(len).map(|place| (place, true));
        kept.or_else(|| Some((self.transient.take(len)?, false)))
    }
}

/// A queue pair that is not connected yet. If dropped, the teardown thread destroys it, because
/// that may take long.
struct UnconnectedQueuePair {
    local: Arc<LocalRail>,
    qp: Option<Arc<QpHandle>>,
    first_psn: u32,
}

impl Drop for UnconnectedQueuePair {
    fn drop(&mut self) {
        if let Some(line) = self.qp.take() {
            self.local.rdma.transfers.tear_down(vec![line], ());
        }
    }
}

impl UnconnectedQueuePair {
    fn new(
        local: &Arc<LocalRail>,
        of_peer: &Arc<Semaphore>,
        packet: u32,
    ) -> std::io::Result<UnconnectedQueuePair> {
        let line =
            local.rdma.transfers.register_queue_pair(local.domain.create_queue_pair(Access::Local)?, of_peer);
        Ok(UnconnectedQueuePair { local: Arc::clone(local), qp: Some(line), first_psn: packet & U24_MAX })
    }

    fn queue(&self) -> std::io::Result<&dyn QueuePair> {
        self.qp.as_deref().map(QpHandle::queue).ok_or(std::io::ErrorKind::NotConnected.into())
    }

    fn address(&self) -> std::io::Result<data::QueuePairInfo> {
        let number = self.queue()?.number();
        Ok(messages::address_to_pb(self.local.rdma.transfers.rail().port(), number, self.first_psn))
    }

    fn connect(mut self, peer: &QueuePairAddress) -> std::io::Result<Arc<QpHandle>> {
        self.queue()?.connect(Role::Requester, self.first_psn, peer)?;
        self.qp.take().ok_or(std::io::ErrorKind::NotConnected.into())
    }
}

/// The node's reply to an attach request.
struct AttachReply {
    bounce_address: QueuePairAddress,
    arena_address: Option<QueuePairAddress>,
    bounce_window: RemoteWindow,
    arena_window: Option<RemoteWindow>,
    epoch_word_address: u64,
}

/// An upgraded connection.
pub(super) struct RdmaLink {
    pub(super) control: PooledConnection,
    pub(super) grants: GrantClient,
    /// Whether an operation used it before: then the node may have closed it meanwhile.
    pub(super) was_used: bool,
    channel: RdmaChannel,
}

/// The part of a link that transfers need.
pub(super) struct RdmaChannel {
    pub(super) local: Arc<LocalRail>,
    bounce_qp: Arc<QpHandle>,
    arena_qp: Option<Arc<QpHandle>>,
    pub(super) bounce_window: RemoteWindow,
    arena_window: Option<RemoteWindow>,
    epoch_word_address: u64,
    /// Buffer for the epoch word; `None` during a read.
    epoch_buffer: Mutex<Option<PooledBuffer>>,
    /// Set if this is dropped with transfers in flight.
    suspect: Option<Arc<SuspectFlag>>,
}

impl Drop for RdmaChannel {
    fn drop(&mut self) {
        let under_way =
            |line: &&Arc<QpHandle>| !line.is_broken() && self.local.rdma.transfers.has_in_flight(line);
        if let Some(doubt) = &self.suspect
            && [Some(&self.bounce_qp), self.arena_qp.as_ref()]
                .into_iter()
                .flatten()
                .any(|line| under_way(&line))
        {
            doubt.set();
        }
        let lines = [Some(Arc::clone(&self.bounce_qp)), self.arena_qp.take()];
        let lines = lines.into_iter().flatten().collect();
        self.local.rdma.transfers.tear_down(lines, Arc::clone(&self.local));
    }
}

/// Result of a request for a link.
pub(super) enum AttachOutcome {
    /// The link exists and passed its probe.
    Attached(Box<RdmaLink>),
    /// The node gives no link, for this reason; operations use the TCP path below.
    Unavailable(String),
    /// The link was made, but packets do not pass, for this reason.
    Unreachable(String),
}

impl RdmaLink {
    /// The rails that a node offers for RDMA (empty if it does not list them), or why it offers
    /// none. Uses no queue pairs or memory.
    pub(super) async fn query_rails(tcp: &TcpPath) -> Result<Result<Vec<Gid>, String>, PathError> {
        let attach = data::Attach { version: messages::VERSION, ..data::Attach::default() };
        let op = Some(data::data_request::Op::Attach(attach));
        let request = data::DataRequest { op, traceparent: String::new() };
        let (answer, control) = tcp.ask::<data::AttachReply>(&request).await?;
        tcp.give_back(control);
        if answer.outcome != outcome::OFFERED {
            return Ok(Err(format!("it offers no RDMA: {}", answer.why)));
        }
        let rails =
            answer.rails.iter().take(RAILS_MAX).map(|end| messages::address_from_pb(end).map(|end| end.gid));
        rails.collect::<Result<_, _>>().map(Ok).map_err(|error| protocol_error(tcp, &error))
    }

    /// Upgrades a connection over this local and remote rail, and probes it. Its transfers share
    /// the limit with other links to the peer.
    ///
    /// # Errors
    /// If the TCP path fails, or the node sends a malformed message.
    pub(super) async fn attach(
        tcp: &TcpPath,
        local: &Arc<LocalRail>,
        rail: u32,
        of_peer: &Arc<Semaphore>,
    ) -> Result<AttachOutcome, PathError> {
        let QueuePairs { bounce: tray, arena, addresses: ends } =
            match create_queue_pairs(local, of_peer).await {
                Ok(made) => made,
                Err(cause) => return Ok(AttachOutcome::Unavailable(local_error("make queue pairs", &cause))),
            };
        let attach = data::Attach {
            version: messages::VERSION,
            bounce_buffer: Some(ends.0),
            arena: Some(ends.1),
            frame_bytes_max: local.frame_bytes_max(),
            rail,
        };
        let op = Some(data::data_request::Op::Attach(attach));
        let request = data::DataRequest { op, traceparent: String::new() };
        let (answer, mut control) = tcp.ask::<data::AttachReply>(&request).await?;
        let none = match answer.outcome {
            outcome::BUSY => {
                "all its RDMA connections are in use; raise its rdma.links_max or run fewer clients"
            }
            outcome::REFUSED => answer.why.as_str(),
            _ => "",
        };
        if !none.is_empty() {
            tcp.give_back(control);
            return Ok(AttachOutcome::Unavailable(format!("it offers no RDMA: {none}")));
        }
        let welcome = parse_reply(&answer).map_err(|error| protocol_error(tcp, &error))?;
        // It no longer belongs to the TCP path and no longer holds a slot there.
        control.release_slot();
        let ends = (welcome.bounce_address, welcome.arena_address);
        let joined = tokio::task::spawn_blocking(move || {
            let arena = ends.1.map(|end| arena.connect(&end)).transpose()?;
            Ok::<_, std::io::Error>((tray.connect(&ends.0)?, arena))
        });
        let joined = joined.await.map_err(std::io::Error::other).and_then(|joined| joined);
        let (tray_line, arena_line) = match joined {
            Ok(lines) => lines,
            Err(cause) => return Ok(AttachOutcome::Unavailable(local_error("join queue pairs", &cause))),
        };
        let peer = welcome.bounce_address.gid;
        let link = RdmaLink::new(local, control, welcome, tray_line, arena_line).await;
        Ok(link.probed(peer).await)
    }

    async fn new(
        local: &Arc<LocalRail>,
        control: PooledConnection,
        welcome: AttachReply,
        tray_line: Arc<QpHandle>,
        arena_line: Option<Arc<QpHandle>>,
    ) -> RdmaLink {
        let board = local.epoch_words.wait(EPOCH_WORD_BYTES).await;
        let reach = RdmaChannel {
            local: Arc::clone(local),
            bounce_qp: tray_line,
            arena_qp: arena_line,
            bounce_window: welcome.bounce_window,
            arena_window: welcome.arena_window,
            epoch_word_address: welcome.epoch_word_address,
            epoch_buffer: Mutex::new(board),
            suspect: None,
        };
        let extent = MemoryExtent {
            arena_bytes: welcome.arena_window.map_or(0, |arena| arena.bytes),
            bounce_buffer_bytes: welcome.bounce_window.bytes,
            frame_bytes_max: local.frame_bytes_max(),
        };
        RdmaLink { control, grants: GrantClient::new(extent), was_used: false, channel: reach }
    }

    /// Checks that packets pass. Connected queue pairs at both ends do not prove that the network
    /// works.
    async fn probed(self, peer: Gid) -> AttachOutcome {
        match self.channel.probe().await {
            Ok(()) => AttachOutcome::Attached(Box::new(self)),
            Err(error) => {
                let port = self.channel.local.rdma.transfers.rail().port();
                AttachOutcome::Unreachable(format!(
                    "RDMA packets do not pass between {:?} and {peer:?} ({error}): check that both devices \
                     are on one network, its MTU, and that firewalls let UDP port 4791 pass",
                    port.gid
                ))
            }
        }
    }

    /// Control connection, grants, and channel, for separate use.
    pub(super) fn split(&mut self) -> (&mut PooledConnection, &mut GrantClient, &mut RdmaChannel) {
        (&mut self.control, &mut self.grants, &mut self.channel)
    }

    /// The part that transfers need.
    pub(super) fn channel(&self) -> &RdmaChannel {
        &self.channel
    }

    /// Whether a transfer failed.
    pub(super) fn is_broken(&self) -> bool {
        self.queue_pairs().any(|line| line.is_broken())
    }

    fn queue_pairs(&self) -> impl Iterator<Item = &Arc<QpHandle>> {
        [Some(&self.channel.bounce_qp), self.channel.arena_qp.as_ref()].into_iter().flatten()
    }

    /// Whether a transfer is in flight.
    pub(super) fn has_in_flight(&self) -> bool {
        self.queue_pairs().any(|line| self.channel.local.rdma.transfers.has_in_flight(line))
    }

    /// Returns once all transfers have ended, if no others are started.
    pub(super) async fn wait_idle(&self) {
        for line in self.queue_pairs() {
            self.channel.local.rdma.transfers.wait_idle(line).await;
        }
    }

    /// Has `doubt` set if the link is dropped with transfers in flight.
    pub(super) fn set_suspect_flag(&mut self, doubt: &Arc<SuspectFlag>) {
        self.channel.suspect = Some(Arc::clone(doubt));
    }

    /// Prepares the link for the next operation; returns whether it is usable. Releases empty
    /// memory.
    pub(super) fn prepare_reuse(&mut self) -> bool {
        self.was_used = true;
        !self.is_broken() && self.channel.lock_epoch_buffer().is_some() && self.control.release_buffers()
    }
}

/// Two unconnected queue pairs, and their addresses for the node.
struct QueuePairs {
    bounce: UnconnectedQueuePair,
    arena: UnconnectedQueuePair,
    addresses: (data::QueuePairInfo, data::QueuePairInfo),
}

/// Creates both queue pairs on a blocking thread, because these are slow system calls.
async fn create_queue_pairs(local: &Arc<LocalRail>, of_peer: &Arc<Semaphore>) -> std::io::Result<QueuePairs> {
    let (ours, of_peer) = (Arc::clone(local), Arc::clone(of_peer));
    let [first, second]: [u32; 2] = super::random_psns();
    let made = tokio::task::spawn_blocking(move || {
        let (tray, arena) = (
            UnconnectedQueuePair::new(&ours, &of_peer, first)?,
            UnconnectedQueuePair::new(&ours, &of_peer, second)?,
        );
        let ends = (tray.address()?, arena.address()?);
        Ok::<_, std::io::Error>(QueuePairs { bounce: tray, arena, addresses: ends })
    });
    made.await.map_err(std::io::Error::other)?
}

/// The node sent a malformed message.
fn protocol_error(tcp: &TcpPath, error: &MalformedMessage) -> PathError {
    let what = format!("a malformed answer: {error}");
    PathError::Protocol { peer: tcp.peer().to_owned(), what }
}

/// Describes a failure of this process's device.
fn local_error(what: &str, cause: &std::io::Error) -> String {
    format!(
        "this process's RDMA device cannot {what}: {cause}; it may be short of queue pairs or of memory to \
         lock (ulimit -l)"
    )
}

/// Parses and validates the node's reply.
fn parse_reply(answer: &data::AttachReply) -> Result<AttachReply, MalformedMessage> {
    if answer.outcome != outcome::ATTACHED {
        return Err(MalformedMessage::new("an outcome", answer.outcome));
    }
    let tray_end =
        answer.bounce_buffer.as_ref().ok_or(MalformedMessage::new("the number of trays", 0_u32))?;
    let tray = answer.bounce_window.as_ref().ok_or(MalformedMessage::new("the number of windows", 0_u32))?;
    let arena_end = answer.arena.as_ref().map(messages::address_from_pb).transpose()?;
    let arena = answer.arena_window.as_ref().map(messages::window_from_pb).transpose()?;
    Ok(AttachReply {
        bounce_address: messages::address_from_pb(tray_end)?,
        bounce_window: messages::window_from_pb(tray)?,
        arena_window: arena.filter(|_| arena_end.is_some()),
        arena_address: arena_end,
        epoch_word_address: answer.epoch_word_address,
    })
}

impl RdmaChannel {
    /// Starts to read `at` bytes behind the start of one of the node's memories.
    pub(super) async fn read(
        &self,
        of: GrantMemory,
        at: u64,
        place: PooledBuffer,
    ) -> Result<PendingTransfer, TransferError> {
        let (line, window) = match of {
            GrantMemory::Arena => (self.arena_qp.as_ref(), self.arena_window),
            GrantMemory::BounceBuffer => (Some(&self.bounce_qp), Some(self.bounce_window)),
        };
        let (line, window) = line.zip(window).ok_or(TransferError::Broken)?;
        let remote = RemoteAddress { address: window.address.wrapping_add(at), key: window.key };
        self.submit(line, Direction::Read, place, remote).await
    }

    /// Starts to write a buffer into the bounce buffer.
    pub(super) async fn write(&self, at: u64, place: PooledBuffer) -> Result<PendingTransfer, TransferError> {
        let remote = RemoteAddress {
            address: self.bounce_window.address.wrapping_add(at),
            key: self.bounce_window.key,
        };
        self.submit(&self.bounce_qp, Direction::Write, place, remote).await
    }

    /// Reads the epoch word, and some bytes of each memory, over each queue pair.
    async fn probe(&self) -> Result<(), TransferError> {
        self.read_epoch_word().await?;
        let windows =
            [(GrantMemory::BounceBuffer, Some(self.bounce_window)), (GrantMemory::Arena, self.arena_window)];
        for (of, window) in windows {
            let bytes = window.map_or(0, |window| window.bytes).min(PROBE_BYTES.into());
            let Ok(bytes @ 1..) = u32::try_from(bytes) else { continue };
            let place = self.local.probe_buffers.wait(bytes).await.ok_or(TransferError::Broken)?;
            self.read(of, 0, place).await?.wait().await?;
        }
        Ok(())
    }

    /// The epoch word: the epoch of the node's grants, or `REVOKED`. Earlier writes have reached
    /// the node's memory when this returns, because a read does not pass writes of its queue pair.
    pub(super) async fn read_epoch_word(&self) -> Result<u64, TransferError> {
        let place = self.lock_epoch_buffer().take().ok_or(TransferError::Broken)?;
        let remote = RemoteAddress { address: self.epoch_word_address, key: self.bounce_window.key };
        let place = self.submit(&self.bounce_qp, Direction::Read, place, remote).await?.wait().await?;
        let bytes = place.bytes().first_chunk::<8>().copied().unwrap_or_default();
        *self.lock_epoch_buffer() = Some(place);
        Ok(u64::from_le_bytes(bytes))
    }

    fn lock_epoch_buffer(&self) -> MutexGuard<'_, Option<PooledBuffer>> {
        self.epoch_buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Confirms that the bytes read before this call were read under a valid grant.
    pub(super) async fn validate(&self, terms: &GrantTerms) -> Result<(), FetchStop> {
        let board = self.read_epoch_word().await?;
        if board == messages::REVOKED {
            return Err(FetchStop::Transfer(TransferError::Broken));
        }
        if board != terms.epoch.0 {
            return Err(FetchStop::Reason(MissReason::StaleEpoch));
        }
        if Instant::now() >= terms.lease_end {
            return Err(FetchStop::Reason(MissReason::TooLate));
        }
        Ok(())
    }

    /// Whether it reaches the same arena as another link.
    pub(super) fn shares_arena(&self, other: &RdmaChannel) -> bool {
        let extent = |reach: &RdmaChannel| reach.arena_window.map(|arena| (arena.address, arena.bytes));
        self.arena_qp.is_some() && self.arena_window.is_some() && extent(self) == extent(other)
    }

    #[cfg(test)]
    pub(super) fn arena_key(&self) -> Option<u32> {
        self.arena_window.map(|arena| arena.key)
    }

    /// Writes with the arena's queue pair to the address of the bounce buffer.
    #[cfg(test)]
    pub(super) async fn write_arena(&self, place: PooledBuffer) -> Result<PendingTransfer, TransferError> {
        let remote = RemoteAddress { address: self.bounce_window.address, key: self.bounce_window.key };
        let line = self.arena_qp.as_ref().ok_or(TransferError::Broken)?;
        self.submit(line, Direction::Write, place, remote).await
    }

    async fn submit(
        &self,
        line: &Arc<QpHandle>,
        direction: Direction,
        place: PooledBuffer,
        remote: RemoteAddress,
    ) -> Result<PendingTransfer, TransferError> {
        let key = self.local.registered.local_key();
        self.local.rdma.transfers.submit(line, direction, place, key, remote).await
    }
}
