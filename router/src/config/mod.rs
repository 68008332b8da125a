//! Configuration of a router: keys, defaults, and validation with errors that say what to write.
//!
//! Not here: reading the file (the process that starts the router does) and the meaning of a value
//! at its use. Limits that operators need not tune are constants beside their use.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kv_core::id::TenantId;
use kv_core::schedule::{Admission, DOMAIN_LEVELS, HardwareProfile, PROFILES, RouteLimits, SLOW_START};
use serde::{Deserialize, Serialize};

pub(crate) use engines::check_identity;
pub use engines::{DialectConfig, EngineConfig, EngineTenantConfig, EnginesConfig};
pub use hot::HotCopiesConfig;

mod engines;
mod hot;

/// Configuration of one router. Voters, data directory and certificate files are required; every
/// other field has a default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Number of this router among the voters; at least 1.
    pub id: u64,
    /// Address to listen on, `ip:port`. Port 0 takes a free one (only with a single voter).
    pub listen: String,
    /// Address at which other routers reach this one, `host:port`. Empty: the address in `voters`.
    pub advertise: String,
    /// Name of the cluster, the same on every router and fixed at the first start. Routers of
    /// different clusters refuse each other by it.
    pub cluster: String,
    /// Number of index shards, each a Raft group; the same on every router and fixed at the first
    /// start.
    pub shards: u16,
    /// Every router that votes when the cluster starts, this one included; the same on every
    /// router. Later changes are made with `kvfleet members`, and this list is not read again.
    pub voters: Vec<VoterConfig>,
    /// Start without a cluster and wait to be added to one; `voters` may then be empty.
    pub join: bool,
    /// Directory for the Raft log and snapshots, one per router; created if absent.
    pub data_dir: PathBuf,
    /// Certificate files.
    pub tls: TlsConfig,
    /// Heartbeats, elections, and the silence limit of nodes.
    pub timings: TimingsConfig,
    /// How announcements are batched.
    pub announce: AnnounceConfig,
    /// Anti-entropy: comparison of the index with nodes, and of replicas with each other.
    pub anti_entropy: AntiEntropyConfig,
    /// Named hardware profile that predicts TTFT (see `kv_core::schedule::PROFILES`).
    pub profile: String,
    /// Factor on all times of the profile. 1 except for mock engines that compute faster or slower
    /// than it (their own `time_scale`).
    pub time_scale: f64,
    /// Duration of the reduced load on a new instance, milliseconds, up to 600000; 0 disables it.
    pub slow_start_ms: u64,
    /// Number of topology levels (zone/rack/host, the largest first) that a prefill instance and
    /// its decode instance must share, up to 4. 0 pairs any two.
    pub pair_within: u8,
    /// Whether decisions use the link speeds that instances report, if any. If false, only the
    /// profile is used and reports are only shown.
    pub price_links: bool,
    /// Whether nodes are told which blocks queued requests will read, so that they prefetch them.
    pub windows: bool,
    /// Copies of hot prefixes to nodes near the instances that read them.
    pub hot_copies: HotCopiesConfig,
    /// Load shedding: limits of requests and weights of tenants.
    pub admission: AdmissionConfig,
    /// Log entries between two snapshots.
    pub snapshot_every_entries: u64,
    /// Maximum number of (node, block) pairs in the index; the same on every router.
    pub index_copies_max: u64,
    /// Engines with KV events that the router follows.
    pub engines: EnginesConfig,
}

/// Default latency limits of requests, and weights of tenants.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdmissionConfig {
    /// TTFT limit of requests that name none, milliseconds; 0 for no limit, so that requests are
    /// rejected only when queues are full.
    pub ttft_max_ms: u64,
    /// Limit on the mean time between tokens of requests that name none, microseconds; 0 for no
    /// limit.
    pub tbt_max_us: u64,
    /// Tenants with a weight other than 1.
    pub weights: Vec<TenantWeightConfig>,
}

/// Weight of one tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantWeightConfig {
    /// The tenant.
    pub tenant: u32,
    /// Its share relative to other tenants.
    pub weight: f64,
}

impl AdmissionConfig {
    /// An admission state without any admitted request.
    pub(crate) fn admission(&self) -> Admission {
        Admission::with_weights(self.weights.iter().map(|of| (TenantId(of.tenant), of.weight)))
    }

    fn check(&self) -> Result<(), ConfigError> {
        for TenantWeightConfig { tenant, weight } in &self.weights {
            if !weight.is_finite() || !(0.001..=1_000.0).contains(weight) {
                let text = format!(
                    "tenant {tenant} has weight {weight}; 0.001 to 1000 are allowed, and the default is 1"
                );
                return invalid("admission.weights", text);
            }
        }
        Ok(())
    }
}

/// One voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VoterConfig {
    /// Its number.
    pub id: u64,
    /// Address at which other routers reach it, `host:port`.
    pub address: String,
}

/// Certificate files, PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// Certificate of the cluster authority.
    pub ca: PathBuf,
    /// Certificate of this process.
    pub cert: PathBuf,
    /// Private key of that certificate.
    pub key: PathBuf,
}

/// Times, in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TimingsConfig {
    /// Interval between two heartbeats of the Raft leader.
    pub heartbeat_ms: u64,
    /// Shortest time without a leader before an election.
    pub election_min_ms: u64,
    /// Longest such time; each timeout is drawn between the two.
    pub election_max_ms: u64,
    /// Silence after which a node is fenced.
    pub silence_ms: u64,
    /// Interval between two checks of whether this router should transfer leadership of some
    /// groups; 0 disables transfers.
    pub balance_ms: u64,
}

/// How announcements are batched into proposals.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AnnounceConfig {
    /// Longest time an announcement waits for others, milliseconds.
    pub window_ms: u64,
    /// Blocks at which a proposal is full; also the most one announcement may hold.
    pub blocks_max: usize,
}

/// Intervals and sizes of anti-entropy checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AntiEntropyConfig {
    /// Interval between two comparisons of digests, milliseconds; 0 for none.
    pub digests_ms: u64,
    /// Interval between two audits of one node by each shard's leader, milliseconds; 0 for none.
    pub audit_ms: u64,
    /// Indexed blocks that an audit asks a node about, and the same number that the node lists.
    pub audit_blocks: u32,
}

impl Default for RouterConfig {
    fn default() -> Self {
        RouterConfig {
            id: 1,
            listen: "127.0.0.1:7400".into(),
            advertise: String::new(),
            cluster: "kvfleet".into(),
            shards: SHARDS,
            voters: Vec::new(),
            join: false,
            data_dir: PathBuf::new(),
            tls: TlsConfig::default(),
            timings: TimingsConfig::default(),
            announce: AnnounceConfig::default(),
            anti_entropy: AntiEntropyConfig::default(),
            profile: HardwareProfile::default().name.into(),
            time_scale: 1.0,
            slow_start_ms: u64::try_from(SLOW_START.as_millis()).unwrap_or(u64::MAX),
            pair_within: 0,
            price_links: true,
            windows: true,
            hot_copies: HotCopiesConfig::default(),
            admission: AdmissionConfig::default(),
            snapshot_every_entries: 5_000,
            index_copies_max: kv_core::index::COPIES_MAX,
            engines: EnginesConfig::default(),
        }
    }
}

impl Default for TimingsConfig {
    fn default() -> Self {
        TimingsConfig {
            heartbeat_ms: 100,
            election_min_ms: 300,
            election_max_ms: 600,
            silence_ms: 800,
            balance_ms: 1_000,
        }
    }
}

impl Default for AntiEntropyConfig {
    fn default() -> Self {
        AntiEntropyConfig { digests_ms: 2_000, audit_ms: 5_000, audit_blocks: 32 }
    }
}

impl AntiEntropyConfig {
    fn check(&self) -> Result<(), ConfigError> {
        for (key, every) in
            [("anti_entropy.digests_ms", self.digests_ms), ("anti_entropy.audit_ms", self.audit_ms)]
        {
            if every > 0 && !(50..=3_600_000).contains(&every) {
                return invalid(key, format!("{every} is outside 50 to 3600000; 0 is never"));
            }
        }
        if !(1..=AUDIT_BLOCKS_MAX).contains(&self.audit_blocks) {
            let given = self.audit_blocks;
            return invalid(
                "anti_entropy.audit_blocks",
                format!("{given} is outside 1 to {AUDIT_BLOCKS_MAX}; 32 is usual"),
            );
        }
        Ok(())
    }
}

impl Default for AnnounceConfig {
    fn default() -> Self {
        AnnounceConfig { window_ms: 10, blocks_max: 16_384 }
    }
}

/// Default number of shards. An idle group costs ten small calls a second to each follower; one
/// group alone is limited by a single core. Four let three routers lead at least one each.
const SHARDS: u16 = 4;

/// Range of `slow_start_ms`: an instance that is not warm after ten minutes never will be.
const SLOW_STARTS_MS: std::ops::RangeInclusive<u64> = 0..=600_000;

/// Range of `time_scale`; mock engines can keep these factors.
const TIME_SCALES: std::ops::RangeInclusive<f64> = 0.001..=1000.0;

/// Largest number of shards: with more, heartbeats alone cost hundreds of calls a second on each
/// router.
const SHARDS_MAX: u16 = 64;

/// Longest cluster name; every message between routers carries it.
const CLUSTER_BYTES_MAX: usize = 64;

/// Voters of one cluster: beyond this an election costs more than tolerance of one more failure is
/// worth.
const VOTERS_MAX: usize = 9;

/// Largest announce batch: half of one command's limit (`kv_core::index::ANNOUNCE_BLOCKS_MAX`),
/// since the index counts announcements and changes against the same number.
const BLOCKS_MAX: usize = 131_072;

/// Most blocks of one audit, so that a node answers within a millisecond.
const AUDIT_BLOCKS_MAX: u32 = 1_024;

/// An invalid configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("config key `{key}`: {problem}")]
pub struct ConfigError {
    /// The key, as written in the file.
    pub key: &'static str,
    /// The problem, and what to write instead.
    pub problem: String,
}

fn invalid<T>(key: &'static str, problem: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError { key, problem: problem.into() })
}

impl RouterConfig {
    /// Checks everything that needs neither disk nor network.
    ///
    /// # Errors
    /// The first invalid key, and what to write instead.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_identity()?;
        self.check_cluster()?;
        self.check_voters()?;
        self.check_files()?;
        self.timings.check()?;
        self.announce.check()?;
        self.anti_entropy.check()?;
        self.engines.check()?;
        self.admission.check()?;
        self.hot_copies.check()?;
        self.check_rest()
    }

    fn check_identity(&self) -> Result<(), ConfigError> {
        if self.id == 0 {
            return invalid("id", "0 is reserved; number routers from 1");
        }
        if self.listen.parse::<SocketAddr>().is_err() {
            let given = &self.listen;
            return invalid(
                "listen",
                format!("{given:?} is not ip:port; write for example \"0.0.0.0:7400\""),
            );
        }
        Ok(())
    }

    fn check_cluster(&self) -> Result<(), ConfigError> {
        let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        let is_name = !self.cluster.is_empty() && self.cluster.len() <= CLUSTER_BYTES_MAX;
        if !is_name || !self.cluster.chars().all(allowed) {
            let given = &self.cluster;
            return invalid(
                "cluster",
                format!(
                    "{given:?} is not a name of 1 to {CLUSTER_BYTES_MAX} letters, digits, dots, dashes and underscores"
                ),
            );
        }
        if !(1..=SHARDS_MAX).contains(&self.shards) {
            return invalid(
                "shards",
                format!("{} is outside 1 to {SHARDS_MAX}; {SHARDS} is usual", self.shards),
            );
        }
        Ok(())
    }

    fn check_voters(&self) -> Result<(), ConfigError> {
        if self.join {
            return self.check_joiner();
        }
        if self.voters.is_empty() {
            return invalid(
                "voters",
                "is empty; list every router that votes, this one included, with id and address",
            );
        }
        if self.voters.len() > VOTERS_MAX {
            return invalid(
                "voters",
                format!(
                    "has {} routers, the limit is {VOTERS_MAX}; three or five are usual",
                    self.voters.len()
                ),
            );
        }
        for (position, voter) in self.voters.iter().enumerate() {
            if voter.id == 0 {
                return invalid("voters", "id 0 is reserved; number routers from 1");
            }
            if !is_host_port(&voter.address) {
                return invalid(
                    "voters",
                    format!(
                        "address {:?} of router {} is not host:port; write for example \"router-1:7400\"",
                        voter.address, voter.id
                    ),
                );
            }
            if self.voters[..position]
                .iter()
                .any(|other| other.id == voter.id || other.address == voter.address)
            {
                return invalid(
                    "voters",
                    format!(
                        "router {} at {} is listed twice; give each router its own id and address",
                        voter.id, voter.address
                    ),
                );
            }
        }
        match self.voters.iter().find(|voter| voter.id == self.id) {
            None => invalid(
                "voters",
                format!("does not list this router (id {}); add it or correct `id`", self.id),
            ),
            Some(own) if !self.advertise.is_empty() && self.advertise != own.address => invalid(
                "advertise",
                format!(
                    "{:?} differs from this router's address {:?} in `voters`; write the same, or leave it out",
                    self.advertise, own.address
                ),
            ),
            Some(_) => Ok(()),
        }
    }

    fn check_joiner(&self) -> Result<(), ConfigError> {
        if is_host_port(self.own_address()) {
            return Ok(());
        }
        invalid(
            "advertise",
            format!(
                "{:?} is not host:port; a router that joins must say where the others reach it",
                self.own_address()
            ),
        )
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        if self.data_dir.as_os_str().is_empty() {
            return invalid("data_dir", "is empty; name a directory that survives restarts");
        }
        let files = [("tls.ca", &self.tls.ca), ("tls.cert", &self.tls.cert), ("tls.key", &self.tls.key)];
        match files.into_iter().find(|(_, file)| file.as_os_str().is_empty()) {
            Some((key, _)) => invalid(
                key,
                "is empty; every connection is mutually authenticated, so all three files are needed",
            ),
            None => Ok(()),
        }
    }

    fn check_rest(&self) -> Result<(), ConfigError> {
        if HardwareProfile::by_name(&self.profile).is_none() {
            let known: Vec<_> = PROFILES.iter().map(|profile| profile.name).collect();
            return invalid(
                "profile",
                format!("{:?} is not known; choose one of {}", self.profile, known.join(", ")),
            );
        }
        if !TIME_SCALES.contains(&self.time_scale) {
            let (least, most) = (TIME_SCALES.start(), TIME_SCALES.end());
            return invalid(
                "time_scale",
                format!("{} is outside {least} to {most}; 1 is the profile's own time", self.time_scale),
            );
        }
        if !SLOW_STARTS_MS.contains(&self.slow_start_ms) {
            return invalid(
                "slow_start_ms",
                format!(
                    "{} is outside 0 to {}; 10000 is usual, and 0 is never",
                    self.slow_start_ms,
                    SLOW_STARTS_MS.end()
                ),
            );
        }
        if usize::from(self.pair_within) > DOMAIN_LEVELS {
            return invalid(
                "pair_within",
                format!("{} is outside 0 to {DOMAIN_LEVELS}; 0 pairs any two", self.pair_within),
            );
        }
        if !(100..=1_000_000).contains(&self.snapshot_every_entries) {
            return invalid(
                "snapshot_every_entries",
                format!("{} is outside 100 to 1000000; 5000 is usual", self.snapshot_every_entries),
            );
        }
        if self.index_copies_max == 0 {
            return invalid("index_copies_max", "0 would refuse every block; leave it out for 100 million");
        }
        Ok(())
    }

    /// Address at which other routers reach this one.
    pub(crate) fn own_address(&self) -> &str {
        let listed = self.voters.iter().find(|voter| voter.id == self.id);
        listed.map_or(&self.advertise, |voter| &voter.address)
    }

    /// The named profile scaled by `time_scale`; the default profile if the configuration was not
    /// validated.
    pub(crate) fn hardware_profile(&self) -> HardwareProfile {
        HardwareProfile::by_name(&self.profile).unwrap_or_default().scaled(self.time_scale)
    }

    /// Limits that exclude instances and slow down new ones.
    pub(crate) fn limits(&self) -> RouteLimits {
        RouteLimits {
            slow_start: Duration::from_millis(self.slow_start_ms),
            pair_shared_levels: self.pair_within,
            // Requests are rejected in favour of running ones only under this limit, not under a
            // running caller's tighter one.
            tbt_limit_floor_us: self.admission.tbt_max_us,
            ..RouteLimits::default()
        }
    }
}

fn is_host_port(address: &str) -> bool {
    let parts = address.rsplit_once(':');
    parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0))
}

impl TimingsConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if !(10..=10_000).contains(&self.heartbeat_ms) {
            return invalid(
                "timings.heartbeat_ms",
                format!("{} is outside 10 to 10000; 100 is usual", self.heartbeat_ms),
            );
        }
        if self.election_min_ms < 2 * self.heartbeat_ms {
            return invalid(
                "timings.election_min_ms",
                format!(
                    "{} is below two heartbeats, so one lost heartbeat would cost the leader; give at least {}",
                    self.election_min_ms,
                    2 * self.heartbeat_ms
                ),
            );
        }
        if self.election_max_ms <= self.election_min_ms {
            return invalid(
                "timings.election_max_ms",
                format!(
                    "{} is not above election_min_ms ({}); twice as much is usual",
                    self.election_max_ms, self.election_min_ms
                ),
            );
        }
        if !(200..=60_000).contains(&self.silence_ms) {
            return invalid(
                "timings.silence_ms",
                format!(
                    "{} is outside 200 to 60000; nodes send every 100 ms, and 800 is usual",
                    self.silence_ms
                ),
            );
        }
        if self.balance_ms > 0 && !(100..=3_600_000).contains(&self.balance_ms) {
            return invalid(
                "timings.balance_ms",
                format!(
                    "{} is outside 100 to 3600000; 1000 is usual, and 0 leaves leaders where they are",
                    self.balance_ms
                ),
            );
        }
        Ok(())
    }

    /// Time without contact to its quorum after which a leader must consider itself deposed: the
    /// others may have elected by then.
    pub(crate) fn leader_lease(&self) -> Duration {
        Duration::from_millis(self.election_max_ms + self.heartbeat_ms)
    }

    /// Interval of leadership balancing, or `None` if disabled.
    pub(crate) fn balance_interval(&self) -> Option<Duration> {
        (self.balance_ms > 0).then(|| Duration::from_millis(self.balance_ms))
    }

    pub(crate) fn silence_limit(&self) -> Duration {
        Duration::from_millis(self.silence_ms)
    }
}

impl AnnounceConfig {
    fn check(&self) -> Result<(), ConfigError> {
        if self.window_ms > 1_000 {
            return invalid(
                "announce.window_ms",
                format!(
                    "{} is above 1000, and nodes would wait too long for their acknowledgement; 10 is usual",
                    self.window_ms
                ),
            );
        }
        if !(1..=BLOCKS_MAX).contains(&self.blocks_max) {
            return invalid(
                "announce.blocks_max",
                format!("{} is outside 1 to {BLOCKS_MAX}; 16384 is usual", self.blocks_max),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    fn valid() -> RouterConfig {
        RouterConfig {
            voters: vec![
                VoterConfig { id: 1, address: "a:1".into() },
                VoterConfig { id: 2, address: "b:1".into() },
            ],
            data_dir: "/data".into(),
            tls: TlsConfig { ca: "ca".into(), cert: "cert".into(), key: "key".into() },
            ..RouterConfig::default()
        }
    }

    #[test]
    fn tenant_weights_must_be_finite_and_in_range() {
        let weighted = |weight| {
            refused(move |config| {
                config.admission.weights = vec![TenantWeightConfig { tenant: 3, weight }];
            })
        };
        says("a tenant's weight that is none", &weighted(-1.0), &[]);
        for weight in [0.0, f64::NAN, f64::INFINITY, 1e9] {
            assert!(weighted(weight).contains("admission.weights"), "{weight}");
        }
    }

    fn refused(change: impl FnOnce(&mut RouterConfig)) -> String {
        let mut config = valid();
        change(&mut config);
        config.validate().expect_err("must be refused").to_string()
    }

    #[test]
    fn a_complete_config_is_valid() {
        assert_eq!(valid().validate(), Ok(()));
    }

    #[test]
    fn every_refusal_names_its_key() {
        says("a router: id", &refused(|config| config.id = 0), &[]);
        says("a router: listen", &refused(|config| config.listen = "localhost".into()), &[]);
        says("a router: no voters", &refused(|config| config.voters.clear()), &[]);
        says("a router: cluster", &refused(|config| config.cluster = "my cluster".into()), &[]);
        says("a router: shards", &refused(|config| config.shards = 0), &[]);
        says(
            "a router: joining without an address",
            &refused(|config| (config.join, config.voters) = (true, vec![])),
            &[],
        );
        says("a router: balance_ms", &refused(|config| config.timings.balance_ms = 1), &[]);
        says("a router: itself not among the voters", &refused(|config| config.id = 7), &[]);
        says("a router: a voter twice", &refused(|config| config.voters[1].id = 1), &[]);
        says("a router: a voter numbered 0", &refused(|config| config.voters[1].id = 0), &[]);
        says("a router: a voter's address", &refused(|config| config.voters[1].address = "b".into()), &[]);
        let voter = |id| VoterConfig { id, address: format!("a:{id}") };
        says(
            "a router: too many voters",
            &refused(|config| config.voters = (1..=10).map(voter).collect()),
            &[],
        );
        says("a router: advertise", &refused(|config| config.advertise = "c:1".into()), &[]);
        says("a router: data_dir", &refused(|config| config.data_dir = PathBuf::new()), &[]);
        says("a router: a certificate file", &refused(|config| config.tls.key = PathBuf::new()), &[]);
        says("a router: heartbeat_ms", &refused(|config| config.timings.heartbeat_ms = 1), &[]);
        says("a router: election_min_ms", &refused(|config| config.timings.election_min_ms = 150), &[]);
        says("a router: election_max_ms", &refused(|config| config.timings.election_max_ms = 300), &[]);
        says("a router: silence_ms", &refused(|config| config.timings.silence_ms = 0), &[]);
        says("a router: window_ms", &refused(|config| config.announce.window_ms = 5_000), &[]);
        says("a router: blocks_max", &refused(|config| config.announce.blocks_max = 0), &[]);
        says("a router: digests_ms", &refused(|config| config.anti_entropy.digests_ms = 1), &[]);
        says("a router: audit_ms", &refused(|config| config.anti_entropy.audit_ms = 10_000_000), &[]);
        says("a router: audit_blocks", &refused(|config| config.anti_entropy.audit_blocks = 0), &[]);
        says("a router: time_scale", &refused(|config| config.time_scale = f64::NAN), &[]);
        says("a router: slow_start_ms", &refused(|config| config.slow_start_ms = 600_001), &[]);
        says("a router: pair_within", &refused(|config| config.pair_within = 5), &[]);
        says(
            "a router: hot_copies.bytes_per_second",
            &refused(|config| config.hot_copies.bytes_per_second = u64::MAX),
            &[],
        );
        says("a router: hot_copies.burst_bytes", &refused(|config| config.hot_copies.burst_bytes = 0), &[]);
        says("a router: hot_copies.decay_ms", &refused(|config| config.hot_copies.decay_ms = 999), &[]);
        says("a router: hot_copies.copies_max", &refused(|config| config.hot_copies.copies_max = 33), &[]);
        says("a router: profile", &refused(|config| config.profile = "abacus".into()), &[]);
        says("a router: snapshot_every_entries", &refused(|config| config.snapshot_every_entries = 1), &[]);
        says("a router: index_copies_max", &refused(|config| config.index_copies_max = 0), &[]);
    }
}
