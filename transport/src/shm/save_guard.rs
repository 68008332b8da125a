//! Keeps the lease of a save while any part of it may still be written.
//!
//! Long copies run on another thread, and an aborted save is gone from here before they have
//! noticed. A release that overtook them would leave a new block without a lease. A client that
//! learned of the end too early would offer again before the slots are free. Not here: the copies
//! (`serving.rs`, `layered_save.rs`), and the leases (`grants.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use super::grants::{ConnectionGrants, OperationGuard};
use super::packet::NodePacket;
use crate::SaveSession;

/// Number of saves of a connection that may still write blocks.
#[derive(Clone, Default)]
pub(super) struct ActiveSaves(watch::Sender<usize>);

impl ActiveSaves {
    /// Waits until no save is active.
    pub(super) async fn wait_idle(&self) {
        // Never fails, because this is itself a sender.
        let _ = self.0.subscribe().wait_for(|saves| *saves == 0).await;
    }
}

/// Guard of a started save; dropped with the last copy that belongs to it.
pub(super) struct SaveGuard {
    op: u64,
    lending: Arc<ConnectionGrants>,
    /// `None` only during drop.
    operation: Option<OperationGuard>,
    active_saves: ActiveSaves,
    /// Whether to send `Ended` to the client on drop.
    reports_end: AtomicBool,
}

impl SaveGuard {
    pub(super) fn new(
        op: u64,
        lending: Arc<ConnectionGrants>,
        begun: OperationGuard,
        copies: &ActiveSaves,
    ) -> Arc<SaveGuard> {
        copies.0.send_modify(|saves| *saves += 1);
        let (begun, copies) = (Some(begun), copies.clone());
        Arc::new(SaveGuard {
            op,
            lending,
            operation: begun,
            active_saves: copies,
            reports_end: AtomicBool::new(false),
        })
    }

    /// Has the client told of an early end once the last copy has finished.
    pub(super) fn report_end(&self) {
        self.reports_end.store(true, Ordering::Relaxed);
    }
}

impl Drop for SaveGuard {
    fn drop(&mut self) {
        // The lease first, because a client that learns of the end may release it.
        drop(self.operation.take());
        if self.reports_end.load(Ordering::Relaxed) {
            self.lending.post(&NodePacket::Ended { op: self.op });
        }
        self.active_saves.0.send_modify(|saves| *saves -= 1);
    }
}

/// A session of the service, dropped before the guard of its lease.
pub(super) struct GuardedSession {
    pub(super) session: Box<dyn SaveSession>,
    _guard: Arc<SaveGuard>,
}

impl GuardedSession {
    pub(super) fn new(session: Box<dyn SaveSession>, held: &Arc<SaveGuard>) -> GuardedSession {
        GuardedSession { session, _guard: Arc::clone(held) }
    }
}
