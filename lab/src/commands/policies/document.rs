//! The tables of all policies as a document.
//!
//! `crate::policies` computes the figures and `plot.rs` draws them. Writing to a string
//! cannot fail, so results of `writeln` are dropped.

use std::fmt::Write;

use crate::evict;
use crate::policies::{BaselineDistance, BoundGap, KNOWABLE, PolicyJudgement, SHARES, hit_rate_spread};
use kvfleet_sim::stats::curve::OPTIMAL;

use super::{Evaluation, PLOTS, TrafficFacts};

const INTRO: &str = "\
# Eviction policies

Written by `cargo xtask policies`; do not edit. Hit rates in percent of one tier replayed with the production policies,
by its capacity as a share of the unique blocks. A block counts as a hit only if every earlier block of the request was
a hit. Values of generated traffic are means over its seeds, with half the range behind them. `opt` knows the future.
`knowable` does not, but knows how the traffic is generated, so no policy without knowledge of the future can be
expected to exceed it (`sim/src/generate/knowable.rs`). Turns that a trace does not contain are inferred
(`sim/src/trace/turns.rs`).

Generated traffic is calibrated to published statistics and is not a recording; the files of `sim/src/generate/` state
what is published, fitted and assumed.
";

/// Where the plots are, in the document without them.
const WITHOUT_PLOTS: &str = "
Plots are not in the repository: `cargo xtask policies --full DIR` writes them with this document.
";

/// The whole document.
pub(super) fn render(evaluation: &Evaluation, judgement: &PolicyJudgement) -> String {
    let mut out = INTRO.to_owned();
    judgement_text(&mut out, judgement);
    for facts in &evaluation.facts {
        heading(&mut out, facts);
        let _ = writeln!(out, "![hit rate against capacity]({PLOTS}/{}.svg)\n", facts.name);
        table(&mut out, evaluation, facts);
    }
    out
}

/// The document without plots.
pub(super) fn render_summary(evaluation: &Evaluation, judgement: &PolicyJudgement) -> String {
    let mut out = INTRO.to_owned() + WITHOUT_PLOTS;
    judgement_text(&mut out, judgement);
    for facts in &evaluation.facts {
        heading(&mut out, facts);
        table(&mut out, evaluation, facts);
    }
    out
}

fn percent(share: f64) -> String {
    format!("{} %", (share * 1e5).round() / 1e3)
}

fn judgement_text(out: &mut String, judgement: &PolicyJudgement) {
    let _ = writeln!(out, "\n## `{}` against the best baseline\n", judgement.policy);
    let _ = writeln!(out, "Baselines: {}.\n", evict::BASELINES.join(", "));
    for (at, worst) in [("5 % and more", &judgement.worst_built), ("less than 5 %", &judgement.worst_small)] {
        if let Some(BaselineDistance { traffic, capacity_share, baseline, points }) = worst {
            let share = percent(*capacity_share);
            let _ = writeln!(
                out,
                "- Worst distance at {at} of the blocks: {points:+.2} points ({traffic} at {share}, against \
                 {baseline})."
            );
        }
    }
    if judgement.gaps.is_empty() {
        return;
    }
    out.push_str("\nWhere the bound is more than 3 points above the best baseline:\n\n");
    out.push_str(
        "| traffic | capacity | best baseline | gap to the bound | gained | share closed | knowable |\n",
    );
    out.push_str("| --- | ---: | --- | ---: | ---: | ---: | ---: |\n");
    for BoundGap { distance, gap_points, closed, knowable } in &judgement.gaps {
        let BaselineDistance { traffic, capacity_share, baseline, points } = distance;
        let (share, closed) = (percent(*capacity_share), 100.0 * closed);
        let knowable = knowable.map_or_else(|| "–".to_owned(), |share| format!("{:.0} %", 100.0 * share));
        let _ = writeln!(
            out,
            "| {traffic} | {share} | {baseline} | {gap_points:.2} | {points:+.2} | {closed:.0} % | {knowable} |"
        );
    }
    let closed: f64 = judgement.gaps.iter().map(|gap| gap.closed).sum();
    let mean = 100.0 * closed / judgement.gaps.len() as f64;
    let _ = writeln!(out, "\nIn the mean {mean:.1} % of the gap is closed.");
}

fn heading(out: &mut String, TrafficFacts { name, seeds, requests, unique_blocks }: &TrafficFacts) {
    let seeded = if *seeds > 0 { format!(", seeds 1 to {seeds}") } else { String::new() };
    let _ = writeln!(out, "\n## {name}\n");
    let _ = writeln!(out, "{requests} requests, {unique_blocks} unique blocks{seeded}.\n");
}

fn table(out: &mut String, evaluation: &Evaluation, TrafficFacts { name, seeds, .. }: &TrafficFacts) {
    let _ = write!(out, "| policy |");
    for share in SHARES {
        let _ = write!(out, " {} |", percent(share));
    }
    let _ = writeln!(out, "\n| --- |{}", " ---: |".repeat(SHARES.len()));
    for policy in evict::NAMES.into_iter().chain([KNOWABLE, OPTIMAL]) {
        if !SHARES.iter().any(|share| hit_rate_spread(&evaluation.trials, name, policy, *share).is_some()) {
            continue;
        }
        let shown = if policy == evaluation.judged { format!("**{policy}**") } else { policy.to_owned() };
        let _ = write!(out, "| {shown} |");
        for share in SHARES {
            let cell =
                hit_rate_spread(&evaluation.trials, name, policy, share).map_or_else(String::new, |spread| {
                    let half = (spread.max - spread.min) / 2.0;
                    if *seeds > 1 {
                        format!("{:.2} ±{half:.2}", spread.mean)
                    } else {
                        format!("{:.2}", spread.mean)
                    }
                });
            let _ = write!(out, " {cell} |");
        }
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::{PolicyTrial, judge_policy};

    #[test]
    fn renders_policy_rows_and_the_worst_distance() {
        let trial = |policy: &str, seed, capacity_share, hit_rate| PolicyTrial {
            traffic: "consumer".into(),
            seed: Some(seed),
            policy: policy.into(),
            capacity_share,
            capacity_blocks: 9,
            hit_rate,
        };
        let mut trials = vec![];
        for (policy, rate) in [("lru", 0.2), ("workload", 0.25), (KNOWABLE, 0.28), (OPTIMAL, 0.3)] {
            trials.extend([trial(policy, 1, 0.1, rate), trial(policy, 2, 0.1, rate + 0.01)]);
        }
        let facts = TrafficFacts { name: "consumer".into(), seeds: 2, requests: 10, unique_blocks: 99 };
        let evaluation = Evaluation { judged: "workload".into(), facts: vec![facts], trials };
        let text = render(&evaluation, &judge_policy(&evaluation.trials, "workload", &["lru"]));
        for words in [
            "- Worst distance at 5 % and more of the blocks: +5.00 points (consumer at 10 %, against lru).",
            "| consumer | 10 % | lru | 10.00 | +5.00 | 50 % | 80 % |",
            "In the mean 50.0 % of the gap is closed.",
            "10 requests, 99 unique blocks, seeds 1 to 2.",
            "| policy | 0.1 % | 0.2 % | 0.5 % | 1 % | 2 % | 5 % | 10 % | 20 % | 40 % |",
            "| **workload** |  |  |  |  |  |  | 25.50 ±0.50 |  |  |",
        ] {
            assert!(text.contains(words), "{words} is not in {text}");
        }
    }
}
