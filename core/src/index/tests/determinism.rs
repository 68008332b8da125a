//! Random lives of an index: it answers as the naive one does, and replicas that lived differently but
//! applied the same log are the same to the byte.
//!
//! A failure prints the smallest sequence that shows it and the seed that repeats the run.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::random::{BLOCKS, Intent, Speakers, begins_a_prefix, intents, names, request, tight};
use super::reference::Reference;
use super::*;

/// Applies every intent to the reference and answers the commands it came to.
fn log_of(intents: &[Intent]) -> Vec<Command> {
    let mut reference = Reference::new(tight());
    let mut log = Vec::new();
    for intent in intents {
        let command = intent.command(&reference);
        reference.apply(&command);
        log.push(command);
    }
    log
}

/// Keeps the blocks that were announced without a block before them, and that nothing since may have unlisted.
fn note_beginnings(begun: &mut BTreeSet<BlockHash>, command: &Command, applied: &Applied) {
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

fn changes_nothing(applied: &Applied) -> bool {
    match applied {
        Applied::Joined(_) | Applied::Done => false,
        Applied::Ignored | Applied::Refused(_) => true,
        Applied::Announced(outcomes) => {
            outcomes.iter().all(|outcome| !matches!(outcome, AnnounceOutcome::Applied { .. }))
        }
    }
}

fn same_nodes(index: &Index, reference: &Reference) -> Result<(), TestCaseError> {
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

fn same_settings(index: &Index, reference: &Reference) -> Result<(), TestCaseError> {
    prop_assert!(index.pins().eq(reference.pins.values()));
    prop_assert!(index.quotas().eq(reference.quotas.iter().map(|(&key, &value)| (TenantId(key), value))));
    prop_assert!(index.ttls().eq(reference.ttls.iter().map(|(&key, &value)| (GroupId(key), value))));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(384), ..ProptestConfig::default() })]

    /// Every answer, count and lookup is that of the naive index, after every command.
    #[test]
    fn it_answers_as_the_naive_index(intents in intents(Speakers::Honest), request in request()) {
        let mut reference = Reference::new(tight());
        let mut index = Index::new(tight());
        let everything = names(0..BLOCKS);
        for intent in intents {
            let command = intent.command(&reference);
            prop_assert_eq!(index.apply(&command), reference.apply(&command), "{:?}", command);
            index.store.check();
            prop_assert_eq!(index.stats(), reference.stats());
            let expected = reference.longest_prefix(&request);
            let found = index.longest_prefix(&request);
            // One that begins in the middle is answered only if somebody announced its first block that way.
            let may_miss = !begins_a_prefix(request.first()) && found.runs.is_empty();
            prop_assert!(may_miss || found == expected, "{:?} instead of {:?}", found, expected);
            for hash in &everything {
                prop_assert_eq!(index.holders_of(*hash), reference.holders_of(*hash));
            }
            same_nodes(&index, &reference)?;
            same_settings(&index, &reference)?;
        }
    }

    /// Whatever nodes say of the order of blocks, every block is known with exactly its holders; only how
    /// long a prefix is may be misjudged.
    #[test]
    fn liars_do_not_change_who_holds_a_block(intents in intents(Speakers::Liars), request in request()) {
        let mut reference = Reference::new(tight());
        let mut index = Index::new(tight());
        let mut begun = BTreeSet::new();
        for intent in intents {
            let command = intent.command(&reference);
            let applied = index.apply(&command);
            prop_assert_eq!(&applied, &reference.apply(&command), "{:?}", command);
            index.store.check();
            prop_assert_eq!(index.stats(), reference.stats());
            for hash in &names(0..BLOCKS) {
                prop_assert_eq!(index.holders_of(*hash), reference.holders_of(*hash));
            }
            note_beginnings(&mut begun, &command, &applied);
            begun.retain(|hash| !reference.holders_of(*hash).is_empty());
            for hash in &begun {
                let found = index.longest_prefix(&[*hash]).runs;
                prop_assert_eq!(found.first().map(|run| &run.holders), Some(&reference.holders_of(*hash)));
            }
            prop_assert!(index.longest_prefix(&request).union_blocks() as usize <= request.len());
            same_nodes(&index, &reference)?;
        }
    }

    /// A replica that was restored half way and one that was not end in the same bytes, with the same
    /// answers on the way.
    #[test]
    fn equal_logs_give_equal_bytes(
        intents in intents(Speakers::Liars),
        half in any::<prop::sample::Index>(),
        request in request(),
    ) {
        let log = log_of(&intents);
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

    /// Quite another history that ends in the same state has the same digest, though its blocks lie
    /// elsewhere.
    #[test]
    fn equal_states_give_equal_digests(intents in intents(Speakers::Liars)) {
        let mut reference = Reference::new(tight());
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
            prop_assert!(!changes_nothing(&applied), "{command:?}: {applied:?}");
        }
        prop_assert_eq!(other.digest(), index.digest());
    }

    /// Along a life, two moments have equal digests exactly when they have equal states.
    #[test]
    fn digests_and_states_agree(intents in intents(Speakers::Liars)) {
        let mut reference = Reference::new(tight());
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

    /// `Ignored`, a refusal, a duplicate, a gap or a fenced epoch leaves no trace; `Done` does.
    #[test]
    fn only_what_took_effect_leaves_a_trace(intents in intents(Speakers::Liars)) {
        let mut index = Index::new(tight());
        for command in log_of(&intents) {
            let before = index.digest();
            let applied = index.apply(&command);
            let unchanged = index.digest() == before;
            prop_assert_eq!(changes_nothing(&applied), unchanged, "{:?}: {:?}", command, applied);
        }
    }

    /// A log read back from its records leads to the same state.
    #[test]
    fn a_log_survives_its_records(intents in intents(Speakers::Liars)) {
        let mut said = Index::new(tight());
        let mut read = Index::new(tight());
        for command in log_of(&intents) {
            said.apply(&command);
            read.apply(&Command::decode(&command.encode()).unwrap());
        }
        prop_assert_eq!(said.snapshot(), read.snapshot());
    }

    /// What a lookup says of one node is what a lookup with that node alone would say.
    #[test]
    fn per_node_counts_what_one_node_could_serve(intents in intents(Speakers::Honest), request in request()) {
        let mut index = Index::new(tight());
        for command in log_of(&intents) {
            index.apply(&command);
        }
        let found = index.longest_prefix(&request);
        let nodes: Vec<NodeId> = index.nodes().map(|state| state.record.node).collect();
        for node in nodes {
            let holds = |hash: &BlockHash| index.holders_of(*hash).iter().any(|holder| holder.node == node);
            let alone = request.iter().take_while(|hash| holds(hash)).count() as u32;
            let may_miss = !begins_a_prefix(request.first()) && found.runs.is_empty();
            prop_assert!(may_miss || found.per_node(node) == alone);
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
fn random_lives_meet_what_they_should() {
    // A property over sequences that never refuse, never go stale or never fold an epoch proves little.
    use proptest::strategy::{Strategy as _, ValueTree as _};
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut met: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..300 {
        let intents = intents(Speakers::Honest).new_tree(&mut runner).unwrap().current();
        let mut reference = Reference::new(tight());
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
            *met.entry("stale").or_default() += u32::from(index.stale_holds() > 0);
            *met.entry("folded epoch").or_default() += u32::from(reference.floor > 0);
            *met.entry("shared block").or_default() += u32::from(index.stats().copies > index.stats().blocks);
            let (stubs, apart, begun_within) = index.store.odd_octets();
            *met.entry("stub").or_default() += u32::from(stubs > 0);
            *met.entry("page that is no anchor").or_default() += u32::from(apart > 0);
            *met.entry("run from the middle of an octet").or_default() += u32::from(begun_within > 0);
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
        "page that is no anchor",
        "run from the middle of an octet",
    ];
    for kind in kinds {
        assert!(met.get(kind).copied().unwrap_or(0) >= 10, "{kind} in {met:?}");
    }
}
