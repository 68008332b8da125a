//! Predicts the progress of an instance with given requests and no others, by running a copy ahead
//! of the fleet's time.
//!
//! Not here: the instance itself (`engine.rs`), and the assignment of requests (`oracle.rs`).

use super::engine::{Engine, EngineEvent, EngineJob};

/// Sum of the times from `now_ns` to the first token, over all waiting requests and those in
/// `come`, which arrive at their times in this order.
pub(super) fn sum_of_first_token_waits_ns(engine: &Engine, come: &[(u64, EngineJob)], now_ns: u64) -> u128 {
    let mut sum_ns = 0;
    first_tokens(engine, come, now_ns, |_, at_ns| sum_ns += u128::from(at_ns - now_ns));
    sum_ns
}

/// Calls `say` with the time of each request's first token.
pub(super) fn first_tokens(
    engine: &Engine,
    come: &[(u64, EngineJob)],
    mut now_ns: u64,
    mut say: impl FnMut(usize, u64),
) {
    let mut engine = engine.snapshot();
    let mut come = come.iter().peekable();
    let mut left = engine.awaiting_first_token() + come.len();
    let mut ended = Vec::new();
    while left > 0 {
        let next = come.peek().map(|(at_ns, _)| *at_ns);
        let all = [next, engine.step_end_ns(), engine.next_ready_ns(now_ns)];
        let Some(at_ns) = all.into_iter().flatten().min() else { break };
        now_ns = now_ns.max(at_ns);
        // As in the fleet, arrivals precede the end of a step at the same time.
        if let Some((_, job)) = come.next_if(|(at_ns, _)| *at_ns <= now_ns) {
            engine.enqueue(*job);
        } else {
            engine.end_step(now_ns, &mut ended);
        }
        for one in ended.drain(..) {
            if let EngineEvent::FirstToken { nth, .. } = one {
                left -= 1;
                say(nth, now_ns);
            }
        }
        // Both set the end of the current step in the engine.
        let _ = engine.cut_decode_run(now_ns).or_else(|| engine.start_step(now_ns));
    }
}
