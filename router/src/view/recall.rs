//! What was decided for the last requests, and what became of them: what `kvfleet why` tells.
//!
//! The requests decided last, as many as a bound says; older ones are forgotten. Not here: the reasons themselves (`kv_core::schedule::missing`).

use std::collections::{BTreeMap, VecDeque};

use kv_core::id::{Category, InstanceId, NodeId, TenantId, Timestamp};
use kv_core::schedule::{Counted, Decision, Missing, Prediction, Reason, Told, Why};

/// Requests remembered: half a minute at a hundred and more a second, in a few megabytes.
const REQUESTS_MAX: usize = 4_096;

/// Of those that are forgotten, how many are known as far as their ends teach: else only short answers would, where many requests come. Some ten megabytes.
const LATE_MAX: usize = 65_536;

/// Requests that were turned away, of those remembered besides.
const REJECTED_MAX: usize = 1_024;

/// What was decided for one request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Decided {
    pub(crate) request: u64,
    pub(crate) tenant: TenantId,
    pub(crate) category: Category,
    /// How far apart its tokens may come; 0 where that does not matter.
    pub(crate) tbt_max_us: u64,
    /// The limit whose keeping its end shows: none that a tenant has chosen for itself, which may be one that nothing can keep; 0 for none.
    pub(crate) taught_us: u64,
    pub(crate) at: Timestamp,
    /// Blocks of its prompt.
    pub(crate) blocks: u32,
    pub(crate) answer: Answer,
    /// Why blocks are missing, by what was known when it was decided, and then by what the instance told.
    pub(crate) missing: Vec<Missing>,
    /// What came of it, once its instance has told.
    pub(crate) outcome: Option<Outcome>,
    /// Whether its first token was seen: each counts once.
    pub(crate) is_timed: bool,
    /// How many tokens it said, and how far apart, as far as anybody told.
    pub(crate) said: Said,
    /// Whether it is over before its answer was: what it said is not what it would have said.
    pub(crate) is_left: bool,
    /// Where it runs, if that is elsewhere than it was sent.
    pub(crate) moved: Option<Where>,
    /// What was counted of it where it runs, until that is taken back.
    pub(crate) counted: Option<Counted>,
}

impl Decided {
    /// Who computes its prompt; nobody where it was turned away.
    pub(crate) fn computes(&self) -> Option<InstanceId> {
        match (self.moved, &self.answer) {
            (Some(moved), _) => Some(moved.instance),
            (None, Answer::Sent(sent)) => Some(sent.to.instance),
            (None, Answer::Rejected(_)) => None,
        }
    }
}

/// Where a request runs, and with what.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Where {
    pub(crate) instance: InstanceId,
    /// Who goes on when the prompt is computed, where that is another one.
    pub(crate) goes_on: Option<InstanceId>,
    pub(crate) resident_blocks: u32,
    pub(crate) fetch_blocks: u32,
    /// What was predicted of it there; of one that runs elsewhere than it was sent, when that was known, and nothing where nothing was.
    pub(crate) predicted: Prediction,
    /// The same by profile and measured links alone.
    pub(crate) parts: Prediction,
}

impl Where {
    /// As it was decided.
    pub(crate) fn of(decision: &Decision) -> Where {
        let Decision { instance, resident_blocks, fetch_blocks, predicted, parts, .. } = *decision;
        let goes_on = decision.handover.map(|handover| handover.instance);
        Where { instance, goes_on, resident_blocks, fetch_blocks, predicted, parts }
    }

    /// Who says its tokens.
    pub(crate) fn decodes(&self) -> InstanceId {
        self.goes_on.unwrap_or(self.instance)
    }
}

/// What was told of a request's tokens when it had ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Said {
    /// How many; 0 where that is not known.
    pub(crate) output_tokens: u32,
    /// Mean time between two of them; 0 where that was not measured.
    pub(crate) tbt_us: u64,
}

/// What was answered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    /// An instance.
    Sent(Sent),
    /// None, and why.
    Rejected(String),
}

/// Where a request was sent, and why there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sent {
    pub(crate) to: Where,
    pub(crate) reasons: Vec<Reason>,
}

impl Decided {
    /// Where it runs, as far as that is known; nowhere if it was turned away.
    fn runs(&self) -> Option<Where> {
        let Answer::Sent(sent) = &self.answer else { return None };
        Some(self.moved.unwrap_or(sent.to))
    }
}

impl Said {
    /// What of a later word is news: how much a request said counts once, and so does how fast. One that was left would have said more.
    fn add(&mut self, said: Said, is_left: bool) -> Option<Said> {
        let is_whole = self.output_tokens == 0 && !is_left;
        let news = Said {
            output_tokens: if is_whole { said.output_tokens } else { 0 },
            tbt_us: if self.tbt_us == 0 { said.tbt_us } else { 0 },
        };
        self.output_tokens += news.output_tokens;
        self.tbt_us += news.tbt_us;
        (news != Said::default()).then_some(news)
    }
}

/// What an outcome adds to what is known of its request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Came {
    /// What was predicted, and by profile and measured links alone, if its first token is news.
    pub(crate) predicted: Option<(Prediction, Prediction)>,
    /// Reasons besides those known before.
    pub(crate) added: Vec<Missing>,
}

/// What the end of a request adds to what is known of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ended {
    pub(crate) category: Category,
    /// What was predicted of it.
    pub(crate) predicted: Prediction,
    /// The same by profile and measured links alone.
    pub(crate) parts: Prediction,
    /// The limit whose keeping this shows; 0 for none.
    pub(crate) taught_us: u64,
    /// Tokens that it said, told now or before; 0 where nobody knows.
    pub(crate) tokens: u32,
    /// What of its tokens was not told before.
    pub(crate) news: Said,
}

/// What is kept of a request that is forgotten and has not ended.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Late {
    decodes: InstanceId,
    category: Category,
    predicted: Prediction,
    parts: Prediction,
    taught_us: u64,
    said: Said,
    is_left: bool,
}

impl Late {
    /// Nothing of one that went nowhere, or has ended.
    fn of(decided: &Decided) -> Option<Late> {
        let runs = decided.runs()?;
        let Decided { category, said, is_left, taught_us, .. } = *decided;
        let Where { predicted, parts, .. } = runs;
        let late = Late { decodes: runs.decodes(), category, predicted, parts, taught_us, said, is_left };
        (said.output_tokens == 0 && !is_left).then_some(late)
    }
}

/// What an instance told of a request that it served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Blocks that came, of those that were to be fetched.
    pub(crate) hit_blocks: u32,
    /// Until its first token; 0 where that was not measured.
    pub(crate) ttft_us: u64,
    /// Whose blocks did not come, from which on, and why.
    pub(crate) misses: Vec<(NodeId, u32, Told)>,
}

/// The requests decided last.
///
/// Trees, as a request comes and another goes all the time: a hash table that this is done to is made anew now and then, all of it at once, and
/// whoever is being routed waits for that.
#[derive(Default)]
pub(crate) struct Recall {
    by_request: BTreeMap<u64, Box<Decided>>,
    order: VecDeque<u64>,
    rejected: VecDeque<u64>,
    late: BTreeMap<u64, Late>,
    late_order: VecDeque<u64>,
}

impl Recall {
    /// Remembers a decision. One more for the same request takes the place of the one before.
    pub(crate) fn decided(&mut self, decided: Decided) {
        let request = decided.request;
        let is_rejected = matches!(decided.answer, Answer::Rejected(_));
        match self.by_request.get_mut(&request) {
            // Numbers are their callers' to give; another tenant's stays.
            Some(known) if known.tenant != decided.tenant => return,
            // Where it stands in line stays as it is, also if it was turned away before.
            Some(known) => {
                **known = decided;
                return;
            }
            None => drop(self.by_request.insert(request, Box::new(decided))),
        }
        // Those that were turned away have places of their own: where many are, those that were served are asked about.
        let (order, most) = match is_rejected {
            true => (&mut self.rejected, REJECTED_MAX),
            false => (&mut self.order, REQUESTS_MAX),
        };
        order.push_back(request);
        if order.len() > most
            && let Some(oldest) = order.pop_front()
            && let Some(late) = self.by_request.remove(&oldest).as_deref().and_then(Late::of)
            && self.late.insert(oldest, late).is_none()
        {
            self.late_order.push_back(oldest);
            if self.late_order.len() > LATE_MAX
                && let Some(oldest) = self.late_order.pop_front()
            {
                self.late.remove(&oldest);
            }
        }
    }

    /// Adds what came of a request. What was predicted for it and the reasons that this adds, once; nothing for one that is not known or has
    /// an outcome already.
    pub(crate) fn came(&mut self, request: u64, instance: InstanceId, outcome: Outcome) -> Option<Came> {
        let known = self.by_request.get_mut(&request).filter(|known| known.outcome.is_none())?;
        let runs = known.runs().filter(|runs| runs.instance == instance)?;
        let promised = runs.resident_blocks.saturating_add(runs.fetch_blocks).min(known.blocks);
        let added = fell_short(&outcome, runs.resident_blocks, promised);
        let is_news = outcome.ttft_us > 0 && !known.is_timed && known.moved.is_none();
        let predicted = is_news.then_some((runs.predicted, runs.parts));
        known.is_timed |= is_news;
        known.missing.splice(0..0, added.iter().copied());
        known.outcome = Some(outcome);
        Some(Came { predicted, added })
    }

    /// The first token of a request came from this instance: what was predicted, and by profile and measured links alone, if that is news. How long it took one that
    /// runs elsewhere than it was sent says nothing of either instance: it was under way to both.
    pub(crate) fn timed(&mut self, request: u64, instance: InstanceId) -> Option<(Prediction, Prediction)> {
        let known = self.by_request.get_mut(&request);
        let known = known.filter(|known| !known.is_timed && known.moved.is_none())?;
        let runs = known.runs().filter(|runs| runs.instance == instance)?;
        known.is_timed = true;
        Some((runs.predicted, runs.parts))
    }

    /// A request ended at this instance: what that adds, if it adds anything. Its instance may tell, and a door that saw its answer pass; how much it said counts once, and so
    /// does how fast, whoever tells it first.
    pub(crate) fn ended(&mut self, request: u64, instance: InstanceId, said: Said) -> Option<Ended> {
        if let Some(known) = self.by_request.get_mut(&request) {
            let runs = known.runs().filter(|runs| runs.decodes() == instance)?;
            let news = known.said.add(said, known.is_left)?;
            return Some(Ended {
                category: known.category,
                predicted: runs.predicted,
                parts: runs.parts,
                taught_us: known.taught_us,
                tokens: known.said.output_tokens,
                news,
            });
        }
        let late = self.late.get_mut(&request).filter(|late| late.decodes == instance)?;
        let news = late.said.add(said, late.is_left)?;
        Some(Ended {
            category: late.category,
            predicted: late.predicted,
            parts: late.parts,
            taught_us: late.taught_us,
            tokens: late.said.output_tokens,
            news,
        })
    }

    /// A request is over before its answer was.
    pub(crate) fn left(&mut self, request: u64) {
        if let Some(known) = self.by_request.get_mut(&request) {
            known.is_left = true;
        } else if let Some(late) = self.late.get_mut(&request) {
            late.is_left = true;
        }
    }

    /// How far apart the tokens of a request may come that was sent to this instance, or goes on there; 0 where that does not matter, or it is not known.
    pub(crate) fn limit_us(&self, request: u64, instance: InstanceId) -> u64 {
        let Some(known) = self.by_request.get(&request) else { return 0 };
        let is_there = |runs: Where| runs.instance == instance || runs.goes_on == Some(instance);
        if known.runs().is_some_and(is_there) { known.tbt_max_us } else { 0 }
    }

    /// Whether it is news that a request runs there, and who goes on. Not of one that is not known, or is over.
    pub(crate) fn is_elsewhere(&self, request: u64, to: (InstanceId, Option<InstanceId>)) -> bool {
        let Some(known) = self.by_request.get(&request) else { return false };
        let is_over = known.outcome.is_some() || known.said.output_tokens > 0 || known.is_left;
        !is_over && known.runs().is_some_and(|runs| (runs.instance, runs.goes_on) != to)
    }

    /// It does not run where it was sent: what was counted of it there, once.
    pub(crate) fn take_counted(&mut self, request: u64) -> Option<Counted> {
        self.by_request.get_mut(&request)?.counted.take()
    }

    /// It runs there, and so much was counted of it.
    pub(crate) fn moved(&mut self, request: u64, moved: Where, counted: Option<Counted>) {
        if let Some(known) = self.by_request.get_mut(&request) {
            (known.moved, known.counted) = (Some(moved), counted);
        }
    }

    /// What is remembered of a request.
    pub(crate) fn of(&self, request: u64) -> Option<&Decided> {
        self.by_request.get(&request).map(Box::as_ref)
    }
}

/// The stretches that were promised and did not come: each source's from its first missing block to the next one's. What lies behind the first that
/// is missing is of no use to the request, whether or not it came.
fn fell_short(outcome: &Outcome, resident_blocks: u32, promised_blocks: u32) -> Vec<Missing> {
    let mut misses: Vec<_> = outcome
        .misses
        .iter()
        .copied()
        .filter(|(_, start, _)| (resident_blocks..promised_blocks).contains(start))
        .collect();
    misses.sort_by_key(|(_, start, _)| *start);
    let ends = misses.iter().skip(1).map(|(_, start, _)| *start).chain([promised_blocks]);
    let stretch = |(&(node, start_blocks, told), end): (&(NodeId, u32, Told), u32)| Missing {
        start_blocks,
        len_blocks: end - start_blocks,
        why: Why::NotFetched { node, told },
    };
    let ends: Vec<u32> = ends.collect();
    misses.iter().zip(ends).map(stretch).filter(|missing| missing.len_blocks > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(request: u64) -> Decided {
        let predicted = Prediction { queue_us: 1, transfer_us: 2, prefill_us: 3, ..Prediction::default() };
        let instance = InstanceId(4);
        let to = Where { instance, resident_blocks: 1, fetch_blocks: 5, predicted, ..Where::default() };
        let sent = Sent { to, reasons: vec![] };
        let missing = vec![Missing { start_blocks: 6, len_blocks: 4, why: Why::NeverSeen }];
        let answer = Answer::Sent(sent);
        let at = Timestamp(1);
        Decided {
            request,
            tenant: TenantId(0),
            category: Category::default(),
            tbt_max_us: 0,
            taught_us: 0,
            at,
            blocks: 10,
            answer,
            missing,
            outcome: None,
            is_timed: false,
            said: Said::default(),
            is_left: false,
            moved: None,
            counted: Some(Counted { instance: InstanceId(4), tokens: 90, ..Counted::default() }),
        }
    }

    fn outcome(misses: Vec<(NodeId, u32, Told)>) -> Outcome {
        Outcome { hit_blocks: 2, ttft_us: 7, misses }
    }

    #[test]
    fn an_outcome_counts_once_and_from_who_was_chosen() {
        let mut recall = Recall::default();
        recall.decided(decided(9));
        let misses =
            vec![(NodeId(2), 5, Told::Busy), (NodeId(1), 3, Told::NotHeld), (NodeId(7), 6, Told::Corrupt)];
        assert_eq!(recall.came(8, InstanceId(4), outcome(misses.clone())), None);
        assert_eq!(recall.came(9, InstanceId(5), outcome(misses.clone())), None, "another instance says so");
        let Came { predicted, added } =
            recall.came(9, InstanceId(4), outcome(misses.clone())).expect("known");
        assert_eq!(predicted.map(|(predicted, _)| predicted.ttft_us()), Some(6));
        assert_eq!(recall.timed(9, InstanceId(4)), None, "it was told");
        let told: Vec<_> =
            added.iter().map(|one| (one.start_blocks, one.len_blocks, one.why.name())).collect();
        assert_eq!(told, [(3, 2, "not_held"), (5, 1, "busy")], "behind what was promised nothing fell short");
        assert_eq!(recall.came(9, InstanceId(4), outcome(misses)), None, "twice");
        assert_eq!(recall.of(9).expect("known").missing.len(), 3);
    }

    #[test]
    fn the_end_of_a_request_counts_once_and_from_who_was_chosen() {
        let mut recall = Recall::default();
        recall.decided(decided(9));
        let said = Said { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(recall.ended(8, InstanceId(4), said), None, "not known");
        assert_eq!(recall.ended(9, InstanceId(5), said), None, "another instance says so");
        assert_eq!(recall.ended(9, InstanceId(4), Said::default()), None, "nothing was said");
        assert!(recall.ended(9, InstanceId(4), said).is_some());
        assert_eq!(recall.ended(9, InstanceId(4), said), None, "twice");
        let mut pair = decided(10);
        let Answer::Sent(sent) = &mut pair.answer else { panic!("it was sent") };
        sent.to.goes_on = Some(InstanceId(6));
        recall.decided(pair);
        assert_eq!(recall.ended(10, InstanceId(4), said), None, "it computed the prompt only");
        assert!(recall.ended(10, InstanceId(6), said).is_some());
    }

    fn at(instance: u32) -> Where {
        let predicted = Prediction { tbt_us: 70, ..Prediction::default() };
        let instance = InstanceId(instance);
        Where { instance, resident_blocks: 3, predicted, parts: predicted, ..Where::default() }
    }

    #[test]
    fn a_request_that_runs_elsewhere_is_told_of_by_who_runs_it() {
        let mut recall = Recall::default();
        recall.decided(decided(9));
        let (from, to) = (InstanceId(4), InstanceId(5));
        assert!(!recall.is_elsewhere(9, (from, None)), "it is there");
        assert!(!recall.is_elsewhere(8, (to, None)), "not known");
        assert!(recall.is_elsewhere(9, (to, None)) && recall.is_elsewhere(9, (from, Some(to))));
        recall.moved(9, at(5), None);
        assert!(!recall.is_elsewhere(9, (to, None)), "it is there by now");
        assert_eq!(
            [4, 5].map(|nth| recall.timed(9, InstanceId(nth))),
            [None, None],
            "it was under way to both"
        );
        let said = Said { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(recall.ended(9, from, said), None);
        let ended = recall.ended(9, to, said).expect("who runs it says so");
        assert_eq!((ended.predicted.tbt_us, ended.news), (70, said), "by what was predicted of that one");
        assert_eq!(recall.came(9, from, outcome(vec![])), None);
        let came = recall.came(9, to, outcome(vec![])).expect("it ran there");
        assert_eq!(came.predicted, None, "its first token teaches nothing");
        assert!(!recall.is_elsewhere(9, (from, None)), "it is over");
        let known = recall.of(9).expect("known");
        let Answer::Sent(sent) = &known.answer else { panic!("it was sent") };
        assert_eq!((sent.to.instance, known.moved.map(|moved| moved.decodes())), (from, Some(to)));
    }

    #[test]
    fn what_is_forgotten_ends_where_it_runs_and_limits_go_with_it() {
        let mut recall = Recall::default();
        recall.decided(Decided { tbt_max_us: 6_000, ..decided(1) });
        recall.moved(1, Where { goes_on: Some(InstanceId(7)), ..at(5) }, None);
        assert_eq!([4, 5, 7].map(|nth| recall.limit_us(1, InstanceId(nth))), [0, 6_000, 6_000]);
        (0..REQUESTS_MAX as u64).for_each(|request| recall.decided(decided(100 + request)));
        assert!(recall.of(1).is_none());
        let said = Said { output_tokens: 40, tbt_us: 9_000 };
        assert_eq!(
            [4, 5, 7].map(|nth| recall.ended(1, InstanceId(nth), said).is_some()),
            [false, false, true]
        );
    }

    #[test]
    fn what_was_counted_is_taken_back_once() {
        let mut recall = Recall::default();
        recall.decided(decided(9));
        assert_eq!([8, 9, 9].map(|request| recall.take_counted(request).is_some()), [false, true, false]);
        recall.moved(9, at(5), Some(Counted { tokens: 70, ..Counted::default() }));
        assert_eq!(recall.take_counted(9).map(|counted| counted.tokens), Some(70));
    }

    #[test]
    fn of_two_that_tell_how_a_request_ended_the_first_counts_for_each_number() {
        let told = |words: &[(u32, u64)]| {
            let mut recall = Recall::default();
            recall.decided(decided(9));
            let tell = |&(output_tokens, tbt_us): &(u32, u64)| {
                let ended = recall.ended(9, InstanceId(4), Said { output_tokens, tbt_us });
                ended.map_or((0, 0), |ended| (ended.news.output_tokens, ended.news.tbt_us))
            };
            words.iter().map(tell).collect::<Vec<_>>()
        };
        assert_eq!(told(&[(40, 9_000), (41, 9_100)]), [(40, 9_000), (0, 0)]);
        assert_eq!(told(&[(40, 0), (41, 9_100), (7, 1)]), [(40, 0), (0, 9_100), (0, 0)], "one saw no pieces");
        assert_eq!(told(&[(0, 9_000), (41, 9_100)]), [(0, 9_000), (41, 0)]);
        assert_eq!(told(&[(u32::MAX, u64::MAX), (u32::MAX, u64::MAX)])[1], (0, 0));
    }

    #[test]
    fn of_a_request_that_was_left_nobody_tells_how_much_it_would_have_said() {
        let mut recall = Recall::default();
        recall.left(9);
        recall.decided(decided(9));
        recall.left(9);
        let said = Said { output_tokens: 3, tbt_us: 9_000 };
        let ended = recall.ended(9, InstanceId(4), said).expect("how fast it was");
        assert_eq!(ended.news, Said { output_tokens: 0, ..said });
        assert_eq!(recall.ended(9, InstanceId(4), said), None);
        // What was told before stays told, and a decision after it is another request's.
        recall.decided(decided(9));
        assert!(recall.ended(9, InstanceId(4), said).is_some_and(|ended| ended.news == said));
        recall.left(9);
        assert_eq!(recall.of(9).expect("known").said, said);
    }

    #[test]
    fn long_answers_teach_also_where_their_requests_are_forgotten() {
        let mut recall = Recall::default();
        let all = (REQUESTS_MAX + LATE_MAX) as u64;
        (0..all + 3).for_each(|request| recall.decided(decided(request)));
        assert_eq!((recall.by_request.len(), recall.late.len()), (REQUESTS_MAX, LATE_MAX));
        let said = Said { output_tokens: 3_000, tbt_us: 9_000 };
        let mut ended = |request, instance| recall.ended(request, InstanceId(instance), said).is_some();
        assert!(!ended(2, 4) && !ended(3, 5), "one is forgotten, one was elsewhere");
        assert!(ended(3, 4) && !ended(3, 4) && ended(all, 4), "once");
        assert!(recall.of(3).is_none(), "there is no story of it any more");
        // One that was left teaches how fast alone.
        recall.left(5);
        assert_eq!(recall.ended(5, InstanceId(4), said).map(|ended| ended.news.output_tokens), Some(0));
    }

    #[test]
    fn a_limit_is_told_to_whom_its_request_was_sent() {
        let mut recall = Recall::default();
        let mut pair = Decided { tbt_max_us: 9_000, taught_us: 9_500, ..decided(9) };
        recall.decided(Decided { tbt_max_us: 7_000, taught_us: 7_500, ..decided(8) });
        let Answer::Sent(sent) = &mut pair.answer else { panic!("it was sent") };
        sent.to.goes_on = Some(InstanceId(6));
        recall.decided(pair);
        let rejected = Answer::Rejected(String::new());
        recall.decided(Decided { tbt_max_us: 5_000, answer: rejected, ..decided(7) });
        let asks = |request| [4, 5, 6].map(|instance| recall.limit_us(request, InstanceId(instance)));
        assert_eq!([7, 8, 9, 10].map(asks), [[0; 3], [7_000, 0, 0], [9_000, 0, 9_000], [0; 3]]);
        let said = Said { output_tokens: 3, tbt_us: 8_000 };
        let taught = |ended: Option<Ended>| ended.map(|ended| (ended.taught_us, ended.tokens));
        assert_eq!(taught(recall.ended(9, InstanceId(6), said)), Some((9_500, 3)));
        // Who tells how fast need not be who tells how much.
        let [much, fast] = [(5, 0), (0, 8_000)].map(|(output_tokens, tbt_us)| Said { output_tokens, tbt_us });
        assert_eq!(taught(recall.ended(8, InstanceId(4), much)), Some((7_500, 5)));
        assert_eq!(taught(recall.ended(8, InstanceId(4), fast)), Some((7_500, 5)));
        // It is remembered of one of which nothing else is.
        recall.decided(Decided { taught_us: 6_500, ..decided(10) });
        (0..REQUESTS_MAX as u64).for_each(|request| recall.decided(decided(100 + request)));
        assert_eq!(taught(recall.ended(10, InstanceId(4), said)), Some((6_500, 3)));
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let mut recall = Recall::default();
        for request in 0..REQUESTS_MAX as u64 + 10 {
            recall.decided(decided(request));
            recall.decided(decided(request));
        }
        assert_eq!((recall.by_request.len(), recall.order.len()), (REQUESTS_MAX, REQUESTS_MAX));
        assert!(recall.of(9).is_none() && recall.of(10).is_some());
    }
}
