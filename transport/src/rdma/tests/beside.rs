//! Links that help a fetch which was asked over another: which are taken and which are not, and what is left to others meanwhile;
//! and how long a slow one is waited for.

use kv_core::id::Class;
use kv_core::pipeline::Arrive;
use kvfleet_proto::data;
use tokio::time::Instant;

use super::super::lane::{Besides, Lane, Lanes};
use super::super::words;
use super::hostile::{pass, say};
use super::rails::{NODE, Rails, both_help, interrupted, never, rails_of, these_help};
use super::*;
use crate::stream::read_message;
use crate::suite::{Rooms, frame_of};
use crate::{AskedLayers, wire};

/// Rails over all of which a fetch of twenty frames or so is read.
fn rails(service: &MemoryService, several: usize) -> Rails {
    let lending = |arena| LendingService { inner: service.clone(), arena, maps: true };
    rails_of(lending, (several, several), &RdmaConfig { large_bytes: 80_000, ..never() })
}

/// Lanes over two rails, without a path, once each has a link that nobody uses.
async fn two_lanes(rails: &Rails) -> (Arc<Lanes>, tokio::task::JoinHandle<()>) {
    let tcp = TcpDialer::new(&rails.world.authority.member(), TcpConfig::default());
    let tcp = tcp.open(&rails.world.address()).await.unwrap();
    let (locals, told) = (Local::of(&rails.clients).unwrap(), Arc::default());
    let lanes: Vec<Lane> = (0..2_u32)
        .map(|number| {
            let pair = pairs::Pair { local: number as usize, remote: number, is_spare: false };
            Lane::new(&locals[number as usize], pair, COOL_DOWN, &told)
        })
        .collect();
    let Asked::Made(first) = lanes[0].attach(&tcp).await.unwrap() else { panic!("no link") };
    let lanes = Arc::new(Lanes::new(tcp, (lanes, told), (0, *first), (4, Duration::from_secs(20))));
    let tending = tokio::spawn(Arc::clone(&lanes).tend());
    rails.world.until("the other has a link", |_| help(&lanes, &[], true).reaches().count() == 1).await;
    (lanes, tending)
}

/// What helps a large fetch that was asked over the first lane.
fn help<'a>(lanes: &'a Lanes, left_out: &[usize], may: bool) -> Besides<'a> {
    let mut besides = Besides::new(lanes, 0, left_out, may);
    besides.help(u64::MAX);
    besides
}

#[tokio::test]
async fn only_links_of_lanes_that_nothing_is_known_against_help() {
    let rails = rails(&holding(1, 1000), 2);
    let (lanes, tending) = two_lanes(&rails).await;
    tending.abort();
    let helps = |left_out: &[usize], may| help(&lanes, left_out, may).reaches().count();
    assert_eq!((helps(&[], true), helps(&[], false), helps(&[1], true)), (1, 0, 0));
    lanes.lane(1).is_in_doubt();
    assert_eq!(helps(&[], true), 0, "a link was given up on it with something under way");
}

#[tokio::test]
async fn who_helps_with_the_last_link_of_a_lane_leaves_the_next_operation_another() {
    let rails = rails(&holding(1, 1000), 2);
    let (lanes, tending) = two_lanes(&rails).await;
    let made = rails.world.fabric.queues_made();
    let helping = help(&lanes, &[], true);
    assert_eq!(helping.reaches().count(), 1);
    rails.world.until("another is made", |world| world.fabric.queues_made() >= made + 4).await;
    let until = Instant::now() + PATIENCE;
    let held = lanes.held((Class::Fetch, until), &[0], true).await.expect("it is there");
    assert_eq!(held.at, 1);
    drop((held, helping));
    tending.abort();
}

#[tokio::test]
async fn links_to_another_arena_do_not_read_beside() {
    let [first, second] = [0, 1].map(|_| world(&holding(1, 1000), true, &small()));
    let (own, same, other) = (first.link().await, first.link().await, second.link().await);
    assert!(own.reach().shares_arena(same.reach()));
    assert!(!own.reach().shares_arena(other.reach()) && !other.reach().shares_arena(own.reach()));
    let third = world(&holding(1, 1000), false, &small());
    let (copies, more) = (third.link().await, third.link().await);
    assert!(!copies.reach().shares_arena(more.reach()), "there is none");
}

#[tokio::test]
async fn a_large_fetch_that_nobody_waits_for_leaves_other_rails_to_those_who_do() {
    let service = holding(100, 4000);
    service.lie_ready();
    let rails = rails(&service, 2);
    let path = rails.path().await;
    both_help(&rails, async || drop(suite::fetch(path.as_ref(), fetch_request(&hashes(100))).await.unwrap()))
        .await;
    for class in [Class::Replicate, Class::Prefetch] {
        let before = rails.read();
        let mut request = fetch_request(&hashes(100));
        request.asker.class = Some(class);
        suite::fetch(path.as_ref(), request).await.unwrap();
        // A link is tried with less.
        let used = rails.read().iter().zip(before).filter(|(after, before)| *after - before > 40_000).count();
        assert_eq!(used, 1, "{class:?}");
    }
}

/// Of three rails one fails that only helps: the rest is read over both others, and nothing is held against the lane that was asked.
#[tokio::test]
async fn a_rail_that_fails_while_it_helps_costs_a_fetch_no_other() {
    let service = holding(300, 4000);
    let rails = rails(&service, 3);
    let path = rails.path().await;
    let whole = async || drop(suite::fetch(path.as_ref(), fetch_request(&hashes(300))).await.unwrap());
    both_help(&rails, whole).await;
    let before = rails.read();
    // The one that is asked is the first, so that this one is asked to help.
    interrupted(path.as_ref(), &service, 300, || rails.world.fabric.kill(NODE[1])).await;
    let failed: Vec<u64> = rails.clients.iter().map(|rdma| rdma.numbers().failed).collect();
    assert!(failed[0] == 0 && failed[1] > 0 && failed[2] == 0, "{failed:?}");
    let frames: Vec<u64> =
        rails.read().iter().zip(before).map(|(after, before)| (after - before) / 4000).collect();
    // All but what came before it failed.
    assert!(frames[1] < 60 && frames[0] + frames[2] >= 300 - 60, "{frames:?}");
    assert_eq!(rails.world.server.carried().sent_bytes(), 0);
    // How they shared that one hangs on whose thread ran; the next ones are read over both.
    these_help(&rails, &[0, 2], 60 * 4000, whole).await;
    let before = rails.read();
    suite::fetch(path.as_ref(), fetch_request(&hashes(5))).await.unwrap();
    assert!(rails.read()[0] > before[0], "the lane that was asked is in use");
}

/// While a client reads one half of the tray, the node fills the other.
#[tokio::test]
async fn a_tray_is_said_by_halves() {
    let service = holding(12, 150_000);
    service.lie_ready();
    let world = world(&service, false, &small());
    let mut link = world.link().await;
    say(&mut link.control, &wire::fetch_to_pb(&fetch_request(&hashes(12)))).await;
    let _: data::FetchHead = read_message(&mut link.control).await.unwrap();
    let tray = small().tray_bytes as u64;
    let mut blocks = Vec::new();
    // Nothing is given back.
    while blocks.len() < 2 {
        let lent: data::Lent = read_message(&mut link.control).await.unwrap();
        let rows = words::rows_from_bytes(&lent.rows).unwrap();
        assert!(!lent.is_last && rows.iter().map(|row| u64::from(row.len)).sum::<u64>() <= tray / 2);
        blocks.push(rows.len());
    }
    assert_eq!(blocks, [3, 3]);
}

/// What is read slowly is read: the node hears now and then that it is, and ends nobody over whom bytes come.
#[tokio::test]
async fn a_slow_network_keeps_its_link_as_long_as_bytes_come() {
    for by_layer in [false, true] {
        let service = MemoryService::default();
        service.lie_ready();
        (0..40).for_each(|number| service.hold(frame_of(hash(number), &[25_000; 4])));
        let world = world(&service, true, &small());
        // The clock goes faster than signs of life.
        let tcp = TcpConfig { silence_max: Duration::from_secs(3600), ..TcpConfig::default() };
        let dialer = RdmaDialer::new(&world.client, &world.authority.member(), tcp).unwrap();
        let path = dialer.dial(world.address()).await.unwrap();
        let made = world.fabric.queues_made();
        tokio::time::pause();
        let began = Instant::now();
        world.fabric.hold();
        let wanted = hashes(40);
        let mut rooms = Rooms::new(&wanted, 0..4);
        let fetch = async {
            let request = fetch_request(&wanted);
            if by_layer {
                let asked = AskedLayers { layers: 0..4, arrive: Arrive::ByLayer };
                return path.fetch_layers(request, asked, &mut rooms).await;
            }
            suite::fetch(path.as_ref(), request).await
        };
        let slowly = async {
            loop {
                // Nobody finds nothing to do meanwhile, so that the clock goes on here alone.
                world.until("some are under way", |world| world.fabric.held() > 0).await;
                pass(Duration::from_millis(1500)).await;
                world.fabric.let_go();
                world.fabric.hold();
            }
        };
        let answer = tokio::select! {
            answer = fetch => answer.unwrap(),
            () = slowly => panic!("it goes on as long as the fetch"),
        };
        let took = began.elapsed();
        tokio::time::resume();
        assert_eq!(answer, FetchAnswer::Hit { tiers: in_dram(40) });
        assert!(took > TcpConfig::default().stall_timeout, "a node that hears nothing ends it: {took:?}");
        assert_eq!((service.deadlines().len(), world.fabric.queues_made()), (1, made), "over one link");
        assert_eq!(world.server.carried().sent_bytes(), 0);
    }
}
