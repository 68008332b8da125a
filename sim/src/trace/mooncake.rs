//! Mooncake's format: four keys, times in milliseconds, ids that already name a whole prefix.
//!
//! Not here: categories and conversations, which the format does not have.

use super::line::{Line, check_count};
use super::{Format, MOONCAKE_BLOCK_TOKENS, Problem, Request};
use serde_json::{Map, Value};

/// The keys of the format; a line has exactly these.
const KEYS: [&str; 4] = ["timestamp", "input_length", "output_length", "hash_ids"];

/// Converts a parsed line to a request.
pub(super) fn request(values: Map<String, Value>) -> Result<Request, Problem> {
    let line = Line::new(values, Format::Mooncake.name(), &KEYS)?;
    let request = Request {
        arrival_us: line.time_us("timestamp", 1e3)?,
        input_tokens: line.tokens("input_length", 1)?,
        output_tokens: line.tokens("output_length", 0)?,
        block_tokens: MOONCAKE_BLOCK_TOKENS,
        blocks: line.ids("hash_ids")?,
        ..Request::default()
    };
    check_count(&request.blocks, request.input_tokens, MOONCAKE_BLOCK_TOKENS)?;
    check_distinct(&request.blocks)?;
    Ok(request)
}

/// Refuses an id that appears twice: it would name two prefixes.
fn check_distinct(ids: &[u64]) -> Result<(), Problem> {
    let mut sorted: Vec<(u64, usize)> =
        ids.iter().enumerate().map(|(position, &id)| (id, position)).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(Problem::DuplicateBlock { id: pair[0].0, first: pair[0].1, second: pair[1].1 }),
        None => Ok(()),
    }
}
