//! Runs one process from its configuration to its clean end.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use kvfleet_doors::{Doors, DoorsConfig};
use kvfleet_router::RouterConfig;
use prometheus::Registry;
use serde::{Deserialize, Serialize};

use super::health::{Health, Subject};
use super::{Ready, Stop, telemetry};
use crate::args::ProcessArgs;
use crate::config::{Settings, environment_overrides, load};
use crate::instance::{Instance, InstanceConfig};

/// What a process of a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A router.
    Router,
    /// A storage node.
    Node,
    /// A stand-in instance.
    Instance,
}

impl Role {
    /// Its subcommand, and the first part of its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::Node => "node",
            Role::Instance => "instance",
        }
    }
}

/// What a router's process reads: the router's own keys, and its doors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RouterProcessConfig {
    /// The router's own.
    #[serde(flatten)]
    pub(crate) router: RouterConfig,
    /// Doors for frontends.
    pub(crate) doors: DoorsConfig,
}

/// A service that runs, with what it needs to stop.
enum Service {
    Router(Box<(kvfleet_router::Router, Doors)>),
    Node(Box<kvfleet_node::Node>),
    Instance(Instance),
}

impl Service {
    /// Whom to ask whether it is ready.
    fn subject(&self) -> Subject {
        match self {
            Service::Router(parts) => Subject::Router(parts.0.desk()),
            Service::Node(node) => Subject::Node(node.standing()),
            Service::Instance(_) => Subject::Instance,
        }
    }

    /// Why it cannot go on; never returns while it serves.
    async fn failed(&self) -> anyhow::Error {
        match self {
            Service::Router(parts) => anyhow::anyhow!("the router failed: {}", parts.0.failed().await),
            Service::Node(node) => node.failed().await.into(),
            Service::Instance(_) => std::future::pending().await,
        }
    }
}

/// Runs a process until it is asked to stop.
pub async fn run(role: Role, args: &ProcessArgs) -> anyhow::Result<()> {
    match role {
        Role::Router => {
            let settings = settings::<RouterProcessConfig>(args)?;
            settings.service.router.validate()?;
            settings.service.doors.validate()?;
            let number = settings.service.router.id;
            let under_way = settings.service.doors.ends_within();
            serve(role, number, args, (settings, under_way), async |config, registry| {
                let RouterProcessConfig { router: config, doors } = config;
                let engines = config.engines.clone();
                let router = kvfleet_router::Router::start(config, registry).await?;
                let mut addresses = vec![("grpc", router.local_addr())];
                match Doors::open(&doors, &engines, router.desk(), registry).await {
                    Ok(doors) => {
                        addresses.extend(doors.addresses());
                        Ok((Service::Router(Box::new((router, doors))), addresses))
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
            let number = u64::from(settings.service.id);
            serve(role, number, args, (settings, Duration::ZERO), async |config, registry| {
                let node = kvfleet_node::Node::start(config, registry).await?;
                let addresses = vec![("data", node.data_addr()), ("control", node.control_addr())];
                Ok((Service::Node(Box::new(node)), addresses))
            })
            .await
        }
        Role::Instance => {
            let settings = settings::<InstanceConfig>(args)?;
            settings.service.validate().map_err(anyhow::Error::msg)?;
            let number = u64::from(settings.service.instance);
            serve(role, number, args, (settings, Duration::ZERO), async |config, registry| {
                let instance = Instance::start(config, registry).await?;
                let openai = instance.openai_addr().map(|address| ("openai", address));
                let addresses = std::iter::once(("grpc", instance.local_addr())).chain(openai).collect();
                Ok((Service::Instance(instance), addresses))
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

/// Serves until asked to stop. Requests that are `under_way` then may take so long.
async fn serve<T>(
    role: Role,
    number: u64,
    args: &ProcessArgs,
    (settings, under_way): (Settings<T>, Duration),
    start: impl AsyncFnOnce(T, &Registry) -> anyhow::Result<(Service, Vec<(&'static str, SocketAddr)>)>,
) -> anyhow::Result<()> {
    if args.check {
        println!("{} {number}: the configuration is valid", role.name());
        return Ok(());
    }
    let stop = Stop::of_service(args.follow_parent, under_way)?;
    let telemetry = telemetry::install(&settings.process, &format!("kvfleet-{}", role.name()))?;
    super::files::raise_limit();
    let registry = Registry::new();
    let (process, health) = (&settings.process, Health::default());
    let metrics = super::metrics::serve(&process.metrics_listen, registry.clone(), health.clone()).await?;
    let drain = super::drain::serve(&process.drain_listen, health.clone()).await?;
    let (service, mut addresses) = tokio::select! {
        started = start(settings.service, &registry) => started?,
        why = stop.requested() => {
            tracing::info!(?why, "stopped before it served");
            telemetry.finish();
            return Ok(());
        }
    };
    addresses.extend(metrics.map(|address| ("metrics", address)));
    addresses.extend(drain.map(|address| ("drain", address)));
    health.serves(service.subject());
    announce(role, number, &addresses)?;
    let failure = tokio::select! {
        why = stop.requested() => {
            tracing::info!(?why, "stopping");
            None
        }
        failure = service.failed() => {
            tracing::error!(%failure, "stopping");
            Some(failure)
        }
    };
    health.stops();
    match service {
        Service::Router(parts) => {
            let (router, doors) = *parts;
            doors.shutdown().await;
            router.shutdown().await;
        }
        Service::Node(node) => node.shutdown().await,
        Service::Instance(instance) => instance.shutdown().await,
    }
    telemetry.finish();
    failure.map_or(Ok(()), Err)
}

/// Prints the READY line: the only line a process writes to standard output.
fn announce(role: Role, number: u64, addresses: &[(&str, SocketAddr)]) -> anyhow::Result<()> {
    let addresses: BTreeMap<_, _> =
        addresses.iter().map(|(purpose, address)| ((*purpose).to_owned(), address.to_string())).collect();
    let ready = Ready { role: role.name().to_owned(), number, pid: std::process::id(), addresses };
    tracing::info!(role = ready.role, number, addresses = ?ready.addresses, "serving");
    // A closed standard output means nobody waits for the line; the process serves all the same.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), format!("{}\n", ready.to_line()).as_bytes());
    Ok(())
}
