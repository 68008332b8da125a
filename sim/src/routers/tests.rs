//! Each baseline alone, in a fleet that is written down: where it sends a prompt, and where its published formula turns.
//!
//! Not here: what they come to on traffic (`compare.rs`), and what is fetched and computed for what they choose (`kv_core::schedule`).
#![allow(clippy::unwrap_used)]

use kv_core::id::{BlockHash, Category, RequestId, TenantId, Tier, Timestamp};
use kv_core::index::{Holder, HolderRun};
use kv_core::place::Ring;
use kv_core::schedule::{HardwareProfile, Lane, Load, PROFILES, Resident, RouteRequest};

use super::*;
use crate::fleet::{Seen, Setup};

const BLOCK_TOKENS: u32 = 100;

/// Of the prompt that is routed.
const BLOCKS: u32 = 10;

/// Instances, what is known of them, and who has which blocks of one prompt. At first all are idle and nobody has any.
struct Scene {
    view: View,
    first_block: BlockHash,
    resident: Vec<Resident>,
    /// Nodes with the blocks that they hold: from one, to before another, and in which tier.
    on_nodes: Vec<(u32, [u32; 2], Tier)>,
}

impl Scene {
    fn new(instances: u32) -> Scene {
        Scene::with(instances, PROFILES[0])
    }

    fn with(instances: u32, profile: HardwareProfile) -> Scene {
        Scene {
            view: View::new(&Setup::new(instances, profile, BLOCK_TOKENS)),
            first_block: BlockHash([7; 16]),
            resident: Vec::new(),
            on_nodes: Vec::new(),
        }
    }

    /// With so many prompt tokens and requests that wait at an instance, and this share of its GPU memory in use, as reported.
    fn reported(mut self, instance: u32, (tokens, waiting): (u64, u32), memory_in_use: f64) -> Scene {
        let load = Load::reported(tokens, 0, waiting);
        self.view.reported(InstanceId(instance), load, memory_in_use, Timestamp(0));
        self
    }

    /// With so many prompt tokens that wait at an instance.
    fn queue(self, instance: u32, tokens: u64) -> Scene {
        self.reported(instance, (tokens, 0), 0.0)
    }

    /// With so many requests under way to an instance, and their prompt tokens.
    fn under_way(mut self, instance: u32, (in_flight, in_flight_tokens): (u32, u64)) -> Scene {
        let seen = &mut self.view.seen[instance as usize];
        *seen = Seen { in_flight, in_flight_tokens, ..*seen };
        self
    }

    /// With so many leading blocks in an instance's GPU memory.
    fn in_gpu(mut self, instance: u32, blocks: u32) -> Scene {
        self.resident.push(Resident { instance: InstanceId(instance), blocks });
        self
    }

    /// With these blocks on an instance's own node.
    fn on_node(mut self, node: u32, blocks: [u32; 2], tier: Tier) -> Scene {
        self.on_nodes.push((node, blocks, tier));
        self
    }

    /// The same of whoever holds them: runs end where any of them does.
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

    fn decided(&self, router: &mut dyn Router) -> Decision {
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
            standing: Default::default(),
            is_text: false,
        };
        let (matched, resident) = (&self.matched(), self.resident.as_slice());
        let ask = Ask { request, matched, resident, coming: &[], now: Timestamp(0) };
        match router.route(&ask, &self.view) {
            Route::To(decision) => decision,
            Route::Reject => panic!("{} turned it away", router.name()),
        }
    }

    /// Where a fresh router of this name sends the prompt.
    fn to(&self, name: &str) -> u32 {
        self.decided(by_name(name, 1).unwrap().as_mut()).instance.0
    }

    /// Where one router sends it, so many times.
    fn times(&self, times: usize, router: &mut dyn Router) -> Vec<u32> {
        (0..times).map(|_| self.decided(router).instance.0).collect()
    }
}

/// How often each of four was drawn.
fn counts(drawn: &[u32]) -> [usize; 4] {
    [0, 1, 2, 3].map(|instance| drawn.iter().filter(|drawn| **drawn == instance).count())
}

/// Instance 0 has all that a router could look for, or all that it could shun.
fn uneven(instances: u32) -> Scene {
    Scene::new(instances).queue(0, 50_000).under_way(0, (500, 50_000)).in_gpu(0, BLOCKS)
}

#[test]
fn random_draws_all_alike_and_looks_at_nothing() {
    let drawn = uneven(4).times(4_000, by_name("random", 1).unwrap().as_mut());
    // 4,000 draws of chance 1/4: 1,000 each, standard deviation sqrt(4000 * 1/4 * 3/4) = 27.
    assert!(counts(&drawn).iter().all(|count| count.abs_diff(1_000) < 100), "{:?}", counts(&drawn));
    assert_eq!(drawn, Scene::new(4).times(4_000, by_name("random", 1).unwrap().as_mut()));
    assert_ne!(drawn, Scene::new(4).times(4_000, by_name("random", 2).unwrap().as_mut()));
}

#[test]
fn round_robin_takes_one_after_the_other_and_looks_at_nothing() {
    let taken = uneven(3).times(7, by_name("round-robin", 1).unwrap().as_mut());
    assert_eq!(taken, [0, 1, 2, 0, 1, 2, 0]);
}

#[test]
fn the_least_loaded_has_the_fewest_tokens_ahead_and_of_equal_ones_the_fewest_requests() {
    let routed = |tokens: u64| {
        let mut scene = Scene::new(2).queue(0, 1_000).in_gpu(0, BLOCKS);
        let mut load = Load::reported(900, 0, 0);
        load.routed_tokens = tokens;
        scene.view.reported(InstanceId(1), load, 0.0, Timestamp(0));
        scene
    };
    // 900 reported and 99 routed since are less than 1,000; with 101 they are more. What is cached counts for nothing.
    assert_eq!((routed(99).to("least-loaded"), routed(101).to("least-loaded")), (1, 0));
    // Requests are no tokens: nine hundred of them do not outweigh one.
    assert_eq!(routed(99).under_way(1, (900, 0)).to("least-loaded"), 1);
    let equal = |requests| routed(100).under_way(0, (5, 0)).under_way(1, (requests, 0)).to("least-loaded");
    assert_eq!((equal(4), equal(6)), (1, 0));
}

#[test]
fn the_local_prefix_is_the_longer_of_gpu_memory_and_node_whatever_waits_there() {
    let longest = |blocks: u32| {
        let scene = Scene::new(2).in_gpu(0, 4).in_gpu(1, 3).on_node(1, [0, blocks], Tier::Ssd);
        scene.queue(1, 50_000).under_way(1, (900, 0)).to("local-prefix")
    };
    // 4 against max(3, 3), which is not 6, and against max(3, 5).
    assert_eq!((longest(3), longest(5)), (0, 1));
    let equal = |requests| {
        let scene = Scene::new(2).in_gpu(0, 4).in_gpu(1, 4).under_way(0, (5, 0));
        scene.under_way(1, (requests, 0)).to("local-prefix")
    };
    assert_eq!((equal(4), equal(6)), (1, 0));
}

#[test]
fn sticky_goes_on_along_the_ring_from_where_the_bound_is_reached() {
    let members: Vec<(NodeId, u32)> = (0..4).map(|node| (NodeId(node), 1)).collect();
    let ring: Vec<u32> = Ring::new(&members).walk(&[7; 16]).map(|node| node.0).collect();
    // Of 160 requests, this one counted, a fair share is 40 and the bound 50: who has 49 takes it, who has 50 does not.
    let to = |loads: [u32; 4]| {
        assert_eq!(loads.iter().sum::<u32>(), 159);
        let place = |scene: Scene, (node, load): (&u32, u32)| scene.under_way(*node, (load, 0));
        ring.iter().zip(loads).fold(Scene::new(4), place).to("sticky")
    };
    assert_eq!(to([49, 110, 0, 0]), ring[0]);
    assert_eq!(to([50, 49, 60, 0]), ring[1]);
    assert_eq!(to([50, 50, 49, 10]), ring[2]);
    assert_eq!(to([50, 50, 50, 9]), ring[3]);
}

#[test]
fn sticky_sends_alike_what_begins_alike_and_looks_at_no_cache() {
    let of = |byte: u8| Scene { first_block: BlockHash([byte; 16]), ..Scene::new(4) };
    let to: Vec<u32> = (0..64).map(|byte| of(byte).to("sticky")).collect();
    assert!(counts(&to).iter().all(|count| *count > 0), "{to:?}");
    let cached = |byte: u8| of(byte).in_gpu(0, BLOCKS).queue(1, 50_000).to("sticky");
    assert_eq!(to, (0..64).map(cached).collect::<Vec<_>>());
}

#[test]
fn power_of_two_takes_the_one_with_fewer_requests_of_two_different_ones() {
    let loads = [(0, 900), (1, 600), (2, 300), (3, 0)];
    let place = |scene: Scene, nth: usize| scene.under_way(nth as u32, loads[nth]);
    let scene = (0..4).fold(Scene::new(4), place);
    let drawn = counts(&scene.times(6_000, by_name("power-of-two", 1).unwrap().as_mut()));
    // Of the six pairs, 0 is the less loaded of three, 1 of two, 2 of one and 3 of none: 3,000, 2,000, 1,000 and 0; standard deviation at most
    // sqrt(6000 * 1/2 * 1/2) = 39.
    let is_near = |(count, expected): (usize, usize)| count.abs_diff(expected) < 150;
    assert!(drawn.into_iter().zip([3_000, 2_000, 1_000]).all(is_near), "{drawn:?}");
    assert_eq!(drawn[3], 0);
    // Among two there is nothing to draw.
    let two = Scene::new(2).under_way(0, (3, 0)).under_way(1, (2, 900)).queue(1, 50_000).in_gpu(0, BLOCKS);
    assert_eq!(two.times(50, by_name("power-of-two", 1).unwrap().as_mut()), [1; 50]);
}

/// 4 µs to compute a token and 1 ns more for each before it, 1 µs to move one between nodes; a step takes no time.
fn plain() -> HardwareProfile {
    let lane = Lane { latency_ns: 0, bytes_per_s: 1_000_000_000 };
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

/// Where it goes while so many tokens wait at instance 0, whose node has eight blocks; that of instance 1 has these.
fn mooncake(queue_tokens: u64, blocks: u32) -> Decision {
    let scene = Scene::with(2, plain()).queue(0, queue_tokens).on_node(0, [0, 8], Tier::Dram);
    let scene = if blocks > 0 { scene.on_node(1, [0, blocks], Tier::Dram) } else { scene };
    scene.decided(&mut mooncake::Mooncake)
}

#[test]
fn mooncake_adds_transfer_queue_and_prefill() {
    // Prefill of n tokens behind c is 4 n + (c n + n²/2) / 1000 µs; that of 200 behind 800 is 800 + 180 = 980.
    // Instance 0: 4 Q + 980. Instance 1 gets all 800 tokens moved: 800 + 980. Equal at Q = 200.
    assert_eq!([199, 201].map(|queue| mooncake(queue, 0).instance.0), [0, 1]);
    // With three blocks there, 500 are moved: 500 + 980. Equal at Q = 125.
    assert_eq!([124, 126].map(|queue| mooncake(queue, 3).instance.0), [0, 1]);
}

#[test]
fn mooncake_moves_a_prefix_that_is_more_than_twice_the_own_one() {
    // Eight blocks are not more than twice four. Instance 1 computes 600 tokens behind 400: 2400 + 420; 4 Q + 980 is equal at Q = 460. Were they
    // moved, it would be 400 + 980, equal at Q = 100.
    assert_eq!([459, 461].map(|queue| mooncake(queue, 4).instance.0), [0, 1]);
    let from = |decision: &Decision| decision.sources.iter().map(|source| source.node.0).collect::<Vec<_>>();
    assert_eq!(from(&mooncake(461, 4)), [1]);
    assert!(from(&mooncake(201, 0)).contains(&0), "its node has none");
    assert!(mooncake::Mooncake.keeps_fetched(), "a prefix that is moved is there afterwards");
}

/// Where Dynamo sends it while so many prompt tokens wait at instance 0, and so many are of requests under way there.
fn dynamo(scene: Scene, (queue_tokens, in_flight_tokens): (u64, u64)) -> u32 {
    scene.queue(0, queue_tokens).under_way(0, (1, in_flight_tokens)).to("dynamo")
}

#[test]
fn dynamo_adds_blocks_to_prefill_and_blocks_that_decode() {
    // Instance 1: 10 + 10. Instance 0 with four blocks: Q/100 + 10 - 4 + D/100 + 10, equal where Q + D is 400.
    let four = || Scene::new(2).in_gpu(0, 4);
    assert_eq!([390, 410].map(|queue| dynamo(four(), (queue, 0))), [0, 1]);
    assert_eq!([390, 410].map(|decode| dynamo(four(), (0, decode))), [0, 1]);
    assert_eq!([190, 210].map(|both| dynamo(four(), (both, 200))), [0, 1]);
    // How many requests these are of is nothing to it.
    assert_eq!(four().under_way(0, (900, 390)).to("dynamo"), 0);
}

#[test]
fn dynamo_counts_blocks_by_where_they_are() {
    let turns = |scene: fn() -> Scene, credit_tokens: u64| {
        [credit_tokens - 10, credit_tokens + 10].map(|queue| dynamo(scene(), (queue, 0)))
    };
    // Eight in the host's memory count 6, eight on a disk 2.
    assert_eq!(turns(|| Scene::new(2).on_node(0, [0, 8], Tier::Dram), 600), [0, 1]);
    assert_eq!(turns(|| Scene::new(2).on_node(0, [0, 8], Tier::Ssd), 200), [0, 1]);
    // Two in GPU memory, four more in the host's and the last four on a disk: 2 + 3 + 1.
    let mixed = || {
        let scene = Scene::new(2).in_gpu(0, 2).on_node(0, [0, 6], Tier::Dram);
        scene.on_node(0, [6, 10], Tier::Ssd)
    };
    assert_eq!(turns(mixed, 600), [0, 1]);
}

#[test]
fn llm_d_weighs_the_prefix_three_to_two_against_the_queue() {
    // Instance 1 has the shortest queue: 2. Instance 0 has the longest, and 3 for the whole prompt: 2.1 for seven blocks, 1.8 for six.
    let to = |blocks| Scene::new(2).in_gpu(0, blocks).reported(0, (0, 1), 0.0).to("llm-d");
    assert_eq!([7, 6].map(to), [0, 1]);
    // Queues of equal length say nothing, and neither do the tokens in them.
    let equal = Scene::new(2).in_gpu(0, 1).reported(0, (900, 3), 0.0).reported(1, (0, 3), 0.0);
    assert_eq!(equal.to("llm-d"), 0);
}

#[test]
fn llm_d_weighs_free_memory_as_the_queue_and_two_to_three_against_the_prefix() {
    // Four blocks are 1.2; memory that is fuller by 0.59 takes 1.18, by 0.61 1.22.
    let prefix = |in_use| Scene::new(2).in_gpu(0, 4).reported(0, (0, 0), in_use).to("llm-d");
    assert_eq!([0.59, 0.61].map(prefix), [0, 1]);
    // Of queues of 0, 1 and 4 the second is 3/4 of the way: 2 against 1.5 for the queue, and 0.48 or 0.52 more for the memory of the second.
    let queue = |in_use| {
        let scene = Scene::new(3).reported(0, (0, 0), in_use).reported(1, (0, 1), 0.0);
        scene.reported(2, (0, 4), 0.0).to("llm-d")
    };
    assert_eq!([0.24, 0.26].map(queue), [0, 1]);
}

#[test]
fn llm_d_counts_a_block_in_the_hosts_memory_four_fifths() {
    // Two in GPU memory and eight more in the host's are 2 + 6.4, between eight and nine in GPU memory.
    let to = |blocks| {
        let scene = Scene::new(2).in_gpu(0, 2).in_gpu(1, blocks);
        scene.on_node(0, [0, 10], Tier::Dram).to("llm-d")
    };
    assert_eq!([8, 9].map(to), [0, 1]);
}

#[test]
fn sglang_leaves_the_prefix_where_load_is_uneven_by_both_measures() {
    // The whole prompt is where the most requests are; instance 2 has the fewest.
    let to = |(most, least): (u32, u32)| {
        let scene = Scene::new(3).in_gpu(0, BLOCKS).under_way(0, (most, 0));
        scene.under_way(1, (least + 1, 0)).under_way(2, (least, 0)).to("sglang")
    };
    // More than 64 apart, where any number is half as much again as none.
    assert_eq!([(64, 0), (65, 0)].map(to), [0, 2]);
    // More than 1.5 times 134, which is 201; both are more than 64 apart.
    assert_eq!([(200, 134), (202, 134)].map(to), [0, 2]);
    // Twice as many, and not far apart.
    assert_eq!(to((60, 30)), 0);
}

#[test]
fn sglang_follows_a_prefix_of_more_than_three_tenths_and_else_goes_where_the_least_is_cached() {
    let to = |prefix: u32, on_nodes: [u64; 3]| {
        let mut scene = Scene::new(3).in_gpu(0, prefix);
        scene.view.counted(|node| on_nodes[node.0 as usize]);
        scene.to("sglang")
    };
    // Three of ten are not more than 0.3.
    assert_eq!([4, 3].map(|prefix| to(prefix, [20, 11, 10])), [0, 2]);
    assert_eq!(to(3, [20, 10, 11]), 1);
    assert_eq!(to(3, [9, 10, 11]), 0);
    // Of equal prefixes that with fewer requests is followed.
    let equal = |requests| {
        let scene = Scene::new(2).in_gpu(0, 5).in_gpu(1, 5).under_way(0, (5, 0));
        scene.under_way(1, (requests, 0)).to("sglang")
    };
    assert_eq!((equal(4), equal(6)), (1, 0));
}
