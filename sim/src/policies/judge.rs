//! What the trials come to: means and spreads over seeds, and one policy held against the best of the others.
//!
//! All differences are in points of hit rate (hundredths), of means over the seeds. Not here: the replays.

use super::{KNOWABLE, Trial};
use crate::stats::curve::OPTIMAL;
use serde::Serialize;

/// From this share of the unique blocks on, a tier is one that somebody would build; below it, every policy
/// loses most of what could hit, and is judged apart.
const BUILT_SHARE_MIN: f64 = 0.05;
/// A gap between baseline and bound is worth closing above this, in points.
const GAP_POINTS_MIN: f64 = 3.0;

/// Hit rates of one policy at one capacity over the seeds, in points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Least.
    pub min: f64,
    /// Greatest.
    pub max: f64,
}

/// The spread of one policy at one capacity; nothing when there is no such trial.
#[must_use]
pub fn spread(trials: &[Trial], traffic: &str, policy: &str, share: f64) -> Option<Spread> {
    let of =
        |trial: &&Trial| trial.traffic == traffic && trial.policy == policy && trial.capacity_share == share;
    let rates: Vec<f64> = trials.iter().filter(of).map(|trial| 100.0 * trial.hit_rate).collect();
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    let (min, max) = (rates.iter().copied().reduce(f64::min)?, rates.iter().copied().reduce(f64::max)?);
    Some(Spread { mean, min, max })
}

/// The judged policy less the best baseline, at one place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distance {
    /// Name of the traffic.
    pub traffic: String,
    /// Capacity over unique blocks.
    pub capacity_share: f64,
    /// The best baseline there.
    pub baseline: String,
    /// Points above it; negative when below.
    pub points: f64,
}

/// What could be gained over the best baseline at one place, and how much of it was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gap {
    /// Where, and how far above the baseline the judged policy is.
    pub distance: Distance,
    /// Points from the baseline to the bound.
    pub gap_points: f64,
    /// Share of these that the judged policy gains; negative when it loses.
    pub closed: f64,
    /// Share of these that does not need the future to be known, where it is known how the traffic is made.
    pub knowable: Option<f64>,
}

/// One policy held against the others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// The judged policy.
    pub policy: String,
    /// Its worst distance where the capacity is at least 5 %.
    pub worst_built: Option<Distance>,
    /// Its worst distance below that.
    pub worst_small: Option<Distance>,
    /// Every place where more than 3 points could be gained.
    pub gaps: Vec<Gap>,
}

/// Holds `policy` against the best of `baselines` at each place of the trials.
#[must_use]
pub fn judge(trials: &[Trial], policy: &str, baselines: &[&str]) -> Judgement {
    let mut judgement =
        Judgement { policy: policy.to_owned(), worst_built: None, worst_small: None, gaps: Vec::new() };
    let mut seen: Vec<(&str, f64)> = Vec::new();
    for trial in trials {
        let place = (trial.traffic.as_str(), trial.capacity_share);
        if seen.contains(&place) {
            continue;
        }
        seen.push(place);
        let mean = |policy: &str| spread(trials, place.0, policy, place.1).map(|spread| spread.mean);
        let best = baselines.iter().filter_map(|&name| Some((name, mean(name)?)));
        let (Some(ours), Some((baseline, best))) = (mean(policy), best.max_by(|a, b| a.1.total_cmp(&b.1)))
        else {
            continue;
        };
        let distance = Distance {
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
            judgement.gaps.push(Gap { closed: distance.points / gap_points, distance, gap_points, knowable });
        }
    }
    judgement
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn trial(policy: &str, seed: u64, capacity_share: f64, points: f64) -> Trial {
        Trial {
            traffic: "t".into(),
            seed: Some(seed),
            policy: policy.into(),
            capacity_share,
            capacity_blocks: 1,
            hit_rate: points / 100.0,
        }
    }

    #[test]
    fn means_spreads_and_distances_by_hand() {
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
        let lru = spread(&trials, "t", "lru", 0.05).unwrap();
        assert!(
            (lru.mean - 25.0).abs() < 1e-9 && (lru.min - 20.0).abs() < 1e-9 && (lru.max - 30.0).abs() < 1e-9
        );
        assert_eq!(spread(&trials, "t", "lru", 0.5), None);
        let judged = judge(&trials, "ours", &["lru", "lfu", "absent"]);
        let built = judged.worst_built.unwrap();
        assert_eq!(built.baseline, "lfu");
        assert!((built.points - 2.0).abs() < 1e-9);
        assert!((judged.worst_small.unwrap().points + 1.0).abs() < 1e-9);
        // At 5 % the bound is 8 above the best baseline and ours 2; at 1 % only 2, which is no gap.
        assert_eq!(judged.gaps.len(), 1);
        assert!(
            (judged.gaps[0].gap_points - 8.0).abs() < 1e-9 && (judged.gaps[0].closed - 0.25).abs() < 1e-9
        );
        assert!((judged.gaps[0].knowable.unwrap() - 0.5).abs() < 1e-9);
    }
}
