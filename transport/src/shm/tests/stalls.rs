//! Peers that stall, or never stop sending, and the progress of others beside them.

use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::Poll;

use super::super::mapping::{Mapping, memory_file};
use super::super::packet::{ClientPacket, NodePacket};
use super::super::seqpacket::Seqpacket;
use super::hostile::{FakeNode, PART, RawConnection, fetch_of, good_welcome, row, welcomed, welcomed_client};
use super::*;
use crate::suite::{EPOCH, PATIENCE};
use crate::{MissReason, wire};
use kv_core::id::Epoch;
use kv_core::lease_grant::{GrantDescriptor, GrantMemory};

async fn within_patience<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("the operation must complete in time")
}

/// Polls pending work once.
async fn poll_once<T>(mut work: Pin<&mut (impl Future<Output = T> + ?Sized)>) {
    std::future::poll_fn(|context| {
        assert!(work.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// A path to a fake node that grants one block, and the fake node's end.
async fn forged() -> (Arc<dyn Path>, RawConnection) {
    let forger = FakeNode::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    Mapping::read_write(&arena, PART).unwrap().write(0, &frame(hash(0), 1000).bytes).unwrap();
    let good = NodePacket::Welcome(good_welcome()).encode();
    forger.welcome(&good, &[tray.as_fd(), arena.as_fd()]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unpolled_reader_does_not_block_others() {
    let (_node, service, _raw) = welcomed_client(server_config()).await;
    let path = _node.dial().await.unwrap();
    service.set_gate(0);
    let mut sink = |_| {};
    let mut waits = std::pin::pin!(path.fetch(fetch_request(&hashes(2)), &mut sink));
    poll_once(waits.as_mut()).await;
    for _ in 0..3 {
        within_patience(path.ping()).await.unwrap();
    }
    service.set_gate(100);
    assert_eq!(within_patience(waits).await.unwrap(), FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsent_packets_are_sent_without_a_waiter() {
    // More than its queue holds, and fewer than the limit of unsent packets.
    const RELEASES: u64 = 400;
    let (path, mut raw) = forged().await;
    let mut all: Vec<_> = (0..RELEASES).map(|lease| path.release(LeaseId(lease))).collect();
    for release in &mut all {
        poll_once(release.as_mut()).await;
    }
    for lease in 0..RELEASES {
        let request = wire::release_to_pb(LeaseId(lease));
        assert_eq!(raw.receive_from_client().await, ClientPacket::Begin { op: lease + 1, request });
    }
}

/// Whatever the node does, the fetch ends at its deadline; a correct node reports the delay itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_node_is_waited_for_until_the_deadline() {
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    let head = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(2) }, EPOCH);
    for says in [None, Some(NodePacket::Head { op: 1, head, rows: vec![row(1, 0, len)] })] {
        let (path, mut raw) = forged().await;
        let fetching = {
            let path = Arc::clone(&path);
            let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(2)) };
            tokio::spawn(async move { path.fetch(request, &mut |_| {}).await })
        };
        assert!(matches!(raw.receive_from_client().await, ClientPacket::Begin { op: 1, .. }));
        if let Some(head) = &says {
            raw.send_to_client(head);
        }
        let reason = MissReason::TooLate;
        let expected = match says {
            None => FetchAnswer::Miss { reason },
            Some(_) => FetchAnswer::Partial { tiers: in_dram(1), reason },
        };
        assert_eq!(within_patience(fetching).await.unwrap().unwrap(), expected);
    }
}

/// An engine's thread has no runtime, and may drop the last reference to a block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_returned_by_a_plain_thread_are_sent_later() {
    // One packet each while the queue has space, which is less than these need.
    const ROWS: u32 = 2000;
    let forger = FakeNode::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    let block = frame(hash(0), 1000).bytes;
    Mapping::read_write(&tray, 2 * PART).unwrap().write(PART, &block).unwrap();
    let good = NodePacket::Welcome(good_welcome()).encode();
    let (path, mut raw) = forger.welcome(&good, &[tray.as_fd(), arena.as_fd()]).await.unwrap();
    let fetching = {
        let path = Arc::clone(&path);
        tokio::spawn(async move {
            let mut frames = Vec::new();
            let request = fetch_request(&hashes(ROWS));
            path.fetch(request, &mut |frame| frames.push(frame)).await.unwrap();
            frames
        })
    };
    assert!(matches!(raw.receive_from_client().await, ClientPacket::Begin { op: 1, .. }));
    let answer = FetchAnswer::Hit { tiers: in_dram(ROWS as usize) };
    let len = u32::try_from(block.len()).unwrap();
    let lent = |loan| GrantDescriptor { memory: GrantMemory::BounceBuffer, ..row(loan, 0, len) };
    let rows: Vec<GrantDescriptor> = (1..=ROWS.into()).map(lent).collect();
    let (first, more) = rows.split_at(100);
    raw.send_to_client(&NodePacket::Head {
        op: 1,
        head: wire::head_to_pb(&answer, EPOCH),
        rows: first.to_vec(),
    });
    for rows in more.chunks(100) {
        raw.send_to_client(&NodePacket::More { op: 1, rows: rows.to_vec() });
    }
    let frames = within_patience(fetching).await.unwrap();
    assert_eq!(frames.len(), ROWS as usize);
    std::thread::spawn(move || drop(frames)).join().unwrap();
    let mut returned = 0;
    while returned < ROWS as usize {
        let ClientPacket::Return { loans } = raw.receive_from_client().await else { continue };
        returned += loans.len();
    }
    path.failure().map_or(Ok(()), Err).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_a_useless_answer_are_returned() {
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    let hit = FetchAnswer::Hit { tiers: in_dram(2) };
    let stale = wire::head_to_pb(&hit, Epoch(EPOCH.0 + 1));
    let nonsense = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(3) }, EPOCH);
    for (head, is_stale) in [(stale, true), (nonsense, false)] {
        let (path, mut raw) = forged().await;
        let fetching = {
            let path = Arc::clone(&path);
            tokio::spawn(async move { path.fetch(fetch_request(&hashes(2)), &mut |_| {}).await })
        };
        assert!(matches!(raw.receive_from_client().await, ClientPacket::Begin { op: 1, .. }));
        raw.send_to_client(&NodePacket::Head { op: 1, head, rows: vec![row(1, 0, len)] });
        let mut heard = [raw.receive_from_client().await, raw.receive_from_client().await];
        heard.sort_by_key(|packet| matches!(packet, ClientPacket::Return { .. }));
        let [cancel, came_back] = heard;
        assert_eq!(cancel, ClientPacket::Cancel { op: 1 });
        assert!(matches!(came_back, ClientPacket::Return { ref loans } if loans.len() == 1), "{came_back:?}");
        let answer = within_patience(fetching).await.unwrap();
        match is_stale {
            true => assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch }),
            false => assert!(answer.is_err()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_clients_take_no_slots() {
    let (node, _, _raw) = welcomed_client(server_config()).await;
    node.is_open.store(false, Ordering::Relaxed);
    let at = socket_path(&node.dir(), ADDRESS);
    let mut quiet = Vec::new();
    while quiet.len() < 4 * CONNECTIONS_MAX {
        match Seqpacket::connect(&at) {
            Ok(socket) => quiet.push(socket),
            // Its queue is full for a moment.
            Err(_) => tokio::task::yield_now().await,
        }
    }
    assert!(node.dial().await.is_err());
    node.is_open.store(true, Ordering::Relaxed);
    within_patience(within_patience(node.dial()).await.unwrap().ping()).await.unwrap();
    drop(quiet);
}

/// Sends as fast as it can until told to stop.
fn flood(raw: RawConnection, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        let mut op = 0;
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..64 {
                op += 1;
                raw.send_to_node(&ClientPacket::Cancel { op });
            }
            while matches!(raw.socket.recv(&mut buffer), Ok(seqpacket::RecvOutcome::Packet(..))) {}
        }
    })
}

#[test]
fn a_flooding_client_does_not_starve_others() {
    let quick = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&stop);
    // The node runs on one thread, the others on theirs.
    let node = std::thread::spawn(move || {
        quick.block_on(async move {
            let (node, _, raw) = welcomed_client(server_config()).await;
            let chatting = flood(raw, ending);
            sender.send(node.dir()).unwrap();
            while !chatting.is_finished() {
                tokio::task::yield_now().await;
            }
        });
    });
    let dir = receiver.recv().unwrap();
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    clients.block_on(async {
        let path =
            within_patience(ShmDialer::new(ShmConfig::new(dir)).dial(ADDRESS.to_owned())).await.unwrap();
        for _ in 0..100 {
            within_patience(path.ping()).await.unwrap();
        }
    });
    stop.store(true, Ordering::Relaxed);
    node.join().unwrap();
}

/// Panics in every operation.
struct PanickingService;

impl BlockService for PanickingService {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        Box::pin(async { panic!("a panic by design of the test") })
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        Box::pin(async { panic!("a panic by design of the test") })
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panicking_operation_ends_for_its_client() {
    let node = ShmTestNode::start(
        Arc::new(PanickingService),
        Some(BumpArena::new(ARENA_BYTES)),
        server_config(),
        true,
    );
    let mut raw = welcomed(&node).await;
    raw.send_to_node(&ClientPacket::Begin { op: 1, request: fetch_of(2) });
    assert_eq!(raw.receive_from_node().await, Some(NodePacket::Ended { op: 1 }));
    let path = node.dial().await.unwrap();
    assert!(within_patience(path.fetch(fetch_request(&hashes(2)), &mut |_| {})).await.is_err());
    within_patience(path.ping()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_read_is_abandoned() {
    let (path, _raw) = forged().await;
    let mut all: Vec<_> = (0..2000).map(|lease| path.release(LeaseId(lease))).collect();
    let mut failed = 0;
    for release in &mut all {
        let answer = std::future::poll_fn(|context| Poll::Ready(release.as_mut().poll(context))).await;
        failed += usize::from(matches!(answer, Poll::Ready(Err(_))));
    }
    assert!(failed > 1000 && path.failure().is_some(), "{failed}");
}

#[test]
fn a_runtime_shuts_down_while_its_node_sleeps() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (path, raw) = runtime.block_on(forged());
        let (begun, wait) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            let mut all: Vec<_> = (0..400).map(|lease| path.release(LeaseId(lease))).collect();
            for release in &mut all {
                poll_once(release.as_mut()).await;
            }
            begun.send(()).unwrap();
            std::future::pending::<()>().await;
        });
        runtime.block_on(wait).unwrap();
        drop(runtime);
        drop(raw);
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(PATIENCE).expect("the runtime must shut down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreturned_copies_cause_busy_and_keep_no_lease() {
    let config = ShmServerConfig { stall_timeout: Duration::from_millis(100), ..server_config() };
    let service = Arc::new(MemoryService::default());
    (0..3).for_each(|number| service.hold(frame(hash(number), 9 << 20)));
    let node = ShmTestNode::start(service.clone(), None, config, true);
    let socket = Seqpacket::connect(&socket_path(&node.dir(), ADDRESS)).unwrap();
    let mut raw = RawConnection { socket, files: Vec::new() };
    raw.send_to_node(&ClientPacket::Hello { wants_mapping: false });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Welcome(_))));
    raw.send_to_node(&ClientPacket::Begin { op: 1, request: fetch_of(3) });
    let mut rows = 0;
    let reason = loop {
        match raw.receive_from_node().await {
            Some(NodePacket::Head { rows: came, .. } | NodePacket::More { rows: came, .. }) => {
                rows += came.len();
            }
            Some(NodePacket::End { reason, .. }) => break reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((rows, reason), (2, MissReason::Busy as u32), "the bounce buffer's capacity, and no more");
    raw.send_to_node(&ClientPacket::Begin { op: 2, request: wire::release_to_pb(LeaseId(1)) });
    assert!(matches!(raw.receive_from_node().await, Some(NodePacket::Acknowledged { op: 2, .. })));
    assert_eq!((service.released(), node.stats().grants), (vec![LeaseId(1)], 0), "copies must hold no lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_cannot_take_every_connection() {
    let node = ShmTestNode::start(Arc::new(MemoryService::default()), None, server_config(), true);
    let mut paths = Vec::new();
    for _ in 0..CONNECTIONS_PER_PROCESS_MAX {
        paths.push(node.dial().await.unwrap());
    }
    assert!(node.dial().await.is_err());
    paths.pop();
    node.until(|numbers| numbers.connections < CONNECTIONS_PER_PROCESS_MAX).await;
    while node.dial().await.is_err() {}
}
