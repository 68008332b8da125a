//! Time that the OpenAI-compatible gateway adds to a request, and its cost per streamed event.
//!
//! The router and its gateway share one thread, and the engine and the clients have others, so that
//! the gateway's CPU time can be measured. Not here: the gateway's thread (`gateway.rs`) and the
//! two ends (`gateway/engine.rs`).

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use benches::{BenchRow, Better, median, outcome, sorted};
use tokio::runtime::Builder;

use crate::Effort;
use crate::busy_loops::BusyLoops;
use crate::gateway::engine::{self, StreamClient};
use crate::gateway::{GatewayThread, LoadSource};

pub(crate) const ABOUT: &str = "the OpenAI-compatible gateway of a router, on one thread, between clients \
    and an engine that streams: time to first byte through the gateway (a prompt of 500 tokens rendered, \
    tokenized, hashed and routed) over that of the engine itself, medians of sequential requests; also \
    against the time that a plain byte relay adds, because most of it is thread wake-ups; and with no \
    processor asleep (an idle-priority loop on each), because a sleeping virtual processor is given to \
    others; and forwarded events per CPU-second of the gateway, 64 streams of one event per 5 ms";

/// Limit of the added time, in microseconds.
const ADDED_US: f64 = 150.0;
/// Minimum number of events per CPU-second.
const EVENTS: f64 = 20_000.0;
/// Requests per run.
const REQUESTS: u64 = 1_000;
/// Concurrent streams, and events of each.
const STREAMS: u64 = 64;
const STREAM_EVENTS: u64 = 600;
/// Interval between events of a stream.
const PACE: Duration = Duration::from_millis(5);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let ends = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = ends.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let engine = listener.local_addr()?;
    ends.spawn(engine::serve(listener, Duration::ZERO, PACE));
    let gateway = GatewayThread::start(dir.path(), &[engine], LoadSource::Reported)?;
    let relay = relay(engine)?;
    let body = body();
    let addresses = [gateway.address, relay, engine];
    let mut rows = Vec::new();
    let [mut as_it_is, mut awake] = [AddedLatency::default(), AddedLatency::default()];
    for run in 0..=effort.runs {
        for kept in [false, true] {
            let loops = kept.then(BusyLoops::start).transpose()?;
            let medians = ends.block_on(first_bytes(addresses, &body, effort.scaled(REQUESTS)))?;
            loops.map(BusyLoops::stop).transpose()?;
            if run > 0 {
                if kept { &mut awake } else { &mut as_it_is }.record(medians);
            }
        }
    }
    rows.extend(as_it_is.rows("time to first byte"));
    rows.extend(awake.rows("time to first byte, no processor sleeps"));
    let mut rates = Vec::new();
    for run in 0..=effort.runs {
        let before = gateway.cpu()?;
        ends.block_on(streams(gateway.address, &body, effort.scaled(STREAM_EVENTS)))?;
        let spent = gateway.cpu()? - before;
        if run > 0 {
            rates.push(((STREAMS * effort.scaled(STREAM_EVENTS)) as f64 / spent.as_secs_f64(), EVENTS));
        }
    }
    rows.push(row("streamed events", "events/CPU-s", "limit: 20,000", Better::Higher, &rates));
    gateway.close()?;
    Ok(rows)
}

fn row(name: &str, unit: &str, peer: &str, better: Better, pairs: &[(f64, f64)]) -> BenchRow {
    BenchRow::new("proxy", name, unit, peer, better, outcome(pairs))
}

/// Added time to first byte, per run.
#[derive(Default)]
struct AddedLatency {
    limit_pairs: Vec<(f64, f64)>,
    relay_pairs: Vec<(f64, f64)>,
    engine_pairs: Vec<(f64, f64)>,
}

impl AddedLatency {
    /// Adds one run's medians in microseconds: through the gateway, through the relay, and from the
    /// engine.
    fn record(&mut self, [through, relayed, direct]: [f64; 3]) {
        self.limit_pairs.push((through - direct, ADDED_US));
        self.relay_pairs.push((through - direct, relayed - direct));
        self.engine_pairs.push((through, direct));
    }

    fn rows(&self, until: &str) -> [BenchRow; 3] {
        let added = format!("added {until}");
        let lower = |name, peer, pairs| row(name, "µs", peer, Better::Lower, pairs);
        [
            lower(&added, "limit: 150 µs", &self.limit_pairs),
            lower(&added, "a byte relay on its own thread", &self.relay_pairs),
            lower(until, "the engine itself", &self.engine_pairs),
        ]
    }
}

/// A conversation of some 500 tokens.
fn body() -> String {
    let text = "What is the capital of France? Tell me a story about a router that knows where every prefix \
        is kept. "
        .repeat(10);
    let message = |role: &str| format!("{{\"role\":\"{role}\",\"content\":\"{text}\"}}");
    format!("{{\"model\":\"m\",\"stream\":true,\"messages\":[{},{}]}}", message("system"), message("user"))
}

/// The cost of an intermediary alone: a thread that forwards bytes in both directions until the
/// process exits.
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
                // The client closes the connection.
                tokio::spawn(async move { tokio::io::copy_bidirectional(&mut caller, &mut onward).await });
            }
            std::io::Result::Ok(())
        })
    });
    Ok(address)
}

/// Medians of the time to first byte at each address, in microseconds; requests alternate.
async fn first_bytes<const N: usize>(
    places: [SocketAddr; N],
    body: &str,
    requests: u64,
) -> anyhow::Result<[f64; N]> {
    let mut callers = Vec::new();
    for place in places {
        callers.push((StreamClient::connect(place, body).await?, Vec::new()));
    }
    for _ in 0..requests {
        for (caller, times) in &mut callers {
            times.push(caller.request_events(1).await?.as_secs_f64() * 1e6);
        }
    }
    let mut medians = callers.into_iter().map(|(_, times)| median(&sorted(times.into_iter())));
    Ok(std::array::from_fn(|_| medians.next().unwrap_or(f64::NAN)))
}

async fn streams(gateway: SocketAddr, body: &str, events: u64) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for _ in 0..STREAMS {
        let mut caller = StreamClient::connect(gateway, body).await?;
        all.push(tokio::spawn(async move { caller.request_events(events).await }));
    }
    for one in all {
        one.await??;
    }
    Ok(())
}
