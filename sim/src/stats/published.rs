//! Published numbers of similar traces, compared with the measured ones of a given trace.
//!
//! Not every published number can hold at once (see [`crate::generate`]'s consumer file);
//! differences are shown, not hidden. Not here: any calibration.

use super::Characteristics;
use crate::generate::TrafficKind;
use kv_core::id::RequestKind;
use serde::Serialize;

/// One published number and its measured counterpart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Claim {
    /// Name of the number, with its unit.
    pub what: String,
    /// As published.
    pub published: f64,
    /// As measured.
    pub measured: f64,
}

impl Claim {
    /// Measured minus published, in the unit of the claim.
    #[must_use]
    pub fn difference(&self) -> f64 {
        self.measured - self.published
    }
}

fn claim(what: impl Into<String>, published: f64, measured: f64) -> Claim {
    Claim { what: what.into(), published, measured }
}

/// The published numbers of a kind beside those of a trace. Empty for agents, which have no
/// published numbers.
#[must_use]
pub fn compare(kind: TrafficKind, measured: &Characteristics) -> Vec<Claim> {
    match kind {
        TrafficKind::Consumer => consumer(measured),
        TrafficKind::Business => business(measured),
        TrafficKind::Agent => Vec::new(),
    }
}

/// Trace A of ATC '25.
fn consumer(measured: &Characteristics) -> Vec<Claim> {
    let turns = measured.turns;
    let turn = |of: fn(super::TurnStats) -> f64| turns.map_or(0.0, of);
    let mut claims = vec![
        claim("ideal hit rate, %", 62.0, 100.0 * measured.ideal_hit_rate),
        claim("reuses by the top tenth of blocks, %", 77.0, 100.0 * measured.reuse_share_of_top_tenth),
        claim("reuses within 10 min, %", 80.0, 100.0 * measured.reuse.within_10_min),
        claim("life of a block P90, s", 612.0, measured.life.p90_s),
        claim("turns P50", 1.0, turn(|turns| f64::from(turns.p50))),
        claim("turns P90", 5.0, turn(|turns| f64::from(turns.p90))),
        claim("turns max", 232.0, turn(|turns| f64::from(turns.max))),
        claim("next turn after the first, %", 50.0, turn(|turns| 100.0 * turns.next_after_first)),
        claim("next turn after later ones, %", 80.0, turn(|turns| 100.0 * turns.next_after_later)),
    ];
    let mix = [
        (RequestKind::Text, 78.0, 47.0),
        (RequestKind::File, 4.0, 51.0),
        (RequestKind::Multimodal, 3.0, 10.0),
        (RequestKind::Search, 15.0, 49.0),
    ];
    for (kind, share, multi_turn) in mix {
        let row = measured.kinds.iter().find(|row| row.kind == kind.name());
        let of = |value: fn(&super::KindShare) -> f64| row.map_or(0.0, |row| 100.0 * value(row));
        claims.push(claim(format!("{} requests, %", kind.name()), share, of(|row| row.share)));
        claims.push(claim(format!("{} multi-turn, %", kind.name()), multi_turn, of(|row| row.multi_turn)));
    }
    claims
}

/// Trace B of ATC '25.
fn business(measured: &Characteristics) -> Vec<Claim> {
    vec![
        claim("ideal hit rate, %", 54.0, 100.0 * measured.ideal_hit_rate),
        claim("reuses by the top tenth of blocks, %", 77.0, 100.0 * measured.reuse_share_of_top_tenth),
        claim("hits by single-turn API requests, %", 97.0, 100.0 * measured.hit_share_of_single_turn_api),
        claim("reuses within 10 s, %", 80.0, 100.0 * measured.reuse.within_10_s),
        claim("life of a block P90, s", 0.3, measured.life.p90_s),
    ]
}
