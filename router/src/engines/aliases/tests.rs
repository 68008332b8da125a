//! Engine blocks against the hashes that a request of the same tokens uses, for every ratio of
//! block sizes, by example and at random.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use kv_core::id::Tier;
use kv_core::prefix::{IdentityManifest, PrefixHasher};
use kvfleet_engine_events::events::ExtraKeys;
use proptest::prelude::*;

use super::*;

const TENANT_A: [u8; 32] = [7; 32];

fn manifest(block_tokens: u32) -> IdentityManifest {
    IdentityManifest { block_tokens, ..IdentityManifest::default() }
}

fn aliases(block_tokens: u32) -> Aliases {
    Aliases::new(Arc::new(Tenants {
        manifest: manifest(block_tokens),
        secrets_by_salt: [("tenant-a".to_owned(), TENANT_A)].into(),
        salts_by_tenant: [].into(),
        default_secret: [0; 32],
    }))
}

/// The hashes that a request of these tokens uses, whole blocks only.
fn asked(block_tokens: u32, secret: &[u8; 32], tokens: &[u32]) -> Vec<BlockHash> {
    let hasher = PrefixHasher::new(&manifest(block_tokens), secret);
    let (mut chain, mut hashes) = (hasher.start(), Vec::new());
    hasher.extend(&mut chain, tokens, &mut hashes);
    hashes
}

fn number(number: u64) -> EngineHash {
    EngineHash::from_u64(number)
}

/// Stores blocks with these hashes and tokens after a parent.
fn store(hashes: &[u64], parent: Option<u64>, tokens: &[u32], block_tokens: u32) -> StoredBlocks {
    StoredBlocks {
        hashes: hashes.iter().copied().map(number).collect(),
        parent: parent.map(number),
        tokens: Tokens::Ids(tokens.to_vec()),
        block_tokens,
        medium: Medium::Gpu,
        adapter: None,
        extra: ExtraKeys::default(),
        group: None,
        is_full_attention: true,
    }
}

fn remove(hashes: &[u64]) -> EngineEvent {
    let hashes = hashes.iter().copied().map(number).collect();
    EngineEvent::Removed(RemovedBlocks { hashes, medium: Medium::Gpu, group: None })
}

fn take(aliases: &mut Aliases, event: impl Into<EngineEvent>) -> Vec<Change> {
    let mut changes = Changes::default();
    aliases.apply_event(&event.into(), &mut changes);
    changes.take()
}

/// The listed blocks after these changes, each with its parent.
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
                blocks.iter().for_each(|block| {
                    assert!(listed.remove(block).is_some(), "dropped a block that is not listed");
                });
            }
            Change::Cleared => listed.clear(),
            Change::Moved { .. } => panic!("blocks do not move"),
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
    // Repeated, as after a hit, and removed twice.
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[1, 2], None, &tokens[..32], 16))), []);
    let gone =
        [Change::Dropped { blocks: vec![ours[3], ours[2]], tier: Tier::Gpu, cause: Default::default() }];
    assert_eq!(take(&mut aliases, remove(&[4, 3])), gone);
    assert_eq!(take(&mut aliases, remove(&[4, 3])), []);
    // Back from host memory, without tokens.
    let back = take(&mut aliases, EngineEvent::Stored(store(&[3], Some(2), &[], 16)));
    assert_eq!(back, [Change::Stored { parent: Some(ours[1]), blocks: vec![ours[2]], tier: Tier::Gpu }]);
    assert_eq!(aliases.take_unmapped(), UnmappedBlocks::default());
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
    // The salt is sent for the first block only.
    let second = blocks_of(&take(&mut aliases, EngineEvent::Stored(store(&[2], Some(1), &tokens[16..], 16))));
    assert_eq!(second, asked(16, &TENANT_A, &tokens)[1..]);
    salted.extra.salt = Some("nobody".to_owned());
    salted.hashes = vec![number(5)];
    assert_eq!(take(&mut aliases, EngineEvent::Stored(salted)), []);
    assert_eq!(aliases.take_unmapped(), UnmappedBlocks { unknown_salt: 1, ..UnmappedBlocks::default() });
    let mut adapted = store(&[6], None, &tokens[..16], 16);
    adapted.adapter = Some("sql".to_owned());
    let adapted = blocks_of(&take(&mut aliases, EngineEvent::Stored(adapted)));
    let with_adapter = IdentityManifest { adapter: "sql".to_owned(), ..manifest(16) };
    assert_eq!(adapted, PrefixHasher::new(&with_adapter, &[0; 32]).blocks(&tokens[..16]));
}

#[test]
fn unhashable_blocks_are_left_out_and_counted() {
    let tokens: Vec<u32> = (0..48).collect();
    let mut aliases = aliases(16);
    let mut unmapped = UnmappedBlocks::default();
    let mut left = |aliases: &mut Aliases, stored: StoredBlocks, expected: UnmappedBlocks| {
        assert_eq!(take(aliases, EngineEvent::Stored(stored)), []);
        unmapped = aliases.take_unmapped();
        assert_eq!(unmapped, expected);
    };
    let none = UnmappedBlocks::default;
    let orphan = store(&[2], Some(1), &tokens[..16], 16);
    left(&mut aliases, orphan, UnmappedBlocks { orphans: 1, ..none() });
    left(&mut aliases, store(&[2], None, &[], 16), UnmappedBlocks { orphans: 1, ..none() });
    left(&mut aliases, store(&[2, 3], None, &tokens[..48], 24), UnmappedBlocks { odd_size: 2, ..none() });
    left(&mut aliases, store(&[2], None, &tokens, 16), UnmappedBlocks { opaque: 1, ..none() });
    left(&mut aliases, store(&[2], None, &tokens, 0), UnmappedBlocks { opaque: 1, ..none() });
    let pairs = StoredBlocks { tokens: Tokens::Other, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, pairs, UnmappedBlocks { opaque: 1, ..none() });
    let group = StoredBlocks { group: Some(1), ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, group, UnmappedBlocks { other_group: 1, ..none() });
    let window = StoredBlocks { is_full_attention: false, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, window, UnmappedBlocks { other_group: 1, ..none() });
    let disk = StoredBlocks { medium: Medium::Storage, ..store(&[2], None, &tokens[..16], 16) };
    left(&mut aliases, disk, none());
}

#[test]
fn an_image_ends_the_hashable_prefix() {
    let tokens: Vec<u32> = (0..48).collect();
    let mut aliases = aliases(16);
    let mut image = store(&[1, 2, 3], None, &tokens, 16);
    image.extra.first_opaque_block = Some(1);
    let ours = asked(16, &[0; 32], &tokens[..16]);
    let changes = take(&mut aliases, EngineEvent::Stored(image));
    assert_eq!(changes, [Change::Stored { parent: None, blocks: ours, tier: Tier::Gpu }]);
    assert_eq!(aliases.take_unmapped(), UnmappedBlocks { opaque: 2, ..UnmappedBlocks::default() });
    // Blocks after the image have an unknown parent.
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[..16], 16))), []);
    assert_eq!(aliases.take_unmapped().orphans, 1);
}

#[test]
fn our_block_is_resident_while_all_its_parts_are() {
    let tokens: Vec<u32> = (0..64).collect();
    let ours = asked(64, &[0; 32], &tokens);
    let mut aliases = aliases(64);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[1, 2, 3], None, &tokens[..48], 16))), []);
    let there = [Change::Stored { parent: None, blocks: ours.clone(), tier: Tier::Gpu }];
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[48..], 16))), there);
    assert_eq!(aliases.all()[1..], there);
    let gone = [Change::Dropped { blocks: ours.clone(), tier: Tier::Gpu, cause: Default::default() }];
    assert_eq!(take(&mut aliases, remove(&[2, 4])), gone);
    assert_eq!(aliases.all(), [Change::Cleared]);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[2], Some(1), &tokens[16..32], 16))), []);
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[4], Some(3), &tokens[48..], 16))), there);
    // Another continuation of the second part.
    let other: Vec<u32> = tokens[..32].iter().copied().chain(500..532).collect();
    let other_there = asked(64, &[0; 32], &other);
    let changes = take(&mut aliases, EngineEvent::Stored(store(&[13, 14], Some(2), &other[32..], 16)));
    assert_eq!(changes, [Change::Stored { parent: None, blocks: other_there.clone(), tier: Tier::Gpu }]);
    let both = [Change::Dropped {
        blocks: vec![ours[0], other_there[0]],
        tier: Tier::Gpu,
        cause: Default::default(),
    }];
    assert_eq!(take(&mut aliases, remove(&[1])), both);
}

#[test]
fn an_alias_outlives_residency() {
    let tokens: Vec<u32> = (0..64).collect();
    let ours = asked(16, &[0; 32], &tokens);
    let mut aliases = aliases(16);
    take(&mut aliases, EngineEvent::Stored(store(&[1, 2, 3], None, &tokens[..48], 16)));
    aliases.forget_resident();
    assert_eq!(aliases.all(), [Change::Cleared]);
    // A block after the second proves both before it, and not the third.
    let proved = take(&mut aliases, EngineEvent::Stored(store(&[9], Some(2), &[7; 16], 16)));
    let mut listed = BTreeMap::new();
    apply(&mut listed, &proved);
    assert!(listed.contains_key(&ours[0]) && listed.contains_key(&ours[1]) && !listed.contains_key(&ours[2]));
    assert_eq!(listed.len(), 3);
    // Another process uses names of its own.
    aliases.forget();
    assert_eq!(take(&mut aliases, EngineEvent::Stored(store(&[9], Some(2), &[7; 16], 16))), []);
    assert_eq!(aliases.take_unmapped().orphans, 1);
}

#[test]
fn events_of_other_media_and_groups_do_not_choose_the_group() {
    let tokens: Vec<u32> = (0..16).collect();
    let mut aliases = aliases(16);
    let offloaded = StoredBlocks { medium: Medium::Cpu, ..store(&[5], None, &tokens, 16) };
    take(&mut aliases, EngineEvent::Stored(offloaded));
    let empty = StoredBlocks { group: Some(2), ..store(&[6], None, &[], 16) };
    take(&mut aliases, EngineEvent::Stored(empty));
    let of_group = StoredBlocks { group: Some(0), ..store(&[1], None, &tokens, 16) };
    assert_eq!(take(&mut aliases, EngineEvent::Stored(of_group)).len(), 1);
    // A removal without a group may mean ours.
    assert_eq!(take(&mut aliases, remove(&[1])).len(), 1);
}

#[test]
fn aliases_are_bounded_and_the_oldest_departures_go_first() {
    let (mut many, mut hostile) = (aliases(16), aliases(1));
    let prompt = |number: u64| [number as u32; 16];
    for number in 0..2 * KNOWN_MAX as u64 {
        let stored = take(&mut many, EngineEvent::Stored(store(&[number], None, &prompt(number), 16)));
        if number < KNOWN_MAX as u64 {
            assert_eq!(stored.len(), 1);
            if number % 2 == 1 {
                take(&mut many, remove(&[number]));
            }
        }
    }
    assert_eq!(many.known.len(), KNOWN_MAX);
    assert!(many.take_unmapped().over_limit > 0 && many.departed.is_empty());
    // A block that holds half of the limit, a thousand times: the limit still holds.
    let long: Vec<u32> = (0..KNOWN_MAX as u32 / 2).collect();
    for number in 0..1_000 {
        let stored = store(&[number], None, &long, KNOWN_MAX as u32 / 2);
        take(&mut hostile, EngineEvent::Stored(stored));
        take(&mut hostile, remove(&[number]));
    }
    assert!(hostile.our_blocks <= KNOWN_MAX && hostile.known.len() <= 2, "{} of ours", hostile.our_blocks);
    // Small departed blocks do not make room for large ones one for one.
    let mut uneven = aliases(1);
    for number in 0..KNOWN_MAX as u64 {
        take(&mut uneven, EngineEvent::Stored(store(&[number], None, &[number as u32], 1)));
    }
    take(&mut uneven, remove(&(0..KNOWN_MAX as u64).collect::<Vec<_>>()));
    for number in 10_000..10_020 {
        take(&mut uneven, EngineEvent::Stored(store(&[number], None, &long, KNOWN_MAX as u32 / 2)));
        assert!(uneven.our_blocks <= KNOWN_MAX, "{} of ours", uneven.our_blocks);
    }
}

#[test]
fn shared_parts_drop_forgotten_blocks() {
    let mut aliases = aliases(64);
    let shared: Vec<u32> = (0..48).collect();
    take(&mut aliases, EngineEvent::Stored(store(&[1, 2, 3], None, &shared, 16)));
    for number in 0..400u64 {
        let changes = take(
            &mut aliases,
            EngineEvent::Stored(store(&[100 + number], Some(3), &[number as u32 + 1_000; 16], 16)),
        );
        assert_eq!(changes.len(), 1, "prompt {number}");
        take(&mut aliases, remove(&[100 + number]));
    }
    let second = aliases.known.find(number(2)).unwrap();
    let of = aliases.known.get(second).unwrap().part().unwrap().split_blocks().len();
    assert!(
        of <= KEPT_DEPARTED_MIN + 1 && of == aliases.split_blocks.len(),
        "{of} blocks of ours of one part"
    );
    assert!(aliases.known.len() <= KEPT_DEPARTED_MIN + 4);
    // A block that was forgotten and returns is listed once.
    take(&mut aliases, EngineEvent::Stored(store(&[100], Some(3), &[1_000; 16], 16)));
    assert_eq!(take(&mut aliases, remove(&[1])).len(), 1);
    assert_eq!(take(&mut aliases, remove(&[2])), []);
    assert_eq!(
        take(&mut aliases, EngineEvent::Stored(store(&[1], None, &[], 16))),
        [],
        "its second part is still missing"
    );
}

#[test]
fn a_reused_name_makes_no_cycle() {
    let mut aliases = aliases(16);
    take(&mut aliases, EngineEvent::Stored(store(&[1, 2], None, &[5; 32], 16)));
    take(&mut aliases, remove(&[1, 2]));
    for other in 0..2 * KEPT_DEPARTED_MIN as u64 {
        take(&mut aliases, EngineEvent::Stored(store(&[100 + other], None, &[other as u32; 16], 16)));
        if aliases.known.find(number(1)).is_none() {
            break;
        }
        take(&mut aliases, remove(&[100 + other]));
    }
    // The first is forgotten and then stored as a child of its own child.
    if aliases.known.find(number(2)).is_some() {
        take(&mut aliases, EngineEvent::Stored(store(&[1], Some(2), &[9; 16], 16)));
    }
    aliases.forget_resident();
    take(&mut aliases, EngineEvent::Stored(store(&[50], Some(2), &[8; 16], 16)));
    take(&mut aliases, EngineEvent::Stored(store(&[51], Some(1), &[8; 16], 16)));
}

/// A long event with repeated names, near and far apart, some of them already known.
#[test]
fn an_event_equals_its_blocks_one_by_one() {
    for (ours, theirs) in [(16, 16), (64, 16), (16, 32)] {
        let tokens: Vec<u32> = (0..200 * theirs).map(|token| token * 7 % 1_000).collect();
        let mut names: Vec<u64> = (1_000..1_200).collect();
        (names[70], names[130], names[131], names[190]) = (names[69], names[3], names[4], names[191]);
        let (mut at_once, mut single) = (aliases(ours), aliases(ours));
        let known = store(&names[100..140], None, &tokens[..40 * theirs as usize], theirs);
        for aliases in [&mut at_once, &mut single] {
            take(aliases, EngineEvent::Stored(known.clone()));
            take(aliases, remove(&names[110..120]));
        }
        take(&mut at_once, EngineEvent::Stored(store(&names, None, &tokens, theirs)));
        for (at, tokens) in tokens.chunks(theirs as usize).enumerate() {
            let parent = at.checked_sub(1).map(|before| names[before]);
            take(&mut single, EngineEvent::Stored(store(&names[at..=at], parent, tokens, theirs)));
        }
        assert!(at_once.all().len() > 1, "{ours} and {theirs}");
        assert_eq!(at_once.all(), single.all(), "{ours} and {theirs}");
        assert_eq!(at_once.take_unmapped(), single.take_unmapped());
        assert_eq!(at_once.known.len(), single.known.len());
        let gone: Vec<u64> = names.iter().rev().step_by(3).copied().collect();
        for aliases in [&mut at_once, &mut single] {
            take(aliases, remove(&gone));
        }
        assert_eq!(at_once.all(), single.all());
    }
}

/// Random engine steps on prefixes of a small tree of tokens.
#[derive(Clone, Debug)]
enum EngineStep {
    /// Stores the first blocks of one prompt.
    Store {
        prompt: usize,
        blocks: usize,
    },
    /// Stores further blocks of a prompt if those before them are resident.
    Continue {
        prompt: usize,
        from: usize,
        blocks: usize,
    },
    /// Removes a block of a prompt.
    Remove {
        prompt: usize,
        block: usize,
    },
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<EngineStep>> {
    let one = prop_oneof![
        8 => (0..3usize, 1..=16usize).prop_map(|(prompt, blocks)| EngineStep::Store { prompt, blocks }),
        4 => (0..3usize, 1..12usize, 1..6usize)
            .prop_map(|(prompt, from, blocks)| EngineStep::Continue { prompt, from, blocks }),
        8 => (0..3usize, 0..16usize).prop_map(|(prompt, block)| EngineStep::Remove { prompt, block }),
        1 => Just(EngineStep::Clear),
    ];
    prop::collection::vec(one, 1..60)
}

/// Prompts of 128 tokens that share their first 64 or their first 24.
fn prompt(which: usize) -> Vec<u32> {
    let shared = [128, 64, 24][which];
    (0..128).map(|token| if token < shared { token } else { token + 1_000 * which as u32 }).collect()
}

proptest! {
    /// Listed blocks equal the engine's blocks under request hashes: our block needs all its parts
    /// and has its own parent. A full report says the same.
    #[test]
    fn listed_blocks_equal_resident_blocks(
        steps in steps(),
        theirs in prop::sample::select(vec![8u32, 16, 32]),
        ours in prop::sample::select(vec![8u32, 16, 32, 64]),
    ) {
        let mut aliases = aliases(ours);
        let mut listed = BTreeMap::new();
        let mut resident: BTreeSet<Vec<u32>> = BTreeSet::new();
        // The engine's hash of a prefix is its index in this list.
        let mut names: Vec<Vec<u32>> = Vec::new();
        let mut name = |prefix: &[u32]| {
            let at = names.iter().position(|named| named == prefix);
            at.unwrap_or_else(|| { names.push(prefix.to_vec()); names.len() - 1 }) as u64
        };
        let theirs_usize = theirs as usize;
        for step in steps {
            let event = match step {
                EngineStep::Store { prompt: which, blocks } => {
                    let tokens = prompt(which);
                    let tokens = &tokens[..tokens.len().min(blocks * theirs_usize)];
                    let ends = (1..=tokens.len() / theirs_usize).map(|end| end * theirs_usize);
                    let hashes: Vec<u64> = ends.clone().map(|end| name(&tokens[..end])).collect();
                    resident.extend(ends.map(|end| tokens[..end].to_vec()));
                    EngineEvent::Stored(store(&hashes, None, tokens, theirs))
                }
                EngineStep::Continue { prompt: which, from, blocks } => {
                    let tokens = prompt(which);
                    let start = tokens.len().min(from * theirs_usize);
                    let tokens = &tokens[..tokens.len().min(start + blocks * theirs_usize)];
                    let before = (1..=start / theirs_usize).map(|end| end * theirs_usize);
                    if !before.into_iter().all(|end| resident.contains(&tokens[..end])) {
                        continue;
                    }
                    let ends = (start / theirs_usize + 1..=tokens.len() / theirs_usize).map(|end| end * theirs_usize);
                    let hashes: Vec<u64> = ends.clone().map(|end| name(&tokens[..end])).collect();
                    resident.extend(ends.map(|end| tokens[..end].to_vec()));
                    let parent = name(&tokens[..start]);
                    EngineEvent::Stored(store(&hashes, Some(parent), &tokens[start..], theirs))
                }
                EngineStep::Remove { prompt: which, block } => {
                    let tokens = prompt(which);
                    let end = tokens.len().min((block + 1) * theirs_usize);
                    resident.remove(&tokens[..end]);
                    remove(&[name(&tokens[..end])])
                }
                EngineStep::Clear => { resident.clear(); EngineEvent::Cleared }
            };
            let changes = take(&mut aliases, event);
            apply(&mut listed, &changes);
            let mut expected = BTreeMap::new();
            for which in 0..3 {
                let tokens = prompt(which);
                let all = asked(ours, &[0; 32], &tokens);
                for (at, hash) in all.iter().enumerate() {
                    let (start, end) = (at * ours as usize, (at + 1) * ours as usize);
                    // Engine blocks that overlap this block of ours.
                    let first = start / theirs_usize * theirs_usize + theirs_usize;
                    let mut ends = (first..end + theirs_usize)
                        .step_by(theirs_usize)
                        .filter(|part| *part < end + theirs_usize && *part <= tokens.len());
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
