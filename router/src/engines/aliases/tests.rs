//! Blocks of engines against what a request of the same tokens asks for, in every ratio of sizes, by example and by chance.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_proto::engine_events::Extra;
use proptest::prelude::*;

use super::*;

const TENANT_A: [u8; 32] = [7; 32];

fn manifest(block_tokens: u32) -> IdentityManifest {
    IdentityManifest { block_tokens, ..IdentityManifest::default() }
}

fn aliases(block_tokens: u32) -> Aliases {
    Aliases::new(Arc::new(Tenants {
        manifest: manifest(block_tokens),
        by_salt: [("tenant-a".to_owned(), TENANT_A)].into(),
        without_salt: [0; 32],
    }))
}

/// What a request of these tokens asks for, whole blocks only.
fn asked(block_tokens: u32, secret: &[u8; 32], tokens: &[u32]) -> Vec<BlockHash> {
    let hasher = PrefixHasher::new(&manifest(block_tokens), secret);
    let (mut chain, mut hashes) = (hasher.start(), Vec::new());
    hasher.extend(&mut chain, tokens, &mut hashes);
    hashes
}

fn number(number: u64) -> EngineHash {
    EngineHash::of_number(number)
}

/// Blocks numbered so, behind a parent, of these tokens.
fn store(hashes: &[u64], parent: Option<u64>, tokens: &[u32], block_tokens: u32) -> Stored {
    Stored {
        hashes: hashes.iter().copied().map(number).collect(),
        parent: parent.map(number),
        tokens: Tokens::Ids(tokens.to_vec()),
        block_tokens,
        medium: Medium::Gpu,
        adapter: None,
        extra: Extra::default(),
        group: None,
        is_full_attention: true,
    }
}

fn remove(hashes: &[u64]) -> EngineEvent {
    let hashes = hashes.iter().copied().map(number).collect();
    EngineEvent::Removed(Removed { hashes, medium: Medium::Gpu, group: None })
}

fn take(aliases: &mut Aliases, event: impl Into<EngineEvent>) -> Vec<Change> {
    let mut changes = Vec::new();
    aliases.take(&event.into(), &mut changes);
    changes
}

/// What changes come to, with the parent that each block was told behind.
fn apply(listed: &mut BTreeMap<BlockHash, Option<BlockHash>>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::Stored { parent, blocks, .. } => {
                let mut before = *parent;
                for block in blocks {
                    listed.insert(*block, before);
                    before = Some(*block);
                }
            }
            Change::Dropped { blocks, .. } => {
                blocks
                    .iter()
                    .for_each(|block| assert!(listed.remove(block).is_some(), "dropped what is not there"));
            }
            Change::Cleared => listed.clear(),
            Change::Moved { .. } => panic!("nothing moves"),
        }
    }
}

#[test]
fn blocks_of_the_same_size_have_the_hashes_of_requests() {
    let tokens: Vec<u32> = (0..64).collect();
    let ours = asked(16, &[0; 32], &tokens);
    let mut aliases = aliases(16);
    let first = take(&mut aliases, EngineEvent::Stored(store(&[1, 2], None, &tokens[..32], 16)));
    assert_eq!(first, [Change::Stored { parent: None, blocks: ours[..2].into(), tier: Tier::Gpu }]);
    let next = take(&mut aliases, EngineEvent::Stored(store(&[3, 4], Some(2), &tokens[32..], 16)));
    assert_eq!(next, [Change::Stored { parent: Some(ours[1]), blocks: ours[2..].into(), tier: Tier::Gpu }]);
    // Said again, as after a hit, and taken away twice.
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[1, 2], None, &tokens[..32], 16))), []);
    let gone = [Change::Dropped { blocks: vec![ours[3], ours[2]], tier: Tier::Gpu }];
    assert_eq!(take(&mut aliases, remove(&[4, 3])), gone);
    assert_eq!(take(&mut aliases, remove(&[4, 3])), []);
    // Back from the host's memory, without tokens.
    let back = take(&mut aliases, EngineEvent::Stored(store(&[3], Some(2), &[], 16)));
    assert_eq!(back, [Change::Stored { parent: Some(ours[1]), blocks: vec![ours[2]], tier: Tier::Gpu }]);
    assert_eq!(aliases.take_left_out(), LeftOut::default());
}

#[test]
fn salts_and_adapters_are_prefixes_of_their_own() {
    let tokens: Vec<u32> = (0..32).collect();
    let mut aliases = aliases(16);
    let mut salted = store(&[1], None, &tokens[..16], 16);
    salted.extra.salt = Some("tenant-a".to_owned());
    let blocks_of = |changes: &[Change]| match changes {
        [Change::Stored { blocks, .. }] => blocks.clone(),
        other => panic!("{other:?}"),
    };
    let first = blocks_of(&take(&mut aliases, EngineEvent::Stored(salted.clone())));
    assert_eq!(first, asked(16, &TENANT_A, &tokens[..16]));
    // The salt is said for the first block only.
    let second = blocks_of(&take(&mut aliases, EngineEvent::Stored(store(&[2], Some(1), &tokens[16..], 16))));
    assert_eq!(second, asked(16, &TENANT_A, &tokens)[1..]);
    salted.extra.salt = Some("nobody".to_owned());
    salted.hashes = vec![number(5)];
    assert_eq!(take(&mut aliases, EngineEvent::Stored(salted)), []);
    assert_eq!(aliases.take_left_out(), LeftOut { unknown_salt: 1, ..LeftOut::default() });
    let mut adapted = store(&[6], None, &tokens[..16], 16);
    adapted.adapter = Some("sql".to_owned());
    let adapted = blocks_of(&take(&mut aliases, EngineEvent::Stored(adapted)));
    let with_adapter = IdentityManifest { adapter: "sql".to_owned(), ..manifest(16) };
    assert_eq!(adapted, PrefixHasher::new(&with_adapter, &[0; 32]).blocks(&tokens[..16]));
}

#[test]
fn what_no_request_can_ask_for_is_left_out_and_counted() {
    let tokens: Vec<u32> = (0..48).collect();
    let mut aliases = aliases(16);
    let mut left_out = LeftOut::default();
    let mut left = |aliases: &mut Aliases, stored: Stored, expected: LeftOut| {
        assert_eq!(take(aliases, EngineEvent::Stored(stored)), []);
        left_out = aliases.take_left_out();
        assert_eq!(left_out, expected);
    };
    let none = LeftOut::default;
    let orphan = store(&[2], Some(1), &tokens[..16], 16);
    left(&mut aliases, orphan, LeftOut { orphans: 1, ..none() });
    left(&mut aliases, store(&[2], None, &[], 16), LeftOut { orphans: 1, ..none() });
    left(&mut aliases, store(&[2, 3], None, &tokens[..48], 24), LeftOut { odd_size: 2, ..none() });
    left(&mut aliases, store(&[2], None, &tokens, 16), LeftOut { opaque: 1, ..none() });
    left(&mut aliases, store(&[2], None, &tokens, 0), LeftOut { opaque: 1, ..none() });
    let pairs = Stored { tokens: Tokens::Other, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, pairs, LeftOut { opaque: 1, ..none() });
    let group = Stored { group: Some(1), ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, group, LeftOut { other_group: 1, ..none() });
    let window = Stored { is_full_attention: false, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, window, LeftOut { other_group: 1, ..none() });
    let disk = Stored { medium: Medium::Storage, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, disk, none());
}

#[test]
fn an_image_ends_what_can_be_hashed() {
    let tokens: Vec<u32> = (0..48).collect();
    let mut aliases = aliases(16);
    let mut image = store(&[1, 2, 3], None, &tokens, 16);
    image.extra.plain_blocks = Some(1);
    let ours = asked(16, &[0; 32], &tokens[..16]);
    let changes = take(&mut aliases, EngineEvent::Stored(image));
    assert_eq!(changes, [Change::Stored { parent: None, blocks: ours, tier: Tier::Gpu }]);
    assert_eq!(aliases.take_left_out(), LeftOut { opaque: 2, ..LeftOut::default() });
    // What comes behind the image is behind a parent that is not known.
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[..16], 16))), []);
    assert_eq!(aliases.take_left_out().orphans, 1);
}

#[test]
fn a_block_of_ours_is_there_while_all_of_its_parts_are() {
    let tokens: Vec<u32> = (0..64).collect();
    let ours = asked(64, &[0; 32], &tokens);
    let mut aliases = aliases(64);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[1, 2, 3], None, &tokens[..48], 16))), []);
    let there = [Change::Stored { parent: None, blocks: ours.clone(), tier: Tier::Gpu }];
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[48..], 16))), there);
    assert_eq!(aliases.all()[1..], there);
    let gone = [Change::Dropped { blocks: ours.clone(), tier: Tier::Gpu }];
    assert_eq!(take(&mut aliases, remove(&[2, 4])), gone);
    assert_eq!(aliases.all(), [Change::Cleared]);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[2], Some(1), &tokens[16..32], 16))), []);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[48..], 16))), there);
    // Another way to go on from the second part.
    let other: Vec<u32> = tokens[..32].iter().copied().chain(500..532).collect();
    let other_there = asked(64, &[0; 32], &other);
    let changes = take(&mut aliases, EngineEvent::Stored(store(&[13, 14], Some(2), &other[32..], 16)));
    assert_eq!(changes, [Change::Stored { parent: None, blocks: other_there.clone(), tier: Tier::Gpu }]);
    let both = [Change::Dropped { blocks: vec![ours[0], other_there[0]], tier: Tier::Gpu }];
    assert_eq!(take(&mut aliases, remove(&[1])), both);
}

/// An engine that says what comes to its mind about prefixes of a small tree of tokens.
#[derive(Clone, Debug)]
enum Step {
    /// The first blocks of one of the prompts are there.
    Store {
        prompt: usize,
        blocks: usize,
    },
    /// A block of one is not.
    Remove {
        prompt: usize,
        block: usize,
    },
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let one = prop_oneof![
        8 => (0..3usize, 1..=16usize).prop_map(|(prompt, blocks)| Step::Store { prompt, blocks }),
        8 => (0..3usize, 0..16usize).prop_map(|(prompt, block)| Step::Remove { prompt, block }),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(one, 1..60)
}

/// Prompts of 128 tokens that share their first 64, or their first 24.
fn prompt(which: usize) -> Vec<u32> {
    let shared = [128, 64, 24][which];
    (0..128).map(|token| if token < shared { token } else { token + 1_000 * which as u32 }).collect()
}

proptest! {
    /// What is listed is what the engine has, by the hashes of requests: of a block of ours all parts, with its own parent; and
    /// telling everything again says the same.
    #[test]
    fn what_is_listed_is_what_is_resident(steps in steps(), theirs in prop::sample::select(vec![8u32, 16, 32]), ours in prop::sample::select(vec![8u32, 16, 32, 64])) {
        let mut aliases = aliases(ours);
        let mut listed = BTreeMap::new();
        let mut resident: BTreeSet<Vec<u32>> = BTreeSet::new();
        // The engine's hash of a prefix is its place in this list.
        let mut names: Vec<Vec<u32>> = Vec::new();
        let mut name = |prefix: &[u32]| {
            let at = names.iter().position(|named| named == prefix);
            at.unwrap_or_else(|| { names.push(prefix.to_vec()); names.len() - 1 }) as u64
        };
        let theirs_usize = theirs as usize;
        for step in steps {
            let event = match step {
                Step::Store { prompt: which, blocks } => {
                    let tokens = prompt(which);
                    let tokens = &tokens[..tokens.len().min(blocks * theirs_usize)];
                    let ends = (1..=tokens.len() / theirs_usize).map(|end| end * theirs_usize);
                    let hashes: Vec<u64> = ends.clone().map(|end| name(&tokens[..end])).collect();
                    resident.extend(ends.map(|end| tokens[..end].to_vec()));
                    EngineEvent::Stored(store(&hashes, None, tokens, theirs))
                }
                Step::Remove { prompt: which, block } => {
                    let tokens = prompt(which);
                    let end = tokens.len().min((block + 1) * theirs_usize);
                    resident.remove(&tokens[..end]);
                    remove(&[name(&tokens[..end])])
                }
                Step::Clear => { resident.clear(); EngineEvent::Cleared }
            };
            let changes = take(&mut aliases, event);
            apply(&mut listed, &changes);
            let mut expected = BTreeMap::new();
            for which in 0..3 {
                let tokens = prompt(which);
                let all = asked(ours, &[0; 32], &tokens);
                for (at, hash) in all.iter().enumerate() {
                    let (start, end) = (at * ours as usize, (at + 1) * ours as usize);
                    // Blocks of the engine that this one of ours has anything of.
                    let first = start / theirs_usize * theirs_usize + theirs_usize;
                    let mut ends = (first..end + theirs_usize).step_by(theirs_usize).filter(|part| *part < end + theirs_usize && *part <= tokens.len());
                    if ends.all(|part| resident.contains(&tokens[..part])) {
                        expected.insert(*hash, at.checked_sub(1).map(|before| all[before]));
                    }
                }
            }
            prop_assert_eq!(&listed, &expected);
            let mut again = BTreeMap::new();
            apply(&mut again, &aliases.all());
            prop_assert_eq!(&again, &expected);
        }
    }
}
