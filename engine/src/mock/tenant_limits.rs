//! Limits per tenant certificate on concurrent runs and their prompt tokens. The load of this
//! instance affects the routing of all tenants, so one tenant must not fill it.
//!
//! Not here: what a caller may name (`kvfleet_proto::tls::callers`). Cluster members have no
//! limits.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::id::TenantId;
use kv_core::schedule::QUEUE_TOKENS_MAX;
use tonic::Status;

/// Most concurrent runs of a tenant's certificate, including those that only save.
const RUNS_MAX: u32 = 64;

/// Most prompt tokens of these runs: a quarter of the routers' limit for a queue. This also bounds
/// a single prompt.
const TOKENS_MAX: u64 = QUEUE_TOKENS_MAX / 4;

/// Current use by tenant. Clones share state.
#[derive(Clone, Debug, Default)]
pub(super) struct TenantLimits {
    uses: Arc<Mutex<BTreeMap<TenantId, TenantUse>>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TenantUse {
    runs: u32,
    tokens: u64,
}

/// Permit of one run, returned when dropped.
#[derive(Debug)]
pub(super) struct TenantPermit {
    limits: TenantLimits,
    tenant: TenantId,
    tokens: u64,
}

impl TenantLimits {
    /// Acquires a permit for a run.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt above the limit, `ResourceExhausted` if the limit is
    /// currently used up.
    pub(super) fn acquire(&self, tenant: TenantId, input_tokens: u32) -> Result<TenantPermit, Status> {
        let tokens = u64::from(input_tokens);
        if tokens > TOKENS_MAX {
            return Err(Status::invalid_argument(format!(
                "input_tokens is {tokens}, the limit of a tenant's certificate is {TOKENS_MAX}: send less"
            )));
        }
        let mut all = self.lock();
        let taken = all.get(&tenant).copied().unwrap_or_default();
        let with = TenantUse { runs: taken.runs + 1, tokens: taken.tokens + tokens };
        if with.runs > RUNS_MAX || with.tokens > TOKENS_MAX {
            return Err(Status::resource_exhausted(format!(
                "{} runs with {} tokens are in flight for this certificate, and {RUNS_MAX} with {TOKENS_MAX} \
                 are its limit: retry after some of them have ended",
                taken.runs, taken.tokens
            )));
        }
        all.insert(tenant, with);
        drop(all);
        Ok(TenantPermit { limits: self.clone(), tenant, tokens })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<TenantId, TenantUse>> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        let mut all = self.limits.lock();
        let Entry::Occupied(mut taken) = all.entry(self.tenant) else { return };
        let TenantUse { runs, tokens } = *taken.get();
        let left = TenantUse { runs: runs.saturating_sub(1), tokens: tokens.saturating_sub(self.tokens) };
        match left.runs {
            0 => drop(taken.remove()),
            _ => *taken.get_mut() = left,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;
    use tonic::Code;

    use super::*;

    const LONGEST: u32 = TOKENS_MAX as u32;

    #[test]
    fn limits_runs_and_tokens_per_tenant() {
        let shares = TenantLimits::default();
        let runs: Vec<TenantPermit> =
            (0..RUNS_MAX).map(|_| shares.acquire(TenantId(3), 10).unwrap()).collect();
        let refused = shares.acquire(TenantId(3), 0).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        says("more runs of a tenant than an instance takes at once", &refused.message(), &[]);
        let other = shares.acquire(TenantId(4), LONGEST).unwrap();
        assert_eq!(shares.acquire(TenantId(4), 1).unwrap_err().code(), Code::ResourceExhausted);
        drop((runs, other));
        assert!(shares.lock().is_empty(), "unused entries are removed");
        let _whole = shares.acquire(TenantId(3), LONGEST).unwrap();
        let too_long = shares.acquire(TenantId(5), LONGEST + 1).unwrap_err();
        assert_eq!(too_long.code(), Code::InvalidArgument);
        says("a tenant's prompt above what an instance takes", &too_long.message(), &[]);
    }
}
