//! The fleet in virtual time: made of the configuration that the real one's processes were started with, and served the same requests at the moments at
//! which they were sent there.
//!
//! What such a fleet has no counterpart of is refused. Not here: the fleet itself (`kvfleet_sim::fleet`).

use std::time::Duration;

use kv_core::id::InstanceId;
use kv_core::schedule::{Decision, HardwareProfile};
use kv_core::tier::Capacity;
use kvfleet_node::NodeConfig;
use kvfleet_router::RouterConfig;
use kvfleet_sim::fleet::{Hashed, Report, Setup, Workload as Traffic, run};
use kvfleet_sim::routers::{self, Led};

use super::super::prepare::Workload;
use super::real::{Recorded, Went};
use crate::cluster::Cluster;
use crate::instance::InstanceConfig;
use crate::process::{Role, RouterProcessConfig};

/// What became of the requests on both sides.
pub(super) struct Twins {
    pub(super) real: Recorded,
    /// Of the fleet in virtual time that goes its own way.
    pub(super) alone: Course,
    /// Of the one that is led by the real one.
    pub(super) led: Course,
    /// How many times as long as the profile says prefills took, and how long requests were on their way from a decision to the instance.
    pub(super) slower: f64,
    pub(super) delivery: Duration,
    /// Tokens of each prompt.
    pub(super) input_tokens: Vec<u32>,
    /// Instances with an own node: those up to this number.
    pub(super) nodes: u32,
}

/// What a fleet in virtual time decided, and what came of it.
pub(super) struct Course {
    pub(super) decided: Vec<Option<Decision>>,
    pub(super) report: Report,
}

/// The fleet in virtual time that a cluster has as its twin.
pub(super) fn setup(cluster: &Cluster) -> anyhow::Result<Setup> {
    let RouterProcessConfig { router, .. } = cluster.configuration((Role::Router, 1))?;
    let (node, instance) =
        (cluster.configuration((Role::Node, 1))?, cluster.configuration((Role::Instance, 1))?);
    let shape = cluster.shape();
    made_of(&router, &node, &instance, (shape.instances, shape.nodes))
}

fn made_of(
    router: &RouterConfig,
    node: &NodeConfig,
    instance: &InstanceConfig,
    counts: (u32, u32),
) -> anyhow::Result<Setup> {
    let takes_time = instance.time_scale > 0.0;
    let scale = if takes_time { instance.time_scale } else { 1.0 };
    // Whoever sets such a key asks for something that would be compared with something else.
    let alike = [
        (router.profile == instance.profile, "router.profile differs from instance.profile"),
        (
            (router.time_scale - scale).abs() <= f64::EPSILON,
            "router.time_scale differs from instance.time_scale",
        ),
        (instance.role() == Some(kv_core::schedule::Role::Both), "instances have roles"),
        (!router.price_links, "router.price_links is on"),
        (!instance.report_links, "instance.report_links tells routers by which paths blocks came"),
        (!router.windows, "router.windows is on"),
        (router.hot_copies.bytes_per_second == 0, "router.hot_copies copies hot prefixes"),
        (router.slow_start_ms == 0, "router.slow_start_ms has instances start slowly"),
        (router.admission.ttft_max_ms == 0, "router.admission.ttft_max_ms turns requests away"),
        (router.admission.tbt_max_us == 0, "router.admission.tbt_max_us turns requests away"),
        (instance.kv_tokens_max == 0, "instance.kv_tokens_max bounds what instances hold"),
        (!instance.asks_to_decode, "instance.asks_to_decode ends requests before they decode"),
        (node.gpu_bytes == 0, "node.gpu_bytes gives nodes a GPU tier"),
        (node.quotas.is_empty(), "node.quotas bounds tenants"),
        (node.ssd_write_bytes_per_day == 0, "node.ssd_write_bytes_per_day bounds writes"),
    ];
    if let Some((_, what)) = alike.into_iter().find(|(is_alike, _)| !is_alike) {
        anyhow::bail!("{what}: the fleet in virtual time has no such thing; leave it out");
    }
    let blocks = |capacity: Capacity, key: &str| match capacity {
        Capacity::Blocks(blocks) => Ok(blocks),
        Capacity::Bytes(0) => Ok(0),
        _ => Err(anyhow::anyhow!(
            "node.{key}_bytes: the fleet in virtual time counts blocks; set node.{key}_blocks"
        )),
    };
    let node_blocks = (blocks(node.dram_capacity(), "dram")?, blocks(node.ssd_capacity(), "ssd")?);
    let profile = HardwareProfile::by_name(&router.profile).unwrap_or_default().scaled(router.time_scale);
    Ok(Setup {
        first: 1,
        policy: node.policy.clone(),
        watermarks: (node.watermark_high, node.watermark_low),
        ssd_reuse_min: node.ssd_reuse_min,
        report_every_ns: instance.report_ms.saturating_mul(1_000_000),
        ..Setup::stand_ins(counts, profile, takes_time, node_blocks)
    })
}

/// Requests a second that such a fleet gets through.
pub(super) fn capacity(workload: &Workload, setup: &Setup, seed: u64) -> f64 {
    let at_ns = |nth: usize| workload.requests[nth].arrival_us.saturating_mul(1_000);
    routers::capacity(&traffic(workload, at_ns), setup, seed)
}

/// Serves what the real fleet was sent, each request at the moment at which it was decided there.
pub(super) fn serve(workload: &Workload, setup: &Setup, real: Recorded) -> Twins {
    let traffic = traffic(workload, |nth| decided_ns(&real.went[nth]));
    let sent = real.went.iter().map(|went| Some(InstanceId(went.decision.as_ref()?.instance)));
    let sent: Vec<_> = sent.collect();
    // Instances report when they did: who has just said that it is idle is chosen, and it matters who that is.
    let reports_ns = real.reports.iter().map(|all| all.iter().map(ns).collect()).collect();
    // And compute as fast as they turned out to on this machine, of which routers know nothing.
    let (slower, delivery) = (slower(&real, setup), delivery(&real));
    let delivery_ns = ns(&delivery);
    let actual = setup.actual.scaled(slower);
    let setup = Setup { reports_ns, actual, delivery_ns, ..setup.clone() };
    let course = |mut router: Led| {
        let report = run(&traffic, &setup, &mut router);
        Course { decided: router.decided, report }
    };
    let (alone, led) = (course(Led::alone()), course(Led::to(sent)));
    let input_tokens = workload.requests.iter().map(|request| request.input_tokens).collect();
    Twins { real, alone, led, slower, delivery, input_tokens, nodes: setup.nodes }
}

fn ns(time: &Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// When a router decided: a call takes as long there as back.
fn decided_ns(went: &Went) -> u64 {
    ns(&went.at.saturating_add(Duration::from_micros(went.sample.route_us / 2)))
}

/// From a decision until its request is at the instance: half of what routing and running took beside what goes on at the instance. The mean, as it is in
/// proportion to that how many requests are on their way when their instance reports. Nothing where no prefill was timed.
fn delivery(real: &Recorded) -> Duration {
    let on_its_way_us = |went: &Went| {
        let timed = went.sample.timed?;
        let inside_us = timed.queue_us + timed.prefill_us + went.sample.save_us.unwrap_or_default();
        Some(went.sample.total_us.saturating_sub(inside_us) / 2)
    };
    let all: Vec<u64> = real.went.iter().filter_map(on_its_way_us).collect();
    Duration::from_micros(all.iter().sum::<u64>() / all.len().max(1) as u64)
}

/// How many times as long as the profile says prefills took, all together; 1 where none was timed.
fn slower(real: &Recorded, setup: &Setup) -> f64 {
    // What is modelled is in the profile's own time.
    let own = HardwareProfile::by_name(setup.profile.name).unwrap_or_default();
    let scale = setup.profile.prefill_ns_per_token as f64 / own.prefill_ns_per_token as f64;
    let timed = real.went.iter().filter_map(|went| Some((went.sample.timed?, went.sample.modelled)));
    let (took, modelled) = timed.fold((0.0, 0.0), |(took, modelled), (timed, of)| {
        let computed_us = timed.prefill_us.saturating_sub(timed.idle_us);
        (took + computed_us as f64, modelled + of.prefill_us as f64 * scale)
    });
    if took > 0.0 && modelled > 0.0 { took / modelled } else { 1.0 }
}

fn traffic(workload: &Workload, at_ns: impl Fn(usize) -> u64) -> Traffic {
    let hashed = |(nth, request): (usize, &super::super::prepare::Prepared)| Hashed {
        arrival_ns: at_ns(nth),
        input_tokens: request.input_tokens,
        output_tokens: request.output_tokens,
        category: request.category,
        hashes: request.hashes.clone(),
    };
    Traffic::hashed(workload.block_tokens, workload.requests.iter().enumerate().map(hashed))
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
    fn the_twin_is_made_of_the_configuration() {
        let (router, mut node, mut instance) = configured();
        (node.policy, node.watermark_high, node.watermark_low) = ("lru".into(), 0.9, 0.8);
        instance.report_ms = 50;
        let setup = made_of(&router, &node, &instance, (3, 2)).unwrap();
        assert_eq!((setup.instances, setup.nodes, setup.first), (3, 2, 1));
        assert_eq!((setup.node_blocks, setup.policy.as_str(), setup.watermarks), ((7, 5), "lru", (0.9, 0.8)));
        assert_eq!(setup.report_every_ns, 50_000_000);
        assert_eq!(setup.profile, HardwareProfile::default().scaled(0.25));
        assert!(setup.orders, "compute takes time");
        let timeless = InstanceConfig { time_scale: 0.0, ..instance };
        let router = RouterConfig { time_scale: 1.0, ..router };
        assert!(!made_of(&router, &node, &timeless, (3, 2)).unwrap().orders);
    }

    #[test]
    fn what_has_no_counterpart_is_refused() {
        let refused = |change: fn(&mut RouterConfig, &mut NodeConfig)| {
            let (mut router, mut node, instance) = configured();
            change(&mut router, &mut node);
            made_of(&router, &node, &instance, (1, 1)).unwrap_err().to_string()
        };
        says("a crosscheck with windows", &refused(|router, _| router.windows = true), &[]);
        says("a crosscheck of two time scales", &refused(|router, _| router.time_scale = 1.0), &[]);
        says("a crosscheck with nodes in bytes", &refused(|_, node| node.dram_blocks = None), &[]);
        assert!(refused(|router, _| router.price_links = true).contains("price_links"));
        assert!(refused(|router, _| router.hot_copies.bytes_per_second = 1).contains("router.hot_copies"));
        assert!(refused(|router, _| router.profile = "h100-8b".into()).contains("router.profile"));
    }
}
