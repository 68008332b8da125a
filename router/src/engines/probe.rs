//! One rank of an engine without its connection, for benches: messages in, residency out, as in a
//! router.
//!
//! Only with the feature `probe`.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::InstanceId;
use kv_core::prefix::IdentityManifest;
use kvfleet_engine_events::events::Dialect;
use parking_lot::RwLock;
use prometheus::Registry;

use super::aliases::Aliases;
use super::metrics::EngineMetrics;
use super::rank::{EngineMessage, RankState};
use super::reporter::ResidencyReporter;
use super::tenants::Tenants;
use crate::clock::{Clock, UnixClock};
use crate::view::residency::{RESIDENT_BLOCKS_MAX, Residency};

/// One rank of a vLLM engine.
pub struct RankProbe {
    rank: RankState,
    residency: Arc<RwLock<Residency>>,
    clock: Clock,
}

impl RankProbe {
    /// A rank without messages, for blocks of this many tokens.
    ///
    /// # Errors
    /// If its metrics cannot be registered, which does not happen.
    pub fn new(block_tokens: u32) -> prometheus::Result<RankProbe> {
        let clock = Clock::start();
        let residency = Arc::new(RwLock::new(Residency::new(RESIDENT_BLOCKS_MAX, clock.now())));
        let instance = InstanceId(1);
        let manifest = IdentityManifest { block_tokens, ..IdentityManifest::default() };
        let tenants = Tenants {
            manifest,
            secrets_by_salt: [].into(),
            salts_by_tenant: [].into(),
            default_secret: [0; 32],
        };
        let metrics = EngineMetrics::register(&Registry::new())?.for_rank(instance);
        let reporter = ResidencyReporter::new(Arc::clone(&residency), instance, clock, UnixClock::start());
        let rank = RankState::new(Dialect::Vllm, 0, Aliases::new(Arc::new(tenants)), reporter, metrics);
        Ok(RankProbe { rank, residency, clock })
    }

    /// Receives the message with this number, counted from 0.
    pub fn receive(&mut self, number: u64, payload: Bytes) {
        self.rank.receive(&EngineMessage { number, payload });
    }

    /// Number of listed blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        let status = self.residency.read().status(InstanceId(1), self.clock.now());
        status.map_or(0, |standing| standing.blocks)
    }
}
