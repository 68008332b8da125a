//! Each end alone, against naive models.
//!
//! Not here: both ends together (`search`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::*;
use crate::id::{GrantId, LeaseId, Timestamp};
use proptest::prelude::*;

const LEASE_US: u64 = 9000;
const LIMITS: GrantLimits = GrantLimits {
    granted_bytes_max: 100,
    grants_max: 4,
    leases_max: 3,
    lease: Duration::from_micros(LEASE_US),
};

#[derive(Clone, Debug)]
enum ModelStep {
    /// The flag tells whether the operation reaches the book.
    Begin(u64, bool),
    Grant(u64, u64),
    Copy(u64),
    Finish(u64),
    Return(Vec<usize>, bool),
    Release(u64),
    Wait(u64),
    Close,
    End,
}

fn step() -> impl Strategy<Value = ModelStep> {
    let lease = 0u64..4;
    prop_oneof![
        60 => (lease.clone(), prop::bool::ANY).prop_map(|(lease, asks)| ModelStep::Begin(lease, asks)),
        80 => (lease.clone(), 1u64..60).prop_map(|(lease, bytes)| ModelStep::Grant(lease, bytes)),
        10 => lease.clone().prop_map(|lease| ModelStep::Grant(lease, 500)),
        20 => lease.clone().prop_map(ModelStep::Copy),
        50 => lease.clone().prop_map(ModelStep::Finish),
        50 => (prop::collection::vec(0usize..5, 0..4), prop::bool::weighted(0.1))
            .prop_map(|(which, wrong)| ModelStep::Return(which, wrong)),
        40 => lease.prop_map(ModelStep::Release),
        // The driver calls `tick` at least each third of the lease period.
        40 => (0u64..LEASE_US / 3).prop_map(ModelStep::Wait),
        2 => Just(ModelStep::Close),
        2 => Just(ModelStep::End),
    ]
}

/// The observable state: grants, operations, released leases, and a book that expires leases.
#[derive(Default)]
struct GrantModel {
    out: BTreeMap<GrantId, (u64, u64, Timestamp)>,
    copies: BTreeSet<GrantId>,
    /// Bytes granted under a lease since it last had no grant.
    granted_bytes: BTreeMap<u64, u64>,
    /// Leases that count, and the start of their period.
    leases: BTreeMap<u64, Timestamp>,
    operations: BTreeMap<u64, u32>,
    /// Those with an operation that called the book.
    booked: BTreeSet<u64>,
    released: BTreeSet<u64>,
    /// When the book expires a lease.
    book: BTreeMap<u64, Timestamp>,
    newest: u64,
    is_closed: bool,
    is_over: bool,
}

impl GrantModel {
    fn is_idle(&self, lease: u64) -> bool {
        !self.operations.contains_key(&lease) && self.out.values().all(|(of, ..)| *of != lease)
    }

    /// Each grant ends once, and no lease ends while it is in use.
    fn apply_effects(&mut self, effects: &[GrantEffect], now: Timestamp) {
        for effect in effects {
            match *effect {
                GrantEffect::Free(loan) => {
                    let lease = self.out.remove(&loan).map(|(lease, ..)| lease);
                    assert!(lease.is_some() != self.copies.remove(&loan), "{loan} was not out");
                    if self.out.values().all(|(of, ..)| Some(*of) != lease) {
                        lease.map(|lease| self.granted_bytes.remove(&lease));
                    }
                }
                GrantEffect::Release(LeaseId(lease)) => {
                    assert!(self.is_over || self.is_idle(lease), "lease {lease} is in use");
                    assert!(
                        self.is_closed || self.released.contains(&lease),
                        "lease {lease} was not released"
                    );
                    self.released.remove(&lease);
                    self.book.remove(&lease);
                    self.leases.remove(&lease);
                }
                GrantEffect::Renew(LeaseId(lease)) => {
                    assert!(!self.is_idle(lease), "lease {lease} is renewed while idle");
                    self.leases.insert(lease, now);
                    // Only leases that the book knows.
                    if let Some(deadline) = self.book.get_mut(&lease) {
                        *deadline = now.after(LIMITS.lease);
                    }
                }
            }
        }
    }

    fn check(&self, lender: &GrantServer) {
        let (kept, lent): (u64, u64) =
            (self.granted_bytes.values().sum(), self.out.values().map(|(_, bytes, _)| bytes).sum());
        assert_eq!(lender.granted(), (self.out.len(), kept));
        assert!(lent <= kept && (kept <= LIMITS.granted_bytes_max || self.out.len() == 1));
        assert!(self.out.len() + self.copies.len() <= LIMITS.grants_max);
        assert_eq!(lender.fits(7, 20), kept + 27 <= LIMITS.granted_bytes_max);
        assert_eq!(lender.fits(0, 500), kept == 0);
        assert_eq!(lender.oldest_since(), self.out.values().map(|(_, _, since)| *since).min());
        for (lease, ..) in self.out.values() {
            assert!(self.book.contains_key(lease), "the book has no lease for blocks granted under {lease}");
        }
        let waits = self.released.iter().find(|lease| self.is_idle(**lease));
        assert_eq!(waits, None, "the book was not told that a lease ended");
    }
}

fn run(steps: &[ModelStep]) {
    let (mut lender, mut known, mut now) = (GrantServer::new(LIMITS), GrantModel::default(), Timestamp(1));
    for step in steps {
        let mut effects = Vec::new();
        match step.clone() {
            ModelStep::Begin(lease, asks) => begin(&mut lender, &mut known, lease, asks, now),
            ModelStep::Copy(lease) => copy(&mut lender, &mut known, lease, now),
            ModelStep::Grant(lease, bytes) => grant(&mut lender, &mut known, lease, bytes, now),
            ModelStep::Finish(lease) => {
                // Operations of a closed connection still end.
                let Some(count) = known.operations.get_mut(&lease) else { continue };
                *count -= 1;
                if *count == 0 {
                    known.operations.remove(&lease);
                    known.booked.remove(&lease);
                }
                lender.finish(LeaseId(lease), &mut effects);
            }
            ModelStep::Return(which, wrong) => {
                let out: Vec<GrantId> = known.out.keys().chain(&known.copies).copied().collect();
                let mut loans: Vec<GrantId> = which.iter().filter_map(|at| out.get(*at)).copied().collect();
                loans.extend(wrong.then_some(GrantId(known.newest + 1)));
                let is_known = !wrong && loans.iter().collect::<BTreeSet<_>>().len() == loans.len();
                let before = lender.clone();
                assert_eq!(lender.return_grants(&loans, &mut effects).is_ok(), is_known);
                assert!(is_known || lender == before && effects.is_empty(), "all or nothing");
                let freed = effects.iter().filter(|effect| matches!(effect, GrantEffect::Free(_))).count();
                assert_eq!(freed, if is_known { loans.len() } else { 0 });
            }
            ModelStep::Release(lease) => {
                if !known.is_closed {
                    known.released.insert(lease);
                }
                lender.release(LeaseId(lease), &mut effects);
            }
            ModelStep::Wait(us) => {
                now = Timestamp(now.0 + us);
                known.book.retain(|_, deadline| *deadline > now);
                lender.tick(now, &mut effects);
                known.apply_effects(&std::mem::take(&mut effects), now);
                known.leases.retain(|_, since| now.since(*since) < LIMITS.lease);
            }
            ModelStep::Close => {
                known.is_closed = true;
                lender.close(&mut effects);
            }
            ModelStep::End => {
                (known.is_closed, known.is_over) = (true, true);
                lender.end(&mut effects);
                known.released.clear();
            }
        }
        known.apply_effects(&effects, now);
        if known.is_over {
            assert!(
                known.out.is_empty() && known.copies.is_empty(),
                "the end of a connection ends its grants"
            );
        }
        known.check(&lender);
    }
}

fn begin(lender: &mut GrantServer, known: &mut GrantModel, lease: u64, asks: bool, now: Timestamp) {
    let answer = lender.begin(LeaseId(lease), now);
    if known.is_closed {
        return assert_eq!(answer, Err(GrantRefused::Closed));
    }
    if answer.is_ok() {
        *known.operations.entry(lease).or_default() += 1;
        known.released.remove(&lease);
        known.leases.entry(lease).or_insert(now);
        if asks {
            call_book(known, lease, now);
        }
        return;
    }
    assert_eq!(answer, Err(GrantRefused::Leases { limit: LIMITS.leases_max }));
    assert!(known.is_idle(lease) && known.leases.len() >= LIMITS.leases_max, "refused below the limit");
}

fn grant(lender: &mut GrantServer, known: &mut GrantModel, lease: u64, bytes: u64, now: Timestamp) {
    let answer = lender.grant(LeaseId(lease), bytes, now);
    let sum: u64 = known.granted_bytes.values().sum();
    let expected = if known.is_closed || !known.operations.contains_key(&lease) {
        Err(GrantRefused::Closed)
    } else if known.out.len() + known.copies.len() == LIMITS.grants_max {
        Err(GrantRefused::Grants { limit: LIMITS.grants_max })
    } else if sum + bytes > LIMITS.granted_bytes_max && sum > 0 {
        Err(GrantRefused::Bytes { limit: LIMITS.granted_bytes_max })
    } else {
        known.newest += 1;
        Ok(GrantId(known.newest))
    };
    assert_eq!(answer, expected);
    if let Ok(loan) = answer {
        known.out.insert(loan, (lease, bytes, now));
        *known.granted_bytes.entry(lease).or_default() += bytes;
        // An operation in flight has called the book at the latest now.
        if !known.booked.contains(&lease) {
            call_book(known, lease, now);
        }
    }
}

/// The book restarts a lease period with each call under it.
fn call_book(known: &mut GrantModel, lease: u64, now: Timestamp) {
    known.booked.insert(lease);
    known.book.insert(lease, now.after(LIMITS.lease));
}

fn copy(lender: &mut GrantServer, known: &mut GrantModel, lease: u64, now: Timestamp) {
    let answer = lender.grant_copy(LeaseId(lease), now);
    let expected = if known.is_closed || !known.operations.contains_key(&lease) {
        Err(GrantRefused::Closed)
    } else if known.out.len() + known.copies.len() == LIMITS.grants_max {
        Err(GrantRefused::Grants { limit: LIMITS.grants_max })
    } else {
        known.newest += 1;
        Ok(GrantId(known.newest))
    };
    assert_eq!(answer, expected);
    known.copies.extend(answer.ok());
}

const EXTENT: MemoryExtent =
    MemoryExtent { arena_bytes: 1000, bounce_buffer_bytes: 100, frame_bytes_max: 50 };

fn descriptor(loan: u64, place: GrantMemory, at: u64, len: u32) -> GrantDescriptor {
    GrantDescriptor { grant: GrantId(loan), memory: place, offset: at, len }
}

#[test]
fn invalid_descriptors_are_rejected_without_effect() {
    let mut borrower = GrantClient::new(EXTENT);
    let operation = borrower.begin(3);
    borrower.receive(operation, &[descriptor(5, GrantMemory::Arena, 0, 50)]).unwrap();
    let good = descriptor(6, GrantMemory::BounceBuffer, 50, 50);
    let range =
        |row: GrantDescriptor, extent| DescriptorError::Range { at: row.offset, len: row.len, extent };
    let length = |len| DescriptorError::Length { len, limit: 50 };
    let behind = [
        (descriptor(7, GrantMemory::Arena, 951, 50), 1000),
        (descriptor(7, GrantMemory::BounceBuffer, 51, 50), 100),
    ];
    let overflow = (descriptor(7, GrantMemory::Arena, u64::MAX, 50), 1000);
    let wrong =
        behind.into_iter().chain([overflow]).map(|(row, extent)| (vec![good, row], range(row, extent)));
    let wrong = wrong.chain([
        (vec![descriptor(7, GrantMemory::Arena, 0, 0)], length(0)),
        (vec![good, descriptor(7, GrantMemory::Arena, 0, 51)], length(51)),
        (vec![descriptor(5, GrantMemory::Arena, 0, 1)], DescriptorError::StaleId(GrantId(5))),
        (vec![descriptor(4, GrantMemory::Arena, 0, 1)], DescriptorError::StaleId(GrantId(4))),
        (vec![good, good], DescriptorError::StaleId(GrantId(6))),
        (vec![good; 3], DescriptorError::TooMany { asked: 3 }),
    ]);
    for (rows, expected) in wrong {
        let before = borrower.clone();
        assert_eq!(borrower.receive(operation, &rows), Err(expected), "{rows:?}");
        assert_eq!(borrower, before, "{rows:?}");
    }
    assert_eq!(borrower.receive(operation + 1, &[good]), Err(DescriptorError::NoOperation(operation + 1)));
    assert_eq!(borrower.receive(operation, &[good]), Ok(ReceiveOutcome::Accepted));
    borrower.finish(operation);
    let late = borrower.receive(operation, &[descriptor(8, GrantMemory::Arena, 0, 1)]);
    assert_eq!(late, Err(DescriptorError::NoOperation(operation)));
    // An id that was returned is not new either.
    assert!(!borrower.release(GrantId(5)) && borrower.release(GrantId(6)));
    let next = borrower.begin(1);
    let again = borrower.receive(next, &[descriptor(6, GrantMemory::Arena, 0, 1)]);
    assert_eq!(again, Err(DescriptorError::StaleId(GrantId(6))));
}

#[test]
fn returns_are_batched_and_dropped_after_node_loss() {
    let mut borrower = GrantClient::new(EXTENT);
    let operation = borrower.begin(RETURNS_PER_MESSAGE + 2);
    let loans = 1..=RETURNS_PER_MESSAGE as u64 + 2;
    let rows: Vec<GrantDescriptor> =
        loans.map(|loan| descriptor(loan, GrantMemory::Arena, loan, 1)).collect();
    borrower.receive(operation, &rows).unwrap();
    let sent = (1..=RETURNS_PER_MESSAGE as u64).filter(|loan| borrower.release(GrantId(*loan)));
    assert_eq!(sent.collect::<Vec<_>>(), [RETURNS_PER_MESSAGE as u64]);
    assert_eq!(borrower.take_returns(3), [GrantId(1), GrantId(2), GrantId(3)]);
    borrower.server_lost();
    let last = GrantId(RETURNS_PER_MESSAGE as u64 + 1);
    assert!(borrower.may_read(last) && borrower.held() == 2);
    assert!(!borrower.release(last) && !borrower.may_read(last));
    assert!(borrower.take_returns(usize::MAX).is_empty());
}

/// An idle lease that is about to expire is used again: a call to the book restarts it before any
/// block is granted.
#[test]
fn lease_reused_before_expiry_keeps_granted_blocks() {
    let third = LEASE_US / 3 - 1;
    for asks in [false, true] {
        let idle = [
            ModelStep::Begin(3, true),
            ModelStep::Finish(3),
            ModelStep::Wait(third),
            ModelStep::Wait(third),
            ModelStep::Wait(third - 500),
        ];
        run(&[
            &idle[..],
            &[
                ModelStep::Begin(3, asks),
                ModelStep::Grant(3, 1),
                ModelStep::Wait(600),
                ModelStep::Wait(third),
            ],
        ]
        .concat());
    }
}

proptest! {
    #[test]
    fn server_ends_each_grant_once_and_no_lease_before_its_grants(steps in prop::collection::vec(step(), 0..80)) {
        run(&steps);
    }

    /// Operations with descriptors, cancelled or not, and frames that are dropped in any order.
    /// Each grant is returned once, and none waits when all operations have ended.
    #[test]
    fn client_returns_each_grant_once(
        steps in prop::collection::vec((0u8..5, any::<usize>()), 0..120),
    ) {
        let mut borrower = GrantClient::new(EXTENT);
        let (mut newest, mut open, mut held) = (0, BTreeMap::new(), BTreeSet::new());
        let (mut lent, mut returned) = (BTreeSet::new(), Vec::new());
        let ends = [(2u8, 0), (4, 0)].into_iter().cycle().take(800);
        // After the steps, all open operations end and all held frames are dropped.
        for (what, index) in steps.iter().copied().chain(ends) {
            let nth = |count: usize| index % count;
            let operation = (!open.is_empty()).then(|| *open.keys().nth(nth(open.len())).unwrap());
            let mut is_due = false;
            match (what, operation) {
                (0, _) => {
                    open.insert(borrower.begin(3), false);
                }
                (1, Some(operation)) => {
                    let row = descriptor(newest + 1, GrantMemory::Arena, newest % 900, 1);
                    match borrower.receive(operation, &[row]) {
                        Ok(received) => {
                            newest += 1;
                            lent.insert(row.grant);
                            prop_assert_eq!(received == ReceiveOutcome::Unwanted, open[&operation]);
                            if received == ReceiveOutcome::Accepted {
                                held.insert(row.grant);
                            }
                        }
                        Err(wrong) => prop_assert_eq!(wrong, DescriptorError::TooMany { asked: 3 }),
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
                    is_due = borrower.release(loan);
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
        let once: BTreeSet<GrantId> = returned.iter().copied().collect();
        prop_assert_eq!(once.len(), returned.len(), "returned twice");
        prop_assert_eq!(once, lent);
    }

    #[test]
    fn slots_do_not_overlap_and_are_first_fit(
        align in 1u64..9,
        steps in prop::collection::vec(
            (any::<bool>(), 0u32..40, 0u64..200, any::<prop::sample::Index>()),
            0..60,
        ),
    ) {
        const BYTES: u64 = 100;
        let mut room = SlotAllocator::new(BYTES, align);
        let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
        for (is_new, len, within, index) in steps {
            if is_new {
                let bytes = u64::from(len).max(1);
                let is_free = |at: &u64| taken.iter().all(|(start, of)| at + bytes <= *start || start + of <= *at);
                let within = BYTES.min(within);
                    let fits = (0..BYTES).step_by(align as usize).filter(|at| at + bytes <= within).find(is_free);
                let took = if within > BYTES { room.allocate(len) } else { room.allocate_within(len, within) };
                prop_assert_eq!(took, fits);
                taken.extend(fits.map(|at| (at, bytes)));
            } else if !taken.is_empty() {
                let at = *taken.keys().nth(index.index(taken.len())).unwrap();
                taken.remove(&at);
                prop_assert!(room.free(at) && !room.free(at));
            }
            prop_assert_eq!(room.slot_count(), taken.len());
        }
    }
}
