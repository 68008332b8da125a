//! Fair queueing between tenants for waiting requests, with or without load shedding.
//!
//! Start-time fair queueing (Goyal et al., SIGCOMM '96) with prompt tokens in place of bytes. Each
//! tenant has a finish tag: the work sent for it over its weight, counted from the virtual time at
//! which it had no waiting work. Virtual time is set so that the finish tags exceed it by the total
//! work that instances report as waiting; so the router need not know which tenant's requests were
//! computed. Requests are ordered by the finish tag of their tenant before they were sent.
//!
//! Priority deadlines are times and not finish tags. So the tenant with the most work sent keeps
//! the deadlines of its arrivals. Requests of another tenant *lead* these by the time since the
//! largest finish tag passed their own.
//!
//! Tenants that want more than their share get equal shares by weight; a tenant that wants less
//! gets all of it without waiting behind bursts of others. No tenant saves up credit, because a
//! finish tag never falls behind virtual time; no tenant starves, because a leading one gets no
//! more than its share. A lone tenant never leads. If engines do not order their queues, this has
//! no effect.
//!
//! Not here: load shedding (`admission.rs`), and priority deadlines (`priority_deadline.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::id::{TenantId, Timestamp};

/// Largest lead over requests of other tenants.
const LEAD_MAX: Duration = Duration::from_secs(600);

/// Interval at which the largest finish tag is recorded; a finer resolution does not change the
/// order of deadlines.
const FINISH_RECORD_INTERVAL: Duration = Duration::from_millis(20);

/// Work sent for a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct TenantBacklog {
    weight: f64,
    /// Finish tag, in tokens over weight.
    finish_tag: f64,
}

/// The tenants with waiting work. One per router, for the requests that pass through it.
#[derive(Clone, Debug, Default)]
pub(in crate::schedule) struct FairQueue {
    tenants: BTreeMap<TenantId, TenantBacklog>,
    virtual_time: f64,
    /// History of the largest finish tag beyond virtual time, with the time it was reached.
    finish_history: VecDeque<(Timestamp, f64)>,
}

impl FairQueue {
    /// Whether other tenants have waiting work.
    pub(in crate::schedule) fn has_others(&self, tenant: TenantId) -> bool {
        self.tenants.keys().any(|other| *other != tenant)
    }

    /// Lead of requests of this tenant over those of others, if `waiting` tokens wait at all
    /// instances.
    pub(in crate::schedule) fn lead(&self, tenant: TenantId, waiting: u64, now: Timestamp) -> Duration {
        let virtual_time = self.virtual_time(waiting);
        let start = self.tenants.get(&tenant).map_or(0.0, |sent| sent.finish_tag).max(virtual_time);
        let behind = self.finish_history.partition_point(|(_, greatest)| *greatest <= start);
        self.finish_history.get(behind).map_or(Duration::ZERO, |(at, _)| now.since(*at).min(LEAD_MAX))
    }

    /// Records more work for a tenant; `waiting` is the total before it.
    pub(in crate::schedule) fn record(
        &mut self,
        tenant: TenantId,
        weight: f64,
        tokens: u32,
        waiting: u64,
        now: Timestamp,
    ) {
        self.virtual_time = self.virtual_time(waiting);
        let virtual_time = self.virtual_time;
        self.tenants.retain(|_, sent| sent.finish_tag > virtual_time);
        let begin = self.finish_history.partition_point(|(_, greatest)| *greatest <= virtual_time);
        self.finish_history.drain(..begin);
        let sent = self.tenants.entry(tenant).or_default();
        sent.weight = weight.max(f64::MIN_POSITIVE);
        sent.finish_tag = sent.finish_tag.max(virtual_time) + f64::from(tokens) / sent.weight;
        let finish = sent.finish_tag;
        match self.finish_history.back_mut() {
            Some((_, greatest)) if *greatest >= finish => {}
            Some((at, greatest)) if now.since(*at) < FINISH_RECORD_INTERVAL => *greatest = finish,
            _ => self.finish_history.push_back((now, finish)),
        }
        while self.finish_history.front().is_some_and(|(at, _)| now.since(*at) > LEAD_MAX) {
            self.finish_history.pop_front();
        }
    }

    /// Virtual time: the work beyond it is the waiting work.
    fn virtual_time(&self, waiting: u64) -> f64 {
        let mut level = self.virtual_time;
        // A tenant with a finish tag below the level drops out, which raises the level for the
        // others; so this ends.
        while let Some(higher) = self.level(level, waiting).filter(|higher| *higher > level) {
            level = higher;
        }
        level
    }

    /// The level below the finish tags beyond `beyond` at which their excess equals the waiting
    /// work; `None` if no tag is beyond.
    fn level(&self, beyond: f64, waiting: u64) -> Option<f64> {
        let sent = self.tenants.values().filter(|sent| sent.finish_tag > beyond);
        let sum =
            |(weight, all), sent: &TenantBacklog| (weight + sent.weight, all + sent.weight * sent.finish_tag);
        let (weight, all) = sent.fold((0.0, 0.0), sum);
        (weight > 0.0).then(|| (all - waiting as f64) / weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (TenantId, f64) = (TenantId(1), 1.0);
    const B: (TenantId, f64) = (TenantId(2), 1.0);

    /// Simulates an instance that serves the earliest deadline first, each request with a hundred
    /// tokens in a tenth of a second. Tenants send at these intervals in these spans. Returns per
    /// tenant the number of served requests, and the wait of the last one in milliseconds.
    fn served(tenants: &[((TenantId, f64), u64, std::ops::Range<u64>)], s: u64) -> Vec<(u64, u64)> {
        let mut backlogs = FairQueue::default();
        let (mut waiting, mut served, mut busy_to) = (Vec::new(), vec![(0, 0); tenants.len()], 0);
        for ms in 0..s * 1_000 {
            for (nth, (tenant, every_ms, sends)) in tenants.iter().enumerate() {
                if sends.contains(&(ms / 1_000)) && ms % every_ms == 0 {
                    let tokens = waiting.len() as u64 * 100 + busy_to.max(ms) - ms;
                    let lead_ms = backlogs.lead(tenant.0, tokens, at(ms)).as_millis() as i64;
                    waiting.push((ms as i64 - lead_ms, ms, nth));
                    backlogs.record(tenant.0, tenant.1, 100, tokens, at(ms));
                }
            }
            if ms >= busy_to && !waiting.is_empty() {
                waiting.sort_unstable();
                let (_, came_ms, nth) = waiting.remove(0);
                served[nth] = (served[nth].0 + 1, ms - came_ms);
                busy_to = ms + 100;
            }
        }
        served
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp(1_000_000_000 + ms * 1_000)
    }

    #[test]
    fn lone_tenant_never_leads() {
        let mut backlogs = FairQueue::default();
        // A thousand tokens are sent each tenth of a second, and half of all wait.
        for nth in 0..1_000 {
            backlogs.record(A.0, A.1, 1_000, nth * 500, at(nth * 100));
            assert_eq!(backlogs.lead(A.0, nth * 500, at(nth * 100)), Duration::ZERO);
            assert!(!backlogs.has_others(A.0) && backlogs.has_others(B.0));
        }
        // Another tenant goes before all of that; the first of it arrived fifty seconds ago.
        let lead = |tokens| backlogs.lead(B.0, tokens, at(100_000));
        assert!((49..=51).contains(&lead(500_000).as_secs()), "{:?}", lead(500_000));
        assert_eq!(lead(0), Duration::ZERO, "all of it was served");
        assert!(lead(u64::MAX) <= Duration::from_secs(100));
        backlogs.record(A.0, A.1, u32::MAX, 0, at(100_000));
        assert_eq!(backlogs.lead(B.0, 1 << 30, at(100_500)), Duration::from_millis(500));
        backlogs.record(A.0, A.1, 1_000, 1 << 30, at(10_000_000));
        assert_eq!(backlogs.lead(B.0, 1 << 30, at(11_000_000)), LEAD_MAX);
        assert!(backlogs.finish_history.len() <= 2, "{}", backlogs.finish_history.len());
    }

    #[test]
    fn tenants_get_their_share_and_light_ones_do_not_wait() {
        // Ten a second are served. One tenant wants twenty and the other eight: five each.
        let [flood, modest] = served(&[(A, 50, 0..60), (B, 125, 0..60)], 60)[..] else { panic!() };
        assert!((295..=305).contains(&modest.0) && (295..=305).contains(&flood.0), "{flood:?} {modest:?}");
        // One wants two, and gets them after at most the request in service and one more, however
        // long the queue is.
        let [flood, modest] = served(&[(A, 50, 0..60), (B, 500, 0..60)], 60)[..] else { panic!() };
        assert!(modest.0 == 120 && modest.1 <= 200 && flood.0 >= 479, "{flood:?} {modest:?}");
        // By weight.
        let [light, heavy] = served(&[(A, 50, 0..60), ((B.0, 3.0), 50, 0..60)], 60)[..] else { panic!() };
        assert!((145..=155).contains(&light.0) && (445..=455).contains(&heavy.0), "{light:?} {heavy:?}");
    }

    #[test]
    fn no_tenant_saves_up_or_starves() {
        // One took the spare capacity for a minute while the other wanted little; then the other
        // floods.
        let first = served(&[(A, 50, 0..90), (B, 1_000, 0..60), (B, 50, 60..90)], 60);
        let all = served(&[(A, 50, 0..90), (B, 1_000, 0..60), (B, 50, 60..90)], 90);
        let (of_a, of_b) = (all[0].0 - first[0].0, all[2].0);
        assert!((140..=160).contains(&of_a) && (140..=160).contains(&of_b), "{of_a} and {of_b} of 300");
        // Ten flooding tenants get a tenth each.
        let ten: Vec<_> = (1..=10).map(|tenant| ((TenantId(tenant), 1.0), 100, 0..50)).collect();
        assert!(
            served(&ten, 50).iter().all(|(served, _)| (49..=51).contains(served)),
            "{:?}",
            served(&ten, 50)
        );
    }
}
