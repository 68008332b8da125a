//! Preloading against a simulation of a job, layer by layer.

use super::*;
use proptest::prelude::*;

/// Bytes of a slice that loads in one nanosecond, so that all numbers of a small job are integers.
const SLICE_BYTES: u32 = 10;

/// A job of `layers` layers that load in `load` nanoseconds each and compute in `compute`.
fn even(layers: u32, load: u64, compute: u64) -> Preload {
    let (layers64, tokens) = (u64::from(layers), 4);
    let work = PreloadWork {
        // A block of one slice a layer: `load` nanoseconds for its bytes.
        bytes_per_s: (u64::from(SLICE_BYTES) * 1_000_000_000).checked_div(load).unwrap_or(u64::MAX),
        load_ns_per_token: load * layers64 / tokens,
        hist_tokens: tokens,
        prefill_ns_per_token: compute * layers64,
        new_tokens: 1,
    };
    assert_eq!(work.load_ns(), load * layers64, "pick numbers that divide evenly");
    Preload::new(work, &vec![SLICE_BYTES; layers as usize], 1, u64::MAX)
}

/// Simulation: layers load one after the other, and each is computed once it is loaded.
fn simulated_ns(layers: &[u64], compute: u64, ahead: usize) -> u64 {
    let (mut there, mut done) = (0, 0);
    for (at, load) in layers.iter().enumerate() {
        if at >= ahead {
            there += load;
        }
        let begun = done.max(if at < ahead { 0 } else { there });
        done = begun + compute;
    }
    done
}

#[test]
fn small_jobs_match_the_simulation() {
    for layers in 1..=8u32 {
        for (load, compute) in
            (0..=48).step_by(4).flat_map(|load| (0..=9).map(move |compute| (load, compute)))
        {
            let plan = even(layers, load, compute);
            let loads = vec![load; layers as usize];
            for ahead in 0..=layers {
                let expected = simulated_ns(&loads, compute, ahead as usize);
                assert_eq!(
                    plan.finish_ns(ahead),
                    expected,
                    "{layers} layers, {load}, {compute}, {ahead} ahead"
                );
            }
        }
    }
}

#[test]
fn formula_buffer_waits_for_at_most_one_layer() {
    for layers in 1..=16u32 {
        for (load, compute) in
            (4..=400).step_by(20).flat_map(|load| (1..=99).step_by(7).map(move |c| (load, c)))
        {
            let plan = even(layers, load, compute);
            let whole = compute * u64::from(layers);
            let finish = plan.finish_ns(plan.buffer_layers());
            assert!(finish <= whole + load.min(compute), "{layers} layers, {load}, {compute}: {finish}");
            let hiding = plan.hiding_layers();
            assert!((plan.buffer_layers()..=plan.buffer_layers() + 1).contains(&hiding), "{load} {compute}");
            assert_eq!(plan.finish_ns(hiding), whole);
            assert!(hiding == 0 || plan.finish_ns(hiding - 1) > whole, "it is the least number");
            if load <= compute {
                assert_eq!(plan.buffer_layers(), 0, "loading is the faster");
            }
            // From the first byte without a buffer: the bound plus one layer.
            assert!(plan.finish_ns(0) <= plan.lower_bound_ns() + load.min(compute), "{load} {compute}");
            assert!(plan.finish_ns(0) >= plan.lower_bound_ns());
        }
    }
}

#[test]
fn formula_matches_the_paper() {
    // 25 GB/s, 20 µs a token to load, 100 µs to compute, 8,000 and 1,000 tokens: loading takes 60
    // ms longer.
    let work = PreloadWork {
        bytes_per_s: 25_000_000_000,
        load_ns_per_token: 20_000,
        hist_tokens: 8_000,
        prefill_ns_per_token: 100_000,
        new_tokens: 1_000,
    };
    assert_eq!(work.read_buffer_bytes(), 1_500_000_000);
    assert_eq!(PreloadWork { hist_tokens: 5_000, ..work }.read_buffer_bytes(), 0);
    assert_eq!(PreloadWork { hist_tokens: 5_001, ..work }.read_buffer_bytes(), 500_000);
    assert_eq!(PreloadWork { hist_tokens: u64::MAX, ..work }.read_buffer_bytes(), u64::MAX);
}

fn work() -> impl Strategy<Value = (PreloadWork, Vec<u32>, u32, u64)> {
    let work = (1u64..1_000_000_000, 0u64..100, 0u64..50, 0u64..100, 0u64..50).prop_map(
        |(bytes_per_s, load_ns_per_token, hist_tokens, prefill_ns_per_token, new_tokens)| PreloadWork {
            bytes_per_s,
            load_ns_per_token,
            hist_tokens,
            prefill_ns_per_token,
            new_tokens,
        },
    );
    (work, prop::collection::vec(0u32..5_000, 1..12), 0u32..9, 0u64..200_000)
}

proptest! {
    #[test]
    fn buffer_is_whole_layers_within_its_limit((work, slices, blocks, bytes_max) in work()) {
        let plan = Preload::new(work, &slices, blocks, bytes_max);
        prop_assert!(plan.buffer_bytes() <= bytes_max);
        let layer = |at: u32| u64::from(slices[at as usize]) * u64::from(blocks);
        let naive = |layers: u32| (0..layers).map(layer).sum::<u64>();
        prop_assert_eq!(plan.buffer_bytes(), naive(plan.buffer_layers()));
        let (wanted, all) = (work.read_buffer_bytes(), plan.layers());
        let is_enough = plan.buffer_bytes() >= wanted;
        let is_bounded = plan.buffer_layers() < all && naive(plan.buffer_layers() + 1) > bytes_max;
        prop_assert!(is_enough || is_bounded || plan.buffer_layers() == all, "the wanted size, or the limit");
        let last = plan.buffer_layers().checked_sub(1);
        prop_assert!(last.is_none_or(|fewer| naive(fewer) < wanted), "no more layers than wanted");
        for at in 0..all {
            prop_assert_eq!(plan.may_load(at, false), at < plan.buffer_layers());
            prop_assert!(plan.may_load(at, true));
        }
    }

    #[test]
    fn slices_load_once_in_layer_order((work, slices, blocks, bytes_max) in work()) {
        let plan = Preload::new(work, &slices, blocks, bytes_max);
        let slots: Vec<SliceSlot> = plan.slots().collect();
        let order: Vec<(u32, u32)> = slots.iter().map(|slot| (slot.layer, slot.block)).collect();
        let naive: Vec<(u32, u32)> =
            (0..plan.layers()).flat_map(|layer| (0..blocks).map(move |block| (layer, block))).collect();
        prop_assert_eq!(order, naive);
        prop_assert!(slots.is_sorted_by_key(|slot| slot.due_ns));
        let has_bytes = slices.iter().any(|bytes| *bytes > 0);
        if let Some(last) = slots.last().filter(|_| has_bytes) {
            prop_assert_eq!(last.due_ns, work.load_ns());
        }
    }
}
