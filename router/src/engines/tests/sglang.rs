//! A whole follower against an engine that speaks as SGLang does: signed hashes, salts that stand elsewhere, replays without a topic,
//! pages in memory of the host, and tokens in pairs.
//!
//! Not here: all that is the same as with a vLLM (`../tests.rs`), and SGLang's shapes one by one (`kvfleet_proto::engine_events`).

use super::payloads::{list, text};
use super::*;

/// The secret behind the salt that some requests have.
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

/// How a release writes events.
#[derive(Clone, Copy, Debug)]
enum Release {
    /// Positional arrays, until 0.5.19.
    Arrays,
    /// Maps, from 0.5.20 on.
    Maps,
}

impl Release {
    /// An event of these fields, of which arrays have the values in this order.
    fn event(self, name: &str, fields: Vec<(&str, Vec<u8>)>) -> Event {
        let mut out = Vec::new();
        match self {
            Release::Arrays => {
                out.push(0x90 | (fields.len() + 1) as u8);
                text(&mut out, name);
                fields.iter().for_each(|(_, value)| out.extend(value));
            }
            Release::Maps => {
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

    /// Stores pages of sixteen of what there is in `tokens`, one way or another.
    fn stored(self, hashes: &[i64], parent: Option<i64>, tokens: Vec<u8>, salt: Option<&str>) -> Event {
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

    fn removed(self, hashes: &[i64], medium: &str) -> Event {
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

/// As EAGLE's pages have them: each token with the next.
fn pairs(block: u64) -> Vec<u8> {
    let mut out = Vec::new();
    list(&mut out, &tokens(block), |out, token| {
        list(out, &[token, token + 1], |out, token| payloads::number(out, token.into()));
    });
    out
}

/// Hash of a page of requests without a salt; those of the salt are others, all of them negative.
fn plain(block: u64) -> i64 {
    i64::MIN + block as i64
}

fn salted(block: u64) -> i64 {
    -1 - block as i64
}

#[tokio::test(flavor = "multi_thread")]
async fn an_sglang_is_followed_from_a_replay_without_a_topic_on() {
    let folder = tempfile::TempDir::new().unwrap();
    let secret_file = folder.path().join(SALT);
    std::fs::write(&secret_file, "0a".repeat(32)).unwrap();
    for release in [Release::Arrays, Release::Maps] {
        println!("{release:?}");
        let (mut engine, events, replay) = Engine::listening_of((0, 0), None).await;
        let store = |block: u64, hash: fn(u64) -> i64, salt| {
            let parent = block.checked_sub(1).map(hash);
            batch(0, &[release.stored(&[hash(block)], parent, ids(block), salt)])
        };
        // All of it before the router comes.
        for block in 0..3 {
            engine.say(&store(block, plain, None), true).await;
        }
        for block in 0..2 {
            engine.say(&store(block, salted, Some(SALT)), true).await;
        }
        let tenants = vec![EngineTenantConfig { salt: SALT.into(), secret_file: secret_file.clone() }];
        let list = vec![EngineConfig { dialect: DialectConfig::Sglang, ..dialed(7, events, Some(replay)) }];
        let following = Following::new(EnginesConfig { tenants, ..config(list) }).await;
        following.until(7, 3).await;
        following.until_of(7, &SECRET, 2).await;
        following.until_live(&mut engine).await;
        // Two messages are lost, and replayed behind the third.
        for (block, is_lost) in [(3, true), (4, true), (5, false)] {
            engine.say(&store(block, plain, None), is_lost).await;
        }
        following.until(7, 6).await;
        // From the host's memory is not from here.
        engine.say(&batch(0, &[release.removed(&[plain(1)], "CPU_PINNED")]), false).await;
        engine.say(&batch(0, &[release.removed(&[salted(1)], "GPU")]), false).await;
        following.until_of(7, &SECRET, 1).await;
        assert_eq!(following.resident(7), 6);
        engine.say(&batch(0, &[release.removed(&[plain(4), plain(5)], "GPU")]), false).await;
        following.until(7, 4).await;
        // Of pairs nobody knows what a request would ask for.
        engine.say(&batch(0, &[release.stored(&[plain(4)], Some(plain(3)), pairs(4), None)]), false).await;
        following.until_count_of("kvfleet_engine_left_out_blocks_total", "opaque", 1.0).await;
        assert_eq!(following.resident(7), 4);
        assert_eq!(following.count("kvfleet_engine_gaps_total", "filled"), 1.0);
        assert_eq!(following.count("kvfleet_engine_restarts_total", "7"), 0.0);
        assert_eq!(following.count("kvfleet_engine_messages_total", "unreadable"), 0.0);
    }
}
