//! The ends alone, against models that are too simple to be wrong.
//!
//! Not here: both ends together (`search`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::*;
use crate::id::{LeaseId, LoanId, Timestamp};
use proptest::prelude::*;

const LEASE_US: u64 = 9000;
const LIMITS: LendLimits =
    LendLimits { lent_bytes_max: 100, loans_max: 4, leases_max: 3, lease: Duration::from_micros(LEASE_US) };

#[derive(Clone, Debug)]
enum Step {
    /// Whether it comes as far as the book.
    Begin(u64, bool),
    Lend(u64, u64),
    Copy(u64),
    Finish(u64),
    TakeBack(Vec<usize>, bool),
    Release(u64),
    Wait(u64),
    Close,
    End,
}

fn step() -> impl Strategy<Value = Step> {
    let lease = 0u64..4;
    prop_oneof![
        60 => (lease.clone(), prop::bool::ANY).prop_map(|(lease, asks)| Step::Begin(lease, asks)),
        80 => (lease.clone(), 1u64..60).prop_map(|(lease, bytes)| Step::Lend(lease, bytes)),
        10 => lease.clone().prop_map(|lease| Step::Lend(lease, 500)),
        20 => lease.clone().prop_map(Step::Copy),
        50 => lease.clone().prop_map(Step::Finish),
        50 => (prop::collection::vec(0usize..5, 0..4), prop::bool::weighted(0.1))
            .prop_map(|(which, wrong)| Step::TakeBack(which, wrong)),
        40 => lease.prop_map(Step::Release),
        // A driver that calls `tick` at least each third of the time.
        40 => (0u64..LEASE_US / 3).prop_map(Step::Wait),
        2 => Just(Step::Close),
        2 => Just(Step::End),
    ]
}

/// What is known from the outside: loans, operations, what was ended, and a book that forgets in time.
#[derive(Default)]
struct Known {
    out: BTreeMap<LoanId, (u64, u64, Timestamp)>,
    copies: BTreeSet<LoanId>,
    /// Bytes lent under a lease since it had no loan.
    kept: BTreeMap<u64, u64>,
    /// Leases that count, and since when their time goes.
    begun: BTreeMap<u64, Timestamp>,
    operations: BTreeMap<u64, u32>,
    /// Those of them under which one has asked the book.
    asked: BTreeSet<u64>,
    released: BTreeSet<u64>,
    /// When the book forgets a lease.
    book: BTreeMap<u64, Timestamp>,
    newest: u64,
    is_closed: bool,
    is_over: bool,
}

impl Known {
    fn is_idle(&self, lease: u64) -> bool {
        !self.operations.contains_key(&lease) && self.out.values().all(|(of, ..)| *of != lease)
    }

    /// Each loan ends once, and no lease while something goes on under it.
    fn run(&mut self, effects: &[Effect], now: Timestamp) {
        for effect in effects {
            match *effect {
                Effect::Free(loan) => {
                    let lease = self.out.remove(&loan).map(|(lease, ..)| lease);
                    assert!(lease.is_some() != self.copies.remove(&loan), "{loan} was not out");
                    if self.out.values().all(|(of, ..)| Some(*of) != lease) {
                        lease.map(|lease| self.kept.remove(&lease));
                    }
                }
                Effect::Release(LeaseId(lease)) => {
                    assert!(self.is_over || self.is_idle(lease), "lease {lease} is in use");
                    assert!(self.is_closed || self.released.contains(&lease), "lease {lease} was not ended");
                    self.released.remove(&lease);
                    self.book.remove(&lease);
                    self.begun.remove(&lease);
                }
                Effect::Renew(LeaseId(lease)) => {
                    assert!(!self.is_idle(lease), "lease {lease} is renewed for nothing");
                    self.begun.insert(lease, now);
                    // None that the book was never asked under.
                    if let Some(deadline) = self.book.get_mut(&lease) {
                        *deadline = now.after(LIMITS.lease);
                    }
                }
            }
        }
    }

    fn judge(&self, lender: &Lender) {
        let (kept, lent): (u64, u64) =
            (self.kept.values().sum(), self.out.values().map(|(_, bytes, _)| bytes).sum());
        assert_eq!(lender.lent(), (self.out.len(), kept));
        assert!(lent <= kept && (kept <= LIMITS.lent_bytes_max || self.out.len() == 1));
        assert!(self.out.len() + self.copies.len() <= LIMITS.loans_max);
        assert_eq!(lender.fits(7, 20), kept + 27 <= LIMITS.lent_bytes_max);
        assert_eq!(lender.fits(0, 500), kept == 0);
        assert_eq!(lender.oldest(), self.out.values().map(|(_, _, since)| *since).min());
        for (lease, ..) in self.out.values() {
            assert!(self.book.contains_key(lease), "the book has no lease of what is lent under {lease}");
        }
        let waits = self.released.iter().find(|lease| self.is_idle(**lease));
        assert_eq!(waits, None, "the book was not told of the end of a lease");
    }
}

fn run(steps: &[Step]) {
    let (mut lender, mut known, mut now) = (Lender::new(LIMITS), Known::default(), Timestamp(1));
    for step in steps {
        let mut effects = Vec::new();
        match step.clone() {
            Step::Begin(lease, asks) => begin(&mut lender, &mut known, lease, asks, now),
            Step::Copy(lease) => copy(&mut lender, &mut known, lease, now),
            Step::Lend(lease, bytes) => lend(&mut lender, &mut known, lease, bytes, now),
            Step::Finish(lease) => {
                // Operations of a connection that is over still end.
                let Some(count) = known.operations.get_mut(&lease) else { continue };
                *count -= 1;
                if *count == 0 {
                    known.operations.remove(&lease);
                    known.asked.remove(&lease);
                }
                lender.finish(LeaseId(lease), &mut effects);
            }
            Step::TakeBack(which, wrong) => {
                let out: Vec<LoanId> = known.out.keys().chain(&known.copies).copied().collect();
                let mut loans: Vec<LoanId> = which.iter().filter_map(|at| out.get(*at)).copied().collect();
                loans.extend(wrong.then_some(LoanId(known.newest + 1)));
                let is_known = !wrong && loans.iter().collect::<BTreeSet<_>>().len() == loans.len();
                let before = lender.clone();
                assert_eq!(lender.take_back(&loans, &mut effects).is_ok(), is_known);
                assert!(is_known || lender == before && effects.is_empty(), "all or nothing");
                let freed = effects.iter().filter(|effect| matches!(effect, Effect::Free(_))).count();
                assert_eq!(freed, if is_known { loans.len() } else { 0 });
            }
            Step::Release(lease) => {
                if !known.is_closed {
                    known.released.insert(lease);
                }
                lender.release(LeaseId(lease), &mut effects);
            }
            Step::Wait(us) => {
                now = Timestamp(now.0 + us);
                known.book.retain(|_, deadline| *deadline > now);
                lender.tick(now, &mut effects);
                known.run(&std::mem::take(&mut effects), now);
                known.begun.retain(|_, since| now.since(*since) < LIMITS.lease);
            }
            Step::Close => {
                known.is_closed = true;
                lender.close(&mut effects);
            }
            Step::End => {
                (known.is_closed, known.is_over) = (true, true);
                lender.end(&mut effects);
                known.released.clear();
            }
        }
        known.run(&effects, now);
        if known.is_over {
            assert!(
                known.out.is_empty() && known.copies.is_empty(),
                "the end of a connection ends its loans"
            );
        }
        known.judge(&lender);
    }
}

fn begin(lender: &mut Lender, known: &mut Known, lease: u64, asks: bool, now: Timestamp) {
    let answer = lender.begin(LeaseId(lease), now);
    if known.is_closed {
        return assert_eq!(answer, Err(LendRefused::Closed));
    }
    if answer.is_ok() {
        *known.operations.entry(lease).or_default() += 1;
        known.released.remove(&lease);
        known.begun.entry(lease).or_insert(now);
        if asks {
            ask(known, lease, now);
        }
        return;
    }
    assert_eq!(answer, Err(LendRefused::Leases { limit: LIMITS.leases_max }));
    assert!(known.is_idle(lease) && known.begun.len() >= LIMITS.leases_max, "refused below the limit");
}

fn lend(lender: &mut Lender, known: &mut Known, lease: u64, bytes: u64, now: Timestamp) {
    let answer = lender.lend(LeaseId(lease), bytes, now);
    let sum: u64 = known.kept.values().sum();
    let expected = if known.is_closed || !known.operations.contains_key(&lease) {
        Err(LendRefused::Closed)
    } else if known.out.len() + known.copies.len() == LIMITS.loans_max {
        Err(LendRefused::Loans { limit: LIMITS.loans_max })
    } else if sum + bytes > LIMITS.lent_bytes_max && sum > 0 {
        Err(LendRefused::Bytes { limit: LIMITS.lent_bytes_max })
    } else {
        known.newest += 1;
        Ok(LoanId(known.newest))
    };
    assert_eq!(answer, expected);
    if let Ok(loan) = answer {
        known.out.insert(loan, (lease, bytes, now));
        *known.kept.entry(lease).or_default() += bytes;
        // What is lent was asked for by an operation that is under way, at the latest now.
        if !known.asked.contains(&lease) {
            ask(known, lease, now);
        }
    }
}

/// The book begins a lease's time anew whenever it is asked under it.
fn ask(known: &mut Known, lease: u64, now: Timestamp) {
    known.asked.insert(lease);
    known.book.insert(lease, now.after(LIMITS.lease));
}

fn copy(lender: &mut Lender, known: &mut Known, lease: u64, now: Timestamp) {
    let answer = lender.lend_copy(LeaseId(lease), now);
    let expected = if known.is_closed || !known.operations.contains_key(&lease) {
        Err(LendRefused::Closed)
    } else if known.out.len() + known.copies.len() == LIMITS.loans_max {
        Err(LendRefused::Loans { limit: LIMITS.loans_max })
    } else {
        known.newest += 1;
        Ok(LoanId(known.newest))
    };
    assert_eq!(answer, expected);
    known.copies.extend(answer.ok());
}

const EXTENT: Extent = Extent { arena_bytes: 1000, tray_bytes: 100, frame_bytes_max: 50 };

fn row(loan: u64, place: Place, at: u64, len: u32) -> Descriptor {
    Descriptor { loan: LoanId(loan), place, at, len }
}

#[test]
fn rows_that_cannot_be_are_refused_and_change_nothing() {
    let mut borrower = Borrower::new(EXTENT);
    let operation = borrower.begin(3);
    borrower.receive(operation, &[row(5, Place::Arena, 0, 50)]).unwrap();
    let good = row(6, Place::Tray, 50, 50);
    let range = |row: Descriptor, extent| WrongDescriptor::Range { at: row.at, len: row.len, extent };
    let length = |len| WrongDescriptor::Length { len, limit: 50 };
    let behind = [(row(7, Place::Arena, 951, 50), 1000), (row(7, Place::Tray, 51, 50), 100)];
    let overflow = (row(7, Place::Arena, u64::MAX, 50), 1000);
    let wrong =
        behind.into_iter().chain([overflow]).map(|(row, extent)| (vec![good, row], range(row, extent)));
    let wrong = wrong.chain([
        (vec![row(7, Place::Arena, 0, 0)], length(0)),
        (vec![good, row(7, Place::Arena, 0, 51)], length(51)),
        (vec![row(5, Place::Arena, 0, 1)], WrongDescriptor::Again(LoanId(5))),
        (vec![row(4, Place::Arena, 0, 1)], WrongDescriptor::Again(LoanId(4))),
        (vec![good, good], WrongDescriptor::Again(LoanId(6))),
        (vec![good; 3], WrongDescriptor::TooMany { asked: 3 }),
    ]);
    for (rows, expected) in wrong {
        let before = borrower.clone();
        assert_eq!(borrower.receive(operation, &rows), Err(expected), "{rows:?}");
        assert_eq!(borrower, before, "{rows:?}");
    }
    assert_eq!(borrower.receive(operation + 1, &[good]), Err(WrongDescriptor::NoOperation(operation + 1)));
    assert_eq!(borrower.receive(operation, &[good]), Ok(Received::Kept));
    borrower.finish(operation);
    let late = borrower.receive(operation, &[row(8, Place::Arena, 0, 1)]);
    assert_eq!(late, Err(WrongDescriptor::NoOperation(operation)));
    // A number that came back is not new either.
    assert!(!borrower.give_back(LoanId(5)) && borrower.give_back(LoanId(6)));
    let next = borrower.begin(1);
    let again = borrower.receive(next, &[row(6, Place::Arena, 0, 1)]);
    assert_eq!(again, Err(WrongDescriptor::Again(LoanId(6))));
}

#[test]
fn many_returns_go_at_once_and_none_after_the_node_is_lost() {
    let mut borrower = Borrower::new(EXTENT);
    let operation = borrower.begin(RETURNS_AT_ONCE + 2);
    let loans = 1..=RETURNS_AT_ONCE as u64 + 2;
    let rows: Vec<Descriptor> = loans.map(|loan| row(loan, Place::Arena, loan, 1)).collect();
    borrower.receive(operation, &rows).unwrap();
    let sent = (1..=RETURNS_AT_ONCE as u64).filter(|loan| borrower.give_back(LoanId(*loan)));
    assert_eq!(sent.collect::<Vec<_>>(), [RETURNS_AT_ONCE as u64]);
    assert_eq!(borrower.take_returns(3), [LoanId(1), LoanId(2), LoanId(3)]);
    borrower.lost();
    let last = LoanId(RETURNS_AT_ONCE as u64 + 1);
    assert!(borrower.may_read(last) && borrower.held() == 2);
    assert!(!borrower.give_back(last) && !borrower.may_read(last));
    assert!(borrower.take_returns(usize::MAX).is_empty());
}

/// The time of an idle lease is nearly over when it is used again: asking the book begins it anew, before anything is lent.
#[test]
fn a_lease_that_is_used_again_in_its_last_moment_keeps_what_is_lent() {
    let third = LEASE_US / 3 - 1;
    for asks in [false, true] {
        let idle = [
            Step::Begin(3, true),
            Step::Finish(3),
            Step::Wait(third),
            Step::Wait(third),
            Step::Wait(third - 500),
        ];
        run(&[&idle[..], &[Step::Begin(3, asks), Step::Lend(3, 1), Step::Wait(600), Step::Wait(third)]]
            .concat());
    }
}

proptest! {
    #[test]
    fn a_lender_ends_each_loan_once_and_no_lease_before_its_loans(steps in prop::collection::vec(step(), 0..80)) {
        run(&steps);
    }

    /// Operations with rows, cancelled or not, and frames that are dropped in any order: each loan is given back once,
    /// and none waits when nothing goes on any more.
    #[test]
    fn a_borrower_gives_back_each_loan_once(
        steps in prop::collection::vec((0u8..5, any::<usize>()), 0..120),
    ) {
        let mut borrower = Borrower::new(EXTENT);
        let (mut newest, mut open, mut held) = (0, BTreeMap::new(), BTreeSet::new());
        let (mut lent, mut returned) = (BTreeSet::new(), Vec::new());
        let ends = [(2u8, 0), (4, 0)].into_iter().cycle().take(800);
        // Behind the steps, all that is open ends and all that is held is dropped.
        for (what, index) in steps.iter().copied().chain(ends) {
            let nth = |count: usize| index % count;
            let operation = (!open.is_empty()).then(|| *open.keys().nth(nth(open.len())).unwrap());
            let mut is_due = false;
            match (what, operation) {
                (0, _) => {
                    open.insert(borrower.begin(3), false);
                }
                (1, Some(operation)) => {
                    let row = row(newest + 1, Place::Arena, newest % 900, 1);
                    match borrower.receive(operation, &[row]) {
                        Ok(received) => {
                            newest += 1;
                            lent.insert(row.loan);
                            prop_assert_eq!(received == Received::Unwanted, open[&operation]);
                            if received == Received::Kept {
                                held.insert(row.loan);
                            }
                        }
                        Err(wrong) => prop_assert_eq!(wrong, WrongDescriptor::TooMany { asked: 3 }),
                    }
                }
                (2, Some(operation)) => {
                    open.remove(&operation);
                    is_due = borrower.finish(operation);
                }
                (3, Some(operation)) => {
                    open.insert(operation, true);
                    borrower.cancel(operation);
                }
                (4, _) if !held.is_empty() => {
                    let loan = *held.iter().nth(nth(held.len())).unwrap();
                    held.remove(&loan);
                    is_due = borrower.give_back(loan);
                }
                _ => {}
            }
            if is_due {
                returned.extend(borrower.take_returns(usize::MAX));
            }
            prop_assert!(lent.iter().all(|loan| borrower.may_read(*loan) == held.contains(loan)));
            prop_assert_eq!(borrower.held(), held.len());
        }
        prop_assert!(open.is_empty() && held.is_empty());
        let once: BTreeSet<LoanId> = returned.iter().copied().collect();
        prop_assert_eq!(once.len(), returned.len(), "given back twice");
        prop_assert_eq!(once, lent);
    }

    #[test]
    fn places_of_a_tray_do_not_overlap_and_the_first_that_fits_is_taken(
        align in 1u64..9,
        steps in prop::collection::vec(
            (any::<bool>(), 0u32..40, 0u64..200, any::<prop::sample::Index>()),
            0..60,
        ),
    ) {
        const BYTES: u64 = 100;
        let mut room = Room::new(BYTES, align);
        let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
        for (is_new, len, within, index) in steps {
            if is_new {
                let bytes = u64::from(len).max(1);
                let is_free = |at: &u64| taken.iter().all(|(start, of)| at + bytes <= *start || start + of <= *at);
                let fits = (0..BYTES).step_by(align as usize).filter(|at| at + bytes <= BYTES.min(within)).find(is_free);
                let took = if within > BYTES { room.take(len) } else { room.take_within(len, within) };
                prop_assert_eq!(took, fits);
                taken.extend(fits.map(|at| (at, bytes)));
            } else if !taken.is_empty() {
                let at = *taken.keys().nth(index.index(taken.len())).unwrap();
                taken.remove(&at);
                prop_assert!(room.give_back(at) && !room.give_back(at));
            }
            prop_assert_eq!(room.places(), taken.len());
        }
    }
}
