//! The named profiles: lookup, plausibility, and arithmetic.

use super::*;

#[test]
fn names_are_unique_and_found() {
    for profile in PROFILES {
        assert_eq!(HardwareProfile::by_name(profile.name), Some(*profile));
        assert_eq!(PROFILES.iter().filter(|other| other.name == profile.name).count(), 1);
    }
    assert_eq!(HardwareProfile::by_name("h100"), None);
    assert_eq!(HardwareProfile::default().name, "laptop-emulated");
}

#[test]
fn faster_tiers_have_lower_latency_and_more_bandwidth() {
    for profile in PROFILES {
        for (slow, fast) in [(profile.ssd, profile.dram), (profile.dram, profile.gpu)] {
            assert!(
                slow.latency_ns > fast.latency_ns && slow.bytes_per_s < fast.bytes_per_s,
                "{}",
                profile.name
            );
        }
    }
}

/// A node reads its GPU only by a copy to DRAM.
#[test]
fn gpu_reads_are_between_dram_and_ssd() {
    for profile in PROFILES {
        let [ssd, dram, gpu] = Tier::ALL.map(|tier| profile.tier(tier));
        assert!(dram.latency_ns < gpu.latency_ns && gpu.latency_ns < ssd.latency_ns, "{}", profile.name);
        assert!(dram.bytes_per_s >= gpu.bytes_per_s && gpu.bytes_per_s > ssd.bytes_per_s, "{}", profile.name);
    }
}

#[test]
fn long_held_prefix_is_fetched_under_every_profile() {
    for &profile in PROFILES {
        let mut fleet = fleet(2);
        fleet.profile = profile;
        for tier in Tier::ALL {
            let request = RouteRequest { block_tokens: 16, input_tokens: 8_192, ..request(512) };
            let decision = chosen(&request, &prefix(&[(512, &[(2, tier)])]), &fleet);
            assert_eq!(decision.fetch_blocks, 512, "{} {tier:?}", profile.name);
        }
    }
}

/// Replays count cache hits under this profile, so it must always fetch a held block. That includes
/// a tail of one token alone on the slowest tier of another node.
#[test]
fn emulated_profile_fetches_every_held_block() {
    let mut fleet = fleet(2);
    fleet.profile = HardwareProfile::by_name("laptop-emulated").unwrap();
    fleet.put_instance(Instance { node: None, ..instance(1) });
    fleet.remove_instance(InstanceId(2));
    for tail_tokens in [1, 2, 512] {
        let request = RouteRequest { block_tokens: 512, input_tokens: 512 + tail_tokens, ..request(2) };
        let matched = prefix(&[(1, &[(1, Tier::Dram)]), (1, &[(2, Tier::Ssd)])]);
        assert_eq!(chosen(&request, &matched, &fleet).fetch_blocks, 2, "{tail_tokens}");
    }
}

#[test]
fn prefill_has_a_linear_and_a_quadratic_part() {
    let profile = HardwareProfile { prefill_ps_per_token_context: 2_000, ..ROUND };
    for (context, new, ns) in [
        (0, 0, 0),
        (1_000, 0, 0),
        (0, 10, 1_000_000 + 100),
        (1_000, 10, 1_000_000 + 20_000 + 100),
        (u64::MAX, u64::MAX, u64::MAX),
    ] {
        assert_eq!(profile.prefill_ns(context, new), ns, "{context} {new}");
    }
}

#[test]
fn split_prefill_takes_the_same_time() {
    let profile = HardwareProfile::by_name("h100-8b").unwrap();
    for cut in [0, 2, 4_096, 131_000, 131_072] {
        let parts = profile.prefill_ns(0, cut) + profile.prefill_ns(cut, 131_072 - cut);
        assert_eq!(parts, profile.prefill_ns(0, 131_072), "{cut}");
    }
}

#[test]
fn streams_round_up_and_never_overflow() {
    let lane = |bytes_per_s| PathSpeed { latency_ns: 0, bytes_per_s };
    for (bytes_per_s, tokens, ns) in [
        (1_000_000_000, 0, 0),
        (1_000_000_000, 3, 3_000),
        (3_000_000_000, 1, 334),
        (0, 0, 0),
        (0, 1, u64::MAX),
        (1, u64::MAX, u64::MAX),
    ] {
        assert_eq!(ROUND.stream_ns(lane(bytes_per_s), tokens), ns, "{bytes_per_s} {tokens}");
    }
}

#[test]
fn chained_paths_add_latency_and_take_the_narrower_rate() {
    let (a, b) = (PathSpeed { latency_ns: 1, bytes_per_s: 10 }, PathSpeed { latency_ns: 2, bytes_per_s: 5 });
    assert_eq!(a.through(b), PathSpeed { latency_ns: 3, bytes_per_s: 5 });
    assert_eq!(b.through(a), a.through(b));
}

#[test]
fn scaled_profile_scales_all_times() {
    for profile in PROFILES {
        assert_eq!(profile.scaled(1.0), *profile);
        let slow = profile.scaled(10.0);
        assert_eq!(slow.prefill_ns(100, 33) / 10, profile.prefill_ns(100, 33), "rounded down");
        assert_eq!(slow.ssd.latency_ns, 10 * profile.ssd.latency_ns);
        assert_eq!(slow.stream_ns(slow.network, 512).div_ceil(10), profile.stream_ns(profile.network, 512));
        assert_eq!(slow.kv_bytes_per_token, profile.kv_bytes_per_token);
        let slowest = profile.scaled(1e30);
        assert_eq!((slowest.dram.bytes_per_s, slowest.step_ns), (1, u64::MAX), "some bandwidth remains");
    }
}
