//! What the OpenAI-compatible door adds to a request, and what a piece of a stream costs it.
//!
//! The router and its door have one thread, the engine and the callers have others, so that the door's CPU time can be told. Not here: the two ends (`proxy/engine.rs`).

mod engine;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use benches::{Better, Row, median, outcome, sorted, thread_cpu_time};
use kvfleet_doors::{Doors, DoorsConfig, EndpointConfig, ModelConfig};
use kvfleet_proto::pb;
use kvfleet_router::{EnginesConfig, Router, RouterConfig, TlsConfig, VoterConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::Effort;
use crate::get::certificates;
use engine::Caller;

pub(crate) const ABOUT: &str = "the OpenAI-compatible door of a router, on one thread, between callers and an engine that streams: the time until the first byte of an answer \
     behind it (a prompt of 500 tokens rendered, cut, hashed and routed) over that of the engine itself, medians of requests one after the other, \
     also against what a mere relay of bytes adds in its place, as most of that is threads that wake each other; \
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
/// The instance that the engine is.
const INSTANCE: u32 = 1;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<Row>> {
    let dir = tempfile::tempdir()?;
    let ends = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let listener = ends.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    let engine = listener.local_addr()?;
    ends.spawn(engine::serve(listener, PACE));
    let door = Door::open(dir.path(), engine)?;
    let relay = relay(engine)?;
    let body = body();
    let mut rows = Vec::new();
    let (mut added, mut beside, mut both) = (Vec::new(), Vec::new(), Vec::new());
    for run in 0..=effort.runs {
        let places = [door.address, relay, engine];
        let [through, relayed, direct] =
            ends.block_on(first_bytes(places, &body, effort.scaled(REQUESTS)))?;
        if run > 0 {
            added.push((through - direct, ADDED_US));
            beside.push((through - direct, relayed - direct));
            both.push((through, direct));
        }
    }
    let row = |name, unit, peer, better, pairs: &[(f64, f64)]| {
        Row::new("proxy", name, unit, peer, better, outcome(pairs))
    };
    rows.push(row("added until the first byte", "µs", "limit: 150 µs", Better::Lower, &added));
    let peer = "a relay of bytes on a thread of its own";
    rows.push(row("added until the first byte", "µs", peer, Better::Lower, &beside));
    rows.push(row("until the first byte", "µs", "the engine itself", Better::Lower, &both));
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

/// What is asked of the door's thread.
enum Word {
    Cpu(oneshot::Sender<Duration>),
    Close,
}

/// A router with its door, in a thread of its own.
struct Door {
    address: SocketAddr,
    words: mpsc::Sender<Word>,
    thread: std::thread::JoinHandle<anyhow::Result<()>>,
}

impl Door {
    fn open(dir: &Path, engine: SocketAddr) -> anyhow::Result<Door> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (words, asked) = mpsc::channel(1);
        let (opened, address) = oneshot::channel();
        let config = router_config(dir)?;
        let thread = std::thread::spawn(move || serve(&runtime, config, engine, opened, asked));
        match address.blocking_recv() {
            Ok(address) => Ok(Door { address, words, thread }),
            Err(_) => match thread.join() {
                Ok(ended) => ended.and_then(|()| bail!("the door did not open")),
                Err(_) => bail!("the door's thread broke down"),
            },
        }
    }

    /// CPU time of the door's thread.
    fn cpu(&self) -> anyhow::Result<Duration> {
        let (answer, time) = oneshot::channel();
        self.words.blocking_send(Word::Cpu(answer))?;
        Ok(time.blocking_recv()?)
    }

    fn close(self) -> anyhow::Result<()> {
        self.words.blocking_send(Word::Close)?;
        self.thread.join().map_err(|_| anyhow::anyhow!("the door's thread broke down"))?
    }
}

fn router_config(dir: &Path) -> anyhow::Result<RouterConfig> {
    let tls = certificates(dir)?;
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    Ok(RouterConfig {
        id: 1,
        listen: listen.clone(),
        voters: vec![VoterConfig { id: 1, address: listen }],
        data_dir: dir.join("router"),
        tls: TlsConfig { ca: tls.ca, cert: tls.cert, key: tls.key },
        shards: 1,
        ..RouterConfig::default()
    })
}

fn serve(
    runtime: &Runtime,
    config: RouterConfig,
    engine: SocketAddr,
    opened: oneshot::Sender<SocketAddr>,
    mut asked: mpsc::Receiver<Word>,
) -> anyhow::Result<()> {
    runtime.block_on(async {
        let registry = prometheus::Registry::new();
        let router = Router::start(config, &registry).await?;
        let desk = router.desk();
        while desk.ready().is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut config = DoorsConfig {
            models: vec![ModelConfig {
                name: "m".into(),
                tokenizer: Path::new(env!("CARGO_MANIFEST_DIR")).join("../doors/testdata/tokenizer.json"),
                ..ModelConfig::default()
            }],
            endpoints: vec![EndpointConfig {
                instance: INSTANCE,
                url: format!("http://{engine}"),
                // Below; it has no metrics.
                reports_itself: true,
                ..EndpointConfig::default()
            }],
            ..DoorsConfig::default()
        };
        config.openai.listen = "127.0.0.1:0".into();
        let doors = Doors::open(&config, &EnginesConfig::default(), desk.clone(), &registry).await?;
        let [(_, address)] = doors.addresses()[..] else { bail!("one door is open") };
        report(&desk, 0)?;
        ensure!(opened.send(address).is_ok(), "nobody waits for the door");
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        for sequence in 1.. {
            tokio::select! {
                _ = ticks.tick() => report(&desk, sequence)?,
                word = asked.recv() => match word.context("nobody asks any more")? {
                    // Who asked may have given up.
                    Word::Cpu(answer) => drop(answer.send(thread_cpu_time())),
                    Word::Close => break,
                },
            }
        }
        doors.shutdown().await;
        router.shutdown().await;
        Ok(())
    })
}

/// The engine is idle.
fn report(desk: &kvfleet_router::Desk, sequence: u64) -> anyhow::Result<()> {
    let request = pb::ReportRequest {
        instance: INSTANCE,
        address: "engine".into(),
        sequence,
        started_us: 1,
        ..pb::ReportRequest::default()
    };
    Ok(desk.report(request)?)
}
