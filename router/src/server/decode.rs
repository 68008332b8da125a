//! Decode admission: whether a request may begin to decode, asked after its prefill.
//!
//! Not here: the prediction (`kv_core::schedule`), and admission on arrival (`route.rs`).

use kv_core::id::InstanceId;
use kvfleet_proto::pb;

use super::{ServerState, millis};

/// Answers the instance that runs a request. Allowed if no limit applies or the instance's decode
/// load is unknown.
pub(super) fn admit(shared: &ServerState, asked: pb::AdmitDecodeRequest) -> pb::AdmitDecodeReply {
    let pb::AdmitDecodeRequest { request, instance, tbt_max_us } = asked;
    let instance = InstanceId(instance);
    // The router's own limit was applied at the decision; an unknown request has no limit.
    let limit_us = match tbt_max_us {
        0 => shared.history.decisions().tbt_limit_us(request, instance),
        said => said,
    };
    answer(shared, instance, true, limit_us)
}

/// Answers a caller that wants to send a routed request to another instance, under the limit of its
/// decision.
pub(crate) fn admit_on(shared: &ServerState, request: u64, instance: InstanceId) -> pb::AdmitDecodeReply {
    let limit_us = shared.history.decisions().get(request).map_or(0, |decided| decided.tbt_max_us);
    answer(shared, instance, false, limit_us)
}

fn answer(
    shared: &ServerState,
    instance: InstanceId,
    pinned_instance: bool,
    limit_us: u64,
) -> pb::AdmitDecodeReply {
    let answer = shared.fleet.admit_decode(instance, pinned_instance, limit_us, shared.clock.now());
    shared.metrics.record_decode_admission(answer.is_ok());
    match answer {
        Ok(tbt_us) => pb::AdmitDecodeReply { admitted: true, tbt_us, ..pb::AdmitDecodeReply::default() },
        Err((tbt_us, rejection)) => pb::AdmitDecodeReply {
            admitted: false,
            tbt_us,
            reason: rejection.reason.to_string(),
            retry_after_ms: millis(rejection.retry_after),
        },
    }
}
