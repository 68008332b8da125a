//! A crosscheck as text: both sides next to each other, and how far their decisions agree.
//!
//! `compare.rs` computes the comparison.

use std::fmt::Write;

use super::compare::{DecisionAgreement, DisagreementCounts, POINTS_MAX, RunComparison, Timing, mean_points};

/// The text of one run.
pub(super) fn run_text(comparison: &RunComparison) -> String {
    let RunComparison { traffic, seed, requests, instances, nodes, routers, .. } = comparison;
    let mut text = format!(
        "{traffic}, seed {seed}, {requests} requests; {routers} routers, {nodes} nodes, {instances} \
         instances, profile {}",
        comparison.profile
    );
    let _ = match (comparison.load, comparison.per_s) {
        (Some(load), Some(per_s)) => writeln!(
            text,
            " at {} times its time, {:.0} % load ({per_s:.1} requests/s, sent at most {:.1} ms late)",
            comparison.time_scale,
            load * 100.0,
            comparison.late_ms
        ),
        _ => writeln!(text, ", in lockstep"),
    };
    let _ = writeln!(
        text,
        "{:<22} {:>9} {:>13} {:>11} {:>9}",
        "prompt tokens", "real", "virtual time", "difference", "led"
    );
    let shares = comparison.real.all().into_iter().zip(comparison.virtual_time.all());
    for (((name, here), (_, there)), (_, led)) in shares.zip(comparison.led_shares.all()) {
        let _ =
            writeln!(text, "  {name:<20} {here:>7.2} % {there:>11.2} % {:>+11.2} {led:>7.2} %", here - there);
    }
    if let Some(sides) = comparison.ttft {
        text += &timing_text(&sides, comparison.slower, comparison.delivery_ms);
    }
    text += &agreement_text("decisions of the fleet in virtual time", &comparison.alone);
    if !comparison.lockstep || comparison.alone != comparison.led {
        text += &agreement_text("led by the real fleet", &comparison.led);
    }
    if comparison.unserved != [0, 0] {
        let [here, there] = comparison.unserved;
        let _ = writeln!(text, "not served: {here} in the real fleet, {there} in virtual time");
    }
    for trouble in &comparison.troubles {
        let _ = writeln!(text, "in the real fleet: {trouble}");
    }
    let _ = writeln!(text, "the largest difference of a share is {:.2} points\n", comparison.points);
    text
}

fn timing_text(sides: &[Timing; 3], prefill_ratio: f64, delivery_ms: f64) -> String {
    let percent = |share: f64| format!("{:+.1} %", share * 100.0);
    let [here, there, led] = sides.map(|side| format!("{:.1} ms", side.mean_ms));
    let mut text = format!("  {:<20} {here:>9} {there:>13} {led:>11} led\n", "mean TTFT");
    let mut row = |name: &str, of: [f64; 3]| {
        let [here, there, led] = of.map(percent);
        let _ = writeln!(text, "  {name:<20} {here:>9} {there:>13} {led:>11} led");
    };
    row("prediction error", sides.map(|side| side.error));
    row("prediction bias", sides.map(|side| side.bias));
    let _ = writeln!(
        text,
        "  in the real fleet prefills took {prefill_ratio:.2} times the profile's time, and requests reached \
         the instance {delivery_ms:.1} ms after the decision; the simulated fleet uses the same values"
    );
    text
}

fn agreement_text(label: &str, agreement: &DecisionAgreement) -> String {
    let &DecisionAgreement { decided, instance, whole, why, later_ms, apart_ms, later, ref first } =
        agreement;
    let mut text = format!(
        "{label}: {instance} of {decided} sent to the same instance ({:.1} %), {whole} identical in everything\n",
        percent(instance, decided)
    );
    let DisagreementCounts { left_out, blocks, tie, predicted } = why;
    if instance < decided {
        let _ = writeln!(
            text,
            "  others: {predicted} by different predictions, {blocks} by different known blocks, {tie} were \
             ties, {left_out} by instances left out"
        );
        let _ = writeln!(
            text,
            "  first tokens were predicted {later_ms:+.1} ms later in the real fleet ({:+.1} waiting, {:+.1} \
             transfer, {:+.1} prefill), and {apart_ms:.1} ms apart in absolute terms, over all instances",
            later.queue, later.transfer, later.prefill
        );
    }
    if let Some(first) = first {
        let _ = writeln!(text, "  first difference: {first}");
    }
    text
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// The differences over all runs, and whether they are within the limit.
pub(super) fn verdict_text(all: &[RunComparison]) -> String {
    let mut text = String::new();
    if all.len() > 1 {
        let _ = writeln!(text, "{} runs: mean, minimum and maximum", all.len());
        for at in 0..all[0].real.all().len() {
            let of = |compared: &RunComparison| compared.real.differences(&compared.virtual_time)[at].1;
            let _ = writeln!(text, "  {:<20} {} points", all[0].real.all()[at].0, statistics(all, of));
        }
        let alone = |compared: &RunComparison| percent(compared.alone.instance, compared.alone.decided);
        let led = |compared: &RunComparison| percent(compared.led.instance, compared.led.decided);
        let _ = writeln!(text, "  {:<20} {} % of decisions", "same instance", statistics(all, alone));
        let _ = writeln!(text, "  {:<20} {} % of decisions", "led by the real fleet", statistics(all, led));
    }
    let _ = writeln!(
        text,
        "{}: the largest mean difference of a share is {:.2} points, and the limit is {POINTS_MAX}{}",
        if super::is_within_limits(all) { "alike" } else { "not alike" },
        mean_points(all),
        if all.iter().all(RunComparison::is_sound) {
            ""
        } else {
            "; not every request was served, or decisions in lockstep differ"
        },
    );
    text
}

fn statistics(all: &[RunComparison], of: impl Fn(&RunComparison) -> f64) -> String {
    let values: Vec<f64> = all.iter().map(of).collect();
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{mean:.2} ({least:.2} to {most:.2})")
}
