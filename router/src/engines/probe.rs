//! One rank of an engine without its connection, for benches: messages in, blocks in the soft plane out, as a router does it.
//!
//! Only with the feature `probe`.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::id::InstanceId;
use kv_core::prefix::IdentityManifest;
use kvfleet_proto::engine_events::Dialect;
use parking_lot::RwLock;
use prometheus::Registry;

use super::aliases::Aliases;
use super::metrics::EngineMetrics;
use super::rank::{Message, Rank};
use super::teller::Teller;
use super::tenants::Tenants;
use crate::clock::{Clock, UnixClock};
use crate::view::residency::{RESIDENT_BLOCKS_MAX, Residency};

/// A rank of a vLLM.
pub struct Listener {
    rank: Rank,
    residency: Arc<RwLock<Residency>>,
    clock: Clock,
}

impl Listener {
    /// One that has heard nothing. The fleet's blocks have so many tokens.
    ///
    /// # Errors
    /// When its metrics cannot be registered, which does not happen.
    pub fn new(block_tokens: u32) -> prometheus::Result<Listener> {
        let clock = Clock::start();
        let residency = Arc::new(RwLock::new(Residency::new(RESIDENT_BLOCKS_MAX, clock.now())));
        let instance = InstanceId(1);
        let manifest = IdentityManifest { block_tokens, ..IdentityManifest::default() };
        let tenants = Tenants { manifest, by_salt: [].into(), without_salt: [0; 32] };
        let metrics = EngineMetrics::register(&Registry::new())?.of(instance);
        let teller = Teller::new(Arc::clone(&residency), instance, clock, UnixClock::start());
        let rank = Rank::new((Dialect::Vllm, 0), Aliases::new(Arc::new(tenants)), teller, metrics);
        Ok(Listener { rank, residency, clock })
    }

    /// The message of this number, from 0 on.
    pub fn hear(&mut self, number: u64, payload: Bytes) {
        self.rank.hear(&Message { number, payload });
    }

    /// Blocks that are listed.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        let standing = self.residency.read().standing(InstanceId(1), self.clock.now());
        standing.map_or(0, |standing| standing.blocks)
    }
}
