//! Engines that publish their KV events (vLLM, SGLang): what they have in GPU memory goes into the soft plane, as if they had reported
//! it themselves.
//!
//! Each rank of an engine is an instance, with a task of its own: events are in order within it, and wait for no other. What comes over
//! the network is read here; nothing of it enters the log (`docs/adr/0051`). Not here: what blocks of GPU memory do to a choice
//! (`kv_core::schedule`), and instances that link the client and report for themselves (`crate::server::residency`).

use std::net::SocketAddr;
use std::sync::Arc;

use kv_core::id::InstanceId;
use kvfleet_proto::zmtp::Endpoint;
use parking_lot::RwLock;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::clock::{Clock, UnixClock};
use crate::config::{EngineConfig, EnginesConfig};
use crate::error::StartError;
use crate::view::residency::Residency;

use aliases::Aliases;
use follow::Follower;
use listen::Directory;
use metrics::EngineMetrics;
use rank::Rank;
use teller::Teller;
use tenants::Tenants;

mod aliases;
mod dial;
mod follow;
mod listen;
pub(crate) mod metrics;
#[cfg(feature = "probe")]
pub(crate) mod probe;
mod rank;
mod teller;
mod tenants;
#[cfg(test)]
mod tests;

/// What every engine is followed with.
pub(crate) struct Engines {
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) clock: Clock,
    pub(crate) unix: UnixClock,
    pub(crate) metrics: EngineMetrics,
    pub(crate) stop: CancellationToken,
}

/// What is read and bound before anything starts, so that what is wrong with it ends the start.
pub(crate) struct Prepared {
    tenants: Arc<Tenants>,
    listeners: Vec<TcpListener>,
    list: Vec<EngineConfig>,
}

/// Reads the secrets and takes the ports.
pub(crate) async fn prepare(config: &EnginesConfig) -> Result<Prepared, StartError> {
    let tenants = Arc::new(Tenants::load(config)?);
    let mut listeners = Vec::new();
    if let Ok(first) = config.listen.parse::<SocketAddr>() {
        // A publisher of rank r adds r to the port that it is given.
        for port in 0..config
            .list
            .iter()
            .filter(|engine| engine.dials())
            .map(|engine| engine.ranks)
            .max()
            .unwrap_or(0)
        {
            let mut address = first;
            address.set_port(first.port().saturating_add(port));
            let listener = TcpListener::bind(address).await;
            listeners.push(listener.map_err(|source| StartError::EnginesListen { address, source })?);
        }
    }
    Ok(Prepared { tenants, listeners, list: config.list.clone() })
}

impl Engines {
    /// Starts a task for each rank, and what brings it messages.
    pub(crate) fn start(&self, prepared: Prepared) {
        let Prepared { tenants, listeners, list } = prepared;
        let mut directory = Directory::default();
        for engine in &list {
            for rank in 0..engine.ranks {
                self.follow(engine, rank, &tenants, &mut directory);
            }
        }
        let directory = Arc::new(directory);
        for listener in listeners.into_iter().filter(|_| !directory.is_empty()) {
            tokio::spawn(listen::run(listener, Arc::clone(&directory), self.stop.clone()));
        }
    }

    fn follow(&self, engine: &EngineConfig, rank: u16, tenants: &Arc<Tenants>, directory: &mut Directory) {
        let instance = InstanceId(engine.instance + u32::from(rank));
        let metrics = self.metrics.of(instance);
        let teller = Teller::new(Arc::clone(&self.residency), instance, self.clock, self.unix.clone());
        let aliases = Aliases::new(Arc::clone(tenants));
        let dialect = engine.dialect.into();
        let number = engine.first_rank + u32::from(rank);
        let further = u16::try_from(number).unwrap_or(u16::MAX);
        let at = |text: &str| text.parse::<Endpoint>().ok().and_then(|endpoint| endpoint.further(further));
        let follower = Follower {
            rank: Rank::new((dialect, number), aliases, teller, metrics.clone()),
            replay: at(&engine.replay),
            metrics: metrics.clone(),
            said: None,
        };
        let (sender, brought) = mpsc::channel(follow::QUEUE);
        tokio::spawn(follower.run(brought, self.stop.clone()));
        match at(&engine.events) {
            Some(endpoint) => {
                let topic = engine.topic.clone();
                drop(tokio::spawn(dial::run(endpoint, topic, sender, metrics, self.stop.clone())));
            }
            None => directory.add(engine, sender, metrics),
        }
    }
}
