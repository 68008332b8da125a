//! Whether a request may begin to decode, asked once its prompt is computed.
//!
//! Not here: the prediction (`kv_core::schedule`), and who is turned away when it comes (`route.rs`).

use kv_core::id::InstanceId;
use kvfleet_proto::pb;

use super::{Shared, millis};

/// Answers an instance where a request runs; where nobody asked for a limit or nothing is known of what decodes there, it may.
pub(super) fn may(shared: &Shared, asked: pb::MayDecodeRequest) -> pb::MayDecodeReply {
    let pb::MayDecodeRequest { request, instance, tbt_max_us } = asked;
    let instance = InstanceId(instance);
    // What the router is set to was counted when it was decided; of a request that is not known nothing was promised.
    let limit_us = match tbt_max_us {
        0 => shared.recall.lock().limit_us(request, instance),
        said => said,
    };
    answer(shared, (instance, true), limit_us)
}

/// Answers whoever sends a request on to an instance, by the limit that it was decided with, wherever it was sent then.
pub(crate) fn may_there(shared: &Shared, request: u64, instance: InstanceId) -> pb::MayDecodeReply {
    let limit_us = shared.recall.lock().of(request).map_or(0, |decided| decided.tbt_max_us);
    answer(shared, (instance, false), limit_us)
}

fn answer(shared: &Shared, (instance, runs_there): (InstanceId, bool), limit_us: u64) -> pb::MayDecodeReply {
    let answer = shared.fleet.may_decode((instance, runs_there), limit_us, shared.clock.now());
    shared.metrics.decode_asked(answer.is_ok());
    match answer {
        Ok(tbt_us) => pb::MayDecodeReply { may: true, tbt_us, ..pb::MayDecodeReply::default() },
        Err((tbt_us, rejection)) => pb::MayDecodeReply {
            may: false,
            tbt_us,
            reason: rejection.reason.to_string(),
            retry_after_ms: millis(rejection.retry_after),
        },
    }
}
