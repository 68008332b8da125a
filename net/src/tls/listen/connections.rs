//! Open connections for control calls: how many one caller may have, and all together.
//!
//! Raft, the log and snapshots need descriptors of the same process, so callers may not take all of
//! them. Routers are not counted. Not here: connections before their handshake
//! (`HandshakeLimits`).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::accept_limits::connection_limit;
use crate::tls::callers::{Caller, CallerShare};
use crate::tls::{Role, RoleKind};

/// Limits on open connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallerLimits {
    /// Of one caller.
    pub(super) per_caller: usize,
    /// Of all callers.
    pub(super) total: usize,
}

/// One caller gets one of this many parts of the open-file limit. Processes that share a certificate
/// are one caller.
const CALLER_FILES_SHARE: usize = 8;

/// All callers get one of this many parts of the open-file limit.
const TOTAL_FILES_SHARE: usize = 2;

impl Default for CallerLimits {
    fn default() -> Self {
        CallerLimits {
            per_caller: connection_limit(usize::MAX, CALLER_FILES_SHARE),
            total: connection_limit(usize::MAX, TOTAL_FILES_SHARE),
        }
    }
}

/// Counts of open connections, by caller. Callers without any are absent.
#[derive(Clone, Debug)]
pub(super) struct ConnectionCounts {
    limits: CallerLimits,
    /// `None` counts certificates without a role.
    open: Arc<Mutex<HashMap<Option<CallerShare>, usize>>>,
}

impl ConnectionCounts {
    pub(super) fn new(limits: CallerLimits) -> ConnectionCounts {
        ConnectionCounts { limits, open: Arc::default() }
    }

    /// Counts a connection of this role; `None` at a limit.
    pub(super) fn open(&self, role: Option<&Role>) -> Option<ConnectionSlot> {
        if role.is_some_and(|role| role.kind() == RoleKind::Router) {
            return Some(ConnectionSlot { counted: None });
        }
        let caller = role.map(|role| Caller::new(role.clone()).share());
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let of_caller = open.get(&caller).copied().unwrap_or(0);
        if of_caller >= self.limits.per_caller || open.values().sum::<usize>() >= self.limits.total {
            return None;
        }
        open.insert(caller, of_caller + 1);
        Some(ConnectionSlot { counted: Some((self.clone(), caller)) })
    }

    fn close(&self, caller: Option<CallerShare>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.get(&caller) {
            Some(2..) => drop(open.entry(caller).and_modify(|count| *count -= 1)),
            _ => drop(open.remove(&caller)),
        }
    }
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    /// `None` for a router.
    counted: Option<(ConnectionCounts, Option<CallerShare>)>,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        if let Some((counts, caller)) = self.counted.take() {
            counts.close(caller);
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::id::{RouterId, TenantId};

    use super::*;

    #[test]
    fn one_caller_cannot_take_all_connections() {
        let counts = ConnectionCounts::new(CallerLimits { per_caller: 2, total: 3 });
        let [one, other, third] = [1, 2, 3].map(|tenant| Role::tenant(TenantId(tenant)));
        let both = [counts.open(Some(&one)), counts.open(Some(&one))];
        assert!(both.iter().all(Option::is_some) && counts.open(Some(&one)).is_none());
        let last = counts.open(Some(&other));
        assert!(last.is_some() && counts.open(Some(&third)).is_none() && counts.open(None).is_none());
        // Routers need theirs for Raft.
        let router = Role::Router(Some(RouterId(1)));
        let routers: Vec<_> = (0..9).map(|_| counts.open(Some(&router))).collect();
        assert!(routers.iter().all(Option::is_some));
        drop(both);
        assert!(counts.open(Some(&third)).is_some() && counts.open(None).is_some());
        drop((last, routers));
        assert!(counts.open.lock().is_ok_and(|open| open.is_empty()));
    }
}
