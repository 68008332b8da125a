//! Tests of the characterisation on traces small enough to count by hand.

#![allow(clippy::unwrap_used)]

use super::*;

fn request(at_s: u64, kind: RequestKind, turn: u32, blocks: &[u64]) -> Request {
    Request {
        arrival_us: at_s * 1_000_000,
        input_tokens: blocks.len() as u32 * 16,
        output_tokens: 5,
        block_tokens: 16,
        blocks: blocks.to_vec(),
        category: Category { kind, conversation_turn: turn as u8 },
        turn,
        ..Request::default()
    }
}

fn small() -> Characteristics {
    let (text, api) = (RequestKind::Text, RequestKind::Api);
    characterise([
        request(0, text, 1, &[1, 2]),
        request(10, text, 2, &[1, 2, 3]),
        request(20, api, 1, &[1, 9]),
        request(1020, text, 3, &[1, 2, 3, 4]),
    ])
}

#[test]
fn counts_by_hand() {
    let found = small();
    assert_eq!((found.requests, found.block_accesses, found.unique_blocks), (4, 11, 5));
    assert_eq!((found.input_tokens, found.output_tokens, found.block_tokens), (176, 20, 16));
    assert_eq!(found.ideal_hits, 2 + 1 + 3);
    assert!((found.ideal_hit_rate - 6.0 / 11.0).abs() < 1e-12);
    assert!((found.duration_s - 1020.0).abs() < 1e-9);
    assert!((found.used_once - 0.4).abs() < 1e-12);
    assert!((found.hit_share_of_single_turn_api - 1.0 / 6.0).abs() < 1e-12);
}

#[test]
fn reuse_times_count_for_the_category_of_the_previous_use() {
    let found = small();
    // Turn 1 text: blocks 1 and 2 after 10 s. Turn 2: block 1 after 10 s, 2 and 3 after 1010 s. API: 1 after 1000 s.
    let row = |kind: &str, turn| {
        let rows = &found.reuse_by_category;
        rows.iter().find(|row| (row.kind, row.turn) == (kind, turn)).unwrap().clone()
    };
    assert_eq!(row("text", 1).reuses, 2);
    assert!((row("text", 1).mean_s - 10.0).abs() < 1e-9);
    assert_eq!(row("text", 2).reuses, 3);
    assert!((row("text", 2).within_10_s - 1.0 / 3.0).abs() < 1e-9);
    assert!((row("api", 1).mean_s - 1000.0).abs() < 1e-9);
    assert_eq!(found.reuse.reuses, 6);
    assert!((found.reuse.within_10_min - 0.5).abs() < 1e-9);
    assert!((found.reuse.cdf.last().unwrap().y - 1.0).abs() < 1e-12);
}

#[test]
fn lives_turns_and_types() {
    let found = small();
    // Lives: 1 and 2 1020 s, 3 1010 s, 4 and 9 none.
    assert!((found.life.p50_s - 1010.0).abs() < 1e-9);
    assert!((found.life.max_s - 1020.0).abs() < 1e-9);
    assert!((found.life_of_reused.p50_s - 1020.0).abs() < 1e-9);
    let turns = found.turns.unwrap();
    assert_eq!((turns.conversations, turns.p50, turns.p90, turns.max), (2, 1, 3, 3));
    assert!((turns.next_after_first - 0.5).abs() < 1e-12);
    assert!((turns.next_after_later - 0.5).abs() < 1e-12);
    let text = found.kinds.iter().find(|row| row.kind == "text").unwrap();
    assert_eq!((text.requests, text.share, text.multi_turn), (3, 0.75, 1.0));
    assert!((text.share_of_hits - 5.0 / 6.0).abs() < 1e-12);
}

#[test]
fn skew_of_one_hot_block_among_many() {
    let mut requests: Vec<Request> =
        (0..99).map(|block| request(0, RequestKind::Text, 0, &[1000 + block])).collect();
    requests.extend((0..31).map(|at| request(at, RequestKind::Text, 0, &[1])));
    requests.extend((0..10).map(|block| request(50, RequestKind::Text, 0, &[1000 + block])));
    let found = characterise(requests);
    assert!((found.skew[0].y - 30.0 / 40.0).abs() < 1e-12);
    assert!((found.reuse_share_of_top_tenth - 39.0 / 40.0).abs() < 1e-12);
    assert!((found.skew.last().unwrap().y - 1.0).abs() < 1e-12);
    assert!(found.turns.is_none(), "the trace has no turns");
}

#[test]
fn an_empty_trace_is_all_zero() {
    let found = characterise([]);
    assert_eq!((found.requests, found.unique_blocks, found.ideal_hit_rate), (0, 0, 0.0));
    assert_eq!(found.life, Percentiles::default());
    assert!(found.skew.iter().all(|point| point.y == 0.0));
    assert!(found.kinds.is_empty() && found.turns.is_none());
    assert!(serde_json::to_string(&found).is_ok());
}

#[test]
fn a_curve_rises_to_the_ideal_and_unknown_policies_give_no_point() {
    let requests: Vec<Request> =
        (0..200).map(|at| request(at, RequestKind::Text, 1, &[0, 1 + at % 20])).collect();
    let found = characterise(requests.clone());
    let points = curve::capacity_curve(
        &requests,
        found.unique_blocks,
        &["lru", curve::OPTIMAL, "clairvoyant"],
        &[0.1, 0.5, 1.0],
        0,
    );
    assert_eq!(points.len(), 6);
    for rows in points.chunks(3) {
        assert!(rows.windows(2).all(|pair| pair[0].hit_rate <= pair[1].hit_rate));
        assert!((rows[2].hit_rate - found.ideal_hit_rate).abs() < 1e-12);
    }
}
