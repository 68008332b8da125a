//! Tests of the generators: equal bytes from equal seeds, valid traces, and the published numbers.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::stats::{Characteristics, characterise, published};
use crate::trace::{Format, Strictness, Writer, read};

fn bytes(spec: TraceSpec) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), Format::Bailian);
    TraceGenerator::new(spec).for_each(|request| writer.write(&request).unwrap());
    writer.finish().unwrap()
}

/// FNV-1a, 64 bits: enough to notice one changed byte.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn equal_seeds_give_equal_bytes_and_other_seeds_do_not() {
    for kind in TrafficKind::ALL {
        let first = digest(&bytes(TraceSpec::new(kind, 42, 500)));
        assert_eq!(first, digest(&bytes(TraceSpec::new(kind, 42, 500))), "{}", kind.name());
        assert_ne!(first, digest(&bytes(TraceSpec::new(kind, 43, 500))), "{}", kind.name());
    }
}

#[test]
fn a_longer_trace_starts_like_a_shorter_one() {
    let long: Vec<Request> = TraceGenerator::new(TraceSpec::new(TrafficKind::Consumer, 3, 400)).collect();
    let short: Vec<Request> = TraceGenerator::new(TraceSpec::new(TrafficKind::Consumer, 3, 100)).collect();
    assert_eq!(long[..100], short);
}

#[test]
fn generated_traces_are_read_back_with_the_same_sharing() {
    for kind in TrafficKind::ALL {
        let generated: Vec<Request> = TraceGenerator::new(TraceSpec::new(kind, 5, 2000)).collect();
        let read: Vec<Request> =
            read(&bytes(TraceSpec::new(kind, 5, 2000))[..], Format::Detect, Strictness::Strict)
                .map(Result::unwrap)
                .collect();
        let outline = |request: &Request| Request { blocks: Vec::new(), ..request.clone() };
        assert!(generated.iter().map(outline).eq(read.iter().map(outline)), "{}", kind.name());
        let (made, found) = (characterise(generated), characterise(read));
        assert_eq!((made.unique_blocks, made.ideal_hits), (found.unique_blocks, found.ideal_hits));
    }
}

#[test]
fn a_trace_in_large_blocks_is_a_valid_mooncake_file() {
    for kind in TrafficKind::ALL {
        let spec = TraceSpec { block_tokens: 512, ..TraceSpec::new(kind, 5, 500) };
        let mut writer = Writer::new(Vec::new(), Format::Mooncake);
        TraceGenerator::new(spec).for_each(|request| writer.write(&request).unwrap());
        let bytes = writer.finish().unwrap();
        assert_eq!(read(&bytes[..], Format::Detect, Strictness::Strict).map(Result::unwrap).count(), 500);
    }
}

#[test]
fn a_child_extends_its_parent_and_every_block_has_one_parent() {
    for kind in TrafficKind::ALL {
        let (mut chats, mut parents) = (BTreeMap::new(), BTreeMap::new());
        for request in TraceGenerator::new(TraceSpec::new(kind, 9, 2000)) {
            let mut above = None;
            for &block in &request.blocks {
                assert_eq!(*parents.entry(block).or_insert(above), above);
                above = Some(block);
            }
            if let Some(parent) = request.parent {
                let (turn, arrival_us, tokens): &(u32, u64, u32) = &chats[&parent];
                assert_eq!(request.turn, turn + 1);
                assert!(request.arrival_us >= *arrival_us && request.input_tokens > *tokens);
            }
            chats.insert(request.chat.unwrap(), (request.turn, request.arrival_us, request.input_tokens));
        }
    }
}

#[test]
fn a_lower_rate_spreads_the_sessions() {
    let duration = |sessions_per_s| {
        let spec = TraceSpec { sessions_per_s, ..TraceSpec::new(TrafficKind::Consumer, 1, 2000) };
        characterise(TraceGenerator::new(spec)).duration_s
    };
    assert!(duration(Some(0.02)) > 5.0 * duration(None));
}

#[test]
fn zero_requests_generate_an_empty_trace() {
    assert_eq!(TraceGenerator::new(TraceSpec::new(TrafficKind::Agent, 0, 0)).count(), 0);
    assert_eq!(TrafficKind::by_name("agent"), Some(TrafficKind::Agent));
    assert_eq!(TrafficKind::by_name("agents"), None);
}

fn measured(kind: TrafficKind, requests: u64) -> Characteristics {
    let found = characterise(TraceGenerator::new(TraceSpec::new(kind, 1, requests)));
    for claim in published::compare(kind, &found) {
        eprintln!("{}: {:<40} {:>8.2} {:>8.2}", kind.name(), claim.what, claim.published, claim.measured);
    }
    found
}

/// Fails for every claim outside its tolerance; other claims are only printed.
fn check(kind: TrafficKind, tolerances: &[(&str, f64)]) {
    let found = measured(kind, 20_000);
    let claims = published::compare(kind, &found);
    for (what, tolerance) in tolerances {
        let claim = claims.iter().find(|claim| claim.what.starts_with(what)).unwrap();
        assert!(claim.difference().abs() <= *tolerance, "{claim:?}");
    }
}

#[test]
fn consumer_traffic_has_the_published_shape() {
    check(
        TrafficKind::Consumer,
        &[
            ("ideal hit rate", 2.0),
            ("reuses within 10 min", 2.0),
            ("turns P50", 0.0),
            ("turns P90", 0.0),
            // The published multi-turn shares, weighted by type, make this 46 %.
            ("next turn after the first", 6.0),
            ("text requests", 1.5),
            ("file requests", 0.5),
            ("multimodal requests", 0.5),
            ("search requests", 1.5),
            // Two to twelve hundred conversations each: one standard deviation is up to 2 points.
            ("text multi-turn", 2.0),
            ("file multi-turn", 4.0),
            ("multimodal multi-turn", 4.0),
            ("search multi-turn", 4.0),
        ],
    );
}

#[test]
fn business_traffic_has_the_published_shape() {
    check(
        TrafficKind::Business,
        &[("ideal hit rate", 2.0), ("hits by single-turn API", 1.0), ("reuses within 10 s", 2.0)],
    );
}

#[test]
fn agent_loops_reuse_nearly_everything_within_a_tool_call() {
    let found = measured(TrafficKind::Agent, 1_500);
    assert!(found.ideal_hit_rate > 0.8, "{}", found.ideal_hit_rate);
    assert!(found.reuse.percentiles.p50_s < 10.0);
    assert!(found.turns.unwrap().p50 >= 5);
}
