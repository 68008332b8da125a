//! What callers with a tenant's certificate may take of what all callers have together: room in queues that decisions hold until
//! an instance reports again, and reads that ask a leader. Members take what they need.
//!
//! Not here: whose share a call counts on (`kvfleet_proto::tls::callers`), and the load itself (`view/fleet.rs`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::{InstanceId, TenantId, Timestamp};
use kv_core::schedule::QUEUE_TOKENS_MAX;

/// Tokens that a tenant's decisions add to the load of one instance between two of its reports: one long prompt. A decision is a word only, and
/// what runs is in the next report; without a bound, decisions that nobody follows would make every queue look full.
pub(crate) const TENANT_ROUTED_TOKENS_MAX: u64 = QUEUE_TOKENS_MAX / 32;

/// What a decision takes of that at least, so that decisions without tokens are bounded too.
const DECISION_TOKENS_MIN: u64 = 1_024;

/// Fresh reads of a tenant in a second: each is a call to a leader, and of that to a quorum.
pub(crate) const TENANT_FRESH_MAX: u32 = 50;

/// How much of each instance's queue was promised to whom since it reported.
#[derive(Debug, Default)]
pub(crate) struct QueueShares {
    taken: BTreeMap<InstanceId, BTreeMap<TenantId, u64>>,
}

impl QueueShares {
    /// How many of a decision's tokens count into the load; nothing when the decision does not count at all.
    pub(crate) fn take(&mut self, instance: InstanceId, tenant: TenantId, tokens: u32) -> Option<u32> {
        let taken = self.taken.entry(instance).or_default().entry(tenant).or_default();
        let left = TENANT_ROUTED_TOKENS_MAX.saturating_sub(*taken);
        *taken = taken.saturating_add(u64::from(tokens).max(DECISION_TOKENS_MIN));
        // Not above `tokens`, which is a u32.
        (left > 0).then(|| u32::try_from(left).unwrap_or(u32::MAX).min(tokens))
    }

    /// An instance said what it has, or left: nothing is promised beyond that.
    pub(crate) fn reported(&mut self, instance: InstanceId) {
        self.taken.remove(&instance);
    }
}

/// Who read how much afresh in this second.
#[derive(Debug, Default)]
pub(crate) struct FreshShares {
    second: u64,
    taken: BTreeMap<TenantId, u32>,
}

impl FreshShares {
    /// Whether this one may, which then counts.
    pub(crate) fn take(&mut self, tenant: TenantId, now: Timestamp) -> bool {
        let second = now.since(Timestamp::default()).as_secs();
        if second != self.second {
            (self.second, self.taken) = (second, BTreeMap::new());
        }
        let taken = self.taken.entry(tenant).or_default();
        *taken = taken.saturating_add(1);
        *taken <= TENANT_FRESH_MAX
    }

    /// Until all shares are whole again.
    pub(crate) fn again_in(now: Timestamp) -> Duration {
        Duration::from_secs(1) - Duration::from_nanos(now.since(Timestamp::default()).subsec_nanos().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InstanceId = InstanceId(1);
    const THREE: TenantId = TenantId(3);

    #[test]
    fn a_share_of_a_queue_is_whole_again_with_the_next_report_of_its_instance() {
        let mut shares = QueueShares::default();
        let most = u32::try_from(TENANT_ROUTED_TOKENS_MAX).expect("a prompt");
        assert_eq!(shares.take(ONE, THREE, 1_000), Some(1_000));
        assert_eq!(shares.take(ONE, THREE, u32::MAX), Some(most - 1_024), "what is left of it");
        assert_eq!(shares.take(ONE, THREE, 1), None);
        assert_eq!(shares.take(InstanceId(2), THREE, 1), Some(1), "another queue");
        assert_eq!(shares.take(ONE, TenantId(4), 1), Some(1), "another tenant");
        shares.reported(InstanceId(2));
        assert_eq!(shares.take(ONE, THREE, 1), None);
        shares.reported(ONE);
        assert_eq!(shares.take(ONE, THREE, 1), Some(1));
    }

    #[test]
    fn decisions_without_tokens_are_bounded_too() {
        let mut shares = QueueShares::default();
        let counted = (0..100_000).filter(|_| shares.take(ONE, THREE, 0).is_some()).count();
        assert_eq!(counted as u64, TENANT_ROUTED_TOKENS_MAX / DECISION_TOKENS_MIN);
    }

    #[test]
    fn fresh_reads_are_so_many_in_a_second_for_each() {
        let mut shares = FreshShares::default();
        let start = Timestamp::default().after(Duration::from_millis(7_250));
        let granted = |shares: &mut FreshShares, tenant, now| {
            (0..1_000).filter(|_| shares.take(TenantId(tenant), now)).count()
        };
        assert_eq!(granted(&mut shares, 3, start), TENANT_FRESH_MAX as usize);
        assert_eq!(granted(&mut shares, 4, start), TENANT_FRESH_MAX as usize);
        let wait = FreshShares::again_in(start);
        assert_eq!(wait, Duration::from_millis(750));
        assert_eq!(granted(&mut shares, 3, start.after(wait - Duration::from_millis(1))), 0);
        assert_eq!(granted(&mut shares, 3, start.after(wait)), TENANT_FRESH_MAX as usize);
    }
}
