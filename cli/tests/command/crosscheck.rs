//! The live cross-check without time: a real fleet and one in virtual time decide alike, request by request.

use serde_json::Value;

use crate::support::Place;

/// One run in lockstep, each request of which must be the same on both sides.
fn alike(place: &Place, words: &[&str]) -> Value {
    let fixed = ["crosscheck", "--lockstep", "--json", "--block-bytes", "4KiB", "--routers", "1"];
    let ran = place.run(&[&fixed[..], words].concat());
    println!("{}", ran.all());
    let compared: Value = serde_json::from_str(&ran.out).unwrap();
    let requests = &compared["requests"];
    for fleet in ["alone", "led"] {
        assert_eq!(&compared[fleet]["decided"], requests, "{compared:#}");
        assert_eq!(&compared[fleet]["instance"], requests, "{compared:#}");
        assert_eq!(&compared[fleet]["whole"], requests, "{compared:#}");
    }
    assert_eq!(compared["real"], compared["virtual_time"], "{compared:#}");
    assert_eq!(compared["unserved"], serde_json::json!([0, 0]), "{compared:#}");
    assert_eq!(ran.code, Some(0), "{}", ran.all());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
    compared
}

#[test]
fn a_real_fleet_and_one_in_virtual_time_decide_alike_where_time_plays_no_part() {
    let place = Place::new();
    let roomy = ["--nodes", "3", "--instances", "3", "--requests", "200"];
    let all = alike(&place, &roomy);
    assert_eq!(all["seed"], 1);
    assert!(all["real"]["own_node"].as_f64().unwrap() > 5.0, "{all:#}");
    // Caches so small that what is evicted decides where the next request goes, and the same requests with room for all.
    let agent = ["--nodes", "2", "--instances", "2", "--requests", "120", "--policy", "lru"];
    let agent = [&agent[..], &["--kind", "agent", "--profile", "h100-8b", "--seed", "3"]].concat();
    let recomputed = |room: &[&str]| {
        let compared = alike(&place, &[&agent[..], room].concat());
        compared["real"]["recomputed"].as_f64().unwrap()
    };
    let (roomy, tight) = (recomputed(&[]), recomputed(&["--dram", "60b"]));
    assert!(
        tight > roomy + 1.0,
        "{tight} % against {roomy} %: nothing was evicted that would have been used"
    );
}

#[test]
fn what_cannot_be_had_in_virtual_time_is_refused_before_a_request_is_sent() {
    let place = Place::new();
    let words = ["crosscheck", "--lockstep", "--requests", "5", "--routers", "1", "--nodes", "1"];
    let ran = place.run(&[&words[..], &["--instances", "1", "--set", "router.windows=true"]].concat());
    ran.refused(&["router.windows is on", "leave it out"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(place.processes(), Vec::<String>::new());
}
