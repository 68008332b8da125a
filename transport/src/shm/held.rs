//! What keeps the lease of a save for as long as anything of it may still be put.
//!
//! Long copies run on another thread, and a save that is given up is gone from here before they have noticed. A release that overtook
//! them would leave a block that comes in under no lease, and a client that heard of the end would offer again before the slots are
//! back. Not here: what is copied (`serving.rs`, `layered.rs`), and which leases there are (`lending.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use super::lending::{Begun, Lending};
use super::packet::ToClient;
use crate::SaveSession;

/// How many saves of a connection may still put something.
#[derive(Clone, Default)]
pub(super) struct Copies(watch::Sender<usize>);

impl Copies {
    /// Waits until none does.
    pub(super) async fn ended(&self) {
        // Never fails: this is a sender itself.
        let _ = self.0.subscribe().wait_for(|saves| *saves == 0).await;
    }
}

/// A save that was begun, until the last that copies for it has dropped it.
pub(super) struct Held {
    op: u64,
    lending: Arc<Lending>,
    /// Taken at the end.
    begun: Option<Begun>,
    copies: Copies,
    /// Whether its client is to hear that it ended.
    says_ended: AtomicBool,
}

impl Held {
    pub(super) fn new(op: u64, lending: Arc<Lending>, begun: Begun, copies: &Copies) -> Arc<Held> {
        copies.0.send_modify(|saves| *saves += 1);
        let (begun, copies) = (Some(begun), copies.clone());
        Arc::new(Held { op, lending, begun, copies, says_ended: AtomicBool::new(false) })
    }

    /// It ends before its end, and the client hears of it when nothing of it goes on any more.
    pub(super) fn say_ended(&self) {
        self.says_ended.store(true, Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // The lease first: whoever hears of the end may release it.
        drop(self.begun.take());
        if self.says_ended.load(Ordering::Relaxed) {
            self.lending.post(&ToClient::Ended { op: self.op });
        }
        self.copies.0.send_modify(|saves| *saves -= 1);
    }
}

/// A session of the service, dropped before what holds its lease.
pub(super) struct Saving {
    pub(super) session: Box<dyn SaveSession>,
    _held: Arc<Held>,
}

impl Saving {
    pub(super) fn new(session: Box<dyn SaveSession>, held: &Arc<Held>) -> Saving {
        Saving { session, _held: Arc::clone(held) }
    }
}
