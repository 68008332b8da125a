//! The client's end of one upgraded connection: two queue pairs, and what the node lets it reach.
//!
//! One queue pair reaches the node's arena, where the node allows that, the other the connection's tray; each is in a
//! protection domain of its own at the node. Dropped, a link ends both, and only then is given back what they may still write.
//! Not here: what is said over the connection in an operation (`fetch.rs`, `save.rs`).

use std::sync::Arc;

use kv_core::lend::{Borrower, Extent, Place as LentIn};
use kvfleet_proto::data;
use kvfleet_proto::frame::FRAME_BYTES_MAX;

use super::flights::{Arriving, Line, Remote, TransferError};
use super::memory::{ALIGN_BYTES, Place, Pool};
use super::rail::{Access, Direction, Domain, End, Queue, RegisterMr, Role};
use super::words::{self, Nonsense, PACKET_MAX, Window, outcome};
use super::{Rdma, RdmaError};
use crate::PathError;
use crate::ask::Asks;
use crate::stream::encode;
use crate::tcp::{Occupied, TcpPath};

/// Bytes of the board that are read.
const BOARD_BYTES: u32 = 8;

/// Registered memory of a dialer, into which its cards read and from which they write.
pub(super) struct Local {
    pub(super) rdma: Arc<Rdma>,
    domain: Arc<dyn Domain>,
    registered: Box<dyn RegisterMr>,
    /// For frames that callers keep where they were read.
    kept: Arc<Pool>,
    /// For what is under way, and is copied on: always comes back.
    pub(super) passing: Arc<Pool>,
}

impl Local {
    pub(super) fn new(rdma: &Arc<Rdma>) -> Result<Arc<Local>, RdmaError> {
        let domain = rdma.domain()?;
        let half = (rdma.config.local_bytes as u64 / 2).next_multiple_of(ALIGN_BYTES);
        let bytes = usize::try_from(2 * half).unwrap_or(usize::MAX);
        let (memory, registered) = rdma.allocate(domain.as_ref(), bytes, Access::Local)?;
        let (kept, passing) = (Pool::new(&memory, 0..half), Pool::new(&memory, half..2 * half));
        Ok(Arc::new(Local { rdma: Arc::clone(rdma), domain, registered, kept, passing }))
    }

    /// The largest frame that is read or written; larger ones come over the connection.
    pub(super) fn frame_bytes_max(&self) -> u32 {
        // Half of it, so that boards and other small places never keep a large one out for good.
        let most = (self.passing.len_bytes() / 2).min(FRAME_BYTES_MAX as u64);
        u32::try_from(most).unwrap_or(u32::MAX)
    }

    /// A place for a frame, and whether it may stay there.
    pub(super) fn take(&self, len: u32) -> Option<(Place, bool)> {
        let kept = self.kept.take(len).map(|place| (place, true));
        kept.or_else(|| Some((self.passing.take(len)?, false)))
    }
}

/// A queue pair that waits for its peer.
struct Asking {
    queue: Box<dyn Queue>,
    packet: u32,
}

impl Asking {
    fn new(local: &Local, packet: u32) -> std::io::Result<Asking> {
        Ok(Asking { queue: local.domain.queue(Access::Local)?, packet: packet & PACKET_MAX })
    }

    fn end(&self, local: &Local) -> data::QueueEnd {
        words::end_to_pb(local.rdma.flights.rail().port(), self.queue.number(), self.packet)
    }

    fn join(self, local: &Local, peer: &End) -> std::io::Result<Arc<Line>> {
        self.queue.connect(Role::Asks, self.packet, peer)?;
        Ok(local.rdma.flights.line(self.queue))
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
    board: Option<Place>,
}

impl Drop for Reach {
    fn drop(&mut self) {
        let lines = [Some(Arc::clone(&self.tray_line)), self.arena_line.take()];
        let lines = lines.into_iter().flatten().collect();
        self.local.rdma.flights.end(lines, Arc::clone(&self.local));
    }
}

impl Link {
    /// Upgrades a connection; nothing when the node offers RDMA to as many as it may.
    pub(super) async fn attach(tcp: &TcpPath, local: &Arc<Local>) -> Result<Option<Link>, PathError> {
        let here = |what: &str, cause: std::io::Error| PathError::Broken {
            peer: tcp.peer().to_owned(),
            cause: format!("our RDMA device cannot {what}: {cause}"),
        };
        // Large calls into the system.
        let ours = Arc::clone(local);
        let [first, second]: [u32; 2] = super::packets();
        let made = tokio::task::spawn_blocking(move || {
            Ok::<_, std::io::Error>((Asking::new(&ours, first)?, Asking::new(&ours, second)?))
        });
        let made = made.await.map_err(|error| here("make queue pairs", std::io::Error::other(error)))?;
        let (tray, arena) = made.map_err(|cause| here("make queue pairs", cause))?;
        let attach = data::Attach {
            version: words::VERSION,
            tray: Some(tray.end(local)),
            arena: Some(arena.end(local)),
            frame_bytes_max: local.frame_bytes_max(),
        };
        let op = Some(data::data_request::Op::Attach(attach));
        let request = encode(&data::DataRequest { op, traceparent: String::new() })?;
        let (answer, control) = tcp.pool.ask::<data::Attached>(request).await?;
        if answer.outcome == outcome::BUSY {
            tcp.over(control);
            return Ok(None);
        }
        let welcome = welcome(&answer).map_err(|error| PathError::Protocol {
            peer: tcp.peer().to_owned(),
            what: format!("an answer that makes no sense: {error}"),
        })?;
        let (ours, ends) = (Arc::clone(local), (welcome.tray_end, welcome.arena_end));
        let joined = tokio::task::spawn_blocking(move || {
            let arena = ends.1.map(|end| arena.join(&ours, &end)).transpose()?;
            Ok::<_, std::io::Error>((tray.join(&ours, &ends.0)?, arena))
        });
        let joined = joined.await.map_err(|error| here("join queue pairs", std::io::Error::other(error)))?;
        let (tray_line, arena_line) = joined.map_err(|cause| here("join queue pairs", cause))?;
        let mut reach = Reach {
            local: Arc::clone(local),
            tray_line,
            arena_line,
            tray: welcome.tray,
            arena: welcome.arena,
            board_address: welcome.board_address,
            board: None,
        };
        reach.board = local.passing.wait(BOARD_BYTES).await;
        let extent = Extent {
            arena_bytes: welcome.arena.map_or(0, |arena| arena.bytes),
            tray_bytes: welcome.tray.bytes,
            frame_bytes_max: local.frame_bytes_max(),
        };
        Ok(Some(Link { control, borrower: Borrower::new(extent), is_used: false, reach }))
    }

    /// Both halves: words and transfers.
    pub(super) fn parts(&mut self) -> (&mut Occupied, &mut Borrower, &mut Reach) {
        (&mut self.control, &mut self.borrower, &mut self.reach)
    }

    /// Whether the next operation may use it. Gives back memory that holds nothing.
    pub(super) fn rest(&mut self) -> bool {
        self.is_used = true;
        let lines = [Some(&self.reach.tray_line), self.reach.arena_line.as_ref()];
        let is_broken = lines.into_iter().flatten().any(|line| line.is_broken());
        !is_broken && self.reach.board.is_some() && self.control.rest()
    }
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

    /// What stands on the board: the epoch under which the node lends, or that it takes everything back. What was written
    /// before lies in the node's memory when this is known: a read does not pass writes of its queue pair.
    pub(super) async fn board(&mut self) -> Result<u64, TransferError> {
        let place = self.board.take().ok_or(TransferError::Broken)?;
        let remote = Remote { address: self.board_address, key: self.tray.key };
        let place = self.begin(&self.tray_line, Direction::Read, place, remote).await?.end().await?;
        let bytes = place.bytes().first_chunk::<8>().copied().unwrap_or_default();
        self.board = Some(place);
        Ok(u64::from_le_bytes(bytes))
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
