//! The decision log: recent decisions and their outcomes, as `kvfleet why` shows them.
//!
//! It keeps a bounded number of the latest requests. Not here: the reasons themselves
//! (`kv_core::schedule::missing`).

use std::collections::{BTreeMap, VecDeque};

use kv_core::id::{Category, InstanceId, NodeId, TenantId, Timestamp};
use kv_core::schedule::{Decision, FetchFailure, MissReason, MissingRun, Prediction, Reason, RouteRecord};

/// Records kept: half a minute at over a hundred requests a second, in a few megabytes.
const REQUESTS_MAX: usize = 4_096;

/// Trimmed records kept for learning after the full record is dropped. Without them, only short
/// answers would teach at high request rates. About ten megabytes.
const TRIMMED_MAX: usize = 65_536;

/// Rejected requests kept, in addition.
const REJECTED_MAX: usize = 1_024;

/// Record of one request's decision.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DecisionRecord {
    pub(crate) request: u64,
    pub(crate) tenant: TenantId,
    pub(crate) category: Category,
    /// Limit on the mean time between tokens, microseconds; 0 for none.
    pub(crate) tbt_max_us: u64,
    /// The limit that its end teaches about; 0 for none. A tenant's own limit is left out, since it
    /// may be impossible to meet.
    pub(crate) learned_limit_us: u64,
    pub(crate) at: Timestamp,
    /// Number of blocks of its prompt.
    pub(crate) blocks: u32,
    pub(crate) answer: RouteAnswer,
    /// Reasons of missing blocks: first as known at the decision, then as the instance reported.
    pub(crate) missing: Vec<MissingRun>,
    /// Outcome, once its instance has reported.
    pub(crate) outcome: Option<ServedOutcome>,
    /// Whether its first token was recorded; it counts once.
    pub(crate) has_first_token: bool,
    /// Output length and time between tokens, as far as reported.
    pub(crate) answer_stats: AnswerStats,
    /// Whether it ended before its answer did, so that its output length is not representative.
    pub(crate) is_aborted: bool,
    /// Whether a frontend asked for the decision.
    pub(crate) is_frontends: bool,
    /// Actual placement, if it runs elsewhere than it was sent.
    pub(crate) moved_to: Option<Placement>,
    /// Load counted on its current instance, until taken back.
    pub(crate) counted: Option<RouteRecord>,
}

impl DecisionRecord {
    /// The instance that computes its prompt; `None` if it was rejected.
    pub(crate) fn prefill_instance(&self) -> Option<InstanceId> {
        match (self.moved_to, &self.answer) {
            (Some(moved), _) => Some(moved.instance),
            (None, RouteAnswer::Sent(sent)) => Some(sent.placement.instance),
            (None, RouteAnswer::Rejected(_)) => None,
        }
    }
}

/// Placement of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Placement {
    pub(crate) instance: InstanceId,
    /// The instance that decodes, if another one.
    pub(crate) decode_instance: Option<InstanceId>,
    pub(crate) resident_blocks: u32,
    pub(crate) fetch_blocks: u32,
    /// Prediction for this placement; of a moved request as of the move, and empty if unknown.
    pub(crate) predicted: Prediction,
    /// Prediction from the profile and measured links alone, without learned corrections.
    pub(crate) uncorrected: Prediction,
}

impl Placement {
    /// The placement of the decision.
    pub(crate) fn from_decision(decision: &Decision) -> Placement {
        let Decision { instance, resident_blocks, fetch_blocks, predicted, uncorrected, .. } = *decision;
        let decode_instance = decision.handover.map(|handover| handover.instance);
        Placement { instance, decode_instance, resident_blocks, fetch_blocks, predicted, uncorrected }
    }

    /// The instance that decodes.
    pub(crate) fn decoding_instance(&self) -> InstanceId {
        self.decode_instance.unwrap_or(self.instance)
    }
}

/// Statistics of a finished answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerStats {
    /// Number of output tokens; 0 if unknown.
    pub(crate) output_tokens: u32,
    /// Mean time between two tokens, microseconds; 0 if not measured.
    pub(crate) tbt_us: u64,
}

/// Answer to the route call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RouteAnswer {
    /// Sent to an instance.
    Sent(SentRequest),
    /// Rejected, with the reason.
    Rejected(String),
}

/// Placement of a sent request, and the reasons for it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SentRequest {
    pub(crate) placement: Placement,
    pub(crate) reasons: Vec<Reason>,
}

impl DecisionRecord {
    /// Current placement; `None` if it was rejected.
    fn current_placement(&self) -> Option<Placement> {
        let RouteAnswer::Sent(sent) = &self.answer else { return None };
        Some(self.moved_to.unwrap_or(sent.placement))
    }
}

impl AnswerStats {
    /// Adds a report and returns its new part: each statistic counts once, and an aborted request's
    /// output length never.
    fn add_new(&mut self, said: AnswerStats, is_left: bool) -> Option<AnswerStats> {
        let is_whole = self.output_tokens == 0 && !is_left;
        let new_stats = AnswerStats {
            output_tokens: if is_whole { said.output_tokens } else { 0 },
            tbt_us: if self.tbt_us == 0 { said.tbt_us } else { 0 },
        };
        self.output_tokens += new_stats.output_tokens;
        self.tbt_us += new_stats.tbt_us;
        (new_stats != AnswerStats::default()).then_some(new_stats)
    }
}

/// New knowledge from an outcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OutcomeUpdate {
    /// Corrected and uncorrected predictions, if the first token is new.
    pub(crate) predicted: Option<(Prediction, Prediction)>,
    /// Additional reasons of missing blocks.
    pub(crate) added: Vec<MissingRun>,
}

/// New knowledge from the end of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EndUpdate {
    pub(crate) category: Category,
    /// Its prediction.
    pub(crate) predicted: Prediction,
    /// Prediction without learned corrections.
    pub(crate) uncorrected: Prediction,
    /// The limit that this teaches about; 0 for none.
    pub(crate) learned_limit_us: u64,
    /// Output tokens, from this or an earlier report; 0 if unknown.
    pub(crate) tokens: u32,
    /// Statistics that were not reported before.
    pub(crate) new_stats: AnswerStats,
}

/// Rest of a dropped record that has not ended.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TrimmedRecord {
    decode_instance: InstanceId,
    category: Category,
    predicted: Prediction,
    uncorrected: Prediction,
    learned_limit_us: u64,
    answer_stats: AnswerStats,
    is_aborted: bool,
}

impl TrimmedRecord {
    /// `None` for a rejected or ended request.
    fn from_record(decided: &DecisionRecord) -> Option<TrimmedRecord> {
        let runs = decided.current_placement()?;
        let DecisionRecord {
            category,
            answer_stats: said,
            is_aborted: is_left,
            learned_limit_us: taught_us,
            ..
        } = *decided;
        let Placement { predicted, uncorrected: parts, .. } = runs;
        let late = TrimmedRecord {
            decode_instance: runs.decoding_instance(),
            category,
            predicted,
            uncorrected: parts,
            learned_limit_us: taught_us,
            answer_stats: said,
            is_aborted: is_left,
        };
        (said.output_tokens == 0 && !is_left).then_some(late)
    }
}

/// Outcome of a request, as its instance reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServedOutcome {
    /// Fetched blocks that arrived.
    pub(crate) hit_blocks: u32,
    /// Time to first token, microseconds; 0 if not measured.
    pub(crate) ttft_us: u64,
    /// Failed fetches: node, first missing block, and reason.
    pub(crate) misses: Vec<(NodeId, u32, FetchFailure)>,
}

/// Records of the latest requests.
///
/// Trees, because entries come and go constantly: a hash table would rehash as a whole now and then
/// while routing waits.
#[derive(Default)]
pub(crate) struct DecisionLog {
    by_request: BTreeMap<u64, Box<DecisionRecord>>,
    order: VecDeque<u64>,
    rejected: VecDeque<u64>,
    trimmed: BTreeMap<u64, TrimmedRecord>,
    trimmed_order: VecDeque<u64>,
}

impl DecisionLog {
    /// Adds a record, or replaces the record of the same request.
    pub(crate) fn insert(&mut self, decided: DecisionRecord) {
        let request = decided.request;
        let is_rejected = matches!(decided.answer, RouteAnswer::Rejected(_));
        match self.by_request.get_mut(&request) {
            // Callers choose request numbers; a number in use by another tenant is kept.
            Some(known) if known.tenant != decided.tenant => return,
            // It keeps its place in the order, also if it was rejected before.
            Some(known) => {
                **known = decided;
                return;
            }
            None => drop(self.by_request.insert(request, Box::new(decided))),
        }
        // Rejected requests have a limit of their own, so that many rejections do not displace
        // served requests.
        let (order, most) = match is_rejected {
            true => (&mut self.rejected, REJECTED_MAX),
            false => (&mut self.order, REQUESTS_MAX),
        };
        order.push_back(request);
        if order.len() > most
            && let Some(oldest) = order.pop_front()
            && let Some(late) =
                self.by_request.remove(&oldest).as_deref().and_then(TrimmedRecord::from_record)
            && self.trimmed.insert(oldest, late).is_none()
        {
            self.trimmed_order.push_back(oldest);
            if self.trimmed_order.len() > TRIMMED_MAX
                && let Some(oldest) = self.trimmed_order.pop_front()
            {
                self.trimmed.remove(&oldest);
            }
        }
    }

    /// Records an outcome. Returns the new knowledge; `None` if the request is unknown, on another
    /// instance, or already has an outcome.
    pub(crate) fn record_outcome(
        &mut self,
        request: u64,
        instance: InstanceId,
        outcome: ServedOutcome,
    ) -> Option<OutcomeUpdate> {
        let known = self.by_request.get_mut(&request).filter(|known| known.outcome.is_none())?;
        let runs = known.current_placement().filter(|runs| runs.instance == instance)?;
        let promised = runs.resident_blocks.saturating_add(runs.fetch_blocks).min(known.blocks);
        let added = missing_promised(&outcome, runs.resident_blocks, promised);
        let is_news = outcome.ttft_us > 0 && !known.has_first_token && known.moved_to.is_none();
        let predicted = is_news.then_some((runs.predicted, runs.uncorrected));
        known.has_first_token |= is_news;
        known.missing.splice(0..0, added.iter().copied());
        known.outcome = Some(outcome);
        Some(OutcomeUpdate { predicted, added })
    }

    /// Records a first token from this instance. Returns the corrected and uncorrected predictions
    /// if it is new. A moved request returns `None`: its time spans two instances.
    pub(crate) fn record_first_token(
        &mut self,
        request: u64,
        instance: InstanceId,
    ) -> Option<(Prediction, Prediction)> {
        let known = self.by_request.get_mut(&request);
        let known = known.filter(|known| !known.has_first_token && known.moved_to.is_none())?;
        let runs = known.current_placement().filter(|runs| runs.instance == instance)?;
        known.has_first_token = true;
        Some((runs.predicted, runs.uncorrected))
    }

    /// Records a request's end at this instance and returns the new knowledge, if any. Both the
    /// instance and the gateway may report; the first report of each statistic counts.
    pub(crate) fn record_end(
        &mut self,
        request: u64,
        instance: InstanceId,
        said: AnswerStats,
    ) -> Option<EndUpdate> {
        if let Some(known) = self.by_request.get_mut(&request) {
            let runs = known.current_placement().filter(|runs| runs.decoding_instance() == instance)?;
            let new_stats = known.answer_stats.add_new(said, known.is_aborted)?;
            return Some(EndUpdate {
                category: known.category,
                predicted: runs.predicted,
                uncorrected: runs.uncorrected,
                learned_limit_us: known.learned_limit_us,
                tokens: known.answer_stats.output_tokens,
                new_stats,
            });
        }
        let late = self.trimmed.get_mut(&request).filter(|late| late.decode_instance == instance)?;
        let new_stats = late.answer_stats.add_new(said, late.is_aborted)?;
        Some(EndUpdate {
            category: late.category,
            predicted: late.predicted,
            uncorrected: late.uncorrected,
            learned_limit_us: late.learned_limit_us,
            tokens: late.answer_stats.output_tokens,
            new_stats,
        })
    }

    /// Marks a request that ended before its answer did.
    pub(crate) fn record_abort(&mut self, request: u64) {
        if let Some(known) = self.by_request.get_mut(&request) {
            known.is_aborted = true;
        } else if let Some(late) = self.trimmed.get_mut(&request) {
            late.is_aborted = true;
        }
    }

    /// Limit on the time between tokens of a request placed on this instance; 0 for none or if
    /// unknown.
    pub(crate) fn tbt_limit_us(&self, request: u64, instance: InstanceId) -> u64 {
        let Some(known) = self.by_request.get(&request) else { return 0 };
        let is_there = |runs: Placement| runs.instance == instance || runs.decode_instance == Some(instance);
        if known.current_placement().is_some_and(is_there) { known.tbt_max_us } else { 0 }
    }

    /// Whether this placement differs from the known one. False for an unknown or ended request.
    pub(crate) fn is_move(
        &self,
        request: u64,
        instance: InstanceId,
        decode_instance: Option<InstanceId>,
    ) -> bool {
        let Some(known) = self.by_request.get(&request) else { return false };
        let is_over = known.outcome.is_some() || known.answer_stats.output_tokens > 0 || known.is_aborted;
        let differs = |runs: Placement| runs.instance != instance || runs.decode_instance != decode_instance;
        !is_over && known.current_placement().is_some_and(differs)
    }

    /// Takes the load that was counted for a request, once.
    pub(crate) fn take_counted(&mut self, request: u64) -> Option<RouteRecord> {
        self.by_request.get_mut(&request)?.counted.take()
    }

    /// Records a moved request's placement and counted load.
    pub(crate) fn record_move(&mut self, request: u64, moved: Placement, counted: Option<RouteRecord>) {
        if let Some(known) = self.by_request.get_mut(&request) {
            (known.moved_to, known.counted) = (Some(moved), counted);
        }
    }

    /// The record of a request.
    pub(crate) fn get(&self, request: u64) -> Option<&DecisionRecord> {
        self.by_request.get(&request).map(Box::as_ref)
    }
}

/// Promised blocks that did not arrive: each failed fetch covers the range up to the next one.
/// Blocks after the first missing one are useless to the request, whether or not they arrived.
fn missing_promised(outcome: &ServedOutcome, resident_blocks: u32, promised_blocks: u32) -> Vec<MissingRun> {
    let mut misses: Vec<_> = outcome
        .misses
        .iter()
        .copied()
        .filter(|(_, start, _)| (resident_blocks..promised_blocks).contains(start))
        .collect();
    misses.sort_by_key(|(_, start, _)| *start);
    let ends = misses.iter().skip(1).map(|(_, start, _)| *start).chain([promised_blocks]);
    let stretch = |(&(node, start_blocks, told), end): (&(NodeId, u32, FetchFailure), u32)| MissingRun {
        start_blocks,
        len_blocks: end - start_blocks,
        reason: MissReason::NotFetched { node, failure: told },
    };
    let ends: Vec<u32> = ends.collect();
    misses.iter().zip(ends).map(stretch).filter(|missing| missing.len_blocks > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(request: u64) -> DecisionRecord {
        let predicted = Prediction { queue_us: 1, transfer_us: 2, prefill_us: 3, ..Prediction::default() };
        let instance = InstanceId(4);
        let to =
            Placement { instance, resident_blocks: 1, fetch_blocks: 5, predicted, ..Placement::default() };
        let sent = SentRequest { placement: to, reasons: vec![] };
        let missing = vec![MissingRun { start_blocks: 6, len_blocks: 4, reason: MissReason::NeverSeen }];
        let answer = RouteAnswer::Sent(sent);
        let at = Timestamp(1);
        DecisionRecord {
            request,
            tenant: TenantId(0),
            category: Category::default(),
            tbt_max_us: 0,
            learned_limit_us: 0,
            at,
            blocks: 10,
            answer,
            missing,
            outcome: None,
            has_first_token: false,
            answer_stats: AnswerStats::default(),
            is_aborted: false,
            is_frontends: false,
            moved_to: None,
            counted: Some(RouteRecord { instance: InstanceId(4), tokens: 90, ..RouteRecord::default() }),
        }
    }

    fn outcome(misses: Vec<(NodeId, u32, FetchFailure)>) -> ServedOutcome {
        ServedOutcome { hit_blocks: 2, ttft_us: 7, misses }
    }

    #[test]
    fn an_outcome_counts_once_and_only_from_the_chosen_instance() {
        let mut log = DecisionLog::default();
        log.insert(record(9));
        let misses = vec![
            (NodeId(2), 5, FetchFailure::Busy),
            (NodeId(1), 3, FetchFailure::NotHeld),
            (NodeId(7), 6, FetchFailure::Corrupt),
        ];
        assert_eq!(log.record_outcome(8, InstanceId(4), outcome(misses.clone())), None);
        assert_eq!(
            log.record_outcome(9, InstanceId(5), outcome(misses.clone())),
            None,
            "another instance reports"
        );
        let OutcomeUpdate { predicted, added } =
            log.record_outcome(9, InstanceId(4), outcome(misses.clone())).expect("known");
        assert_eq!(predicted.map(|(predicted, _)| predicted.ttft_us()), Some(6));
        assert_eq!(log.record_first_token(9, InstanceId(4)), None, "already reported");
        let told: Vec<_> =
            added.iter().map(|one| (one.start_blocks, one.len_blocks, one.reason.name())).collect();
        assert_eq!(
            told,
            [(3, 2, "not_held"), (5, 1, "busy")],
            "blocks beyond the promised ones do not count"
        );
        assert_eq!(log.record_outcome(9, InstanceId(4), outcome(misses)), None, "twice");
        assert_eq!(log.get(9).expect("known").missing.len(), 3);
    }

    #[test]
    fn an_end_counts_once_and_only_from_the_decoding_instance() {
        let mut log = DecisionLog::default();
        log.insert(record(9));
        let said = AnswerStats { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(log.record_end(8, InstanceId(4), said), None, "not known");
        assert_eq!(log.record_end(9, InstanceId(5), said), None, "another instance reports");
        assert_eq!(log.record_end(9, InstanceId(4), AnswerStats::default()), None, "an empty report");
        assert!(log.record_end(9, InstanceId(4), said).is_some());
        assert_eq!(log.record_end(9, InstanceId(4), said), None, "twice");
        let mut pair = record(10);
        let RouteAnswer::Sent(sent) = &mut pair.answer else { panic!("it was sent") };
        sent.placement.decode_instance = Some(InstanceId(6));
        log.insert(pair);
        assert_eq!(log.record_end(10, InstanceId(4), said), None, "it only computed the prompt");
        assert!(log.record_end(10, InstanceId(6), said).is_some());
    }

    fn at(instance: u32) -> Placement {
        let predicted = Prediction { tbt_us: 70, ..Prediction::default() };
        let instance = InstanceId(instance);
        Placement { instance, resident_blocks: 3, predicted, uncorrected: predicted, ..Placement::default() }
    }

    #[test]
    fn a_moved_request_is_reported_by_its_new_instance() {
        let mut log = DecisionLog::default();
        log.insert(record(9));
        let (from, to) = (InstanceId(4), InstanceId(5));
        assert!(!log.is_move(9, from, None), "already there");
        assert!(!log.is_move(8, to, None), "unknown");
        assert!(log.is_move(9, to, None) && log.is_move(9, from, Some(to)));
        log.record_move(9, at(5), None);
        assert!(!log.is_move(9, to, None), "already there");
        assert_eq!(
            [4, 5].map(|nth| log.record_first_token(9, InstanceId(nth))),
            [None, None],
            "its time spans both instances"
        );
        let said = AnswerStats { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(log.record_end(9, from, said), None);
        let ended = log.record_end(9, to, said).expect("reported by its current instance");
        assert_eq!((ended.predicted.tbt_us, ended.new_stats), (70, said), "from that instance's prediction");
        assert_eq!(log.record_outcome(9, from, outcome(vec![])), None);
        let update = log.record_outcome(9, to, outcome(vec![])).expect("it ran there");
        assert_eq!(update.predicted, None, "its first token teaches no correction");
        assert!(!log.is_move(9, from, None), "already ended");
        let known = log.get(9).expect("known");
        let RouteAnswer::Sent(sent) = &known.answer else { panic!("it was sent") };
        assert_eq!(
            (sent.placement.instance, known.moved_to.map(|moved| moved.decoding_instance())),
            (from, Some(to))
        );
    }

    #[test]
    fn a_trimmed_record_keeps_its_placement() {
        let mut log = DecisionLog::default();
        log.insert(DecisionRecord { tbt_max_us: 6_000, ..record(1) });
        log.record_move(1, Placement { decode_instance: Some(InstanceId(7)), ..at(5) }, None);
        assert_eq!([4, 5, 7].map(|nth| log.tbt_limit_us(1, InstanceId(nth))), [0, 6_000, 6_000]);
        (0..REQUESTS_MAX as u64).for_each(|request| log.insert(record(100 + request)));
        assert!(log.get(1).is_none());
        let said = AnswerStats { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(
            [4, 5, 7].map(|nth| log.record_end(1, InstanceId(nth), said).is_some()),
            [false, false, true]
        );
    }

    #[test]
    fn counted_load_is_taken_once() {
        let mut log = DecisionLog::default();
        log.insert(record(9));
        assert_eq!([8, 9, 9].map(|request| log.take_counted(request).is_some()), [false, true, false]);
        log.record_move(9, at(5), Some(RouteRecord { tokens: 70, ..RouteRecord::default() }));
        assert_eq!(log.take_counted(9).map(|counted| counted.tokens), Some(70));
    }

    #[test]
    fn the_first_report_of_each_statistic_counts() {
        let told = |words: &[(u32, u64)]| {
            let mut log = DecisionLog::default();
            log.insert(record(9));
            let tell = |&(output_tokens, tbt_us): &(u32, u64)| {
                let ended = log.record_end(9, InstanceId(4), AnswerStats { output_tokens, tbt_us });
                ended.map_or((0, 0), |ended| (ended.new_stats.output_tokens, ended.new_stats.tbt_us))
            };
            words.iter().map(tell).collect::<Vec<_>>()
        };
        assert_eq!(told(&[(40, 9_000), (41, 9_100)]), [(40, 9_000), (0, 0)]);
        assert_eq!(
            told(&[(40, 0), (41, 9_100), (7, 1)]),
            [(40, 0), (0, 9_100), (0, 0)],
            "one saw no separate tokens"
        );
        assert_eq!(told(&[(0, 9_000), (41, 9_100)]), [(0, 9_000), (41, 0)]);
        assert_eq!(told(&[(u32::MAX, u64::MAX), (u32::MAX, u64::MAX)])[1], (0, 0));
    }

    #[test]
    fn an_aborted_request_teaches_no_output_length() {
        let mut log = DecisionLog::default();
        log.record_abort(9);
        log.insert(record(9));
        log.record_abort(9);
        let said = AnswerStats { output_tokens: 3, tbt_us: 9_000 };
        let ended = log.record_end(9, InstanceId(4), said).expect("the time between tokens");
        assert_eq!(ended.new_stats, AnswerStats { output_tokens: 0, ..said });
        assert_eq!(log.record_end(9, InstanceId(4), said), None);
        // Earlier reports stay, and a later decision is another request.
        log.insert(record(9));
        assert!(log.record_end(9, InstanceId(4), said).is_some_and(|ended| ended.new_stats == said));
        log.record_abort(9);
        assert_eq!(log.get(9).expect("known").answer_stats, said);
    }

    #[test]
    fn trimmed_records_still_learn_from_long_answers() {
        let mut log = DecisionLog::default();
        let all = (REQUESTS_MAX + TRIMMED_MAX) as u64;
        (0..all + 3).for_each(|request| log.insert(record(request)));
        assert_eq!((log.by_request.len(), log.trimmed.len()), (REQUESTS_MAX, TRIMMED_MAX));
        let said = AnswerStats { output_tokens: 3_000, tbt_us: 9_000 };
        let mut ended = |request, instance| log.record_end(request, InstanceId(instance), said).is_some();
        assert!(!ended(2, 4) && !ended(3, 5), "one is forgotten, one ran elsewhere");
        assert!(ended(3, 4) && !ended(3, 4) && ended(all, 4), "once");
        assert!(log.get(3).is_none(), "its full record is gone");
        // An aborted request teaches only the time between tokens.
        log.record_abort(5);
        assert_eq!(
            log.record_end(5, InstanceId(4), said).map(|ended| ended.new_stats.output_tokens),
            Some(0)
        );
    }

    #[test]
    fn a_tbt_limit_is_known_for_the_decisions_instances() {
        let mut log = DecisionLog::default();
        let mut pair = DecisionRecord { tbt_max_us: 9_000, learned_limit_us: 9_500, ..record(9) };
        log.insert(DecisionRecord { tbt_max_us: 7_000, learned_limit_us: 7_500, ..record(8) });
        let RouteAnswer::Sent(sent) = &mut pair.answer else { panic!("it was sent") };
        sent.placement.decode_instance = Some(InstanceId(6));
        log.insert(pair);
        let rejected = RouteAnswer::Rejected(String::new());
        log.insert(DecisionRecord { tbt_max_us: 5_000, answer: rejected, ..record(7) });
        let asks = |request| [4, 5, 6].map(|instance| log.tbt_limit_us(request, InstanceId(instance)));
        assert_eq!([7, 8, 9, 10].map(asks), [[0; 3], [7_000, 0, 0], [9_000, 0, 9_000], [0; 3]]);
        let said = AnswerStats { output_tokens: 3, tbt_us: 8_000 };
        let taught = |ended: Option<EndUpdate>| ended.map(|ended| (ended.learned_limit_us, ended.tokens));
        assert_eq!(taught(log.record_end(9, InstanceId(6), said)), Some((9_500, 3)));
        // The two statistics may come from different reporters.
        let [much, fast] =
            [(5, 0), (0, 8_000)].map(|(output_tokens, tbt_us)| AnswerStats { output_tokens, tbt_us });
        assert_eq!(taught(log.record_end(8, InstanceId(4), much)), Some((7_500, 5)));
        assert_eq!(taught(log.record_end(8, InstanceId(4), fast)), Some((7_500, 5)));
        // A trimmed record keeps its limit.
        log.insert(DecisionRecord { learned_limit_us: 6_500, ..record(10) });
        (0..REQUESTS_MAX as u64).for_each(|request| log.insert(record(100 + request)));
        assert_eq!(taught(log.record_end(10, InstanceId(4), said)), Some((6_500, 3)));
    }

    #[test]
    fn the_oldest_records_are_forgotten() {
        let mut log = DecisionLog::default();
        for request in 0..REQUESTS_MAX as u64 + 10 {
            log.insert(record(request));
            log.insert(record(request));
        }
        assert_eq!((log.by_request.len(), log.order.len()), (REQUESTS_MAX, REQUESTS_MAX));
        assert!(log.get(9).is_none() && log.get(10).is_some());
    }
}
