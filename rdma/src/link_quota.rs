//! Limits the links of each caller of a node, so that a few busy callers leave links for others.
//!
//! Not here: links themselves (`server.rs`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One in this number of links is reserved for callers that have no link yet.
const RESERVED_DIVISOR: usize = 4;

/// Links of all callers; a certificate identifies a caller.
pub(super) struct LinkQuota {
    links_max: usize,
    links_by_caller: Mutex<HashMap<Arc<[u8]>, usize>>,
}

impl LinkQuota {
    pub(super) fn new(all: usize) -> Arc<LinkQuota> {
        Arc::new(LinkQuota { links_max: all, links_by_caller: Mutex::default() })
    }

    fn lock_links(&self) -> MutexGuard<'_, HashMap<Arc<[u8]>, usize>> {
        self.links_by_caller.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a link for this caller, or `None` if none is left for it.
    pub(super) fn acquire(self: &Arc<LinkQuota>, caller: &Arc<[u8]>) -> Option<LinkSlot> {
        let mut taken = self.lock_links();
        let free = self.links_max.saturating_sub(taken.values().sum());
        let own = taken.get(caller).copied().unwrap_or(0);
        let kept_free = if own == 0 { 0 } else { self.links_max / RESERVED_DIVISOR };
        if free <= kept_free {
            return None;
        }
        *taken.entry(Arc::clone(caller)).or_default() += 1;
        Some(LinkSlot { quota: Arc::clone(self), caller: Arc::clone(caller) })
    }
}

/// One link of a caller, released on drop.
pub(super) struct LinkSlot {
    quota: Arc<LinkQuota>,
    caller: Arc<[u8]>,
}

impl Drop for LinkSlot {
    fn drop(&mut self) {
        let mut taken = self.quota.lock_links();
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
    fn a_greedy_caller_leaves_links_for_new_callers() {
        let shares = LinkQuota::new(8);
        let greedy: Vec<LinkSlot> = std::iter::from_fn(|| shares.acquire(&caller(1))).collect();
        assert_eq!(greedy.len(), 6);
        let second = shares.acquire(&caller(2)).unwrap();
        assert!(shares.acquire(&caller(2)).is_none(), "the caller already has one");
        let third = shares.acquire(&caller(3)).unwrap();
        assert!(shares.acquire(&caller(4)).is_none(), "no link is left");
        drop((second, third, greedy));
        assert!(shares.lock_links().is_empty());
        assert!(LinkQuota::new(1).acquire(&caller(1)).is_some());
    }
}
