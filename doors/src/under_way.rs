//! Requests that the router was asked about, until their answers end: it is told of each once, in whatever way it ends.
//!
//! Not here: what is read of an answer (`tally.rs`), and what the router makes of it (`kvfleet_router::Desk`).

use kv_core::id::InstanceId;
use kvfleet_router::Desk;

use crate::tally::Said;

/// One of them. Dropped before its answer has ended, nobody waits for it any more: its caller left, or its engine failed.
#[derive(Debug)]
pub(crate) struct UnderWay {
    desk: Option<Desk>,
    request: u64,
}

impl UnderWay {
    /// Of a request that was sent as the router chose.
    pub(crate) fn new(desk: &Desk, request: u64) -> UnderWay {
        UnderWay { desk: Some(desk.clone()), request }
    }

    /// Its answer ended, which came from this instance.
    pub(crate) fn ended(mut self, instance: InstanceId, said: Said) {
        if let Some(desk) = self.desk.take() {
            desk.ended(self.request, instance, said.tokens, said.tbt);
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(desk) = self.desk.take() {
            desk.left(self.request);
        }
    }
}
