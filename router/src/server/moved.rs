//! Requests that run elsewhere than they were sent, as the door that sent them found out: what was counted of them goes along.
//!
//! An engine takes no request and another one does, or whoever sends requests goes on to the next of the list that it was given. Not here: what is counted
//! (`kv_core::schedule::Counted`), and what is remembered of a request (`crate::view::recall`).

use kv_core::id::{BlockHash, InstanceId, Timestamp};
use kv_core::schedule::{self, Counted, Eligible, Fleet, Held, RouteRequest};
use kvfleet_proto::pb;

use super::{Shared, check, route, why};
use crate::view::holders;
use crate::view::recall::Where;

/// A request does not run where it was sent: nothing waits there for it, and nothing of it will be there.
pub(super) fn take_back(
    shared: &Shared,
    (asked, hashes): (&RouteRequest, &[BlockHash]),
    is_text: bool,
    now: Timestamp,
) {
    let counted = shared.recall.lock().take_counted(asked.request.0);
    let Some(counted) = counted else { return };
    shared.fleet.take_back(&counted, now);
    // What was not entered is not found.
    shared.sent.lock().take_back(asked, hashes, &counted);
    if is_text {
        shared.guessed.lock().take_back(asked, hashes, &counted);
    }
    why::over(shared, asked.request.0);
}

/// A request that was decided here, and is asked again in the same words, runs on this instance, and another one goes on from there if one is named. What makes no
/// sense, or is no news, changes nothing.
pub(crate) fn moved(shared: &Shared, request: &pb::RouteRequest, to: (InstanceId, Option<InstanceId>)) {
    let number = request.request;
    if !shared.recall.lock().is_elsewhere(number, to) {
        return;
    }
    let Ok(hashes) = check::hashes("hashes", &request.hashes) else { return };
    let Ok(asked) = route::asked(request, &hashes) else { return };
    let now = shared.clock.now();
    take_back(shared, (&asked, &hashes), request.text, now);
    let control = shared.control().published.read();
    let (matched, _) = holders::longest_prefix(&shared.groups, &control.index, &hashes);
    drop(control);
    let resident = route::residents(shared, &asked, (&hashes, request.text), now);
    let held = Held { matched: &matched, resident: &resident, coming: &[] };
    let choose = |fleet: &Fleet| {
        let there = Eligible { among: Some(&[to.0]), runs_there: true, ..Eligible::default() };
        schedule::choose_among(&asked, held, there, fleet, now)
    };
    let decision = shared.fleet.moved(choose, to.1, now);
    if let Some(decision) = &decision {
        route::expect(shared, (&asked, &hashes), request.text, decision, now);
    }
    let counted = decision.as_ref().map(|decision| Counted::of(decision, now));
    // Of an instance that is not known nothing is predicted.
    let there = Where { instance: to.0, goes_on: to.1, ..Where::default() };
    shared.recall.lock().moved(number, decision.as_ref().map_or(there, Where::of), counted);
    tracing::debug!(request = number, instance = to.0.0, "a request runs elsewhere than it was sent");
}
