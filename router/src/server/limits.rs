//! Limits that the configuration sets for calls.
//!
//! Not here: limits that the scheduler learns (`kv_core::schedule`).

use kv_core::id::{TenantId, Timestamp};
use parking_lot::Mutex;

use crate::tenant_shares::FreshReadShares;

/// Limits of calls.
pub(crate) struct CallLimits {
    /// TTFT limit of requests that name none, milliseconds; 0 for none.
    ttft_max_ms: u64,
    /// Limit on the time between tokens of requests that name none, microseconds; 0 for none.
    tbt_max_us: u64,
    /// Most blocks of one announcement.
    announce_blocks_max: usize,
    /// Fresh reads per tenant.
    fresh_shares: Mutex<FreshReadShares>,
}

impl CallLimits {
    pub(crate) fn new(ttft_max_ms: u64, tbt_max_us: u64, announce_blocks_max: usize) -> CallLimits {
        CallLimits { ttft_max_ms, tbt_max_us, announce_blocks_max, fresh_shares: Mutex::default() }
    }

    /// The tighter of a request's TTFT limit and the router's, milliseconds; 0 for none.
    pub(super) fn ttft_max_ms(&self, asked_ms: u64) -> u64 {
        tighter(asked_ms, self.ttft_max_ms)
    }

    /// The tighter of a request's limit on the time between tokens and the router's, microseconds;
    /// 0 for none.
    pub(super) fn tbt_max_us(&self, asked_us: u64) -> u64 {
        tighter(asked_us, self.tbt_max_us)
    }

    /// The router's own limit on the time between tokens, microseconds; 0 for none.
    pub(super) fn own_tbt_max_us(&self) -> u64 {
        self.tbt_max_us
    }

    /// Most blocks of one announcement.
    pub(super) fn announce_blocks_max(&self) -> usize {
        self.announce_blocks_max
    }

    /// Counts a fresh read of the tenant; `false` above its limit.
    pub(super) fn take_fresh_read(&self, tenant: TenantId, now: Timestamp) -> bool {
        self.fresh_shares.lock().take(tenant, now)
    }
}

/// The smaller of two limits, where 0 is none.
fn tighter(asked: u64, own: u64) -> u64 {
    [asked, own].into_iter().filter(|limit| *limit > 0).min().unwrap_or_default()
}
