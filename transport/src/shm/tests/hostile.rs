//! Peers that break the rules, at either end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use kv_core::id::GrantId;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};
use kvfleet_errors_doc::says;
use kvfleet_proto::data;
use kvfleet_proto::frame::SliceLayout;

use super::super::mapping::{Mapping, memory_file, reopen_read_only};
use super::super::packet::{BounceRange, ClientPacket, CloseReason, NodePacket, Welcome};
use super::super::seqpacket::{RecvOutcome, SendOutcome, Seqpacket};
use super::*;
use crate::suite::{EPOCH, PATIENCE, frame_of, save_request};
use crate::{FetchAnswer, MissReason, PathError, wire};

/// One end of a connection that sends arbitrary packets.
pub(super) struct RawConnection {
    pub(super) socket: Seqpacket,
    pub(super) files: Vec<OwnedFd>,
}

impl RawConnection {
    fn send(&self, packet: &[u8]) {
        self.socket.send(packet, &[]).unwrap();
    }

    pub(super) fn send_to_node(&self, packet: &ClientPacket) {
        self.send(&packet.encode());
    }

    pub(super) fn send_to_client(&self, packet: &NodePacket) {
        // A packet that cannot be sent now would be lost.
        assert_ne!(self.socket.send(&packet.encode(), &[]).unwrap(), SendOutcome::WouldBlock);
    }

    /// Whether the other end has stopped sending, even if its packets were not read yet.
    fn is_peer_closed(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap();
        polled[0].revents().contains(PollFlags::RDHUP)
    }

    /// The next packet, or `None` at the end.
    async fn receive<T>(&mut self, decode: impl Fn(&[u8]) -> T) -> Option<T> {
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        let heard = async {
            loop {
                match self.socket.recv(&mut buffer).unwrap() {
                    RecvOutcome::Packet(len, files) => {
                        self.files.extend(files);
                        return Some(decode(&buffer[..len]));
                    }
                    RecvOutcome::Closed => return None,
                    RecvOutcome::WouldBlock => tokio::task::yield_now().await,
                }
            }
        };
        tokio::time::timeout(PATIENCE, heard).await.expect("an answer or the end")
    }

    /// A client's packet, if one is available now.
    pub(super) fn poll_client_packet(&mut self) -> Option<ClientPacket> {
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        match self.socket.recv(&mut buffer).unwrap() {
            RecvOutcome::Packet(len, _) => Some(ClientPacket::decode(&buffer[..len]).unwrap()),
            RecvOutcome::Closed | RecvOutcome::WouldBlock => None,
        }
    }

    pub(super) async fn receive_from_client(&mut self) -> ClientPacket {
        self.receive(ClientPacket::decode).await.unwrap().unwrap()
    }

    pub(super) async fn receive_from_node(&mut self) -> Option<NodePacket> {
        self.receive(|bytes| NodePacket::decode(bytes).unwrap()).await
    }
}

/// A node with two blocks, and a raw client after its welcome.
pub(super) async fn welcomed_client(
    config: ShmServerConfig,
) -> (ShmTestNode, Arc<MemoryService>, RawConnection) {
    let arena = BumpArena::new(ARENA_BYTES);
    let service = Arc::new(MemoryService::new(Some(Arc::clone(&arena))));
    (0..2).for_each(|number| service.hold(frame(hash(number), 1000)));
    let node = ShmTestNode::start(service.clone(), Some(arena), config, true);
    let raw = welcomed(&node).await;
    (node, service, raw)
}

pub(super) async fn welcomed(node: &ShmTestNode) -> RawConnection {
    let socket = Seqpacket::connect(&socket_path(&node.dir(), ADDRESS)).unwrap();
    let mut raw = RawConnection { socket, files: Vec::new() };
    raw.send_to_node(&ClientPacket::Hello { wants_mapping: true });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Welcome(_))));
    assert_eq!(raw.files.len(), 2);
    raw
}

pub(super) fn fetch_of(blocks: u32) -> data::DataRequest {
    wire::fetch_to_pb(&fetch_request(&hashes(blocks)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_break_a_rule_are_disconnected() {
    let (node, _, _raw) = welcomed_client(server_config()).await;
    let path = node.dial().await.unwrap();
    let ask = ClientPacket::Begin { op: 1, request: fetch_of(2) }.encode();
    let many = ClientPacket::Begin { op: 1, request: fetch_of(BLOCKS_PER_OPERATION_MAX as u32 + 1) }.encode();
    let put = |op| ClientPacket::Put { op, places: vec![BounceRange { at: 0, len: 1 }] }.encode();
    let save = ClientPacket::Begin { op: 1, request: wire::save_to_pb(&save_request(&[hash(7)])) }.encode();
    let at_once = |request, places: usize| {
        let places = vec![BounceRange { at: 0, len: 1 }; places];
        ClientPacket::Save { op: 1, request, places }.encode()
    };
    let one = || wire::save_to_pb(&save_request(&[hash(7)]));
    let frame_bytes = frame_of(hash(7), &[100]).bytes.len() as u64;
    let by_layer = SaveRequest { frame_bytes, ..save_request(&[hash(7)]) };
    let layered = ClientPacket::Begin { op: 1, request: wire::save_layers_to_pb(&by_layer, &[100]) };
    let piece = |len| ClientPacket::Put { op: 1, places: vec![BounceRange { at: 0, len }] }.encode();
    let pieces = ClientPacket::Put { op: 1, places: vec![BounceRange { at: 0, len: 100 }; 2] }.encode();
    let none = ClientPacket::Put { op: 1, places: Vec::new() }.encode();
    let head = u32::try_from(SliceLayout::new(&[100]).unwrap().head_bytes()).unwrap();
    let cases: [(&str, Vec<Vec<u8>>); 16] = [
        ("more pieces than slices and heads", vec![layered.encode(), piece(100), piece(head), piece(100)]),
        ("two pieces at once", vec![layered.encode(), pieces]),
        ("no frames where some are said", vec![save.clone(), none]),
        ("more frames at once than blocks", vec![at_once(one(), 2)]),
        ("fewer frames at once than blocks", vec![at_once(one(), 0)]),
        (
            "more frames at once than may be",
            vec![at_once(wire::save_to_pb(&save_request(&[hash(7); 65])), 65)],
        ),
        ("frames beside a fetch", vec![at_once(fetch_of(1), 1)]),
        ("garbage", vec![vec![0xA5; 100]]),
        ("a packet cut short", vec![ask[..ask.len() - 1].to_vec()]),
        ("a packet too long", vec![vec![0; PACKET_BYTES_MAX + 1]]),
        ("an operation twice", vec![save.clone(), save.clone()]),
        ("more frames than a save has blocks", vec![save, put(1), put(1)]),
        ("more blocks than may be asked for", vec![many]),
        ("a second hello", vec![ClientPacket::Hello { wants_mapping: true }.encode()]),
        ("loans that are not out", vec![ClientPacket::Return { loans: vec![GrantId(1)] }.encode()]),
        (
            "a request that is none",
            vec![ClientPacket::Begin { op: 1, request: data::DataRequest::default() }.encode()],
        ),
    ];
    for (what, packets) in cases {
        let mut raw = welcomed(&node).await;
        packets.iter().for_each(|packet| raw.send(packet));
        let mut said = raw.receive_from_node().await;
        while !matches!(said, Some(NodePacket::Closing(_)) | None) {
            said = raw.receive_from_node().await;
        }
        assert_eq!(said, Some(NodePacket::Closing(CloseReason::Protocol)), "{what}");
        assert_eq!(raw.receive_from_node().await, None, "{what}");
        assert_eq!(fetch(path.as_ref(), fetch_request(&hashes(2))).await.unwrap().tiers().len(), 2, "{what}");
    }
    // Packets for a finished operation are not a violation.
    let mut raw = welcomed(&node).await;
    raw.send(&put(9));
    raw.send_to_node(&ClientPacket::Cancel { op: 9 });
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 9 }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_of_a_violating_client_last_until_it_ends() {
    let (node, service, mut raw) = welcomed_client(server_config()).await;
    raw.send_to_node(&ClientPacket::Begin { op: 1, request: fetch_of(2) });
    let mut rows = 0;
    while rows < 2 {
        match raw.receive_from_node().await {
            Some(NodePacket::Head { rows: came, .. } | NodePacket::More { rows: came, .. }) => {
                rows += came.len();
            }
            other => panic!("{other:?}"),
        }
    }
    raw.send_to_node(&ClientPacket::Return { loans: vec![GrantId(1), GrantId(9)] });
    while raw.receive_from_node().await.is_some() {}
    assert_eq!(node.stats().grants, 2, "neither grant returned: the client may still read both");
    raw.send_to_node(&ClientPacket::Return { loans: vec![GrantId(1)] });
    node.dial().await.unwrap().ping().await.unwrap();
    assert_eq!(node.stats().grants, 2, "its packets must be ignored");
    assert!(service.released().is_empty());
    drop(raw);
    node.until(|numbers| numbers == ShmStats::default()).await;
    assert_eq!(service.released(), [LeaseId(1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saves_with_invalid_ranges_store_nothing() {
    let (_node, service, mut raw) = welcomed_client(server_config()).await;
    let part = bounce_part_bytes(server_config().frame_bytes_max);
    let places = [(part - 1, 2), (u64::MAX, 1), (0, 0), (0, (1 << 20) + 1), (part, 10)];
    for (&(at, len), op) in places.iter().zip(1..) {
        raw.send_to_node(&ClientPacket::Begin { op, request: wire::save_to_pb(&save_request(&[hash(7)])) });
        assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
        raw.send_to_node(&ClientPacket::Put { op, places: vec![BounceRange { at, len }] });
        assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op }), "{len} bytes at {at}");
    }
    for (&(at, len), op) in places.iter().zip(11..) {
        let request = wire::save_to_pb(&save_request(&[hash(7)]));
        raw.send_to_node(&ClientPacket::Save { op, request, places: vec![BounceRange { at, len }] });
        assert_eq!(
            raw.receive_from_node().await,
            Some(NodePacket::Ended { op }),
            "{len} bytes at {at}, eager"
        );
    }
    // A range without a frame is taken and refused; one frame more than wanted ends the save.
    raw.send_to_node(&ClientPacket::Begin {
        op: 20,
        request: wire::save_to_pb(&save_request(&[hash(0), hash(7)])),
    });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
    raw.send_to_node(&ClientPacket::Put { op: 20, places: vec![BounceRange { at: 0, len: 64 }; 2] });
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op: 20, frames: 1 }));
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 20 }));
    raw.send_to_node(&ClientPacket::Begin {
        op: 21,
        request: wire::save_to_pb(&save_request(&[hash(7), hash(8)])),
    });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
    raw.send_to_node(&ClientPacket::Finish { op: 21 });
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 21 }), "a frame too few");
    assert!(!service.holds(hash(7)) && !service.holds(hash(8)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_keeps_writing_corrupts_only_its_own_save() {
    const ROUNDS: u32 = 300;
    let (_node, service, mut raw) = welcomed_client(server_config()).await;
    let tray = Arc::new(Mapping::read_write(&raw.files[0], 4096).unwrap());
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (tray, stop) = (Arc::clone(&tray), Arc::clone(&stop));
        std::thread::spawn(move || {
            for byte in (0..=255_u8).cycle() {
                tray.write(600, &[byte]).unwrap();
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        })
    };
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    for op in 1..=u64::from(ROUNDS) {
        let block = hash(100 + u32::try_from(op).unwrap());
        raw.send_to_node(&ClientPacket::Begin { op, request: wire::save_to_pb(&save_request(&[block])) });
        assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Offer { .. })));
        tray.write(0, &frame(block, 1000).bytes).unwrap();
        raw.send_to_node(&ClientPacket::Put { op, places: vec![BounceRange { at: 0, len }] });
        raw.send_to_node(&ClientPacket::Finish { op });
        assert_eq!(raw.receive_from_node().await, Some(NodePacket::Taken { op, frames: 1 }));
        let Some(NodePacket::Done { done, .. }) = raw.receive_from_node().await else {
            panic!("the save must end")
        };
        // A stored block is intact, whatever else happened.
        assert_eq!(service.holds(block), done.stored_blocks == 1);
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    let path = _node.dial().await.unwrap();
    for number in (101..=100 + ROUNDS).filter(|number| service.holds(hash(*number))) {
        fetch(path.as_ref(), fetch_request(&[hash(number)])).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_above_the_limit_are_told() {
    let part = bounce_part_bytes(server_config().frame_bytes_max);
    let config = ShmServerConfig { bounce_bytes_max: 4 * part, ..server_config() };
    let (node, _, raw) = welcomed_client(config).await;
    let second = node.dial().await.unwrap();
    let error = node.dial().await.err().unwrap();
    says("more clients of one host than a node has trays for", &error, &[]);
    drop(raw);
    node.until(|numbers| numbers.connections == 1).await;
    let mut third = node.dial().await;
    while third.is_err() {
        third = node.dial().await;
    }
    second.ping().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_disconnected() {
    let config = ShmServerConfig { stall_timeout: Duration::from_millis(100), ..server_config() };
    let (_node, _, mut raw) = welcomed_client(config).await;
    // It sends requests as long as the node accepts them, until the node's queue and timeout are
    // exhausted.
    let asks = async {
        let mut op = 1;
        while !raw.is_peer_closed() {
            let packet = ClientPacket::Begin { op, request: wire::ping_to_pb() }.encode();
            match raw.socket.send(&packet, &[]).unwrap() {
                SendOutcome::Queued => op += 1,
                SendOutcome::WouldBlock | SendOutcome::Closed => tokio::task::yield_now().await,
            }
        }
        op
    };
    let asked = tokio::time::timeout(PATIENCE, asks).await.expect("the node must give up");
    assert!(asked < 100_000, "the node must stop reading before it queues a reply for each of them: {asked}");
    while raw.receive_from_node().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_client_receives_the_reason() {
    let node = ShmTestNode::start(Arc::new(MemoryService::default()), None, server_config(), false);
    says("a process of a user that a node does not serve", &node.dial().await.err().unwrap(), &[]);
    let nobody = tempfile::tempdir().unwrap();
    let error = ShmDialer::new(ShmConfig::new(nobody.path().to_owned())).dial(ADDRESS.to_owned()).await;
    let dir = nobody.path().display().to_string();
    says("no node of this host at an address", &error.err().unwrap(), &[&dir]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_socket_is_replaced_and_an_invalid_path_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let at = socket_path(dir.path(), ADDRESS);
    let bind = |at: &std::path::Path| {
        let ends = ShmRuntimes { event_loop: Handle::current(), may_move: false, bulk: Handle::current() };
        ShmServer::bind(at, server_config(), None, Arc::new(MemoryService::default()), ends)
    };
    std::fs::write(&at, "left behind").unwrap();
    let (first, second) = (bind(&at).unwrap(), bind(&at).unwrap());
    drop(first);
    let path = ShmDialer::new(ShmConfig::new(dir.path().to_owned())).dial(ADDRESS.to_owned()).await;
    path.unwrap().ping().await.unwrap();
    drop(second);
    assert!(!at.exists());
    let error = bind(&dir.path().join("none/s.sock")).unwrap_err();
    says("a directory for sockets that is not there", &error, &[&dir.path().display().to_string()]);
}

/// A fake node that sends arbitrary packets to its client.
pub(super) struct FakeNode {
    dir: tempfile::TempDir,
    listener: Seqpacket,
}

impl FakeNode {
    pub(super) fn new() -> FakeNode {
        let dir = tempfile::tempdir().unwrap();
        let listener = Seqpacket::listen(&socket_path(dir.path(), ADDRESS)).unwrap();
        FakeNode { dir, listener }
    }

    fn dial(&self) -> tokio::task::JoinHandle<Result<Arc<dyn Path>, PathError>> {
        let config = ShmConfig { dial_timeout: PATIENCE, ..ShmConfig::new(self.dir.path().to_owned()) };
        tokio::spawn(async move { ShmDialer::new(config).dial(ADDRESS.to_owned()).await })
    }

    async fn accept(&self) -> RawConnection {
        loop {
            if let Some(socket) = self.listener.accept().unwrap() {
                let mut raw = RawConnection { socket, files: Vec::new() };
                assert_eq!(raw.receive_from_client().await, ClientPacket::Hello { wants_mapping: true });
                return raw;
            }
            tokio::task::yield_now().await;
        }
    }

    /// The client's result for a welcome.
    pub(super) async fn welcome(
        &self,
        packet: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<(Arc<dyn Path>, RawConnection), PathError> {
        let dialling = self.dial();
        let raw = self.accept().await;
        raw.socket.send(packet, files).unwrap();
        dialling.await.unwrap().map(|path| (path, raw))
    }
}

pub(super) const PART: u64 = 1 << 20;

pub(super) fn good_welcome() -> Welcome {
    Welcome {
        arena_bytes: PART,
        bounce_in_bytes: PART,
        bounce_out_bytes: PART,
        frame_bytes_max: 1 << 16,
        address: ADDRESS.to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inconsistent_welcomes_are_refused() {
    let forger = FakeNode::new();
    let (tray, arena) =
        (memory_file(2 * PART).unwrap(), reopen_read_only(&memory_file(PART).unwrap()).unwrap());
    let short = memory_file(PART - 1).unwrap();
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let good = NodePacket::Welcome(good_welcome()).encode();
    let (tray, arena) = (tray.as_fd(), arena.as_fd());
    assert!(forger.welcome(&good, &[tray, arena]).await.is_ok(), "the valid welcome must be accepted");
    let with = |change: fn(&mut Welcome)| {
        let mut welcome = good_welcome();
        change(&mut welcome);
        NodePacket::Welcome(welcome).encode()
    };
    let cases: [(&str, Vec<u8>, Vec<BorrowedFd<'_>>); 12] = [
        ("no memory", good.clone(), vec![]),
        ("no arena", good.clone(), vec![tray]),
        ("an arena that was not said", with(|welcome| welcome.arena_bytes = 0), vec![tray, arena]),
        ("a file as an arena", good.clone(), vec![tray, file.as_fd()]),
        ("a file as a tray", good.clone(), vec![file.as_fd(), arena]),
        ("an arena too short", good.clone(), vec![tray, short.as_fd()]),
        ("a tray too short", good.clone(), vec![short.as_fd(), arena]),
        ("parts beyond all numbers", with(|welcome| welcome.bounce_in_bytes = u64::MAX), vec![tray, arena]),
        ("an empty tray", with(|w| (w.bounce_in_bytes, w.bounce_out_bytes) = (0, 0)), vec![tray, arena]),
        ("frames beyond all limits", with(|welcome| welcome.frame_bytes_max = u32::MAX), vec![tray, arena]),
        ("no welcome", NodePacket::Ended { op: 1 }.encode(), vec![tray, arena]),
        ("garbage", vec![1; 40], vec![]),
    ];
    for (what, packet, files) in cases {
        let refused = forger.welcome(&packet, &files).await.err();
        assert!(matches!(refused, Some(PathError::Protocol { .. })), "{what}: {refused:?}");
    }
    let other = with(|welcome| welcome.address = "other:7000".to_owned());
    let refused = forger.welcome(&other, &[tray, arena]).await.err().unwrap();
    says("two nodes whose sockets have one name", &refused, &[]);
    let mut old = good.clone();
    old[16] = 9;
    let refused = forger.welcome(&old, &[tray, arena]).await.err().unwrap();
    says("a node of this host with another version", &refused, &[]);
    // The node ends before any packet.
    let dialling = forger.dial();
    drop(forger.accept().await);
    assert!(matches!(dialling.await.unwrap(), Err(PathError::Broken { .. })));
}

pub(super) fn row(loan: u64, at: u64, len: u32) -> GrantDescriptor {
    GrantDescriptor { grant: GrantId(loan), memory: GrantMemory::Arena, offset: at, len }
}

/// The result of a fetch of two blocks that receives these packets.
async fn fetch_result(packets: &[NodePacket]) -> (Result<FetchAnswer, PathError>, Option<PathError>) {
    let forger = FakeNode::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    let writable = Mapping::read_write(&arena, PART).unwrap();
    writable.write(0, &frame(hash(0), 1000).bytes).unwrap();
    let good = NodePacket::Welcome(good_welcome()).encode();
    let (path, mut raw) = forger.welcome(&good, &[tray.as_fd(), arena.as_fd()]).await.unwrap();
    let fetching = {
        let path = Arc::clone(&path);
        tokio::spawn(async move { path.fetch(fetch_request(&hashes(2)), &mut |frame| drop(frame)).await })
    };
    assert!(matches!(raw.receive_from_client().await, ClientPacket::Begin { op: 1, .. }));
    packets.iter().for_each(|packet| raw.send_to_client(packet));
    let answer = tokio::time::timeout(PATIENCE, async {
        // End of a fake node that sends too little.
        raw.socket.shutdown_send();
        fetching.await.unwrap()
    });
    (answer.await.unwrap(), path.failure())
}

fn head(rows: Vec<GrantDescriptor>) -> NodePacket {
    let answer = FetchAnswer::Hit { tiers: in_dram(2) };
    NodePacket::Head { op: 1, head: wire::head_to_pb(&answer, EPOCH), rows }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn impossible_rows_end_the_connection() {
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    let good = row(1, 0, len);
    let more = |rows: Vec<GrantDescriptor>| NodePacket::More { op: 1, rows };
    let cases: [(&str, Vec<NodePacket>); 10] = [
        ("none", vec![head(vec![good]), more(Vec::new())]),
        ("frames of a fetch as taken", vec![NodePacket::Taken { op: 1, frames: 1 }]),
        ("behind the arena's end", vec![head(vec![row(1, PART - 1, 2)])]),
        ("beyond all numbers", vec![head(vec![row(1, u64::MAX, 2)])]),
        ("an empty one", vec![head(vec![row(1, 0, 0)])]),
        ("longer than any frame", vec![head(vec![row(1, 0, (1 << 16) + 1)])]),
        ("one loan twice", vec![head(vec![good, good])]),
        ("an old loan", vec![head(vec![row(5, 0, len)]), more(vec![row(4, 0, len)])]),
        ("more than was asked", vec![head(vec![good, row(2, 0, len), row(3, 0, len)])]),
        ("for an unknown operation", vec![NodePacket::More { op: 7, rows: vec![good] }]),
    ];
    for (what, packets) in cases {
        let (answer, failure) = fetch_result(&packets).await;
        assert!(matches!(failure, Some(PathError::Protocol { .. })), "{what}: {failure:?}");
        let is_lost = match &answer {
            Err(PathError::Protocol { .. }) => true,
            Ok(FetchAnswer::Partial { tiers, reason: MissReason::NodeLost }) => tiers.len() == 1,
            _ => false,
        };
        assert!(is_lost, "{what}: {answer:?}");
    }
    let says_so = fetch_result(&[head(vec![row(1, PART - 1, 2)])]).await.1.unwrap();
    says("a node of this host that lends what is not there", &says_so, &[]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_or_corrupt_frames_are_a_miss() {
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    let end = |reason| NodePacket::End { op: 1, reason };
    let partial = |reason| FetchAnswer::Partial { tiers: in_dram(1), reason };
    let miss = |reason| FetchAnswer::Miss { reason };
    let cases: [(&str, Vec<NodePacket>, FetchAnswer); 7] = [
        ("no frame", vec![head(vec![row(1, 9, len)])], miss(MissReason::Corrupt)),
        ("none before one", vec![head(vec![row(1, 9, len), row(2, 0, len)])], miss(MissReason::Corrupt)),
        ("too long for its header", vec![head(vec![row(1, 0, len + 1)])], miss(MissReason::Corrupt)),
        ("its end", vec![head(vec![row(1, 0, len)])], partial(MissReason::NodeLost)),
        ("an end with a reason", vec![head(vec![row(1, 0, len)]), end(7)], partial(MissReason::Busy)),
        ("an end without", vec![head(vec![row(1, 0, len)]), end(0)], partial(MissReason::MediumFailed)),
        ("an end before all", vec![end(5)], miss(MissReason::TooLate)),
    ];
    for (what, packets, expected) in cases {
        assert_eq!(fetch_result(&packets).await.0.unwrap(), expected, "{what}");
    }
}
