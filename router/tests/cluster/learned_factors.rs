//! Learning from reports in a live router: first tokens correct predictions, and an instance with
//! an ordered queue gets priority deadlines.
//!
//! Not here: the factors and deadlines themselves (`kv_core::schedule`).

use kvfleet_proto::pb;
use prometheus::Registry;

use crate::residency::load;
use kvfleet_testkit::cluster::{Cluster, until};

/// One router with an idle instance of a known profile, and its metrics.
async fn world() -> (Cluster, Registry) {
    let cluster = Cluster::start(1, |config| config.profile = "h100-8b".into()).await;
    cluster.leader().await;
    let registry = cluster.registries[0].clone();
    (cluster, registry)
}

/// Decision for a new prompt.
async fn route(cluster: &Cluster, request: u64) -> pb::Decision {
    decided(
        cluster,
        pb::RouteRequest { request, block_tokens: 16, input_tokens: 20_000, ..Default::default() },
    )
    .await
}

async fn decided(cluster: &Cluster, asked: pb::RouteRequest) -> pb::Decision {
    let reply = cluster.client(1).route(asked).await.unwrap().into_inner();
    match reply.answer {
        Some(pb::route_reply::Answer::Decision(decision)) => decision,
        other => panic!("{other:?}"),
    }
}

fn prefill_us(decision: &pb::Decision) -> u64 {
    decision.predicted.unwrap().prefill_us
}

/// The factor of a part, as in the router's metrics.
fn factor(registry: &Registry, part: &str) -> Option<f64> {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "kvfleet_ttft_prediction_factor")?;
    let is_it = |one: &&prometheus::proto::Metric| {
        one.get_label().iter().any(|label| label.name() == "part" && label.value() == part)
    };
    Some(family.get_metric().iter().find(is_it)?.get_gauge().get_value())
}

/// Number of compared predictions, and how many of them were too low by two fifths or more.
fn errors(registry: &Registry) -> (u64, u64) {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == "kvfleet_ttft_prediction_error").unwrap();
    let [metric] = family.get_metric() else { panic!("{family:?}") };
    let histogram = metric.get_histogram();
    let bucket = histogram.get_bucket().iter().find(|bucket| bucket.upper_bound() == -0.4).unwrap();
    (histogram.get_sample_count(), bucket.cumulative_count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_first_tokens_raise_predictions() {
    let (cluster, registry) = world().await;
    let mut client = cluster.client(1);
    client.report(load(1, 1)).await.unwrap();
    let before = prefill_us(&route(&cluster, 1).await);
    let late = |request| pb::Outcome { request, ttft_us: 2 * before, ..Default::default() };
    // An instance that did not serve a request teaches no correction.
    let other = pb::ReportRequest { outcomes: vec![late(1); 200], ..load(2, 1) };
    client.report(other).await.unwrap();
    client.report(pb::ReportRequest { leaving: true, ..load(2, 2) }).await.unwrap();
    client.report(load(1, 2)).await.unwrap();
    assert_eq!(prefill_us(&route(&cluster, 2).await), before);
    assert_eq!(errors(&registry), (0, 0));
    for request in 3..103 {
        // The report empties the queue that decisions fill, so that the prediction has no queueing
        // part.
        client.report(load(1, 2 * request)).await.unwrap();
        route(&cluster, request).await;
        let told = pb::ReportRequest { outcomes: vec![late(request)], ..load(1, 2 * request + 1) };
        client.report(told).await.unwrap();
    }
    // At first the prediction is half of the actual time, and in the end about right.
    let (told, far_off) = errors(&registry);
    assert_eq!(told, 100, "one for each request");
    assert!((1..100).contains(&far_off), "{far_off} of them");
    let after = prefill_us(&route(&cluster, 103).await);
    assert!((before * 3 / 2..=before * 2).contains(&after), "{before} µs became {after} µs");
    // Per the profile: 8 ms for a step; for 20,000 tokens 40 µs each, and 1.3 ns for each one
    // before it.
    let by_profile_us = [("step", 8_000.0), ("tokens", 800_000.0), ("context", 260_000.0)];
    until("the metrics to show the applied factors", || async {
        let us = by_profile_us.map(|(part, us)| factor(&registry, part).unwrap_or_default() * us);
        let sum = us.into_iter().sum::<f64>() * factor(&registry, "prefill").unwrap_or_default();
        (sum / after as f64 - 1.0).abs().lt(&0.01).then_some(())
    })
    .await;
    assert_eq!(factor(&registry, "transfer"), Some(1.0), "without a transfer");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_first_tokens_of_text_raise_predictions_of_text_only() {
    let (cluster, registry) = world().await;
    let mut client = cluster.client(1);
    let text = |request| pb::RouteRequest {
        request,
        block_tokens: 16,
        input_tokens: 20_000,
        text: true,
        ..Default::default()
    };
    client.report(load(1, 1)).await.unwrap();
    let before = prefill_us(&route(&cluster, 1).await);
    for request in 2..102 {
        client.report(load(1, 2 * request)).await.unwrap();
        decided(&cluster, text(request)).await;
        let outcome = pb::Outcome { request, ttft_us: 2 * before, ..Default::default() };
        client
            .report(pb::ReportRequest { outcomes: vec![outcome], ..load(1, 2 * request + 1) })
            .await
            .unwrap();
    }
    client.report(load(1, 204)).await.unwrap();
    assert_eq!(prefill_us(&route(&cluster, 102).await), before, "the number of its tokens is known");
    let after = prefill_us(&decided(&cluster, text(103)).await);
    assert!((before * 3 / 2..=before * 2).contains(&after), "{before} µs became {after} µs");
    until("the metric to show the factor of text", || async {
        let factor = factor(&registry, "prefill").unwrap_or_default();
        (factor * before as f64 / after as f64 - 1.0).abs().lt(&0.01).then_some(())
    })
    .await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordering_instance_gets_priority_deadlines() {
    let (cluster, _registry) = world().await;
    let mut client = cluster.client(1);
    let now_ms = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::try_from(since.as_millis()).unwrap()
    };
    for orders_by_deadline in [false, true] {
        let sequence = 1 + u64::from(orders_by_deadline);
        client.report(pb::ReportRequest { orders_by_deadline, ..load(1, sequence) }).await.unwrap();
        let asked = now_ms();
        let decision = route(&cluster, sequence).await;
        let answered = now_ms();
        let stretch = if orders_by_deadline { 4 * prefill_us(&decision) / 1_000 } else { 0 };
        // Milliseconds are truncated at both ends.
        let expected = (asked + stretch).saturating_sub(2)..=answered + stretch + 2;
        assert!(
            expected.contains(&decision.priority_deadline_ms),
            "{} is not in {expected:?}",
            decision.priority_deadline_ms
        );
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn high_priority_and_light_tenants_get_earlier_deadlines() {
    let (cluster, _registry) = world().await;
    let mut client = cluster.client(1);
    client.report(pb::ReportRequest { orders_by_deadline: true, ..load(1, 1) }).await.unwrap();
    let now_ms = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        u64::try_from(since.as_millis()).unwrap()
    };
    let deadline_ms = async |request: u64, tenant: u32, priority: i32| {
        let asked = pb::RouteRequest {
            request,
            tenant,
            priority,
            block_tokens: 16,
            input_tokens: 20_000,
            ..Default::default()
        };
        let decision = decided(&cluster, asked).await;
        (decision.priority_deadline_ms, 4 * prefill_us(&decision) / 1_000)
    };
    // Half a minute earlier or later than arrival time and prefill multiple give.
    let begun_ms = now_ms();
    let (before_ms, stretch_ms) = deadline_ms(1, 7, 1).await;
    assert!(before_ms + 30_000 >= begun_ms + stretch_ms && before_ms < begun_ms, "{before_ms} at {begun_ms}");
    let (behind_ms, stretch_ms) = deadline_ms(2, 7, -1).await;
    assert!(behind_ms >= begun_ms + stretch_ms + 30_000 - 2, "{behind_ms} at {begun_ms}");
    // One tenant has seconds of queued work; another one arrives later and gets the place where
    // that work began to wait.
    let flood = deadline_ms(3, 7, 0).await;
    for request in 4..40 {
        deadline_ms(request, 7, 0).await;
    }
    until("some waiting time to pass", || async { (now_ms() > flood.0 - flood.1 + 300).then_some(()) }).await;
    let (came_ms, (led_ms, stretch_ms)) = (now_ms(), deadline_ms(40, 8, 0).await);
    assert!(led_ms + 200 <= came_ms + stretch_ms, "{led_ms} for one that came at {came_ms}");
    let (came_ms, (same_ms, stretch_ms)) = (now_ms(), deadline_ms(41, 7, 0).await);
    assert!(same_ms + 2 >= came_ms + stretch_ms, "the heaviest tenant gets no earlier place");
    cluster.shutdown().await;
}
