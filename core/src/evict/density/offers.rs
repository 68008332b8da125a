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
}

/// Where an offer stands: whether it is the newest block of its class, and the class.
pub(super) type Place = (bool, usize);

/// Places, the newest blocks' behind the others.
const PLACES: usize = 2 * CLASSES;
/// Places whose earliest end is kept together.
const GROUP: usize = 8;
const GROUPS: usize = PLACES / GROUP;
const _: () = assert!(PLACES.is_power_of_two() && PLACES.is_multiple_of(GROUP) && PLACES <= 256);

/// The offers of all classes.
#[derive(Clone, Debug)]
pub(super) struct Offers {
    values: [f32; PLACES],
    untils: [Timestamp; PLACES],
    last_uses: [Timestamp; PLACES],
    /// Of every group the least value.
    least: [f32; GROUPS],
    /// Of every group, when the first of its offers ceases to be true.
    first_due: [Timestamp; GROUPS],
    /// No offer ceases to be true before.
    due: Timestamp,
}

impl Default for Offers {
    fn default() -> Self {
        Offers {
            values: [Offer::NONE.value; PLACES],
            untils: [Offer::NONE.until; PLACES],
            last_uses: [Offer::NONE.last_use; PLACES],
            least: [Offer::NONE.value; GROUPS],
            first_due: [Offer::NONE.until; GROUPS],
            due: Timestamp(u64::MAX),
        }
    }
}

/// What is true to the end of time is never due.
fn before_the_end(now: Timestamp) -> Timestamp {
    now.min(Timestamp(u64::MAX - 1))
}

/// The least of numbers that are none of them NaN.
fn least_of(values: &[f32]) -> f32 {
    // Four lanes at a time, so that the processor can do so too.
    let mut lanes = [f32::INFINITY; 4];
    for values in values.chunks_exact(4) {
        for (lane, &value) in lanes.iter_mut().zip(values) {
            *lane = if value < *lane { value } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::INFINITY, |least, lane| if lane < least { lane } else { least })
}

impl Offers {
    pub(super) fn set(&mut self, (is_fresh, class): Place, offer: Offer) {
        let at = class + usize::from(is_fresh) * CLASSES;
        (self.values[at], self.untils[at], self.last_uses[at]) = (offer.value, offer.until, offer.last_use);
        let group = at / GROUP;
        self.least[group] = least_of(&self.values[group * GROUP..(group + 1) * GROUP]);
        self.first_due[group] = self.untils[group * GROUP..(group + 1) * GROUP]
            .iter()
            .copied()
            .min()
            .unwrap_or(Offer::NONE.until);
        self.due = self.due.min(offer.until);
    }

    /// What the next victim is worth; endless without one.
    pub(super) fn least_value(&self) -> f32 {
        least_of(&self.least)
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

    /// Whether any offer may no longer be true.
    pub(super) fn is_any_due(&self, now: Timestamp) -> bool {
        self.due <= before_the_end(now)
    }

    /// An offer that is no longer true: to be renewed before the next is asked for.
    pub(super) fn next_due(&mut self, now: Timestamp) -> Option<Place> {
        let now = before_the_end(now);
        let Some(group) = self.first_due.iter().position(|&until| until <= now) else {
            self.due = self.first_due.iter().copied().min().unwrap_or(Offer::NONE.until);
            return None;
        };
        let of_group = group * GROUP..(group + 1) * GROUP;
        let at = of_group.start + self.untils[of_group].iter().position(|&until| until <= now)?;
        Some((at >= CLASSES, at % CLASSES))
    }

    /// The offer that leaves first. Of equals the coldest, then the lower class.
    pub(super) fn least(&self) -> Option<Place> {
        let value = least_of(&self.least);
        if value == Offer::NONE.value {
            return None;
        }
        let (mut first, mut place) = (Timestamp(u64::MAX), None);
        for group in (0..GROUPS).filter(|&group| self.least[group] == value) {
            for at in (group * GROUP..(group + 1) * GROUP).filter(|&at| self.values[at] == value) {
                if self.last_uses[at] < first {
                    (first, place) = (self.last_uses[at], Some((at >= CLASSES, at % CLASSES)));
                }
            }
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_that_of_all_places_and_what_is_due_is_named() {
        let (mut offers, mut plain, mut state) = (Offers::default(), vec![Offer::NONE; PLACES], 7_u64);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for now in 1..20_000 {
            let at = random(PLACES as u64) as usize;
            let offer = match random(3) {
                0 => Offer::NONE,
                // Many are equal.
                _ => Offer {
                    value: random(5) as f32,
                    last_use: Timestamp(random(4)),
                    until: Timestamp(now + 1 + random(900)),
                },
            };
            plain[at] = offer;
            offers.set((at >= CLASSES, at % CLASSES), offer);
            let least = (0..PLACES).filter(|&at| plain[at].value < f32::INFINITY).reduce(|left, right| {
                let order = |at: usize| (plain[at].value.to_bits(), plain[at].last_use);
                if order(right) < order(left) { right } else { left }
            });
            assert_eq!(offers.least(), least.map(|at| (at >= CLASSES, at % CLASSES)), "step {now}");
            let now = Timestamp(now);
            assert!(offers.is_any_due(now) || plain.iter().all(|offer| offer.until > now), "step {now:?}");
            while let Some((is_fresh, class)) = offers.next_due(now) {
                let at = class + usize::from(is_fresh) * CLASSES;
                assert!(plain[at].until <= now, "step {now:?}");
                plain[at] = Offer::NONE;
                offers.set((is_fresh, class), Offer::NONE);
            }
            assert!(plain.iter().all(|offer| offer.until > now), "step {now:?}");
        }
    }

    #[test]
    fn what_is_true_to_the_end_of_time_is_never_due() {
        let mut offers = Offers::default();
        offers.set_coldest(3, Offer { value: 1.0, last_use: Timestamp(0), until: Timestamp(u64::MAX) });
        assert!(!offers.is_any_due(Timestamp(u64::MAX)) && offers.next_due(Timestamp(u64::MAX)).is_none());
    }
}
