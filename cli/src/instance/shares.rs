//! What callers with a tenant's certificate may have under way at once: runs, and tokens of their prompts. What runs here is
//! reported to routers as this instance's load, by which everybody is routed.
//!
//! Not here: what a caller may name (`kvfleet_proto::tls::callers`), and bounds of members, who have none.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::id::TenantId;
use kv_core::schedule::QUEUE_TOKENS_MAX;
use tonic::Status;

/// Runs of one tenant's certificates under way, those included that only save.
const RUNS_MAX: u32 = 64;

/// Tokens of their prompts: a quarter of what routers let stand in a queue, and so the longest prompt.
const TOKENS_MAX: u64 = QUEUE_TOKENS_MAX / 4;

/// What is under way, by tenant. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    taken: Arc<Mutex<BTreeMap<TenantId, Taken>>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    runs: u32,
    tokens: u64,
}

/// A run's part of a share, until dropped.
#[derive(Debug)]
pub(super) struct Share {
    shares: Shares,
    tenant: TenantId,
    tokens: u64,
}

impl Shares {
    /// Takes a run's part.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt that never fits, `ResourceExhausted` for one that does not now.
    pub(super) fn take(&self, tenant: TenantId, input_tokens: u32) -> Result<Share, Status> {
        let tokens = u64::from(input_tokens);
        if tokens > TOKENS_MAX {
            return Err(Status::invalid_argument(format!(
                "input_tokens is {tokens}, the limit of a tenant's certificate is {TOKENS_MAX}: send less"
            )));
        }
        let mut all = self.taken();
        let taken = all.get(&tenant).copied().unwrap_or_default();
        let with = Taken { runs: taken.runs + 1, tokens: taken.tokens + tokens };
        if with.runs > RUNS_MAX || with.tokens > TOKENS_MAX {
            return Err(Status::resource_exhausted(format!(
                "{} runs with {} tokens are under way for this certificate, and {RUNS_MAX} with {TOKENS_MAX} are its limit: ask \
                 again when some of them have ended",
                taken.runs, taken.tokens
            )));
        }
        all.insert(tenant, with);
        drop(all);
        Ok(Share { shares: self.clone(), tenant, tokens })
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<TenantId, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut all = self.shares.taken();
        let Entry::Occupied(mut taken) = all.entry(self.tenant) else { return };
        let Taken { runs, tokens } = *taken.get();
        let left = Taken { runs: runs.saturating_sub(1), tokens: tokens.saturating_sub(self.tokens) };
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
    fn a_tenant_has_so_many_runs_and_tokens_under_way_and_others_have_theirs() {
        let shares = Shares::default();
        let runs: Vec<Share> = (0..RUNS_MAX).map(|_| shares.take(TenantId(3), 10).unwrap()).collect();
        let refused = shares.take(TenantId(3), 0).unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        says("more runs of a tenant than an instance takes at once", &refused.message(), &[]);
        let other = shares.take(TenantId(4), LONGEST).unwrap();
        assert_eq!(shares.take(TenantId(4), 1).unwrap_err().code(), Code::ResourceExhausted);
        drop((runs, other));
        assert!(shares.taken().is_empty(), "nothing is kept of who has nothing");
        let _whole = shares.take(TenantId(3), LONGEST).unwrap();
        let too_long = shares.take(TenantId(5), LONGEST + 1).unwrap_err();
        assert_eq!(too_long.code(), Code::InvalidArgument);
        says("a tenant's prompt above what an instance takes", &too_long.message(), &[]);
    }
}
