//! The live cross-check in lockstep: a real fleet and a simulated one decide every request alike.

use serde_json::Value;

use crate::support::Workspace;

/// Runs one cross-check in lockstep and asserts that both sides agree on every request.
fn assert_alike(place: &Workspace, words: &[&str]) -> Value {
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
fn real_and_simulated_fleets_decide_alike_in_lockstep() {
    let place = Workspace::new();
    let roomy = ["--nodes", "3", "--instances", "3", "--requests", "200"];
    let all = assert_alike(&place, &roomy);
    assert_eq!(all["seed"], 1);
    assert!(all["real"]["own_node"].as_f64().unwrap() > 5.0, "{all:#}");
    // The caches are small enough that evictions decide routing. A second run with ample room
    // compares.
    let agent = ["--nodes", "2", "--instances", "2", "--requests", "120", "--policy", "lru"];
    let agent = [&agent[..], &["--kind", "agent", "--profile", "h100-8b", "--seed", "3"]].concat();
    let recomputed = |room: &[&str]| {
        let compared = assert_alike(&place, &[&agent[..], room].concat());
        compared["real"]["recomputed"].as_f64().unwrap()
    };
    let (roomy, tight) = (recomputed(&[]), recomputed(&["--dram", "60b"]));
    assert!(
        tight > roomy + 1.0,
        "{tight} % recomputed against {roomy} %: no eviction hit a block that was needed later"
    );
}

#[test]
fn refuses_settings_that_cannot_be_simulated() {
    let place = Workspace::new();
    let words = ["crosscheck", "--lockstep", "--requests", "5", "--routers", "1", "--nodes", "1"];
    let ran = place.run(&[&words[..], &["--instances", "1", "--set", "router.windows=true"]].concat());
    ran.refused(&["router.windows is on", "leave it out"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(place.processes(), Vec::<String>::new());
}
