//! A follower by itself: what connections bring it is put into its hands, and whoever answers its replays follows a script.
//!
//! Here is which connection counts, when a replay is asked for and from where, and what becomes of replays that lie. Not here: numbers
//! and blocks (`../rank/tests.rs`), and connections to engines (`../tests.rs`).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kv_core::id::InstanceId;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_errors_doc::says;
use kvfleet_proto::engine_events::Dialect;
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use tokio::io::{DuplexStream, duplex};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::*;
use crate::clock::{Clock, UnixClock};
use crate::engines::aliases::Aliases;
use crate::engines::metrics::EngineMetrics;
use crate::engines::teller::Teller;
use crate::engines::tenants::Tenants;
use crate::engines::tests::{batch, removed, stored};
use crate::view::residency::Residency;

const INSTANCE: InstanceId = InstanceId(7);

/// Frames of one message.
type Frames = Vec<Bytes>;

/// A follower, and what is known by it.
struct Bench {
    follower: Follower,
    known: Known,
}

#[derive(Clone)]
struct Known {
    residency: Arc<RwLock<Residency>>,
    registry: Registry,
    clock: Clock,
}

fn manifest() -> IdentityManifest {
    IdentityManifest { block_tokens: 16, ..IdentityManifest::default() }
}

impl Bench {
    fn new(replay: Option<Endpoint>) -> Bench {
        let (clock, registry) = (Clock::start(), Registry::new());
        let residency = Arc::new(RwLock::new(Residency::new(1_000, clock.now())));
        let tenants = Tenants { manifest: manifest(), by_salt: [].into(), without_salt: [0; 32] };
        let metrics = EngineMetrics::register(&registry).unwrap().of(INSTANCE);
        let teller = Teller::new(Arc::clone(&residency), INSTANCE, clock, UnixClock::start());
        let aliases = Aliases::new(Arc::new(tenants));
        let rank = Rank::new((Dialect::Vllm, 0), aliases, teller, metrics.clone());
        let follower = Follower { rank, replay, metrics, said: None };
        Bench { follower, known: Known { residency, registry, clock } }
    }

    /// Lets it hear all of this, one after the other, until nothing more can come.
    async fn run(self, brought: Vec<Brought>) -> Known {
        let (sender, receiver) = mpsc::channel(brought.len());
        for one in brought {
            sender.send(one).await.unwrap();
        }
        drop(sender);
        self.follower.run(receiver, CancellationToken::new()).await;
        self.known
    }
}

impl Known {
    /// Of the blocks of tokens 0 to 319, how many the plane says are there.
    fn resident(&self) -> u64 {
        let hashes = PrefixHasher::new(&manifest(), &[0; 32]).blocks(&(0..320).collect::<Vec<_>>());
        let standings = self.residency.read().resident(&hashes, self.clock.now());
        standings.first().map_or(0, |standing| standing.blocks)
    }

    fn count(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.gather();
        let metrics = families.iter().filter(|family| family.name() == name);
        let metrics = metrics.flat_map(|family| family.get_metric());
        let has =
            |metric: &&prometheus::proto::Metric| metric.get_label().iter().any(|pair| pair.value() == label);
        metrics.filter(has).map(|metric| metric.get_counter().get_value()).sum()
    }

    /// Gaps that were filled, gaps that were not, and processes that ended.
    fn gaps_and_restarts(&self) -> [f64; 3] {
        [
            self.count("kvfleet_engine_gaps_total", "filled"),
            self.count("kvfleet_engine_gaps_total", "lost"),
            self.count("kvfleet_engine_restarts_total", "7"),
        ]
    }
}

/// The payload that stores the block of this number, from 0, behind the one before it.
fn block(number: u64) -> Bytes {
    let tokens: Vec<u32> = (16 * number as u32..16 * (number as u32 + 1)).collect();
    batch(0, &[stored(&[number], number.checked_sub(1), &tokens)]).into()
}

fn brought(connection: u64, what: What) -> Brought {
    Brought { connection, what }
}

fn up(connection: u64) -> Brought {
    brought(connection, What::Up)
}

fn down(connection: u64) -> Brought {
    brought(connection, What::Down)
}

/// A live message.
fn live_of(connection: u64, number: u64, payload: Bytes) -> Brought {
    brought(connection, What::Message(Message { number, payload }))
}

/// One message of a replay.
fn of_replay(number: u64, payload: Bytes) -> Frames {
    vec![Bytes::new(), Bytes::from_static(b"kv"), Bytes::copy_from_slice(&number.to_be_bytes()), payload]
}

/// Messages that store the blocks of their numbers.
fn of_replay_all(numbers: std::ops::Range<u64>) -> Vec<Frames> {
    numbers.map(|number| of_replay(number, block(number))).collect()
}

fn end() -> Frames {
    of_replay(END, Bytes::new())
}

fn to_the_end(mut messages: Vec<Frames>) -> Vec<Frames> {
    messages.push(end());
    messages
}

/// Who answers replays, each with the next part of a script, and how often it was asked from where.
struct Replays {
    endpoint: Endpoint,
    asked: Arc<Mutex<Vec<u64>>>,
    serving: JoinHandle<()>,
}

impl Replays {
    async fn start(script: Vec<Vec<Frames>>) -> Replays {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap()).parse().unwrap();
        let asked = Arc::<Mutex<Vec<u64>>>::default();
        let serving = tokio::spawn(serve(listener, script, Arc::clone(&asked)));
        Replays { endpoint, asked, serving }
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().clone()
    }
}

impl Drop for Replays {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Whoever is asked more often than the script has answers ends the connection.
async fn serve(listener: TcpListener, script: Vec<Vec<Frames>>, asked: Arc<Mutex<Vec<u64>>>) {
    let mut script = script.into_iter();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let mut connection = Connection::over(stream, Role::Dealer).await.unwrap();
        let from = from_of(&connection.receive().await.unwrap());
        asked.lock().push(from);
        let Some(answers) = script.next() else { continue };
        tokio::spawn(async move {
            for answer in answers {
                let frames: Vec<&[u8]> = answer.iter().map(|frame| &frame[..]).collect();
                if connection.send(&frames).await.is_err() {
                    return; // it has heard enough
                }
            }
            let _ = connection.receive().await; // it stays until the other end goes
        });
    }
}

/// What a replay is asked for with: an empty delimiter, and from where.
fn from_of(frames: &[Bytes]) -> u64 {
    let [delimiter, from] = frames else { panic!("{frames:?}") };
    assert!(delimiter.is_empty());
    u64::from_be_bytes(from[..].try_into().unwrap())
}

#[tokio::test]
async fn a_gap_is_replayed_from_the_last_that_counted_and_what_is_said_twice_counts_once() {
    let replays =
        Replays::start(vec![to_the_end(of_replay_all(0..3)), to_the_end(of_replay_all(2..6))]).await;
    let live = |number| live_of(1, number, block(number));
    // Messages 3 and 4 are lost, and the last of them all comes again.
    let heard = vec![up(1), live(5), live(6), live(6)];
    let known = Bench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 2]);
    assert_eq!(known.resident(), 7);
    assert_eq!(known.gaps_and_restarts(), [1.0, 0.0, 0.0]);
    // 0, 1, 2 of the first; 3, 4, 5 of the second, whose 2 was known; 6. Live, 5 was replayed already and 6 came twice.
    let messages = ["applied", "before"].map(|outcome| known.count("kvfleet_engine_messages_total", outcome));
    assert_eq!(messages, [7.0, 3.0]);
}

#[tokio::test]
async fn what_removes_a_block_is_not_undone_by_a_replay_of_what_stored_it() {
    let gone = batch(0, &[removed(&[2])]);
    let replayed = [of_replay_all(0..3), vec![of_replay(3, gone.clone().into())]].concat();
    let replays =
        Replays::start(vec![to_the_end(replayed.clone()), to_the_end(replayed[3..].to_vec())]).await;
    // Live come the last three of them, which the replay had overtaken, and then the connection stands anew.
    let late = (1..3).map(|number| live_of(1, number, block(number)));
    let heard = [up(1)].into_iter().chain(late).chain([live_of(1, 3, gone.into()), down(1), up(2)]);
    let known = Bench::new(Some(replays.endpoint.clone())).run(heard.collect()).await;
    assert_eq!(replays.asked(), [0, 3]);
    assert_eq!((known.resident(), known.gaps_and_restarts()), (2, [0.0, 0.0, 0.0]));
}

#[tokio::test]
async fn a_gap_that_is_kept_no_more_is_asked_for_from_the_beginning_and_what_comes_counts() {
    // Numbers go on, and what is kept begins behind the gap; it stores the first blocks again.
    let kept = || to_the_end((0..2).map(|number| of_replay(8 + number, block(number))).collect());
    let replays = Replays::start(vec![to_the_end(of_replay_all(0..4)), kept(), kept()]).await;
    let heard = vec![up(1), live_of(1, 9, block(1)), live_of(1, 10, block(2))];
    let known = Bench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 3, 0], "from the last that counted, and then everything");
    assert_eq!(known.resident(), 3, "the fourth was said before what is kept");
    assert_eq!(known.gaps_and_restarts(), [1.0, 0.0, 1.0]);
}

#[tokio::test]
async fn another_connection_is_the_same_process_only_if_a_replay_has_our_last_message() {
    let other = batch(0, &[stored(&[40], None, &(900..916).collect::<Vec<_>>())]);
    let cases = [
        (to_the_end(of_replay_all(2..4)), true),
        // Another process has said as much, and something else.
        (to_the_end(vec![of_replay(2, other.clone().into())]), false),
        // Or less.
        (vec![end()], false),
    ];
    for (second, is_same) in cases {
        let (resident, counts, asked) =
            if is_same { (4, [0.0; 3], &[0, 2][..]) } else { (0, [0.0, 0.0, 1.0], &[0, 2, 0][..]) };
        let third = to_the_end(vec![of_replay(0, other.clone().into())]);
        let script = vec![to_the_end(of_replay_all(0..3)), second, third];
        let replays = Replays::start(script).await;
        let heard = vec![up(1), down(1), up(2)];
        let known = Bench::new(Some(replays.endpoint.clone())).run(heard).await;
        assert_eq!(replays.asked(), asked);
        assert_eq!((known.resident(), known.gaps_and_restarts()), (resident, counts), "asked from {asked:?}");
    }
}

#[tokio::test]
async fn only_the_newest_connection_counts_and_a_new_one_without_a_replay_voids_what_was_said() {
    let live = |connection, number| live_of(connection, number, block(number));
    let known = Bench::new(None).run(vec![up(1), live(1, 0), live(1, 1)]).await;
    assert_eq!(known.resident(), 2);
    // The second took over: nothing that the first still says is believed, and neither is its end.
    let heard = vec![up(1), live(1, 0), up(2), live(1, 1), down(1), live(2, 0), up(1), live(1, 1)];
    let known = Bench::new(None).run(heard).await;
    assert_eq!((known.resident(), known.gaps_and_restarts()), (1, [0.0, 0.0, 1.0]));
    assert_eq!(known.count("kvfleet_engine_messages_total", "applied"), 2.0);
    // What comes behind the end of all connections is of nobody.
    let known = Bench::new(None).run(vec![up(1), live(1, 0), down(1), live(1, 1)]).await;
    assert_eq!(known.count("kvfleet_engine_messages_total", "applied"), 1.0);
}

/// A follower that heard blocks 0 to 2, and an end of a connection by which it asks for a replay from the last of them.
async fn asking(
    answer: impl AsyncFnOnce(Connection<DuplexStream>, Known),
) -> (Bench, Result<Goes, ReplayError>) {
    let mut bench = Bench::new(None);
    for number in 0..3 {
        bench.follower.rank.hear(&Message { number, payload: block(number) });
    }
    let (ours, theirs) = duplex(1 << 20);
    let known = bench.known.clone();
    let answered = async {
        let mut theirs = Connection::greet(theirs, Role::Dealer).await.unwrap();
        assert_eq!(from_of(&theirs.receive().await.unwrap()), 2);
        answer(theirs, known).await;
    };
    let asked = async {
        let ours = Connection::greet(ours, Role::Dealer).await.unwrap();
        bench.follower.ask_over(ours, 2).await
    };
    let (goes, ()) = tokio::join!(asked, answered);
    (bench, goes)
}

async fn send(connection: &mut Connection<DuplexStream>, frames: &[Bytes]) {
    let frames: Vec<&[u8]> = frames.iter().map(|frame| &frame[..]).collect();
    connection.send(&frames).await.unwrap();
}

#[tokio::test]
async fn messages_of_a_replay_have_a_topic_or_not_and_anything_else_ends_it() {
    let without_topic = |mut frames: Frames| {
        frames.remove(1);
        frames
    };
    let (bench, goes) = asking(async |mut engine, _| {
        for number in 2..5 {
            send(&mut engine, &without_topic(of_replay(number, block(number)))).await;
        }
        send(&mut engine, &of_replay(5, block(5))).await;
        send(&mut engine, &without_topic(end())).await;
    })
    .await;
    assert!(matches!(goes, Ok(Goes::On)), "{goes:?}");
    assert_eq!((bench.known.resident(), bench.follower.rank.last()), (6, Some(5)));
    // Each of them would be believed if it were not for its frames.
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
        let (bench, goes) = asking(async |mut engine, _| {
            send(&mut engine, &of_replay(2, block(2))).await;
            send(&mut engine, &lie).await;
            send(&mut engine, &end()).await;
        })
        .await;
        assert!(matches!(goes, Err(ReplayError::Frames)), "{lie:?}: {goes:?}");
        assert_eq!((bench.known.resident(), bench.follower.rank.last()), (3, Some(2)), "{lie:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_stops_is_waited_for_no_longer_than_it_takes_to_serve_one() {
    let begun = Instant::now();
    let (bench, goes) = asking(async |mut engine, _| {
        send(&mut engine, &of_replay(2, block(2))).await;
        let _ = engine.receive().await; // it says nothing, and stays
    })
    .await;
    assert!(matches!(goes, Err(ReplayError::Quiet)), "{goes:?}");
    assert_eq!(begun.elapsed().as_millis() / 10, REPLAY_QUIET.as_millis() / 10);
    assert_eq!(bench.known.resident(), 3, "what was said is not void because a replay stops");
    // One that had something new may have dropped the rest of it, the end too: it is asked again.
    let begun = Instant::now();
    let (bench, goes) = asking(async |mut engine, _| {
        for number in 2..5 {
            send(&mut engine, &of_replay(number, block(number))).await;
            tokio::time::sleep(REPLAY_QUIET - Duration::from_millis(1)).await;
        }
        let _ = engine.receive().await;
    })
    .await;
    assert!(matches!(goes, Ok(Goes::Again)), "{goes:?}");
    assert_eq!(bench.known.resident(), 5);
    assert!(begun.elapsed() > 3 * (REPLAY_QUIET - Duration::from_millis(1)), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_comes_without_a_pause_keeps_nobody_from_saying_that_the_engine_is_there() {
    let (bench, goes) = asking(async |mut engine, known| {
        for nth in 0..40 {
            // Nothing of it is new, and the next one always comes before it is time to say that the engine is there.
            send(&mut engine, &of_replay(2, block(2))).await;
            tokio::time::sleep(LOOK_EVERY / 3).await;
            if nth == 20 {
                *known.residency.write() = Residency::new(1_000, known.clock.now());
            }
        }
        send(&mut engine, &end()).await;
    })
    .await;
    assert!(matches!(goes, Ok(Goes::On)), "{goes:?}");
    assert_eq!(bench.known.resident(), 3, "what the plane lost meanwhile is told again with a sign of life");
}

#[tokio::test]
async fn a_replay_without_an_end_is_left() {
    let (bench, goes) = asking(async |mut engine, _| {
        // The first two would end nothing, and neither does what comes again and again.
        for number in [2, 3].into_iter().chain(std::iter::repeat(3)) {
            let message = of_replay(number, block(number));
            let frames: Vec<&[u8]> = message.iter().map(|frame| &frame[..]).collect();
            if engine.send(&frames).await.is_err() {
                return;
            }
        }
    })
    .await;
    assert!(matches!(goes, Err(ReplayError::Endless)), "{goes:?}");
    // On a busy machine it takes longer than the silence that ends what an instance says.
    assert_eq!(bench.known.resident(), 4, "it is there all the while");
    // All that can be kept is read, the message that ends it besides.
    let before = bench.known.count("kvfleet_engine_messages_total", "before");
    assert_eq!(before, REPLAY_MESSAGES_MAX as f64);
}

#[tokio::test]
async fn replays_that_never_come_to_anything_are_asked_for_so_often_and_no_more() {
    // By turns one whose first message is not ours, and one with a hole behind its first.
    let hole = || vec![of_replay(5, block(0)), of_replay(9, block(1))];
    let other = || vec![of_replay(7, block(2))];
    let script = (0..ATTEMPTS_MAX + 2).map(|nth| if nth % 2 == 0 { hole() } else { other() });
    let replays = Replays::start(script.collect()).await;
    let mut bench = Bench::new(Some(replays.endpoint.clone()));
    let asked = bench.follower.ask_all(&replays.endpoint).await;
    assert!(matches!(asked, Err(ReplayError::Endless)), "{asked:?}");
    assert_eq!(replays.asked().len(), ATTEMPTS_MAX);
    // One whose hole nothing fills is asked once more, and that is all.
    let hole = || vec![of_replay(0, block(0)), of_replay(5, block(1))];
    let replays = Replays::start(vec![hole(), hole(), hole()]).await;
    let mut bench = Bench::new(Some(replays.endpoint.clone()));
    let asked = bench.follower.ask_all(&replays.endpoint).await;
    assert!(matches!(asked, Err(ReplayError::Hole)), "{asked:?}");
    assert_eq!((replays.asked(), bench.known.resident()), (vec![0, 0], 1));
}

#[tokio::test]
async fn after_a_replay_that_lies_nothing_counts_but_what_is_said_from_then_on() {
    let lie = vec![of_replay(2, block(2)), of_replay(3, block(3))[2..].to_vec()];
    let script = vec![to_the_end(of_replay_all(0..3)), lie.clone(), lie.clone(), lie];
    let replays = Replays::start(script).await;
    // Whose connection it is cannot be told; then there is a gap, for which it lies twice; and it goes on.
    let heard = vec![
        up(1),
        down(1),
        up(2),
        live_of(2, 3, block(0)),
        live_of(2, 4, block(1)),
        live_of(2, 5, block(2)),
    ];
    let known = Bench::new(Some(replays.endpoint.clone())).run(heard).await;
    assert_eq!(replays.asked(), [0, 2, 0, 2]);
    assert_eq!(known.resident(), 3);
    assert_eq!(known.count("kvfleet_engine_restarts_total", "7"), 1.0);
}

#[test]
fn what_is_wrong_with_a_replay_is_said() {
    says("an engine's replay that stops", &ReplayError::Quiet, &[]);
    says("an engine's replay of other frames", &ReplayError::Frames, &[]);
    says("an engine's replay without an end", &ReplayError::Endless, &[]);
    says("an engine's replay with a hole", &ReplayError::Hole, &[]);
}
