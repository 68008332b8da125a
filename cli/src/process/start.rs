//! Runs one process from its configuration to its clean stop.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kvfleet_gateway::{Gateway, GatewayConfig};
use kvfleet_router::RouterConfig;
use prometheus::Registry;
use serde::{Deserialize, Serialize};

use super::health::{Health, HealthSource};
use super::{ReadyLine, Stop, telemetry};
use crate::args::ProcessArgs;
use crate::config::{Settings, environment_overrides, load};
use kvfleet_engine::mock::{Instance, InstanceConfig};

/// Kind of process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A router.
    Router,
    /// A storage node.
    Node,
    /// A mock instance.
    Instance,
}

impl Role {
    /// Name of its subcommand, and prefix of its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::Node => "node",
            Role::Instance => "instance",
        }
    }
}

/// Configuration of a router's process: the router and its gateway.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RouterProcessConfig {
    /// The router.
    #[serde(flatten)]
    pub(crate) router: RouterConfig,
    /// The gateway.
    pub(crate) gateway: GatewayConfig,
}

/// A running service.
enum RunningService {
    Router(Box<(kvfleet_router::Router, Gateway)>),
    Node(Box<kvfleet_node::Node>),
    Instance(Instance),
}

impl RunningService {
    /// Source of its readiness.
    fn health_source(&self) -> HealthSource {
        match self {
            RunningService::Router(parts) => HealthSource::Router(parts.0.handle()),
            RunningService::Node(node) => HealthSource::Node(node.membership()),
            RunningService::Instance(_) => HealthSource::Instance,
        }
    }

    /// Returns the failure of the service; never returns while it works.
    async fn failure(&self) -> anyhow::Error {
        match self {
            RunningService::Router(parts) => anyhow::anyhow!("the router failed: {}", parts.0.failed().await),
            RunningService::Node(node) => node.failed().await.into(),
            RunningService::Instance(_) => std::future::pending().await,
        }
    }
}

/// Runs a process until it is asked to stop.
pub async fn run(role: Role, args: &ProcessArgs) -> anyhow::Result<()> {
    match role {
        Role::Router => {
            let settings = settings::<RouterProcessConfig>(args)?;
            settings.service.router.validate()?;
            settings.service.gateway.validate()?;
            if settings.service.gateway.computes_hashes() {
                settings.service.router.engines.require_hash_key()?;
            }
            super::files::require_private(&settings.service.router.data_dir)?;
            let number = settings.service.router.id;
            let drain_time = settings.service.gateway.drain_timeout();
            serve(role, number, args, settings, drain_time, async |config, registry| {
                let RouterProcessConfig { router: config, gateway } = config;
                let engines = config.engines.clone();
                let router = kvfleet_router::Router::start(config, registry).await?;
                let mut addresses = vec![("grpc", router.local_addr())];
                match Gateway::open(&gateway, &engines, router.handle(), registry).await {
                    Ok(gateway) => {
                        addresses.extend(gateway.addresses());
                        Ok((RunningService::Router(Box::new((router, gateway))), addresses))
                    }
                    Err(error) => {
                        router.shutdown().await;
                        Err(error.into())
                    }
                }
            })
            .await
        }
        Role::Node => {
            let settings = settings::<kvfleet_node::NodeConfig>(args)?;
            settings.service.validate()?;
            super::files::require_private(&settings.service.data_dir)?;
            let number = u64::from(settings.service.id);
            serve(role, number, args, settings, Duration::ZERO, async |config, registry| {
                let node = kvfleet_node::Node::start(config, registry).await?;
                let addresses = vec![("data", node.data_addr()), ("control", node.control_addr())];
                Ok((RunningService::Node(Box::new(node)), addresses))
            })
            .await
        }
        Role::Instance => {
            let settings = settings::<InstanceConfig>(args)?;
            settings.service.validate().map_err(anyhow::Error::msg)?;
            let number = u64::from(settings.service.instance);
            serve(role, number, args, settings, Duration::ZERO, async |config, registry| {
                let instance = Instance::start(config, registry).await?;
                let openai = instance.openai_addr().map(|address| ("openai", address));
                let addresses = std::iter::once(("grpc", instance.local_addr())).chain(openai).collect();
                Ok((RunningService::Instance(instance), addresses))
            })
            .await
        }
    }
}

fn settings<T>(args: &ProcessArgs) -> anyhow::Result<Settings<T>>
where
    T: Default + Serialize + serde::de::DeserializeOwned,
{
    let mut layers = environment_overrides(std::env::vars());
    layers.extend(args.flags());
    let settings = load::<T>(args.config.as_deref(), &layers)?;
    settings.process.validate()?;
    Ok(settings)
}

/// Serves until asked to stop. Requests in flight then get `drain_time` to finish.
async fn serve<T>(
    role: Role,
    number: u64,
    args: &ProcessArgs,
    settings: Settings<T>,
    drain_time: Duration,
    start: impl AsyncFnOnce(T, &Registry) -> anyhow::Result<(RunningService, Vec<(&'static str, SocketAddr)>)>,
) -> anyhow::Result<()> {
    if args.check {
        println!("{} {number}: the configuration is valid", role.name());
        return Ok(());
    }
    let stop = Stop::for_service(args.follow_parent, drain_time)?;
    let telemetry = telemetry::install(&settings.process, &format!("kvfleet-{}", role.name()))?;
    super::files::keep_private();
    super::files::raise_limit();
    let registry = Registry::new();
    let (process, health) = (&settings.process, Health::default());
    let metrics = super::metrics::serve(&process.metrics_listen, registry.clone(), health.clone()).await?;
    let drain = super::drain::serve(&process.drain_listen, health.clone()).await?;
    let (service, mut addresses) = tokio::select! {
        started = start(settings.service, &registry) => started?,
        why = stop.requested() => {
            tracing::info!(?why, "stopped before it was ready");
            telemetry.finish();
            return Ok(());
        }
    };
    addresses.extend(metrics.map(|address| ("metrics", address)));
    addresses.extend(drain.map(|address| ("drain", address)));
    health.set_source(service.health_source());
    announce(role, number, &addresses)?;
    let failure = tokio::select! {
        why = stop.requested() => {
            tracing::info!(?why, "stopping");
            None
        }
        failure = service.failure() => {
            tracing::error!(%failure, "stopping");
            Some(failure)
        }
    };
    health.begin_stop();
    match service {
        RunningService::Router(parts) => {
            let (router, gateway) = *parts;
            gateway.shutdown().await;
            router.shutdown().await;
        }
        RunningService::Node(node) => node.shutdown().await,
        RunningService::Instance(instance) => instance.shutdown().await,
    }
    telemetry.finish();
    failure.map_or(Ok(()), Err)
}

/// Prints the READY line, the only line that a process writes to standard output.
fn announce(role: Role, number: u64, addresses: &[(&str, SocketAddr)]) -> anyhow::Result<()> {
    let addresses: BTreeMap<_, _> =
        addresses.iter().map(|(purpose, address)| ((*purpose).to_owned(), address.to_string())).collect();
    let ready = ReadyLine { role: role.name().to_owned(), number, pid: std::process::id(), addresses };
    tracing::info!(role = ready.role, number, addresses = ?ready.addresses, "serving");
    // If standard output is closed, no parent waits for the line, and the process serves anyway.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), format!("{}\n", ready.to_line()).as_bytes());
    Ok(())
}
