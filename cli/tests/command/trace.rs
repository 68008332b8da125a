//! `kvfleet trace`: deterministic generation, statistics, plots.

use kvfleet_errors_doc::says;

use crate::support::Workspace;

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let place = Workspace::new();
    let generate =
        |kind, seed| place.run(&["trace", "gen", "--kind", kind, "--seed", seed, "--requests", "50"]).ok();
    for kind in ["consumer", "business", "agent"] {
        let first = generate(kind, "3");
        assert_eq!(first.lines().count(), 50);
        assert_eq!(first, generate(kind, "3"));
        assert_ne!(first, generate(kind, "4"));
    }
}

#[test]
fn unknown_kinds_list_the_valid_ones() {
    let place = Workspace::new();
    let asks: [&[&str]; 4] = [
        &["trace", "gen", "--kind"],
        &["trace", "stats", "trace.jsonl", "--compare"],
        &["trace", "routers", "--requests", "50", "--kinds"],
        &["crosscheck", "--kind"],
    ];
    for words in asks {
        place.run(&[words, &["alien"]].concat()).refused(&["consumer", "business", "agent"]);
    }
    place.run(&["trace", "stats", "trace.jsonl", "--compare", "agent"]).refused(&["consumer, business"]);
    place.run(&["trace", "routers", "trace.jsonl", "--kinds", "agent"]).refused(&["--requests"]);
    let ran = place.run(&["trace", "gen", "--kind", "alien"]);
    says("traffic of a kind that is none", &ran.refused(&[]), &[]);
}

#[test]
fn statistics_as_tables_json_and_plots() {
    let place = Workspace::new();
    place.trace(200);
    let text =
        place.run(&["trace", "stats", "trace.jsonl", "--plots", "plots", "--compare", "consumer"]).ok();
    for word in ["ideal hit rate", "reuse time", "hit rate at capacity", "lru", "published"] {
        assert!(text.contains(word), "{word} is not in {text}");
    }
    for plot in ["reuse_times.svg", "skew.svg", "capacity.svg"] {
        assert!(
            std::fs::read_to_string(place.path("plots").join(plot)).unwrap().contains("</svg>"),
            "{plot}"
        );
    }
    let json: serde_json::Value =
        serde_json::from_str(&place.run(&["trace", "stats", "trace.jsonl", "--json"]).ok()).unwrap();
    assert_eq!(json["characteristics"]["requests"], 200);
    assert!(json["capacity_curve"].as_array().unwrap().len() >= 12);
}

#[test]
fn policies_as_document_or_json() {
    let place = Workspace::new();
    place.trace(100);
    let few = ["trace", "policies", "trace.jsonl", "--requests", "40", "--seeds", "1"];
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
    assert_eq!(lines.lines().count(), (kv_core::evict::NAMES.len() + 1) * 9 * 4 + 9 * 3);
    place.run(&["trace", "policies", "--judge", "magic"]).refused(&["magic", "workload"]);
}

#[test]
fn routers_as_document_or_json() {
    let place = Workspace::new();
    place.trace(60);
    let few = ["trace", "routers", "trace.jsonl", "--instances", "2", "--loads", "0.5,0.9"];
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
    place.run(&["trace", "routers", "--rows", "rows.jsonl", "--out", "again"]).ok();
    assert_eq!(std::fs::read_to_string(place.path("again").join("ROUTERS.md")).unwrap(), document);
    let other = ["trace", "routers", "--rows", "rows.jsonl", "--seed", "2"];
    place.run(&other).refused(&["rows.jsonl line 1", "--seed 1"]);
    place.run(&["trace", "routers", "--rows", "trace.jsonl"]).refused(&["trace.jsonl line 1", "--json"]);
    place.run(&["trace", "routers", "--profile", "abacus"]).refused(&["abacus", "h100-8b"]);
    place.run(&["trace", "routers"]).refused(&["nothing to serve"]);
}

#[test]
fn regret_as_table_or_json() {
    let place = Workspace::new();
    place.trace(60);
    let few = ["trace", "regret", "trace.jsonl", "--limit", "40", "--instances", "2", "--loads", "0.5,0.9"];
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
    place.run(&["trace", "regret", "trace.jsonl", "--profile", "abacus"]).refused(&["abacus", "h100-8b"]);
    place.run(&["trace", "regret", "trace.jsonl", "--limit", "0"]).refused(&["nothing to serve"]);
}
