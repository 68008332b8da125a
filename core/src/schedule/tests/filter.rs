//! Filtered instances, and the rejection if none is left.

use super::*;

fn aged(n: u32, age: Duration) -> Instance {
    Instance { reported_at: Timestamp(NOW.0 - age.as_micros() as u64), ..instance(n) }
}

fn queued(n: u32, tokens: u64) -> Instance {
    Instance { load: Load::reported(tokens, 0, 0), ..instance(n) }
}

fn of(instances: &[Instance]) -> Fleet {
    let mut fleet = Fleet::new(ROUND);
    instances.iter().for_each(|&instance| fleet.put_instance(instance));
    fleet
}

fn route(fleet: &Fleet) -> Result<Decision, Rejection> {
    choose(&request(4), &PrefixMatch::default(), fleet, NOW)
}

#[test]
fn limits_are_inclusive() {
    let tick = Duration::from_micros(1);
    for (instance, taken) in [
        (aged(1, REPORT_STALE_AFTER), true),
        (aged(1, REPORT_STALE_AFTER + tick), false),
        (queued(1, QUEUE_TOKENS_MAX), true),
        (queued(1, QUEUE_TOKENS_MAX + 1), false),
    ] {
        assert_eq!(route(&of(&[instance])).is_ok(), taken, "{instance:?}");
    }
}

#[test]
fn routed_tokens_count_against_the_queue_limit() {
    let mut fleet = of(&[queued(1, QUEUE_TOKENS_MAX)]);
    fleet.load_mut(InstanceId(1)).unwrap().routed_tokens = 1;
    assert!(route(&fleet).is_err());
}

#[test]
fn a_report_from_the_future_is_fresh() {
    let ahead = Instance { reported_at: NOW.after(Duration::from_secs(60)), ..instance(1) };
    assert!(route(&of(&[ahead])).is_ok());
}

#[test]
fn silent_instance_is_chosen_only_if_worth_its_cost() {
    let chosen = |silent_ms, tokens| {
        let silent = aged(1, Duration::from_millis(silent_ms));
        let decision = route(&of(&[silent, queued(2, tokens)])).unwrap();
        let said =
            decision.reasons.iter().map(Reason::to_string).find(|said| said.contains("last report is old"));
        (decision.instance.0, said)
    };
    // One late report has no cost; one second of silence costs three quarters of a second.
    assert_eq!(chosen(400, 100), (1, None));
    let spared = "instance-1 would cost less, but its last report is old: 750000 us are added to its cost";
    assert_eq!(chosen(1_000, 100), (2, Some(spared.to_owned())));
    let (instance, said) = chosen(1_000, 100_000);
    assert_eq!(
        (instance, said.as_deref()),
        (1, Some("its last report is old: 750000 us are added to its cost"))
    );
    // If the router itself hears no reports, all instances have the same cost.
    let all = of(&[1, 2].map(|n| aged(n, Duration::from_secs(1))));
    let costs: Vec<_> = route(&all).unwrap().candidates.iter().map(Candidate::cost_us).collect();
    assert_eq!(costs[0], costs[1]);
}

#[test]
fn stale_instance_is_filtered_and_reported() {
    let fleet = of(&[aged(1, Duration::from_secs(3)), queued(2, 1_000_000), queued(3, u64::MAX)]);
    let decision = route(&fleet).unwrap();
    assert_eq!(decision.instance, InstanceId(2));
    let filtered: Vec<_> = decision.candidates.iter().map(|c| (c.instance.0, c.filtered)).collect();
    let stale = FilterReason::Stale { age: Duration::from_secs(3) };
    let full = FilterReason::QueueFull { tokens: u64::MAX };
    assert_eq!(filtered, [(2, None), (1, Some(stale)), (3, Some(full))]);
    assert_eq!(stale.to_string(), "no report for 3000 ms");
    assert_eq!(full.to_string(), format!("{} tokens are queued", u64::MAX));
    let said: Vec<_> = decision.reasons.iter().map(Reason::to_string).collect();
    assert!(said.contains(&"only instance that can take it".into()), "{said:?}");
    assert!(
        said.contains(&"left out 1 instances without a fresh report and 1 with a full queue".into()),
        "{said:?}"
    );
}

#[test]
fn unfit_instance_is_filtered_with_reason() {
    let fleet = of(&[1, 2, 3, 4].map(instance));
    let unfit = [(InstanceId(1), UnfitReason::Model), (InstanceId(3), UnfitReason::Context)];
    // An instance that cannot run the request counts as unfit even if the caller also excluded it.
    let eligible = InstanceFilter {
        candidates: Some(&[InstanceId(2), InstanceId(3)]),
        unfit: &unfit,
        ..InstanceFilter::default()
    };
    let decision = choose_filtered(&request(4), &PrefixMatch::default(), eligible, &fleet, NOW).unwrap();
    let filtered = decision.candidates.iter().map(|c| c.filtered.map(|why| why.to_string()));
    let said = ["it serves other models", "its context is too short", "excluded by the caller"];
    assert_eq!(filtered.collect::<Vec<_>>()[1..], said.map(|why| Some(why.to_owned())));
    let reasons: Vec<_> = decision.reasons.iter().map(Reason::to_string).collect();
    let said = "left out 1 instances that serve other models, and 1 with a context that is too short";
    assert!(reasons.contains(&said.to_owned()), "{reasons:?}");
    let none = [1, 2, 3, 4].map(|n| (InstanceId(n), UnfitReason::Model));
    let eligible = InstanceFilter { unfit: &none, ..InstanceFilter::default() };
    let rejection = choose_filtered(&request(4), &PrefixMatch::default(), eligible, &fleet, NOW).unwrap_err();
    assert_eq!(rejection.reason, RejectReason::NoneEligible { instances: 4 });
}

#[test]
fn rejections_give_reason_and_retry_hint() {
    let cases: &[(&[Instance], &str, Duration)] = &[
        (&[], "no instance has reported to this router: start one; ask again in 200 ms", RETRY_UNREPORTED),
        (
            &[aged(1, Duration::from_secs(9)), aged(2, Duration::from_secs(5))],
            "none of 2 instances has reported for 5000 ms; ask again in 200 ms",
            RETRY_UNREPORTED,
        ),
        (
            // 10,000 tokens above the limit are 1 s of prefill.
            &[queued(1, QUEUE_TOKENS_MAX + 20_000), queued(2, QUEUE_TOKENS_MAX + 10_000)],
            "all 2 instances have full queues, the shortest has 4204304 tokens; ask again in 1000 ms",
            Duration::from_secs(1),
        ),
        (
            &[aged(1, Duration::from_secs(9)), queued(2, QUEUE_TOKENS_MAX + 1)],
            "all 1 instances have full queues, the shortest has 4194305 tokens; ask again in 50 ms",
            RETRY_FULL_MIN,
        ),
        (
            &[queued(2, u64::MAX)],
            "all 1 instances have full queues, the shortest has 18446744073709551615 tokens; ask again in 5000 ms",
            RETRY_FULL_MAX,
        ),
    ];
    for (instances, said, retry_after) in cases {
        let rejection = route(&of(instances)).unwrap_err();
        assert_eq!(rejection.to_string(), *said);
        assert_eq!(rejection.retry_after, *retry_after);
    }
}

#[test]
fn limits_come_from_the_fleet() {
    let mut fleet = of(&[aged(1, Duration::from_millis(500))]);
    fleet.limits.report_stale_after = Duration::from_millis(499);
    assert!(matches!(route(&fleet).unwrap_err().reason, RejectReason::AllStale { instances: 1, .. }));
    fleet.limits.report_stale_after = Duration::from_millis(500);
    assert!(route(&fleet).is_ok());
    fleet.put_instance(queued(1, 11));
    fleet.limits.queue_tokens_max = 10;
    assert!(matches!(route(&fleet).unwrap_err().reason, RejectReason::AllFull { tokens: 11, .. }));
}

#[test]
fn fleet_keeps_one_ordered_entry_per_instance() {
    let mut fleet = of(&[instance(3), instance(1), queued(3, 5)]);
    let ids = |fleet: &Fleet| fleet.instances().iter().map(|i| i.id.0).collect::<Vec<_>>();
    assert_eq!(ids(&fleet), [1, 3]);
    assert_eq!(fleet.instance(InstanceId(3)).unwrap().load.queue_tokens, 5);
    assert!(fleet.remove_instance(InstanceId(2)).is_none());
    assert!(fleet.load_mut(InstanceId(2)).is_none());
    assert_eq!(fleet.remove_instance(InstanceId(1)).unwrap().id, InstanceId(1));
    assert_eq!(ids(&fleet), [3]);
}

#[test]
fn duplicate_node_counts_in_its_latest_epoch() {
    let mut fleet = Fleet::new(ROUND);
    fleet.set_nodes(vec![live(2), LiveNode { epoch: Epoch(4), ..live(1) }, live(1)]);
    let nodes: Vec<_> = fleet.nodes().iter().map(|n| (n.node.0, n.epoch.0)).collect();
    assert_eq!(nodes, [(1, 4), (2, 1)]);
    assert_eq!(fleet.ring().len(), 2);
    fleet.set_nodes(vec![live(2)]);
    assert!(fleet.live(NodeId(1)).is_none());
    assert_eq!(fleet.ring().len(), 1);
}
