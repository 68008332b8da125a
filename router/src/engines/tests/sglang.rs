//! A whole follower against an engine that behaves as SGLang does: signed hashes, salts in another
//! field, replays without a topic, pages in host memory, and token pairs.
//!
//! Not here: behaviour shared with vLLM (`../tests.rs`), and single SGLang shapes
//! (`kvfleet_proto::engine_events`).

use super::payloads::{list, text};
use super::*;

/// The secret of the salt that some requests have.
const SECRET: [u8; 32] = [10; 32];

const SALT: &str = "tenant-a";

fn signed(out: &mut Vec<u8>, number: i64) {
    out.push(0xd3);
    out.extend(number.to_be_bytes());
}

fn optional<T>(out: &mut Vec<u8>, value: Option<T>, put: impl Fn(&mut Vec<u8>, T)) {
    match value {
        Some(value) => put(out, value),
        None => out.push(0xc0),
    }
}

/// Event encoding of a release.
#[derive(Clone, Copy, Debug)]
enum SglangRelease {
    /// Positional arrays, up to 0.5.19.
    Arrays,
    /// Maps, from 0.5.20 on.
    Maps,
}

impl SglangRelease {
    /// An event with these fields; arrays hold the values in this order.
    fn event(self, name: &str, fields: Vec<(&str, Vec<u8>)>) -> EventBytes {
        let mut out = Vec::new();
        match self {
            SglangRelease::Arrays => {
                out.push(0x90 | (fields.len() + 1) as u8);
                text(&mut out, name);
                fields.iter().for_each(|(_, value)| out.extend(value));
            }
            SglangRelease::Maps => {
                out.push(0x80 | (fields.len() + 1) as u8);
                text(&mut out, "type");
                text(&mut out, name);
                for (field, value) in fields {
                    text(&mut out, field);
                    out.extend(value);
                }
            }
        }
        out
    }

    /// Stores pages of sixteen from the encoded `tokens`.
    fn stored(self, hashes: &[i64], parent: Option<i64>, tokens: Vec<u8>, salt: Option<&str>) -> EventBytes {
        let value = |put: &dyn Fn(&mut Vec<u8>)| {
            let mut out = Vec::new();
            put(&mut out);
            out
        };
        let fields = vec![
            ("block_hashes", value(&|out| list(out, hashes, signed))),
            ("parent_block_hash", value(&|out| optional(out, parent, signed))),
            ("token_ids", tokens),
            ("block_size", vec![16]),
            ("lora_id", vec![0xc0]),
            ("medium", value(&|out| text(out, "GPU"))),
            ("cache_salt", value(&|out| optional(out, salt, text))),
            ("session_id", value(&|out| text(out, "session-1"))),
        ];
        self.event("BlockStored", fields)
    }

    fn removed(self, hashes: &[i64], medium: &str) -> EventBytes {
        let (mut all, mut word) = (Vec::new(), Vec::new());
        list(&mut all, hashes, signed);
        text(&mut word, medium);
        self.event("BlockRemoved", vec![("block_hashes", all), ("medium", word)])
    }
}

fn ids(block: u64) -> Vec<u8> {
    let mut out = Vec::new();
    list(&mut out, &tokens(block), |out, token| payloads::number(out, token.into()));
    out
}

/// Pairs as in EAGLE pages: each token with the next.
fn pairs(block: u64) -> Vec<u8> {
    let mut out = Vec::new();
    list(&mut out, &tokens(block), |out, token| {
        list(out, &[token, token + 1], |out, token| payloads::number(out, token.into()));
    });
    out
}

/// Page hash of requests without a salt; salted ones differ and are all negative.
fn plain(block: u64) -> i64 {
    i64::MIN + block as i64
}

fn salted(block: u64) -> i64 {
    -1 - block as i64
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_is_followed_from_a_replay_without_topics() {
    let folder = tempfile::TempDir::new().unwrap();
    let secret_file = folder.path().join(SALT);
    write_secret(&secret_file, &"0a".repeat(32));
    for release in [SglangRelease::Arrays, SglangRelease::Maps] {
        println!("{release:?}");
        let (mut engine, events, replay) = TestEngine::listening_of((0, 0), None).await;
        let store = |block: u64, hash: fn(u64) -> i64, salt| {
            let parent = block.checked_sub(1).map(hash);
            batch(0, &[release.stored(&[hash(block)], parent, ids(block), salt)])
        };
        // All of it before the router connects.
        for block in 0..3 {
            engine.say(&store(block, plain, None), true).await;
        }
        for block in 0..2 {
            engine.say(&store(block, salted, Some(SALT)), true).await;
        }
        let tenants =
            vec![EngineTenantConfig { salt: SALT.into(), secret_file: secret_file.clone(), tenant: 0 }];
        let list = vec![EngineConfig { dialect: DialectConfig::Sglang, ..dialed(7, events, Some(replay)) }];
        let following = FollowingRouter::new(EnginesConfig { tenants, ..config(list) }).await;
        following.until(7, 3).await;
        following.until_of(7, &SECRET, 2).await;
        following.until_live(&mut engine).await;
        // Two messages are lost, and replayed after the third.
        for (block, is_lost) in [(3, true), (4, true), (5, false)] {
            engine.say(&store(block, plain, None), is_lost).await;
        }
        following.until(7, 6).await;
        // A removal from host memory does not affect the GPU.
        engine.say(&batch(0, &[release.removed(&[plain(1)], "CPU_PINNED")]), false).await;
        engine.say(&batch(0, &[release.removed(&[salted(1)], "GPU")]), false).await;
        following.until_of(7, &SECRET, 1).await;
        assert_eq!(following.resident(7), 6);
        engine.say(&batch(0, &[release.removed(&[plain(4), plain(5)], "GPU")]), false).await;
        following.until(7, 4).await;
        // Pairs do not determine the hashes of a request.
        engine.say(&batch(0, &[release.stored(&[plain(4)], Some(plain(3)), pairs(4), None)]), false).await;
        following.until_count_of("kvfleet_engine_unmapped_blocks_total", "opaque", 1.0).await;
        assert_eq!(following.resident(7), 4);
        assert_eq!(following.count("kvfleet_engine_gaps_total", "filled"), 1.0);
        assert_eq!(following.count("kvfleet_engine_restarts_total", "7"), 0.0);
        assert_eq!(following.count("kvfleet_engine_messages_total", "unreadable"), 0.0);
    }
}
