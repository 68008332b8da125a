//! The document: a summary against the best of the others, plots, a table for each fleet, and what was served in time.
//!
//! Not here: what is measured (`mod.rs`).

use std::fmt::Write;

use kvfleet_sim::routers::{BASELINES, Comparison, Good, Limits, Plane, Point, spread};

use super::plot::{groups, title};
use super::{Overload, PLOTS, Row, Terms};

fn in_time_text(all: &[Overload]) -> String {
    let mut text = String::new();
    for Overload { traffic, requests, instances, goodput, .. } in all {
        let limits = match goodput.limits {
            Limits::Equal { ttft_ms, tbt_ms } => {
                format!("the first token within {ttft_ms} ms, the others {tbt_ms} ms apart on average")
            }
            Limits::Alone { ttft, tbt } => format!(
                "the first token within {ttft} times what it takes a request that is alone on an instance without anything of its prompt, the others {tbt} times as far apart on average as its tokens would be"
            ),
        };
        let _ = writeln!(
            text,
            "\n## {traffic}, {requests} requests, {instances} instances, {:.0} % load: requests in time\n\nIn time: {limits}. The others turn away what is predicted above a share of either limit, the best for this load of six shares of the first, each with two of the other besides where tokens come too far apart without. {} of the best of them, and {} of the best of those that look at first tokens alone.\n",
            goodput.load * 100.0,
            ratio(goodput.all_ratios().map(|of| of.0), 3),
            ratio(goodput.all_ratios().map(|of| of.1), 3),
        );
        text += "| router | turns away above | between tokens | in time | turned away | mean TTFT | P99 | tokens too far apart | longest tenth in time |\n";
        text += "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for good in std::iter::once(&goodput.production).chain(&goodput.baselines) {
            let Good { router, threshold, pace, in_time, rejected, ttft, slow, long_in_time } = good;
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

Written by `cargo xtask routers`; do not edit. The production scheduler and ten others, each after its published description
(`sim/src/routers/`), on equal fleets in virtual time (`sim/src/fleet/`): continuous batching with chunked prefill, GPU memory with a prefix
cache, nodes with production tiers and policies, lanes with queues, word of all of it as late as it comes. Nothing below is measured on a GPU.
That routers, nodes and stand-in instances in it decide as real processes do, and hit as much, `kvfleet crosscheck` shows (`docs/adr/0069-held-against-real-processes.md`);
batching, decoding and GPU memory have no real counterpart there.
Traffic that is called by its kind is generated (`kvfleet trace gen`).

The others fetch from their *own* node, as engines with a tier in their host's memory do (Mooncake's moves the longest prefix where it is worth it), or
from a *pool* of all nodes, as the production scheduler does, so that routers differ by where they send and nothing else. In either case how much an
instance fetches is planned by the production planner. Instances begin what waits in the order of the production scheduler's turns, the shorter prompts
sooner (`core/src/schedule/turn.rs`); under the others, which have no such order, and in the lines *in order of coming*, in that. Load is a share of what the
fleet with a pool keeps up with when the least loaded instance takes each request: nobody waits for a first token far beyond the last arrival. A recorded trace of an hour is served in one copy for every four instances;
where fewer requests are named than it has (12,031), each copy is of its first ones. At 5 % load hardly anybody waits (on four instances, behind prompts of seconds), and nearly all that is left is computing and moving what nobody can avoid: the mean there is what choosing can come near to and not go much below.
";

/// Of several draws the median with the least and the greatest, or the only one.
fn ratio(all: impl Iterator<Item = f64>, places: usize) -> String {
    let all: Vec<f64> = all.collect();
    let [median, least, greatest] = spread(all.iter().copied());
    match all.len() {
        1 => format!("{median:.places$}"),
        _ => format!("{median:.places$} ({least:.places$}–{greatest:.places$})"),
    }
}

/// All of it.
pub(super) fn render(rows: &[Row], beyond: &[Overload], terms: &Terms) -> String {
    let mut text = summary(rows, terms);
    tables(&mut text, rows);
    text + &in_time_text(beyond)
}

fn summary(rows: &[Row], terms: &Terms) -> String {
    let mut text = HEAD.to_owned();
    let _ = writeln!(
        text,
        "\nProfile `{}`, seed {}, baselines: {}.\n",
        terms.profile,
        terms.seed,
        BASELINES.join(", ")
    );
    text += "## Against the best of the others at each point\n\nTTFT of the production scheduler over the least of the ten, for the mean and for P90. One run is one draw: where a ratio has two more in brackets it is the median of several, with the least and the greatest, at rates within a hundredth of the load and with other seeds of routers that draw. Times are of the load itself.\n\n";
    text += "| traffic | requests | instances | others fetch from | load | mean | best other | ratio | next best | ratio | P90 | ratio of P90 | mean in order of coming | P99 | least P99 of others | prompt tokens not computed | the most of others |\n";
    text += "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for row in rows {
        let Comparison { load, production, in_order_of_coming, baselines, .. } = &row.compared;
        let mean = ratio(row.compared.all_ratios().map(|of| of.0), 2);
        let p90 = ratio(row.compared.all_ratios().map(|of| of.1), 2);
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
            "| {} | {} | {} | {} | {:.0} % | {:.0} ms | {name} {best_mean:.0} ms | {mean} | {second} | {:.0} ms | {p90} | {:.0} ms | {:.0} ms | {least_p99:.0} ms | {:.1} % | {:.1} % |",
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

fn tables(text: &mut String, rows: &[Row]) {
    for row in rows {
        let Row { traffic, instances, plane: from, compared, .. } = row;
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
            line(text, point);
        }
    }
}

pub(super) fn plane(plane: Plane) -> &'static str {
    match plane {
        Plane::Own => "own",
        Plane::Pool => "pool",
    }
}

fn line(text: &mut String, point: &Point) {
    let Point { router, ttft, tbt_ms, saved, fetched_blocks, prediction: (error, bias), .. } = point;
    let _ = writeln!(
        text,
        "| {router} | {:.0} ms | {:.0} ms | {:.0} ms | {:.0} ms | {tbt_ms:.1} ms | {:.1} % | {fetched_blocks} | {:.0} % | {:+.0} % |",
        ttft.mean_ms,
        ttft.p50_ms,
        ttft.p90_ms,
        ttft.p99_ms,
        saved * 100.0,
        error * 100.0,
        bias * 100.0,
    );
}
