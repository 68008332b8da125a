//! Tracks requests that the router placed until their answers end, and reports each end to the
//! router exactly once.
//!
//! Not here: how an answer's usage is read (`usage_scanner.rs`), and how the router uses it
//! (`kvfleet_router::RouterHandle`).

use kv_core::id::InstanceId;
use kvfleet_router::RouterHandle;

use crate::usage_scanner::AnswerUsage;

/// Guard of one request in flight. Dropping it before the answer ends reports that the request was
/// abandoned: its caller disconnected or its engine failed.
#[derive(Debug)]
pub(crate) struct InFlightGuard {
    router: Option<RouterHandle>,
    request: u64,
}

impl InFlightGuard {
    /// Starts tracking a request that was sent where the router chose.
    pub(crate) fn new(router: &RouterHandle, request: u64) -> InFlightGuard {
        InFlightGuard { router: Some(router.clone()), request }
    }

    /// Reports that `instance` finished the answer.
    pub(crate) fn finish(mut self, instance: InstanceId, usage: AnswerUsage) {
        if let Some(desk) = self.router.take() {
            desk.record_end(self.request, instance, usage.tokens, usage.tbt);
        }
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        if let Some(desk) = self.router.take() {
            desk.record_abort(self.request);
        }
    }
}
