//! Each baseline alone, in a fixed scene: its chosen instance, and the points where its published
//! formula switches.
//!
//! Not here: results on traffic (`compare.rs`), and the plans for the chosen instance
//! (`kv_core::schedule`).
#![allow(clippy::unwrap_used)]

use kv_core::id::{
    BlockHash, Category, HASH_BYTES, InstanceId, NodeId, RequestId, TenantId, Tier, Timestamp,
};
use kv_core::index::{Holder, HolderRun, PrefixMatch};
use kv_core::place::Ring;
use kv_core::schedule::{Decision, HardwareProfile, Load, PROFILES, PathSpeed, ResidentPrefix, RouteRequest};
use kvfleet_sim::fleet::{FleetSetup, InstanceUse, RouteQuery, RouterView};
use kvfleet_sim::routers::Route;

use super::*;

const BLOCK_TOKENS: u32 = 100;

/// Blocks of the routed prompt.
const BLOCKS: u32 = 10;

/// Instances, their reported state, and the holders of one prompt's blocks. Initially all are idle
/// and no instance has any block.
struct Scene {
    view: RouterView,
    first_block: BlockHash,
    resident: Vec<ResidentPrefix>,
    /// Blocks held by nodes: first, end (exclusive), and tier.
    on_nodes: Vec<(u32, [u32; 2], Tier)>,
}

impl Scene {
    fn new(instances: u32) -> Scene {
        Scene::with(instances, PROFILES[0])
    }

    fn with(instances: u32, profile: HardwareProfile) -> Scene {
        Scene {
            view: RouterView::new(&FleetSetup::new(instances, profile, BLOCK_TOKENS)),
            first_block: BlockHash([7; _]),
            resident: Vec::new(),
            on_nodes: Vec::new(),
        }
    }

    /// Sets an instance's reported prompt tokens and waiting requests, and its GPU memory use.
    fn with_report(mut self, instance: u32, (tokens, waiting): (u64, u32), memory_in_use: f64) -> Scene {
        let load = Load::reported(tokens, 0, waiting);
        self.view.apply_load(InstanceId(instance), load, memory_in_use, Timestamp(0));
        self
    }

    /// Sets an instance's waiting prompt tokens.
    fn with_queue(self, instance: u32, tokens: u64) -> Scene {
        self.with_report(instance, (tokens, 0), 0.0)
    }

    /// Sets an instance's requests in flight, and their prompt tokens.
    fn with_in_flight(mut self, instance: u32, (in_flight, in_flight_tokens): (u32, u64)) -> Scene {
        let seen = &mut self.view.instance_use[instance as usize];
        *seen = InstanceUse { in_flight, in_flight_tokens, ..*seen };
        self
    }

    /// Sets the leading blocks in an instance's GPU memory.
    fn with_resident(mut self, instance: u32, blocks: u32) -> Scene {
        self.resident.push(ResidentPrefix { instance: InstanceId(instance), blocks });
        self
    }

    /// Sets blocks on an instance's own node.
    fn with_node_blocks(mut self, node: u32, blocks: [u32; 2], tier: Tier) -> Scene {
        self.on_nodes.push((node, blocks, tier));
        self
    }

    /// The blocks on all nodes as a match: runs end where any holder's range ends.
    fn matched(&self) -> PrefixMatch {
        let mut ends: Vec<u32> = self.on_nodes.iter().flat_map(|(_, blocks, _)| *blocks).collect();
        ends.sort_unstable();
        ends.dedup();
        let holder = |&(node, _, tier): &(u32, [u32; 2], Tier)| {
            let node = NodeId(node);
            Holder { node, epoch: self.view.fleet.live(node).unwrap().epoch, tier }
        };
        let run = |ends: &[u32]| {
            let holds = |(_, [from, to], _): &&(u32, [u32; 2], Tier)| *from <= ends[0] && ends[1] <= *to;
            let holders = self.on_nodes.iter().filter(holds).map(holder).collect();
            HolderRun { start_blocks: ends[0], len_blocks: ends[1] - ends[0], holders }
        };
        PrefixMatch { runs: ends.windows(2).map(run).collect() }
    }

    fn decide(&self, router: &mut dyn Router) -> Decision {
        let request = RouteRequest {
            request: RequestId(0),
            tenant: TenantId(0),
            category: Category::default(),
            blocks: BLOCKS,
            first_block: Some(self.first_block),
            block_tokens: BLOCK_TOKENS,
            input_tokens: BLOCKS * BLOCK_TOKENS,
            output_tokens: 0,
            ttft_max_us: 0,
            tbt_max_us: 0,
            queue_priority: Default::default(),
            is_untokenized: false,
        };
        let (matched, resident) = (&self.matched(), self.resident.as_slice());
        let ask = RouteQuery { request, matched, resident, in_flight_prefixes: &[], now: Timestamp(0) };
        match router.route(&ask, &self.view) {
            Route::To(decision) => decision,
            Route::Reject => panic!("{} rejected it", router.name()),
        }
    }

    /// The instance that a new router of this name chooses.
    fn chosen_by(&self, name: &str) -> u32 {
        self.decide(by_name(name, 1).unwrap().as_mut()).instance.0
    }

    /// The choices of one router over repeated requests.
    fn repeated(&self, times: usize, router: &mut dyn Router) -> Vec<u32> {
        (0..times).map(|_| self.decide(router).instance.0).collect()
    }
}

/// Number of times that each of four instances was drawn.
fn counts(drawn: &[u32]) -> [usize; 4] {
    [0, 1, 2, 3].map(|instance| drawn.iter().filter(|drawn| **drawn == instance).count())
}

/// Instance 0 has everything that a router could prefer or avoid.
fn uneven(instances: u32) -> Scene {
    Scene::new(instances).with_queue(0, 50_000).with_in_flight(0, (500, 50_000)).with_resident(0, BLOCKS)
}

#[test]
fn random_is_uniform_and_ignores_state() {
    let drawn = uneven(4).repeated(4_000, by_name("random", 1).unwrap().as_mut());
    // 4,000 draws of chance 1/4: 1,000 each, standard deviation sqrt(4000 * 1/4 * 3/4) = 27.
    assert!(counts(&drawn).iter().all(|count| count.abs_diff(1_000) < 100), "{:?}", counts(&drawn));
    assert_eq!(drawn, Scene::new(4).repeated(4_000, by_name("random", 1).unwrap().as_mut()));
    assert_ne!(drawn, Scene::new(4).repeated(4_000, by_name("random", 2).unwrap().as_mut()));
}

#[test]
fn round_robin_rotates_and_ignores_state() {
    let taken = uneven(3).repeated(7, by_name("round-robin", 1).unwrap().as_mut());
    assert_eq!(taken, [0, 1, 2, 0, 1, 2, 0]);
}

#[test]
fn least_loaded_compares_tokens_then_requests() {
    let routed = |tokens: u64| {
        let mut scene = Scene::new(2).with_queue(0, 1_000).with_resident(0, BLOCKS);
        let mut load = Load::reported(900, 0, 0);
        load.routed_tokens = tokens;
        scene.view.apply_load(InstanceId(1), load, 0.0, Timestamp(0));
        scene
    };
    // 900 reported and 99 routed since are less than 1,000; with 101 they are more. Cached blocks
    // do not count.
    assert_eq!((routed(99).chosen_by("least-loaded"), routed(101).chosen_by("least-loaded")), (1, 0));
    // Requests are not tokens: nine hundred of them do not outweigh one token.
    assert_eq!(routed(99).with_in_flight(1, (900, 0)).chosen_by("least-loaded"), 1);
    let equal = |requests| {
        routed(100).with_in_flight(0, (5, 0)).with_in_flight(1, (requests, 0)).chosen_by("least-loaded")
    };
    assert_eq!((equal(4), equal(6)), (1, 0));
}

#[test]
fn local_prefix_takes_the_longer_of_gpu_and_node_ignoring_load() {
    let longest = |blocks: u32| {
        let scene =
            Scene::new(2).with_resident(0, 4).with_resident(1, 3).with_node_blocks(1, [0, blocks], Tier::Ssd);
        scene.with_queue(1, 50_000).with_in_flight(1, (900, 0)).chosen_by("local-prefix")
    };
    // 4 against max(3, 3), which is not 6, and against max(3, 5).
    assert_eq!((longest(3), longest(5)), (0, 1));
    let equal = |requests| {
        let scene = Scene::new(2).with_resident(0, 4).with_resident(1, 4).with_in_flight(0, (5, 0));
        scene.with_in_flight(1, (requests, 0)).chosen_by("local-prefix")
    };
    assert_eq!((equal(4), equal(6)), (1, 0));
}

#[test]
fn sticky_follows_the_ring_past_instances_at_the_bound() {
    let members: Vec<(NodeId, u32)> = (0..4).map(|node| (NodeId(node), 1)).collect();
    let ring: Vec<u32> = Ring::new(&members).walk(&[7; HASH_BYTES]).map(|node| node.0).collect();
    // Of 160 requests including this one, a fair share is 40 and the bound 50: an instance with 49
    // accepts it, one with 50 does not.
    let to = |loads: [u32; 4]| {
        assert_eq!(loads.iter().sum::<u32>(), 159);
        let place = |scene: Scene, (node, load): (&u32, u32)| scene.with_in_flight(*node, (load, 0));
        ring.iter().zip(loads).fold(Scene::new(4), place).chosen_by("sticky")
    };
    assert_eq!(to([49, 110, 0, 0]), ring[0]);
    assert_eq!(to([50, 49, 60, 0]), ring[1]);
    assert_eq!(to([50, 50, 49, 10]), ring[2]);
    assert_eq!(to([50, 50, 50, 9]), ring[3]);
}

#[test]
fn sticky_depends_only_on_the_first_block() {
    let of = |byte: u8| Scene { first_block: BlockHash([byte; _]), ..Scene::new(4) };
    let to: Vec<u32> = (0..64).map(|byte| of(byte).chosen_by("sticky")).collect();
    assert!(counts(&to).iter().all(|count| *count > 0), "{to:?}");
    let cached = |byte: u8| of(byte).with_resident(0, BLOCKS).with_queue(1, 50_000).chosen_by("sticky");
    assert_eq!(to, (0..64).map(cached).collect::<Vec<_>>());
}

#[test]
fn power_of_two_takes_the_less_loaded_of_two_instances() {
    let loads = [(0, 900), (1, 600), (2, 300), (3, 0)];
    let place = |scene: Scene, nth: usize| scene.with_in_flight(nth as u32, loads[nth]);
    let scene = (0..4).fold(Scene::new(4), place);
    let drawn = counts(&scene.repeated(6_000, by_name("power-of-two", 1).unwrap().as_mut()));
    // Of the six pairs, 0 is the less loaded of three, 1 of two, 2 of one and 3 of none: 3,000,
    // 2,000, 1,000 and 0; standard deviation at most
    // sqrt(6000 * 1/2 * 1/2) = 39.
    let is_near = |(count, expected): (usize, usize)| count.abs_diff(expected) < 150;
    assert!(drawn.into_iter().zip([3_000, 2_000, 1_000]).all(is_near), "{drawn:?}");
    assert_eq!(drawn[3], 0);
    // With two instances the draw has no effect.
    let two = Scene::new(2)
        .with_in_flight(0, (3, 0))
        .with_in_flight(1, (2, 900))
        .with_queue(1, 50_000)
        .with_resident(0, BLOCKS);
    assert_eq!(two.repeated(50, by_name("power-of-two", 1).unwrap().as_mut()), [1; 50]);
}

/// 4 µs to compute a token plus 1 ns for each token before it, 1 µs to move one between nodes; a
/// step takes no time.
fn plain() -> HardwareProfile {
    let lane = PathSpeed { latency_ns: 0, bytes_per_s: 1_000_000_000 };
    HardwareProfile {
        prefill_ns_per_token: 4_000,
        prefill_ps_per_token_context: 1_000,
        step_ns: 0,
        step_ns_per_running: 0,
        kv_bytes_per_token: 1_000,
        gpu: lane,
        dram: lane,
        ssd: lane,
        network: lane,
        ..PROFILES[0]
    }
}

/// The choice with these tokens waiting at instance 0, with eight blocks on its node; the node of
/// instance 1 has `blocks`.
fn mooncake(queue_tokens: u64, blocks: u32) -> Decision {
    let scene = Scene::with(2, plain()).with_queue(0, queue_tokens).with_node_blocks(0, [0, 8], Tier::Dram);
    let scene = if blocks > 0 { scene.with_node_blocks(1, [0, blocks], Tier::Dram) } else { scene };
    scene.decide(&mut mooncake::Mooncake)
}

#[test]
fn mooncake_adds_transfer_queue_and_prefill() {
    // Prefill of n tokens behind c is 4 n + (c n + n²/2) / 1000 µs; that of 200 behind 800 is 800 + 180 = 980.
    // Instance 0: 4 Q + 980. Instance 1 gets all 800 tokens moved: 800 + 980. Equal at Q = 200.
    assert_eq!([199, 201].map(|queue| mooncake(queue, 0).instance.0), [0, 1]);
    // With three blocks there, 500 tokens are moved: 500 + 980. Equal at Q = 125.
    assert_eq!([124, 126].map(|queue| mooncake(queue, 3).instance.0), [0, 1]);
}

#[test]
fn mooncake_transfers_a_prefix_over_twice_the_own_one() {
    // Eight blocks are not more than twice four. Instance 1 computes 600 tokens behind 400: 2400 +
    // 420; 4 Q + 980 is equal at Q = 460. If they were moved, it would be 400 + 980, equal at Q =
    // 100.
    assert_eq!([459, 461].map(|queue| mooncake(queue, 4).instance.0), [0, 1]);
    let from = |decision: &Decision| decision.sources.iter().map(|source| source.node.0).collect::<Vec<_>>();
    assert_eq!(from(&mooncake(461, 4)), [1]);
    assert!(from(&mooncake(201, 0)).contains(&0), "its node has no blocks");
    assert!(mooncake::Mooncake.keeps_fetched(), "a transferred prefix must stay");
}

/// Dynamo's choice with these prompt tokens waiting at instance 0, and these in flight there.
fn dynamo(scene: Scene, (queue_tokens, in_flight_tokens): (u64, u64)) -> u32 {
    scene.with_queue(0, queue_tokens).with_in_flight(0, (1, in_flight_tokens)).chosen_by("dynamo")
}

#[test]
fn dynamo_adds_prefill_and_decode_blocks() {
    // Instance 1: 10 + 10. Instance 0 with four blocks: Q/100 + 10 - 4 + D/100 + 10, equal if Q + D
    // is 400.
    let four = || Scene::new(2).with_resident(0, 4);
    assert_eq!([390, 410].map(|queue| dynamo(four(), (queue, 0))), [0, 1]);
    assert_eq!([390, 410].map(|decode| dynamo(four(), (0, decode))), [0, 1]);
    assert_eq!([190, 210].map(|both| dynamo(four(), (both, 200))), [0, 1]);
    // The number of requests does not matter.
    assert_eq!(four().with_in_flight(0, (900, 390)).chosen_by("dynamo"), 0);
}

#[test]
fn dynamo_weighs_blocks_by_tier() {
    let turns = |scene: fn() -> Scene, credit_tokens: u64| {
        [credit_tokens - 10, credit_tokens + 10].map(|queue| dynamo(scene(), (queue, 0)))
    };
    // Eight blocks in host memory count 6, eight on disk 2.
    assert_eq!(turns(|| Scene::new(2).with_node_blocks(0, [0, 8], Tier::Dram), 600), [0, 1]);
    assert_eq!(turns(|| Scene::new(2).with_node_blocks(0, [0, 8], Tier::Ssd), 200), [0, 1]);
    // Two in GPU memory, four more in host memory and the last four on disk: 2 + 3 + 1.
    let mixed = || {
        let scene = Scene::new(2).with_resident(0, 2).with_node_blocks(0, [0, 6], Tier::Dram);
        scene.with_node_blocks(0, [6, 10], Tier::Ssd)
    };
    assert_eq!(turns(mixed, 600), [0, 1]);
}

#[test]
fn llm_d_weighs_the_prefix_three_to_two_against_the_queue() {
    // Instance 1 has the shortest queue: 2. Instance 0 has the longest, and 3 for the whole prompt:
    // 2.1 for seven blocks, 1.8 for six.
    let to = |blocks| Scene::new(2).with_resident(0, blocks).with_report(0, (0, 1), 0.0).chosen_by("llm-d");
    assert_eq!([7, 6].map(to), [0, 1]);
    // Queues of equal length have no effect, and neither do the tokens in them.
    let equal = Scene::new(2).with_resident(0, 1).with_report(0, (900, 3), 0.0).with_report(1, (0, 3), 0.0);
    assert_eq!(equal.chosen_by("llm-d"), 0);
}

#[test]
fn llm_d_weighs_free_memory_as_the_queue_and_two_to_three_against_the_prefix() {
    // Four blocks count 1.2; memory use higher by 0.59 costs 1.18, by 0.61 1.22.
    let prefix = |in_use| Scene::new(2).with_resident(0, 4).with_report(0, (0, 0), in_use).chosen_by("llm-d");
    assert_eq!([0.59, 0.61].map(prefix), [0, 1]);
    // With queues of 0, 1 and 4 the second is 3/4 of the way: 2 against 1.5 for the queue, and 0.48
    // or 0.52 for the second's free memory.
    let queue = |in_use| {
        let scene = Scene::new(3).with_report(0, (0, 0), in_use).with_report(1, (0, 1), 0.0);
        scene.with_report(2, (0, 4), 0.0).chosen_by("llm-d")
    };
    assert_eq!([0.24, 0.26].map(queue), [0, 1]);
}

#[test]
fn llm_d_counts_a_host_memory_block_as_four_fifths() {
    // Two in GPU memory and eight more in host memory are 2 + 6.4, between eight and nine in GPU
    // memory.
    let to = |blocks| {
        let scene = Scene::new(2).with_resident(0, 2).with_resident(1, blocks);
        scene.with_node_blocks(0, [0, 10], Tier::Dram).chosen_by("llm-d")
    };
    assert_eq!([8, 9].map(to), [0, 1]);
}

#[test]
fn sglang_leaves_the_prefix_if_both_imbalance_measures_hold() {
    // The whole prompt is on the most loaded instance; instance 2 is the least loaded.
    let to = |(most, least): (u32, u32)| {
        let scene = Scene::new(3).with_resident(0, BLOCKS).with_in_flight(0, (most, 0));
        scene.with_in_flight(1, (least + 1, 0)).with_in_flight(2, (least, 0)).chosen_by("sglang")
    };
    // More than 64 apart, and any number is more than 1.5 times zero.
    assert_eq!([(64, 0), (65, 0)].map(to), [0, 2]);
    // More than 1.5 times 134, which is 201; both are more than 64 apart.
    assert_eq!([(200, 134), (202, 134)].map(to), [0, 2]);
    // Twice as many, and not far apart.
    assert_eq!(to((60, 30)), 0);
}

#[test]
fn sglang_follows_long_prefixes_and_otherwise_the_emptiest_cache() {
    let to = |prefix: u32, on_nodes: [u64; 3]| {
        let mut scene = Scene::new(3).with_resident(0, prefix);
        scene.view.apply_block_counts(|node| on_nodes[node.0 as usize]);
        scene.chosen_by("sglang")
    };
    // Three of ten are not more than 0.3.
    assert_eq!([4, 3].map(|prefix| to(prefix, [20, 11, 10])), [0, 2]);
    assert_eq!(to(3, [20, 10, 11]), 1);
    assert_eq!(to(3, [9, 10, 11]), 0);
    // Equal prefixes: the one with fewer requests.
    let equal = |requests| {
        let scene = Scene::new(2).with_resident(0, 5).with_resident(1, 5).with_in_flight(0, (5, 0));
        scene.with_in_flight(1, (requests, 0)).chosen_by("sglang")
    };
    assert_eq!((equal(4), equal(6)), (1, 0));
}
