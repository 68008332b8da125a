//! State that survives restarts: SSD blocks of a node and the routers' index.

use kvfleet::args::TraceFormat;
use kvfleet::calls::RouterCalls;
use kvfleet::cluster::{LAYERS, LocalCluster, NodeCapacity, process_name};
use kvfleet::process::Role;
use kvfleet::replay::{TraceSource, load_workload};
use kvfleet_proto::pb;

use crate::support::{Workspace, shape};

/// Number of prefixes to compare holders of.
const PREFIXES: usize = 1000;

fn replay_on(place: &Workspace, cluster: &LocalCluster) -> serde_json::Value {
    let (routers, tls) = (cluster.router_addresses().join(","), cluster.certificates());
    place.replay(&["--cluster", &routers, "--tls-dir", tls.to_str().unwrap(), "--concurrency", "4"])
}

/// Holder runs for many prefixes, as one router sees them.
async fn lookups(router: &RouterCalls, prefixes: &[Vec<u8>]) -> Vec<Vec<pb::HolderRun>> {
    let mut answers = vec![];
    for prefix in prefixes {
        let request = pb::LookupRequest { hashes: prefix.clone(), ..pb::LookupRequest::default() };
        answers.push(router.lookup(request).await.unwrap().runs);
    }
    answers
}

fn prefixes(place: &Workspace) -> Vec<Vec<u8>> {
    let workload = load_workload(&TraceSource {
        path: &place.path("trace.jsonl"),
        format: TraceFormat::Auto,
        lenient: false,
        limit: None,
        block_tokens: None,
        tenant: 0,
        layers: LAYERS,
    });
    let requests = workload.unwrap().requests;
    let cuts =
        requests.iter().flat_map(|request| (1..=request.hashes.len()).map(|len| &request.hashes[..len]));
    let bytes = cuts.map(|cut| cut.iter().flat_map(|hash| hash.0).collect());
    bytes.take(PREFIXES).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ssd_blocks_survive_a_node_restart() {
    let place = Workspace::new();
    place.trace(120);
    let capacity = NodeCapacity { dram_blocks: 100, ssd_blocks: 20_000 };
    let mut cluster = LocalCluster::start(shape(&place, capacity)).await.unwrap();
    let first = tokio::task::block_in_place(|| replay_on(&place, &cluster));
    for number in [1, 2] {
        cluster.kill((Role::Node, number)).await.unwrap();
        cluster.restart((Role::Node, number)).await.unwrap();
    }
    cluster.until_serving().await.unwrap();
    let second = tokio::task::block_in_place(|| replay_on(&place, &cluster));
    cluster.stop().await;
    assert_eq!(second["wrong_bytes"], 0);
    assert_eq!(second["requests_ended"], second["requests"]);
    assert!(second["hits_by_tier"]["ssd"].as_u64().unwrap() > 0, "first {first:#} second {second:#}");
    assert!(
        second["block_hits"].as_u64().unwrap() > first["block_hits"].as_u64().unwrap(),
        "SSD blocks of the first replay must be hits of the second: {first:#} {second:#}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_recover_their_index() {
    let place = Workspace::new();
    place.trace(300);
    let capacity = NodeCapacity { dram_blocks: 20_000, ssd_blocks: 0 };
    let mut cluster = LocalCluster::start(shape(&place, capacity)).await.unwrap();
    tokio::task::block_in_place(|| replay_on(&place, &cluster));
    let prefixes = prefixes(&place);
    assert_eq!(prefixes.len(), PREFIXES, "the trace has too few prefixes");
    let routers = || RouterCalls::all(&cluster.router_addresses(), &cluster.identity().unwrap()).unwrap();
    let before = lookups(&routers()[0], &prefixes).await;
    assert!(before.iter().all(|runs| !runs.is_empty()), "a saved prefix is unknown");
    for number in [1, 2, 3] {
        cluster.kill((Role::Router, number)).await.unwrap();
    }
    for number in [1, 2, 3] {
        cluster.restart((Role::Router, number)).await.unwrap();
    }
    cluster.until_serving().await.unwrap();
    let routers = RouterCalls::all(&cluster.router_addresses(), &cluster.identity().unwrap()).unwrap();
    for (number, router) in (1..).zip(&routers) {
        let after = lookups(router, &prefixes).await;
        assert!(
            before == after,
            "{} answers differently after the restart",
            process_name((Role::Router, number))
        );
    }
    cluster.stop().await;
}
