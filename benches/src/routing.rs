//! Cost of a routing call at both ends, over a client's persistent stream and as a separate call.
//!
//! The router has one thread and the caller another, so that the CPU time of each can be measured.
//! Request and answer are the same in both cases, including the decision; the ratio shows the cost
//! of the transport. Not here: the cost of a decision (`choose.rs`).

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use benches::{BenchRow, Better, median, outcome, sorted, thread_cpu_time};
use kv_core::id::{BlockHash, Category, IdentityDigest, RequestId, TenantId};
use kvfleet_client::{Client, ClientConfig, RouteAnswer, RouteCall};
use kvfleet_net::tls::{Role, TlsFiles};
use kvfleet_node::TlsSection;
use kvfleet_proto::pb;
use kvfleet_router::{Router, RouterConfig, RouterHandle, TlsConfig, VoterConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::Effort;
use crate::get::certificates;

pub(crate) const ABOUT: &str = "one router on one thread, and one caller on another, over TLS on loopback: \
    prompts of 8,000 tokens without any held block, routed among 64 instances over one stream per client, \
    against one call each; CPU time of either end per request, and the median latency, for sequential \
    requests and 32 at once";

/// A prompt of 8,000 tokens.
const PROMPT_BLOCKS: u32 = 500;
const BLOCK_TOKENS: u32 = 16;
const INSTANCES: u32 = 64;
/// Requests per run.
const CALLS: u64 = 4_000;
/// Concurrent requests.
const AT_ONCE: [(u64, &str); 2] = [(1, "sequential"), (32, "32 at once")];

const PEER: &str = "one call each";

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let dir = tempfile::tempdir()?;
    let served = RouterThread::start(dir.path())?;
    let caller = Builder::new_current_thread().enable_all().build()?;
    let clients = [true, false].map(|route_streams| served.client(&caller, route_streams));
    let [streamed, alone] = clients;
    let (streamed, alone) = (streamed?, alone?);
    let mut rows = Vec::new();
    for (at_once, how) in AT_ONCE.into_iter().filter(|(_, how)| effort.is_selected(how)) {
        let questions = effort.scaled(CALLS);
        let measure = |client: &Client| measure(&served, &caller, client, at_once, questions);
        let mut runs = Vec::new();
        for run in 0..=effort.runs {
            let pair = match run % 2 == 0 {
                true => {
                    let first = measure(&streamed)?;
                    (first, measure(&alone)?)
                }
                false => {
                    let first = measure(&alone)?;
                    (measure(&streamed)?, first)
                }
            };
            if run > 0 {
                runs.push(pair);
            }
        }
        let mut row = |what: &str, unit: &str, of: fn(&CallCosts) -> f64| {
            let pairs: Vec<_> = runs.iter().map(|(ours, theirs)| (of(ours), of(theirs))).collect();
            rows.push(BenchRow::new(
                "routing",
                &format!("{what}, {how}"),
                unit,
                PEER,
                Better::Lower,
                outcome(&pairs),
            ));
        };
        row("the router", "µs CPU per request", |figures| figures.router_us);
        row("the caller", "µs CPU per request", |figures| figures.caller_us);
        row("latency", "µs", |figures| figures.answer_us);
    }
    served.stop()?;
    Ok(rows)
}

/// Figures of one run.
struct CallCosts {
    router_us: f64,
    caller_us: f64,
    answer_us: f64,
}

fn measure(
    served: &RouterThread,
    caller: &Runtime,
    client: &Client,
    at_once: u64,
    questions: u64,
) -> anyhow::Result<CallCosts> {
    let (router, own) = (served.cpu()?, thread_cpu_time());
    let times = caller.block_on(route_calls(client, at_once, questions))?;
    let (own, router) = (thread_cpu_time() - own, served.cpu()? - router);
    let each = |spent: Duration| spent.as_secs_f64() * 1e6 / times.len() as f64;
    let (router_us, caller_us) = (each(router), each(own));
    let answer_us = median(&sorted(times.into_iter()));
    Ok(CallCosts { router_us, caller_us, answer_us })
}

/// Sends `questions` requests, `at_once` concurrently; returns their latencies in microseconds.
async fn route_calls(client: &Client, at_once: u64, questions: u64) -> anyhow::Result<Vec<f64>> {
    let mut asking = tokio::task::JoinSet::new();
    for lane in 0..at_once {
        let (client, question) = (client.clone(), route_call(lane));
        asking.spawn(async move {
            let mut times = Vec::new();
            for _ in 0..questions.div_ceil(at_once) {
                let begun = Instant::now();
                let answer = client.route(question.clone()).await?;
                times.push(begun.elapsed().as_secs_f64() * 1e6);
                ensure!(matches!(answer, RouteAnswer::Decided(_)), "the router rejects: {answer:?}");
            }
            Ok(times)
        });
    }
    let mut all = Vec::new();
    while let Some(times) = asking.join_next().await {
        all.extend(times??);
    }
    Ok(all)
}

fn route_call(lane: u64) -> RouteCall {
    let hash = |block: u32| BlockHash::from_words(u64::from(block) + 1, lane + 1);
    RouteCall {
        request: RequestId(lane),
        tenant: TenantId(0),
        category: Category::default(),
        hashes: (0..PROMPT_BLOCKS).map(hash).collect(),
        block_tokens: BLOCK_TOKENS,
        input_tokens: PROMPT_BLOCKS * BLOCK_TOKENS,
        output_tokens: 128,
        tbt_max_us: 0,
        identity: IdentityDigest([7; 16]),
        after: Vec::new(),
        fresh: false,
    }
}

/// A command for the router's thread.
enum RouterCommand {
    Cpu(oneshot::Sender<Duration>),
    Stop,
}

/// A router on a separate thread.
struct RouterThread {
    address: String,
    /// Certificate of its callers.
    callers: TlsFiles,
    commands: mpsc::Sender<RouterCommand>,
    thread: std::thread::JoinHandle<anyhow::Result<()>>,
}

impl RouterThread {
    fn start(dir: &Path) -> anyhow::Result<RouterThread> {
        let tls = certificates(dir, &Role::Router(None))?;
        let TlsSection { ca, cert, key } = certificates(dir, &Role::Instance(None))?;
        let callers = TlsFiles { ca, cert, key };
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let config = RouterConfig {
            id: 1,
            listen: address.clone(),
            voters: vec![VoterConfig { id: 1, address: address.clone() }],
            data_dir: dir.join("router"),
            tls: TlsConfig { ca: tls.ca, cert: tls.cert, key: tls.key },
            shards: 1,
            ..RouterConfig::default()
        };
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let ((words, asked), (ready, is_ready)) = (mpsc::channel(1), oneshot::channel());
        let thread = std::thread::spawn(move || runtime.block_on(serve(config, ready, asked)));
        if is_ready.blocking_recv().is_err() {
            match thread.join() {
                Ok(ended) => ended.and_then(|()| bail!("the router did not start"))?,
                Err(_) => bail!("the router's thread panicked"),
            }
            bail!("the router is not ready");
        }
        Ok(RouterThread { address, callers, commands: words, thread })
    }

    fn client(&self, runtime: &Runtime, route_streams: bool) -> anyhow::Result<Client> {
        let identity = self.callers.load()?;
        let config =
            ClientConfig { route_streams, ..ClientConfig::new(vec![self.address.clone()], identity) };
        let _in = runtime.enter();
        Ok(Client::new(config)?)
    }

    /// CPU time of the router's thread.
    fn cpu(&self) -> anyhow::Result<Duration> {
        let (answer, time) = oneshot::channel();
        self.commands.blocking_send(RouterCommand::Cpu(answer))?;
        Ok(time.blocking_recv()?)
    }

    fn stop(self) -> anyhow::Result<()> {
        self.commands.blocking_send(RouterCommand::Stop)?;
        self.thread.join().map_err(|_| anyhow::anyhow!("the router's thread panicked"))?
    }
}

async fn serve(
    config: RouterConfig,
    ready: oneshot::Sender<()>,
    mut commands: mpsc::Receiver<RouterCommand>,
) -> anyhow::Result<()> {
    let router = Router::start(config, &prometheus::Registry::new()).await?;
    let router_handle = router.handle();
    while router_handle.ready().is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    report(&router_handle, 0)?;
    ensure!(ready.send(()).is_ok(), "the caller gave up on the router");
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    for sequence in 1.. {
        tokio::select! {
            _ = ticks.tick() => report(&router_handle, sequence)?,
            command = commands.recv() => match command.context("the command channel closed")? {
                // The caller may have given up.
                RouterCommand::Cpu(answer) => drop(answer.send(thread_cpu_time())),
                RouterCommand::Stop => break,
            },
        }
    }
    router.shutdown().await;
    Ok(())
}

/// Reports all instances as idle.
fn report(router_handle: &RouterHandle, sequence: u64) -> anyhow::Result<()> {
    for instance in 1..=INSTANCES {
        let address = format!("10.0.0.{instance}:8000");
        let request = pb::ReportRequest { instance, address, sequence, started_us: 1, ..Default::default() };
        router_handle.report(request)?;
    }
    Ok(())
}
