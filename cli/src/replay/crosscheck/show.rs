//! A crosscheck as text: the two sides beside each other, and how far decisions agree.
//!
//! Not here: the comparison (`compare.rs`).

use std::fmt::Write;

use super::compare::{Agreement, Compared, POINTS_MAX, Timing, Why, points};

/// One run.
pub(super) fn run(compared: &Compared) -> String {
    let Compared { traffic, seed, requests, instances, nodes, routers, .. } = compared;
    let mut text = format!(
        "{traffic}, seed {seed}, {requests} requests; {routers} routers, {nodes} nodes, {instances} instances, profile {}",
        compared.profile
    );
    let _ = match (compared.load, compared.per_s) {
        (Some(load), Some(per_s)) => writeln!(
            text,
            " at {} times its time, {:.0} % load ({per_s:.1} requests/s, sent {:.1} ms late at most)",
            compared.time_scale,
            load * 100.0,
            compared.late_ms
        ),
        _ => writeln!(text, ", in lockstep"),
    };
    let _ = writeln!(
        text,
        "{:<22} {:>9} {:>13} {:>11} {:>9}",
        "tokens of prompts", "real", "virtual time", "difference", "led"
    );
    let shares = compared.real.all().into_iter().zip(compared.virtual_time.all());
    for (((name, here), (_, there)), (_, led)) in shares.zip(compared.led_shares.all()) {
        let _ =
            writeln!(text, "  {name:<20} {here:>7.2} % {there:>11.2} % {:>+11.2} {led:>7.2} %", here - there);
    }
    if let Some(sides) = compared.ttft {
        text += &timings(&sides, compared.slower, compared.delivery_ms);
    }
    text += &agreement("decisions of the fleet in virtual time", &compared.alone);
    if !compared.lockstep || compared.alone != compared.led {
        text += &agreement("led by the real one", &compared.led);
    }
    if compared.unserved != [0, 0] {
        let [here, there] = compared.unserved;
        let _ = writeln!(text, "not served: {here} really, {there} in virtual time");
    }
    for trouble in &compared.troubles {
        let _ = writeln!(text, "in the real fleet: {trouble}");
    }
    let _ = writeln!(text, "the share that differs most does by {:.2} points\n", compared.points);
    text
}

fn timings(sides: &[Timing; 3], slower: f64, delivery_ms: f64) -> String {
    let percent = |share: f64| format!("{:+.1} %", share * 100.0);
    let [here, there, led] = sides.map(|side| format!("{:.1} ms", side.mean_ms));
    let mut text = format!("  {:<20} {here:>9} {there:>13} {led:>11} led\n", "mean TTFT");
    let mut row = |name: &str, of: [f64; 3]| {
        let [here, there, led] = of.map(percent);
        let _ = writeln!(text, "  {name:<20} {here:>9} {there:>13} {led:>11} led");
    };
    row("predictions off by", sides.map(|side| side.error));
    row("and in sum by", sides.map(|side| side.bias));
    let _ = writeln!(
        text,
        "  in the real fleet prefills took {slower:.2} times what the profile says, and requests {delivery_ms:.1} ms from a decision to the instance; so they do in the other"
    );
    text
}

fn agreement(whose: &str, agreement: &Agreement) -> String {
    let &Agreement { decided, instance, whole, why, later_ms, apart_ms, later, ref first } = agreement;
    let mut text = format!(
        "{whose}: {instance} of {decided} send to the same instance ({:.1} %), of {whole} all is the same\n",
        percent(instance, decided)
    );
    let Why { left_out, blocks, tie, predicted } = why;
    if instance < decided {
        let _ = writeln!(
            text,
            "  others: {predicted} since other times were predicted, {blocks} since other blocks were known, {tie} were ties, {left_out} since instances were left out"
        );
        let _ = writeln!(
            text,
            "  first tokens were predicted {later_ms:+.1} ms later really ({:+.1} waiting, {:+.1} transfer, {:+.1} prefill), and {apart_ms:.1} ms apart, over all instances",
            later.queue, later.transfer, later.prefill
        );
    }
    if let Some(first) = first {
        let _ = writeln!(text, "  first: {first}");
    }
    text
}

fn percent(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// What differs over all runs, and whether that is little enough.
pub(super) fn verdict(all: &[Compared]) -> String {
    let mut text = String::new();
    if all.len() > 1 {
        let _ = writeln!(text, "{} runs: mean, least and greatest", all.len());
        for at in 0..all[0].real.all().len() {
            let of = |compared: &Compared| compared.real.differences(&compared.virtual_time)[at].1;
            let _ = writeln!(text, "  {:<20} {} points", all[0].real.all()[at].0, line(all, of));
        }
        let alone = |compared: &Compared| percent(compared.alone.instance, compared.alone.decided);
        let led = |compared: &Compared| percent(compared.led.instance, compared.led.decided);
        let _ = writeln!(text, "  {:<20} {} % of decisions", "same instance", line(all, alone));
        let _ = writeln!(text, "  {:<20} {} % of decisions", "led by the real one", line(all, led));
    }
    let _ = writeln!(
        text,
        "{}: the share that differs most does by {:.2} points, and {POINTS_MAX} is the limit{}",
        if super::is_alike(all) { "alike" } else { "not alike" },
        points(all),
        if all.iter().all(Compared::is_sound) {
            ""
        } else {
            "; not all was served, or decided alike without time"
        },
    );
    text
}

fn line(all: &[Compared], of: impl Fn(&Compared) -> f64) -> String {
    let values: Vec<f64> = all.iter().map(of).collect();
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{mean:.2} ({least:.2} to {most:.2})")
}
