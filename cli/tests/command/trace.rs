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
    let asks: [&[&str]; 3] = [
        &["trace", "gen", "--kind"],
        &["trace", "stats", "trace.jsonl", "--compare"],
        &["crosscheck", "--kind"],
    ];
    for words in asks {
        place.run(&[words, &["alien"]].concat()).refused(&["consumer", "business", "agent"]);
    }
    place.run(&["trace", "stats", "trace.jsonl", "--compare", "agent"]).refused(&["consumer, business"]);
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
