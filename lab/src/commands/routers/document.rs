//! The document: a summary against the best of the other routers, plots, a table for each fleet,
//! and goodput under overload.
//!
//! `mod.rs` runs the measurements.

use std::fmt::Write;

use kvfleet_sim::routers::FetchScope;

use crate::routers::{BASELINES, Comparison, GoodputResult, LatencyLimits, RouterResult, median_and_range};

use super::plot::{groups, title};
use super::{ComparisonRow, OverloadRow, PLOTS, RunSettings};

fn goodput_text(all: &[OverloadRow]) -> String {
    let mut text = String::new();
    for OverloadRow { traffic, requests, instances, goodput, .. } in all {
        let limits = match goodput.limits {
            LatencyLimits::Equal { ttft_ms, tbt_ms } => {
                format!("TTFT within {ttft_ms} ms, and a mean time between tokens within {tbt_ms} ms")
            }
            LatencyLimits::Alone { ttft, tbt } => format!(
                "TTFT within {ttft} times that of a request alone on an instance without cached blocks, and \
                 a mean time between tokens within {tbt} times that of such a request"
            ),
        };
        let _ = writeln!(
            text,
            "\n## {traffic}, {requests} requests, {instances} instances, {:.0} % load: requests in \
             time\n\nIn time: {limits}. The other routers reject requests with predictions above a share of \
             either limit: the best for this load of six shares of the TTFT limit, each also with two shares \
             of the other limit if tokens otherwise come too far apart. The production scheduler serves {} \
             times as many requests in time as the best of them, and {} times as many as the best of those \
             that limit TTFT alone.\n",
            goodput.load * 100.0,
            ratio_text(goodput.all_ratios().map(|of| of.0), 3),
            ratio_text(goodput.all_ratios().map(|of| of.1), 3),
        );
        text += "| router | turns away above | between tokens | in time | turned away | mean TTFT | P99 | \
            tokens too far apart | longest tenth in time |\n";
        text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for good in std::iter::once(&goodput.production).chain(&goodput.baselines) {
            let GoodputResult { router, threshold, pace, in_time, rejected, ttft, slow, long_in_time } = good;
            let [share, pace] = [threshold, pace]
                .map(|share| share.map_or_else(|| "-".to_owned(), |share| format!("{share}")));
            let _ = writeln!(
                text,
                "| {router} | {share} | {pace} | {:.2} % | {:.2} % | {:.0} ms | {:.0} ms | {:.2} % | {:.1} % |",
                in_time * 100.0,
                rejected * 100.0,
                ttft.mean_ms,
                ttft.p99_ms,
                slow * 100.0,
                long_in_time * 100.0,
            );
        }
    }
    text
}

const HEAD: &str = "# Routers

Written by `cargo xtask routers`; do not edit. The production scheduler and ten others, each
implemented after its published description (`lab/src/routers/`), on equal simulated fleets
(`sim/src/fleet/`): continuous batching with chunked prefill, GPU memory with a prefix cache, nodes
with production tiers and policies, transfer lanes with queues, and reports that arrive as late as
in production. Nothing below is measured on a GPU. `kvfleet crosscheck` shows that simulated
routers, nodes and emulated instances decide as real processes do and reach the same hit rates
(`docs/adr/0069-crosscheck-simulation.md`); batching, decoding and GPU memory have no real
counterpart there. Traffic named after its kind is generated (`kvfleet trace gen`).

Under the other routers, instances fetch from their *own* node, as engines with a tier in host
memory do (Mooncake's router moves the longest prefix where that pays off), or from a *pool* of all
nodes, as under the production scheduler, so that routers differ only in where they send requests.
In both cases the production planner decides how much an instance fetches. Under the production
scheduler, instances serve waiting requests by its priority, shorter prompts sooner
(`core/src/schedule/fairness/priority_deadline.rs`); under the others, which define no order, and in
the lines *in order of coming*, they serve them in order of arrival. Load is a share of the highest
rate at which the fleet with a pool keeps up when each request goes to the least loaded instance,
that is, at which no first token comes long after the last arrival. A recorded trace of an hour is
served in one copy for every four instances; where fewer requests are named than it has (12,031),
each copy consists of its first ones. At 5 % load almost no request queues (except on four
instances, behind prompts of several seconds), and nearly all remaining time is unavoidable compute
and transfer: the mean there is close to the best that routing can achieve.
";

/// Where the rest is, in the summary.
const WITHOUT_FLEETS: &str = "\
This is the summary. `cargo xtask routers --full DIR` writes the document with all routers of each
fleet and with plots; it is not in the repository. The rows of all runs are in `lab/rows/`.

";

/// Above the table of the summary.
const POINTS: &str = "\
## Against the best of the others at each point

TTFT of the production scheduler over the least of the ten, for the mean and for P90. If a ratio has
two more in brackets, it is the median of several runs, with the least and the greatest, at rates
within a hundredth of the load and with other seeds of randomised routers. Times are of the load
itself.

";

/// Above the table of overloads in the summary.
const OVERLOADS: &str = "
## Requests in time above the capacity

Shares of the offered requests that met both limits: time to first token, and mean time between
tokens. × means multiples of the times of a request alone on an instance without cached blocks. The
other routers reject requests with predictions above the thresholds that are best for this load. The
last column is the ratio to the best of those that limit TTFT alone.

";

/// The median with minimum and maximum if there are several draws, otherwise the only value.
fn ratio_text(all: impl Iterator<Item = f64>, places: usize) -> String {
    let all: Vec<f64> = all.collect();
    let [median, least, greatest] = median_and_range(all.iter().copied());
    match all.len() {
        1 => format!("{median:.places$}"),
        _ => format!("{median:.places$} ({least:.places$}–{greatest:.places$})"),
    }
}

/// The whole document.
pub(super) fn render(rows: &[ComparisonRow], beyond: &[OverloadRow], terms: &RunSettings) -> String {
    let mut text = summary(rows, terms);
    tables(&mut text, rows);
    text + &goodput_text(beyond)
}

/// The text above all tables.
fn head(terms: &RunSettings) -> String {
    let RunSettings { profile, seed } = terms;
    format!("{HEAD}\nProfile `{profile}`, seed {seed}.\nBaselines: {}.\n\n", BASELINES.join(", "))
}

/// The document of ratios alone, without the table and the plot of each fleet.
pub(super) fn render_summary(rows: &[ComparisonRow], beyond: &[OverloadRow], terms: &RunSettings) -> String {
    let mut text = head(terms);
    text += WITHOUT_FLEETS;
    text += POINTS;
    text += "| traffic | requests | instances | others fetch from | load | mean | best other | ratio | P90 | \
        ratio of P90 |\n";
    text += "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |\n";
    for ComparisonRow { traffic, requests, instances, plane: from, compared, .. } in rows {
        let best = compared.baselines.first();
        let (name, best_mean) = best.map_or(("none", 0.0), |best| (best.router.as_str(), best.ttft.mean_ms));
        let _ = writeln!(
            text,
            "| {traffic} | {requests} | {instances} | {} | {:.0} % | {:.0} ms | {name} {best_mean:.0} ms | \
             {} | {:.0} ms | {} |",
            plane(*from),
            compared.load * 100.0,
            compared.production.ttft.mean_ms,
            ratio_text(compared.all_ratios().map(|of| of.0), 2),
            compared.production.ttft.p90_ms,
            ratio_text(compared.all_ratios().map(|of| of.1), 2),
        );
    }
    if !beyond.is_empty() {
        goodput_summary(&mut text, beyond);
    }
    text
}

fn goodput_summary(text: &mut String, beyond: &[OverloadRow]) {
    *text += OVERLOADS;
    *text += "| traffic | requests | instances | load | limits | in time | turned away | best other | its \
        share | ratio | by TTFT alone |\n";
    *text += "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |\n";
    for OverloadRow { traffic, requests, instances, goodput, .. } in beyond {
        let limits = match goodput.limits {
            LatencyLimits::Equal { ttft_ms, tbt_ms } => format!("{ttft_ms} ms, {tbt_ms} ms"),
            LatencyLimits::Alone { ttft, tbt } => format!("{ttft} ×, {tbt} ×"),
        };
        let best = goodput.baselines.first();
        let (name, share) = best.map_or(("none", 0.0), |best| (best.router.as_str(), best.in_time * 100.0));
        let _ = writeln!(
            text,
            "| {traffic} | {requests} | {instances} | {:.0} % | {limits} | {:.2} % | {:.2} % | {name} | \
             {share:.2} % | {} | {} |",
            goodput.load * 100.0,
            goodput.production.in_time * 100.0,
            goodput.production.rejected * 100.0,
            ratio_text(goodput.all_ratios().map(|of| of.0), 3),
            ratio_text(goodput.all_ratios().map(|of| of.1), 3),
        );
    }
}

fn summary(rows: &[ComparisonRow], terms: &RunSettings) -> String {
    let mut text = head(terms);
    text += "## Against the best of the others at each point\n\nTTFT of the production scheduler over the \
        least of the ten, for the mean and for P90. One run is one draw: where a ratio has two more in \
        brackets it is the median of several, with the least and the greatest, at rates within a hundredth \
        of the load and with other seeds of routers that draw. Times are of the load itself.\n\n";
    text += "| traffic | requests | instances | others fetch from | load | mean | best other | ratio | next \
        best | ratio | P90 | ratio of P90 | mean in order of coming | P99 | least P99 of others | prompt \
        tokens not computed | the most of others |\n";
    text += "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | \
        ---: | ---: | ---: |\n";
    for row in rows {
        let Comparison { load, production, in_order_of_coming, baselines, .. } = &row.compared;
        let mean = ratio_text(row.compared.all_ratios().map(|of| of.0), 2);
        let p90 = ratio_text(row.compared.all_ratios().map(|of| of.1), 2);
        let best = baselines.first();
        let (name, best_mean) = best.map_or(("none", 0.0), |best| (best.router.as_str(), best.ttft.mean_ms));
        let own_mean = production.ttft.mean_ms;
        let second = baselines.get(1).map_or_else(String::new, |second| {
            format!("{} {:.0} ms | {:.2}", second.router, second.ttft.mean_ms, own_mean / second.ttft.mean_ms)
        });
        let least_p99 = baselines.iter().map(|point| point.ttft.p99_ms).fold(f64::INFINITY, f64::min);
        let most = baselines.iter().map(|point| point.saved).fold(0.0, f64::max);
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {:.0} % | {:.0} ms | {name} {best_mean:.0} ms | {mean} | {second} | {:.0} \
             ms | {p90} | {:.0} ms | {:.0} ms | {least_p99:.0} ms | {:.1} % | {:.1} % |",
            row.traffic,
            row.requests,
            row.instances,
            plane(row.plane),
            load * 100.0,
            production.ttft.mean_ms,
            production.ttft.p90_ms,
            in_order_of_coming.ttft.mean_ms,
            production.ttft.p99_ms,
            production.saved * 100.0,
            most * 100.0,
        );
    }
    for (name, rows) in groups(rows) {
        let _ = writeln!(text, "\n![{}]({PLOTS}/{name}.svg)", title(&rows));
    }
    text
}

fn tables(text: &mut String, rows: &[ComparisonRow]) {
    for row in rows {
        let ComparisonRow { traffic, instances, plane: from, compared, .. } = row;
        let (share, from) = (compared.load * 100.0, plane(*from));
        let title = format!("{traffic}, {instances} instances, {share:.0} % load, others fetch from {from}");
        let _ = writeln!(
            text,
            "\n## {title}\n\n{:.2} requests/s are all that the fleet gets through.\n",
            row.capacity_per_s
        );
        *text += "| router | mean | P50 | P90 | P99 | TBT | saved | fetched blocks | error of prediction | bias |\n";
        *text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        let Comparison { production, in_order_of_coming, baselines, .. } = &row.compared;
        for point in [production, in_order_of_coming].into_iter().chain(baselines) {
            point_row(text, point);
        }
    }
}

pub(super) fn plane(plane: FetchScope) -> &'static str {
    match plane {
        FetchScope::Own => "own",
        FetchScope::Pool => "pool",
    }
}

fn point_row(text: &mut String, point: &RouterResult) {
    let RouterResult { router, ttft, tbt_ms, saved, fetched_blocks, prediction: (error, bias), .. } = point;
    let _ = writeln!(
        text,
        "| {router} | {:.0} ms | {:.0} ms | {:.0} ms | {:.0} ms | {tbt_ms:.1} ms | {:.1} % | \
         {fetched_blocks} | {:.0} % | {:+.0} % |",
        ttft.mean_ms,
        ttft.p50_ms,
        ttft.p90_ms,
        ttft.p99_ms,
        saved * 100.0,
        error * 100.0,
        bias * 100.0,
    );
}
