//! Reuse of memory: never before the card is done with it, and always detected by readers.

use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

use bytes::Bytes;
use kv_core::id::Epoch;
use kvfleet_proto::frame::Frame;
use kvfleet_transport::suite::EPOCH;
use kvfleet_transport::upgrade::TcpPath;
use kvfleet_transport::{BoxFuture, FetchReply, Frames, SaveOffer, SaveSession};

use super::*;

/// Logs to the fabric when the last reference to the bytes is dropped.
struct LoggedBuffer {
    place: PooledBuffer,
    fabric: Fabric,
}

impl AsRef<[u8]> for LoggedBuffer {
    fn as_ref(&self) -> &[u8] {
        self.place.bytes()
    }
}

impl Drop for LoggedBuffer {
    fn drop(&mut self) {
        self.fabric.note("the slot is free".to_owned());
    }
}

/// One block in the arena with a logged release.
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

    fn save(
        &self,
        _: kvfleet_transport::SaveRequest,
    ) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("this service accepts no saves")
    }

    fn release(&self, _: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn admit(&self, _: &kvfleet_transport::Caller) -> kvfleet_transport::CallerAdmission {
        kvfleet_transport::CallerAdmission::Scoped { service: Arc::new(self.clone()), may_map: true }
    }
}

/// A path with one link.
fn single_rail_path(tcp: TcpPath, local: &Arc<LocalRail>, link: RdmaLink) -> path::RdmaPath {
    let pair = rail_match::RailMatch { local: 0, remote: 0, is_spare: false };
    let told = Arc::default();
    let lane = rail_pair::RailPair::new(local, pair, FAILED_RAIL_RULES, &told);
    path::RdmaPath::new(rail_pair::RailPairs::new(tcp, vec![lane], told, 0, link, 1, Duration::from_secs(20)))
}

/// Cuts off a fetch during the client's reads, and returns the log of events.
async fn cut_off_fetch(is_refused: bool) -> Vec<String> {
    let fabric = Fabric::default();
    let config = small();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &config).unwrap());
    let memory = Arc::new(RdmaMemory::zeroed(1 << 20).unwrap());
    let offer = RdmaServer::new(&node, Some(&memory)).unwrap();
    let block = frame(hash(0), 1000);
    let mut place =
        RdmaBufferPool::new(&memory, 0..1 << 20).take(u32::try_from(block.bytes.len()).unwrap()).unwrap();
    place.write(&block.bytes);
    let bytes = Bytes::from_owner(LoggedBuffer { place, fabric: fabric.clone() });
    let service = OneBlock { frame: Arc::new(Mutex::new(Some(Frame { bytes, ..block }))) };
    let authority = TestAuthority::new();
    let server = bind(&authority.member(), &TcpConfig::default(), offer, Arc::new(service));
    let tcp = TcpDialer::new(&authority.member(), TcpConfig::default());
    let tcp = tcp.open(&server.local_addr().to_string()).await.unwrap();
    let local = LocalRail::new(&client).unwrap();
    let AttachOutcome::Attached(link) =
        RdmaLink::attach(&tcp, &local, 0, &local.rdma.transfers.peer_limit()).await.unwrap()
    else {
        panic!("no link")
    };
    let path = single_rail_path(tcp, &local, *link);
    let ours = Arc::downgrade(&local);
    drop(local);
    fabric.hold();
    if is_refused {
        // Before the cut: both ends start to destroy their queue pairs at once, each on its own
        // thread.
        fabric.refuse_destroy();
    }
    let request = FetchRequest { deadline: Duration::from_millis(300), ..fetch_request(&hashes(1)) };
    let cut = suite::fetch(&path, request).await.unwrap();
    assert_eq!(cut, FetchAnswer::Miss { reason: MissReason::TooLate });
    drop(path);
    drop(server);
    let over = async {
        // The maintenance task ends after the path. Memory that is never freed keeps the local
        // rail, too.
        while !is_refused && ours.strong_count() > 0 {
            tokio::task::yield_now().await;
        }
        // The remaining queue pairs are those that refused to be destroyed.
        while fabric.queues() != fabric.undestroyed_queues() {
            tokio::task::yield_now().await;
        }
        // Later teardowns run on the same thread.
        for rdma in [&node, &client] {
            let (done, heard) = tokio::sync::oneshot::channel();
            rdma.transfers.tear_down(Vec::new(), DropNotifier(Some(done)));
            heard.await.unwrap();
        }
    };
    tokio::time::timeout(PATIENCE, over).await.unwrap();
    fabric.release();
    fabric.log()
}

/// Sends a message when dropped.
struct DropNotifier(Option<tokio::sync::oneshot::Sender<()>>);

impl Drop for DropNotifier {
    fn drop(&mut self) {
        if let Some(told) = self.0.take() {
            let _ = told.send(());
        }
    }
}

#[tokio::test]
async fn memory_a_card_may_read_is_freed_only_after_its_queue_pair() {
    let log = cut_off_fetch(false).await;
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
async fn memory_a_card_may_read_forever_is_never_freed() {
    let log = cut_off_fetch(true).await;
    assert!(!log.iter().any(|line| line.contains("the slot is free")), "{log:?}");
}

#[tokio::test]
async fn a_buffer_returns_with_its_transfer_not_with_its_fetch() {
    let world = world(&service_with_blocks(1, 1000), true, &small());
    let local = LocalRail::new(&world.client).unwrap();
    let tcp = TcpDialer::new(&world.authority.member(), TcpConfig::default());
    let tcp = tcp.open(&world.address()).await.unwrap();
    let AttachOutcome::Attached(mut link) =
        RdmaLink::attach(&tcp, &local, 0, &local.rdma.transfers.peer_limit()).await.unwrap()
    else {
        panic!("no link")
    };
    world.fabric.hold();
    let before = local.transient.buffers_in_use();
    let place = local.transient.take(100).unwrap();
    let (_, _, reach) = link.split();
    let arriving = reach.read(kv_core::lease_grant::GrantMemory::BounceBuffer, 0, place).await.unwrap();
    drop(arriving);
    assert_eq!(local.transient.buffers_in_use(), before + 1, "the card may still write it");
    drop(link);
    world.wait_until("the buffer returned", |_| local.transient.buffers_in_use() == 0).await;
    assert!(world.log_position("end queue").is_some());
}

#[tokio::test]
async fn an_epoch_change_during_block_reads_is_detected() {
    for maps in [true, false] {
        let world = world(&service_with_blocks(3, 1000), maps, &small());
        let path = world.path().await;
        world.fabric.hold();
        let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
        let restarted = async {
            world.wait_until("all reads are in flight", |world| world.fabric.held() == 3).await;
            world.rdma_server.set_epoch(Epoch(EPOCH.0 + 1));
            world.fabric.release();
        };
        let (answer, ()) = tokio::join!(fetch, restarted);
        assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch });
    }
}

#[tokio::test]
async fn a_newer_epoch_in_another_answer_reaches_readers() {
    let service = service_with_blocks(3, 1000);
    let world = world(&service, true, &small());
    let (path, other) = (world.path().await, world.path().await);
    world.fabric.hold();
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let other = async {
        world.wait_until("all reads are in flight", |world| world.fabric.held() == 3).await;
        let newer = Epoch(EPOCH.0 + 1);
        service.set_epoch(newer);
        let request = FetchRequest { epoch: newer, ..fetch_request(&[hash(77)]) };
        assert_eq!(suite::fetch(other.as_ref(), request).await.unwrap().tiers().len(), 0);
        world.fabric.release();
    };
    let (answer, ()) = tokio::join!(fetch, other);
    assert_eq!(answer.unwrap(), FetchAnswer::Miss { reason: MissReason::StaleEpoch });
}

/// Blocks that a link did not bring are requested again over another link or the connection, but
/// only under the same epoch.
#[tokio::test]
async fn remaining_blocks_of_an_older_epoch_are_not_requested() {
    let service = service_with_blocks(5, 1000);
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
        let _ = seen.subscribe().wait_for(|seen| *seen == 2).await; // the sender is alive
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
async fn a_block_that_changes_during_its_read_fails_verification() {
    let world = world(&service_with_blocks(1, 1000), true, &small());
    let path = world.path().await;
    world.fabric.hold();
    let was_wrong = AtomicBool::new(false);
    let mut sink = |frame: Frame| {
        let is_wrong = frame.verify(suite::IDENTITY, hash(0)).is_err();
        was_wrong.store(is_wrong, std::sync::atomic::Ordering::Relaxed);
    };
    let fetch = path.fetch(fetch_request(&hashes(1)), &mut sink);
    let rot = async {
        world.wait_until("the read is in flight", |world| world.fabric.held() == 1).await;
        let transfer = *world.fabric.transfers().last().unwrap();
        let arena = world.arena.memory();
        arena.write(transfer.remote_address - arena.address() + u64::from(transfer.len) - 1, &[0xEE]);
        world.fabric.release();
    };
    tokio::join!(fetch, rot).0.unwrap();
    assert!(was_wrong.into_inner(), "the checksum must detect it");
}

/// Counts renewals of leases.
#[derive(Clone)]
struct RenewCounter {
    inner: SharedArenaService,
    renewed: Arc<std::sync::atomic::AtomicU32>,
}

impl BlockService for RenewCounter {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        self.inner.fetch(request)
    }

    fn save(
        &self,
        request: kvfleet_transport::SaveRequest,
    ) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        self.inner.save(request)
    }

    fn release(&self, lease: kv_core::id::LeaseId) -> BoxFuture<'_, ()> {
        self.inner.release(lease)
    }

    fn renew(&self, lease: kv_core::id::LeaseId) {
        assert_eq!(lease, fetch_request(&[]).context.lease);
        self.renewed.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }

    fn admit(&self, _: &kvfleet_transport::Caller) -> kvfleet_transport::CallerAdmission {
        kvfleet_transport::CallerAdmission::Scoped { service: Arc::new(self.clone()), may_map: true }
    }
}

#[tokio::test]
async fn leases_are_renewed_while_a_fetch_waits() {
    let fabric = Fabric::default();
    let [node, client] = [1, 2].map(|number| Rdma::from_rail(fabric.rail(number), &small()).unwrap());
    let memory = Arc::new(RdmaMemory::zeroed(1 << 20).unwrap());
    let arena = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
    let offer = RdmaServer::new(&node, Some(&memory)).unwrap().with_lease(Duration::from_millis(60));
    let (held, authority) = (service_with_blocks(3, 1000), TestAuthority::new());
    let inner = SharedArenaService { inner: held.clone(), arena, may_map: true };
    let service = RenewCounter { inner, renewed: Arc::default() };
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
    // First the medium is slow, then the client's card.
    held.set_gate(0);
    fabric.hold();
    let slow = async {
        wait(3).await.expect("leases must be renewed while the medium is slow");
        held.set_gate(3);
        while fabric.held() == 0 {
            tokio::task::yield_now().await;
        }
        wait(3).await.expect("leases must be renewed while grants are out");
        fabric.release();
    };
    let fetch = suite::fetch(path.as_ref(), fetch_request(&hashes(3)));
    let (hit, ()) = tokio::join!(fetch, slow);
    assert_eq!(hit.unwrap(), FetchAnswer::Hit { tiers: in_dram(3) });
}
