//! Reports go on behind requests, whoever of the routers is there, and end with a goodbye.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_core::id::{InstanceId, NodeId};
use kv_core::schedule::Role;
use kvfleet_proto::pb;

use super::authority::{Authority, config, network};
use super::fetching::{call, source};
use super::routing::{Fake, decision, nobody, serve_fake};
use crate::{Client, InstanceLoad, ReporterConfig};

fn reporter_config(links: bool) -> ReporterConfig {
    ReporterConfig {
        manifest: None,
        instance: InstanceId(3),
        address: "i:3".to_owned(),
        host: "here".to_owned(),
        node: Some(NodeId(7)),
        every: Duration::from_millis(2),
        links,
        keeps_order: false,
        role: Role::Both,
        place: String::new(),
    }
}

/// What the fake took of fetches, all reports together: how many, and their samples' other fields.
fn told(fake: &Fake) -> (u32, Vec<(u32, u32, u32)>) {
    let reports = fake.reports.lock().unwrap();
    let samples = reports.iter().flat_map(|report| &report.links);
    let fetches = samples.clone().map(|sample| sample.fetches).sum();
    let mut keys: Vec<_> = samples.map(|sample| (sample.node, sample.path, sample.tier)).collect();
    keys.dedup();
    (fetches, keys)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waiting)
        .await
        .unwrap_or_else(|_| panic!("waited for {what}"));
}

#[tokio::test]
async fn what_fetches_came_to_is_told_to_every_router_once_and_to_one_that_was_away_later() {
    let authority = Authority::new();
    let (steady, away) = (Fake::new(Ok(decision(1))), Fake::new(Ok(decision(1))));
    let (first, _serving) = serve_fake(&authority.member(), steady.clone()).await;
    let (second, _serving_too) = serve_fake(&authority.member(), away.clone()).await;
    let (network, _) = network(1, 6);
    let routers = vec![nobody(), first, second];
    let client = Client::with_dialer(config(routers, authority.member()), Arc::new(network)).unwrap();
    let running = Arc::new(AtomicU32::new(4));
    let seen = Arc::clone(&running);
    let reporter = client.reporter(&reporter_config(true), move || InstanceLoad {
        queue_tokens: 100,
        running: seen.load(Ordering::Relaxed),
        waiting: 2,
        kv_tokens_max: 1_000,
        kv_tokens: 900,
        tbt_us: 9_000,
        chunk_tokens: 512,
    });
    let fetch = || async { client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap() };
    fetch().await;
    until("what decodes to be told", || {
        let reports = steady.reports.lock().unwrap();
        let of = |report: &pb::ReportRequest| {
            (report.kv_tokens_max, report.kv_tokens, report.tbt_us, report.chunk_tokens)
        };
        reports.iter().any(|report| of(report) == (1_000, 900, 9_000, 512))
    })
    .await;
    // Loopback is no kind of path; all of it came out of DRAM.
    let key = vec![(0, 0, 2)];
    until("both to hear of it", || told(&steady) == (1, key.clone()) && told(&away) == (1, key.clone()))
        .await;

    away.refuses_reports.store(true, Ordering::Relaxed);
    let refused = away.refused_reports.load(Ordering::Relaxed);
    fetch().await;
    fetch().await;
    until("the others to hear of it", || told(&steady).0 == 3).await;
    until("it to be refused", || away.refused_reports.load(Ordering::Relaxed) > refused + 3).await;
    assert_eq!(told(&away).0, 1);
    running.store(5, Ordering::Relaxed);
    away.refuses_reports.store(false, Ordering::Relaxed);
    until("what it missed", || told(&away).0 == 3).await;
    let count = away.reports.lock().unwrap().len();
    until("more reports", || away.reports.lock().unwrap().len() > count + 3).await;
    assert_eq!((told(&steady).0, told(&away).0), (3, 3), "each is told once");

    reporter.stop().await;
    let reports = away.reports.lock().unwrap().clone();
    let last = reports.last().unwrap();
    let load = |report: &pb::ReportRequest| (report.queue_tokens, report.running, report.waiting);
    assert_eq!((load(&reports[0]), load(last), last.leaving), ((100, 4, 2), (100, 5, 2), true));
    assert_eq!((last.instance, &*last.address, &*last.host), (3, "i:3", "here"));
    assert_eq!((last.has_node, last.node), (true, 7));
    assert!(reports.is_sorted_by(|a, b| (a.started_us, a.sequence) < (b.started_us, b.sequence)));
    assert!(reports[..reports.len() - 1].iter().all(|report| !report.leaving));
}

#[tokio::test]
async fn a_reporter_that_is_dropped_says_goodbye_and_tells_of_links_only_where_it_is_to() {
    let authority = Authority::new();
    let fake = Fake::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.member(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    let reporter = client.reporter(&reporter_config(false), InstanceLoad::default);
    client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    until("some reports", || fake.reports.lock().unwrap().len() > 3).await;
    drop(reporter);
    until("a goodbye", || fake.reports.lock().unwrap().last().is_some_and(|report| report.leaving)).await;
    assert_eq!(told(&fake), (0, vec![]));
    assert_eq!(client.link_reader().take().len(), 1, "there would have been something to tell");
}

#[tokio::test]
async fn an_engine_that_says_nothing_of_its_load_is_not_reported_and_comes_back() {
    let authority = Authority::new();
    let fake = Fake::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.member(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    let (load, asked) = (Arc::new(Mutex::new(Some(InstanceLoad::default()))), Arc::<AtomicU32>::default());
    let (seen, counted) = (Arc::clone(&load), Arc::clone(&asked));
    let reporter = client.reporter_while(&reporter_config(true), move || {
        counted.fetch_add(1, Ordering::Relaxed);
        *seen.lock().unwrap()
    });
    let count = || fake.reports.lock().unwrap().len();
    until("some reports", || count() > 3).await;
    *load.lock().unwrap() = None;
    let before = asked.load(Ordering::Relaxed);
    until("it to be asked", || asked.load(Ordering::Relaxed) > before + 1).await;
    let silent_from = count();
    client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    until("it to be asked again", || asked.load(Ordering::Relaxed) > before + 5).await;
    assert_eq!(count(), silent_from, "also not for the sake of links");
    *load.lock().unwrap() = Some(InstanceLoad { running: 9, ..InstanceLoad::default() });
    until("it to come back", || fake.reports.lock().unwrap().last().unwrap().running == 9).await;
    assert_eq!(told(&fake).0, 1, "what was measured meanwhile is told then");
    *load.lock().unwrap() = None;
    reporter.stop().await;
    assert!(fake.reports.lock().unwrap().last().unwrap().leaving, "a goodbye is said all the same");
}

#[tokio::test]
async fn fetches_with_links_apart_are_told_by_nobody_else() {
    let (network, _) = network(1, 6);
    let routers = vec!["127.0.0.1:1".to_owned()];
    let client = Client::with_dialer(config(routers, Authority::new().member()), Arc::new(network)).unwrap();
    let apart = client.with_links_apart();
    apart.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    assert_eq!((client.link_reader().take().len(), apart.link_reader().take().len()), (0, 1));
}

#[tokio::test]
async fn a_reporter_tells_nothing_of_what_was_before_it() {
    let authority = Authority::new();
    let fake = Fake::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.member(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    for before in 1..3 {
        client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
        let reporter = client.reporter(&reporter_config(true), InstanceLoad::default);
        client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
        until("one of two to be told", || told(&fake).0 == before).await;
        reporter.stop().await;
    }
    assert_eq!(told(&fake).0, 2, "those that were fetched while somebody reported");
}
