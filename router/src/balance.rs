//! Balances leadership: a router that leads more than its share of the groups transfers some to
//! their preferred leaders.
//!
//! The preferred leader of a group follows from its number and its voters alone, so all routers
//! agree without communication. A group moves only after its leader has settled and only to a voter
//! that has caught up. If a transfer does not last, the next attempt waits longer. The decision is
//! pure and takes the time as an argument. Not here: the transfer (`crate::raft::handle`).

use std::collections::BTreeMap;
use std::time::Duration;

use kv_core::id::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::groups::Groups;

/// Shortest time that a leader keeps a group: elections after a crash come in bursts.
const MIN_TENURE: Duration = Duration::from_secs(2);

/// Pause after the first transfer of a group; it doubles with each later one.
const PAUSE_MIN: Duration = Duration::from_secs(10);

/// Longest pause between two transfers of one group. A voter that cannot keep a group costs at most
/// one election per pause.
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// Log entries that a voter may lag and still count as caught up: it receives them during the
/// transfer.
const CAUGHT_UP_LAG_MAX: u64 = 64;

/// Timeout of one transfer; an idle transfer takes under a millisecond.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(1);

/// A group that this router leads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LedGroup {
    group: u16,
    /// In ascending order.
    voters: Vec<u64>,
    /// Voters with a log complete to within [`CAUGHT_UP_LAG_MAX`].
    caught_up: Vec<u64>,
}

/// State kept between two checks.
#[derive(Debug, Default)]
struct Balance {
    led_since: BTreeMap<u16, Timestamp>,
    /// Time of the last transfer of each group, and the number of transfers so far.
    transfers: BTreeMap<u16, (Timestamp, u32)>,
}

/// The voter that should lead a group when all voters are healthy.
fn preferred_leader(group: u16, voters: &[u64]) -> Option<u64> {
    voters.get(usize::from(group) % voters.len().max(1)).copied()
}

impl Balance {
    /// Returns the next group to transfer and its new leader. One at a time, so that each check
    /// sees the result of the last.
    fn next_transfer(
        &mut self,
        own: u64,
        groups: usize,
        led_groups: &[LedGroup],
        now: Timestamp,
    ) -> Option<(u16, u64)> {
        self.led_since.retain(|group, _| led_groups.iter().any(|one| one.group == *group));
        for one in led_groups {
            self.led_since.entry(one.group).or_insert(now);
        }
        let (group, to) = led_groups.iter().find_map(|one| {
            let to = preferred_leader(one.group, &one.voters)?;
            let fair = groups.div_ceil(one.voters.len().max(1));
            let may = led_groups.len() > fair
                && to != own
                && one.caught_up.contains(&to)
                && self.is_due(one.group, now);
            may.then_some((one.group, to))
        })?;
        let times = self.transfers.get(&group).map_or(0, |(_, times)| *times);
        self.transfers.insert(group, (now, times.saturating_add(1)));
        Some((group, to))
    }

    fn is_due(&self, group: u16, now: Timestamp) -> bool {
        let has_settled = self.led_since.get(&group).is_some_and(|since| now.since(*since) >= MIN_TENURE);
        let paused_enough = self.transfers.get(&group).is_none_or(|(at, times)| {
            let doublings = times.saturating_sub(1).min(16);
            now.since(*at) >= PAUSE_MIN.saturating_mul(1 << doublings).min(PAUSE_MAX)
        });
        has_settled && paused_enough
    }
}

/// Checks periodically until cancelled.
pub(crate) async fn run(groups: Groups, every: Duration, clock: Clock, stop: CancellationToken) {
    let mut balance = Balance::default();
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let own = groups.control().consensus.id();
        let led_groups = led(&groups);
        let Some((group, to)) = balance.next_transfer(own, groups.all().len(), &led_groups, clock.now())
        else {
            continue;
        };
        let Some(group) = groups.get(group.into()) else { continue };
        tracing::info!(group = group.number(), to, "this router leads more than its share: handing over");
        let handed_over = tokio::time::timeout(TRANSFER_TIMEOUT, group.consensus.transfer(to));
        if stop.run_until_cancelled(handed_over).await.is_some_and(|done| done.is_err()) {
            tracing::info!(group = group.number(), to, "the new leader did not take over in time");
        }
    }
}

fn led(groups: &Groups) -> Vec<LedGroup> {
    let led_groups = groups.all().iter().filter(|group| group.consensus.holds_leader_lease());
    led_groups
        .map(|group| {
            let status = group.consensus.status();
            let mut voters: Vec<u64> =
                status.members.iter().filter(|(_, _, learns)| !learns).map(|(id, _, _)| *id).collect();
            voters.sort_unstable();
            let is_level = |id: &&u64| {
                let matched = status.matched.get(id).copied();
                matched.is_some_and(|matched| matched + CAUGHT_UP_LAG_MAX >= status.last_log_index)
            };
            let level = voters.iter().filter(is_level).copied().collect();
            LedGroup { group: group.number(), voters, caught_up: level }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUPS: usize = 5;

    fn led_groups(groups: &[u16]) -> Vec<LedGroup> {
        let one = |group: &u16| LedGroup { group: *group, voters: vec![1, 2, 3], caught_up: vec![1, 2, 3] };
        groups.iter().map(one).collect()
    }

    fn s(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    #[test]
    fn excess_groups_go_to_their_preferred_leaders() {
        let mut balance = Balance::default();
        let all = led_groups(&[0, 1, 2, 3, 4]);
        assert_eq!(balance.next_transfer(1, GROUPS, &all, s(0)), None, "not before the leader has settled");
        assert_eq!(balance.next_transfer(1, GROUPS, &all, s(2)), Some((1, 2)));
        assert_eq!(balance.next_transfer(1, GROUPS, &led_groups(&[0, 2, 3, 4]), s(3)), Some((2, 3)));
        assert_eq!(balance.next_transfer(1, GROUPS, &led_groups(&[0, 3, 4]), s(4)), Some((4, 2)));
        assert_eq!(
            balance.next_transfer(1, GROUPS, &led_groups(&[0, 3]), s(5)),
            None,
            "two of five is a fair share of three"
        );
    }

    #[test]
    fn a_fair_share_is_not_moved() {
        let mut balance = Balance::default();
        for second in 0..100 {
            assert_eq!(
                balance.next_transfer(1, GROUPS, &led_groups(&[1, 2]), s(second)),
                None,
                "not the preferred leader, but within the fair share"
            );
        }
    }

    #[test]
    fn a_lagging_voter_gets_no_group() {
        let mut balance = Balance::default();
        let mut all = led_groups(&[1, 4, 2]);
        all.iter_mut().for_each(|one| one.caught_up = vec![1, 3]);
        assert_eq!(balance.next_transfer(1, GROUPS, &all, s(0)), None);
        assert_eq!(balance.next_transfer(1, GROUPS, &all, s(9)), Some((2, 3)));
        assert_eq!(balance.next_transfer(1, GROUPS, &all, s(10)), None, "router 2 has to catch up first");
    }

    #[test]
    fn a_returned_group_is_transferred_with_growing_pauses() {
        let mut balance = Balance::default();
        let all = led_groups(&[0, 1, 3]);
        let given: Vec<u64> = (0..2_000)
            .filter(|second| balance.next_transfer(1, GROUPS, &all, s(*second)).is_some())
            .collect();
        assert_eq!(given, [2, 12, 32, 72, 152, 312, 632, 1_232, 1_832]);
    }
}
