//! vLLM payloads, encoded in msgpack by hand.
//!
//! Not here: SGLang payloads (`sglang.rs`), and all shapes of payloads
//! (`kvfleet_proto::engine_events`).

/// One event, in msgpack.
pub(crate) type EventBytes = Vec<u8>;

pub(super) fn number(out: &mut Vec<u8>, number: u64) {
    out.push(0xcf);
    out.extend(number.to_be_bytes());
}

pub(super) fn list<T: Copy>(out: &mut Vec<u8>, items: &[T], put: impl Fn(&mut Vec<u8>, T)) {
    out.push(0xdd);
    out.extend((items.len() as u32).to_be_bytes());
    items.iter().for_each(|item| put(out, *item));
}

pub(super) fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xd9);
    out.push(text.len() as u8);
    out.extend(text.as_bytes());
}

/// A store event with blocks of sixteen tokens.
pub(crate) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> EventBytes {
    let mut out = vec![0x86];
    text(&mut out, "type");
    text(&mut out, "BlockStored");
    text(&mut out, "block_hashes");
    list(&mut out, hashes, number);
    text(&mut out, "parent_block_hash");
    match parent {
        Some(parent) => number(&mut out, parent),
        None => out.push(0xc0),
    }
    text(&mut out, "token_ids");
    list(&mut out, tokens, |out, token| number(out, token.into()));
    text(&mut out, "block_size");
    out.push(16);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    out
}

pub(crate) fn removed(hashes: &[u64]) -> EventBytes {
    let mut out = vec![0x83];
    text(&mut out, "type");
    text(&mut out, "BlockRemoved");
    text(&mut out, "block_hashes");
    list(&mut out, hashes, number);
    text(&mut out, "medium");
    text(&mut out, "GPU");
    out
}

pub(crate) fn cleared() -> EventBytes {
    let mut out = vec![0x81];
    text(&mut out, "type");
    text(&mut out, "AllBlocksCleared");
    out
}

/// A batch of one rank.
pub(crate) fn batch(rank: u8, events: &[EventBytes]) -> Vec<u8> {
    batch_at(0.0, rank, events)
}

/// A batch of one rank, created at this time in seconds since 1970.
pub(crate) fn batch_at(at_s: f64, rank: u8, events: &[EventBytes]) -> Vec<u8> {
    let mut out = vec![0x93, 0xcb];
    out.extend(at_s.to_be_bytes());
    out.push(0x90 | events.len() as u8);
    out.extend(events.concat());
    out.push(rank);
    out
}

/// A store with a flag whether its hash covers tokens after the block, as vLLM sends since 0.33.
pub(super) fn stored_looking_ahead(
    hash: u64,
    parent: Option<u64>,
    tokens: &[u32],
    ahead: Option<u32>,
) -> EventBytes {
    let mut out = stored(&[hash], parent, tokens);
    out[0] += 1;
    text(&mut out, "lookahead_token_ids");
    match ahead {
        Some(token) => list(&mut out, &[token], |out, token| number(out, token.into())),
        None => out.push(0xc0),
    }
    out
}
