//! Concurrent requests with a common prefix, through a whole router with engines over ZeroMQ: the
//! second one counts on the prefix that the first one computes, while it may still come.
//!
//! Not here: the tracking of such prefixes (`kv_core::schedule::SentPrefixes`), and the gain
//! (`kvfleet-lab routers`).

use std::cell::Cell;
use std::time::Duration;

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{DialectConfig, EngineConfig, EnginesConfig};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, HashBytes, until};
use kvfleet_testkit::ports::unused_address;

const BLOCK_TOKENS: u32 = 32;

/// Blocks that prompts have in common: about 60 milliseconds of an H100.
const COMMON: u32 = 40;

/// Further blocks of each prompt.
const OWN: u32 = 8;

/// Time after the predicted first token at which a prefix stops counting as in flight, as in
/// `SentPrefixes`.
const GRACE: Duration = Duration::from_millis(500);

/// A vLLM.
const VLLM: u32 = 7;

/// An SGLang.
const SGLANG: u32 = 8;

/// An engine that does not report residency.
const UNREPORTED: u32 = 9;

fn manifest() -> IdentityManifest {
    IdentityManifest { block_tokens: BLOCK_TOKENS, ..IdentityManifest::default() }
}

/// Tokens of a prompt: equal `prefix` values give equal beginnings, and different `tail` values
/// different ends.
fn tokens(prefix: u32, tail: u32) -> Vec<u32> {
    let common = (0..COMMON * BLOCK_TOKENS).map(|at| prefix * 100_000 + at);
    common.chain((0..OWN * BLOCK_TOKENS).map(|at| 50_000 + tail * 1_000 + at)).collect()
}

fn hashes(tokens: &[u32]) -> Vec<HashBytes> {
    PrefixHasher::new(&manifest(), &[0; 32]).blocks(tokens).iter().map(|block| block.0).collect()
}

/// Encodes a store event for these tokens in msgpack: a map for vLLM, an array with signed hashes
/// for SGLang.
fn stored(dialect: DialectConfig, tokens: &[u32]) -> Vec<u8> {
    let text = |text: &str| [&[0xd9, text.len() as u8], text.as_bytes()].concat();
    let list = |items: Vec<Vec<u8>>| {
        let length = (items.len() as u32).to_be_bytes();
        [&[0xdd][..], &length, &items.concat()].concat()
    };
    let sign = if dialect == DialectConfig::Sglang { 0xd3 } else { 0xcf };
    let hash = |at: u32| [&[sign][..], &(u64::MAX - u64::from(tokens[0] + at)).to_be_bytes()].concat();
    let blocks = tokens.len() as u32 / BLOCK_TOKENS;
    let ids = tokens.iter().map(|token| [&[0xce][..], &token.to_be_bytes()].concat());
    let fields = [
        ("block_hashes", list((0..blocks).map(hash).collect())),
        ("parent_block_hash", vec![0xc0]),
        ("token_ids", list(ids.collect())),
        ("block_size", vec![BLOCK_TOKENS as u8]),
        ("lora_id", vec![0xc0]),
        ("medium", text("GPU")),
    ];
    let mut event = match dialect {
        DialectConfig::Vllm => [&[0x87][..], &text("type"), &text("BlockStored")].concat(),
        DialectConfig::Sglang => [&[0x97][..], &text("BlockStored")].concat(),
    };
    for (name, value) in fields {
        if dialect == DialectConfig::Vllm {
            event.extend(text(name));
        }
        event.extend(value);
    }
    [&[0x93, 0xcb][..], &1.0_f64.to_be_bytes(), &[0x91], &event, &[0]].concat()
}

/// An engine that publishes events.
struct PublishingEngine {
    dialect: DialectConfig,
    publisher: PubSocket,
    sent: u64,
}

impl PublishingEngine {
    async fn start(dialect: DialectConfig) -> (PublishingEngine, String) {
        let address = format!("tcp://{}", unused_address());
        let mut publisher = PubSocket::new();
        publisher.bind(&address).await.unwrap();
        (PublishingEngine { dialect, publisher, sent: 0 }, address)
    }

    async fn say(&mut self, tokens: &[u32]) {
        let mut message = ZmqMessage::from("kv");
        message.push_back(self.sent.to_be_bytes().to_vec().into());
        message.push_back(stored(self.dialect, tokens).into());
        self.sent += 1;
        self.publisher.send(message).await.unwrap();
    }
}

struct BurstScene {
    cluster: Cluster,
    engines: [(u32, PublishingEngine); 2],
    sequence: Cell<u64>,
}

impl BurstScene {
    /// A router that follows two engines, each with a known resident prompt.
    async fn start() -> BurstScene {
        let (vllm, at) = PublishingEngine::start(DialectConfig::Vllm).await;
        let engine = |instance, events, dialect| EngineConfig {
            instance,
            events,
            dialect,
            topic: "kv".into(),
            ..EngineConfig::default()
        };
        let configured = engine(VLLM, at, DialectConfig::Vllm);
        let cluster = Cluster::start(1, |config| {
            config.profile = "h100-8b".into();
            config.engines = EnginesConfig {
                identity: IdentitySection::from(&manifest()),
                public_hashes: true,
                list: vec![configured.clone()],
                ..EnginesConfig::default()
            };
        })
        .await;
        cluster.leader().await;
        let (sglang, at) = PublishingEngine::start(DialectConfig::Sglang).await;
        let handle = cluster.routers[0].as_ref().unwrap().handle();
        handle.follow(engine(SGLANG, at, DialectConfig::Sglang)).unwrap();
        let mut scene =
            BurstScene { cluster, engines: [(VLLM, vllm), (SGLANG, sglang)], sequence: Cell::new(0) };
        for at in 0..2 {
            scene.has(at, &tokens(900 + at as u32, 0)).await;
        }
        scene
    }

    /// Repeats a store event until the router knows it, since a publisher does not know when a
    /// subscription is active.
    async fn has(&mut self, at: usize, tokens: &[u32]) {
        let (instance, hashes) = (self.engines[at].0, hashes(tokens));
        for _ in 0..1_000 {
            self.engines[at].1.say(tokens).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
            let runs = self.cluster.lookup(1, &hashes, vec![]).await.runs;
            if runs.first().is_some_and(|run| run.instances == [instance]) {
                return;
            }
        }
        panic!("events of instance {instance} are not received");
    }

    /// Decision for this prompt if all instances are idle and only this one is eligible.
    async fn route(&self, instance: u32, tokens: &[u32]) -> pb::Decision {
        self.sequence.set(self.sequence.get() + 1);
        let sequence = self.sequence.get();
        for instance in [VLLM, SGLANG, UNREPORTED] {
            self.cluster.client(1).report(load(instance, sequence)).await.unwrap();
        }
        let request = pb::RouteRequest {
            request: sequence,
            hashes: hashes(tokens).concat(),
            block_tokens: BLOCK_TOKENS,
            input_tokens: tokens.len() as u32,
            candidates: Some(pb::CandidateSet { instances: vec![instance] }),
            ..Default::default()
        };
        match self.cluster.client(1).route(request).await.unwrap().into_inner().answer {
            Some(pb::route_reply::Answer::Decision(decision)) => decision,
            other => panic!("{other:?}"),
        }
    }
}

/// Whether a decision counts on another request's prefix.
fn counts_on_another(decision: &pb::Decision) -> bool {
    decision
        .reasons
        .iter()
        .any(|reason| reason.contains("being computed there for a request that goes before"))
}

fn prefill_us(decision: &pb::Decision) -> u64 {
    decision.predicted.as_ref().map_or(0, |predicted| predicted.prefill_us)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_of_a_burst_reuses_the_prefix_in_flight() {
    let scene = BurstScene::start().await;
    let fresh = Cell::new(0);
    for instance in [VLLM, SGLANG] {
        // Two requests with a new prompt; repeated if this machine was too slow between them.
        let (first, second) = until("a burst", || async {
            fresh.set(fresh.get() + 1);
            let first = scene.route(instance, &tokens(fresh.get(), 1)).await;
            assert!(!counts_on_another(&first), "the prompt is new: {first:?}");
            let second = scene.route(instance, &tokens(fresh.get(), 2)).await;
            counts_on_another(&second).then_some((first, second))
        })
        .await;
        assert_eq!((first.resident_blocks, first.recompute_blocks), (0, COMMON + OWN));
        assert_eq!((second.instance, second.recompute_blocks), (instance, OWN), "{second:?}");
        assert!(prefill_us(&second) * 3 < prefill_us(&first), "{first:?}\n{second:?}");
        assert!(
            second.priority_deadline_ms >= first.priority_deadline_ms,
            "it is ordered after the request that computes the prefix"
        );
        // Other instances do not have the prefix.
        let other = VLLM + SGLANG - instance;
        assert!(!counts_on_another(&scene.route(other, &tokens(fresh.get(), 3)).await));
    }
    // Without reports it is unknown whether the instance keeps prefixes.
    for tail in 0..4 {
        assert!(!counts_on_another(&scene.route(UNREPORTED, &tokens(500, tail)).await));
    }
    scene.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_prefix_expires_and_a_stored_one_is_resident() {
    let mut scene = BurstScene::start().await;
    for (at, instance) in [VLLM, SGLANG].into_iter().enumerate() {
        let prefix = 10 + at as u32;
        let first = scene.route(instance, &tokens(prefix, 1)).await;
        let predicted = first.predicted.unwrap();
        let ttft_us = predicted.queue_us + predicted.transfer_us + predicted.prefill_us;
        // The first token is due and no blocks were reported. The effect shows only after the
        // router's own timeout.
        tokio::time::sleep(Duration::from_micros(ttft_us) + GRACE).await;
        let second = scene.route(instance, &tokens(prefix, 2)).await;
        assert!(!counts_on_another(&second), "{second:?}");
        assert_eq!((second.resident_blocks, second.recompute_blocks), (0, COMMON + OWN));
        // The second request computes them.
        let prompt = tokens(prefix, 2);
        scene.has(at, &prompt).await;
        let third = scene.route(instance, &tokens(prefix, 3)).await;
        assert!(!counts_on_another(&third), "{third:?}");
        assert_eq!((third.resident_blocks, third.recompute_blocks), (COMMON, OWN), "{third:?}");
    }
    scene.cluster.shutdown().await;
}
