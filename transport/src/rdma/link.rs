//! The client's end of one upgraded connection: two queue pairs, and what the node lets it reach.
//!
//! One queue pair reaches the node's arena, where the node allows that, the other the connection's tray; each is in a
//! protection domain of its own at the node. Dropped, a link ends both, and only then is given back what they may still write.
//! Not here: what is said over the connection in an operation (`fetch.rs`, `save.rs`).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::id::Class;
use kv_core::lend::{Borrower, Extent, Place as LentIn};
use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::fetch::{Stop, Terms};
use super::flights::{Arriving, Line, Remote, TransferError};
use super::lane::Doubt;
use super::memory::{ALIGN_BYTES, Memory, Place, Pool};
use super::pairs::RAILS_MAX;
use super::rail::{Access, Direction, Domain, End, Gid, Queue, RegisterMr, Role};
use super::words::{self, Nonsense, PACKET_MAX, Window, outcome};
use super::{Rdma, RdmaError};
use crate::ask::Asks;
use crate::stream::encode;
use crate::tcp::{Occupied, TcpPath};
use crate::{MissReason, PathError};

/// Bytes of the board that are read.
pub(super) const BOARD_BYTES: u32 = 8;

/// Memory for boards, each of which takes a cache line: as many as a process has links, generously.
const BOARDS_BYTES: u64 = 256 << 10;

/// Bytes that are read before a link counts: more than the largest packet, so that networks show which of them lose such.
pub(super) const TRIAL_BYTES: u32 = 8 << 10;

/// Memory for trials: links are made a few at once, and one that is dead keeps its place until the card gives up.
const TRIALS_BYTES: u64 = 32 * TRIAL_BYTES as u64;

/// Registered memory of a dialer, into which its cards read and from which they write.
pub(super) struct Local {
    pub(super) rdma: Arc<Rdma>,
    domain: Arc<dyn Domain>,
    registered: Box<dyn RegisterMr>,
    /// For frames that callers keep where they were read.
    kept: Arc<Pool>,
    /// For what is under way, and is copied on: always comes back.
    pub(super) passing: Arc<Pool>,
    /// For boards, which stay as long as their links and would lie between others.
    boards: Arc<Pool>,
    /// For trials of links: one that waited behind the fetches of others would say that no packets pass.
    trials: Arc<Pool>,
}

impl Local {
    /// One for each rail, all with the same memory: a place is of use on each. Rails that refuse it are left out.
    ///
    /// # Errors
    /// When all of them refuse.
    pub(super) fn of(rails: &[Arc<Rdma>]) -> Result<Vec<Arc<Local>>, RdmaError> {
        let Some(first) = rails.first() else {
            return Err(RdmaError::NoDevice { there: "none".to_owned() });
        };
        let local_bytes = first.config.local_bytes;
        let half = (local_bytes as u64 / 2).next_multiple_of(ALIGN_BYTES);
        let bytes = usize::try_from(2 * half + BOARDS_BYTES + TRIALS_BYTES).unwrap_or(usize::MAX);
        let failed = |cause| RdmaError::register(first.device(), bytes as u64, cause);
        let memory = Arc::new(Memory::zeroed(bytes).map_err(failed)?);
        let (kept, passing) = (Pool::new(&memory, 0..half), Pool::new(&memory, half..2 * half));
        let boards_end = 2 * half + BOARDS_BYTES;
        let boards = Pool::new(&memory, 2 * half..boards_end);
        let trials = Pool::new(&memory, boards_end..boards_end + TRIALS_BYTES);
        let local = |rdma: &Arc<Rdma>| {
            let domain = rdma.domain()?;
            let registered = rdma.register(domain.as_ref(), &memory, Access::Local)?;
            let [kept, passing, boards, trials] = [&kept, &passing, &boards, &trials].map(Arc::clone);
            Ok(Arc::new(Local { rdma: Arc::clone(rdma), domain, registered, kept, passing, boards, trials }))
        };
        super::those_that_work(rails.iter().map(local))
    }

    #[cfg(test)]
    pub(super) fn new(rdma: &Arc<Rdma>) -> Result<Arc<Local>, RdmaError> {
        Local::of(std::slice::from_ref(rdma)).map(|mut local| local.remove(0))
    }

    /// The largest frame that is read or written; larger ones come over the connection.
    pub(super) fn frame_bytes_max(&self) -> u32 {
        // Half of it, so that two fit whatever was taken before.
        let most = (self.passing.len_bytes() / 2).min(FRAME_BYTES_MAX as u64);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// A place for a frame, and whether it may stay there.
    pub(super) fn take(&self, len: u32) -> Option<(Place, bool)> {
        let kept = self.kept.take(len).map(|place| (place, true));
        kept.or_else(|| Some((self.passing.take(len)?, false)))
    }
}

/// A queue pair that waits for its peer. Dropped before, it is ended where that may take its time.
struct Asking {
    local: Arc<Local>,
    line: Option<Arc<Line>>,
    packet: u32,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(line) = self.line.take() {
            self.local.rdma.flights.end(vec![line], ());
        }
    }
}

impl Asking {
    fn new(local: &Arc<Local>, of_peer: &Arc<Semaphore>, packet: u32) -> std::io::Result<Asking> {
        let line = local.rdma.flights.line(local.domain.queue(Access::Local)?, of_peer);
        Ok(Asking { local: Arc::clone(local), line: Some(line), packet: packet & PACKET_MAX })
    }

    fn queue(&self) -> std::io::Result<&dyn Queue> {
        self.line.as_deref().map(Line::queue).ok_or(std::io::ErrorKind::NotConnected.into())
    }

    fn end(&self) -> std::io::Result<data::QueueEnd> {
        let number = self.queue()?.number();
        Ok(words::end_to_pb(self.local.rdma.flights.rail().port(), number, self.packet))
    }

    fn join(mut self, peer: &End) -> std::io::Result<Arc<Line>> {
        self.queue()?.connect(Role::Asks, self.packet, peer)?;
        self.line.take().ok_or(std::io::ErrorKind::NotConnected.into())
    }
}

/// What a node said when it was attached to.
struct Welcome {
    tray_end: End,
    arena_end: Option<End>,
    tray: Window,
    arena: Option<Window>,
    board_address: u64,
}

/// An upgraded connection.
pub(super) struct Link {
    pub(super) control: Occupied,
    pub(super) borrower: Borrower,
    /// Whether an operation used it before: then the node may have closed it since.
    pub(super) is_used: bool,
    reach: Reach,
}

/// What of a link transfers need.
pub(super) struct Reach {
    pub(super) local: Arc<Local>,
    tray_line: Arc<Line>,
    arena_line: Option<Arc<Line>>,
    pub(super) tray: Window,
    arena: Option<Window>,
    board_address: u64,
    /// Where the board is read to, when it is not being read.
    board: Mutex<Option<Place>>,
    /// Told when it goes with transfers under way.
    doubt: Option<Arc<Doubt>>,
}

impl Drop for Reach {
    fn drop(&mut self) {
        let under_way = |line: &&Arc<Line>| !line.is_broken() && self.local.rdma.flights.is_under_way(line);
        if let Some(doubt) = &self.doubt
            && [Some(&self.tray_line), self.arena_line.as_ref()]
                .into_iter()
                .flatten()
                .any(|line| under_way(&line))
        {
            doubt.cast();
        }
        let lines = [Some(Arc::clone(&self.tray_line)), self.arena_line.take()];
        let lines = lines.into_iter().flatten().collect();
        self.local.rdma.flights.end(lines, Arc::clone(&self.local));
    }
}

/// What became of asking for a link.
pub(super) enum Asked {
    /// It is there, and was tried.
    Made(Box<Link>),
    /// There is none, for this reason; operations go over the path below.
    None(String),
    /// It was made, and nothing passes over it.
    Dead(String),
}

impl Link {
    /// By which rails a node offers RDMA, none where it does not say; or why it does not. Costs no queue pairs, nor memory.
    pub(super) async fn offered(tcp: &TcpPath) -> Result<Result<Vec<Gid>, String>, PathError> {
        let attach = data::Attach { version: words::VERSION, ..data::Attach::default() };
        let op = Some(data::data_request::Op::Attach(attach));
        let request = encode(&data::DataRequest { op, traceparent: String::new() })?;
        let (answer, control) = tcp.pool.ask::<data::Attached>(Class::Fetch, request, None).await?;
        tcp.over(control);
        if answer.outcome != outcome::OFFERED {
            return Ok(Err(format!("it offers no RDMA: {}", answer.why)));
        }
        let rails = answer.rails.iter().take(RAILS_MAX).map(|end| words::end_from_pb(end).map(|end| end.gid));
        rails.collect::<Result<_, _>>().map(Ok).map_err(|error| senseless(tcp, &error))
    }

    /// Upgrades a connection over this rail of ours and that of the node, and reads something over it. What it has under way
    /// counts with that of other links to the peer.
    ///
    /// # Errors
    /// When the path below fails, or the node talks nonsense.
    pub(super) async fn attach(
        tcp: &TcpPath,
        (local, rail): (&Arc<Local>, u32),
        of_peer: &Arc<Semaphore>,
    ) -> Result<Asked, PathError> {
        let Pair { tray, arena, ends } = match asking(local, of_peer).await {
            Ok(made) => made,
            Err(cause) => return Ok(Asked::None(ours("make queue pairs", &cause))),
        };
        let attach = data::Attach {
            version: words::VERSION,
            tray: Some(ends.0),
            arena: Some(ends.1),
            frame_bytes_max: local.frame_bytes_max(),
            rail,
        };
        let op = Some(data::data_request::Op::Attach(attach));
        let request = encode(&data::DataRequest { op, traceparent: String::new() })?;
        let (answer, mut control) = tcp.pool.ask::<data::Attached>(Class::Fetch, request, None).await?;
        let none = match answer.outcome {
            outcome::BUSY => {
                "as many connections as it allows have it, raise its rdma.links_max or run fewer clients"
            }
            outcome::REFUSED => answer.why.as_str(),
            _ => "",
        };
        if !none.is_empty() {
            tcp.over(control);
            return Ok(Asked::None(format!("it offers no RDMA: {none}")));
        }
        let welcome = welcome(&answer).map_err(|error| senseless(tcp, &error))?;
        // It is no connection of the path below any more, nor waits anybody for its place there.
        control.upgraded();
        let ends = (welcome.tray_end, welcome.arena_end);
        let joined = tokio::task::spawn_blocking(move || {
            let arena = ends.1.map(|end| arena.join(&end)).transpose()?;
            Ok::<_, std::io::Error>((tray.join(&ends.0)?, arena))
        });
        let joined = joined.await.map_err(std::io::Error::other).and_then(|joined| joined);
        let (tray_line, arena_line) = match joined {
            Ok(lines) => lines,
            Err(cause) => return Ok(Asked::None(ours("join queue pairs", &cause))),
        };
        let peer = welcome.tray_end.gid;
        let link = Link::of(local, control, welcome, (tray_line, arena_line)).await;
        Ok(link.tried(peer).await)
    }

    async fn of(
        local: &Arc<Local>,
        control: Occupied,
        welcome: Welcome,
        (tray_line, arena_line): (Arc<Line>, Option<Arc<Line>>),
    ) -> Link {
        let board = local.boards.wait(BOARD_BYTES).await;
        let reach = Reach {
            local: Arc::clone(local),
            tray_line,
            arena_line,
            tray: welcome.tray,
            arena: welcome.arena,
            board_address: welcome.board_address,
            board: Mutex::new(board),
            doubt: None,
        };
        let extent = Extent {
            arena_bytes: welcome.arena.map_or(0, |arena| arena.bytes),
            tray_bytes: welcome.tray.bytes,
            frame_bytes_max: local.frame_bytes_max(),
        };
        Link { control, borrower: Borrower::new(extent), is_used: false, reach }
    }

    /// Whether packets pass: that both ends have their queue pairs joined says nothing of what is between.
    async fn tried(self, peer: Gid) -> Asked {
        match self.reach.try_all().await {
            Ok(()) => Asked::Made(Box::new(self)),
            Err(error) => {
                let port = self.reach.local.rdma.flights.rail().port();
                Asked::Dead(format!(
                    "RDMA packets do not pass between {:?} and {peer:?} ({error}): check that both devices are of one network, \
                     its MTU, and that firewalls let UDP port 4791 pass",
                    port.gid
                ))
            }
        }
    }

    /// Both halves: words and transfers.
    pub(super) fn parts(&mut self) -> (&mut Occupied, &mut Borrower, &mut Reach) {
        (&mut self.control, &mut self.borrower, &mut self.reach)
    }

    /// What transfers need.
    pub(super) fn reach(&self) -> &Reach {
        &self.reach
    }

    /// Whether a transfer failed.
    pub(super) fn is_broken(&self) -> bool {
        self.lines().any(|line| line.is_broken())
    }

    fn lines(&self) -> impl Iterator<Item = &Arc<Line>> {
        [Some(&self.reach.tray_line), self.reach.arena_line.as_ref()].into_iter().flatten()
    }

    /// Whether a transfer did not end yet.
    pub(super) fn is_under_way(&self) -> bool {
        self.lines().any(|line| self.reach.local.rdma.flights.is_under_way(line))
    }

    /// Returns once all transfers have ended, if no others are begun.
    pub(super) async fn quiet(&self) {
        for line in self.lines() {
            self.reach.local.rdma.flights.quiet(line).await;
        }
    }

    /// Has it told when the link is given up with transfers under way.
    pub(super) fn watch(&mut self, doubt: &Arc<Doubt>) {
        self.reach.doubt = Some(Arc::clone(doubt));
    }

    /// Whether the next operation may use it. Gives back memory that holds nothing.
    pub(super) fn rest(&mut self) -> bool {
        self.is_used = true;
        !self.is_broken() && self.reach.place().is_some() && self.control.rest()
    }
}

/// Two queue pairs that wait for their peers, and what the node is told of them.
struct Pair {
    tray: Asking,
    arena: Asking,
    ends: (data::QueueEnd, data::QueueEnd),
}

/// Large calls into the system, on a thread for such.
async fn asking(local: &Arc<Local>, of_peer: &Arc<Semaphore>) -> std::io::Result<Pair> {
    let (ours, of_peer) = (Arc::clone(local), Arc::clone(of_peer));
    let [first, second]: [u32; 2] = super::packets();
    let made = tokio::task::spawn_blocking(move || {
        let (tray, arena) = (Asking::new(&ours, &of_peer, first)?, Asking::new(&ours, &of_peer, second)?);
        let ends = (tray.end()?, arena.end()?);
        Ok::<_, std::io::Error>(Pair { tray, arena, ends })
    });
    made.await.map_err(std::io::Error::other)?
}

/// The node talks nonsense.
fn senseless(tcp: &TcpPath, error: &Nonsense) -> PathError {
    let what = format!("an answer that makes no sense: {error}");
    PathError::Protocol { peer: tcp.peer().to_owned(), what }
}

/// What our own end is short of.
fn ours(what: &str, cause: &std::io::Error) -> String {
    format!(
        "this process's RDMA device cannot {what}: {cause}; it may be short of queue pairs or of memory to lock (ulimit -l)"
    )
}

/// What the node says, if it makes sense.
fn welcome(answer: &data::Attached) -> Result<Welcome, Nonsense> {
    if answer.outcome != outcome::ATTACHED {
        return Err(Nonsense::new("an outcome", answer.outcome));
    }
    let tray_end = answer.tray.as_ref().ok_or(Nonsense::new("the number of trays", 0_u32))?;
    let tray = answer.tray_window.as_ref().ok_or(Nonsense::new("the number of windows", 0_u32))?;
    let arena_end = answer.arena.as_ref().map(words::end_from_pb).transpose()?;
    let arena = answer.arena_window.as_ref().map(words::window_from_pb).transpose()?;
    Ok(Welcome {
        tray_end: words::end_from_pb(tray_end)?,
        tray: words::window_from_pb(tray)?,
        arena: arena.filter(|_| arena_end.is_some()),
        arena_end,
        board_address: answer.board_address,
    })
}

impl Reach {
    /// Begins to read what lies `at` that many bytes behind the start of a memory of the node.
    pub(super) async fn read(&self, of: LentIn, at: u64, place: Place) -> Result<Arriving, TransferError> {
        let (line, window) = match of {
            LentIn::Arena => (self.arena_line.as_ref(), self.arena),
            LentIn::Tray => (Some(&self.tray_line), Some(self.tray)),
        };
        let (line, window) = line.zip(window).ok_or(TransferError::Broken)?;
        let remote = Remote { address: window.address.wrapping_add(at), key: window.key };
        self.begin(line, Direction::Read, place, remote).await
    }

    /// Begins to write a place into the tray.
    pub(super) async fn write(&self, at: u64, place: Place) -> Result<Arriving, TransferError> {
        let remote = Remote { address: self.tray.address.wrapping_add(at), key: self.tray.key };
        self.begin(&self.tray_line, Direction::Write, place, remote).await
    }

    /// Reads the board, and some of each memory, over each queue pair.
    async fn try_all(&self) -> Result<(), TransferError> {
        self.board().await?;
        let windows = [(LentIn::Tray, Some(self.tray)), (LentIn::Arena, self.arena)];
        for (of, window) in windows {
            let bytes = window.map_or(0, |window| window.bytes).min(TRIAL_BYTES.into());
            let Ok(bytes @ 1..) = u32::try_from(bytes) else { continue };
            let place = self.local.trials.wait(bytes).await.ok_or(TransferError::Broken)?;
            self.read(of, 0, place).await?.end().await?;
        }
        Ok(())
    }

    /// What stands on the board: the epoch under which the node lends, or that it takes everything back. What was written
    /// before lies in the node's memory when this is known: a read does not pass writes of its queue pair.
    pub(super) async fn board(&self) -> Result<u64, TransferError> {
        let place = self.place().take().ok_or(TransferError::Broken)?;
        let remote = Remote { address: self.board_address, key: self.tray.key };
        let place = self.begin(&self.tray_line, Direction::Read, place, remote).await?.end().await?;
        let bytes = place.bytes().first_chunk::<8>().copied().unwrap_or_default();
        *self.place() = Some(place);
        Ok(u64::from_le_bytes(bytes))
    }

    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was read before this lay there as the node lent it.
    pub(super) async fn vouch(&self, terms: &Terms) -> Result<(), Stop> {
        let board = self.board().await?;
        if board == words::REVOKED {
            return Err(Stop::Transfer(TransferError::Broken));
        }
        if board != terms.epoch.0 {
            return Err(Stop::Reason(MissReason::StaleEpoch));
        }
        if Instant::now() >= terms.lease_end {
            return Err(Stop::Reason(MissReason::TooLate));
        }
        Ok(())
    }

    /// Whether it reaches the same arena as another link.
    pub(super) fn shares_arena(&self, other: &Reach) -> bool {
        let extent = |reach: &Reach| reach.arena.map(|arena| (arena.address, arena.bytes));
        self.arena_line.is_some() && self.arena.is_some() && extent(self) == extent(other)
    }

    #[cfg(test)]
    pub(super) fn arena_key(&self) -> Option<u32> {
        self.arena.map(|arena| arena.key)
    }

    /// Writes with the arena's queue pair to where the tray is said to be.
    #[cfg(test)]
    pub(super) async fn write_arena(&self, place: Place) -> Result<Arriving, TransferError> {
        let remote = Remote { address: self.tray.address, key: self.tray.key };
        let line = self.arena_line.as_ref().ok_or(TransferError::Broken)?;
        self.begin(line, Direction::Write, place, remote).await
    }

    async fn begin(
        &self,
        line: &Arc<Line>,
        direction: Direction,
        place: Place,
        remote: Remote,
    ) -> Result<Arriving, TransferError> {
        let ours = (place, self.local.registered.local_key());
        self.local.rdma.flights.begin(line, direction, ours, remote).await
    }
}
