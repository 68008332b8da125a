//! Requests that run elsewhere than they were sent, as the gateway reports: their counted load
//! moves along.
//!
//! It happens when an engine rejects a request and another takes it, or the sender tries the next
//! candidate. Not here: the counted load (`kv_core::schedule::Counted`), and the decision log
//! (`crate::view::decision_log`).

use kv_core::id::{BlockHash, InstanceId, Timestamp};
use kv_core::schedule::{self, Fleet, InstanceFilter, PrefixLocations, RouteRecord, RouteRequest};
use kvfleet_proto::pb;

use super::{ServerState, check, route};
use crate::view::decision_log::Placement;
use crate::view::holders;

/// Removes the counted load and expected prefix of a request from the instance that it was sent to.
pub(super) fn uncount(
    shared: &ServerState,
    asked: &RouteRequest,
    hashes: &[BlockHash],
    is_text: bool,
    now: Timestamp,
) {
    let counted = shared.history.decisions().take_counted(asked.request.0);
    let Some(counted) = counted else { return };
    shared.fleet.uncount(&counted, now);
    shared.history.retract(asked, hashes, &counted, is_text);
}

/// Records that a routed request runs on `instance`, and continues on `decode_instance` if one is named. The
/// request must equal the routed one. Has no effect if it is invalid or already known.
pub(crate) fn record_move(
    shared: &ServerState,
    request: &pb::RouteRequest,
    instance: InstanceId,
    decode_instance: Option<InstanceId>,
) {
    let number = request.request;
    if !shared.history.decisions().is_move(number, instance, decode_instance) {
        return;
    }
    let Ok(hashes) = check::hashes("hashes", &request.hashes) else { return };
    let Ok(asked) = route::parse_request(request, &hashes) else { return };
    let now = shared.clock.now();
    uncount(shared, &asked, &hashes, request.text, now);
    let control = shared.control().published.read();
    let (matched, _) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    drop(control);
    let resident = route::resident_prefixes(shared, &asked, &hashes, request.text, now);
    let held = PrefixLocations { matched: &matched, resident: &resident, in_flight: &[] };
    let choose = |fleet: &Fleet| {
        let there =
            InstanceFilter { candidates: Some(&[instance]), is_pinned: true, ..InstanceFilter::default() };
        schedule::choose_filtered(&asked, held, there, fleet, now)
    };
    let decision = shared.fleet.record_move(choose, decode_instance, now);
    if let Some(decision) = &decision {
        route::record_expected(shared, &asked, &hashes, request.text, decision, now);
    }
    let counted = decision.as_ref().map(|decision| RouteRecord::of(decision, now));
    // An unknown instance has no prediction.
    let there = Placement { instance, decode_instance, ..Placement::default() };
    shared.history.decisions().record_move(
        number,
        decision.as_ref().map_or(there, Placement::from_decision),
        counted,
    );
    tracing::debug!(request = number, instance = instance.0, "a request moved to another instance");
}
