//! A router with its OpenAI-compatible gateway on a separate thread, so that its CPU time can be
//! measured.
//!
//! Not here: the measurements (`proxy.rs`, `failover.rs`), and the client and the engine
//! (`gateway/engine.rs`).

pub(crate) mod engine;

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use benches::thread_cpu_time;
use kvfleet_gateway::{EndpointConfig, Gateway, GatewayConfig, ModelConfig};
use kvfleet_net::tls::Role;
use kvfleet_proto::pb;
use kvfleet_router::{EnginesConfig, Router, RouterConfig, TlsConfig, VoterConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::get::certificates;

/// A command for the gateway's thread.
enum GatewayCommand {
    Cpu(oneshot::Sender<Duration>),
    Close,
}

/// A router with its gateway on a separate thread.
pub(crate) struct GatewayThread {
    /// Listen address.
    pub(crate) address: SocketAddr,
    registry: prometheus::Registry,
    commands: mpsc::Sender<GatewayCommand>,
    thread: std::thread::JoinHandle<anyhow::Result<()>>,
}

impl GatewayThread {
    /// Starts the gateway with these engines as instances 1, 2, …, and waits until it accepts
    /// requests.
    pub(crate) fn start(
        dir: &Path,
        engines: &[SocketAddr],
        loads: LoadSource,
    ) -> anyhow::Result<GatewayThread> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (words, asked) = mpsc::channel(1);
        let (opened, address) = oneshot::channel();
        let (config, registry) = (router_config(dir)?, prometheus::Registry::new());
        let (engines, own) = (engines.to_vec(), registry.clone());
        let serve = move || serve(&runtime, &own, config, &engines, loads, opened, asked);
        let thread = std::thread::spawn(serve);
        match address.blocking_recv() {
            Ok(address) => Ok(GatewayThread { address, registry, commands: words, thread }),
            Err(_) => match thread.join() {
                Ok(ended) => ended.and_then(|()| bail!("the gateway did not start")),
                Err(_) => bail!("the gateway's thread panicked"),
            },
        }
    }

    /// CPU time of the gateway's thread.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        let (answer, time) = oneshot::channel();
        self.commands.blocking_send(GatewayCommand::Cpu(answer))?;
        Ok(time.blocking_recv()?)
    }

    /// A gauge of the gateway for one instance; `None` if absent.
    pub(crate) fn gauge(&self, name: &str, instance: u32) -> Option<f64> {
        let family = self.registry.gather().into_iter().find(|family| family.name() == name)?;
        let instance = instance.to_string();
        let is_its = |one: &&prometheus::proto::Metric| {
            one.get_label().iter().any(|label| label.name() == "instance" && label.value() == instance)
        };
        family.get_metric().iter().find(is_its).map(|one| one.get_gauge().get_value())
    }

    /// Stops the gateway, and returns any error since its start.
    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.commands.blocking_send(GatewayCommand::Close)?;
        self.thread.join().map_err(|_| anyhow::anyhow!("the gateway's thread panicked"))?
    }
}

fn router_config(dir: &Path) -> anyhow::Result<RouterConfig> {
    let tls = certificates(dir, &Role::Router(None))?;
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
    config: RouterConfig,
    engines: &[SocketAddr],
    loads: LoadSource,
    opened: oneshot::Sender<SocketAddr>,
    mut commands: mpsc::Receiver<GatewayCommand>,
) -> anyhow::Result<()> {
    runtime.block_on(async {
        let router = Router::start(config, registry).await?;
        let router_handle = router.handle();
        while router_handle.ready().is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let config = gateway_config(engines, loads);
        let hashing = EnginesConfig { public_hashes: true, ..EnginesConfig::default() };
        let gateway = Gateway::open(&config, &hashing, router_handle.clone(), registry).await?;
        let [(_, address)] = gateway.addresses()[..] else { bail!("the gateway has no single address") };
        loads.report(engines, &router_handle, 0)?;
        ensure!(opened.send(address).is_ok(), "the caller gave up on the gateway");
        let mut ticks = tokio::time::interval(Duration::from_millis(100));
        for sequence in 1.. {
            tokio::select! {
                _ = ticks.tick() => loads.report(engines, &router_handle, sequence)?,
                command = commands.recv() => match command.context("the command channel closed")? {
                    // The caller may have given up.
                    GatewayCommand::Cpu(answer) => drop(answer.send(thread_cpu_time())),
                    GatewayCommand::Close => break,
                },
            }
        }
        gateway.shutdown().await;
        router.shutdown().await;
        Ok(())
    })
}

fn gateway_config(engines: &[SocketAddr], loads: LoadSource) -> GatewayConfig {
    let endpoint = |(nth, engine): (usize, &SocketAddr)| EndpointConfig {
        instance: 1 + nth as u32,
        url: format!("http://{engine}"),
        reports_itself: loads == LoadSource::Reported,
        ..EndpointConfig::default()
    };
    let mut config = GatewayConfig {
        models: vec![ModelConfig {
            name: "m".into(),
            tokenizer: Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/testdata/tokenizer.json"),
            ..ModelConfig::default()
        }],
        endpoints: engines.iter().enumerate().map(endpoint).collect(),
        ..GatewayConfig::default()
    };
    config.openai.listen = "127.0.0.1:0".into();
    config
}

/// Source of the engines' loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadSource {
    /// The bench reports idle engines; the gateway's thread does not poll them.
    Reported,
    /// The gateway polls the engines' metrics.
    Polled,
}

impl LoadSource {
    fn report(
        self,
        engines: &[SocketAddr],
        desk: &kvfleet_router::RouterHandle,
        sequence: u64,
    ) -> anyhow::Result<()> {
        let told = if self == LoadSource::Reported { engines.len() as u32 } else { 0 };
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
