//! What operations of each class may have of one bound, so many bytes or places.
//!
//! Each class has a part, its *minimum*; what is nobody's is the *commons*, and who has more than its minimum has it from
//! there. Three rules:
//!
//! - Higher classes keep their minimum whether they use it or not: lower ones cannot take it.
//! - Lower classes keep theirs as soon as one of them asked, until none did for [`FORGOTTEN_ASKS`] asks: what nobody uses is
//!   kept for nobody.
//! - A class that was refused, and saw [`OVERTAKEN_MAX`] others be let in beyond their minimum, is *due*: others have their
//!   minimum and no more until it was let in. Where the first class is due with more than others leave it, they have
//!   nothing until then. A refused one that left does not say so: [`HELD_UP_MAX`] others that find room are refused after
//!   a class's last ask, and then it is due no more until it asks again.
//!
//! All together never have more than there is, but for one of the first class that is larger than all, which passes when it
//! is alone, or it could never be served. What of another class is larger than that class can ever have is refused and changes
//! nothing: nobody waits for what cannot come. It is to be asked for in parts. Not here: waiting; a refused one asks again,
//! and as often as it likes.

use std::cmp::Ordering;

use crate::id::Class;

/// Classes there are.
const CLASSES: usize = Class::ALL.len();

/// Parts of a room by class, in sixteenths, in the order of [`Class::ALL`]. The first class that has one is the first
/// of the room.
pub type Parts = [u8; CLASSES];

/// Asks of others after which a class that asks nothing counts as gone.
pub const FORGOTTEN_ASKS: u64 = 256;

/// How many others are let in beyond their minimum while one of a class is refused, by the class's place.
pub const OVERTAKEN_MAX: [u32; CLASSES] = [0, 4, 8, 16];

/// How many others that find room are refused for the sake of a class that is due, since it asked last.
pub const HELD_UP_MAX: u32 = 32;

/// A bound that classes share. Amounts are bytes or places, as its owner likes.
#[derive(Clone, Debug)]
pub struct ClassRoom {
    all: u64,
    minima: [u64; CLASSES],
    /// Place of the first class that has a minimum.
    first: usize,
    taken: [u64; CLASSES],
    asks: u64,
    claims: [Option<Claim>; CLASSES],
}

/// A class that asks.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// When it asked last, in asks of all.
    asked: u64,
    refused: Option<Refused>,
}

/// What it was refused since it was let in last.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// When first.
    since: u64,
    /// What was asked last.
    amount: u64,
    /// Others that were let in beyond their minimum since.
    overtaken: u32,
    /// Others that were refused for its sake since the last ask.
    held_up: u32,
}

impl Refused {
    /// Another one went before this one, which is of the class of this place.
    fn pass(&mut self, at: usize) {
        self.overtaken = self.overtaken.saturating_add(1).min(OVERTAKEN_MAX[at]);
    }
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: usize,
    /// Others leave it less than it asks.
    needs_all: bool,
}

impl ClassRoom {
    /// Room for so much, with these minima, which are together sixteen sixteenths at most.
    #[must_use]
    pub fn new(all: u64, parts: Parts) -> ClassRoom {
        debug_assert!(parts.iter().map(|part| u32::from(*part)).sum::<u32>() <= 16);
        let part = |sixteenths: u8| (u128::from(all) * u128::from(sixteenths) / 16) as u64;
        let first = parts.iter().position(|part| *part > 0).unwrap_or(0);
        let (taken, claims) = ([0; CLASSES], [None; CLASSES]);
        ClassRoom { all, minima: parts.map(part), first, taken, asks: 0, claims }
    }

    /// Lets an operation in, if there is room for one of its class.
    #[must_use]
    pub fn take(&mut self, class: Class, amount: u64) -> bool {
        let at = class.rank();
        if at != self.first && amount > self.largest(class) {
            return false;
        }
        self.asks += 1;
        self.forget();
        // From now on others leave it its minimum.
        self.claims[at].get_or_insert(Claim { asked: 0, refused: None }).asked = self.asks;
        let due = self.due().filter(|due| due.at != at);
        let has_room = self.has_room(at, amount) || self.may_be_alone(at);
        let own = self.taken[at].saturating_add(amount);
        let holds_up = due.filter(|due| due.needs_all || own > self.minima[at]);
        let is_let_in = has_room && holds_up.is_none();
        if is_let_in {
            self.taken[at] = own;
            if own > self.minima[at] {
                self.overtake(at);
            }
        } else if let Some(due) = holds_up.filter(|_| has_room)
            && let Some(refused) = self.claims[due.at].as_mut().and_then(|claim| claim.refused.as_mut())
        {
            refused.held_up += 1;
        }
        self.note(at, (!is_let_in).then_some(amount), due.is_some_and(|due| due.needs_all));
        is_let_in
    }

    /// Notes that a class was let in, or what of it was refused, perhaps while another one had all.
    fn note(&mut self, at: usize, amount: Option<u64>, is_passed: bool) {
        let since = self.asks;
        let Some(claim) = &mut self.claims[at] else { return };
        claim.refused = amount.map(|amount| match claim.refused {
            Some(refused) => Refused { amount, held_up: 0, ..refused },
            None => Refused { since, amount, overtaken: 0, held_up: 0 },
        });
        // Whoever has nothing for the sake of one that may never come again is passed over too.
        if let Some(refused) = claim.refused.as_mut().filter(|_| is_passed) {
            refused.pass(at);
        }
    }

    /// So much of what was let in is over.
    pub fn give_back(&mut self, class: Class, amount: u64) {
        let taken = &mut self.taken[class.rank()];
        debug_assert!(*taken >= amount, "more is given back than was taken");
        *taken = taken.saturating_sub(amount);
    }

    /// What a class has.
    #[must_use]
    pub fn taken(&self, class: Class) -> u64 {
        self.taken[class.rank()]
    }

    /// What a class has at least, once it asked.
    #[must_use]
    pub fn minimum(&self, class: Class) -> u64 {
        self.minima[class.rank()]
    }

    /// The largest that is ever let in of a class beside others.
    #[must_use]
    pub fn largest(&self, class: Class) -> u64 {
        let others: u64 = self.minima.iter().sum::<u64>() - self.minimum(class);
        self.all - others
    }

    /// Whether it is there, whoever is due.
    fn has_room(&self, at: usize, amount: u64) -> bool {
        let Some(own) = self.taken[at].checked_add(amount) else { return false };
        let is_within = own <= self.minima[at];
        // What a class behind another asked keeps the minimum of that one too, or it would be taken from it.
        let last_asking = self.claims.iter().rposition(Option::is_some);
        let kept = |of: usize| match of.cmp(&at) {
            Ordering::Less => self.taken[of].max(self.minima[of]),
            Ordering::Equal => own,
            Ordering::Greater if is_within || Some(of) > last_asking => self.taken[of],
            Ordering::Greater => self.taken[of].max(self.minima[of]),
        };
        (0..CLASSES).map(|of| u128::from(kept(of))).sum::<u128>() <= u128::from(self.all)
    }

    /// What is larger than all there is passes when nothing else is there.
    fn may_be_alone(&self, at: usize) -> bool {
        let is_empty = self.taken.iter().all(|taken| *taken == 0);
        at == self.first && is_empty
    }

    /// The class that is due, of several the one that has waited longest.
    fn due(&self) -> Option<Due> {
        let due = |at: usize| {
            let refused = self.claims[at]?.refused?;
            let needs_all = refused.amount > self.largest(Class::ALL[at]);
            let is_due = refused.overtaken >= OVERTAKEN_MAX[at];
            // Whoever asks no more is passed by in the end.
            (is_due && refused.held_up < HELD_UP_MAX).then_some((refused.since, Due { at, needs_all }))
        };
        (0..CLASSES).filter_map(due).min_by_key(|(since, _)| *since).map(|(_, due)| due)
    }

    /// One of this class was let in beyond its minimum.
    fn overtake(&mut self, by: usize) {
        for (at, claim) in self.claims.iter_mut().enumerate().filter(|(at, _)| *at != by) {
            if let Some(refused) = claim.as_mut().and_then(|claim| claim.refused.as_mut()) {
                refused.pass(at);
            }
        }
    }

    fn forget(&mut self) {
        for claim in &mut self.claims {
            *claim = claim.filter(|claim| self.asks - claim.asked <= FORGOTTEN_ASKS);
        }
    }
}
