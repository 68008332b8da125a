//! `kvfleet trace stats`: the characteristics of a trace as tables or JSON, with plots.
//!
//! `kvfleet_sim::stats` computes them and `plots.rs` draws them.

use std::fmt::Write;
use std::fs::File;
use std::io::BufReader;

use kvfleet_sim::stats::curve::{CapacityPoint, OPTIMAL, SHARES, capacity_curve};
use kvfleet_sim::stats::published::{Claim, compare};
use kvfleet_sim::stats::{Characteristics, ReuseTimes, characterise};
use kvfleet_sim::trace::{Request, Skipped};
use serde::Serialize;

use super::{open_trace, plots, skipped_text};
use crate::args::StatsArgs;

/// Rows of reuse times shown per category; the JSON holds all of them.
const CATEGORIES_SHOWN: usize = 8;

/// Everything reported about a trace.
#[derive(Debug, Serialize)]
pub(super) struct TraceStats {
    pub(super) file: String,
    pub(super) skipped_lines: u64,
    pub(super) skipped_lines_by_reason: Skipped,
    pub(super) characteristics: Characteristics,
    pub(super) capacity_curve: Vec<CapacityPoint>,
    /// The published numbers of the kind named with `--compare`.
    pub(super) published: Vec<Claim>,
}

/// Reads the trace and prints its characteristics.
pub(super) fn run(args: &StatsArgs) -> anyhow::Result<()> {
    let (requests, skipped) = read_all(args)?;
    let stats = trace_stats(args, &requests, skipped);
    if let Some(directory) = &args.plots {
        for file in plots::draw_all(directory, &stats)? {
            eprintln!("wrote {}", file.display());
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&stats)?);
    } else {
        print!("{}", render(&stats));
    }
    Ok(())
}

fn read_all(args: &StatsArgs) -> anyhow::Result<(Vec<Request>, Skipped)> {
    let path = args.file.display();
    let file = File::open(&args.file)
        .map_err(|cause| anyhow::anyhow!("cannot read {path}: {cause}; give the path of a trace"))?;
    let mut reader = open_trace(BufReader::new(file), args.format, args.lenient);
    let mut requests = vec![];
    while args.limit.is_none_or(|limit| requests.len() < limit) {
        let Some(request) = reader.next() else { break };
        requests.push(request.map_err(|error| anyhow::anyhow!("{path}: {error}"))?);
    }
    if requests.is_empty() {
        let skipped = skipped_text(reader.skipped());
        anyhow::bail!(
            "{path}: no request to characterise, skipped lines: {skipped}; give a trace, and its format with --format"
        );
    }
    Ok((requests, reader.skipped().clone()))
}

fn trace_stats(args: &StatsArgs, requests: &[Request], skipped: Skipped) -> TraceStats {
    let characteristics = characterise(requests.iter().cloned());
    let policies: Vec<&str> = kv_core::evict::NAMES.iter().copied().chain([OPTIMAL]).collect();
    TraceStats {
        file: args.file.display().to_string(),
        skipped_lines: skipped.values().sum(),
        skipped_lines_by_reason: skipped,
        capacity_curve: capacity_curve(
            requests,
            characteristics.unique_blocks,
            &policies,
            &SHARES,
            args.seed,
        ),
        published: args.compare.map(|kind| compare(kind, &characteristics)).unwrap_or_default(),
        characteristics,
    }
}

/// The tables. Writing to a string cannot fail, so results of `writeln` are dropped.
fn render(stats: &TraceStats) -> String {
    let mut out = String::new();
    overview(&mut out, stats);
    reuse_table(&mut out, &stats.characteristics);
    kinds_table(&mut out, &stats.characteristics);
    capacity_table(&mut out, &stats.capacity_curve);
    published_table(&mut out, &stats.published);
    out
}

fn overview(out: &mut String, stats: &TraceStats) {
    let of = &stats.characteristics;
    let _ = writeln!(out, "{}", stats.file);
    let _ = writeln!(out, "  requests          {} in {:.0} s", of.requests, of.duration_s);
    if stats.skipped_lines > 0 {
        let _ = writeln!(out, "  skipped lines     {}", skipped_text(&stats.skipped_lines_by_reason));
    }
    let _ = writeln!(
        out,
        "  blocks            {} of {} tokens, {} unique",
        of.block_accesses, of.block_tokens, of.unique_blocks
    );
    let _ = writeln!(out, "  ideal hit rate    {:.2} %  ({} hits)", 100.0 * of.ideal_hit_rate, of.ideal_hits);
    let _ = writeln!(
        out,
        "  skew              {:.1} % of reuses fall to 10 % of the blocks",
        100.0 * of.reuse_share_of_top_tenth
    );
    let _ = writeln!(out, "  used once         {:.1} % of the blocks", 100.0 * of.used_once);
    let _ = writeln!(
        out,
        "  life of a block   P50 {:.1} s  P90 {:.1} s  P99 {:.1} s",
        of.life.p50_s, of.life.p90_s, of.life.p99_s
    );
    if let Some(turns) = &of.turns {
        let _ = writeln!(
            out,
            "  turns             P50 {}  P90 {}  max {}; another after the first {:.0} %, after later ones {:.0} %",
            turns.p50,
            turns.p90,
            turns.max,
            100.0 * turns.next_after_first,
            100.0 * turns.next_after_later
        );
    }
}

fn reuse_table(out: &mut String, of: &Characteristics) {
    let _ = writeln!(
        out,
        "\nreuse time        turn  reuses     mean s    P50 s    P90 s   <10 s  <10 min  fit off by"
    );
    let mut rows: Vec<&ReuseTimes> = of.reuse_by_category.iter().collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.reuses));
    for row in std::iter::once(&of.reuse).chain(rows.into_iter().take(CATEGORIES_SHOWN)) {
        let turn = if row.turn == 0 { "-".to_owned() } else { row.turn.to_string() };
        let _ = writeln!(
            out,
            "  {:15} {turn:>4}  {:<9} {:>7.1} {:>8.1} {:>8.1} {:>6.1}% {:>7.1}% {:>10.2}",
            row.kind,
            row.reuses,
            row.mean_s,
            row.percentiles.p50_s,
            row.percentiles.p90_s,
            100.0 * row.within_10_s,
            100.0 * row.within_10_min,
            row.fit_distance
        );
    }
}

fn kinds_table(out: &mut String, of: &Characteristics) {
    let _ = writeln!(out, "\ntype              requests  share   multi-turn  share of hits");
    for kind in of.kinds.iter().filter(|kind| kind.requests > 0) {
        let _ = writeln!(
            out,
            "  {:15} {:<9} {:>5.1}% {:>10.1}% {:>13.1}%",
            kind.kind,
            kind.requests,
            100.0 * kind.share,
            100.0 * kind.multi_turn,
            100.0 * kind.share_of_hits
        );
    }
}

fn capacity_table(out: &mut String, points: &[CapacityPoint]) {
    let _ = write!(out, "\nhit rate at capacity (share of unique blocks)\n  {:15}", "policy");
    for share in SHARES {
        let _ = write!(out, " {:>7}", format!("{:.0} %", 100.0 * share));
    }
    out.push('\n');
    for row in points.chunks(SHARES.len()) {
        let _ = write!(out, "  {:15}", row.first().map_or("", |point| &point.policy));
        for point in row {
            let _ = write!(out, " {:>7.2}", 100.0 * point.hit_rate);
        }
        out.push('\n');
    }
}

fn published_table(out: &mut String, claims: &[Claim]) {
    if claims.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{:42} {:>10} {:>10} {:>10}", "published", "there", "here", "off by");
    for claim in claims {
        let _ = writeln!(
            out,
            "  {:40} {:>10.2} {:>10.2} {:>+10.2}",
            claim.what,
            claim.published,
            claim.measured,
            claim.difference()
        );
    }
}
