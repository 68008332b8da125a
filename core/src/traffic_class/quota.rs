//! Admission of operations by traffic class to one shared resource, in bytes or slots.
//!
//! Each class has a guaranteed *minimum*. The rest is the *shared pool*, and a class above its
//! minimum uses the pool. Three rules:
//!
//! - Higher classes keep their minimum whether they use it or not: lower ones cannot take it.
//! - A lower class keeps its minimum from its first request on. It loses it after
//!   [`INACTIVE_AFTER_REQUESTS`] requests of others without one of its own, so unused capacity is
//!   not reserved.
//! - A refused class that saw [`OVERTAKEN_MAX`] others admitted beyond their minimum is *starved*:
//!   others get only their minimum until it is admitted. If a starved class needs more than others
//!   leave, no other class is admitted until then. A refused caller does not say that it gave up.
//!   So after [`HELD_BACK_MAX`] refusals of others since its last request, the class no longer
//!   counts as starved until it asks again.
//!
//! The total never exceeds the capacity, with one exception: an operation of the first class that
//! is larger than the capacity runs alone, or it could never be served. An operation of another
//! class above that class's possible maximum is refused without effect, since no caller should wait
//! for it; the caller splits it. Not here: waiting; a refused caller retries as often as it likes.

use std::cmp::Ordering;

use crate::id::TrafficClass;

/// Number of classes.
const CLASSES: usize = TrafficClass::ALL.len();

/// Minimum of each class, in sixteenths of the capacity, in the order of [`TrafficClass::ALL`]. The
/// first class with a minimum is the first class of the resource.
pub type ClassMinima = [u8; CLASSES];

/// Requests of others after which a class without requests counts as gone.
pub const INACTIVE_AFTER_REQUESTS: u64 = 256;

/// Others that are admitted beyond their minimum while one of a class is refused, by rank of the
/// class.
pub const OVERTAKEN_MAX: [u32; CLASSES] = [0, 4, 8, 16];

/// Others that are refused for a starved class since its last request, although there was capacity.
pub const HELD_BACK_MAX: u32 = 32;

/// A capacity that classes share, in bytes or slots.
#[derive(Clone, Debug)]
pub struct ClassQuota {
    capacity: u64,
    minima: [u64; CLASSES],
    /// Rank of the first class that has a minimum.
    first: usize,
    taken: [u64; CLASSES],
    requests: u64,
    demands: [Option<ClassDemand>; CLASSES],
}

/// A class with recent requests.
#[derive(Clone, Copy, Debug)]
struct ClassDemand {
    /// Request count at its last request.
    last_request: u64,
    refused: Option<RefusalState>,
}

/// Refusals since its last admission.
#[derive(Clone, Copy, Debug)]
struct RefusalState {
    /// Request count at the first refusal.
    since: u64,
    /// Amount of the last refused request.
    amount: u64,
    /// Others admitted beyond their minimum since.
    overtaken: u32,
    /// Others refused for its sake since its last request.
    held_back: u32,
}

impl RefusalState {
    /// Another class, of any rank, was admitted before this one of rank `at`.
    fn count_overtaken(&mut self, at: usize) {
        self.overtaken = self.overtaken.saturating_add(1).min(OVERTAKEN_MAX[at]);
    }
}

/// The starved class that others must wait for.
#[derive(Clone, Copy, Debug)]
struct StarvedClass {
    at: usize,
    /// It needs more than others leave, so none of them is admitted.
    blocks_all: bool,
}

impl ClassQuota {
    /// A capacity with these minima, which sum to at most sixteen sixteenths.
    #[must_use]
    pub fn new(capacity: u64, parts: ClassMinima) -> ClassQuota {
        debug_assert!(parts.iter().map(|part| u32::from(*part)).sum::<u32>() <= 16);
        let part = |sixteenths: u8| (u128::from(capacity) * u128::from(sixteenths) / 16) as u64;
        let first = parts.iter().position(|part| *part > 0).unwrap_or(0);
        let (taken, demands) = ([0; CLASSES], [None; CLASSES]);
        ClassQuota { capacity, minima: parts.map(part), first, taken, requests: 0, demands }
    }

    /// Admits an operation if its class has capacity for it; `false` if refused.
    #[must_use]
    pub fn try_take(&mut self, class: TrafficClass, amount: u64) -> bool {
        let at = class.rank();
        if at != self.first && amount > self.largest_operation(class) {
            return false;
        }
        self.requests += 1;
        self.forget_inactive();
        // From now on others leave this class its minimum.
        self.demands[at].get_or_insert(ClassDemand { last_request: 0, refused: None }).last_request =
            self.requests;
        let due = self.starved_class().filter(|due| due.at != at);
        let has_room = self.has_capacity(at, amount) || self.may_run_alone(at);
        let own = self.taken[at].saturating_add(amount);
        let holds_up = due.filter(|due| due.blocks_all || own > self.minima[at]);
        let is_let_in = has_room && holds_up.is_none();
        if is_let_in {
            self.taken[at] = own;
            if own > self.minima[at] {
                self.count_overtaking(at);
            }
        } else if let Some(due) = holds_up.filter(|_| has_room)
            && let Some(refused) = self.demands[due.at].as_mut().and_then(|claim| claim.refused.as_mut())
        {
            refused.held_back += 1;
        }
        self.record_result(at, (!is_let_in).then_some(amount), due.is_some_and(|due| due.blocks_all));
        is_let_in
    }

    /// Records an admission, or the amount of a refusal, and whether another class blocked all.
    fn record_result(&mut self, at: usize, amount: Option<u64>, is_blocked: bool) {
        let since = self.requests;
        let Some(claim) = &mut self.demands[at] else { return };
        claim.refused = amount.map(|amount| match claim.refused {
            Some(refused) => RefusalState { amount, held_back: 0, ..refused },
            None => RefusalState { since, amount, overtaken: 0, held_back: 0 },
        });
        // A class that is blocked for one that may never return counts as overtaken too.
        if let Some(refused) = claim.refused.as_mut().filter(|_| is_blocked) {
            refused.count_overtaken(at);
        }
    }

    /// Returns capacity of an admitted operation.
    pub fn release(&mut self, class: TrafficClass, amount: u64) {
        let taken = &mut self.taken[class.rank()];
        debug_assert!(*taken >= amount, "more is returned than was taken");
        *taken = taken.saturating_sub(amount);
    }

    /// Capacity that a class uses.
    #[must_use]
    pub fn taken(&self, class: TrafficClass) -> u64 {
        self.taken[class.rank()]
    }

    /// Guaranteed minimum of a class, once it asked.
    #[must_use]
    pub fn minimum(&self, class: TrafficClass) -> u64 {
        self.minima[class.rank()]
    }

    /// Largest operation of a class that can be admitted beside the minima of others.
    #[must_use]
    pub fn largest_operation(&self, class: TrafficClass) -> u64 {
        let others: u64 = self.minima.iter().sum::<u64>() - self.minimum(class);
        self.capacity - others
    }

    /// Whether there is capacity, regardless of starved classes.
    fn has_capacity(&self, at: usize, amount: u64) -> bool {
        let Some(own) = self.taken[at].checked_add(amount) else { return false };
        let is_within = own <= self.minima[at];
        // A class behind another one that asked also keeps the minimum of that one.
        let last_asking = self.demands.iter().rposition(Option::is_some);
        let kept = |of: usize| match of.cmp(&at) {
            Ordering::Less => self.taken[of].max(self.minima[of]),
            Ordering::Equal => own,
            Ordering::Greater if is_within || Some(of) > last_asking => self.taken[of],
            Ordering::Greater => self.taken[of].max(self.minima[of]),
        };
        (0..CLASSES).map(|of| u128::from(kept(of))).sum::<u128>() <= u128::from(self.capacity)
    }

    /// An operation above the whole capacity is admitted if nothing else runs.
    fn may_run_alone(&self, at: usize) -> bool {
        let is_empty = self.taken.iter().all(|taken| *taken == 0);
        at == self.first && is_empty
    }

    /// The starved class; of several, the one refused for longest.
    fn starved_class(&self) -> Option<StarvedClass> {
        let due = |at: usize| {
            let refused = self.demands[at]?.refused?;
            let needs_all = refused.amount > self.largest_operation(TrafficClass::ALL[at]);
            let is_due = refused.overtaken >= OVERTAKEN_MAX[at];
            // A class that stopped asking is passed over in the end.
            (is_due && refused.held_back < HELD_BACK_MAX)
                .then_some((refused.since, StarvedClass { at, blocks_all: needs_all }))
        };
        (0..CLASSES).filter_map(due).min_by_key(|(since, _)| *since).map(|(_, due)| due)
    }

    /// An operation of this class was admitted beyond its minimum.
    fn count_overtaking(&mut self, by: usize) {
        for (at, claim) in self.demands.iter_mut().enumerate().filter(|(at, _)| *at != by) {
            if let Some(refused) = claim.as_mut().and_then(|claim| claim.refused.as_mut()) {
                refused.count_overtaken(at);
            }
        }
    }

    fn forget_inactive(&mut self) {
        for claim in &mut self.demands {
            *claim = claim.filter(|claim| self.requests - claim.last_request <= INACTIVE_AFTER_REQUESTS);
        }
    }
}
