//! Engines that publish KV events (vLLM, SGLang): their events update GPU residency as if the
//! instances had reported it themselves.
//!
//! Each rank of an engine is an instance with its own task: events are ordered within it and
//! independent of other ranks. Network input is parsed here and never enters the log
//! (`docs/adr/0051`). Not here: the effect of residency on decisions (`kv_core::schedule`), and
//! instances that link the client and report themselves (`crate::server::residency`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use kv_core::id::InstanceId;
use kvfleet_engine_events::zmtp::Endpoint;
use kvfleet_proto::identity::IdentitySection;
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
use listen::TopicDirectory;
use metrics::EngineMetrics;
use rank::RankState;
use reporter::ResidencyReporter;
use tenants::Tenants;

mod aliases;
mod dial;
mod follow;
mod listen;
pub(crate) mod metrics;
#[cfg(feature = "probe")]
pub(crate) mod probe;
mod rank;
mod reporter;
pub(crate) mod tenants;
#[cfg(test)]
mod tests;

/// Shared inputs of all followers.
pub(crate) struct FollowContext {
    pub(crate) residency: Arc<RwLock<Residency>>,
    pub(crate) clock: Clock,
    pub(crate) unix: UnixClock,
    pub(crate) metrics: EngineMetrics,
    pub(crate) stop: CancellationToken,
}

/// Secrets and ports, acquired before any task starts so that an error stops the router's start.
pub(crate) struct EngineSetup {
    tenants: Arc<Tenants>,
    listeners: Vec<TcpListener>,
    list: Vec<EngineConfig>,
    identity: IdentitySection,
}

impl EngineSetup {
    /// The identities and keys of the engines' prefixes.
    pub(crate) fn tenants(&self) -> Arc<Tenants> {
        Arc::clone(&self.tenants)
    }
}

/// Reads the secrets and binds the ports.
pub(crate) async fn prepare(config: &EnginesConfig) -> Result<EngineSetup, StartError> {
    let tenants = Arc::new(Tenants::load(config)?);
    let mut listeners = Vec::new();
    if let Ok(first) = config.listen.parse::<SocketAddr>() {
        // The publisher of rank r uses the configured port plus r.
        for port in 0..config
            .list
            .iter()
            .filter(|engine| engine.dials_router())
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
    Ok(EngineSetup { tenants, listeners, list: config.list.clone(), identity: config.identity.clone() })
}

/// Limit on followed ranks: as many as the router knows instances.
const RANKS_MAX: usize = crate::view::fleet::INSTANCES_MAX;

/// Error of following an engine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FollowError {
    /// Its configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It has no endpoint, so it would have to dial.
    #[error("instance {0} has no `events`: list an engine that dials in engines.list of the configuration")]
    Dials(u32),
    /// Its instance numbers overlap another engine's.
    #[error(
        "instance {instance} and its ranks overlap instance {other}, which is followed: give each engine its \
         own numbers"
    )]
    Overlap {
        /// First instance of the rejected engine.
        instance: u32,
        /// First instance of the followed engine.
        other: u32,
    },
    /// Too many ranks are followed.
    #[error("{RANKS_MAX} ranks are followed, which is the limit")]
    TooMany,
}

/// The followed engines. Clones share them.
#[derive(Clone)]
pub(crate) struct EngineFollowers(Arc<FollowersState>);

struct FollowersState {
    engines: FollowContext,
    tenants: Arc<Tenants>,
    identity: IdentitySection,
    /// By the instance of their first rank.
    followed: Mutex<BTreeMap<u32, FollowedEngine>>,
}

/// One followed engine.
struct FollowedEngine {
    config: EngineConfig,
    /// Token and tasks of an engine that was added at run time; `None` for one of the
    /// configuration, which is followed while the process lives.
    dynamic: Option<(CancellationToken, Vec<JoinHandle<()>>)>,
}

impl FollowContext {
    /// Starts a task for each rank, and the connections or listeners that feed it.
    pub(crate) fn start(self, prepared: EngineSetup) -> EngineFollowers {
        let EngineSetup { tenants, listeners, list, identity } = prepared;
        let mut directory = TopicDirectory::default();
        let mut all = BTreeMap::new();
        for engine in list {
            for rank in 0..engine.ranks {
                self.follow(&engine, rank, &tenants, Some(&mut directory), &self.stop);
            }
            all.insert(engine.instance, FollowedEngine { config: engine, dynamic: None });
        }
        let directory = Arc::new(directory);
        for listener in listeners.into_iter().filter(|_| !directory.is_empty()) {
            tokio::spawn(listen::run(listener, Arc::clone(&directory), self.stop.clone()));
        }
        EngineFollowers(Arc::new(FollowersState {
            engines: self,
            tenants,
            identity,
            followed: Mutex::new(all),
        }))
    }

    fn follow(
        &self,
        engine: &EngineConfig,
        rank: u16,
        tenants: &Arc<Tenants>,
        directory: Option<&mut TopicDirectory>,
        stop: &CancellationToken,
    ) -> JoinHandle<()> {
        let instance = InstanceId(engine.instance + u32::from(rank));
        let metrics = self.metrics.for_rank(instance);
        let reporter =
            ResidencyReporter::new(Arc::clone(&self.residency), instance, self.clock, self.unix.clone());
        let aliases = Aliases::new(Arc::clone(tenants));
        let dialect = engine.dialect.into();
        let number = engine.first_rank + u32::from(rank);
        let further = u16::try_from(number).unwrap_or(u16::MAX);
        let at =
            |text: &str| text.parse::<Endpoint>().ok().and_then(|endpoint| endpoint.offset_port(further));
        let follower = Follower {
            rank: RankState::new(dialect, number, aliases, reporter, metrics.clone()),
            replay: at(&engine.replay),
            metrics: metrics.clone(),
            last_error: None,
        };
        let (sender, brought) = mpsc::channel(follow::QUEUE_MESSAGES);
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

impl EngineFollowers {
    /// Follows one more engine until [`EngineFollowers::unfollow`]. Has no effect if it is followed
    /// with the same configuration.
    pub(crate) fn follow(&self, engine: EngineConfig) -> Result<(), FollowError> {
        let FollowersState { engines, tenants, identity, followed: all } = &*self.0;
        engine.check()?;
        if engine.dials_router() {
            return Err(FollowError::Dials(engine.instance));
        }
        crate::config::check_identity(identity)?;
        let mut all = all.lock();
        if all.get(&engine.instance).is_some_and(|followed| followed.config == engine) {
            return Ok(());
        }
        if let Some(other) = all.values().find(|followed| followed.config.overlaps(&engine)) {
            return Err(FollowError::Overlap { instance: engine.instance, other: other.config.instance });
        }
        let ranks: usize = all.values().map(|followed| usize::from(followed.config.ranks)).sum();
        if ranks + usize::from(engine.ranks) > RANKS_MAX {
            return Err(FollowError::TooMany);
        }
        let stop = engines.stop.child_token();
        let follow = |rank| engines.follow(&engine, rank, tenants, None, &stop);
        let tasks = (0..engine.ranks).map(follow).collect();
        all.insert(engine.instance, FollowedEngine { config: engine, dynamic: Some((stop, tasks)) });
        Ok(())
    }

    /// Whether an engine is followed.
    pub(crate) fn follows(&self, instance: u32) -> bool {
        self.0.followed.lock().contains_key(&instance)
    }

    /// Stops following an engine and forgets its blocks. Returns whether it was followed at run
    /// time; engines of the configuration stay.
    pub(crate) fn unfollow(&self, instance: u32) -> bool {
        let mut all = self.0.followed.lock();
        if all.get(&instance).is_none_or(|followed| followed.dynamic.is_none()) {
            return false;
        }
        let Some(FollowedEngine { config, dynamic: Some((stop, tasks)) }) = all.remove(&instance) else {
            return false;
        };
        drop(all);
        stop.cancel();
        let shared = Arc::clone(&self.0);
        tokio::spawn(async move {
            for task in tasks {
                let _ = task.await; // its last reports are applied by now
            }
            for rank in 0..config.ranks {
                shared.forget(config.instance + u32::from(rank));
            }
        });
        true
    }
}

impl FollowersState {
    /// Forgets an instance's blocks, and its metrics unless it is followed again meanwhile.
    fn forget(&self, instance: u32) {
        self.engines.invalidate(InstanceId(instance));
        // Held so that it cannot be followed again in between.
        let all = self.followed.lock();
        let is_of = |followed: &FollowedEngine| {
            let first = followed.config.instance;
            (first..first + u32::from(followed.config.ranks)).contains(&instance)
        };
        if !all.values().any(is_of) {
            self.engines.metrics.remove(InstanceId(instance));
        }
    }
}

impl FollowContext {
    /// Invalidates an instance's blocks. A new follower of it is told so and reports everything
    /// again.
    fn invalidate(&self, instance: InstanceId) {
        let now = self.clock.now();
        let mut residency = self.residency.write();
        if let Some(standing) = residency.status(instance, now) {
            residency.observe_start(instance, standing.epoch + 1, now);
        }
    }
}
