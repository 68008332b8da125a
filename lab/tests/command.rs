//! Tests of the built `kvfleet-lab` binary: documents, summaries, JSON lines and invalid input.
//!
//! Not here: the figures (tests of the library).
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use kvfleet_lab::evict::NAMES;
use kvfleet_sim::generate::{TraceGenerator, TraceSpec, TrafficKind};
use kvfleet_sim::trace::{Format, MOONCAKE_BLOCK_TOKENS, Writer};

/// A temporary directory for one test.
struct Workspace(tempfile::TempDir);

impl Workspace {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, words: &[&str]) -> CommandOutput {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfleet-lab"));
        let output = command.current_dir(self.0.path()).args(words).output().unwrap();
        CommandOutput {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Generates a small deterministic trace with recurring conversations.
    fn trace(&self, requests: u64) {
        let spec = TraceSpec::new(TrafficKind::Consumer, 7, requests);
        let spec = TraceSpec { block_tokens: MOONCAKE_BLOCK_TOKENS, sessions_per_s: Some(0.1), ..spec };
        let mut writer = Writer::new(File::create(self.path("trace.jsonl")).unwrap(), Format::Mooncake);
        TraceGenerator::new(spec).for_each(|request| writer.write(&request).unwrap());
        writer.finish().unwrap();
    }
}

/// Exit status and output of one run.
struct CommandOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

impl CommandOutput {
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}\n{}", self.out, self.err);
        self.out
    }

    /// Asserts failure with a message that contains every one of `parts`.
    fn refused(&self, parts: &[&str]) {
        assert!(!matches!(self.code, Some(0) | None), "{}\n{}", self.out, self.err);
        assert!(!self.err.contains("panicked"), "{}", self.err);
        for part in parts {
            assert!(self.err.contains(part), "{part:?} is not in: {}", self.err);
        }
    }
}

#[test]
fn unknown_kinds_list_the_valid_ones() {
    let place = Workspace::new();
    place
        .run(&["routers", "--requests", "50", "--kinds", "alien"])
        .refused(&["consumer", "business", "agent"]);
    place.run(&["routers", "trace.jsonl", "--kinds", "agent"]).refused(&["--requests"]);
}

#[test]
fn policies_as_document_or_json() {
    let place = Workspace::new();
    place.trace(100);
    let few = ["policies", "trace.jsonl", "--requests", "40", "--seeds", "1"];
    place.run(&[&few[..], &["--out", "docs"]].concat()).ok();
    let document = std::fs::read_to_string(place.path("docs").join("POLICIES.md")).unwrap();
    for name in ["trace", "consumer", "business", "agent"] {
        assert!(document.contains(&format!("\n## {name}\n")), "{name}: {document}");
        let plot = place.path("docs").join("policies").join(format!("{name}.svg"));
        assert!(std::fs::read_to_string(plot).unwrap().contains("</svg>"), "{name}");
    }
    let lines = place.run(&[&few[..], &["--json", "--threads", "1"]].concat()).ok();
    // Every policy and the upper bound at nine capacities, on one trace and three generated
    // workloads. Three workloads also have the realizable bound.
    assert_eq!(lines.lines().count(), (NAMES.len() + 1) * 9 * 4 + 9 * 3);
    place.run(&[&few[..], &["--summary", "policies.md"]].concat()).ok();
    let summary = std::fs::read_to_string(place.path("policies.md")).unwrap();
    assert!(summary.contains("\n## trace\n") && !summary.contains(".svg"), "{summary}");
    place.run(&["policies", "--judge", "magic"]).refused(&["magic", "workload"]);
}

#[test]
fn routers_as_document_or_json() {
    let place = Workspace::new();
    place.trace(60);
    let few = ["routers", "trace.jsonl", "--instances", "2", "--loads", "0.5,0.9"];
    place.run(&[&few[..], &["--out", "docs"]].concat()).ok();
    let document = std::fs::read_to_string(place.path("docs").join("ROUTERS.md")).unwrap();
    for from in ["own", "pool"] {
        let title = format!("## trace, 2 instances, 90 % load, others fetch from {from}\n");
        assert!(document.contains(&title), "{title}: {document}");
    }
    let lines = place.run(&[&few[..], &["--json"]].concat()).ok();
    assert_eq!(lines.lines().count(), 4);
    for line in lines.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(row["baselines"].as_array().unwrap().len(), 10);
        assert!(row["production"]["ttft"]["mean_ms"].as_f64().unwrap() > 0.0);
    }
    for name in ["trace-2-own.svg", "trace-2-pool.svg"] {
        let plot = std::fs::read_to_string(place.path("docs").join("routers").join(name)).unwrap();
        assert!(plot.contains("</svg>") && document.contains(&format!("](routers/{name})")), "{name}");
    }
    // Saved rows rebuild the document without another run.
    std::fs::write(place.path("rows.jsonl"), &lines).unwrap();
    place.run(&["routers", "--rows", "rows.jsonl", "--out", "again"]).ok();
    assert_eq!(std::fs::read_to_string(place.path("again").join("ROUTERS.md")).unwrap(), document);
    place.run(&["routers", "--rows", "rows.jsonl", "--summary", "routers.md"]).ok();
    let summary = std::fs::read_to_string(place.path("routers.md")).unwrap();
    assert_eq!(summary.matches("\n| trace | 60 | 2 | ").count(), 4, "{summary}");
    assert!(summary.len() < document.len() && !summary.contains(".svg"), "{summary}");
    let other = ["routers", "--rows", "rows.jsonl", "--seed", "2"];
    place.run(&other).refused(&["rows.jsonl line 1", "--seed 1"]);
    place.run(&["routers", "--rows", "trace.jsonl"]).refused(&["trace.jsonl line 1", "--json"]);
    place.run(&["routers", "--profile", "abacus"]).refused(&["abacus", "h100-8b"]);
    place.run(&["routers"]).refused(&["nothing to serve"]);
}

#[test]
fn oracle_gap_as_table_or_json() {
    let place = Workspace::new();
    place.trace(60);
    let few = ["oracle-gap", "trace.jsonl", "--limit", "40", "--instances", "2", "--loads", "0.5,0.9"];
    let tables = place.run(&few).ok();
    assert_eq!(tables.matches("| and actual times |").count(), 2, "{tables}");
    let lines = place.run(&[&few[..], &["--json"]].concat()).ok();
    assert_eq!(
        lines,
        place.run(&[&few[..], &["--json"]].concat()).ok(),
        "the same seed gives the same output"
    );
    for line in lines.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&row["requests"], row["knowing"].as_array().unwrap().len()), (&40.into(), 4), "{row}");
        let mean = |at: usize| row["knowing"][at]["ttft"]["mean_ms"].as_f64().unwrap();
        let lost: f64 =
            ["delay", "prediction", "greed"].map(|of| row["lost"][of].as_f64().unwrap()).iter().sum();
        assert!((lost - (1.0 - mean(3) / mean(0))).abs() < 1e-9, "{row}");
    }
    place.run(&["oracle-gap", "trace.jsonl", "--profile", "abacus"]).refused(&["abacus", "h100-8b"]);
    place.run(&["oracle-gap", "trace.jsonl", "--limit", "0"]).refused(&["nothing to serve"]);
}
