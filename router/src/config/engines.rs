//! Configuration of the engines that a router follows: the identity and secrets of their hashes,
//! and validation.
//!
//! Not here: reading the files with secrets (`crate::engines`).

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use kvfleet_engine_events::events::Dialect;
use kvfleet_engine_events::zmtp::Endpoint;
use kvfleet_proto::identity::IdentitySection;
use serde::{Deserialize, Serialize};

use super::{ConfigError, invalid};

/// Instances that one router follows: as many as it can know.
const INSTANCES_MAX: usize = 4_096;

/// Limit on ranks of one engine, and on ranks of all engines that dial: each uses a port.
const RANKS_MAX: u16 = 256;

/// Engines that publish KV events; the same on every router, since each router follows all of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EnginesConfig {
    /// Address for engines that dial the router, `ip:port`; rank r dials port + r. Empty: the
    /// router dials every engine.
    pub listen: String,
    /// Identity of the engines' KV, as the nodes' `identity`. Block hashes of requests are
    /// recomputed from it and the tokens of events.
    pub identity: IdentitySection,
    /// File with the secret of requests without a `cache_salt`, in 64 hexadecimal digits. Needed by
    /// the gateway and for engines, unless `public_hashes` is set.
    pub secret_file: PathBuf,
    /// Whether block hashes may be computed with a key that everyone knows, if `secret_file` is
    /// empty. Then a caller can compute the hashes of any prompt, and learn whether it was sent
    /// before.
    pub public_hashes: bool,
    /// Tenants that send requests with a `cache_salt`.
    pub tenants: Vec<EngineTenantConfig>,
    /// The engines.
    pub list: Vec<EngineConfig>,
}

/// A tenant, identified by its salt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineTenantConfig {
    /// Number of the tenant, by which API keys of the gateway name it; 0 if no key does.
    pub tenant: u32,
    /// The `cache_salt` of its requests.
    pub salt: String,
    /// File with its secret, in 64 hexadecimal digits.
    pub secret_file: PathBuf,
}

/// Event format of an engine.
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
    /// Instance number of its first rank; the next rank is `instance` + 1, and so on.
    pub instance: u32,
    /// Number of data-parallel ranks, each with its own publisher.
    pub ranks: u16,
    /// Number of its first rank, if this host runs later ranks of an engine: it publishes at port +
    /// `first_rank`.
    pub first_rank: u32,
    /// Event format.
    pub dialect: DialectConfig,
    /// Address at which rank 0 publishes, `tcp://host:port`; rank r uses port + r. Empty: the
    /// engine dials `listen`.
    pub events: String,
    /// Address at which rank 0 replays events, `tcp://host:port`; rank r uses port + r. Empty: no
    /// replay, so missed events invalidate all earlier ones.
    pub replay: String,
    /// Topic of its messages, as in the engine's own configuration. It identifies an engine that
    /// dials.
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
    /// Number of ports in use, counted from that of rank 0.
    pub(crate) fn ports(&self) -> u16 {
        u16::try_from(self.first_rank).unwrap_or(u16::MAX).saturating_add(self.ranks)
    }

    /// Whether the engine dials the router.
    pub(crate) fn dials_router(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether the instance numbers of two engines overlap.
    pub(crate) fn overlaps(&self, other: &EngineConfig) -> bool {
        let last = |engine: &EngineConfig| engine.instance.saturating_add(u32::from(engine.ranks) - 1);
        self.instance <= last(other) && other.instance <= last(self)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let subject = format!("instance {}", self.instance);
        if !(1..=RANKS_MAX).contains(&self.ranks) {
            return invalid(
                "engines.list",
                format!("{subject} has {} ranks; 1 to {RANKS_MAX} are allowed", self.ranks),
            );
        }
        if self.instance.checked_add(u32::from(self.ranks) - 1).is_none() {
            let text = format!("{subject} has no number for its last rank; rank r is `instance` + r");
            return invalid("engines.list", text);
        }
        let mut ranges = Vec::new();
        for endpoint in [&self.events, &self.replay].into_iter().filter(|endpoint| !endpoint.is_empty()) {
            let first = endpoint.parse::<Endpoint>();
            let first = first.or_else(|error| invalid("engines.list", format!("{subject}: {error}")))?;
            let Some(last) = first.offset_port(self.ports() - 1) else {
                let text = format!("{subject}: {endpoint} has no port for its last rank; choose a lower one");
                return invalid("engines.list", text);
            };
            ranges.push((first.host, first.port..=last.port));
        }
        if let [(host, events), (other, replay)] = &ranges[..]
            && host == other
            && events.start() <= replay.end()
            && replay.start() <= events.end()
        {
            let text = format!(
                "{subject}: the ports of its ranks' events and replays overlap; choose ports further apart"
            );
            return invalid("engines.list", text);
        }
        Ok(())
    }
}

/// Checks that block hashes can be computed under the identity.
pub(crate) fn check_identity(identity: &IdentitySection) -> Result<(), ConfigError> {
    identity.manifest().validate().or_else(|error| invalid("engines.identity", error.to_string()))
}

impl EnginesConfig {
    /// Requires a secret hash key, or the explicit choice of a public one. For those that compute
    /// block hashes.
    ///
    /// # Errors
    /// If there is neither.
    pub fn require_hash_key(&self) -> Result<(), ConfigError> {
        if self.has_hash_key() {
            return Ok(());
        }
        invalid(
            "engines.secret_file",
            "is not set: without a secret, anyone can compute the block hashes of a prompt and learn from the \
             cluster whether it was sent before. Make a secret with `openssl rand -hex 32`, the same for every \
             router; or set engines.public_hashes = true where all callers are trusted"
                .to_owned(),
        )
    }

    /// Whether there is a secret hash key, or the explicit choice of a public one.
    #[must_use]
    pub fn has_hash_key(&self) -> bool {
        self.public_hashes || !self.secret_file.as_os_str().is_empty()
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.list.is_empty() {
            return Ok(());
        }
        self.require_hash_key()?;
        check_identity(&self.identity)?;
        let mut instances = HashSet::new();
        let mut topics = HashSet::new();
        for engine in &self.list {
            engine.check()?;
            for rank in 0..engine.ranks {
                // Numbers saturate at the largest one, where duplicates are detected.
                if !instances.insert(engine.instance.saturating_add(rank.into())) {
                    let text = format!(
                        "instance {} and its ranks overlap another engine's; rank r is `instance` + r",
                        engine.instance
                    );
                    return invalid("engines.list", text);
                }
            }
            if engine.dials_router() && !topics.insert(&engine.topic) {
                let text = format!(
                    "two engines that dial have the topic {:?}, which identifies them; give each its own",
                    engine.topic
                );
                return invalid("engines.list", text);
            }
        }
        if instances.len() > INSTANCES_MAX {
            let text = format!("has {} ranks in all, the limit is {INSTANCES_MAX}", instances.len());
            return invalid("engines.list", text);
        }
        self.check_listen(!topics.is_empty())
    }

    fn check_listen(&self, is_needed: bool) -> Result<(), ConfigError> {
        if !is_needed {
            return Ok(());
        }
        let ports = self
            .list
            .iter()
            .filter(|engine| engine.dials_router())
            .map(EngineConfig::ports)
            .max()
            .unwrap_or(1);
        match self.listen.parse::<SocketAddr>() {
            Ok(address) if address.port() > 0 && address.port().checked_add(ports - 1).is_some() => Ok(()),
            _ => invalid(
                "engines.listen",
                format!(
                    "{:?} is not ip:port with a following port for each rank; engines without `events` dial \
                     it, write for example \"0.0.0.0:5557\"",
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
        let mut config = EnginesConfig {
            list: vec![engine(1), engine(2)],
            public_hashes: true,
            ..EnginesConfig::default()
        };
        assert_eq!(config.check(), Ok(()));
        change(&mut config);
        config.check().expect_err("must be refused").to_string()
    }

    #[test]
    fn engine_errors_name_the_instance() {
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
        says(
            "engines that dial without a listen address",
            &refused(|config| config.list[0].events.clear()),
            &[],
        );
        says(
            "an identity of engines that is none",
            &refused(|config| config.identity.block_tokens = 48),
            &[],
        );
    }

    #[test]
    fn engines_that_dial_need_ports_for_their_ranks() {
        let dials = EngineConfig { instance: 1, ranks: 3, topic: "a".into(), ..EngineConfig::default() };
        let mut config = EnginesConfig {
            listen: "0.0.0.0:65533".into(),
            public_hashes: true,
            list: vec![dials],
            ..EnginesConfig::default()
        };
        assert_eq!(config.check(), Ok(()));
        config.listen = "0.0.0.0:65534".into();
        assert!(config.check().is_err());
    }
}
