//! Recent requests: their decisions, and the prefixes and reads that are expected because of them.
//!
//! Not here: what is learned from outcomes (`feedback.rs`), and explanations (`why.rs`).

use std::sync::Arc;

use kv_core::id::{BlockHash, InstanceId, Timestamp};
use kv_core::schedule::{
    Decision, InFlightPrefix, InFlightPrefixes, InferredPrefixes, ResidentPrefix, RouteRecord, RouteRequest,
};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use crate::copies::hot::RemoteReadQueue;
use crate::view::decision_log::DecisionLog;
use crate::windows::QueuedRequests;

/// What this router knows about requests that it routed.
#[derive(Default)]
pub(crate) struct RequestHistory {
    /// Recent decisions and their outcomes.
    decisions: Mutex<DecisionLog>,
    /// Prefixes that instances are computing and have not reported yet.
    in_flight: Mutex<InFlightPrefixes>,
    /// Prefixes sent to instances that do not report residency.
    inferred: Mutex<InferredPrefixes>,
    /// Requests queued at instances; `None` if prefetch windows are disabled.
    queued: Option<Arc<Mutex<QueuedRequests>>>,
    /// Remote reads of decisions; `None` if hot copies are disabled.
    remote_reads: Option<RemoteReadQueue>,
}

impl RequestHistory {
    pub(crate) fn new(
        queued: Option<Arc<Mutex<QueuedRequests>>>,
        remote_reads: Option<RemoteReadQueue>,
    ) -> RequestHistory {
        RequestHistory { queued, remote_reads, ..RequestHistory::default() }
    }

    /// Recent decisions and their outcomes.
    pub(super) fn decisions(&self) -> MutexGuard<'_, DecisionLog> {
        self.decisions.lock()
    }

    /// Records a prefix that the chosen instance will compute.
    pub(super) fn record_in_flight(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        now: Timestamp,
    ) {
        self.in_flight.lock().record(asked, hashes, decision, now);
    }

    /// Records a prefix that the chosen instance probably keeps in `capacity_tokens` of memory.
    pub(super) fn record_inferred(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        capacity_tokens: u64,
        now: Timestamp,
    ) {
        self.inferred.lock().record(asked, hashes, decision, capacity_tokens, now);
    }

    /// Adds a request to the prefetch windows.
    pub(super) fn record_queued(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        now: Timestamp,
    ) {
        if let Some(queued) = &self.queued {
            queued.lock().record(asked.tenant, decision, hashes, now);
        }
    }

    /// Removes a request from the prefetch windows.
    pub(super) fn stop_waiting(&self, request: u64) {
        if let Some(queued) = &self.queued {
            queued.lock().remove(request);
        }
    }

    /// Records the remote reads of a decision; `held_blocks` of the prefix are on nodes.
    pub(super) fn record_remote_reads(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        decision: &Decision,
        held_blocks: u32,
    ) {
        if let Some(reads) = &self.remote_reads {
            reads.record(asked, hashes, decision, held_blocks);
        }
    }

    /// Removes the expected prefixes of a request. Has no effect for a prefix that was not recorded.
    pub(super) fn retract(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        counted: &RouteRecord,
        is_text: bool,
    ) {
        self.in_flight.lock().retract(asked, hashes, counted);
        if is_text {
            self.inferred.lock().retract(asked, hashes, counted);
        }
        self.stop_waiting(asked.request.0);
    }

    /// Instances that are computing leading blocks of the request for other requests.
    pub(super) fn in_flight(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        now: Timestamp,
    ) -> SmallVec<[InFlightPrefix; 4]> {
        self.in_flight.lock().lookup(asked, hashes, now)
    }

    /// Inferred resident prefixes; `capacity_tokens` is the KV capacity of an instance.
    pub(super) fn inferred(
        &self,
        asked: &RouteRequest,
        hashes: &[BlockHash],
        capacity_tokens: impl Fn(InstanceId) -> u64,
        now: Timestamp,
    ) -> Vec<ResidentPrefix> {
        self.inferred.lock().lookup(asked, hashes, capacity_tokens, now)
    }

    /// Forgets the inferred prefixes of an earlier process of the instance.
    pub(super) fn set_incarnation(&self, instance: InstanceId, epoch: u64, now: Timestamp) {
        self.inferred.lock().set_incarnation(instance, epoch, now);
    }
}
