//! Ends that stand still, or never stop, and what goes on beside them.

use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::Poll;

use super::super::map::{Mapping, memory_file};
use super::super::packet::{ToClient, ToNode};
use super::super::seqpacket::Seqpacket;
use super::hostile::{Forger, PART, Raw, fetch_of, good_welcome, raw_client, row, welcomed};
use super::*;
use crate::suite::{EPOCH, PATIENCE};
use crate::{MissReason, wire};
use kv_core::id::Epoch;
use kv_core::lend::{Descriptor, Place};

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it comes")
}

/// Polls once what is not ready.
async fn begin<T>(mut work: Pin<&mut (impl Future<Output = T> + ?Sized)>) {
    std::future::poll_fn(|context| {
        assert!(work.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// A path to a forger that lends one block, and the forger's end.
async fn forged() -> (Arc<dyn Path>, Raw) {
    let forger = Forger::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    Mapping::to_write(&arena, PART).unwrap().write(0, &frame(hash(0), 1000).bytes).unwrap();
    let good = ToClient::Welcome(good_welcome()).encode();
    forger.welcome(&good, &[tray.as_fd(), arena.as_fd()]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_reads_for_all_and_is_not_polled_any_more_stops_nobody() {
    let (_node, service, _raw) = raw_client(server_config()).await;
    let path = _node.dial().await.unwrap();
    service.set_gate(0);
    let mut sink = |_| {};
    let mut waits = std::pin::pin!(path.fetch(fetch_request(&hashes(2)), &mut sink));
    begin(waits.as_mut()).await;
    for _ in 0..3 {
        soon(path.ping()).await.unwrap();
    }
    service.set_gate(100);
    assert_eq!(soon(waits).await.unwrap(), FetchAnswer::Hit { tiers: in_dram(2) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_node_had_no_room_for_is_sent_though_nobody_waits() {
    // More than its queue takes, and fewer than those with which it is given up.
    const RELEASES: u64 = 400;
    let (path, mut raw) = forged().await;
    let mut all: Vec<_> = (0..RELEASES).map(|lease| path.release(LeaseId(lease))).collect();
    for release in &mut all {
        begin(release.as_mut()).await;
    }
    for lease in 0..RELEASES {
        let request = wire::release_to_pb(LeaseId(lease));
        assert_eq!(raw.hear_client().await, ToNode::Ask { op: lease + 1, request });
    }
}

/// Whatever the node does: one that keeps to the rules says by itself that it is late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_goes_on_with_nothing_is_waited_for_until_the_deadline() {
    let len = u32::try_from(frame(hash(0), 1000).bytes.len()).unwrap();
    let head = wire::head_to_pb(&FetchAnswer::Hit { tiers: in_dram(2) }, EPOCH);
    for says in [None, Some(ToClient::Head { op: 1, head, rows: vec![row(1, 0, len)] })] {
        let (path, mut raw) = forged().await;
        let fetching = {
            let path = Arc::clone(&path);
            let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(2)) };
            tokio::spawn(async move { path.fetch(request, &mut |_| {}).await })
        };
        assert!(matches!(raw.hear_client().await, ToNode::Ask { op: 1, .. }));
        if let Some(head) = &says {
            raw.tell(head);
        }
        let reason = MissReason::TooLate;
        let expected = match says {
            None => FetchAnswer::Miss { reason },
            Some(_) => FetchAnswer::Partial { tiers: in_dram(1), reason },
        };
        assert_eq!(soon(fetching).await.unwrap().unwrap(), expected);
    }
}

/// An engine's thread has no runtime, and may be the last that touches a block.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_thread_gives_back_is_sent_though_the_node_had_no_room_for_it() {
    // One word each while the queue has room, which is less than these.
    const ROWS: u32 = 2000;
    let forger = Forger::new();
    let (tray, arena) = (memory_file(2 * PART).unwrap(), memory_file(PART).unwrap());
    let block = frame(hash(0), 1000).bytes;
    Mapping::to_write(&tray, 2 * PART).unwrap().write(PART, &block).unwrap();
    let good = ToClient::Welcome(good_welcome()).encode();
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
    assert!(matches!(raw.hear_client().await, ToNode::Ask { op: 1, .. }));
    let answer = FetchAnswer::Hit { tiers: in_dram(ROWS as usize) };
    let len = u32::try_from(block.len()).unwrap();
    let lent = |loan| Descriptor { place: Place::Tray, ..row(loan, 0, len) };
    let rows: Vec<Descriptor> = (1..=ROWS.into()).map(lent).collect();
    let (first, more) = rows.split_at(100);
    raw.tell(&ToClient::Head { op: 1, head: wire::head_to_pb(&answer, EPOCH), rows: first.to_vec() });
    for rows in more.chunks(100) {
        raw.tell(&ToClient::More { op: 1, rows: rows.to_vec() });
    }
    let frames = soon(fetching).await.unwrap();
    assert_eq!(frames.len(), ROWS as usize);
    std::thread::spawn(move || drop(frames)).join().unwrap();
    let mut returned = 0;
    while returned < ROWS as usize {
        let ToNode::Return { loans } = raw.hear_client().await else { continue };
        returned += loans.len();
    }
    path.failure().map_or(Ok(()), Err).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_an_answer_that_is_of_no_use_go_back() {
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
        assert!(matches!(raw.hear_client().await, ToNode::Ask { op: 1, .. }));
        raw.tell(&ToClient::Head { op: 1, head, rows: vec![row(1, 0, len)] });
        let mut heard = [raw.hear_client().await, raw.hear_client().await];
        heard.sort_by_key(|packet| matches!(packet, ToNode::Return { .. }));
        let [cancel, came_back] = heard;
        assert_eq!(cancel, ToNode::Cancel { op: 1 });
        assert!(matches!(came_back, ToNode::Return { ref loans } if loans.len() == 1), "{came_back:?}");
        let answer = soon(fetching).await.unwrap();
        match is_stale {
            true => assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch }),
            false => assert!(answer.is_err()),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_that_are_not_served_take_no_place_of_others() {
    let (node, _, _raw) = raw_client(server_config()).await;
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
    soon(soon(node.dial()).await.unwrap().ping()).await.unwrap();
    drop(quiet);
}

/// Talks as fast as it can until told to stop.
fn chat(raw: Raw, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = Box::new([0; PACKET_BYTES_MAX]);
        let mut op = 0;
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..64 {
                op += 1;
                raw.say(&ToNode::Cancel { op });
            }
            while matches!(raw.socket.recv(&mut buffer), Ok(seqpacket::Got::Packet(..))) {}
        }
    })
}

#[test]
fn a_client_that_never_stops_talking_keeps_nobody_from_being_served() {
    let quick = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&stop);
    // The node on one thread, the others on theirs.
    let node = std::thread::spawn(move || {
        quick.block_on(async move {
            let (node, _, raw) = raw_client(server_config()).await;
            let chatting = chat(raw, ending);
            sender.send(node.dir()).unwrap();
            while !chatting.is_finished() {
                tokio::task::yield_now().await;
            }
        });
    });
    let dir = receiver.recv().unwrap();
    let clients = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    clients.block_on(async {
        let path = soon(ShmDialer::new(ShmConfig::new(dir)).dial(ADDRESS.to_owned())).await.unwrap();
        for _ in 0..100 {
            soon(path.ping()).await.unwrap();
        }
    });
    stop.store(true, Ordering::Relaxed);
    node.join().unwrap();
}

/// Does not come to the end of a fetch.
struct Panics;

impl BlockService for Panics {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        Box::pin(async { panic!("a defect, as the test wants it") })
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        Box::pin(async { panic!("a defect, as the test wants it") })
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_asked_for_what_broke_hears_of_its_end() {
    let node = Node::start(Arc::new(Panics), Some(BumpArena::new(ARENA_BYTES)), server_config(), true);
    let mut raw = welcomed(&node).await;
    raw.say(&ToNode::Ask { op: 1, request: fetch_of(2) });
    assert_eq!(raw.hear_node().await, Some(ToClient::Ended { op: 1 }));
    let path = node.dial().await.unwrap();
    assert!(soon(path.fetch(fetch_request(&hashes(2)), &mut |_| {})).await.is_err());
    soon(path.ping()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_reads_nothing_is_given_up() {
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
fn a_runtime_that_ends_with_its_node_asleep_hangs_nobody() {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (path, raw) = runtime.block_on(forged());
        let (begun, wait) = tokio::sync::oneshot::channel();
        runtime.spawn(async move {
            let mut all: Vec<_> = (0..400).map(|lease| path.release(LeaseId(lease))).collect();
            for release in &mut all {
                begin(release.as_mut()).await;
            }
            begun.send(()).unwrap();
            std::future::pending::<()>().await;
        });
        runtime.block_on(wait).unwrap();
        drop(runtime);
        drop(raw);
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(PATIENCE).expect("the runtime ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_leaves_copies_lying_hears_busy_and_keeps_no_lease() {
    let config = ShmServerConfig { stall_timeout: Duration::from_millis(100), ..server_config() };
    let service = Arc::new(MemoryService::default());
    (0..3).for_each(|number| service.hold(frame(hash(number), 9 << 20)));
    let node = Node::start(service.clone(), None, config, true);
    let socket = Seqpacket::connect(&socket_path(&node.dir(), ADDRESS)).unwrap();
    let mut raw = Raw { socket, files: Vec::new() };
    raw.say(&ToNode::Hello { maps: false });
    assert!(matches!(raw.hear_node().await, Some(ToClient::Welcome(_))));
    raw.say(&ToNode::Ask { op: 1, request: fetch_of(3) });
    let mut rows = 0;
    let reason = loop {
        match raw.hear_node().await {
            Some(ToClient::Head { rows: came, .. } | ToClient::More { rows: came, .. }) => rows += came.len(),
            Some(ToClient::End { reason, .. }) => break reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((rows, reason), (2, MissReason::Busy as u32), "what the tray takes, and then no more");
    raw.say(&ToNode::Ask { op: 2, request: wire::release_to_pb(LeaseId(1)) });
    assert!(matches!(raw.hear_node().await, Some(ToClient::Noted { op: 2, .. })));
    assert_eq!((service.released(), node.numbers().loans), (vec![LeaseId(1)], 0), "copies hold no lease");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_does_not_take_every_place() {
    let node = Node::start(Arc::new(MemoryService::default()), None, server_config(), true);
    let mut paths = Vec::new();
    for _ in 0..CONNECTIONS_OF_ONE_MAX {
        paths.push(node.dial().await.unwrap());
    }
    assert!(node.dial().await.is_err());
    paths.pop();
    node.until(|numbers| numbers.connections < CONNECTIONS_OF_ONE_MAX).await;
    while node.dial().await.is_err() {}
}
