//! Helper links of a fetch: which links help, what remains for other operations, and how long a
//! slow link is waited for.

use kv_core::id::TrafficClass;
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::data;
use kvfleet_transport::LayerRequest;
use kvfleet_transport::suite::{CheckedSlices, frame_of};
use kvfleet_transport::upgrade::{read_message, wire};
use tokio::time::Instant;

use super::super::messages;
use super::super::rail_pair::{RailPair, RailPairs, SecondaryLinks};
use super::hostile::{advance_time, say};
use super::rails::{
    NODE, TestRails, fetch_interrupted, never_retry, rails_of, wait_all_rails_used, wait_rails_used,
};
use super::*;

/// Rails that a fetch of about twenty frames uses together.
fn rails(service: &MemoryService, several: usize) -> TestRails {
    let lending = |arena| SharedArenaService { inner: service.clone(), arena, may_map: true };
    rails_of(lending, (several, several), &RdmaConfig { large_bytes: 80_000, ..never_retry() })
}

/// Rail pairs over two rails, without a path, once each has an unused link.
async fn two_rail_pairs(rails: &TestRails) -> (Arc<RailPairs>, tokio::task::JoinHandle<()>) {
    let tcp = TcpDialer::new(&rails.world.authority.member(), TcpConfig::default());
    let tcp = tcp.open(&rails.world.address()).await.unwrap();
    let (locals, told) = (LocalRail::register_all(&rails.clients).unwrap(), Arc::default());
    let lanes: Vec<RailPair> = (0..2_u32)
        .map(|number| {
            let pair = rail_match::RailMatch { local: number as usize, remote: number, is_spare: false };
            RailPair::new(&locals[number as usize], pair, FAILED_RAIL_RULES, &told)
        })
        .collect();
    let AttachOutcome::Attached(first) = lanes[0].attach(&tcp).await.unwrap() else { panic!("no link") };
    let lanes = Arc::new(RailPairs::new(tcp, lanes, told, 0, *first, 4, Duration::from_secs(20)));
    let tending = tokio::spawn(Arc::clone(&lanes).maintain());
    rails
        .world
        .wait_until("the other rail pair has a link", |_| helpers(&lanes, &[], true).channels().count() == 1)
        .await;
    (lanes, tending)
}

/// Helpers of a large fetch over the first rail pair.
fn helpers<'a>(lanes: &'a RailPairs, left_out: &[usize], may: bool) -> SecondaryLinks<'a> {
    let mut besides = SecondaryLinks::new(lanes, 0, left_out, may);
    besides.add_bytes(u64::MAX);
    besides
}

#[tokio::test]
async fn only_links_of_unsuspected_rail_pairs_help() {
    let rails = rails(&service_with_blocks(1, 1000), 2);
    let (lanes, tending) = two_rail_pairs(&rails).await;
    tending.abort();
    let helps = |left_out: &[usize], may| helpers(&lanes, left_out, may).channels().count();
    assert_eq!((helps(&[], true), helps(&[], false), helps(&[1], true)), (1, 0, 0));
    lanes.rail_pair(1).mark_suspect();
    assert_eq!(helps(&[], true), 0, "a link was dropped with transfers in flight");
}

#[tokio::test]
async fn lending_the_last_link_as_helper_triggers_a_new_one() {
    let rails = rails(&service_with_blocks(1, 1000), 2);
    let (lanes, tending) = two_rail_pairs(&rails).await;
    let made = rails.world.fabric.queues_made();
    let helping = helpers(&lanes, &[], true);
    assert_eq!(helping.channels().count(), 1);
    rails.world.wait_until("another link is made", |world| world.fabric.queues_made() >= made + 4).await;
    let until = Instant::now() + PATIENCE;
    let held =
        lanes.acquire(TrafficClass::Fetch, until, &[0], true).await.expect("the new link must be available");
    assert_eq!(held.at, 1);
    drop((held, helping));
    tending.abort();
}

#[tokio::test]
async fn links_to_another_arena_do_not_help() {
    let [first, second] = [0, 1].map(|_| world(&service_with_blocks(1, 1000), true, &small()));
    let (own, same, other) = (first.link().await, first.link().await, second.link().await);
    assert!(own.channel().shares_arena(same.channel()));
    assert!(!own.channel().shares_arena(other.channel()) && !other.channel().shares_arena(own.channel()));
    let third = world(&service_with_blocks(1, 1000), false, &small());
    let (copies, more) = (third.link().await, third.link().await);
    assert!(!copies.channel().shares_arena(more.channel()), "there is no arena");
}

#[tokio::test]
async fn background_fetches_use_no_helper_rails() {
    let service = service_with_blocks(100, 4000);
    service.make_frames_ready();
    let rails = rails(&service, 2);
    let path = rails.path().await;
    wait_all_rails_used(&rails, async || {
        drop(suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap());
    })
    .await;
    for class in [TrafficClass::Replicate, TrafficClass::Prefetch] {
        let before = rails.read_bytes();
        let mut request = fetch_request(&hashes(100));
        request.context.class = Some(class);
        suite::fetch(path.as_ref(), request).await.unwrap();
        // The probe of a link reads less.
        let used =
            rails.read_bytes().iter().zip(before).filter(|(after, before)| *after - before > 40_000).count();
        assert_eq!(used, 1, "{class:?}");
    }
}

/// One of three rails fails while it helps: the other two read the remaining blocks, and the
/// fetch's own rail pair is not suspended.
#[tokio::test]
async fn a_failed_helper_rail_does_not_suspend_other_rails() {
    let service = service_with_blocks(300, 4000);
    let rails = rails(&service, 3);
    let path = rails.path().await;
    let whole = async || drop(suite::fetch(path.as_ref(), fetch_request(&hashes(300))).await.unwrap());
    wait_all_rails_used(&rails, whole).await;
    let before = rails.read_bytes();
    // The fetch uses the first rail, so this one is a helper.
    fetch_interrupted(path.as_ref(), &service, 300, || rails.world.fabric.kill(NODE[1])).await;
    let failed: Vec<u64> = rails.clients.iter().map(|rdma| rdma.stats().failed).collect();
    assert!(failed[0] == 0 && failed[1] > 0 && failed[2] == 0, "{failed:?}");
    let frames: Vec<u64> =
        rails.read_bytes().iter().zip(before).map(|(after, before)| (after - before) / 4000).collect();
    // All blocks except those that arrived before the failure.
    assert!(frames[1] < 60 && frames[0] + frames[2] >= 300 - 60, "{frames:?}");
    assert_eq!(rails.world.server.traffic().sent_bytes(), 0);
    // The division of that fetch depends on thread scheduling; the next fetches use both rails.
    wait_rails_used(&rails, &[0, 2], 60 * 4000, whole).await;
    let before = rails.read_bytes();
    suite::fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
    assert!(rails.read_bytes()[0] > before[0], "the fetch's own rail pair must stay in use");
}

/// While a client reads one half of the bounce buffer, the node fills the other.
#[tokio::test]
async fn the_bounce_buffer_is_granted_in_halves() {
    let service = service_with_blocks(12, 150_000);
    service.make_frames_ready();
    let world = world(&service, false, &small());
    let mut link = world.link().await;
    say(&mut link.control, &wire::fetch_to_pb(&fetch_request(&hashes(12)))).await;
    let _: data::FetchHead = read_message(&mut link.control).await.unwrap();
    let tray = small().bounce_buffer_bytes as u64;
    let mut blocks = Vec::new();
    // The client returns no grants.
    while blocks.len() < 2 {
        let lent: data::ReadGrants = read_message(&mut link.control).await.unwrap();
        let rows = messages::rows_from_bytes(&lent.rows).unwrap();
        assert!(!lent.is_last && rows.iter().map(|row| u64::from(row.len)).sum::<u64>() <= tray / 2);
        blocks.push(rows.len());
    }
    assert_eq!(blocks, [3, 3]);
}

/// Slow reads succeed: the client sends signs of progress, and the node ends no link while bytes
/// arrive.
#[tokio::test]
async fn a_slow_network_keeps_its_link_while_bytes_arrive() {
    for by_layer in [false, true] {
        let service = MemoryService::default();
        service.make_frames_ready();
        (0..40).for_each(|number| service.hold(frame_of(hash(number), &[25_000; 4])));
        let world = world(&service, true, &small());
        // The clock advances faster than keepalive messages.
        let tcp = TcpConfig { silence_max: Duration::from_secs(3600), ..TcpConfig::default() };
        let dialer = RdmaDialer::new(&world.client, &world.authority.member(), tcp).unwrap();
        let path = dialer.dial(world.address()).await.unwrap();
        let made = world.fabric.queues_made();
        tokio::time::pause();
        let began = Instant::now();
        world.fabric.hold();
        let wanted = hashes(40);
        let mut rooms = CheckedSlices::new(&wanted, 0..4);
        let fetch = async {
            let request = fetch_request(&wanted);
            if by_layer {
                let asked = LayerRequest { layers: 0..4, arrive: ArrivalOrder::ByLayer };
                return path.fetch_layers(request, asked, &mut rooms).await;
            }
            suite::fetch(path.as_ref(), request).await
        };
        let slowly = async {
            loop {
                // No other task is idle meanwhile, so only this one advances the clock.
                world.wait_until("some reads are in flight", |world| world.fabric.held() > 0).await;
                advance_time(Duration::from_millis(1500)).await;
                world.fabric.release();
                world.fabric.hold();
            }
        };
        let answer = tokio::select! {
            answer = fetch => answer.unwrap(),
            () = slowly => panic!("this loop must not end before the fetch"),
        };
        let took = began.elapsed();
        tokio::time::resume();
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(40) });
        assert!(
            took > TcpConfig::default().stall_timeout,
            "a node without signs of progress would have ended the link: {took:?}"
        );
        assert_eq!((service.deadlines().len(), world.fabric.queues_made()), (1, made), "over one link");
        assert_eq!(world.server.traffic().sent_bytes(), 0);
    }
}
