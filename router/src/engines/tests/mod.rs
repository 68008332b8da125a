//! A whole follower against a foreign ZeroMQ implementation as publisher and router. The engine
//! loses messages, restarts, keeps too few of them, and dials. Not here: payloads
//! (`tests/payloads.rs`), inconsistencies (`tests/lies.rs`), and the SGLang dialect
//! (`tests/sglang.rs`).
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use kv_core::id::{InstanceId, TenantId};
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_proto::identity::IdentitySection;
use prometheus::Registry;
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::*;
use crate::config::{DialectConfig, EngineTenantConfig};
use kvfleet_testkit::write_secret;
use payloads::EventBytes;
pub(super) use payloads::{batch, batch_at, cleared, removed, stored};

mod invalid_input;
mod payloads;
mod sglang;

fn manifest() -> IdentityManifest {
    IdentityManifest { block_tokens: 16, ..IdentityManifest::default() }
}

fn tokens(block: u64) -> Vec<u32> {
    (16 * block as u32..16 * (block as u32 + 1)).collect()
}

/// An engine with a publisher and a log of its messages.
struct TestEngine {
    publisher: PubSocket,
    topic: String,
    rank: u8,
    log: SentLog,
    next: u64,
    replaying: Option<JoinHandle<()>>,
}

/// Kept messages of an engine.
type SentLog = Arc<RwLock<VecDeque<(u64, Bytes)>>>;

impl TestEngine {
    /// An engine that listens at these ports; 0 takes a free one.
    async fn listening(events: u16, replay: u16) -> (TestEngine, u16, u16) {
        TestEngine::listening_of((events, replay), Some(Bytes::from_static(b"kv"))).await
    }

    /// As `listening`; its replays have this topic, or none.
    async fn listening_of((events, replay): (u16, u16), topic: Option<Bytes>) -> (TestEngine, u16, u16) {
        let mut publisher = PubSocket::new();
        let events = port_of(&publisher.bind(&format!("tcp://127.0.0.1:{events}")).await.unwrap());
        let mut router = RouterSocket::new();
        let replay = port_of(&router.bind(&format!("tcp://127.0.0.1:{replay}")).await.unwrap());
        let log = SentLog::default();
        let replaying = Some(tokio::spawn(serve_replays(router, topic, Arc::clone(&log))));
        (TestEngine { publisher, topic: "kv".into(), rank: 0, log, next: 0, replaying }, events, replay)
    }

    /// Publishes that a block is stored, unless the message is lost.
    async fn store(&mut self, block: u64, is_lost: bool) {
        let event = stored(&[block], block.checked_sub(1), &tokens(block));
        self.say(&batch(self.rank, &[event]), is_lost).await;
    }

    async fn say(&mut self, payload: &[u8], is_lost: bool) {
        let payload = Bytes::copy_from_slice(payload);
        let number = self.next;
        self.next += 1;
        self.log.write().push_back((number, payload));
        if !is_lost {
            self.publish(number).await;
        }
    }

    /// Sends frames unchanged, without counting or keeping them.
    async fn send(&mut self, frames: impl IntoIterator<Item = Bytes>) {
        let mut frames = frames.into_iter();
        let mut message = ZmqMessage::from(frames.next().expect("a frame"));
        frames.for_each(|frame| message.push_back(frame));
        self.publisher.send(message).await.unwrap();
    }

    /// Sends a kept message with this number again.
    async fn publish(&mut self, number: u64) {
        let kept = self.log.read().iter().find(|(known, _)| *known == number).cloned();
        let topic = Bytes::from(self.topic.clone());
        self.send([
            topic,
            Bytes::copy_from_slice(&number.to_be_bytes()),
            kept.expect("the message was sent").1,
        ])
        .await;
    }
}

impl Drop for TestEngine {
    fn drop(&mut self) {
        self.replaying.iter().for_each(JoinHandle::abort);
    }
}

/// Another process at the same ports.
async fn listening_again(events: u16, replay: u16) -> TestEngine {
    loop {
        // The ports are free once the router has closed its side.
        tokio::time::sleep(Duration::from_millis(50)).await;
        if let Ok((engine, ..)) = tokio::spawn(TestEngine::listening(events, replay)).await {
            return engine;
        }
    }
}

fn port_of(endpoint: &zeromq::Endpoint) -> u16 {
    match endpoint {
        zeromq::Endpoint::Tcp(_, port) => *port,
        other => panic!("{other}"),
    }
}

async fn serve_replays(mut router: RouterSocket, topic: Option<Bytes>, log: SentLog) {
    while let Ok(asked) = router.recv().await {
        let frames = asked.into_vec();
        let [who, delimiter, from] = &frames[..] else { panic!("{frames:?}") };
        let from = u64::from_be_bytes(from[..].try_into().unwrap());
        let kept: Vec<_> = log.read().iter().filter(|(number, _)| *number >= from).cloned().collect();
        for (number, payload) in kept.into_iter().chain([(u64::MAX, Bytes::new())]) {
            let mut message = ZmqMessage::from(who.clone());
            let number = Bytes::copy_from_slice(&number.to_be_bytes());
            message.push_back(delimiter.clone());
            [topic.clone(), Some(number), Some(payload)]
                .into_iter()
                .flatten()
                .for_each(|frame| message.push_back(frame));
            if router.send(message).await.is_err() {
                return;
            }
        }
    }
}

/// A router that follows these engines.
struct FollowingRouter {
    residency: Arc<RwLock<Residency>>,
    clock: Clock,
    registry: Registry,
    stop: CancellationToken,
}

impl FollowingRouter {
    async fn new(config: EnginesConfig) -> FollowingRouter {
        FollowingRouter::of(prepare(&config).await.unwrap())
    }

    fn of(prepared: EngineSetup) -> FollowingRouter {
        let (clock, registry, stop) = (Clock::start(), Registry::new(), CancellationToken::new());
        let residency = Arc::new(RwLock::new(Residency::new(10_000, clock.now())));
        let engines = FollowContext {
            residency: Arc::clone(&residency),
            clock,
            unix: UnixClock::start(),
            metrics: EngineMetrics::register(&registry).unwrap(),
            stop: stop.clone(),
        };
        engines.start(prepared);
        FollowingRouter { residency, clock, registry, stop }
    }

    /// Leading resident blocks of an instance for tokens from 0 on.
    fn resident(&self, instance: u32) -> u64 {
        self.resident_of(instance, &[0; 32])
    }

    /// The same for the tenant with this secret.
    fn resident_of(&self, instance: u32, secret: &[u8; 32]) -> u64 {
        let all: Vec<u32> = (0..40).flat_map(tokens).collect();
        let hashes = PrefixHasher::new(&manifest(), secret).blocks(&all);
        let statuses = self.residency.read().resident(&hashes, self.clock.now());
        statuses.iter().find(|one| one.instance == InstanceId(instance)).map_or(0, |one| one.blocks)
    }

    async fn until(&self, instance: u32, blocks: u64) {
        self.until_of(instance, &[0; 32], blocks).await;
    }

    async fn until_of(&self, instance: u32, secret: &[u8; 32], blocks: u64) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.resident_of(instance, secret) != blocks {
            let got = self.resident_of(instance, secret);
            assert!(
                tokio::time::Instant::now() < deadline,
                "{got} blocks of instance {instance}, expected {blocks}"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Repeats blocks until they are received: a publisher does not know when a subscription is
    /// active.
    async fn until_said(&self, engine: &mut TestEngine, instance: u32, blocks: u64) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.resident(instance) != blocks {
            assert!(
                tokio::time::Instant::now() < deadline,
                "{} blocks of {instance}",
                self.resident(instance)
            );
            for block in 0..blocks {
                engine.store(block, false).await;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Repeats the last message until it is received live: messages before an active subscription
    /// are lost, and a replay returns all of them.
    async fn until_live(&self, engine: &mut TestEngine) {
        let heard = || self.count("kvfleet_engine_messages_total", "before");
        let (before, deadline) = (heard(), tokio::time::Instant::now() + Duration::from_secs(60));
        while heard() == before {
            assert!(tokio::time::Instant::now() < deadline, "message {} was not received", engine.next - 1);
            engine.publish(engine.next - 1).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn until_connected(&self, is_connected: bool) {
        self.until_count("kvfleet_engine_connected", f64::from(u8::from(is_connected))).await;
    }

    /// Waits until a metric of instance 7 has this value.
    async fn until_count(&self, name: &str, value: f64) {
        self.until_count_of(name, "7", value).await;
    }

    async fn until_count_of(&self, name: &str, label: &str, value: f64) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        while self.count(name, label) != value {
            let got = self.count(name, label);
            assert!(tokio::time::Instant::now() < deadline, "{name} of {label} is {got}, expected {value}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn count(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let metrics =
            families.iter().filter(|family| family.name() == name).flat_map(|family| family.get_metric());
        let has =
            |metric: &&prometheus::proto::Metric| metric.get_label().iter().any(|pair| pair.value() == label);
        metrics
            .filter(has)
            .map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value())
            .sum()
    }
}

impl Drop for FollowingRouter {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn config(list: Vec<EngineConfig>) -> EnginesConfig {
    EnginesConfig {
        identity: IdentitySection::from(&manifest()),
        public_hashes: true,
        list,
        ..EnginesConfig::default()
    }
}

fn dialed(instance: u32, events: u16, replay: Option<u16>) -> EngineConfig {
    let at = |port| format!("tcp://127.0.0.1:{port}");
    EngineConfig {
        instance,
        events: at(events),
        replay: replay.map(at).unwrap_or_default(),
        topic: "kv".into(),
        dialect: DialectConfig::Vllm,
        ..EngineConfig::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn earlier_and_lost_messages_are_replayed() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    for block in 0..5 {
        engine.store(block, false).await;
    }
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    following.until(7, 5).await;
    following.until_live(&mut engine).await;
    engine.store(5, true).await;
    engine.store(6, true).await;
    engine.store(7, false).await;
    following.until(7, 8).await;
    following.until_count_of("kvfleet_engine_gaps_total", "filled", 1.0).await;
    assert_eq!(following.count("kvfleet_engine_connected", "7"), 1.0);
    // The last message is lost, without a later one.
    engine.store(8, true).await;
    following.until(7, 9).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_engine_keeps_its_blocks_and_a_gone_one_does_not() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    engine.store(0, false).await;
    following.until(7, 1).await;
    // Longer than the silence limit of an instance.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    following.until(7, 1).await;
    drop(engine);
    following.until(7, 0).await;
    assert_eq!(following.count("kvfleet_engine_connected", "7"), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_has_the_new_process_blocks() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    for block in 0..5 {
        engine.store(block, false).await;
    }
    following.until(7, 5).await;
    drop(engine);
    let mut engine = listening_again(events, replay).await;
    for block in 0..3 {
        engine.store(block, true).await;
    }
    following.until(7, 3).await;
    engine.store(3, false).await;
    following.until(7, 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_engine_counts_as_one_process() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    // Some messages are lost, and others are in transit while replays return them too.
    for block in 0..40 {
        engine.store(block, block % 7 == 3).await;
        if block % 5 == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    following.until(7, 40).await;
    assert_eq!(following.count("kvfleet_engine_restarts_total", "7"), 0.0);
    assert_eq!(following.count("kvfleet_engine_gaps_total", "lost"), 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn reordered_messages_are_replayed_without_loss() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    // A publisher does not know when a subscription is active; only live messages have a lag.
    while following.count("kvfleet_engine_lag_seconds", "7") == 0.0 {
        engine.store(0, false).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    following.until(7, 1).await;
    let gaps = following.count("kvfleet_engine_gaps_total", "7");
    // One process numbers its messages in order, so a decreasing number is taken for another
    // process.
    let first = engine.next;
    engine.store(1, true).await;
    engine.store(2, true).await;
    engine.publish(first + 1).await;
    engine.publish(first).await;
    following.until_count("kvfleet_engine_gaps_total", gaps + 2.0).await;
    assert_eq!(following.resident(7), 3);
    engine.say(&batch(0, &[removed(&[1])]), false).await;
    following.until(7, 1).await;
    engine.store(1, false).await;
    following.until(7, 3).await;
    assert_eq!(following.count("kvfleet_engine_gaps_total", "lost"), 0.0);
    assert_eq!(following.count("kvfleet_engine_restarts_total", "7"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_replay_invalidates_earlier_blocks() {
    let (mut engine, events, replay) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, Some(replay))])).await;
    for block in 0..5 {
        engine.store(block, false).await;
    }
    following.until(7, 5).await;
    for block in 5..9 {
        engine.store(block, true).await;
    }
    engine.log.write().clear();
    engine.say(&batch(0, &[stored(&[0], None, &tokens(0))]), false).await;
    following.until(7, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_replay_only_proved_blocks_survive_a_gap() {
    let (mut engine, events, _) = TestEngine::listening(0, 0).await;
    let following = FollowingRouter::new(config(vec![dialed(7, events, None)])).await;
    following.until_connected(true).await;
    // A publisher does not know when a subscription is active.
    while following.resident(7) == 0 {
        engine.say(&batch(0, &[stored(&[0], None, &tokens(0))]), false).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for block in 1..5 {
        engine.store(block, false).await;
    }
    following.until(7, 5).await;
    engine.store(5, true).await;
    engine.say(&batch(0, &[stored(&[2], Some(1), &tokens(2))]), false).await;
    following.until(7, 3).await;
    assert_eq!(following.count("kvfleet_engine_gaps_total", "lost"), 1.0);
    drop(engine);
    following.until_connected(false).await;
    let _engine = listening_again(events, 0).await;
    following.until_connected(true).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(following.resident(7), 0, "the blocks of the earlier process");
}

/// A router that expects engines to dial, by instance, topic and number of ranks.
async fn listening_for(engines: &[(u32, &str, u16)]) -> (String, FollowingRouter) {
    let of = |&(instance, topic, ranks): &(u32, &str, u16)| EngineConfig {
        instance,
        topic: topic.into(),
        ranks,
        ..EngineConfig::default()
    };
    // A port that was free a moment ago may be taken by now.
    loop {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = EnginesConfig { listen: free.to_string(), ..config(engines.iter().map(of).collect()) };
        match prepare(&config).await {
            Ok(prepared) => break (config.listen, FollowingRouter::of(prepared)),
            Err(StartError::EnginesListen { source, .. })
                if source.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(other) => panic!("{other}"),
        }
    }
}

async fn dialing(listen: &str, topic: &str, rank: u8) -> TestEngine {
    let mut publisher = PubSocket::new();
    publisher.connect(&format!("tcp://{listen}")).await.unwrap();
    TestEngine { publisher, topic: topic.into(), rank, log: Arc::default(), next: 0, replaying: None }
}

#[tokio::test]
async fn silent_connections_keep_no_engine_out() {
    let (listen, following) = listening_for(&[(7, "a", 1)]).await;
    let mut silent = Vec::new();
    // More than there are places; the first ones have made room for the last.
    for _ in 0..40 {
        let stream = tokio::net::TcpStream::connect(&listen).await.unwrap();
        silent.push(stream);
    }
    let mut engine = dialing(&listen, "a", 0).await;
    following.until_said(&mut engine, 7, 1).await;
    for _ in 0..40 {
        silent.push(tokio::net::TcpStream::connect(&listen).await.unwrap());
    }
    // A connection with a message stays.
    engine.store(1, false).await;
    following.until(7, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dialing_engines_are_identified_by_topic_and_batch_rank() {
    let (listen, following) = listening_for(&[(7, "a", 1), (20, "b", 2)]).await;
    let dial = |topic, rank| dialing(&listen, topic, rank);
    let mut engines = [dial("a", 0).await, dial("b", 1).await, dial("b", 0).await, dial("nobody", 0).await];
    for (engine, instance, blocks) in [(0, 7, 1), (1, 21, 2), (2, 20, 3)] {
        following.until_said(&mut engines[engine], instance, blocks).await;
    }
    engines[3].store(0, false).await;
    // Another process with the topic takes over; the engine dials again and takes it back.
    let mut other = dial("a", 0).await;
    following.until_said(&mut other, 7, 4).await;
    drop(other);
    let mut engine = dial("a", 0).await;
    following.until_said(&mut engine, 7, 2).await;
    // Longer than the silence limit of an instance.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    following.until(7, 2).await;
}

#[tokio::test]
async fn secrets_are_read_and_errors_name_the_salt() {
    use kvfleet_errors_doc::says;
    let folder = tempfile::TempDir::new().unwrap();
    let path = folder.path().join("secret");
    let with = |secret_file: &std::path::Path, salts: &[&str]| EnginesConfig {
        secret_file: secret_file.to_path_buf(),
        tenants: salts
            .iter()
            .map(|salt| EngineTenantConfig { salt: (*salt).into(), secret_file: path.clone(), tenant: 0 })
            .collect(),
        ..config(vec![])
    };
    let varying = folder.path().display().to_string();
    let refused = |config: &EnginesConfig| Tenants::load(config).unwrap_err();
    says("an engine's secret that is not there", &refused(&with(&path, &[])), &[&varying]);
    write_secret(&path, "abc");
    says("an engine's secret that is none", &refused(&with(&path, &[])), &[&varying]);
    write_secret(&path, &format!("{}\n", "0a".repeat(32)));
    let twice = EnginesConfig { tenants: with(&path, &["a", "a"]).tenants, ..config(vec![]) };
    says("a salt of two tenants", &refused(&twice), &[&varying]);
    says("two salts with one secret", &refused(&with(&path, &["a"])), &[]);
    let other = folder.path().join("other");
    write_secret(&other, &"0b".repeat(32));
    let tenants = Tenants::load(&with(&other, &["a"])).unwrap();
    assert_eq!((tenants.default_secret, tenants.secrets_by_salt["a"]), ([11; 32], [10; 32]));
    let numbered = |salts: &[(&str, u32, &std::path::Path)]| EnginesConfig {
        tenants: salts
            .iter()
            .map(|&(salt, tenant, file)| EngineTenantConfig {
                salt: salt.into(),
                tenant,
                secret_file: file.into(),
            })
            .collect(),
        ..config(vec![])
    };
    let tenants = Tenants::load(&numbered(&[("a", 3, &path), ("b", 0, &other)])).unwrap();
    assert_eq!([0, 3, 4].map(|tenant| tenants.salt(TenantId(tenant))), [None, Some("a"), None]);
    let twice = numbered(&[("a", 3, &path), ("b", 3, &other)]);
    says("two salts of one tenant", &refused(&twice), &[]);
    says("a tenant with a number and without a salt", &refused(&numbered(&[("", 3, &path)])), &[]);
}
