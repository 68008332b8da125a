//! What each class offers as a victim: its longest unused block and its newest, with their value as long as it is true.
//!
//! Kept apart from the queues so that asking for a victim reads two short arrays and no block. Not here: which blocks
//! the offers stand for ([`super`]).

use super::classes::CLASSES;
use crate::id::Timestamp;

/// The value of a block until its age reaches the next band.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    pub(super) value: f32,
    pub(super) last_use: Timestamp,
    pub(super) until: Timestamp,
}

impl Offer {
    /// Nothing is offered.
    pub(super) const NONE: Offer =
        Offer { value: f32::INFINITY, last_use: Timestamp(u64::MAX), until: Timestamp(u64::MAX) };

    /// Whether `self` leaves before `other`: worth less, or else longer unused.
    fn leaves_before(&self, other: &Offer) -> bool {
        self.value < other.value || self.value == other.value && self.last_use < other.last_use
    }
}

/// Where an offer stands: whether it is the newest block of its class, and the class.
pub(super) type Place = (bool, usize);

/// The offers of all classes.
#[derive(Clone, Debug)]
pub(super) struct Offers {
    coldest: [Offer; CLASSES],
    freshest: [Offer; CLASSES],
    /// Their values once more, the newest blocks' behind the others: what every victim reads.
    values: [f32; 2 * CLASSES],
    /// No offer ceases to be true before.
    due: Timestamp,
}

impl Default for Offers {
    fn default() -> Self {
        Offers {
            coldest: [Offer::NONE; CLASSES],
            freshest: [Offer::NONE; CLASSES],
            values: [f32::INFINITY; 2 * CLASSES],
            due: Timestamp(u64::MAX),
        }
    }
}

impl Offers {
    pub(super) fn set(&mut self, (is_fresh, class): Place, offer: Offer) {
        let offers = if is_fresh { &mut self.freshest } else { &mut self.coldest };
        offers[class] = offer;
        self.values[class + usize::from(is_fresh) * CLASSES] = offer.value;
        self.due = self.due.min(offer.until);
    }

    pub(super) fn set_coldest(&mut self, class: usize, offer: Offer) {
        self.set((false, class), offer);
    }

    pub(super) fn set_freshest(&mut self, class: usize, offer: Offer) {
        self.set((true, class), offer);
    }

    /// The newest block of a class is another one now: to be found before the next victim.
    pub(super) fn forget_freshest(&mut self, class: usize) {
        self.set((true, class), Offer { until: Timestamp(0), ..Offer::NONE });
    }

    /// Whether any offer may no longer be true. To be followed by renewing all that [`Offers::due`] names.
    pub(super) fn is_any_due(&mut self, now: Timestamp) -> bool {
        let is_due = self.due <= now;
        if is_due {
            let later = self.coldest.iter().chain(&self.freshest).map(|offer| offer.until);
            self.due = later.filter(|until| *until > now).min().unwrap_or(Timestamp(u64::MAX));
        }
        is_due
    }

    /// Which offers of a class are no longer true: of its coldest block, of its newest.
    pub(super) fn due(&self, class: usize, now: Timestamp) -> (bool, bool) {
        (self.coldest[class].until <= now, self.freshest[class].until <= now)
    }

    /// The offer that leaves first. Of equals the coldest, then the lower class.
    pub(super) fn least(&self) -> Option<Place> {
        // Eight lanes at a time, so that the processor can do so too.
        let mut lanes = [f32::INFINITY; 8];
        for values in self.values.chunks_exact(8) {
            for (lane, &value) in lanes.iter_mut().zip(values) {
                *lane = if value < *lane { value } else { *lane };
            }
        }
        let value =
            lanes.into_iter().fold(f32::INFINITY, |least, lane| if lane < least { lane } else { least });
        let (mut least, mut place) = (&Offer::NONE, None);
        for at in (0..2 * CLASSES).filter(|&at| self.values[at] == value) {
            let (is_fresh, class) = (at >= CLASSES, at % CLASSES);
            let offer = if is_fresh { &self.freshest[class] } else { &self.coldest[class] };
            if offer.leaves_before(least) {
                (least, place) = (offer, Some((is_fresh, class)));
            }
        }
        place
    }
}
