//! Runs one process from its configuration to its clean end.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use prometheus::Registry;

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

/// A service that runs, with what it needs to stop.
enum Service {
    Router(kvfleet_router::Router),
    Node(Box<kvfleet_node::Node>),
    Instance(Instance),
}

impl Service {
    /// Why it cannot go on; never returns while it serves.
    async fn failed(&self) -> anyhow::Error {
        match self {
            Service::Router(router) => anyhow::anyhow!("the router failed: {}", router.failed().await),
            Service::Node(node) => node.failed().await.into(),
            Service::Instance(_) => std::future::pending().await,
        }
    }
}

/// Runs a process until it is asked to stop.
pub async fn run(role: Role, args: &ProcessArgs) -> anyhow::Result<()> {
    match role {
        Role::Router => {
            let settings = settings::<kvfleet_router::RouterConfig>(args)?;
            settings.service.validate()?;
            let number = settings.service.id;
            serve(role, number, args, settings, async |config, registry| {
                let router = kvfleet_router::Router::start(config, registry).await?;
                let addresses = vec![("grpc", router.local_addr())];
                Ok((Service::Router(router), addresses))
            })
            .await
        }
        Role::Node => {
            let settings = settings::<kvfleet_node::NodeConfig>(args)?;
            settings.service.validate()?;
            let number = u64::from(settings.service.id);
            serve(role, number, args, settings, async |config, registry| {
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
            serve(role, number, args, settings, async |config, registry| {
                let instance = Instance::start(config, registry).await?;
                let addresses = vec![("grpc", instance.local_addr())];
                Ok((Service::Instance(instance), addresses))
            })
            .await
        }
    }
}

fn settings<T>(args: &ProcessArgs) -> anyhow::Result<Settings<T>>
where
    T: Default + serde::Serialize + serde::de::DeserializeOwned,
{
    let mut layers = environment_overrides(std::env::vars());
    layers.extend(args.flags());
    Ok(load(args.config.as_deref(), &layers)?)
}

async fn serve<T>(
    role: Role,
    number: u64,
    args: &ProcessArgs,
    settings: Settings<T>,
    start: impl AsyncFnOnce(T, &Registry) -> anyhow::Result<(Service, Vec<(&'static str, SocketAddr)>)>,
) -> anyhow::Result<()> {
    let stop = Stop::of_service(args.follow_parent)?;
    let telemetry = telemetry::install(&settings.process, &format!("kvfleet-{}", role.name()))?;
    super::files::raise_limit();
    let registry = Registry::new();
    let metrics = super::metrics::serve(&settings.process.metrics_listen, registry.clone()).await?;
    let (service, mut addresses) = tokio::select! {
        started = start(settings.service, &registry) => started?,
        why = stop.requested() => {
            tracing::info!(?why, "stopped before it served");
            telemetry.finish();
            return Ok(());
        }
    };
    addresses.extend(metrics.map(|address| ("metrics", address)));
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
    match service {
        Service::Router(router) => router.shutdown().await,
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
