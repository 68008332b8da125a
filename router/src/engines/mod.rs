//! Engines that publish their KV events (vLLM, SGLang): what they have in GPU memory goes into the soft plane, as if they had reported
//! it themselves.
//!
//! Each rank of an engine is an instance, with a task of its own: events are in order within it, and wait for no other. What comes over
//! the network is read here; nothing of it enters the log (`docs/adr/0051`). Not here: what blocks of GPU memory do to a choice
//! (`kv_core::schedule`), and instances that link the client and report for themselves (`crate::server::residency`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use kv_core::id::InstanceId;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::zmtp::Endpoint;
use parking_lot::{Mutex, RwLock};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::clock::{Clock, UnixClock};
use crate::config::{ConfigError, EngineConfig, EnginesConfig};
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
pub(crate) mod tenants;
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
    identity: IdentitySection,
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
    Ok(Prepared { tenants, listeners, list: config.list.clone(), identity: config.identity.clone() })
}

/// Ranks that are followed at once, as many as the router knows instances.
const RANKS_MAX: usize = crate::view::fleet::INSTANCES_MAX;

/// Why an engine is not followed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowError {
    /// What it is followed by makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It would have to dial.
    #[error(
        "instance {0} has no `events`: an engine that dials is to stand in engines.list of the configuration"
    )]
    Dials(u32),
    /// Its numbers are another one's.
    #[error(
        "instance {instance} and its ranks meet instance {other}, which is followed: give each engine numbers of its own"
    )]
    Taken {
        /// Of the engine that is not followed.
        instance: u32,
        /// Of the one that is.
        other: u32,
    },
    /// There are too many.
    #[error("{RANKS_MAX} ranks are followed, which is the limit")]
    Full,
}

/// Engines that are followed, and what more are followed with. Clones share them.
#[derive(Clone)]
pub(crate) struct Following(Arc<Shared>);

struct Shared {
    engines: Engines,
    tenants: Arc<Tenants>,
    identity: IdentitySection,
    /// By the instance of their first rank.
    all: Mutex<BTreeMap<u32, Followed>>,
}

/// One engine that is followed.
struct Followed {
    config: EngineConfig,
    /// None where it is in the configuration: it is followed for as long as the process lives.
    at_run_time: Option<(CancellationToken, Vec<JoinHandle<()>>)>,
}

impl Engines {
    /// Starts a task for each rank, and what brings it messages.
    pub(crate) fn start(self, prepared: Prepared) -> Following {
        let Prepared { tenants, listeners, list, identity } = prepared;
        let mut directory = Directory::default();
        let mut all = BTreeMap::new();
        for engine in list {
            for rank in 0..engine.ranks {
                self.follow(&engine, rank, &tenants, Some(&mut directory), &self.stop);
            }
            all.insert(engine.instance, Followed { config: engine, at_run_time: None });
        }
        let directory = Arc::new(directory);
        for listener in listeners.into_iter().filter(|_| !directory.is_empty()) {
            tokio::spawn(listen::run(listener, Arc::clone(&directory), self.stop.clone()));
        }
        Following(Arc::new(Shared { engines: self, tenants, identity, all: Mutex::new(all) }))
    }

    fn follow(
        &self,
        engine: &EngineConfig,
        rank: u16,
        tenants: &Arc<Tenants>,
        directory: Option<&mut Directory>,
        stop: &CancellationToken,
    ) -> JoinHandle<()> {
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
        let follows = tokio::spawn(follower.run(brought, stop.clone()));
        match (at(&engine.events), directory) {
            (Some(endpoint), _) => {
                let topic = engine.topic.clone();
                drop(tokio::spawn(dial::run(endpoint, topic, sender, metrics, stop.clone())));
            }
            (None, Some(directory)) => directory.add(engine, sender, metrics),
            (None, None) => {}
        }
        follows
    }
}

impl Following {
    /// Follows one more engine, until it is asked not to. One that is followed in just this way goes on.
    pub(crate) fn follow(&self, engine: EngineConfig) -> Result<(), FollowError> {
        let Shared { engines, tenants, identity, all } = &*self.0;
        engine.check()?;
        if engine.dials() {
            return Err(FollowError::Dials(engine.instance));
        }
        crate::config::check_identity(identity)?;
        let mut all = all.lock();
        if all.get(&engine.instance).is_some_and(|followed| followed.config == engine) {
            return Ok(());
        }
        if let Some(other) = all.values().find(|followed| followed.config.meets(&engine)) {
            return Err(FollowError::Taken { instance: engine.instance, other: other.config.instance });
        }
        let ranks: usize = all.values().map(|followed| usize::from(followed.config.ranks)).sum();
        if ranks + usize::from(engine.ranks) > RANKS_MAX {
            return Err(FollowError::Full);
        }
        let stop = engines.stop.child_token();
        let follow = |rank| engines.follow(&engine, rank, tenants, None, &stop);
        let tasks = (0..engine.ranks).map(follow).collect();
        all.insert(engine.instance, Followed { config: engine, at_run_time: Some((stop, tasks)) });
        Ok(())
    }

    /// Whether an engine is followed.
    pub(crate) fn follows(&self, instance: u32) -> bool {
        self.0.all.lock().contains_key(&instance)
    }

    /// Follows an engine no more, and forgets what it said. Whether it was followed; what the configuration names goes on.
    pub(crate) fn unfollow(&self, instance: u32) -> bool {
        let mut all = self.0.all.lock();
        if all.get(&instance).is_none_or(|followed| followed.at_run_time.is_none()) {
            return false;
        }
        let Some(Followed { config, at_run_time: Some((stop, tasks)) }) = all.remove(&instance) else {
            return false;
        };
        drop(all);
        stop.cancel();
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            for task in tasks {
                let _ = task.await; // what it still says is said by now
            }
            for rank in 0..config.ranks {
                shared.forget(config.instance + u32::from(rank));
            }
        });
        true
    }
}

impl Shared {
    /// Forgets what an instance said, and its figures unless it is followed again meanwhile: they are its successor's then.
    fn forget(&self, instance: u32) {
        self.engines.void(InstanceId(instance));
        // Held, so that nobody begins to follow it in between.
        let all = self.all.lock();
        let is_of = |followed: &Followed| {
            let first = followed.config.instance;
            (first..first + u32::from(followed.config.ranks)).contains(&instance)
        };
        if !all.values().any(is_of) {
            self.engines.metrics.forget(InstanceId(instance));
        }
    }
}

impl Engines {
    /// Voids what an instance said. Whoever follows it again meanwhile is told that it was, and tells everything again.
    fn void(&self, instance: InstanceId) {
        let now = self.clock.now();
        let mut residency = self.residency.write();
        if let Some(standing) = residency.standing(instance, now) {
            residency.started(instance, standing.epoch + 1, now);
        }
    }
}
