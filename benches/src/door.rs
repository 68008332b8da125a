//! A router with its OpenAI-compatible door, in a thread of its own, so that its CPU time can be told.
//!
//! Not here: what is timed (`proxy.rs`, `failover.rs`), and who calls and answers (`door/engine.rs`).

pub(crate) mod engine;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use benches::thread_cpu_time;
use kvfleet_doors::{Doors, DoorsConfig, EndpointConfig, ModelConfig};
use kvfleet_proto::pb;
use kvfleet_router::{EnginesConfig, Router, RouterConfig, TlsConfig, VoterConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::get::certificates;

/// What is asked of the door's thread.
enum Word {
    Cpu(oneshot::Sender<Duration>),
    Close,
}

/// A router with its door, in a thread of its own.
pub(crate) struct Door {
    /// Where it takes requests.
    pub(crate) address: SocketAddr,
    registry: prometheus::Registry,
    words: mpsc::Sender<Word>,
    thread: std::thread::JoinHandle<anyhow::Result<()>>,
}

impl Door {
    /// Opens it before these engines, the instances from 1 on, and waits until it takes requests.
    pub(crate) fn open(dir: &Path, engines: &[SocketAddr], loads: Loads) -> anyhow::Result<Door> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (words, asked) = mpsc::channel(1);
        let (opened, address) = oneshot::channel();
        let (config, registry) = (router_config(dir)?, prometheus::Registry::new());
        let (engines, own) = (engines.to_vec(), registry.clone());
        let serve = move || serve(&runtime, &own, (config, &engines, loads), opened, asked);
        let thread = std::thread::spawn(serve);
        match address.blocking_recv() {
            Ok(address) => Ok(Door { address, registry, words, thread }),
            Err(_) => match thread.join() {
                Ok(ended) => ended.and_then(|()| bail!("the door did not open")),
                Err(_) => bail!("the door's thread broke down"),
            },
        }
    }

    /// CPU time of the door's thread.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let (answer, time) = oneshot::channel();
        self.words.blocking_send(Word::Cpu(answer))?;
        Ok(time.blocking_recv()?)
    }

    /// A figure of the door of one instance; nothing where it is not there.
    pub(crate) fn figure(&self, name: &str, instance: u32) -> Option<f64> {
        let family = self.registry.gather().into_iter().find(|family| family.name() == name)?;
        let instance = instance.to_string();
        let is_its = |one: &&prometheus::proto::Metric| {
            one.get_label().iter().any(|label| label.name() == "instance" && label.value() == instance)
        };
        family.get_metric().iter().find(is_its).map(|one| one.get_gauge().get_value())
    }

    /// Closes it, and says what went wrong meanwhile.
    pub(crate) fn close(self) -> anyhow::Result<()> {
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
    registry: &prometheus::Registry,
    (config, engines, loads): (RouterConfig, &[SocketAddr], Loads),
    opened: oneshot::Sender<SocketAddr>,
    mut asked: mpsc::Receiver<Word>,
) -> anyhow::Result<()> {
    runtime.block_on(async {
        let router = Router::start(config, registry).await?;
        let desk = router.desk();
        while desk.ready().is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let config = doors_config(engines, loads);
        let doors = Doors::open(&config, &EnginesConfig::default(), desk.clone(), registry).await?;
        let [(_, address)] = doors.addresses()[..] else { bail!("one door is open") };
        loads.tell(engines, &desk, 0)?;
        ensure!(opened.send(address).is_ok(), "nobody waits for the door");
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        for sequence in 1.. {
            tokio::select! {
                _ = ticks.tick() => loads.tell(engines, &desk, sequence)?,
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

fn doors_config(engines: &[SocketAddr], loads: Loads) -> DoorsConfig {
    let endpoint = |(nth, engine): (usize, &SocketAddr)| EndpointConfig {
        instance: 1 + nth as u32,
        url: format!("http://{engine}"),
        reports_itself: loads == Loads::Told,
        ..EndpointConfig::default()
    };
    let mut config = DoorsConfig {
        models: vec![ModelConfig {
            name: "m".into(),
            tokenizer: Path::new(env!("CARGO_MANIFEST_DIR")).join("../doors/testdata/tokenizer.json"),
            ..ModelConfig::default()
        }],
        endpoints: engines.iter().enumerate().map(endpoint).collect(),
        ..DoorsConfig::default()
    };
    config.openai.listen = "127.0.0.1:0".into();
    config
}

/// How the router learns what engines have to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loads {
    /// It is told that they are idle, without being asked: that is not on the door's thread.
    Told,
    /// The door asks them for their metrics.
    Asked,
}

impl Loads {
    fn tell(self, engines: &[SocketAddr], desk: &kvfleet_router::Desk, sequence: u64) -> anyhow::Result<()> {
        let told = if self == Loads::Told { engines.len() as u32 } else { 0 };
        (1..=told).try_for_each(|instance| {
            desk.report(pb::ReportRequest {
                instance,
                address: "engine".into(),
                sequence,
                started_us: 1,
                ..pb::ReportRequest::default()
            })?;
            Ok(())
        })
    }
}
