//! `kvfleet-lab joins`: hit rates of a node that joins in the middle of a trace, with and without
//! the fleet's reuse statistics.
//!
//! `crate::join` runs the fleets.

use std::fmt::Write;

use crate::evict;
use crate::join::{JoinPlan, JoinResult, simulate_join};
use crate::policies::Traffic;
use kvfleet_sim::generate::{TraceSpec, TrafficKind};

use super::read_trace;
use crate::args::JoinsArgs;

/// Lets a node join in every trace at every capacity and prints the results.
pub(super) fn run(args: &JoinsArgs) -> anyhow::Result<()> {
    if !evict::NAMES.contains(&args.policy.as_str()) {
        anyhow::bail!("policy {} is unknown: choose one of {}", args.policy, evict::NAMES.join(", "));
    }
    let mut all = Vec::new();
    for path in &args.files {
        let name =
            path.file_stem().map_or_else(|| "trace".to_owned(), |stem| stem.to_string_lossy().into_owned());
        all.push(join_results(&[Traffic::recorded(&name, read_trace(path)?)], args));
    }
    for kind in TrafficKind::ALL.into_iter().filter(|_| args.seeds > 0) {
        let of =
            |seed| TraceSpec { block_tokens: args.block_tokens, ..TraceSpec::new(kind, seed, args.requests) };
        let traffic: Vec<Traffic> = (1..=args.seeds).map(|seed| Traffic::generated(of(seed))).collect();
        all.push(join_results(&traffic, args));
    }
    if all.is_empty() {
        anyhow::bail!("nothing to replay: name a trace, or generate some with --seeds 1");
    }
    let mut lines = String::new();
    for joining in all.iter().flatten().flatten() {
        let _ = writeln!(lines, "{}", serde_json::to_string(joining)?);
    }
    if let Some(path) = &args.out {
        std::fs::write(path, &lines).map_err(|cause| {
            anyhow::anyhow!("cannot write {}: {cause}; choose another --out", path.display())
        })?;
    }
    print!("{}", if args.json { lines } else { tables(&all, args) });
    Ok(())
}

/// Results of every seed, by capacity.
fn join_results(traffic: &[Traffic], args: &JoinsArgs) -> Vec<Vec<JoinResult>> {
    let at = |&capacity_share: &f64| {
        let plan = JoinPlan { policy: &args.policy, nodes: args.nodes, capacity_share, first: &args.first };
        traffic.iter().filter_map(|traffic| simulate_join(traffic, &plan)).collect()
    };
    args.capacities.iter().map(at).collect()
}

/// Mean, minimum and maximum over seeds, in percentage points.
fn mean_and_range(seeds: &[JoinResult], of: impl Fn(&JoinResult) -> f64) -> (f64, f64, f64) {
    let points: Vec<f64> = seeds.iter().map(|joining| 100.0 * of(joining)).collect();
    let mean = points.iter().sum::<f64>() / points.len().max(1) as f64;
    let (least, most) = (points.iter().copied().reduce(f64::min), points.iter().copied().reduce(f64::max));
    (mean, least.unwrap_or(mean), most.unwrap_or(mean))
}

/// The gain of `of` over seeds: its mean, least and greatest.
fn gain_text(seeds: &[JoinResult], of: impl Fn(&JoinResult) -> f64) -> String {
    let (mean, least, most) = mean_and_range(seeds, of);
    format!("{mean:+.2} ({least:+.2} to {most:+.2})")
}

fn tables(all: &[Vec<Vec<JoinResult>>], args: &JoinsArgs) -> String {
    let mut out = format!(
        "{} nodes of policy {}, and one that joins in the middle; hit rates in points, gains with the least \
         and the greatest of any seed\n\n",
        args.nodes, args.policy
    );
    out.push_str("| traffic | capacity | its first requests | blind | told | gain |\n");
    out.push_str("| --- | ---: | ---: | ---: | ---: | ---: |\n");
    let points: Vec<&Vec<JoinResult>> = all.iter().flatten().filter(|seeds| !seeds.is_empty()).collect();
    for seeds in &points {
        for at in 0..args.first.len() {
            let requests = seeds.iter().map(|joining| joining.first[at].requests).max().unwrap_or(0);
            let (blind, told) = (
                mean_and_range(seeds, |joining| joining.first[at].blind).0,
                mean_and_range(seeds, |joining| joining.first[at].told).0,
            );
            let gain = gain_text(seeds, |joining| joining.first[at].told - joining.first[at].blind);
            let (traffic, share) = (&seeds[0].traffic, 100.0 * seeds[0].capacity_share);
            let _ = writeln!(out, "| {traffic} | {share} % | {requests} | {blind:.2} | {told:.2} | {gain} |");
        }
    }
    out.push_str(
        "\n| traffic | capacity | all nodes over the whole trace, nobody told | all told | gain |\n",
    );
    out.push_str("| --- | ---: | ---: | ---: | ---: |\n");
    for seeds in &points {
        let [alone, told] = [0, 1].map(|at| mean_and_range(seeds, |joining| joining.fleet[at]).0);
        let gain = gain_text(seeds, |joining| joining.fleet[1] - joining.fleet[0]);
        let (traffic, share) = (&seeds[0].traffic, 100.0 * seeds[0].capacity_share);
        let _ = writeln!(out, "| {traffic} | {share} % | {alone:.2} | {told:.2} | {gain} |");
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::args::{LabArgs, LabCommand};
    use clap::Parser;

    fn args(words: &[&str]) -> JoinsArgs {
        let words = [&["kvfleet-lab", "joins"], words].concat();
        match LabArgs::try_parse_from(words).unwrap().command {
            LabCommand::Joins(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn table_matches_the_json_lines() {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("joins.jsonl");
        let mut args =
            args(&["--requests", "200", "--seeds", "1", "--capacities", "0.02", "--first", "5,10"]);
        args.out = Some(out.clone());
        run(&args).unwrap();
        let lines = std::fs::read_to_string(&out).unwrap();
        assert_eq!(lines.lines().count(), 3, "a line for each kind");
        let seed = |kind| Traffic::generated(TraceSpec { block_tokens: 64, ..TraceSpec::new(kind, 1, 200) });
        let all: Vec<_> =
            TrafficKind::ALL.into_iter().map(|kind| join_results(&[seed(kind)], &args)).collect();
        let same = all.iter().flatten().flatten().map(|joining| serde_json::to_string(joining).unwrap());
        assert!(same.eq(lines.lines()), "the same arguments give the same figures");
        let text = tables(&all, &args);
        let told = 100.0 * all[1][0][0].first[1].told;
        assert!(text.contains("| business | 2 % | 10 | ") && text.contains(&format!("| {told:.2} |")));
    }

    #[test]
    fn rejects_invalid_arguments() {
        let mut unknown = args(&["--seeds", "0"]);
        assert!(run(&unknown).unwrap_err().to_string().contains("name a trace"));
        unknown.policy = "clairvoyant".into();
        assert!(run(&unknown).unwrap_err().to_string().contains("choose one of fifo"));
        assert!(LabArgs::try_parse_from(["kvfleet-lab", "joins", "--capacities", "0"]).is_err());
        assert!(LabArgs::try_parse_from(["kvfleet-lab", "joins", "--nodes", "0"]).is_err());
    }
}
