//! Spreads leadership: a router that leads more than its share of the groups gives some to the voters that are
//! preferred for them.
//!
//! The preferred leader of a group follows from its number and its voters alone, so all routers agree without a
//! word. Nothing moves until a leader has settled, a voter that is behind gets nothing, and a transfer that did
//! not last is tried again after ever longer pauses. The decision is pure and takes the time as an argument.
//! Not here: the transfer (`crate::raft::handle`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::groups::Groups;

/// A leader keeps a group at least this long: elections after a crash come in flurries.
const SETTLED_AFTER: Duration = Duration::from_secs(2);

/// Pause after the first transfer of a group; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(10);

/// Longest pause between two transfers of one group: a voter that cannot keep a group costs an election every
/// ten minutes.
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Entries a voter may be behind and still count as level: it gets them within the transfer.
const LEVEL_ENTRIES: u64 = 64;

/// Longest a transfer may take; an idle one takes under a millisecond.
const TRANSFER_MAX: Duration = Duration::from_secs(1);

/// A group that this router leads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Led {
    group: u16,
    /// By ascending number.
    voters: Vec<u64>,
    /// Those of them that have all entries, nearly.
    level: Vec<u64>,
}

/// What is remembered between two looks.
#[derive(Debug, Default)]
struct Balance {
    led_since: BTreeMap<u16, Timestamp>,
    /// When a group was given away last, and how often.
    given: BTreeMap<u16, (Timestamp, u32)>,
}

/// The voter that should lead a group, all others being well.
fn preferred(group: u16, voters: &[u64]) -> Option<u64> {
    voters.get(usize::from(group) % voters.len().max(1)).copied()
}

impl Balance {
    /// The next group to give away, and to whom: one at a time, so that each look sees what came of the last.
    fn next(&mut self, own: u64, groups: usize, led: &[Led], now: Timestamp) -> Option<(u16, u64)> {
        self.led_since.retain(|group, _| led.iter().any(|one| one.group == *group));
        for one in led {
            self.led_since.entry(one.group).or_insert(now);
        }
        let (group, to) = led.iter().find_map(|one| {
            let to = preferred(one.group, &one.voters)?;
            let fair = groups.div_ceil(one.voters.len().max(1));
            let may = led.len() > fair && to != own && one.level.contains(&to) && self.is_due(one.group, now);
            may.then_some((one.group, to))
        })?;
        let times = self.given.get(&group).map_or(0, |(_, times)| *times);
        self.given.insert(group, (now, times.saturating_add(1)));
        Some((group, to))
    }

    fn is_due(&self, group: u16, now: Timestamp) -> bool {
        let settled = self.led_since.get(&group).is_some_and(|since| now.since(*since) >= SETTLED_AFTER);
        let rested = self.given.get(&group).is_none_or(|(at, times)| {
            let doublings = times.saturating_sub(1).min(16);
            now.since(*at) >= PAUSE_MIN.saturating_mul(1 << doublings).min(PAUSE_MAX)
        });
        settled && rested
    }
}

/// Looks every so often until cancelled.
pub(crate) async fn run(groups: Groups, every: Duration, clock: Clock, stop: CancellationToken) {
    let mut balance = Balance::default();
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let own = groups.control().consensus.id();
        let led = led(&groups);
        let Some((group, to)) = balance.next(own, groups.all().len(), &led, clock.now()) else { continue };
        let Some(group) = groups.get(group.into()) else { continue };
        tracing::info!(group = group.number(), to, "this router leads more than its share: handing over");
        let handed_over = tokio::time::timeout(TRANSFER_MAX, group.consensus.transfer(to));
        if stop.run_until_cancelled(handed_over).await.is_some_and(|done| done.is_err()) {
            tracing::info!(group = group.number(), to, "it did not take over in time");
        }
    }
}

fn led(groups: &Groups) -> Vec<Led> {
    let led = groups.all().iter().filter(|group| group.consensus.holds_office());
    led.map(|group| {
        let standing = group.consensus.standing();
        let mut voters: Vec<u64> =
            standing.members.iter().filter(|(_, _, learns)| !learns).map(|(id, _, _)| *id).collect();
        voters.sort_unstable();
        let is_level = |id: &&u64| {
            let matched = standing.matched.get(id).copied();
            matched.is_some_and(|matched| matched + LEVEL_ENTRIES >= standing.last_log_index)
        };
        let level = voters.iter().filter(is_level).copied().collect();
        Led { group: group.number(), voters, level }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: usize = 5;

    fn led(groups: &[u16]) -> Vec<Led> {
        let one = |group: &u16| Led { group: *group, voters: vec![1, 2, 3], level: vec![1, 2, 3] };
        groups.iter().map(one).collect()
    }

    fn s(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    #[test]
    fn what_is_beyond_the_share_goes_to_those_preferred() {
        let mut balance = Balance::default();
        let all = led(&[0, 1, 2, 3, 4]);
        assert_eq!(balance.next(1, GROUPS, &all, s(0)), None, "not before it has settled");
        assert_eq!(balance.next(1, GROUPS, &all, s(2)), Some((1, 2)));
        assert_eq!(balance.next(1, GROUPS, &led(&[0, 2, 3, 4]), s(3)), Some((2, 3)));
        assert_eq!(balance.next(1, GROUPS, &led(&[0, 3, 4]), s(4)), Some((4, 2)));
        assert_eq!(
            balance.next(1, GROUPS, &led(&[0, 3]), s(5)),
            None,
            "two of five is a fair share of three"
        );
    }

    #[test]
    fn a_fair_share_stays_where_it_is() {
        let mut balance = Balance::default();
        for second in 0..100 {
            assert_eq!(
                balance.next(1, GROUPS, &led(&[1, 2]), s(second)),
                None,
                "not the preferred ones, but no more"
            );
        }
    }

    #[test]
    fn a_voter_that_is_behind_gets_nothing() {
        let mut balance = Balance::default();
        let mut all = led(&[1, 4, 2]);
        all.iter_mut().for_each(|one| one.level = vec![1, 3]);
        assert_eq!(balance.next(1, GROUPS, &all, s(0)), None);
        assert_eq!(balance.next(1, GROUPS, &all, s(9)), Some((2, 3)));
        assert_eq!(balance.next(1, GROUPS, &all, s(10)), None, "router 2 has to catch up first");
    }

    #[test]
    fn a_group_that_comes_back_is_given_away_less_and_less_often() {
        let mut balance = Balance::default();
        let all = led(&[0, 1, 3]);
        let given: Vec<u64> =
            (0..2_000).filter(|second| balance.next(1, GROUPS, &all, s(*second)).is_some()).collect();
        assert_eq!(given, [2, 12, 32, 72, 152, 312, 632, 1_232, 1_832]);
    }
}
