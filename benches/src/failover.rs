//! An engine dies behind the OpenAI-compatible gateway: time until it gets no more requests, and
//! the outcome of its requests.
//!
//! Not here: the gateway's thread (`gateway.rs`), the client and the engine (`gateway/engine.rs`),
//! and the same with real processes (`cli/tests/command/gateway.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use benches::{BenchRow, Better, outcome};
use tokio::runtime::{Builder, Runtime};

use crate::Effort;
use crate::gateway::engine::{self, StreamClient};
use crate::gateway::{GatewayThread, LoadSource};

pub(crate) const ABOUT: &str = "an engine of three dies behind the OpenAI-compatible gateway, with 24 \
    clients that send the next request, with a new prompt, after each answer: the first byte after 50 ms, \
    ten events 5 ms apart. Time until the gateway detects the failure and skips the engine; outcome of the \
    requests without a first byte; and the longest time to first byte";

const ENGINES: usize = 3;
/// Instance that dies.
const DEAD: u32 = 2;
const CALLERS: u64 = 24;
/// Time to the first event of an answer, and between events.
const FIRST: Duration = Duration::from_millis(50);
const PACE: Duration = Duration::from_millis(5);
const EVENTS: u64 = 10;
/// Load time before and after the failure.
const KILL_AFTER: Duration = Duration::from_millis(1_000);
const OBSERVE_AFTER_KILL: Duration = Duration::from_millis(1_500);
/// Maximum time until a dead instance is skipped, in milliseconds.
const UNROUTED_MAX_MS: f64 = 1_000.0;
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let (mut unrouted, mut answered, mut longest) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..=effort.runs {
        let died = kill_one(run as u64)?;
        if run > 0 {
            unrouted.push((died.unrouted_ms, UNROUTED_MAX_MS));
            answered.push((died.answered_percent, 100.0));
            longest.push((died.longest_ms, died.before_ms));
        }
    }
    let row = |name, unit, peer, better, pairs: &[(f64, f64)]| {
        BenchRow::new("failover", name, unit, peer, better, outcome(pairs))
    };
    let peer = "the longest before the failure";
    Ok(vec![
        row("time until no request goes to it", "ms", "limit: 1 s", Better::Lower, &unrouted),
        row("requests without a first byte, answered", "%", "limit: 100 %", Better::Higher, &answered),
        row("longest time to first byte, after the failure", "ms", peer, Better::Lower, &longest),
    ])
}

/// Figures of one failure.
struct FailoverResult {
    unrouted_ms: f64,
    /// Share of complete answers among the requests that had no first byte at the failure, or came
    /// after it.
    answered_percent: f64,
    /// The longest time to first byte of those requests, and of the earlier ones.
    longest_ms: f64,
    before_ms: f64,
}

/// Outcome of one request.
struct RequestResult {
    begun: Instant,
    first: Option<Duration>,
    is_whole: bool,
}

fn kill_one(run: u64) -> anyhow::Result<FailoverResult> {
    let dir = tempfile::tempdir()?;
    let ends = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut engines = (0..ENGINES).map(|_| MockEngine::start()).collect::<anyhow::Result<Vec<_>>>()?;
    let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
    let gateway = GatewayThread::start(dir.path(), &addresses, LoadSource::Polled)?;
    wait_until_up(&gateway)?;
    let is_over = Arc::new(AtomicBool::new(false));
    let calling: Vec<_> = (0..CALLERS)
        .map(|caller| ends.spawn(call_repeatedly(gateway.address, run, caller, Arc::clone(&is_over))))
        .collect();
    std::thread::sleep(KILL_AFTER);
    let died = Instant::now();
    engines.remove(DEAD as usize - 1).runtime.shutdown_background();
    while is_up(&gateway, DEAD) {
        ensure!(died.elapsed() < TIMEOUT, "the gateway still sends to the dead engine");
        std::thread::sleep(Duration::from_millis(1));
    }
    let unrouted_ms = millis(died.elapsed());
    std::thread::sleep(OBSERVE_AFTER_KILL);
    is_over.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for one in calling {
        let within = ends.block_on(async { tokio::time::timeout(TIMEOUT, one).await });
        all.extend(within.context("a client hangs")??);
    }
    gateway.close()?;
    let had_first = |one: &RequestResult| one.first.is_some_and(|first| one.begun + first <= died);
    let (before, after): (Vec<_>, Vec<_>) = all.iter().partition(|one| had_first(one));
    ensure!(before.len() >= CALLERS as usize && after.len() >= CALLERS as usize, "too few requests");
    // An answer that broke off after its first byte cannot be saved.
    let is_answered = |one: &&&RequestResult| one.is_whole && one.first.is_some();
    let answered = after.iter().filter(is_answered).count();
    let longest =
        |all: &[&RequestResult]| all.iter().filter_map(|one| one.first).max().map_or(f64::NAN, millis);
    Ok(FailoverResult {
        unrouted_ms,
        answered_percent: 100.0 * answered as f64 / after.len() as f64,
        longest_ms: longest(&after),
        before_ms: longest(&before),
    })
}

/// Waits until the gateway sends requests to all engines.
fn wait_until_up(gateway: &GatewayThread) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !(1..=ENGINES as u32).all(|instance| is_up(gateway, instance)) {
        ensure!(begun.elapsed() < TIMEOUT, "the gateway does not consider the engines live");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_up(gateway: &GatewayThread, instance: u32) -> bool {
    gateway.gauge("kvfleet_gateway_endpoint_up", instance).is_some_and(|up| up > 0.0)
}

/// An engine on separate threads, which can be killed.
struct MockEngine {
    address: SocketAddr,
    runtime: Runtime,
}

impl MockEngine {
    fn start() -> anyhow::Result<MockEngine> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        runtime.spawn(engine::serve(listener, FIRST, PACE));
        Ok(MockEngine { address, runtime })
    }
}

/// Sends requests until `is_over`, each on a new connection.
async fn call_repeatedly(
    gateway: SocketAddr,
    run: u64,
    caller: u64,
    is_over: Arc<AtomicBool>,
) -> Vec<RequestResult> {
    let mut all = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let words = format!("{run} {caller} {} {}", all.len(), "words ".repeat(100));
        let body = format!(
            "{{\"model\":\"m\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"{words}\"}}]}}"
        );
        let (begun, mut first) = (Instant::now(), None);
        let asked = async {
            let mut caller = StreamClient::connect(gateway, &body).await?;
            caller.read_events(EVENTS, &mut first).await
        };
        let is_whole = asked.await.is_ok();
        all.push(RequestResult { begun, first, is_whole });
    }
    all
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
