//! An engine dies while the OpenAI-compatible door sends it requests: how soon none goes there any more, and what becomes of those that it had.
//!
//! Not here: the door's thread (`door.rs`), who calls and answers (`door/engine.rs`), and that real processes do the same (`cli/tests/command/doors.rs`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use benches::{Better, Row, outcome};
use tokio::runtime::{Builder, Runtime};

use crate::Effort;
use crate::door::engine::{self, Caller};
use crate::door::{Door, Loads};

pub(crate) const ABOUT: &str = "an engine of three dies behind the OpenAI-compatible door, with 24 callers that ask again as soon as they are answered, each time \
     with another prompt: the first byte after 50 ms, ten events 5 ms apart. Until the door leaves it out, which it finds by itself; what becomes of requests that had no first \
     byte yet; and the longest wait for one";

const ENGINES: usize = 3;
/// The one that dies.
const DEAD: u32 = 2;
const CALLERS: u64 = 24;
/// Until the first event of an answer, and between two.
const FIRST: Duration = Duration::from_millis(50);
const PACE: Duration = Duration::from_millis(5);
const EVENTS: u64 = 10;
/// How long callers ask before one dies, and behind that.
const BEFORE: Duration = Duration::from_millis(1_000);
const BEHIND: Duration = Duration::from_millis(1_500);
/// Longest until an instance that died is left out, in milliseconds.
const UNROUTED_MS: f64 = 1_000.0;
/// One that waits as long hangs.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let (mut unrouted, mut answered, mut longest) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..=effort.runs {
        let died = die(run as u64)?;
        if run > 0 {
            unrouted.push((died.unrouted_ms, UNROUTED_MS));
            answered.push((died.answered_percent, 100.0));
            longest.push((died.longest_ms, died.before_ms));
        }
    }
    let row = |name, unit, peer, better, pairs: &[(f64, f64)]| {
        Row::new("failover", name, unit, peer, better, outcome(pairs))
    };
    let peer = "the longest while all lived";
    Ok(vec![
        row("until nothing goes to it", "ms", "limit: 1 s", Better::Lower, &unrouted),
        row("requests without a first byte, answered", "%", "limit: 100 %", Better::Higher, &answered),
        row("the longest until a first byte, from then on", "ms", peer, Better::Lower, &longest),
    ])
}

/// What came of it.
struct Died {
    unrouted_ms: f64,
    /// Of requests that had no first byte when it died, or came behind, those that were answered whole.
    answered_percent: f64,
    /// The longest until a first byte of those, and of those before.
    longest_ms: f64,
    before_ms: f64,
}

/// What became of one request.
struct Asked {
    begun: Instant,
    first: Option<Duration>,
    is_whole: bool,
}

fn die(run: u64) -> anyhow::Result<Died> {
    let dir = tempfile::tempdir()?;
    let ends = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut engines = (0..ENGINES).map(|_| Engine::start()).collect::<anyhow::Result<Vec<_>>>()?;
    let addresses: Vec<_> = engines.iter().map(|engine| engine.address).collect();
    let door = Door::open(dir.path(), &addresses, Loads::Asked)?;
    await_up(&door)?;
    let is_over = Arc::new(AtomicBool::new(false));
    let calling: Vec<_> = (0..CALLERS)
        .map(|caller| ends.spawn(call(door.address, (run, caller), Arc::clone(&is_over))))
        .collect();
    std::thread::sleep(BEFORE);
    let died = Instant::now();
    engines.remove(DEAD as usize - 1).runtime.shutdown_background();
    while is_up(&door, DEAD) {
        ensure!(died.elapsed() < PATIENCE, "the door still sends to an engine that died");
        std::thread::sleep(Duration::from_millis(1));
    }
    let unrouted_ms = millis(died.elapsed());
    std::thread::sleep(BEHIND);
    is_over.store(true, Ordering::Relaxed);
    let mut all = Vec::new();
    for one in calling {
        let within = ends.block_on(async { tokio::time::timeout(PATIENCE, one).await });
        all.extend(within.context("a caller hangs")??);
    }
    door.close()?;
    let had_first = |one: &Asked| one.first.is_some_and(|first| one.begun + first <= died);
    let (before, behind): (Vec<_>, Vec<_>) = all.iter().partition(|one| had_first(one));
    ensure!(
        before.len() >= CALLERS as usize && behind.len() >= CALLERS as usize,
        "hardly anything was asked"
    );
    // One that died with its answer half said is nobody's to save.
    let is_answered = |one: &&&Asked| one.is_whole && one.first.is_some();
    let answered = behind.iter().filter(is_answered).count();
    let longest = |all: &[&Asked]| all.iter().filter_map(|one| one.first).max().map_or(f64::NAN, millis);
    Ok(Died {
        unrouted_ms,
        answered_percent: 100.0 * answered as f64 / behind.len() as f64,
        longest_ms: longest(&behind),
        before_ms: longest(&before),
    })
}

/// Waits until the door sends requests to all of them.
fn await_up(door: &Door) -> anyhow::Result<()> {
    let begun = Instant::now();
    while !(1..=ENGINES as u32).all(|instance| is_up(door, instance)) {
        ensure!(begun.elapsed() < PATIENCE, "the door does not take the engines for alive");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_up(door: &Door, instance: u32) -> bool {
    door.figure("kvfleet_doors_endpoint_up", instance).is_some_and(|up| up > 0.0)
}

/// An engine with threads of its own, that can die.
struct Engine {
    address: SocketAddr,
    runtime: Runtime,
}

impl Engine {
    fn start() -> anyhow::Result<Engine> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        runtime.spawn(engine::serve(listener, FIRST, PACE));
        Ok(Engine { address, runtime })
    }
}

/// Asks again and again, on a connection for each request, until it is over.
async fn call(door: SocketAddr, (run, caller): (u64, u64), is_over: Arc<AtomicBool>) -> Vec<Asked> {
    let mut all = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let words = format!("{run} {caller} {} {}", all.len(), "words ".repeat(100));
        let body = format!(
            "{{\"model\":\"m\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"{words}\"}}]}}"
        );
        let (begun, mut first) = (Instant::now(), None);
        let asked = async {
            let mut caller = Caller::connect(door, &body).await?;
            caller.read(EVENTS, &mut first).await
        };
        let is_whole = asked.await.is_ok();
        all.push(Asked { begun, first, is_whole });
    }
    all
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
