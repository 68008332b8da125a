//! Limits on what callers with a tenant certificate take of shared resources: load added to
//! instances' queues between reports, and reads that ask a leader. Members are not limited.
//!
//! Not here: which tenant a call counts for (`kvfleet_proto::tls::callers`), and the load itself
//! (`view/fleet.rs`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{InstanceId, TenantId, Timestamp};
use kv_core::schedule::QUEUE_TOKENS_MAX;

/// Tokens that a tenant's decisions add to one instance's load between two of its reports: one long
/// prompt. A decision is only a hint, and running work is in the next report. Without a bound,
/// decisions that are not followed would make every queue look full.
pub(crate) const TENANT_ROUTED_TOKENS_MAX: u64 = QUEUE_TOKENS_MAX / 32;

/// Least number of tokens charged per decision, so that decisions without tokens are bounded too.
const DECISION_TOKENS_MIN: u64 = 1_024;

/// Fresh reads per tenant and second: each costs a call to a leader, which asks a quorum.
pub(crate) const TENANT_FRESH_READS_MAX: u32 = 50;

/// Tokens charged per instance and tenant since the instance's last report.
#[derive(Debug, Default)]
pub(crate) struct QueueShares {
    charged: BTreeMap<InstanceId, BTreeMap<TenantId, u64>>,
}

impl QueueShares {
    /// Charges a decision. Returns the tokens to add to the load; `None` if the share is used up.
    pub(crate) fn take(&mut self, instance: InstanceId, tenant: TenantId, tokens: u32) -> Option<u32> {
        let taken = self.charged.entry(instance).or_default().entry(tenant).or_default();
        let left = TENANT_ROUTED_TOKENS_MAX.saturating_sub(*taken);
        *taken = taken.saturating_add(u64::from(tokens).max(DECISION_TOKENS_MIN));
        // At most `tokens`, which is a u32.
        (left > 0).then(|| u32::try_from(left).unwrap_or(u32::MAX).min(tokens))
    }

    /// Resets an instance's shares, after its report or departure.
    pub(crate) fn reset(&mut self, instance: InstanceId) {
        self.charged.remove(&instance);
    }
}

/// Fresh reads per tenant in the current second.
#[derive(Debug, Default)]
pub(crate) struct FreshReadShares {
    second: u64,
    taken: BTreeMap<TenantId, u32>,
}

impl FreshReadShares {
    /// Returns whether the tenant may read, and counts the read.
    pub(crate) fn take(&mut self, tenant: TenantId, now: Timestamp) -> bool {
        let second = now.since(Timestamp::default()).as_secs();
        if second != self.second {
            (self.second, self.taken) = (second, BTreeMap::new());
        }
        let taken = self.taken.entry(tenant).or_default();
        *taken = taken.saturating_add(1);
        *taken <= TENANT_FRESH_READS_MAX
    }

    /// Time until all shares are reset.
    pub(crate) fn retry_after(now: Timestamp) -> Duration {
        Duration::from_secs(1) - Duration::from_nanos(now.since(Timestamp::default()).subsec_nanos().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InstanceId = InstanceId(1);
    const THREE: TenantId = TenantId(3);

    #[test]
    fn a_report_resets_the_share_of_an_instances_queue() {
        let mut shares = QueueShares::default();
        let most = u32::try_from(TENANT_ROUTED_TOKENS_MAX).expect("a prompt");
        assert_eq!(shares.take(ONE, THREE, 1_000), Some(1_000));
        assert_eq!(shares.take(ONE, THREE, u32::MAX), Some(most - 1_024), "the rest of the share");
        assert_eq!(shares.take(ONE, THREE, 1), None);
        assert_eq!(shares.take(InstanceId(2), THREE, 1), Some(1), "another queue");
        assert_eq!(shares.take(ONE, TenantId(4), 1), Some(1), "another tenant");
        shares.reset(InstanceId(2));
        assert_eq!(shares.take(ONE, THREE, 1), None);
        shares.reset(ONE);
        assert_eq!(shares.take(ONE, THREE, 1), Some(1));
    }

    #[test]
    fn decisions_without_tokens_are_bounded_too() {
        let mut shares = QueueShares::default();
        let counted = (0..100_000).filter(|_| shares.take(ONE, THREE, 0).is_some()).count();
        assert_eq!(counted as u64, TENANT_ROUTED_TOKENS_MAX / DECISION_TOKENS_MIN);
    }

    #[test]
    fn fresh_reads_are_limited_per_tenant_and_second() {
        let mut shares = FreshReadShares::default();
        let start = Timestamp::default().after(Duration::from_millis(7_250));
        let granted = |shares: &mut FreshReadShares, tenant, now| {
            (0..1_000).filter(|_| shares.take(TenantId(tenant), now)).count()
        };
        assert_eq!(granted(&mut shares, 3, start), TENANT_FRESH_READS_MAX as usize);
        assert_eq!(granted(&mut shares, 4, start), TENANT_FRESH_READS_MAX as usize);
        let wait = FreshReadShares::retry_after(start);
        assert_eq!(wait, Duration::from_millis(750));
        assert_eq!(granted(&mut shares, 3, start.after(wait - Duration::from_millis(1))), 0);
        assert_eq!(granted(&mut shares, 3, start.after(wait)), TENANT_FRESH_READS_MAX as usize);
    }
}
