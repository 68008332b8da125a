//! An instance reports its measured links and the router prices with them. A node behind a
//! throttled relay is measured as slow and skipped.
//!
//! Not here: the inputs of a price (`kv_core::schedule`), and reports to an unreachable router
//! (`client/src/tests`).

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use kv_core::id::{BlockHash, InstanceId, NodeId, RouterId, Tier};
use kv_core::schedule::LinkPath;
use kvfleet::calls::{RouterCalls, channel, run_on_instance};
use kvfleet::cluster::{LAYERS, manifest};
use kvfleet_engine::mock::{Instance, InstanceConfig, TlsPaths};
use kvfleet_net::certificates::{Authority, CertificateFiles};
use kvfleet_net::tls::{Identity, Role, TlsFiles};
use kvfleet_node::{Node, NodeConfig, TlsSection};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{Router, RouterConfig, TlsConfig, VoterConfig};
use prometheus::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;

/// Timeout for each wait, far above the expected duration.
const TIMEOUT: Duration = Duration::from_secs(60);

const BLOCK_BYTES: u64 = 64 * 1024;
const BLOCK_TOKENS: u32 = 512;
/// 3 MiB: enough samples to keep an estimate valid half a minute later.
const BLOCKS: u32 = 48;

/// Rate limit of the relay, in bytes per second.
const THROTTLED_BYTES_PER_S: u64 = 4_000_000;

async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut probe: impl FnMut() -> F) -> T {
    let found = async {
        loop {
            if let Some(found) = probe().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, found).await.unwrap_or_else(|_| panic!("timed out waiting for {what}"))
}

/// Forwards connections to `to` and limits the rate of the replies.
async fn relay(listener: TcpListener, to: SocketAddr) {
    while let Ok((near, _)) = listener.accept().await {
        let far = TcpStream::connect(to).await.unwrap();
        let (mut from_client, mut to_client) = near.into_split();
        let (mut from_node, mut to_node) = far.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_node).await });
        tokio::spawn(async move {
            let (mut buffer, mut due) = (vec![0; 16 * 1024], Instant::now());
            while let Ok(bytes @ 1..) = from_node.read(&mut buffer).await {
                due = due.max(Instant::now())
                    + Duration::from_nanos(bytes as u64 * 1_000_000_000 / THROTTLED_BYTES_PER_S);
                tokio::time::sleep_until(due).await;
                if to_client.write_all(&buffer[..bytes]).await.is_err() {
                    return;
                }
            }
        });
    }
}

async fn router(place: &Path, authority: &Authority) -> (Router, String) {
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let CertificateFiles { ca, cert, key } = authority.issue(&Role::Router(Some(RouterId(1)))).unwrap();
    let config = RouterConfig {
        id: 1,
        listen: address.clone(),
        voters: vec![VoterConfig { id: 1, address: address.clone() }],
        data_dir: place.join("router"),
        tls: TlsConfig { ca, cert, key },
        shards: 1,
        ..RouterConfig::default()
    };
    (Router::start(config, &Registry::new()).await.unwrap(), address)
}

async fn node((place, authority): (&Path, &Authority), id: u32, router: &str, advertise: &str) -> Node {
    let CertificateFiles { ca, cert, key } = authority.issue(&Role::Node(Some(NodeId(id)))).unwrap();
    let config = NodeConfig {
        id,
        advertise: advertise.to_owned(),
        routers: vec![router.to_owned()],
        data_dir: place.join(format!("node-{id}")),
        dram_blocks: Some(256),
        block_bytes: BLOCK_BYTES,
        identity: IdentitySection::from(&manifest(BLOCK_TOKENS, LAYERS)),
        tls: TlsSection { ca, cert, key },
        ..NodeConfig::default()
    };
    Node::start(config, &Registry::new()).await.unwrap()
}

async fn instance(authority: &Authority, router: &str) -> Instance {
    let CertificateFiles { ca, cert, key } = authority.issue(&Role::Instance(Some(InstanceId(1)))).unwrap();
    let config = InstanceConfig {
        instance: 1,
        routers: vec![router.to_owned()],
        tls: TlsPaths { ca, cert, key },
        identity: manifest(BLOCK_TOKENS, LAYERS).digest().to_string(),
        block_bytes: BLOCK_BYTES,
        layers: LAYERS,
        fetch_floor_ms: 15_000,
        transport: "tcp".to_owned(),
        ..InstanceConfig::default()
    };
    Instance::start(config, &Registry::new()).await.unwrap()
}

/// Sends requests with a prompt of `BLOCKS` blocks to an instance.
struct InstanceCaller {
    address: String,
    identity: Identity,
}

impl InstanceCaller {
    async fn run(&self, decision: pb::Decision) -> pb::RunReply {
        let request = pb::RunRequest {
            request: 1,
            hashes: hashes(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: BLOCK_TOKENS * BLOCKS,
            decision: Some(decision),
            wait_save: true,
            ..pb::RunRequest::default()
        };
        run_on_instance(channel(&self.address, &self.identity, Role::Instance(None)).unwrap(), request)
            .await
            .unwrap()
    }

    async fn save_to(&self, node: &pb::NodeStatus) {
        let pb::NodeStatus { node, epoch, data_address, .. } = node.clone();
        let holder = pb::Holder { node, epoch, address: data_address, tier: Tier::Dram as u32 };
        let reply = self.run(pb::Decision { save_to: Some(holder), ..pb::Decision::default() }).await;
        assert_eq!(reply.saved_blocks, BLOCKS, "{reply:?}");
    }

    async fn fetch_from(&self, node: &pb::NodeStatus) {
        let pb::NodeStatus { node, epoch, data_address: address, .. } = node.clone();
        let (start_blocks, len_blocks, tier) = (0, BLOCKS, Tier::Dram as u32);
        let source = pb::Source { node, epoch, address, start_blocks, len_blocks, tier };
        let reply = self.run(pb::Decision { sources: vec![source], ..pb::Decision::default() }).await;
        assert_eq!((reply.hit_blocks, reply.wrong_bytes), (BLOCKS, 0), "{reply:?}");
    }
}

fn hashes() -> Vec<u8> {
    (1..=u64::from(BLOCKS)).flat_map(|number| BlockHash::from_words(7, number).0).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttled_node_is_measured_as_slow_and_skipped() {
    let place = tempfile::tempdir().unwrap();
    let authority = Authority::open(&place.path().join("tls")).unwrap();
    let CertificateFiles { ca, cert, key } = authority.issue(&Role::Admin).unwrap();
    let identity = TlsFiles { ca, cert, key }.load().unwrap();
    let (router, address) = router(place.path(), &authority).await;
    let here = (place.path(), &authority);
    let (quick, slow) = (node(here, 1, &address, "").await, node(here, 2, &address, "127.0.0.2").await);
    let listener = TcpListener::bind(("127.0.0.2", slow.data_addr().port())).await.unwrap();
    let relayed = tokio::spawn(relay(listener, slow.data_addr()));
    let instance = instance(&authority, &address).await;
    let calls = RouterCalls::new(&address, &identity).unwrap();
    let nodes = until("both nodes", || async {
        let nodes: Vec<_> = calls.status().await.ok()?.nodes.into_iter().filter(|node| node.live).collect();
        <[pb::NodeStatus; 2]>::try_from(nodes).ok()
    })
    .await;
    assert!(nodes[1].data_address.starts_with("127.0.0.2:"), "{nodes:?}");
    let engine = InstanceCaller { address: instance.local_addr().to_string(), identity };
    for node in &nodes {
        engine.save_to(node).await;
    }
    let rates = until("both links to be reported", || async {
        for node in &nodes {
            engine.fetch_from(node).await;
        }
        let links = calls.status().await.ok()?.links;
        let rate = |node| {
            let (path, tier) = (LinkPath::Tcp as u32, Tier::Dram as u32 + 1);
            let is_it = |link: &&pb::LinkStatus| {
                (link.node, link.own, link.path, link.tier) == (node, false, path, tier)
            };
            links.iter().find(is_it).map(|link| link.bytes_per_s)
        };
        Some((rate(1)?, rate(2)?))
    })
    .await;
    println!("{rates:?} bytes per second");
    // Frames are somewhat longer than their payload, and one buffer may pass at once.
    assert!(rates.1 <= THROTTLED_BYTES_PER_S * 5 / 4, "{rates:?}");
    assert!(rates.0 > 2 * rates.1, "{rates:?}");

    let decision = until("a decision that uses the measured links", || async {
        let request = pb::RouteRequest {
            request: 1,
            hashes: hashes(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: BLOCK_TOKENS * BLOCKS,
            ..pb::RouteRequest::default()
        };
        let reply = router_client(&address, &engine.identity).route(request).await.ok()?.into_inner();
        let Some(pb::route_reply::Answer::Decision(decision)) = reply.answer else { return None };
        let knows = |words: &str| decision.reasons.iter().any(|reason| reason.contains(words));
        (knows("dram of node-1 over tcp at ") && knows("dram of node-2 over tcp at ")).then_some(decision)
    })
    .await;
    assert_eq!(decision.sources.iter().map(|source| source.node).collect::<Vec<_>>(), [1], "{decision:?}");
    let why = |end: &str| decision.reasons.iter().any(|reason| reason.ends_with(end));
    assert!(why("as measured of that tier over that path: taken"), "{decision:?}");
    assert!(why("as measured of that tier over that path: passed over"), "{decision:?}");

    instance.shutdown().await;
    relayed.abort();
    quick.shutdown().await;
    slow.shutdown().await;
    router.shutdown().await;
}

fn router_client(
    address: &str,
    identity: &Identity,
) -> pb::router_client::RouterClient<tonic::transport::Channel> {
    pb::router_client::RouterClient::new(channel(address, identity, Role::Router(None)).unwrap())
}
