//! A follower on its own: tests feed it connection events, and a script answers its replays.
//!
//! Covered: the choice of connection, when and from where a replay is requested, and inconsistent
//! replays. Not here: numbers and blocks (`../rank/tests.rs`), and connections to engines
//! (`../tests.rs`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_core::id::InstanceId;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_engine_events::events::Dialect;
use kvfleet_errors_doc::says;
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::io::{DuplexStream, duplex};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use crate::clock::{Clock, UnixClock};
use crate::engines::aliases::Aliases;
use crate::engines::metrics::EngineMetrics;
use crate::engines::reporter::ResidencyReporter;
use crate::engines::tenants::Tenants;
use crate::engines::tests::{batch, removed, stored};
use crate::view::residency::Residency;

const INSTANCE: InstanceId = InstanceId(7);

/// Frames of one message.
type ReplayFrames = Vec<Bytes>;

/// A follower and the state that it updates.
struct FollowerBench {
    follower: Follower,
    known: FollowerState,
}

#[derive(Clone)]
struct FollowerState {
    residency: Arc<RwLock<Residency>>,
    registry: Registry,
    clock: Clock,
}

fn manifest() -> IdentityManifest {
    IdentityManifest { block_tokens: 16, ..IdentityManifest::default() }
}

impl FollowerBench {
    fn new(replay: Option<Endpoint>) -> FollowerBench {
        let (clock, registry) = (Clock::start(), Registry::new());
        let residency = Arc::new(RwLock::new(Residency::new(1_000, clock.now())));
        let tenants = Tenants {
            manifest: manifest(),
            secrets_by_salt: [].into(),
            salts_by_tenant: [].into(),
            default_secret: [0; 32],
        };
        let metrics = EngineMetrics::register(&registry).unwrap().for_rank(INSTANCE);
        let reporter = ResidencyReporter::new(Arc::clone(&residency), INSTANCE, clock, UnixClock::start());
        let aliases = Aliases::new(Arc::new(tenants));
        let rank = RankState::new(Dialect::Vllm, 0, aliases, reporter, metrics.clone());
        let follower = Follower { rank, replay, metrics, last_error: None };
        FollowerBench { follower, known: FollowerState { residency, registry, clock } }
    }

    /// Runs it on all these events until no more can come.
    async fn run(self, events: Vec<ConnectionEvent>) -> FollowerState {
        let (sender, receiver) = mpsc::channel(events.len());
        for one in events {
            sender.send(one).await.unwrap();
        }
        drop(sender);
        self.follower.run(receiver, CancellationToken::new()).await;
        self.known
    }
}

impl FollowerState {
    /// Number of leading resident blocks of tokens 0 to 319.
    fn resident(&self) -> u64 {
        let hashes = PrefixHasher::new(&manifest(), &[0; 32]).blocks(&(0..320).collect::<Vec<_>>());
        let statuses = self.residency.read().resident(&hashes, self.clock.now());
        statuses.first().map_or(0, |status| status.blocks)
    }

    fn count(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let metrics = families.iter().filter(|family| family.name() == name);
        let metrics = metrics.flat_map(|family| family.get_metric());
        let has =
            |metric: &&prometheus::proto::Metric| metric.get_label().iter().any(|pair| pair.value() == label);
        metrics.filter(has).map(|metric| metric.get_counter().get_value()).sum()
    }

    /// Filled gaps, unfilled gaps, and restarts.
    fn gaps_and_restarts(&self) -> [f64; 3] {
        [
            self.count("kvfleet_engine_gaps_total", "filled"),
            self.count("kvfleet_engine_gaps_total", "lost"),
            self.count("kvfleet_engine_restarts_total", "7"),
        ]
    }
}

/// Payload that stores the block with this number, counted from 0, after the one before it.
fn block(number: u64) -> Bytes {
    let tokens: Vec<u32> = (16 * number as u32..16 * (number as u32 + 1)).collect();
    batch(0, &[stored(&[number], number.checked_sub(1), &tokens)]).into()
}

fn brought(connection: u64, what: ConnectionEventKind) -> ConnectionEvent {
    ConnectionEvent { connection, kind: what }
}

fn up(connection: u64) -> ConnectionEvent {
    brought(connection, ConnectionEventKind::Up)
}

fn down(connection: u64) -> ConnectionEvent {
    brought(connection, ConnectionEventKind::Down)
}

/// A live message.
fn live_of(connection: u64, number: u64, payload: Bytes) -> ConnectionEvent {
    brought(connection, ConnectionEventKind::Message(EngineMessage { number, payload }))
}

/// One message of a replay.
fn of_replay(number: u64, payload: Bytes) -> ReplayFrames {
    vec![Bytes::new(), Bytes::from_static(b"kv"), Bytes::copy_from_slice(&number.to_be_bytes()), payload]
}

/// Messages that store the blocks with these numbers.
fn of_replay_all(numbers: std::ops::Range<u64>) -> Vec<ReplayFrames> {
    numbers.map(|number| of_replay(number, block(number))).collect()
}

fn end() -> ReplayFrames {
    of_replay(REPLAY_END, Bytes::new())
}

fn to_the_end(mut messages: Vec<ReplayFrames>) -> Vec<ReplayFrames> {
    messages.push(end());
    messages
}

/// Replay server with one scripted answer per request; records the requested numbers.
struct ReplayServer {
    endpoint: Endpoint,
    asked: Arc<Mutex<Vec<u64>>>,
    serving: JoinHandle<()>,
}

impl ReplayServer {
    async fn start(script: Vec<Vec<ReplayFrames>>) -> ReplayServer {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        let asked = Arc::<Mutex<Vec<u64>>>::default();
        let serving = tokio::spawn(serve(listener, script, Arc::clone(&asked)));
        ReplayServer { endpoint, asked, serving }
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().clone()
    }
}

impl Drop for ReplayServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Further requests than the script has answers end the connection.
async fn serve(listener: TcpListener, script: Vec<Vec<ReplayFrames>>, asked: Arc<Mutex<Vec<u64>>>) {
    let mut script = script.into_iter();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = Connection::from_stream(stream, Role::Dealer).await.unwrap();
        let from = from_of(&connection.receive().await.unwrap());
        asked.lock().push(from);
        let Some(answers) = script.next() else { continue };
        tokio::spawn(async move {
            for answer in answers {
                let frames: Vec<&[u8]> = answer.iter().map(|frame| &frame[..]).collect();
                if connection.send(&frames).await.is_err() {
                    return; // the client has read enough
                }
            }
            let _ = connection.receive().await; // keeps the connection until the client closes it
        });
    }
}

/// Parses a replay request: an empty delimiter, and the first number.
fn from_of(frames: &[Bytes]) -> u64 {
    let [delimiter, from] = frames else { panic!("{frames:?}") };
    assert!(delimiter.is_empty());
    u64::from_be_bytes(from[..].try_into().unwrap())
}

#[tokio::test]
async fn a_gap_is_replayed_and_duplicates_count_once() {
    let replays =
        ReplayServer::start(vec![to_the_end(of_replay_all(0..3)), to_the_end(of_replay_all(2..6))]).await;
    let live = |number| live_of(1, number, block(number));
    // Messages 3 and 4 are lost, and the last one is repeated.
    let heard = vec![up(1), live(5), live(6), live(6)];
    let known = FollowerBench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 2]);
    assert_eq!(known.resident(), 7);
    assert_eq!(known.gaps_and_restarts(), [1.0, 0.0, 0.0]);
    // 0, 1, 2 of the first replay; 3, 4, 5 of the second, which repeats the known 2; then 6. Live,
    // 5 was replayed already and 6 is repeated.
    let messages = ["applied", "before"].map(|outcome| known.count("kvfleet_engine_messages_total", outcome));
    assert_eq!(messages, [7.0, 3.0]);
}

#[tokio::test]
async fn a_replayed_store_does_not_undo_a_removal() {
    let gone = batch(0, &[removed(&[2])]);
    let replayed = [of_replay_all(0..3), vec![of_replay(3, gone.clone().into())]].concat();
    let replays =
        ReplayServer::start(vec![to_the_end(replayed.clone()), to_the_end(replayed[3..].to_vec())]).await;
    // The live stream repeats the last three, which the replay had overtaken; then the connection
    // is renewed.
    let late = (1..3).map(|number| live_of(1, number, block(number)));
    let heard = [up(1)].into_iter().chain(late).chain([live_of(1, 3, gone.into()), down(1), up(2)]);
    let known = FollowerBench::new(Some(replays.endpoint.clone())).run(heard.collect()).await;
    assert_eq!(replays.asked(), [0, 3]);
    assert_eq!((known.resident(), known.gaps_and_restarts()), (2, [0.0, 0.0, 0.0]));
}

#[tokio::test]
async fn an_unavailable_gap_leads_to_a_full_replay() {
    // Numbers continue, and the kept messages begin after the gap; they store the first blocks
    // again.
    let kept = || to_the_end((0..2).map(|number| of_replay(8 + number, block(number))).collect());
    let replays = ReplayServer::start(vec![to_the_end(of_replay_all(0..4)), kept(), kept()]).await;
    let heard = vec![up(1), live_of(1, 9, block(1)), live_of(1, 10, block(2))];
    let known = FollowerBench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 3, 0], "from the last applied message, then everything");
    assert_eq!(known.resident(), 3, "the fourth precedes the kept messages");
    assert_eq!(known.gaps_and_restarts(), [1.0, 0.0, 1.0]);
}

#[tokio::test]
async fn a_new_connection_is_the_same_process_only_with_our_last_message() {
    let other = batch(0, &[stored(&[40], None, &(900..916).collect::<Vec<_>>())]);
    let cases = [
        (to_the_end(of_replay_all(2..4)), true),
        // Another process with the same number of messages and other contents.
        (to_the_end(vec![of_replay(2, other.clone().into())]), false),
        // Or with fewer.
        (vec![end()], false),
    ];
    for (second, is_same) in cases {
        let (resident, counts, asked) =
            if is_same { (4, [0.0; 3], &[0, 2][..]) } else { (0, [0.0, 0.0, 1.0], &[0, 2, 0][..]) };
        let third = to_the_end(vec![of_replay(0, other.clone().into())]);
        let script = vec![to_the_end(of_replay_all(0..3)), second, third];
        let replays = ReplayServer::start(script).await;
        let heard = vec![up(1), down(1), up(2)];
        let known = FollowerBench::new(Some(replays.endpoint.clone())).run(heard).await;
        assert_eq!(replays.asked(), asked);
        assert_eq!(
            (known.resident(), known.gaps_and_restarts()),
            (resident, counts),
            "requested from {asked:?}"
        );
    }
}

#[tokio::test]
async fn only_the_newest_connection_counts() {
    let live = |connection, number| live_of(connection, number, block(number));
    let known = FollowerBench::new(None).run(vec![up(1), live(1, 0), live(1, 1)]).await;
    assert_eq!(known.resident(), 2);
    // The second connection took over: messages and end of the first are ignored.
    let heard = vec![up(1), live(1, 0), up(2), live(1, 1), down(1), live(2, 0), up(1), live(1, 1)];
    let known = FollowerBench::new(None).run(heard).await;
    assert_eq!((known.resident(), known.gaps_and_restarts()), (1, [0.0, 0.0, 1.0]));
    assert_eq!(known.count("kvfleet_engine_messages_total", "applied"), 2.0);
    // Messages after the end of all connections are ignored.
    let known = FollowerBench::new(None).run(vec![up(1), live(1, 0), down(1), live(1, 1)]).await;
    assert_eq!(known.count("kvfleet_engine_messages_total", "applied"), 1.0);
}

/// A follower that received blocks 0 to 2, and a connection over which it requests a replay from
/// the last of them.
async fn asking(
    answer: impl AsyncFnOnce(Connection<DuplexStream>, FollowerState),
) -> (FollowerBench, Result<ReplayStep, ReplayError>) {
    let mut bench = FollowerBench::new(None);
    for number in 0..3 {
        bench.follower.rank.receive(&EngineMessage { number, payload: block(number) });
    }
    let (ours, theirs) = duplex(1 << 20);
    let known = bench.known.clone();
    let answered = async {
        let mut theirs = Connection::handshake(theirs, Role::Dealer).await.unwrap();
        assert_eq!(from_of(&theirs.receive().await.unwrap()), 2);
        answer(theirs, known).await;
    };
    let asked = async {
        let ours = Connection::handshake(ours, Role::Dealer).await.unwrap();
        bench.follower.replay_over(ours, 2).await
    };
    let (step, ()) = tokio::join!(asked, answered);
    (bench, step)
}

async fn send(connection: &mut Connection<DuplexStream>, frames: &[Bytes]) {
    let frames: Vec<&[u8]> = frames.iter().map(|frame| &frame[..]).collect();
    connection.send(&frames).await.unwrap();
}

#[tokio::test]
async fn replay_messages_may_lack_a_topic_and_other_frames_end_the_replay() {
    let without_topic = |mut frames: ReplayFrames| {
        frames.remove(1);
        frames
    };
    let (bench, step) = asking(async |mut engine, _| {
        for number in 2..5 {
            send(&mut engine, &without_topic(of_replay(number, block(number)))).await;
        }
        send(&mut engine, &of_replay(5, block(5))).await;
        send(&mut engine, &without_topic(end())).await;
    })
    .await;
    assert!(matches!(step, Ok(ReplayStep::Continue)), "{step:?}");
    assert_eq!((bench.known.resident(), bench.follower.rank.last()), (6, Some(5)));
    // Each of them would be accepted with correct frames.
    let good = of_replay(3, block(3));
    let number = |bytes: &'static [u8]| Bytes::from_static(bytes);
    let with = |at: usize, frame: Bytes| {
        let mut frames = good.clone();
        frames[at] = frame;
        frames
    };
    let lies = [
        good[3..].to_vec(),
        good[2..].to_vec(),
        // A live message, which has no delimiter.
        good[1..].to_vec(),
        with(0, number(b"kv")),
        [&good[..], &[Bytes::new()]].concat(),
        [&[Bytes::new()], &good[..]].concat(),
        with(2, number(b"\0\0\0\0\0\0\x03")),
        with(2, number(b"\0\0\0\0\0\0\0\0\x03")),
        with(2, Bytes::new()),
    ];
    for lie in lies {
        let (bench, step) = asking(async |mut engine, _| {
            send(&mut engine, &of_replay(2, block(2))).await;
            send(&mut engine, &lie).await;
            send(&mut engine, &end()).await;
        })
        .await;
        assert!(matches!(step, Err(ReplayError::BadFrames)), "{lie:?}: {step:?}");
        assert_eq!((bench.known.resident(), bench.follower.rank.last()), (3, Some(2)), "{lie:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stalled_replay_times_out() {
    let begun = Instant::now();
    let (bench, step) = asking(async |mut engine, _| {
        send(&mut engine, &of_replay(2, block(2))).await;
        let _ = engine.receive().await; // silent, but connected
    })
    .await;
    assert!(matches!(step, Err(ReplayError::Timeout)), "{step:?}");
    assert_eq!(begun.elapsed().as_millis() / 10, REPLAY_TIMEOUT.as_millis() / 10);
    assert_eq!(bench.known.resident(), 3, "a stalled replay does not invalidate earlier blocks");
    // A replay with new messages may have lost its rest, the end included: it is requested again.
    let begun = Instant::now();
    let (bench, step) = asking(async |mut engine, _| {
        for number in 2..5 {
            send(&mut engine, &of_replay(number, block(number))).await;
            tokio::time::sleep(REPLAY_TIMEOUT - Duration::from_millis(1)).await;
        }
        let _ = engine.receive().await;
    })
    .await;
    assert!(matches!(step, Ok(ReplayStep::Retry)), "{step:?}");
    assert_eq!(bench.known.resident(), 5);
    assert!(begun.elapsed() > 3 * (REPLAY_TIMEOUT - Duration::from_millis(1)), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn keepalives_continue_during_a_busy_replay() {
    let (bench, step) = asking(async |mut engine, known| {
        for nth in 0..40 {
            // No message is new, and the next one always arrives before a keepalive is due.
            send(&mut engine, &of_replay(2, block(2))).await;
            tokio::time::sleep(SWEEP_INTERVAL / 3).await;
            if nth == 20 {
                *known.residency.write() = Residency::new(1_000, known.clock.now());
            }
        }
        send(&mut engine, &end()).await;
    })
    .await;
    assert!(matches!(step, Ok(ReplayStep::Continue)), "{step:?}");
    assert_eq!(bench.known.resident(), 3, "a keepalive restores lost residency");
}

#[tokio::test]
async fn an_endless_replay_is_abandoned() {
    let (bench, step) = asking(async |mut engine, _| {
        // The first two would not end it, and neither do repetitions.
        for number in [2, 3].into_iter().chain(std::iter::repeat(3)) {
            let message = of_replay(number, block(number));
            let frames: Vec<&[u8]> = message.iter().map(|frame| &frame[..]).collect();
            if engine.send(&frames).await.is_err() {
                return;
            }
        }
    })
    .await;
    assert!(matches!(step, Err(ReplayError::TooLong)), "{step:?}");
    // On a busy machine it takes longer than the silence limit of an instance.
    assert_eq!(bench.known.resident(), 4, "the instance stays alive");
    // All messages that can be kept are read, except the end marker.
    let before = bench.known.count("kvfleet_engine_messages_total", "before");
    assert_eq!(before, REPLAY_MESSAGES_MAX as f64);
}

#[tokio::test]
async fn fruitless_replays_are_bounded() {
    // Alternates a replay without our first message and one with a hole after its first.
    let hole = || vec![of_replay(5, block(0)), of_replay(9, block(1))];
    let other = || vec![of_replay(7, block(2))];
    let script = (0..REPLAY_ATTEMPTS_MAX + 2).map(|nth| if nth % 2 == 0 { hole() } else { other() });
    let replays = ReplayServer::start(script.collect()).await;
    let mut bench = FollowerBench::new(Some(replays.endpoint.clone()));
    let asked = bench.follower.replay_all(&replays.endpoint).await;
    assert!(matches!(asked, Err(ReplayError::TooLong)), "{asked:?}");
    assert_eq!(replays.asked().len(), REPLAY_ATTEMPTS_MAX);
    // A permanent hole is retried once.
    let hole = || vec![of_replay(0, block(0)), of_replay(5, block(1))];
    let replays = ReplayServer::start(vec![hole(), hole(), hole()]).await;
    let mut bench = FollowerBench::new(Some(replays.endpoint.clone()));
    let asked = bench.follower.replay_all(&replays.endpoint).await;
    assert!(matches!(asked, Err(ReplayError::MissingMessages)), "{asked:?}");
    assert_eq!((replays.asked(), bench.known.resident()), (vec![0, 0], 1));
}

#[tokio::test]
async fn after_an_inconsistent_replay_only_later_messages_count() {
    let lie = vec![of_replay(2, block(2)), of_replay(3, block(3))[2..].to_vec()];
    let script = vec![to_the_end(of_replay_all(0..3)), lie.clone(), lie.clone(), lie];
    let replays = ReplayServer::start(script).await;
    // The connection's process is unknown; then there is a gap, and two replays are inconsistent;
    // then it continues.
    let heard = vec![
        up(1),
        down(1),
        up(2),
        live_of(2, 3, block(0)),
        live_of(2, 4, block(1)),
        live_of(2, 5, block(2)),
    ];
    let known = FollowerBench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 2, 0, 2]);
    assert_eq!(known.resident(), 3);
    assert_eq!(known.count("kvfleet_engine_restarts_total", "7"), 1.0);
}

#[test]
fn replay_errors_are_documented() {
    says("an engine's replay that stops", &ReplayError::Timeout, &[]);
    says("an engine's replay of other frames", &ReplayError::BadFrames, &[]);
    says("an engine's replay without an end", &ReplayError::TooLong, &[]);
    says("an engine's replay with a hole", &ReplayError::MissingMessages, &[]);
}
