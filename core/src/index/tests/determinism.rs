//! Random histories of an index: it answers like the naive reference, and replicas with different
//! histories but equal logs are byte-equal.
//!
//! A failure prints the smallest sequence that shows it and the seed that repeats the run.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::random::{BLOCKS, Honesty, Intent, hashes_of, intents, request, starts_a_prefix, tight};
use super::reference::ReferenceIndex;
use super::*;

/// Applies every intent to the reference and returns the resulting commands.
fn commands_of(intents: &[Intent]) -> Vec<Command> {
    let mut reference = ReferenceIndex::new(tight());
    let mut log = Vec::new();
    for intent in intents {
        let command = intent.command(&reference);
        reference.apply(&command);
        log.push(command);
    }
    log
}

/// Tracks blocks that were announced without a parent and that no later change may have unlisted.
fn track_first_blocks(begun: &mut BTreeSet<BlockHash>, command: &Command, applied: &Applied) {
    let (Command::Announce(batch), Applied::Announced(outcomes)) = (command, applied) else { return };
    for (one, outcome) in batch.iter().zip(outcomes) {
        for change in &one.changes {
            if let (
                Change::Stored { parent: None, blocks, .. },
                AnnounceOutcome::Applied { unlisted: 0, .. },
            ) = (change, outcome)
            {
                begun.extend(blocks.first());
            }
        }
    }
    for change in batch.iter().flat_map(|one| &one.changes) {
        match change {
            Change::Dropped { blocks, .. } => begun.retain(|hash| !blocks.contains(hash)),
            Change::Cleared => begun.clear(),
            Change::Stored { .. } | Change::Moved { .. } => {}
        }
    }
}

fn is_without_effect(applied: &Applied) -> bool {
    match applied {
        Applied::Joined(_) | Applied::Done => false,
        Applied::Ignored | Applied::Refused(_) => true,
        Applied::Announced(outcomes) => {
            outcomes.iter().all(|outcome| !matches!(outcome, AnnounceOutcome::Applied { .. }))
        }
    }
}

fn same_nodes(index: &Index, reference: &ReferenceIndex) -> Result<(), TestCaseError> {
    prop_assert_eq!(index.nodes().count(), reference.nodes.len());
    for (state, (&id, expected)) in index.nodes().zip(&reference.nodes) {
        let in_tier = |tier| expected.blocks.values().filter(|tiers| tiers.contains(&tier)).count() as u64;
        prop_assert_eq!(&state.record, &expected.record);
        prop_assert_eq!(state.epoch, Epoch(expected.epoch));
        prop_assert_eq!(state.live, expected.live);
        prop_assert_eq!(state.blocks, expected.blocks.len() as u64);
        prop_assert_eq!(state.tier_blocks, Tier::ALL.map(in_tier));
        prop_assert_eq!(index.next_seq(NodeId(id)), Some((Epoch(expected.epoch), Seq(expected.next))));
        prop_assert_eq!(index.node(NodeId(id)), Some(state));
    }
    Ok(())
}

fn same_settings(index: &Index, reference: &ReferenceIndex) -> Result<(), TestCaseError> {
    prop_assert!(index.pins().eq(reference.pins.values()));
    prop_assert!(index.quotas().eq(reference.quotas.iter().map(|(&key, &value)| (TenantId(key), value))));
    prop_assert!(index.ttls().eq(reference.ttls.iter().map(|(&key, &value)| (TtlGroupId(key), value))));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(384), ..ProptestConfig::default() })]

    /// Every answer, count and lookup equals the naive index, after every command.
    #[test]
    fn answers_match_the_naive_index(intents in intents(Honesty::Honest), request in request()) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        let everything = hashes_of(0..BLOCKS);
        for intent in intents {
            let command = intent.command(&reference);
            prop_assert_eq!(index.apply(&command), reference.apply(&command), "{:?}", command);
            index.store.check();
            prop_assert_eq!(index.stats(), reference.stats());
            let expected = reference.longest_prefix(&request);
            let found = index.longest_prefix(&request);
            // A request from the middle of a prefix is answered only if a node announced its first
            // block without a parent.
            let may_miss = !starts_a_prefix(request.first()) && found.runs.is_empty();
            prop_assert!(may_miss || found == expected, "{:?} instead of {:?}", found, expected);
            for hash in &everything {
                prop_assert_eq!(index.holders_of(*hash), reference.holders_of(*hash));
            }
            same_nodes(&index, &reference)?;
            same_settings(&index, &reference)?;
        }
    }

    /// Even if nodes lie about the order of blocks, every block has exactly its holders; only the
    /// length of a prefix may be wrong.
    #[test]
    fn liars_do_not_change_holders(intents in intents(Honesty::Liars), request in request()) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        let mut begun = BTreeSet::new();
        for intent in intents {
            let command = intent.command(&reference);
            let applied = index.apply(&command);
            prop_assert_eq!(&applied, &reference.apply(&command), "{:?}", command);
            index.store.check();
            prop_assert_eq!(index.stats(), reference.stats());
            for hash in &hashes_of(0..BLOCKS) {
                prop_assert_eq!(index.holders_of(*hash), reference.holders_of(*hash));
            }
            track_first_blocks(&mut begun, &command, &applied);
            begun.retain(|hash| !reference.holders_of(*hash).is_empty());
            for hash in &begun {
                let found = index.longest_prefix(&[*hash]).runs;
                prop_assert_eq!(found.first().map(|run| &run.holders), Some(&reference.holders_of(*hash)));
            }
            prop_assert!(index.longest_prefix(&request).union_blocks() as usize <= request.len());
            same_nodes(&index, &reference)?;
        }
    }

    /// A replica that restored a snapshot half way and one that did not end byte-equal, with equal
    /// answers on the way.
    #[test]
    fn equal_logs_give_equal_bytes(
        intents in intents(Honesty::Liars),
        half in any::<prop::sample::Index>(),
        request in request(),
    ) {
        let log = commands_of(&intents);
        let half = half.index(log.len());
        let mut straight = Index::new(tight());
        let mut restored = Index::new(tight());
        for (position, command) in log.iter().enumerate() {
            if position == half {
                restored = Index::restore(&restored.snapshot(), tight()).unwrap();
            }
            let answer = straight.apply(command);
            prop_assert_eq!(&restored.apply(command), &answer);
            prop_assert_eq!(restored.digest(), straight.digest());
            prop_assert_eq!(restored.stats(), straight.stats());
            prop_assert_eq!(restored.longest_prefix(&request), straight.longest_prefix(&request));
        }
        prop_assert_eq!(restored.snapshot(), straight.snapshot());
    }

    /// A different history that ends in the same state has the same digest, despite another block
    /// layout.
    #[test]
    fn equal_states_give_equal_digests(intents in intents(Honesty::Liars)) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        for intent in intents {
            let command = intent.command(&reference);
            reference.apply(&command);
            index.apply(&command);
        }
        let Some(other_history) = reference.other_history() else { return Ok(()) };
        let mut other = Index::new(IndexLimits::default());
        for command in other_history {
            let applied = other.apply(&command);
            prop_assert!(!is_without_effect(&applied), "{command:?}: {applied:?}");
        }
        prop_assert_eq!(other.digest(), index.digest());
    }

    /// Two moments of one history have equal digests exactly if they have equal states.
    #[test]
    fn digests_and_states_agree(intents in intents(Honesty::Liars)) {
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        let mut by_state = BTreeMap::from([(reference.state(), index.digest())]);
        let mut by_digest = BTreeMap::from([(index.digest(), reference.state())]);
        for intent in intents {
            let command = intent.command(&reference);
            reference.apply(&command);
            index.apply(&command);
            let (state, seen) = (reference.state(), index.digest());
            prop_assert_eq!(by_digest.entry(seen).or_insert_with(|| state.clone()), &state);
            prop_assert_eq!(by_state.entry(state).or_insert(seen), &seen);
        }
    }

    /// `Ignored`, a refusal, a duplicate, a gap or a fenced epoch leaves the state unchanged;
    /// `Done` changes it.
    #[test]
    fn only_effective_commands_change_the_digest(intents in intents(Honesty::Liars)) {
        let mut index = Index::new(tight());
        for command in commands_of(&intents) {
            let before = index.digest();
            let applied = index.apply(&command);
            let unchanged = index.digest() == before;
            prop_assert_eq!(is_without_effect(&applied), unchanged, "{:?}: {:?}", command, applied);
        }
    }

    /// A log read back from its records leads to the same state.
    #[test]
    fn decoded_log_gives_the_same_state(intents in intents(Honesty::Liars)) {
        let mut said = Index::new(tight());
        let mut read = Index::new(tight());
        for command in commands_of(&intents) {
            said.apply(&command);
            read.apply(&Command::decode(&command.encode()).unwrap());
        }
        prop_assert_eq!(said.snapshot(), read.snapshot());
    }

    /// The prefix that a lookup reports for one node equals a lookup of that node alone.
    #[test]
    fn node_prefix_matches_a_lookup_of_that_node(intents in intents(Honesty::Honest), request in request()) {
        let mut index = Index::new(tight());
        for command in commands_of(&intents) {
            index.apply(&command);
        }
        let found = index.longest_prefix(&request);
        let nodes: Vec<NodeId> = index.nodes().map(|state| state.record.node).collect();
        for node in nodes {
            let holds = |hash: &BlockHash| index.holders_of(*hash).iter().any(|holder| holder.node == node);
            let alone = request.iter().take_while(|hash| holds(hash)).count() as u32;
            let may_miss = !starts_a_prefix(request.first()) && found.runs.is_empty();
            prop_assert!(may_miss || found.node_prefix_blocks(node) == alone);
        }
        let mut offset = 0;
        for run in &found.runs {
            prop_assert_eq!(run.start_blocks, offset);
            prop_assert!(run.len_blocks > 0 && !run.holders.is_empty());
            prop_assert!(run.holders.windows(2).all(|two| two[0].node < two[1].node));
            offset = run.end_blocks();
        }
        prop_assert!(found.runs.windows(2).all(|two| two[0].holders != two[1].holders));
    }
}

#[test]
fn random_histories_cover_all_outcomes() {
    // A property over sequences that never hit a refusal, a stale copy or a folded epoch would
    // prove little.
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut met: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..300 {
        let intents = intents(Honesty::Honest).new_tree(&mut runner).unwrap().current();
        let mut reference = ReferenceIndex::new(tight());
        let mut index = Index::new(tight());
        for intent in intents {
            let command = intent.command(&reference);
            let pins: Vec<u64> = index.pins().map(|pin| pin.pin.0).collect();
            let copies = index.copies();
            reference.apply(&command);
            let kind = match index.apply(&command) {
                Applied::Joined(_) => "joined",
                Applied::Done => match &command {
                    Command::Pin(pin) if pins.contains(&pin.pin.0) => "pin changed",
                    Command::SetGeneration(_) if index.copies() < copies => "other weights",
                    _ => "done",
                },
                Applied::Ignored => match &command {
                    Command::Unpin { pin, .. } if pins.contains(&pin.0) => "pin renewed meanwhile",
                    _ => "ignored",
                },
                Applied::Refused(Refusal::OverLimit { .. }) => "over limit",
                Applied::Refused(Refusal::Identity { .. }) => "identity",
                Applied::Refused(Refusal::NotOwner { .. }) => "not owner",
                Applied::Refused(Refusal::PinExists(_)) => "pin exists",
                Applied::Refused(Refusal::Generation { .. }) => "another generation",
                Applied::Announced(outcomes) => match outcomes[0] {
                    AnnounceOutcome::Applied { unlisted: 0, .. } => "applied",
                    AnnounceOutcome::Applied { .. } => "unlisted",
                    AnnounceOutcome::Duplicate { .. } => "duplicate",
                    AnnounceOutcome::Gap { .. } => "gap",
                    AnnounceOutcome::Fenced => "fenced",
                },
            };
            *met.entry(kind).or_default() += 1;
            *met.entry("stale").or_default() += u32::from(index.stale_copies() > 0);
            *met.entry("folded epoch").or_default() += u32::from(reference.floor > 0);
            *met.entry("shared block").or_default() += u32::from(index.stats().copies > index.stats().blocks);
            let (stubs, apart, begun_within) = index.store.group_anomalies();
            *met.entry("stub").or_default() += u32::from(stubs > 0);
            *met.entry("page that is not canonical").or_default() += u32::from(apart > 0);
            *met.entry("run from the middle of a block group").or_default() += u32::from(begun_within > 0);
        }
    }
    let kinds = [
        "joined",
        "done",
        "ignored",
        "over limit",
        "identity",
        "not owner",
        "pin exists",
        "another generation",
        "other weights",
        "pin changed",
        "pin renewed meanwhile",
        "applied",
        "unlisted",
        "duplicate",
        "gap",
        "fenced",
        "stale",
        "folded epoch",
        "shared block",
        "stub",
        "page that is not canonical",
        "run from the middle of a block group",
    ];
    for kind in kinds {
        assert!(met.get(kind).copied().unwrap_or(0) >= 10, "{kind} in {met:?}");
    }
}
