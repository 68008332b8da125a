//! `kvfleet trace`: deterministic generation, statistics, plots.

use crate::support::Place;

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let place = Place::new();
    let generate =
        |kind, seed| place.run(&["trace", "gen", "--kind", kind, "--seed", seed, "--requests", "50"]).ok();
    for kind in ["consumer", "business", "agent"] {
        let first = generate(kind, "3");
        assert_eq!(first.lines().count(), 50);
        assert_eq!(first, generate(kind, "3"));
        assert_ne!(first, generate(kind, "4"));
    }
    place.run(&["trace", "gen", "--kind", "alien"]).refused(&["consumer", "business", "agent"]);
}

#[test]
fn statistics_come_as_tables_as_json_and_as_plots() {
    let place = Place::new();
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
