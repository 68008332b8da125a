//! vLLM's KV events from bytes to a router's soft plane, compared with the unavoidable part:
//! decoding and hashing.
//!
//! Not here: sockets, and queries of the soft plane.

use std::hint::black_box;

use benches::{BenchRow, Better, TimeSpent, measure_time, outcome, side_by_side};
use bytes::Bytes;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_engine_events::events::{Dialect, EngineEvent, Tokens, decode};
use kvfleet_router::RankProbe;

use crate::Effort;

pub(crate) const ABOUT: &str = "messages of an engine that stores prompts of 64 blocks after one shared \
    prefix, and from the 1,024th prompt on removes as many as it stores: decoded, hashed, kept as aliases \
    and listed in the soft plane; against decoding all and hashing the stored blocks. Each stored block is \
    one operation, and each removed block another";

const BLOCK_TOKENS: u32 = 16;

/// Blocks of one prompt after the shared ones.
const PROMPT_BLOCKS: u64 = 64;

/// Capacity of the engine, in prompts.
const PROMPTS_MAX: u64 = 1_024;

/// Prompts per message, as in one scheduler step.
const PROMPTS_PER_MESSAGE: u64 = 4;

const PEER: &str = "limit: decode and hash";

const UNIT: &str = "M block operations/CPU-s";

/// Target of operations per CPU-second, in millions.
const LIMIT: f64 = 3.0;

pub(crate) fn run(effort: &Effort) -> anyhow::Result<Vec<BenchRow>> {
    let prompts = effort.scaled(16_384);
    let payloads: Vec<Bytes> = (0..prompts / PROMPTS_PER_MESSAGE).map(message).collect();
    let stored = payloads.len() as u64 * PROMPTS_PER_MESSAGE * PROMPT_BLOCKS;
    let held = stored.min(PROMPTS_MAX * PROMPT_BLOCKS);
    let operations = stored + (stored - held);
    let rate = |spent: TimeSpent| 1e-6 * operations as f64 / spent.cpu.as_secs_f64();
    let mut rows = Vec::new();
    for (name, ours_tokens) in [
        ("engine blocks of 16 tokens, fleet blocks of 16", 16),
        ("engine blocks of 16 tokens, fleet blocks of 64", 64),
    ] {
        let expected = held * u64::from(BLOCK_TOKENS) / u64::from(ours_tokens);
        let mut figures = Vec::new();
        let ours = || {
            let mut listener = RankProbe::new(ours_tokens).expect("the listener's metrics");
            let (_, spent) = measure_time(|| {
                for (number, payload) in payloads.iter().enumerate() {
                    listener.receive(number as u64, payload.clone());
                }
            });
            assert_eq!(listener.blocks(), expected, "unexpected number of listed blocks");
            figures.push(rate(spent));
            rate(spent)
        };
        let theirs = || {
            let (_, spent) =
                measure_time(|| payloads.iter().for_each(|payload| decode_and_hash(payload, ours_tokens)));
            rate(spent)
        };
        let compared = side_by_side(effort.runs, ours, theirs);
        // The first run is a warm-up there too.
        let limits: Vec<_> = figures.iter().skip(1).map(|figure| (*figure, LIMIT)).collect();
        let row = |peer, outcome| BenchRow::new("events", name, UNIT, peer, Better::Higher, outcome);
        rows.extend([row("limit: 3 M", outcome(&limits)), row(PEER, compared)]);
    }
    Ok(rows)
}

fn decode_and_hash(payload: &[u8], block_tokens: u32) {
    let manifest = IdentityManifest { block_tokens, ..IdentityManifest::default() };
    thread_local! {
        static HASHER: std::cell::RefCell<Option<(u32, PrefixHasher)>> = const { std::cell::RefCell::new(None) };
    }
    HASHER.with_borrow_mut(|kept| {
        let (_, hasher) = match kept {
            Some(kept) if kept.0 == block_tokens => kept,
            other => other.insert((block_tokens, PrefixHasher::new(&manifest, &[0; 32]))),
        };
        let batch = decode(payload, Dialect::Vllm).expect("a batch");
        let mut hashes = Vec::new();
        for event in &batch.events {
            if let EngineEvent::Stored(stored) = event
                && let Tokens::Ids(tokens) = &stored.tokens
            {
                let mut chain = hasher.start();
                hasher.extend(&mut chain, tokens, &mut hashes);
            }
        }
        black_box(hashes);
    });
}

/// The engine's hash of one block of a prompt.
fn engine_hash(prompt: u64, block: u64) -> u64 {
    (prompt << 16 | block).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63
}

fn token(prompt: u64, at: u64) -> u32 {
    ((prompt * 131 + at * 7) % 128_000) as u32
}

/// A step that stores some prompts, and removes the oldest ones beyond the capacity, last block
/// first.
fn message(step: u64) -> Bytes {
    let prompts = step * PROMPTS_PER_MESSAGE..(step + 1) * PROMPTS_PER_MESSAGE;
    let mut events = Vec::new();
    for prompt in prompts {
        if let Some(evicted) = prompt.checked_sub(PROMPTS_MAX) {
            events.push(removed(evicted));
        }
        events.push(stored(prompt));
    }
    let mut out = vec![0x93, 0xcb];
    out.extend(1.7e9f64.to_be_bytes());
    out.extend([0xdc, 0, events.len() as u8]);
    events.iter().for_each(|event| out.extend(event));
    out.push(0);
    out.into()
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xa0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn list(out: &mut Vec<u8>, count: u64) {
    out.push(0xdc);
    out.extend((count as u16).to_be_bytes());
}

fn hash(out: &mut Vec<u8>, hash: u64) {
    out.push(0xcf);
    out.extend(hash.to_be_bytes());
}

/// vLLM's encoding: a map, with integers in their shortest form.
fn stored(prompt: u64) -> Vec<u8> {
    let mut out = vec![0x8b];
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    list(&mut out, PROMPT_BLOCKS);
    (0..PROMPT_BLOCKS).for_each(|block| hash(&mut out, engine_hash(prompt, block)));
    text(&mut out, "parent_block_hash");
    out.push(0xc0);
    text(&mut out, "token_ids");
    list(&mut out, PROMPT_BLOCKS * u64::from(BLOCK_TOKENS));
    for at in 0..PROMPT_BLOCKS * u64::from(BLOCK_TOKENS) {
        match token(prompt, at) {
            small @ 0..128 => out.push(small as u8),
            byte @ 128..256 => out.extend([0xcc, byte as u8]),
            short @ 256..65_536 => {
                out.push(0xcd);
                out.extend((short as u16).to_be_bytes());
            }
            long => {
                out.push(0xce);
                out.extend(long.to_be_bytes());
            }
        }
    }
    text(&mut out, "block_size");
    out.push(BLOCK_TOKENS as u8);
    for (name, value) in [("lora_id", None), ("medium", Some("GPU")), ("lora_name", None)] {
        text(&mut out, name);
        match value {
            Some(value) => text(&mut out, value),
            None => out.push(0xc0),
        }
    }
    text(&mut out, "extra_keys");
    list(&mut out, PROMPT_BLOCKS);
    out.extend(std::iter::repeat_n(0xc0, PROMPT_BLOCKS as usize));
    text(&mut out, "group_idx");
    out.push(0);
    text(&mut out, "kv_cache_spec_kind");
    text(&mut out, "full_attention");
    out
}

fn removed(prompt: u64) -> Vec<u8> {
    let mut out = vec![0x84];
    text(&mut out, "type");
    text(&mut out, "BlockRemoved");
    text(&mut out, "block_hashes");
    list(&mut out, PROMPT_BLOCKS);
    (0..PROMPT_BLOCKS).rev().for_each(|block| hash(&mut out, engine_hash(prompt, block)));
    text(&mut out, "medium");
    text(&mut out, "GPU");
    text(&mut out, "group_idx");
    out.push(0);
    out
}
