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
}

impl Default for Offers {
    fn default() -> Self {
        Offers { coldest: [Offer::NONE; CLASSES], freshest: [Offer::NONE; CLASSES] }
    }
}

impl Offers {
    pub(super) fn set(&mut self, (is_fresh, class): Place, offer: Offer) {
        let offers = if is_fresh { &mut self.freshest } else { &mut self.coldest };
        offers[class] = offer;
    }

    pub(super) fn set_coldest(&mut self, class: usize, offer: Offer) {
        self.coldest[class] = offer;
    }

    pub(super) fn set_freshest(&mut self, class: usize, offer: Offer) {
        self.freshest[class] = offer;
    }

    /// The newest block of a class is another one now: to be found before the next victim.
    pub(super) fn forget_freshest(&mut self, class: usize) {
        self.freshest[class] = Offer { until: Timestamp(0), ..Offer::NONE };
    }

    /// Which offers of a class are no longer true: of its coldest block, of its newest.
    pub(super) fn due(&self, class: usize, now: Timestamp) -> (bool, bool) {
        (self.coldest[class].until <= now, self.freshest[class].until <= now)
    }

    /// The offer that leaves first. Of equals the coldest, then the lower class.
    pub(super) fn least(&self) -> Option<Place> {
        let (mut least, mut place) = (&Offer::NONE, None);
        for (is_fresh, offers) in [(false, &self.coldest), (true, &self.freshest)] {
            for (class, offer) in offers.iter().enumerate() {
                if offer.leaves_before(least) {
                    (least, place) = (offer, Some((is_fresh, class)));
                }
            }
        }
        place
    }
}
