//! Reports run independently of requests, with any subset of the routers, and end with a final
//! report.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_core::id::{InstanceId, NodeId};
use kv_core::schedule::InstanceRole;
use kvfleet_proto::pb;

use super::authority::{Authority, config, network};
use super::fetching::{call, source};
use super::routing::{FakeRouter, decision, serve_fake, unused_address};
use crate::{Client, InstanceLoad, ReporterConfig};

fn reporter_config(links: bool) -> ReporterConfig {
    ReporterConfig {
        manifest: None,
        instance: InstanceId(3),
        address: "i:3".to_owned(),
        host: "here".to_owned(),
        node: Some(NodeId(7)),
        interval: Duration::from_millis(2),
        links,
        orders_by_deadline: false,
        role: InstanceRole::Both,
        place: String::new(),
    }
}

/// Number of fetches in all reports that the fake router accepted, and the other fields of their
/// samples.
fn link_samples(fake: &FakeRouter) -> (u32, Vec<(u32, u32, u32)>) {
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
        .unwrap_or_else(|_| panic!("timed out waiting for {what}"));
}

#[tokio::test]
async fn link_samples_reach_every_router_once_even_after_an_outage() {
    let authority = Authority::new();
    let (steady, away) = (FakeRouter::new(Ok(decision(1))), FakeRouter::new(Ok(decision(1))));
    let (first, _serving) = serve_fake(&authority.router(), steady.clone()).await;
    let (second, _serving_too) = serve_fake(&authority.router(), away.clone()).await;
    let (network, _) = network(1, 6);
    let routers = vec![unused_address(), first, second];
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
    until("a report with the decode load", || {
        let reports = steady.reports.lock().unwrap();
        let of = |report: &pb::ReportRequest| {
            (report.kv_tokens_max, report.kv_tokens, report.tbt_us, report.chunk_tokens)
        };
        reports.iter().any(|report| of(report) == (1_000, 900, 9_000, 512))
    })
    .await;
    // Loopback has no path kind; all blocks came from DRAM.
    let key = vec![(0, 0, 2)];
    until("both routers to get the sample", || {
        link_samples(&steady) == (1, key.clone()) && link_samples(&away) == (1, key.clone())
    })
    .await;

    away.refuses_reports.store(true, Ordering::Relaxed);
    let refused = away.refused_reports.load(Ordering::Relaxed);
    fetch().await;
    fetch().await;
    until("the other router to get the samples", || link_samples(&steady).0 == 3).await;
    until("reports to be refused", || away.refused_reports.load(Ordering::Relaxed) > refused + 3).await;
    assert_eq!(link_samples(&away).0, 1);
    running.store(5, Ordering::Relaxed);
    away.refuses_reports.store(false, Ordering::Relaxed);
    until("the missed samples", || link_samples(&away).0 == 3).await;
    let count = away.reports.lock().unwrap().len();
    until("more reports", || away.reports.lock().unwrap().len() > count + 3).await;
    assert_eq!((link_samples(&steady).0, link_samples(&away).0), (3, 3), "a sample was reported twice");

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
async fn dropped_reporter_sends_final_report_and_links_only_if_enabled() {
    let authority = Authority::new();
    let fake = FakeRouter::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.router(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    let reporter = client.reporter(&reporter_config(false), InstanceLoad::default);
    client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    until("some reports", || fake.reports.lock().unwrap().len() > 3).await;
    drop(reporter);
    until("a goodbye", || fake.reports.lock().unwrap().last().is_some_and(|report| report.leaving)).await;
    assert_eq!(link_samples(&fake), (0, vec![]));
    assert_eq!(client.link_reader().take().len(), 1, "the client has one sample");
}

#[tokio::test]
async fn reports_pause_while_load_is_unknown() {
    let authority = Authority::new();
    let fake = FakeRouter::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.router(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    let (load, asked) = (Arc::new(Mutex::new(Some(InstanceLoad::default()))), Arc::<AtomicU32>::default());
    let (seen, counted) = (Arc::clone(&load), Arc::clone(&asked));
    let reporter = client.reporter_optional(&reporter_config(true), move || {
        counted.fetch_add(1, Ordering::Relaxed);
        *seen.lock().unwrap()
    });
    let count = || fake.reports.lock().unwrap().len();
    until("some reports", || count() > 3).await;
    *load.lock().unwrap() = None;
    let before = asked.load(Ordering::Relaxed);
    until("the load to be queried", || asked.load(Ordering::Relaxed) > before + 1).await;
    let silent_from = count();
    client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    until("the load to be queried again", || asked.load(Ordering::Relaxed) > before + 5).await;
    assert_eq!(count(), silent_from, "a report was sent only for links");
    *load.lock().unwrap() = Some(InstanceLoad { running: 9, ..InstanceLoad::default() });
    until("reports to resume", || fake.reports.lock().unwrap().last().unwrap().running == 9).await;
    assert_eq!(link_samples(&fake).0, 1, "samples measured during the pause must follow");
    *load.lock().unwrap() = None;
    reporter.stop().await;
    assert!(fake.reports.lock().unwrap().last().unwrap().leaving, "the final report was not sent");
}

#[tokio::test]
async fn separate_link_stats_are_not_shared() {
    let (network, _) = network(1, 6);
    let routers = vec!["127.0.0.1:1".to_owned()];
    let client = Client::with_dialer(config(routers, Authority::new().member()), Arc::new(network)).unwrap();
    let apart = client.with_separate_link_stats();
    apart.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
    assert_eq!((client.link_reader().take().len(), apart.link_reader().take().len()), (0, 1));
}

#[tokio::test]
async fn reporter_skips_measurements_before_its_start() {
    let authority = Authority::new();
    let fake = FakeRouter::new(Ok(decision(1)));
    let (address, _serving) = serve_fake(&authority.router(), fake.clone()).await;
    let (network, _) = network(1, 6);
    let client = Client::with_dialer(config(vec![address], authority.member()), Arc::new(network)).unwrap();
    for before in 1..3 {
        client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
        let reporter = client.reporter(&reporter_config(true), InstanceLoad::default);
        client.fetch(call(6, vec![source(0, 0, 6)])).await.unwrap();
        until("one of two samples", || link_samples(&fake).0 == before).await;
        reporter.stop().await;
    }
    assert_eq!(link_samples(&fake).0, 2, "only samples of fetches during a reporter's life");
}
