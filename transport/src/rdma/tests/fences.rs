//! When memory is used again: never before the card is done with it, and a reader always notices.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kv_core::id::Epoch;
use kvfleet_proto::frame::Frame;

use super::*;
use crate::suite::EPOCH;
use crate::{BoxFuture, FetchReply, Frames, SaveOffer, SaveSession};

/// Says in the fabric's log when nobody has the bytes any more.
struct Noted {
    place: Place,
    fabric: Fabric,
}

impl AsRef<[u8]> for Noted {
    fn as_ref(&self) -> &[u8] {
        self.place.bytes()
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.fabric.note("the slot is free".to_owned());
    }
}

/// One block in the arena whose end is noted.
#[derive(Clone)]
struct OneBlock {
    frame: Arc<Mutex<Option<Frame>>>,
}

impl BlockService for OneBlock {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        let frame = self.frame.lock().unwrap().take();
        let reply = FetchReply {
            answer: FetchAnswer::Hit { tiers: in_dram(1) },
            frames: Frames::ready(frame.into_iter().collect()),
            epoch: EPOCH,
            lendable: vec![true],
        };
        Box::pin(std::future::ready(reply))
    }

    fn save(&self, _: crate::SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("nothing is saved here")
    }

    fn release(&self, _: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn admit(&self, _: &crate::Caller) -> crate::Admission {
        crate::Admission::Scoped { service: Arc::new(self.clone()), maps: true }
    }
}

/// A path of one link.
fn one_lane(tcp: crate::tcp::TcpPath, local: &Arc<Local>, link: Link) -> path::RdmaPath {
    let pair = pairs::Pair { local: 0, remote: 0, is_spare: false };
    let told = Arc::default();
    let lane = lane::Lane::new(local, pair, COOL_DOWN, &told);
    path::RdmaPath::new(lane::Lanes::new(tcp, (vec![lane], told), (0, link), (1, Duration::from_secs(20))))
}

/// A fetch that is cut off while the client's card reads; the log of what happened then.
async fn cut_off(is_refused: bool) -> Vec<String> {
    let fabric = Fabric::default();
    let config = small();
    let [node, client] = [1, 2].map(|number| Rdma::over(fabric.rail(number), &config).unwrap());
    let memory = Arc::new(Memory::zeroed(1 << 20).unwrap());
    let offer = RdmaOffer::new(&node, Some(&memory)).unwrap();
    let block = frame(hash(0), 1000);
    let mut place = Pool::new(&memory, 0..1 << 20).take(u32::try_from(block.bytes.len()).unwrap()).unwrap();
    place.write(&block.bytes);
    let bytes = Bytes::from_owner(Noted { place, fabric: fabric.clone() });
    let service = OneBlock { frame: Arc::new(Mutex::new(Some(Frame { bytes, ..block }))) };
    let authority = Authority::new();
    let server = bind(&authority.member(), &TcpConfig::default(), offer, Arc::new(service));
    let tcp = TcpDialer::new(&authority.member(), TcpConfig::default());
    let tcp = tcp.open(&server.local_addr().to_string()).await.unwrap();
    let local = Local::new(&client).unwrap();
    let Asked::Made(link) = Link::attach(&tcp, (&local, 0), &local.rdma.flights.peer()).await.unwrap() else {
        panic!("no link")
    };
    let path = one_lane(tcp, &local, *link);
    let ours = Arc::downgrade(&local);
    drop(local);
    fabric.hold();
    if is_refused {
        // Before the cut: both ends begin to end their queue pairs with it, each on a thread of its own.
        fabric.refuse_end();
    }
    let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(1)) };
    let cut = suite::fetch(&path, request).await.unwrap();
    assert_eq!(cut, FetchAnswer::Miss { reason: MissReason::TooLate });
    drop(path);
    drop(server);
    let over = async {
        // What looks after the path ends behind it. What is never free keeps our end, too.
        while !is_refused && ours.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
        // Those that are left are those whose end was tried and refused.
        while fabric.queues() != fabric.unended() {
            tokio::task::yield_now().await;
        }
        // What comes after the end comes from the same thread.
        for rdma in [&node, &client] {
            let (done, heard) = tokio::sync::oneshot::channel();
            rdma.flights.end(Vec::new(), Told(Some(done)));
            heard.await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, over).await.unwrap();
    fabric.let_go();
    fabric.log()
}

/// Tells of its end.
struct Told(Option<tokio::sync::oneshot::Sender<()>>);

impl Drop for Told {
    fn drop(&mut self) {
        if let Some(told) = self.0.take() {
            let _ = told.send(());
        }
    }
}

#[tokio::test]
async fn what_a_card_may_still_read_is_free_only_after_its_queue_pair_ended() {
    let log = cut_off(false).await;
    let all = |what: &str| -> Vec<usize> {
        log.iter().enumerate().filter(|(_, line)| line.contains(what)).map(|(at, _)| at).collect()
    };
    let (node, client) = (all("end queue of fake1"), all("end queue of fake2"));
    assert_eq!((node.len(), client.len()), (2, 2), "{log:?}");
    let freed = all("the slot is free");
    assert!(freed.len() == 1 && node.iter().all(|ended| *ended < freed[0]), "{log:?}");
    let tray = all(&format!("deregister {} bytes", (1 << 20) + 64));
    assert!(tray.len() == 1 && node.iter().all(|ended| *ended < tray[0]), "{log:?}");
    let local = all(&format!("deregister {} bytes", (4 << 20) + (512 << 10)));
    assert!(local.len() == 1 && client.iter().all(|ended| *ended < local[0]), "{log:?}");
}

#[tokio::test]
async fn what_a_card_may_read_for_ever_is_never_free() {
    let log = cut_off(true).await;
    assert!(!log.iter().any(|line| line.contains("the slot is free")), "{log:?}");
}

#[tokio::test]
async fn a_place_comes_back_when_its_transfer_ends_and_not_with_its_fetch() {
    let world = world(&holding(1, 1000), true, &small());
    let local = Local::new(&world.client).unwrap();
    let tcp = TcpDialer::new(&world.authority.member(), TcpConfig::default());
    let tcp = tcp.open(&world.address()).await.unwrap();
    let Asked::Made(mut link) = Link::attach(&tcp, (&local, 0), &local.rdma.flights.peer()).await.unwrap()
    else {
        panic!("no link")
    };
    world.fabric.hold();
    let before = local.passing.places();
    let place = local.passing.take(100).unwrap();
    let (_, _, reach) = link.parts();
    let arriving = reach.read(kv_core::lend::Place::Tray, 0, place).await.unwrap();
    drop(arriving);
    assert_eq!(local.passing.places(), before + 1, "the card may write it");
    drop(link);
    world.until("given back", |_| local.passing.places() == 0).await;
    assert!(world.has("end queue").is_some());
}

#[tokio::test]
async fn an_epoch_that_changes_while_blocks_are_read_is_seen() {
    for maps in [true, false] {
        let world = world(&holding(3, 1000), maps, &small());
        let path = world.path().await;
        world.fabric.hold();
        let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
        let restarted = async {
            world.until("all are under way", |world| world.fabric.held() == 3).await;
            world.offer.answered(Epoch(EPOCH.0 + 1));
            world.fabric.let_go();
        };
        let (answer, ()) = tokio::join!(fetch, restarted);
        assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch });
    }
}

#[tokio::test]
async fn another_answer_under_a_newer_epoch_is_heard_by_who_reads() {
    let service = holding(3, 1000);
    let world = world(&service, true, &small());
    let (path, other) = (world.path().await, world.path().await);
    world.fabric.hold();
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let other = async {
        world.until("all are under way", |world| world.fabric.held() == 3).await;
        let newer = Epoch(EPOCH.0 + 1);
        service.set_epoch(newer);
        let request = FetchRequest { epoch: newer, ..fetch_request(&[hash(77)]) };
        assert_eq!(suite::fetch(other.as_ref(), request).await.unwrap().tiers().len(), 0);
        world.fabric.let_go();
    };
    let (answer, ()) = tokio::join!(fetch, other);
    assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch });
}

/// What a link did not bring is asked for again, over another or over the connection: of the same epoch, or not at all.
#[tokio::test]
async fn a_node_whose_epoch_changed_behind_a_broken_rail_is_not_asked_for_the_rest() {
    let service = holding(5, 1000);
    let world = world(&service, true, &small());
    let path = world.path().await;
    service.set_gate(2);
    let (seen, mut frames) = (tokio::sync::watch::Sender::new(0), Vec::new());
    let mut sink = |frame: Frame| {
        frames.push(frame);
        seen.send_replace(frames.len());
    };
    let fetch = path.fetch(fetch_request(&hashes(5)), &mut sink);
    let breaks = async {
        let _ = seen.subscribe().wait_for(|seen| *seen == 2).await; // the sender is here
        world.fabric.kill(1);
        service.set_epoch(Epoch(EPOCH.0 + 1));
        (0..5).for_each(|number| service.hold(frame(hash(number), 2000)));
        service.set_gate(100);
    };
    let (answer, ()) = tokio::join!(fetch, breaks);
    let expected = FetchAnswer::Partial { tiers: in_dram(2), reason: MissReason::StaleEpoch };
    assert_eq!(answer.unwrap(), expected);
    assert_eq!(frames.iter().map(|frame| frame.payload().len()).collect::<Vec<_>>(), [1000; 2]);
}

#[tokio::test]
async fn a_block_that_changes_while_it_is_read_is_not_taken_for_itself() {
    let world = world(&holding(1, 1000), true, &small());
    let path = world.path().await;
    world.fabric.hold();
    let was_wrong = AtomicBool::new(false);
    let mut sink = |frame: Frame| {
        let is_wrong = frame.verify(suite::IDENTITY, hash(0)).is_err();
        was_wrong.store(is_wrong, std::sync::atomic::Ordering::Relaxed);
    };
    let fetch = path.fetch(fetch_request(&hashes(1)), &mut sink);
    let rot = async {
        world.until("it is under way", |world| world.fabric.held() == 1).await;
        let transfer = *world.fabric.transfers().last().unwrap();
        let arena = world.arena.memory();
        arena.write(transfer.remote_address - arena.address() + u64::from(transfer.len) - 1, &[0xEE]);
        world.fabric.let_go();
    };
    tokio::join!(fetch, rot).0.unwrap();
    assert!(was_wrong.into_inner(), "the sum of its bytes says so");
}

/// Counts how often leases are renewed.
#[derive(Clone)]
struct Renewed {
    inner: LendingService,
    renewed: Arc<std::sync::atomic::AtomicU32>,
}

impl BlockService for Renewed {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.inner.fetch(request)
    }

    fn save(&self, request: crate::SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.inner.save(request)
    }

    fn release(&self, lease: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn renew(&self, lease: kv_core::id::LeaseId) {
        assert_eq!(lease, fetch_request(&[]).asker.lease);
        self.renewed.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }

    fn admit(&self, _: &crate::Caller) -> crate::Admission {
        crate::Admission::Scoped { service: Arc::new(self.clone()), maps: true }
    }
}

#[tokio::test]
async fn leases_are_renewed_while_a_fetch_waits() {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::over(fabric.rail(number), &small()).unwrap());
    let memory = Arc::new(Memory::zeroed(1 << 20).unwrap());
    let arena = Pool::new(&memory, 0..memory.len_bytes());
    let offer = RdmaOffer::new(&node, Some(&memory)).unwrap().leasing(Duration::from_millis(60));
    let (held, authority) = (holding(3, 1000), Authority::new());
    let inner = LendingService { inner: held.clone(), arena, maps: true };
    let service = Renewed { inner, renewed: Arc::default() };
    let renewed = Arc::clone(&service.renewed);
    let renewed = || renewed.load(std::sync::atomic::Ordering::SeqCst);
    let server = bind(&authority.member(), &TcpConfig::default(), offer, Arc::new(service));
    let dialer = RdmaDialer::new(&client, &authority.member(), TcpConfig::default()).unwrap();
    let path = dialer.dial(server.local_addr().to_string()).await.unwrap();
    let wait = |rounds: u32| {
        let (renewed, from) = (&renewed, renewed());
        tokio::time::timeout(PATIENCE, async move {
            while renewed() < from + rounds {
                tokio::task::yield_now().await;
            }
        })
    };
    // The medium is slow, then the client's card is.
    held.set_gate(0);
    fabric.hold();
    let slow = async {
        wait(3).await.expect("renewed while the medium is waited for");
        held.set_gate(3);
        while fabric.held() == 0 {
            tokio::task::yield_now().await;
        }
        wait(3).await.expect("renewed while what is lent is out");
        fabric.let_go();
    };
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let (hit, ()) = tokio::join!(fetch, slow);
    assert_eq!(hit.unwrap(), FetchAnswer::Hit { tiers: in_dram(3) });
}
