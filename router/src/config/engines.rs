//! Which engines a router hears, whose hashes their prefixes have, and what is refused and why.
//!
//! Not here: reading the files with secrets (`crate::engines`).

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use kvfleet_proto::engine_events::Dialect;
use kvfleet_proto::identity::IdentitySection;
use kvfleet_proto::zmtp::Endpoint;
use serde::{Deserialize, Serialize};

use super::{ConfigError, refuse};

/// Instances that one router follows: as many as it knows.
const INSTANCES_MAX: usize = 4_096;

/// Ranks of one engine, and of all that dial: each is a port.
const RANKS_MAX: u16 = 256;

/// Engines that publish KV events. The same on every router: each hears all of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnginesConfig {
    /// Where engines that dial are heard, `ip:port`; their rank r at port + r. Empty: every engine is dialed.
    pub listen: String,
    /// What the engines run, as the nodes' `identity`: from it and the tokens of events follow the hashes that requests have.
    pub identity: IdentitySection,
    /// File with the secret of requests without a `cache_salt`, in 64 hexadecimal digits. Empty: 32 zero bytes, as local
    /// clusters have.
    pub secret_file: PathBuf,
    /// Tenants whose requests have a `cache_salt`.
    pub tenants: Vec<EngineTenantConfig>,
    /// The engines.
    pub list: Vec<EngineConfig>,
}

/// A tenant, as engines know it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTenantConfig {
    /// The `cache_salt` of its requests.
    pub salt: String,
    /// File with its secret, in 64 hexadecimal digits.
    pub secret_file: PathBuf,
}

/// Whose events they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DialectConfig {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

impl From<DialectConfig> for Dialect {
    fn from(dialect: DialectConfig) -> Self {
        match dialect {
            DialectConfig::Vllm => Dialect::Vllm,
            DialectConfig::Sglang => Dialect::Sglang,
        }
    }
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Instance that its first rank is; the one after it is `instance` + 1, and so on.
    pub instance: u32,
    /// Data-parallel ranks, each with a publisher of its own.
    pub ranks: u16,
    /// Number of the first of them, where a host has the later ranks of an engine: it publishes at port + `first_rank`.
    pub first_rank: u32,
    /// Whose events they are.
    pub dialect: DialectConfig,
    /// Where its rank 0 publishes, `tcp://host:port`; rank r at port + r. Empty: it dials `listen`.
    pub events: String,
    /// Where its rank 0 replays, `tcp://host:port`, likewise. Empty: nowhere, and what is missed is void with all before it.
    pub replay: String,
    /// Topic of its messages, as its own configuration has it. An engine that dials is known by it.
    pub topic: String,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            instance: 0,
            ranks: 1,
            first_rank: 0,
            dialect: DialectConfig::default(),
            events: String::new(),
            replay: String::new(),
            topic: String::new(),
        }
    }
}

impl EngineConfig {
    /// Ports from that of its rank 0 on.
    pub(crate) fn ports(&self) -> u16 {
        u16::try_from(self.first_rank).unwrap_or(u16::MAX).saturating_add(self.ranks)
    }

    /// Whether it dials us.
    pub(crate) fn dials(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether the instances of two engines meet.
    pub(crate) fn meets(&self, other: &EngineConfig) -> bool {
        let last = |engine: &EngineConfig| engine.instance.saturating_add(u32::from(engine.ranks) - 1);
        self.instance <= last(other) && other.instance <= last(self)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let whose = format!("instance {}", self.instance);
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            return refuse(
                "engines.list",
                format!("{whose} has {} ranks; 1 to {RANKS_MAX} are allowed", self.ranks),
            );
        }
        if self.instance.checked_add(u32::from(self.ranks) - 1).is_none() {
            let text = format!("{whose} has no number for its last rank; rank r is `instance` + r");
            return refuse("engines.list", text);
        }
        let mut ranges = Vec::new();
        for endpoint in [&self.events, &self.replay].into_iter().filter(|endpoint| !endpoint.is_empty()) {
            let first = endpoint.parse::<Endpoint>();
            let first = first.or_else(|error| refuse("engines.list", format!("{whose}: {error}")))?;
            let Some(last) = first.further(self.ports() - 1) else {
                let text = format!("{whose}: {endpoint} has no port for its last rank; choose a lower one");
                return refuse("engines.list", text);
            };
            ranges.push((first.host, first.port..=last.port));
        }
        if let [(host, events), (other, replay)] = &ranges[..]
            && host == other
            && events.start() <= replay.end()
            && replay.start() <= events.end()
        {
            let text = format!(
                "{whose}: the ports of its ranks' events and of their replays meet; take them further apart"
            );
            return refuse("engines.list", text);
        }
        Ok(())
    }
}

/// Whether hashes can be made under it.
pub(crate) fn check_identity(identity: &IdentitySection) -> Result<(), ConfigError> {
    identity.manifest().validate().or_else(|error| refuse("engines.identity", error.to_string()))
}

impl EnginesConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.list.is_empty() {
            return Ok(());
        }
        check_identity(&self.identity)?;
        let mut instances = HashSet::new();
        let mut topics = HashSet::new();
        for engine in &self.list {
            engine.check()?;
            for rank in 0..engine.ranks {
                // Behind the last number there is all of them meet.
                if !instances.insert(engine.instance.saturating_add(rank.into())) {
                    let text = format!(
                        "instance {} and its ranks meet another engine's; rank r is `instance` + r",
                        engine.instance
                    );
                    return refuse("engines.list", text);
                }
            }
            if engine.dials() && !topics.insert(&engine.topic) {
                let text = format!(
                    "two engines that dial have the topic {:?}, by which they are known; give each its own",
                    engine.topic
                );
                return refuse("engines.list", text);
            }
        }
        if instances.len() > INSTANCES_MAX {
            let text = format!("has {} ranks in all, the limit is {INSTANCES_MAX}", instances.len());
            return refuse("engines.list", text);
        }
        self.check_listen(!topics.is_empty())
    }

    fn check_listen(&self, is_needed: bool) -> Result<(), ConfigError> {
        if !is_needed {
            return Ok(());
        }
        let ports =
            self.list.iter().filter(|engine| engine.dials()).map(EngineConfig::ports).max().unwrap_or(1);
        match self.listen.parse::<SocketAddr>() {
            Ok(address) if address.port() > 0 && address.port().checked_add(ports - 1).is_some() => Ok(()),
            _ => refuse(
                "engines.listen",
                format!(
                    "{:?} is not ip:port with as many ports from there on as ranks; engines without `events` dial it, write for example \"0.0.0.0:5557\"",
                    self.listen
                ),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn engine(instance: u32) -> EngineConfig {
        let events = format!("tcp://engine-{instance}:5557");
        EngineConfig { instance, events, ..EngineConfig::default() }
    }

    fn refused(change: impl FnOnce(&mut EnginesConfig)) -> String {
        let mut config = EnginesConfig { list: vec![engine(1), engine(2)], ..EnginesConfig::default() };
        assert_eq!(config.check(), Ok(()));
        change(&mut config);
        config.check().expect_err("must be refused").to_string()
    }

    #[test]
    fn what_is_wrong_with_an_engine_is_said_with_its_instance() {
        says("an engine without ranks", &refused(|config| config.list[0].ranks = 0), &[]);
        let anywhere = refused(|config| config.list[0].replay = "tcp://*:5558".into());
        says("an engine's endpoint that cannot be dialed", &anywhere, &[]);
        let last =
            refused(|config| (config.list[1].events, config.list[1].ranks) = ("tcp://a:65535".into(), 2));
        says("an engine's ports behind the last one", &last, &[]);
        let near = refused(|config| {
            let engine = &mut config.list[1];
            (engine.replay, engine.ranks) = ("tcp://engine-2:5558".into(), 2);
        });
        says("an engine's ports of events and replays that meet", &near, &[]);
        says("an engine that is another's rank", &refused(|config| config.list[0].ranks = 2), &[]);
        let dials = |config: &mut EnginesConfig| {
            config.listen = "127.0.0.1:5557".into();
            config.list.iter_mut().for_each(|engine| engine.events.clear());
        };
        says("two engines that dial with one topic", &refused(dials), &[]);
        says("engines that dial nobody", &refused(|config| config.list[0].events.clear()), &[]);
        says(
            "an identity of engines that is none",
            &refused(|config| config.identity.block_tokens = 48),
            &[],
        );
    }

    #[test]
    fn engines_that_dial_need_ports_for_their_ranks() {
        let dials = EngineConfig { instance: 1, ranks: 3, topic: "a".into(), ..EngineConfig::default() };
        let mut config =
            EnginesConfig { listen: "0.0.0.0:65533".into(), list: vec![dials], ..EnginesConfig::default() };
        assert_eq!(config.check(), Ok(()));
        config.listen = "0.0.0.0:65534".into();
        assert!(config.check().is_err());
    }
}
