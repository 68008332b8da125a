//! How many links each caller of a node has: a few callers that take many leave some for others.
//!
//! Not here: what a link is (`offer.rs`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Part of all links that only callers get who have none.
const KEPT_FREE: usize = 4;

/// Links of all callers, which their certificates tell apart.
pub(super) struct Shares {
    all: usize,
    taken: Mutex<HashMap<Arc<[u8]>, usize>>,
}

impl Shares {
    pub(super) fn new(all: usize) -> Arc<Shares> {
        Arc::new(Shares { all, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, HashMap<Arc<[u8]>, usize>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more for this caller, if there is one for it.
    pub(super) fn take(self: &Arc<Shares>, caller: &Arc<[u8]>) -> Option<Share> {
        let mut taken = self.taken();
        let free = self.all.saturating_sub(taken.values().sum());
        let own = taken.get(caller).copied().unwrap_or(0);
        let kept_free = if own == 0 { 0 } else { self.all / KEPT_FREE };
        if free <= kept_free {
            return None;
        }
        *taken.entry(Arc::clone(caller)).or_default() += 1;
        Some(Share { of: Arc::clone(self), caller: Arc::clone(caller) })
    }
}

/// One link of a caller, until it is dropped.
pub(super) struct Share {
    of: Arc<Shares>,
    caller: Arc<[u8]>,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.of.taken();
        if let Some(own) = taken.get_mut(&self.caller) {
            *own -= 1;
            if *own == 0 {
                taken.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn caller(number: u8) -> Arc<[u8]> {
        Arc::from([number])
    }

    #[test]
    fn a_caller_that_takes_all_it_gets_leaves_some_for_those_that_have_none() {
        let shares = Shares::new(8);
        let greedy: Vec<Share> = std::iter::from_fn(|| shares.take(&caller(1))).collect();
        assert_eq!(greedy.len(), 6);
        let second = shares.take(&caller(2)).unwrap();
        assert!(shares.take(&caller(2)).is_none(), "it has one");
        let third = shares.take(&caller(3)).unwrap();
        assert!(shares.take(&caller(4)).is_none(), "there are no more");
        drop((second, third, greedy));
        assert!(shares.taken().is_empty());
        assert!(Shares::new(1).take(&caller(1)).is_some());
    }
}
