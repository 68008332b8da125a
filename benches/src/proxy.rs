//! What the OpenAI-compatible door adds to a request, and what a piece of a stream costs it.
//!
//! The router and its door have one thread, the engine and the callers have others, so that the door's CPU time can be told. Not here: the door's thread (`door.rs`) and the two ends (`door/engine.rs`).

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use benches::{Better, Row, median, outcome, sorted};
use tokio::runtime::Builder;

use crate::Effort;
use crate::awake::Awake;
use crate::door::engine::{self, Caller};
use crate::door::{Door, Loads};

pub(crate) const ABOUT: &str = "the OpenAI-compatible door of a router, on one thread, between callers and an engine that streams: the time until the first byte of an answer \
     behind it (a prompt of 500 tokens rendered, cut, hashed and routed) over that of the engine itself, medians of requests one after the other, \
     also against what a mere relay of bytes adds in its place, as most of that is threads that wake each other, and where no processor sleeps \
     meanwhile (on each runs a loop that all else goes before), as a virtual one that does is given to others; \
     and events that go by for each CPU-second of the door, 64 streams of one event each 5 ms";

/// What the door may add, in microseconds.
const ADDED_US: f64 = 150.0;
/// Events a CPU-second that it must pass on.
const EVENTS: f64 = 20_000.0;
/// Requests of one run.
const REQUESTS: u64 = 1_000;
/// Streams at once, and events of each.
const STREAMS: u64 = 64;
const STREAM_EVENTS: u64 = 600;
/// Between two events of a stream.
const PACE: Duration = Duration::from_millis(5);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let ends = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = ends.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let engine = listener.local_addr()?;
    ends.spawn(engine::serve(listener, Duration::ZERO, PACE));
    let door = Door::open(dir.path(), &[engine], Loads::Told)?;
    let relay = relay(engine)?;
    let body = body();
    let places = [door.address, relay, engine];
    let mut rows = Vec::new();
    let [mut as_it_is, mut awake] = [Added::default(), Added::default()];
    for run in 0..=effort.runs {
        for kept in [false, true] {
            let loops = kept.then(Awake::keep).transpose()?;
            let medians = ends.block_on(first_bytes(places, &body, effort.scaled(REQUESTS)))?;
            loops.map(Awake::end).transpose()?;
            if run > 0 {
                if kept { &mut awake } else { &mut as_it_is }.run(medians);
            }
        }
    }
    rows.extend(as_it_is.rows("until the first byte"));
    rows.extend(awake.rows("until the first byte, no processor sleeps"));
    let mut rates = Vec::new();
    for run in 0..=effort.runs {
        let before = door.cpu()?;
        ends.block_on(streams(door.address, &body, effort.scaled(STREAM_EVENTS)))?;
        let spent = door.cpu()? - before;
        if run > 0 {
            rates.push(((STREAMS * effort.scaled(STREAM_EVENTS)) as f64 / spent.as_secs_f64(), EVENTS));
        }
    }
    rows.push(row("events of streams", "events/CPU-s", "limit: 20,000", Better::Higher, &rates));
    door.close()?;
    Ok(rows)
}

fn row(name: &str, unit: &str, peer: &str, better: Better, pairs: &[(f64, f64)]) -> Row {
    Row::new("proxy", name, unit, peer, better, outcome(pairs))
}

/// What was added until the first byte, of each run.
#[derive(Default)]
struct Added {
    of_limit: Vec<(f64, f64)>,
    of_relay: Vec<(f64, f64)>,
    of_engine: Vec<(f64, f64)>,
}

impl Added {
    /// Medians of one run in microseconds: through the door, through the relay, and of the engine itself.
    fn run(&mut self, [through, relayed, direct]: [f64; 3]) {
        self.of_limit.push((through - direct, ADDED_US));
        self.of_relay.push((through - direct, relayed - direct));
        self.of_engine.push((through, direct));
    }

    fn rows(&self, until: &str) -> [Row; 3] {
        let added = format!("added {until}");
        let lower = |name, peer, pairs| row(name, "µs", peer, Better::Lower, pairs);
        [
            lower(&added, "limit: 150 µs", &self.of_limit),
            lower(&added, "a relay of bytes on a thread of its own", &self.of_relay),
            lower(until, "the engine itself", &self.of_engine),
        ]
    }
}

/// A conversation of some 500 tokens.
fn body() -> String {
    let text = "What is the capital of France? Tell me a story about a router that knows where every prefix is kept. ".repeat(10);
    let message = |role: &str| format!("{{\"role\":\"{role}\",\"content\":\"{text}\"}}");
    format!("{{\"model\":\"m\",\"stream\":true,\"messages\":[{},{}]}}", message("system"), message("user"))
}

/// What being between costs by itself: a thread that hands on what it reads, in both directions, as long as the process lives.
fn relay(engine: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            while let Ok((mut caller, _)) = listener.accept().await {
                let mut onward = tokio::net::TcpStream::connect(engine).await?;
                caller.set_nodelay(true)?;
                onward.set_nodelay(true)?;
                // Who calls ends it.
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut caller, &mut onward).await });
            }
            std::io::Result::Ok(())
        })
    });
    Ok(address)
}

/// Medians of the time until the first byte at each of these places, in microseconds; requests alternate.
async fn first_bytes<const N: usize>(
    places: [SocketAddr; N],
    body: &str,
    requests: u64,
) -> anyhow::Result<[f64; N]> {
    let mut callers = Vec::new();
    for place in places {
        callers.push((Caller::connect(place, body).await?, Vec::new()));
    }
    for _ in 0..requests {
        for (caller, times) in &mut callers {
            times.push(caller.ask(1).await?.as_secs_f64() * 1e6);
        }
    }
    let mut medians = callers.into_iter().map(|(_, times)| median(&sorted(times.into_iter())));
    Ok(std::array::from_fn(|_| medians.next().unwrap_or(f64::NAN)))
}

async fn streams(door: SocketAddr, body: &str, events: u64) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for _ in 0..STREAMS {
        let mut caller = Caller::connect(door, body).await?;
        all.push(tokio::spawn(async move { caller.ask(events).await }));
    }
    for one in all {
        one.await??;
    }
    Ok(())
}
