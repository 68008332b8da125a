//! Bailian's format (the Qwen traces of ATC '25): conversations, types, times in seconds, and ids
//! that name only the content of a block.
//!
//! Equal content can follow different prefixes, where its KV differs; so every id is chained over
//! the ids before it. Not here: the keyed hashes of the product (`kv_core::prefix`), which a replay
//! derives from the chained ids.

use super::line::{Line, check_count};
use super::{BAILIAN_BLOCK_TOKENS, Format, Problem, Request};
use kv_core::id::{Category, RequestKind};
use serde_json::{Map, Value};

/// The keys of the format; a line has exactly these.
const KEYS: [&str; 8] =
    ["chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "type", "turn", "hash_ids"];

/// Latest accepted turn: the longest published conversation has 232.
const TURNS_MAX: u64 = 1_000_000;

/// Converts a parsed line to a request. The flag says that its type is unknown.
pub(super) fn request(values: Map<String, Value>) -> Result<(Request, bool), Problem> {
    let line = Line::new(values, Format::Bailian.name(), &KEYS)?;
    let input_tokens = line.tokens("input_length", 1)?;
    let content = line.ids("hash_ids")?;
    check_count(&content, input_tokens, BAILIAN_BLOCK_TOKENS)?;
    let turn = line.whole("turn", 0, TURNS_MAX)?;
    let known = kind(line.text("type")?);
    let request = Request {
        arrival_us: line.time_us("timestamp", 1e6)?,
        input_tokens,
        output_tokens: line.tokens("output_length", 0)?,
        block_tokens: BAILIAN_BLOCK_TOKENS,
        blocks: chain(&content),
        category: Category {
            kind: known.unwrap_or_default(),
            conversation_turn: u8::try_from(turn).unwrap_or(u8::MAX),
        },
        chat: line.chat("chat_id")?,
        parent: line.chat("parent_chat_id")?,
        turn: turn as u32,
    };
    Ok((request, known.is_none()))
}

/// The kind of a type name, or `None` if unknown.
fn kind(text: &str) -> Option<RequestKind> {
    Some(match text {
        "text" => RequestKind::Text,
        "search" => RequestKind::Search,
        "image" | "audio" | "video" | "multimodal" => RequestKind::Multimodal,
        "file" => RequestKind::File,
        "api" => RequestKind::Api,
        "agent" | "coder" => RequestKind::Agent,
        "thinking" => RequestKind::Thinking,
        _ => return None,
    })
}

/// Ids that name a block and everything before it. 64 bits make a collision unlikely even in the
/// largest public trace, and a collision changes a statistic, not a byte.
pub(super) fn chain(content: &[u64]) -> Vec<u64> {
    let mut parent = 0x6b76_666c_6565_7401;
    let step = |&id: &u64| {
        parent = mix(mix(parent).wrapping_add(id));
        parent
    };
    content.iter().map(step).collect()
}

/// The finaliser of SplitMix64: every bit of the input changes half the bits of the output.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_content_behind_different_prefixes_is_a_different_block() {
        let (left, right) = (chain(&[1, 2, 3, 9]), chain(&[1, 2, 4, 9]));
        assert_eq!(left[..2], right[..2]);
        assert_ne!(left[2], right[2]);
        assert_ne!(left[3], right[3]);
    }

    #[test]
    fn repeated_content_inside_a_request_gives_distinct_blocks() {
        let mut chained = chain(&[5; 1000]);
        chained.sort_unstable();
        chained.dedup();
        assert_eq!(chained.len(), 1000);
    }

    #[test]
    fn every_kind_of_ours_is_read_back_from_its_name() {
        for known in RequestKind::ALL {
            assert_eq!(kind(known.name()), Some(known));
        }
        assert_eq!(kind("hologram"), None);
    }
}
