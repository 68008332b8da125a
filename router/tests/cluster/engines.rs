//! KV events through a whole router: recorded events of a real vLLM affect decisions; and, if one
//! is installed, a real vLLM itself.

use std::cell::Cell;
use std::io::Write;
use std::ops::Range;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_errors_doc::says;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::pb;
use kvfleet_router::{EngineConfig, EngineTenantConfig, EnginesConfig};
use tokio::io::{AsyncBufReadExt, BufReader};
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, HashBytes, until};
use kvfleet_testkit::ports::unused_address;
use kvfleet_testkit::write_secret;

/// Recorded messages of a vLLM publisher, from the first on.
const RECORDED: &str = include_str!("../../../engine-events/testdata/vllm-0.32.0.txt");

/// Secret of the tenant with the salt `tenant-a`.
const SECRET: [u8; 32] = [0x0a; 32];

fn hashes(secret: &[u8; 32], tokens: Range<u32>) -> Vec<HashBytes> {
    let manifest = IdentityManifest { block_tokens: 32, ..IdentityManifest::default() };
    let hasher = PrefixHasher::new(&manifest, secret);
    let (mut chain, mut blocks) = (hasher.start(), Vec::new());
    hasher.extend(&mut chain, &tokens.collect::<Vec<_>>(), &mut blocks);
    blocks.iter().map(|block| block.0).collect()
}

/// A cluster with two reporting instances; the first one is this engine.
async fn cluster(events: &str, replay: &str) -> Cluster {
    let secrets = tempfile::TempDir::new().unwrap();
    let secret_file = secrets.path().join("tenant-a");
    write_secret(&secret_file, &"0a".repeat(32));
    let manifest = IdentityManifest { block_tokens: 32, ..IdentityManifest::default() };
    let cluster = Cluster::start(1, |config| {
        config.engines = EnginesConfig {
            identity: IdentitySection::from(&manifest),
            public_hashes: true,
            tenants: vec![EngineTenantConfig {
                salt: "tenant-a".into(),
                secret_file: secret_file.clone(),
                tenant: 0,
            }],
            list: vec![EngineConfig {
                instance: 7,
                events: format!("tcp://{events}"),
                replay: if replay.is_empty() { String::new() } else { format!("tcp://{replay}") },
                topic: "kv".into(),
                ..EngineConfig::default()
            }],
            ..EnginesConfig::default()
        };
    })
    .await;
    cluster.leader().await;
    cluster
}

/// Chosen instance and its resident blocks for a request of these blocks. Both instances are idle.
async fn routed(cluster: &Cluster, sequence: &mut u64, hashes: &[HashBytes]) -> (u32, u32) {
    *sequence += 1;
    for instance in [7, 8] {
        cluster.client(1).report(load(instance, *sequence)).await.unwrap();
    }
    let blocks = hashes.len() as u32;
    let request = pb::RouteRequest {
        request: *sequence,
        hashes: hashes.concat(),
        block_tokens: 32,
        input_tokens: 32 * blocks,
        ..Default::default()
    };
    match cluster.client(1).route(request).await.unwrap().into_inner().answer {
        Some(pb::route_reply::Answer::Decision(decision)) => (decision.instance, decision.resident_blocks),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vllm_events_attract_requests() {
    let address = unused_address();
    let mut publisher = PubSocket::new();
    publisher.bind(&format!("tcp://{address}")).await.unwrap();
    let cluster = cluster(&address, "").await;
    let payloads: Vec<Vec<u8>> = RECORDED
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            line.as_bytes()
                .chunks(2)
                .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
                .collect()
        })
        .collect();
    let mut sequence = 0;
    let salted = hashes(&SECRET, 100..198);
    // A publisher does not know when a subscription is active: the first message is repeated until
    // it is received.
    let say = async |publisher: &mut PubSocket, number: u64| {
        let mut message = ZmqMessage::from("kv");
        message.push_back(number.to_be_bytes().to_vec().into());
        message.push_back(payloads[number as usize].clone().into());
        publisher.send(message).await.unwrap();
    };
    while routed(&cluster, &mut sequence, &salted).await != (7, 2) {
        say(&mut publisher, 0).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let expected = [
        (1, &salted, 3),
        // The same tokens without the salt are another prefix, as are those of other prompts.
        (2, &hashes(&[0; 32], 300..428), 4),
        (3, &hashes(&[0; 32], 500..692), 6),
        (4, &hashes(&[0; 32], 300..332), 1),
    ];
    for (number, hashes, resident) in expected {
        say(&mut publisher, number).await;
        while routed(&cluster, &mut sequence, hashes).await != (7, resident) {
            assert!(sequence < 6_000, "message {number} was not received");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    for gone in [&salted, &hashes(&[0; 32], 100..196), &hashes(&[0; 32], 500..692)] {
        let (_, resident) = routed(&cluster, &mut sequence, gone).await;
        assert_eq!(resident, 0);
    }
    cluster.shutdown().await;
}

/// Number of these blocks listed as resident, regardless of load.
async fn resident(cluster: &Cluster, sequence: &mut u64, hashes: &[HashBytes]) -> u32 {
    routed(cluster, sequence, hashes).await.1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_are_followed_and_unfollowed_at_run_time() {
    let (address, silent) = (unused_address(), unused_address());
    let mut publisher = PubSocket::new();
    publisher.bind(&format!("tcp://{address}")).await.unwrap();
    let cluster = cluster(&silent, "").await;
    let handle = cluster.routers[0].as_ref().unwrap().handle();
    let engine = |instance, events: &str| EngineConfig {
        instance,
        events: events.to_owned(),
        topic: "kv".into(),
        ..EngineConfig::default()
    };
    let events = format!("tcp://{address}");
    let first = RECORDED.lines().find(|line| !line.starts_with('#')).unwrap().as_bytes();
    let payload: Vec<u8> = first
        .chunks(2)
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
        .collect();
    let say = async |publisher: &mut PubSocket, number: u64| {
        let mut message = ZmqMessage::from("kv");
        message.push_back(number.to_be_bytes().to_vec().into());
        message.push_back(payload.clone().into());
        publisher.send(message).await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let (salted, mut sequence, mut number) = (hashes(&SECRET, 100..198), 0, 0);
    assert!(!handle.unfollow(8), "it is not followed yet");
    // Followed, unfollowed, and followed again under the same number.
    for round in 0..2 {
        assert_eq!(handle.follow(engine(8, &events)), Ok(()), "round {round}");
        assert_eq!(handle.follow(engine(8, &events)), Ok(()), "repeated");
        while routed(&cluster, &mut sequence, &salted).await != (8, 2) {
            assert!(sequence < 6_000, "round {round}: events not received");
            say(&mut publisher, number).await;
            number += 1;
        }
        assert!(handle.unfollow(8));
        until("its blocks to be forgotten", || async {
            let mut next = sequence;
            (resident(&cluster, &mut next, &salted).await == 0).then_some(())
        })
        .await;
        sequence += 1_000;
        assert!(!handle.unfollow(8), "once");
    }
    assert!(!handle.unfollow(7), "engines of the configuration stay followed");
    let refused = |engine: EngineConfig| handle.follow(engine).unwrap_err().to_string();
    let ranks = |instance, ranks| EngineConfig { ranks, ..engine(instance, &events) };
    says("an engine that comes with another's number", &refused(ranks(6, 2)), &[]);
    says("an engine that comes and would have to dial", &refused(engine(9, "")), &[]);
    assert!(refused(engine(9, "tcp://*:1")).contains("instance 9"));
    assert!(refused(ranks(u32::MAX, 2)).contains("no number"));
    for instance in 0..15 {
        assert_eq!(handle.follow(ranks(1_000 + 256 * instance, 256)), Ok(()));
    }
    says("an engine that comes when there are too many", &refused(ranks(9_000, 256)), &[]);
    cluster.shutdown().await;
}

/// A vLLM in its own process that computes the given prompts.
struct Vllm {
    process: Child,
    prompts: ChildStdin,
    answers: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl Vllm {
    async fn start(python: &str, [events, replay]: [&str; 2]) -> Vllm {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/vllm_engine.py");
        let port = |address: &str| address.rsplit(':').next().unwrap().to_owned();
        let mut process = Command::new(python)
            .args([script, &port(events), &port(replay)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let answers = tokio::process::ChildStdout::from_std(process.stdout.take().unwrap()).unwrap();
        let answers = BufReader::new(answers).lines();
        let prompts = process.stdin.take().unwrap();
        let mut vllm = Vllm { process, prompts, answers };
        vllm.hear("ready").await;
        vllm
    }

    /// Waits for a line; other lines are the engine's own output.
    async fn hear(&mut self, wanted: &str) {
        loop {
            let line = tokio::time::timeout(Duration::from_secs(300), self.answers.next_line()).await;
            let line = line.expect("an answer of vLLM within five minutes").unwrap().expect("vLLM runs");
            println!("vllm: {line}");
            if line == wanted {
                return;
            }
        }
    }

    async fn compute(&mut self, tokens: Range<u32>, salt: &str) {
        let tokens = tokens.map(|token| token.to_string()).collect::<Vec<_>>().join(",");
        writeln!(self.prompts, "{{\"tokens\": [{tokens}], \"salt\": \"{salt}\"}}").unwrap();
        self.hear("done").await;
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it may have ended
        let _ = self.process.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a vLLM: scripts/vllm installs one and runs this"]
async fn a_real_vllm_is_routed_to_by_its_resident_blocks() {
    let python =
        std::env::var("KVFLEET_VLLM_PYTHON").expect("KVFLEET_VLLM_PYTHON names a python that has vLLM");
    let (events, replay) = (unused_address(), unused_address());
    let mut vllm = Vllm::start(&python, [&events, &replay]).await;
    // Before the router starts: only a replay reports it.
    vllm.compute(100..199, "tenant-a").await;
    let cluster = cluster(&events, &replay).await;
    let sequence = Cell::new(0);
    let settled = async |salt: &[u8; 32], tokens: Range<u32>, expected: u32| {
        let hashes = hashes(salt, tokens.clone());
        until("the engine's blocks in a decision", || async {
            let mut next = sequence.get();
            let (instance, resident) = routed(&cluster, &mut next, &hashes).await;
            sequence.set(next);
            (resident == expected && (instance == 7 || expected == 0)).then_some(())
        })
        .await;
        let drawn = if expected == 0 { "" } else { ", and requests go there" };
        println!("tokens {tokens:?}: {expected} of {} blocks are at instance 7{drawn}", hashes.len());
    };
    settled(&SECRET, 100..199, 3).await;
    settled(&[0; 32], 100..199, 0).await;
    vllm.compute(300..430, "").await;
    settled(&[0; 32], 300..430, 4).await;
    // Memory for ten blocks: these evict the others.
    vllm.compute(500..700, "").await;
    settled(&[0; 32], 500..700, 6).await;
    settled(&SECRET, 100..199, 0).await;
    drop(vllm);
    let mut vllm = Vllm::start(&python, [&events, &replay]).await;
    vllm.compute(300..430, "").await;
    settled(&[0; 32], 300..430, 4).await;
    settled(&[0; 32], 500..700, 0).await;
    drop(vllm);
    cluster.shutdown().await;
}
