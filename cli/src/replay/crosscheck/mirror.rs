//! The simulated fleet: built from the configuration of the real processes, and given the same
//! requests at the times at which they were sent to the real fleet.
//!
//! Settings that the simulator does not support are rejected. `kvfleet_sim::fleet` is the
//! simulator.

use std::time::Duration;

use kv_core::id::InstanceId;
use kv_core::schedule::{Decision, HardwareProfile};
use kv_core::tier::Capacity;
use kvfleet_node::NodeConfig;
use kvfleet_router::RouterConfig;
use kvfleet_sim::fleet::{FleetReport, FleetSetup, HashedRequest, Workload as Traffic, run};
use kvfleet_sim::routers::{self, ReplayedDecisions};

use super::super::prepare::Workload;
use super::real::{RealRun, RequestRecord};
use crate::cluster::LocalCluster;
use crate::process::{Role, RouterProcessConfig};
use kvfleet_engine::mock::InstanceConfig;

/// The results of both sides.
pub(super) struct CrosscheckSides {
    pub(super) real: RealRun,
    /// The simulated fleet that decides independently.
    pub(super) independent: SimulatedRun,
    /// The simulated fleet that replays the decisions of the real one.
    pub(super) replayed: SimulatedRun,
    /// Ratio of measured prefill times to those of the profile, and mean time from a decision until
    /// the request reached the instance.
    pub(super) prefill_ratio: f64,
    pub(super) delivery: Duration,
    /// Tokens of each prompt.
    pub(super) input_tokens: Vec<u32>,
    /// Instances up to this number have an own node.
    pub(super) nodes: u32,
}

/// Decisions and report of one simulated fleet.
pub(super) struct SimulatedRun {
    pub(super) decided: Vec<Option<Decision>>,
    pub(super) report: FleetReport,
}

/// The setup of the simulated fleet that mirrors a cluster.
pub(super) fn setup(cluster: &LocalCluster) -> anyhow::Result<FleetSetup> {
    let RouterProcessConfig { router, .. } = cluster.configuration((Role::Router, 1))?;
    let (node, instance) =
        (cluster.configuration((Role::Node, 1))?, cluster.configuration((Role::Instance, 1))?);
    let shape = cluster.shape();
    mirror_setup(&router, &node, &instance, shape.instances, shape.nodes)
}

fn mirror_setup(
    router: &RouterConfig,
    node: &NodeConfig,
    instance: &InstanceConfig,
    instances: u32,
    nodes: u32,
) -> anyhow::Result<FleetSetup> {
    let takes_time = instance.time_scale > 0.0;
    let scale = if takes_time { instance.time_scale } else { 1.0 };
    // Each of these settings would make the two sides incomparable.
    let alike = [
        (router.profile == instance.profile, "router.profile differs from instance.profile"),
        (
            (router.time_scale - scale).abs() <= f64::EPSILON,
            "router.time_scale differs from instance.time_scale",
        ),
        (instance.role() == Some(kv_core::schedule::InstanceRole::Both), "instances have roles"),
        (!router.price_links, "router.price_links is on"),
        (!instance.report_links, "instance.report_links tells routers which paths blocks took"),
        (!router.windows, "router.windows is on"),
        (router.hot_copies.bytes_per_second == 0, "router.hot_copies copies hot prefixes"),
        (router.slow_start_ms == 0, "router.slow_start_ms has instances start slowly"),
        (router.admission.ttft_max_ms == 0, "router.admission.ttft_max_ms turns requests away"),
        (router.admission.tbt_max_us == 0, "router.admission.tbt_max_us turns requests away"),
        (instance.kv_tokens_max == 0, "instance.kv_tokens_max bounds what instances hold"),
        (
            !instance.checks_decode_admission,
            "instance.checks_decode_admission ends requests before they decode",
        ),
        (node.gpu_bytes == 0, "node.gpu_bytes gives nodes a GPU tier"),
        (node.quotas.is_empty(), "node.quotas bounds tenants"),
        (node.ssd_write_bytes_per_day == 0, "node.ssd_write_bytes_per_day bounds writes"),
    ];
    if let Some((_, what)) = alike.into_iter().find(|(is_alike, _)| !is_alike) {
        anyhow::bail!("{what}: the fleet in virtual time does not model this; leave it out");
    }
    let blocks = |capacity: Capacity, key: &str| match capacity {
        Capacity::Blocks(blocks) => Ok(blocks),
        Capacity::Bytes(0) => Ok(0),
        _ => Err(anyhow::anyhow!(
            "node.{key}_bytes: the fleet in virtual time counts blocks; set node.{key}_blocks"
        )),
    };
    let (dram, ssd) = (blocks(node.dram_capacity(), "dram")?, blocks(node.ssd_capacity(), "ssd")?);
    let profile = HardwareProfile::by_name(&router.profile).unwrap_or_default().scaled(router.time_scale);
    Ok(FleetSetup {
        first: 1,
        policy: node.policy.clone(),
        watermarks: (node.watermark_high, node.watermark_low),
        ssd_reuse_min: node.ssd_reuse_min,
        report_every_ns: instance.report_ms.saturating_mul(1_000_000),
        ..FleetSetup::mock_engines(instances, nodes, profile, takes_time, dram, ssd)
    })
}

/// Requests per second that such a fleet can serve.
pub(super) fn capacity(workload: &Workload, setup: &FleetSetup) -> f64 {
    let at_ns = |nth: usize| workload.requests[nth].arrival_us.saturating_mul(1_000);
    routers::capacity(&hashed_traffic(workload, at_ns), setup)
}

/// Simulates the requests of the real run, each at the time at which the real router decided it.
pub(super) fn simulate_both(workload: &Workload, setup: &FleetSetup, real: RealRun) -> CrosscheckSides {
    let traffic = hashed_traffic(workload, |nth| decision_time_ns(&real.requests[nth]));
    let sent = real.requests.iter().map(|went| Some(InstanceId(went.decision.as_ref()?.instance)));
    let sent: Vec<_> = sent.collect();
    // Instances report at the recorded times, because an instance that has just reported itself
    // idle is chosen.
    let reports_ns = real.reports.iter().map(|all| all.iter().map(ns).collect()).collect();
    // Prefills take as long as measured on this machine, which routers do not know.
    let (prefill_ratio, delivery) = (measured_prefill_ratio(&real, setup), mean_delivery(&real));
    let delivery_ns = ns(&delivery);
    let actual = setup.actual.scaled(prefill_ratio);
    let setup = FleetSetup { reports_ns, actual, delivery_ns, ..setup.clone() };
    let simulate = |mut router: ReplayedDecisions| {
        let report = run(&traffic, &setup, &mut router);
        SimulatedRun { decided: router.decisions, report }
    };
    let (alone, led) =
        (simulate(ReplayedDecisions::recording()), simulate(ReplayedDecisions::following(sent)));
    let input_tokens = workload.requests.iter().map(|request| request.input_tokens).collect();
    CrosscheckSides {
        real,
        independent: alone,
        replayed: led,
        prefill_ratio,
        delivery,
        input_tokens,
        nodes: setup.nodes,
    }
}

fn ns(time: &Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// When a router decided: a call is assumed to take equally long in both directions.
fn decision_time_ns(went: &RequestRecord) -> u64 {
    ns(&went.at.saturating_add(Duration::from_micros(went.sample.route_us / 2)))
}

/// Mean time from a decision until its request is at the instance: half of the time of routing and
/// running that was not spent inside the instance. The mean is used because it determines how many
/// requests are in flight when their instance reports. Zero if no prefill was timed.
fn mean_delivery(real: &RealRun) -> Duration {
    let delivery_us = |went: &RequestRecord| {
        let timed = went.sample.timed?;
        let inside_us = timed.queue_us + timed.prefill_us + went.sample.save_us.unwrap_or_default();
        Some(went.sample.total_us.saturating_sub(inside_us) / 2)
    };
    let all: Vec<u64> = real.requests.iter().filter_map(delivery_us).collect();
    Duration::from_micros(all.iter().sum::<u64>() / all.len().max(1) as u64)
}

/// Ratio of the sum of measured prefill times to that of the profile; 1 if no prefill was timed.
fn measured_prefill_ratio(real: &RealRun, setup: &FleetSetup) -> f64 {
    // Modelled values are in the profile's own time.
    let own = HardwareProfile::by_name(setup.profile.name).unwrap_or_default();
    let scale = setup.profile.prefill_ns_per_token as f64 / own.prefill_ns_per_token as f64;
    let timed = real.requests.iter().filter_map(|went| Some((went.sample.timed?, went.sample.modelled)));
    let (took, modelled) = timed.fold((0.0, 0.0), |(took, modelled), (timed, of)| {
        let computed_us = timed.prefill_us.saturating_sub(timed.idle_us);
        (took + computed_us as f64, modelled + of.prefill_us as f64 * scale)
    });
    if took > 0.0 && modelled > 0.0 { took / modelled } else { 1.0 }
}

fn hashed_traffic(workload: &Workload, at_ns: impl Fn(usize) -> u64) -> Traffic {
    let hashed = |(nth, request): (usize, &super::super::prepare::PreparedRequest)| HashedRequest {
        arrival_ns: at_ns(nth),
        input_tokens: request.input_tokens,
        output_tokens: request.output_tokens,
        category: request.category,
        hashes: request.hashes.clone(),
    };
    Traffic::from_hashed(workload.block_tokens, workload.requests.iter().enumerate().map(hashed))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kvfleet_errors_doc::says;

    use super::*;

    fn configured() -> (RouterConfig, NodeConfig, InstanceConfig) {
        let router = RouterConfig {
            price_links: false,
            windows: false,
            slow_start_ms: 0,
            time_scale: 0.25,
            ..RouterConfig::default()
        };
        let node = NodeConfig { dram_blocks: Some(7), ssd_blocks: Some(5), ..NodeConfig::default() };
        let instance = InstanceConfig { time_scale: 0.25, report_links: false, ..InstanceConfig::default() };
        (router, node, instance)
    }

    #[test]
    fn mirror_uses_the_cluster_configuration() {
        let (router, mut node, mut instance) = configured();
        (node.policy, node.watermark_high, node.watermark_low) = ("lru".into(), 0.9, 0.8);
        instance.report_ms = 50;
        let setup = mirror_setup(&router, &node, &instance, 3, 2).unwrap();
        assert_eq!((setup.instances, setup.nodes, setup.first), (3, 2, 1));
        assert_eq!((setup.node_blocks, setup.policy.as_str(), setup.watermarks), ((7, 5), "lru", (0.9, 0.8)));
        assert_eq!(setup.report_every_ns, 50_000_000);
        assert_eq!(setup.profile, HardwareProfile::default().scaled(0.25));
        assert!(setup.uses_priority_deadlines, "compute takes time");
        let timeless = InstanceConfig { time_scale: 0.0, ..instance };
        let router = RouterConfig { time_scale: 1.0, ..router };
        assert!(!mirror_setup(&router, &node, &timeless, 3, 2).unwrap().uses_priority_deadlines);
    }

    #[test]
    fn rejects_unsupported_settings() {
        let refused = |change: fn(&mut RouterConfig, &mut NodeConfig)| {
            let (mut router, mut node, instance) = configured();
            change(&mut router, &mut node);
            mirror_setup(&router, &node, &instance, 1, 1).unwrap_err().to_string()
        };
        says("a crosscheck with windows", &refused(|router, _| router.windows = true), &[]);
        says("a crosscheck of two time scales", &refused(|router, _| router.time_scale = 1.0), &[]);
        says("a crosscheck with nodes in bytes", &refused(|_, node| node.dram_blocks = None), &[]);
        assert!(refused(|router, _| router.price_links = true).contains("price_links"));
        assert!(refused(|router, _| router.hot_copies.bytes_per_second = 1).contains("router.hot_copies"));
        assert!(refused(|router, _| router.profile = "h100-8b".into()).contains("router.profile"));
    }
}
