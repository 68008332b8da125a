//! In which order tenants go where requests wait, whether or not anybody is turned away.
//!
//! Start-time fair queueing (Goyal et al., SIGCOMM '96) with prompt tokens to compute for bytes: each tenant has a finish, what was sent for it over its weight, from the virtual time on at which it had nothing
//! waiting. Virtual time is where the finishes leave just as much beyond it as waits at all instances by their reports: nobody has to know whose requests were computed. Requests go by the finish that their tenant
//! had before them. Turns are times and not finishes, so the tenant for which most was sent keeps those of its coming, and those of the others *lead* by as long as it is since its finish
//! was where theirs is.
//! So tenants that want more than their share get equal shares by weight, and one that wants less gets all it wants without waiting behind whatever others send at once.
//! Nobody saves up by wanting less, since a finish never falls behind virtual time, and nobody is starved: who leads is served no more than its share until others have theirs.
//! One alone leads never. Where engines keep no order, nothing of this has an effect.
//!
//! Not here: whom to turn away (`admit.rs`), and what a turn is (`turn.rs`).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::id::{TenantId, Timestamp};

/// Longest that a request goes before those of others.
const LEAD_MAX: Duration = Duration::from_secs(600);

/// The greatest finish is remembered at times so far apart: in between turns tell nobody apart.
const REMEMBERED_EVERY: Duration = Duration::from_millis(20);

/// What was sent for a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sent {
    weight: f64,
    /// In tokens over weight.
    finish: f64,
}

/// The tenants for which something waits. One a router, of what comes by it.
#[derive(Clone, Debug, Default)]
pub(super) struct Backlogs {
    all: BTreeMap<TenantId, Sent>,
    virtual_time: f64,
    /// When the greatest finish came to be how much, of those that are beyond virtual time.
    greatest: VecDeque<(Timestamp, f64)>,
}

impl Backlogs {
    /// Whether there are others than this one, before whom it could go.
    pub(super) fn has_others(&self, tenant: TenantId) -> bool {
        self.all.keys().any(|other| *other != tenant)
    }

    /// For how long requests of this tenant go before those of others that came by then, where so many tokens wait at all instances.
    pub(super) fn lead(&self, tenant: TenantId, waiting: u64, now: Timestamp) -> Duration {
        let virtual_time = self.virtual_time(waiting);
        let start = self.all.get(&tenant).map_or(0.0, |sent| sent.finish).max(virtual_time);
        let behind = self.greatest.partition_point(|(_, greatest)| *greatest <= start);
        self.greatest.get(behind).map_or(Duration::ZERO, |(at, _)| now.since(*at).min(LEAD_MAX))
    }

    /// So much more is sent for a tenant, where so much waited.
    pub(super) fn send(
        &mut self,
        (tenant, weight): (TenantId, f64),
        tokens: u32,
        waiting: u64,
        now: Timestamp,
    ) {
        self.virtual_time = self.virtual_time(waiting);
        let virtual_time = self.virtual_time;
        self.all.retain(|_, sent| sent.finish > virtual_time);
        let begin = self.greatest.partition_point(|(_, greatest)| *greatest <= virtual_time);
        self.greatest.drain(..begin);
        let sent = self.all.entry(tenant).or_default();
        sent.weight = weight.max(f64::MIN_POSITIVE);
        sent.finish = sent.finish.max(virtual_time) + f64::from(tokens) / sent.weight;
        let finish = sent.finish;
        match self.greatest.back_mut() {
            Some((_, greatest)) if *greatest >= finish => {}
            Some((at, greatest)) if now.since(*at) < REMEMBERED_EVERY => *greatest = finish,
            _ => self.greatest.push_back((now, finish)),
        }
        while self.greatest.front().is_some_and(|(at, _)| now.since(*at) > LEAD_MAX) {
            self.greatest.pop_front();
        }
    }

    /// Virtual time: what was sent beyond it is what waits.
    fn virtual_time(&self, waiting: u64) -> f64 {
        let mut level = self.virtual_time;
        // Who finishes below what all those beyond it come to is not beyond it, which raises it for the others, so it ends.
        while let Some(higher) = self.level(level, waiting).filter(|higher| *higher > level) {
            level = higher;
        }
        level
    }

    /// How far down from the finishes beyond this one as much was sent as waits; nothing where none is beyond it.
    fn level(&self, beyond: f64, waiting: u64) -> Option<f64> {
        let sent = self.all.values().filter(|sent| sent.finish > beyond);
        let sum = |(weight, all), sent: &Sent| (weight + sent.weight, all + sent.weight * sent.finish);
        let (weight, all) = sent.fold((0.0, 0.0), sum);
        (weight > 0.0).then(|| (all - waiting as f64) / weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (TenantId, f64) = (TenantId(1), 1.0);
    const B: (TenantId, f64) = (TenantId(2), 1.0);

    /// One that serves what has the earliest turn, each of a hundred tokens in a tenth of a second, and tenants that send at these intervals from and to these times. How many of each were served, and how
    /// long the last of each waited, in milliseconds.
    fn served(tenants: &[((TenantId, f64), u64, std::ops::Range<u64>)], s: u64) -> Vec<(u64, u64)> {
        let mut backlogs = Backlogs::default();
        let (mut waiting, mut served, mut busy_to) = (Vec::new(), vec![(0, 0); tenants.len()], 0);
        for ms in 0..s * 1_000 {
            for (nth, (tenant, every_ms, sends)) in tenants.iter().enumerate() {
                if sends.contains(&(ms / 1_000)) && ms % every_ms == 0 {
                    let tokens = waiting.len() as u64 * 100 + busy_to.max(ms) - ms;
                    let lead_ms = backlogs.lead(tenant.0, tokens, at(ms)).as_millis() as i64;
                    waiting.push((ms as i64 - lead_ms, ms, nth));
                    backlogs.send(*tenant, 100, tokens, at(ms));
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
    fn one_alone_never_leads() {
        let mut backlogs = Backlogs::default();
        // A thousand tokens are sent each tenth of a second, and half of all wait.
        for nth in 0..1_000 {
            backlogs.send(A, 1_000, nth * 500, at(nth * 100));
            assert_eq!(backlogs.lead(A.0, nth * 500, at(nth * 100)), Duration::ZERO);
            assert!(!backlogs.has_others(A.0) && backlogs.has_others(B.0));
        }
        // Another one goes before all of that, of which the first came fifty seconds ago.
        let lead = |tokens| backlogs.lead(B.0, tokens, at(100_000));
        assert!((49..=51).contains(&lead(500_000).as_secs()), "{:?}", lead(500_000));
        assert_eq!(lead(0), Duration::ZERO, "all of it was served");
        assert!(lead(u64::MAX) <= Duration::from_secs(100));
        backlogs.send(A, u32::MAX, 0, at(100_000));
        assert_eq!(backlogs.lead(B.0, 1 << 30, at(100_500)), Duration::from_millis(500));
        backlogs.send(A, 1_000, 1 << 30, at(10_000_000));
        assert_eq!(backlogs.lead(B.0, 1 << 30, at(11_000_000)), LEAD_MAX);
        assert!(backlogs.greatest.len() <= 2, "{}", backlogs.greatest.len());
    }

    #[test]
    fn who_wants_more_than_its_share_gets_it_and_who_wants_less_gets_that_at_once() {
        // Ten a second are served. One wants twenty, and the other eight: five each.
        let [flood, modest] = served(&[(A, 50, 0..60), (B, 125, 0..60)], 60)[..] else { panic!() };
        assert!((295..=305).contains(&modest.0) && (295..=305).contains(&flood.0), "{flood:?} {modest:?}");
        // One wants two, and has them within what is being served and one besides, however much waits.
        let [flood, modest] = served(&[(A, 50, 0..60), (B, 500, 0..60)], 60)[..] else { panic!() };
        assert!(modest.0 == 120 && modest.1 <= 200 && flood.0 >= 479, "{flood:?} {modest:?}");
        // By weight.
        let [light, heavy] = served(&[(A, 50, 0..60), ((B.0, 3.0), 50, 0..60)], 60)[..] else { panic!() };
        assert!((145..=155).contains(&light.0) && (445..=455).contains(&heavy.0), "{light:?} {heavy:?}");
    }

    #[test]
    fn nobody_saves_up_and_nobody_is_starved() {
        // One took what was left for a minute, while the other wanted little; then that one floods.
        let first = served(&[(A, 50, 0..90), (B, 1_000, 0..60), (B, 50, 60..90)], 60);
        let all = served(&[(A, 50, 0..90), (B, 1_000, 0..60), (B, 50, 60..90)], 90);
        let (of_a, of_b) = (all[0].0 - first[0].0, all[2].0);
        assert!((140..=160).contains(&of_a) && (140..=160).contains(&of_b), "{of_a} and {of_b} of 300");
        // Of ten that flood each gets a tenth.
        let ten: Vec<_> = (1..=10).map(|tenant| ((TenantId(tenant), 1.0), 100, 0..50)).collect();
        assert!(
            served(&ten, 50).iter().all(|(served, _)| (49..=51).contains(served)),
            "{:?}",
            served(&ten, 50)
        );
    }
}
