//! Victim candidates of each class: the longest unused block and the newest, with a value and its
//! expiry.
//!
//! Apart from the queues, so that a victim search reads two short arrays and no block. Not here:
//! the blocks of the candidates ([`super`]).

use super::classes::CLASSES;
use crate::id::Timestamp;

/// The value of a block until its age reaches the next band.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassCandidate {
    pub(super) value: f32,
    pub(super) last_use: Timestamp,
    pub(super) expires: Timestamp,
}

impl ClassCandidate {
    /// No candidate.
    pub(super) const NONE: ClassCandidate =
        ClassCandidate { value: f32::INFINITY, last_use: Timestamp(u64::MAX), expires: Timestamp(u64::MAX) };
}

/// Position of a candidate: whether it is the newest end of its class, and the class.
pub(super) type CandidateSlot = (bool, usize);

/// Number of positions; the newest ends come last.
const SLOTS: usize = 2 * CLASSES;
/// Positions per group with a common earliest expiry.
const GROUP: usize = 8;
const GROUPS: usize = SLOTS / GROUP;
const _: () = assert!(SLOTS.is_power_of_two() && SLOTS.is_multiple_of(GROUP) && SLOTS <= 256);

/// The candidates of all classes.
#[derive(Clone, Debug)]
pub(super) struct ClassCandidates {
    values: [f32; SLOTS],
    expiries: [Timestamp; SLOTS],
    last_uses: [Timestamp; SLOTS],
    /// Least value of every group.
    least: [f32; GROUPS],
    /// Earliest expiry in every group.
    first_expiry: [Timestamp; GROUPS],
    /// Earliest expiry of all.
    next_expiry: Timestamp,
}

impl Default for ClassCandidates {
    fn default() -> Self {
        ClassCandidates {
            values: [ClassCandidate::NONE.value; SLOTS],
            expiries: [ClassCandidate::NONE.expires; SLOTS],
            last_uses: [ClassCandidate::NONE.last_use; SLOTS],
            least: [ClassCandidate::NONE.value; GROUPS],
            first_expiry: [ClassCandidate::NONE.expires; GROUPS],
            next_expiry: Timestamp(u64::MAX),
        }
    }
}

/// A candidate with no expiry is never due.
fn clamp_now(now: Timestamp) -> Timestamp {
    now.min(Timestamp(u64::MAX - 1))
}

/// The least of numbers without NaN.
fn least_of(values: &[f32]) -> f32 {
    // Four lanes at a time, so that the compiler can vectorise.
    let mut lanes = [f32::INFINITY; 4];
    for values in values.chunks_exact(4) {
        for (lane, &value) in lanes.iter_mut().zip(values) {
            *lane = if value < *lane { value } else { *lane };
        }
    }
    lanes.into_iter().fold(f32::INFINITY, |least, lane| if lane < least { lane } else { least })
}

impl ClassCandidates {
    pub(super) fn set(&mut self, (is_fresh, class): CandidateSlot, offer: ClassCandidate) {
        let at = class + usize::from(is_fresh) * CLASSES;
        (self.values[at], self.expiries[at], self.last_uses[at]) =
            (offer.value, offer.expires, offer.last_use);
        let group = at / GROUP;
        self.least[group] = least_of(&self.values[group * GROUP..(group + 1) * GROUP]);
        self.first_expiry[group] = self.expiries[group * GROUP..(group + 1) * GROUP]
            .iter()
            .copied()
            .min()
            .unwrap_or(ClassCandidate::NONE.expires);
        self.next_expiry = self.next_expiry.min(offer.expires);
    }

    /// Value of the next victim; infinite if there is none.
    pub(super) fn least_value(&self) -> f32 {
        least_of(&self.least)
    }

    pub(super) fn set_coldest(&mut self, class: usize, offer: ClassCandidate) {
        self.set((false, class), offer);
    }

    pub(super) fn set_newest(&mut self, class: usize, offer: ClassCandidate) {
        self.set((true, class), offer);
    }

    /// Marks the newest candidate of a class as unknown: it is found before the next victim search.
    pub(super) fn invalidate_newest(&mut self, class: usize) {
        self.set((true, class), ClassCandidate { expires: Timestamp(0), ..ClassCandidate::NONE });
    }

    /// Whether any candidate may have expired.
    pub(super) fn has_expired(&self, now: Timestamp) -> bool {
        self.next_expiry <= clamp_now(now)
    }

    /// An expired candidate, to be updated before the next call.
    pub(super) fn next_expired(&mut self, now: Timestamp) -> Option<CandidateSlot> {
        let now = clamp_now(now);
        let Some(group) = self.first_expiry.iter().position(|&until| until <= now) else {
            self.next_expiry =
                self.first_expiry.iter().copied().min().unwrap_or(ClassCandidate::NONE.expires);
            return None;
        };
        let of_group = group * GROUP..(group + 1) * GROUP;
        let at = of_group.start + self.expiries[of_group].iter().position(|&until| until <= now)?;
        Some((at >= CLASSES, at % CLASSES))
    }

    /// Position of the next victim: least value, then longest unused, then the lower position.
    pub(super) fn least(&self) -> Option<CandidateSlot> {
        let value = least_of(&self.least);
        if value == ClassCandidate::NONE.value {
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
    fn least_and_expired_match_a_plain_scan() {
        let (mut offers, mut plain, mut state) =
            (ClassCandidates::default(), vec![ClassCandidate::NONE; SLOTS], 7_u64);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for now in 1..20_000 {
            let at = random(SLOTS as u64) as usize;
            let offer = match random(3) {
                0 => ClassCandidate::NONE,
                // Many have equal values.
                _ => ClassCandidate {
                    value: random(5) as f32,
                    last_use: Timestamp(random(4)),
                    expires: Timestamp(now + 1 + random(900)),
                },
            };
            plain[at] = offer;
            offers.set((at >= CLASSES, at % CLASSES), offer);
            let least = (0..SLOTS).filter(|&at| plain[at].value < f32::INFINITY).reduce(|left, right| {
                let order = |at: usize| (plain[at].value.to_bits(), plain[at].last_use);
                if order(right) < order(left) { right } else { left }
            });
            assert_eq!(offers.least(), least.map(|at| (at >= CLASSES, at % CLASSES)), "step {now}");
            let now = Timestamp(now);
            assert!(offers.has_expired(now) || plain.iter().all(|offer| offer.expires > now), "step {now:?}");
            while let Some((is_fresh, class)) = offers.next_expired(now) {
                let at = class + usize::from(is_fresh) * CLASSES;
                assert!(plain[at].expires <= now, "step {now:?}");
                plain[at] = ClassCandidate::NONE;
                offers.set((is_fresh, class), ClassCandidate::NONE);
            }
            assert!(plain.iter().all(|offer| offer.expires > now), "step {now:?}");
        }
    }

    #[test]
    fn candidate_without_expiry_never_expires() {
        let mut offers = ClassCandidates::default();
        offers.set_coldest(
            3,
            ClassCandidate { value: 1.0, last_use: Timestamp(0), expires: Timestamp(u64::MAX) },
        );
        assert!(
            !offers.has_expired(Timestamp(u64::MAX)) && offers.next_expired(Timestamp(u64::MAX)).is_none()
        );
    }
}
