//! The table printed at the end of a replay.

use std::fmt::Write;

use super::json::{FaultEntry, Latency, Memory, PathTraffic, PredictionError, Report};
use super::plots::human_bytes;
use crate::trace::skipped_text;

/// Width of the first column in characters.
const LABEL_CHARS: usize = 16;

/// The table. Only if `verbose`, it names the path that each instance uses to each node, with the
/// reason.
pub(super) fn render(report: &Report, verbose: bool) -> String {
    let mut out = String::new();
    request_rows(&mut out, report);
    path_rows(&mut out, report, verbose);
    memory_rows(&mut out, report);
    block_rows(&mut out, report);
    time_rows(&mut out, report);
    prefill_rows(&mut out, report);
    fault_rows(&mut out, report);
    modelled_rows(&mut out, report);
    out
}

fn row(out: &mut String, label: &str, text: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "  {label:LABEL_CHARS$} {text}");
}

fn request_rows(out: &mut String, report: &Report) {
    let _ = writeln!(out, "measured");
    let mut text = format!(
        "{} of {} ended in {:.1} s ({:.0}/s)",
        report.requests_ended, report.requests, report.wall_s, report.requests_per_s
    );
    if report.requests_failed > 0 {
        let _ = write!(text, ", {} FAILED", report.requests_failed);
    }
    if report.interrupted {
        text.push_str(", interrupted");
    }
    row(out, "requests", &text);
    if report.config.skipped_lines > 0 {
        row(out, "  skipped lines", &skipped_text(&report.config.skipped_lines_by_reason));
    }
    for (kind, count) in &report.errors {
        row(out, "  attempts failed", &format!("{count} x {kind}"));
    }
    let cluster = report.cpu.cluster_s.map(|cpu| format!("{cpu:.1} s cluster, ")).unwrap_or_default();
    for how in &report.crashed {
        row(out, "  CRASHED", how);
    }
    if let Some(why) = &report.refused {
        row(out, "  REFUSED", why);
    }
    row(out, "cpu", &format!("{cluster}{:.1} s this process", report.cpu.driver_s));
}

/// Bytes by transport path, and their CPU cost.
fn path_rows(out: &mut String, report: &Report, verbose: bool) {
    let used = report.paths.iter().filter(|(_, bytes)| bytes.fetched_bytes + bytes.saved_bytes > 0);
    let text = |(path, bytes): (&String, &PathTraffic)| {
        let (fetched, saved) = (human_bytes(bytes.fetched_bytes), human_bytes(bytes.saved_bytes));
        format!("{path} {fetched} fetched, {saved} saved")
    };
    let mut all: Vec<String> = used.map(text).collect();
    if all.is_empty() {
        return;
    }
    let cost = report.cpu.cluster_s_per_gb.map(|cost| format!("{cost:.2} CPU-seconds of the cluster a GB"));
    all.extend(cost);
    row(out, "paths", &all.join("; "));
    // With a single path there was no choice to explain.
    if verbose && report.paths.len() > 1 {
        report.path_reasons.iter().for_each(|reason| row(out, "  why", reason));
    }
}

/// The process closest to its memory limit, and every process above its limit.
fn memory_rows(out: &mut String, report: &Report) {
    let text = |memory: &Memory, most: u64| {
        format!("{} {} of {}", memory.process, human_bytes(memory.peak_bytes), human_bytes(most))
    };
    for memory in report.memory.iter().filter(|memory| memory.is_over) {
        row(out, "  MEMORY OVER", &text(memory, memory.bytes_max.unwrap_or_default()));
    }
    let bounded = report.memory.iter().filter_map(|memory| Some((memory, memory.bytes_max?)));
    // In thousandths, precise enough to find the fullest.
    let fullest =
        bounded.max_by_key(|(memory, most)| memory.peak_bytes.saturating_mul(1000) / (*most).max(1));
    if let Some((memory, most)) = fullest {
        row(out, "memory", &format!("{}, the fullest process", text(memory, most)));
    }
}

fn block_rows(out: &mut String, report: &Report) {
    let tiers = report.hits_by_tier;
    let text = format!(
        "{:.2} %  ({} of {} blocks; {} DRAM, {} SSD)",
        100.0 * report.hit_rate,
        report.block_hits,
        report.block_accesses,
        tiers.dram,
        tiers.ssd
    );
    row(out, "hit rate", &text);
    let wrong = match report.wrong_bytes {
        0 => "0 wrong".to_owned(),
        bytes => format!("{bytes} WRONG in {} blocks", report.wrong_blocks),
    };
    let text = format!(
        "{} fetched, {} verified, {wrong}; {} saved",
        human_bytes(report.fetched_bytes),
        human_bytes(report.verified_bytes),
        human_bytes(report.saved_bytes)
    );
    row(out, "bytes", &text);
    if report.unused_bytes > 0 {
        row(out, "  unused", &format!("{} received behind a gap", human_bytes(report.unused_bytes)));
    }
    for (reason, count) in &report.misses {
        row(out, "  short fetches", &format!("{count} x {reason}"));
    }
    if report.refused_blocks > 0 {
        row(out, "  not stored", &format!("{} blocks refused by nodes", report.refused_blocks));
    }
}

fn time_rows(out: &mut String, report: &Report) {
    let all = [
        ("route", report.route_us),
        ("fetch", report.fetch_us),
        ("save", report.save_us),
        ("request", report.request_us),
    ];
    for (label, latency) in all {
        row(out, label, &percentiles_text(latency));
    }
}

fn prefill_rows(out: &mut String, report: &Report) {
    let Some(prefill) = &report.prefill else { return };
    row(out, "prefill", &percentiles_text(prefill.prefill_us));
    let worst = prefill.over_recompute_max.map_or(String::new(), |worst| format!(", {worst:.2} at worst"));
    let text = format!(
        "{:.2} of recompute time{worst}; compute idle {:.1} %, {} blocks recomputed instead of loaded, {} \
         preloaded; {} blocks saved layer by layer",
        prefill.over_recompute,
        100.0 * prefill.idle_share,
        prefill.computed_blocks,
        human_bytes(prefill.read_buffer_bytes),
        prefill.streamed_blocks
    );
    row(out, "  with KV load", &text);
    row(out, "  queue wait", &percentiles_text(prefill.queue_us));
    if let Some(PredictionError { requests, median, bias }) = report.prediction {
        let text = format!(
            "off by {:.1} % at the median, {:+.1} % in sum, over {requests} requests after the first 200",
            100.0 * median,
            100.0 * bias
        );
        row(out, "  predicted TTFT", &text);
    }
}

fn percentiles_text(latency: Latency) -> String {
    format!(
        "p50 {}  p90 {}  p99 {}  max {}  ({})",
        human_us(latency.p50),
        human_us(latency.p90),
        human_us(latency.p99),
        human_us(latency.max),
        latency.count
    )
}

fn fault_rows(out: &mut String, report: &Report) {
    for fault in &report.kills {
        row(out, "killed", &fault_text(fault));
    }
    for fault in &report.restarts {
        row(out, "restarted", &fault_text(fault));
    }
    for fault in &report.faults_not_done {
        row(out, "NOT DONE", fault);
    }
    for fault in &report.faults_not_measured {
        row(out, "NOT MEASURED", fault);
    }
}

fn fault_text(fault: &FaultEntry) -> String {
    let mut text = format!("{} at {:.1} s", fault.process, fault.at_s);
    let mut add = |what: &str, ms: Option<f64>| {
        if let Some(ms) = ms {
            let _ = write!(text, ", {what} {ms:.0} ms");
        }
    };
    add("unrouted after", fault.unrouted_ms);
    add("new leader committed after", fault.leader_ms);
    add("served again after", fault.serving_ms);
    text
}

fn modelled_rows(out: &mut String, report: &Report) {
    let modelled = &report.modelled;
    let _ = writeln!(out, "modelled under profile {} (not measured)", modelled.profile);
    row(out, "TTFT, no queue", &percentiles_text(modelled.ttft_us));
    row(out, "prefill saved", &format!("{:.1} % of all prefill time", 100.0 * modelled.prefill_saved_share));
}

/// Microseconds in a readable unit.
fn human_us(us: u64) -> String {
    #[expect(clippy::cast_precision_loss)]
    let exact = us as f64;
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{:.1} ms", exact / 1e3),
        _ => format!("{:.2} s", exact / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;
    use kvfleet_sim::trace::Reason;

    use super::super::json::{Config, ReportSubject};
    use super::*;
    use crate::replay::ReplayMeasurements;

    #[test]
    fn separates_measured_from_modelled() {
        let subject = ReportSubject { config: Config::default(), seed: 1, profile: "h100-8b".into() };
        let text = render(&Report::new(subject, &ReplayMeasurements::default()), false);
        assert!(text.starts_with("measured\n"), "{text}");
        assert!(text.contains("modelled under profile h100-8b (not measured)"), "{text}");
        assert!(text.contains("0 wrong"), "{text}");
    }

    #[test]
    fn only_verbose_tables_explain_paths() {
        let subject = ReportSubject { config: Config::default(), seed: 1, profile: String::new() };
        let mut report = Report::new(subject, &ReplayMeasurements::default());
        report.path_reasons = vec!["instance-1: node-1 over shm: same host".into()];
        let bytes = PathTraffic { fetched_bytes: 1, saved_bytes: 1 };
        report.paths = [("shm".to_owned(), bytes), ("quic".to_owned(), bytes)].into();
        assert!(!render(&report, false).contains("same host"));
        assert!(render(&report, true).contains("same host"));
    }

    #[test]
    fn highlights_defects() {
        use crate::replay::RequestSample;
        let wrong = RequestSample { wrong_bytes: 163_840, wrong_blocks: 10, ..RequestSample::default() };
        let measured = ReplayMeasurements {
            samples: vec![wrong],
            crashed: vec!["node-1 ended: signal 9".into()],
            faults_not_done: vec!["kill node:2@50%: why".into()],
            faults_not_measured: vec!["kill router-leader (router-1)".into()],
            ..ReplayMeasurements::default()
        };
        let subject = ReportSubject { config: Config::default(), seed: 1, profile: String::new() };
        let text = render(&Report::new(subject, &measured), false);
        for part in ["163840 WRONG in 10 blocks", "CRASHED", "NOT DONE", "NOT MEASURED"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn counts_skipped_lines_by_reason() {
        let skipped = [(Reason::Malformed, 2), (Reason::Unsorted, 1)].into();
        let config = Config { skipped_lines: 3, skipped_lines_by_reason: skipped, ..Config::default() };
        let subject = ReportSubject { config, seed: 1, profile: "h100-8b".into() };
        let text = render(&Report::new(subject, &ReplayMeasurements::default()), false);
        let line = text.lines().find(|line| line.contains("skipped")).unwrap_or_default();
        says("bad lines in a replay, with --lenient", &line, &[]);
    }

    #[test]
    fn formats_times() {
        assert_eq!([human_us(999), human_us(1_500), human_us(2_500_000)], ["999 us", "1.5 ms", "2.50 s"]);
    }
}
