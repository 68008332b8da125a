//! Evaluation of the trials: means and ranges over seeds, and one policy compared with the best of
//! the others.
//!
//! All differences are in percentage points of the hit rate, of means over the seeds. Not here: the
//! replays.

use super::{KNOWABLE, PolicyTrial};
use kvfleet_sim::stats::curve::OPTIMAL;
use serde::Serialize;

/// Minimum share of the unique blocks for a realistic tier. Below it, every policy loses most
/// possible hits, and is judged separately.
const BUILT_SHARE_MIN: f64 = 0.05;
/// Minimum gap between baseline and bound that is worth closing, in points.
const GAP_POINTS_MIN: f64 = 3.0;

/// Hit rates of one policy at one capacity over the seeds, in points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HitRateSpread {
    /// Mean.
    pub mean: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

/// Hit rates of one policy at one capacity; `None` without such a trial.
#[must_use]
pub fn hit_rate_spread(
    trials: &[PolicyTrial],
    traffic: &str,
    policy: &str,
    share: f64,
) -> Option<HitRateSpread> {
    let of = |trial: &&PolicyTrial| {
        trial.traffic == traffic && trial.policy == policy && trial.capacity_share == share
    };
    let rates: Vec<f64> = trials.iter().filter(of).map(|trial| 100.0 * trial.hit_rate).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let (min, max) = (rates.iter().copied().reduce(f64::min)?, rates.iter().copied().reduce(f64::max)?);
    Some(HitRateSpread { mean, min, max })
}

/// Difference of the judged policy to the best baseline, at one traffic and capacity.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BaselineDistance {
    /// Name of the traffic.
    pub traffic: String,
    /// Capacity over unique blocks.
    pub capacity_share: f64,
    /// The best baseline there.
    pub baseline: String,
    /// Points above the baseline; negative if below.
    pub points: f64,
}

/// Possible gain over the best baseline at one traffic and capacity, and the achieved part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BoundGap {
    /// Traffic and capacity, and the distance of the judged policy from the baseline.
    pub distance: BaselineDistance,
    /// Points from the baseline to the bound.
    pub gap_points: f64,
    /// Share of the gap that the judged policy gains; negative if it loses.
    pub closed: f64,
    /// Share of the gap that is possible without the future, if the traffic model is known.
    pub knowable: Option<f64>,
}

/// One policy compared with the baselines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyJudgement {
    /// The judged policy.
    pub policy: String,
    /// Its worst distance at a capacity of at least 5 %.
    pub worst_built: Option<BaselineDistance>,
    /// Its worst distance at smaller capacities.
    pub worst_small: Option<BaselineDistance>,
    /// Every traffic and capacity with a possible gain above 3 points.
    pub gaps: Vec<BoundGap>,
}

/// Compares `policy` with the best of `baselines` at each traffic and capacity of the trials.
#[must_use]
pub fn judge_policy(trials: &[PolicyTrial], policy: &str, baselines: &[&str]) -> PolicyJudgement {
    let mut judgement =
        PolicyJudgement { policy: policy.to_owned(), worst_built: None, worst_small: None, gaps: Vec::new() };
    let mut seen: Vec<(&str, f64)> = Vec::new();
    for trial in trials {
        let place = (trial.traffic.as_str(), trial.capacity_share);
        if seen.contains(&place) {
            continue;
        }
        seen.push(place);
        let mean = |policy: &str| hit_rate_spread(trials, place.0, policy, place.1).map(|spread| spread.mean);
        let best = baselines.iter().filter_map(|&name| Some((name, mean(name)?)));
        let (Some(ours), Some((baseline, best))) = (mean(policy), best.max_by(|a, b| a.1.total_cmp(&b.1)))
        else {
            continue;
        };
        let distance = BaselineDistance {
            traffic: place.0.to_owned(),
            capacity_share: place.1,
            baseline: baseline.to_owned(),
            points: ours - best,
        };
        let is_built = place.1 >= BUILT_SHARE_MIN;
        let worst = if is_built { &mut judgement.worst_built } else { &mut judgement.worst_small };
        if worst.as_ref().is_none_or(|worst| distance.points < worst.points) {
            *worst = Some(distance.clone());
        }
        let gap_points = mean(OPTIMAL).map_or(0.0, |bound| bound - best);
        if gap_points > GAP_POINTS_MIN {
            let knowable = mean(KNOWABLE).map(|bound| (bound - best) / gap_points);
            judgement.gaps.push(BoundGap {
                closed: distance.points / gap_points,
                distance,
                gap_points,
                knowable,
            });
        }
    }
    judgement
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn trial(policy: &str, seed: u64, capacity_share: f64, points: f64) -> PolicyTrial {
        PolicyTrial {
            traffic: "t".into(),
            seed: Some(seed),
            policy: policy.into(),
            capacity_share,
            capacity_blocks: 1,
            hit_rate: points / 100.0,
        }
    }

    #[test]
    fn means_spreads_and_distances_match_hand_computation() {
        let rows = [
            ("lru", 20.0, 30.0),
            ("lfu", 26.0, 26.0),
            ("ours", 24.0, 32.0),
            (KNOWABLE, 28.0, 32.0),
            (OPTIMAL, 30.0, 38.0),
        ];
        let mut trials = Vec::new();
        for (policy, first, second) in rows {
            trials.extend([trial(policy, 1, 0.05, first), trial(policy, 2, 0.05, second)]);
            trials.extend([trial(policy, 1, 0.01, first / 2.0), trial(policy, 2, 0.01, first / 2.0)]);
        }
        let lru = hit_rate_spread(&trials, "t", "lru", 0.05).unwrap();
        assert!(
            (lru.mean - 25.0).abs() < 1e-9 && (lru.min - 20.0).abs() < 1e-9 && (lru.max - 30.0).abs() < 1e-9
        );
        assert_eq!(hit_rate_spread(&trials, "t", "lru", 0.5), None);
        let judged = judge_policy(&trials, "ours", &["lru", "lfu", "absent"]);
        let built = judged.worst_built.unwrap();
        assert_eq!(built.baseline, "lfu");
        assert!((built.points - 2.0).abs() < 1e-9);
        assert!((judged.worst_small.unwrap().points + 1.0).abs() < 1e-9);
        // At 5 % the bound is 8 above the best baseline and ours 2; at 1 % only 2, which is below
        // the minimum gap.
        assert_eq!(judged.gaps.len(), 1);
        assert!(
            (judged.gaps[0].gap_points - 8.0).abs() < 1e-9 && (judged.gaps[0].closed - 0.25).abs() < 1e-9
        );
        assert!((judged.gaps[0].knowable.unwrap() - 0.5).abs() < 1e-9);
    }
}
