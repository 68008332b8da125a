//! What an instance comes to if it is given these requests and no others: a copy of it runs on, beside the fleet's time.
//!
//! Not here: the instance itself (`engine.rs`), and who is given what (`oracle.rs`).

use super::engine::{Ended, Engine, Job};

/// When the first tokens of all requests are out that wait there, and of those that come, each at its time and in this order: the times from `now_ns`
/// on, summed up.
pub(super) fn sum_of_firsts_ns(engine: &Engine, come: &[(u64, Job)], now_ns: u64) -> u128 {
    let mut sum_ns = 0;
    firsts(engine, come, now_ns, |_, at_ns| sum_ns += u128::from(at_ns - now_ns));
    sum_ns
}

/// Says of each of these requests when its first token is out.
pub(super) fn firsts(engine: &Engine, come: &[(u64, Job)], mut now_ns: u64, mut say: impl FnMut(usize, u64)) {
    let mut engine = engine.copy();
    let mut come = come.iter().peekable();
    let mut left = engine.without_first() + come.len();
    let mut ended = Vec::new();
    while left > 0 {
        let next = come.peek().map(|(at_ns, _)| *at_ns);
        let all = [next, engine.step_ends_ns(), engine.wakes_ns(now_ns)];
        let Some(at_ns) = all.into_iter().flatten().min() else { break };
        now_ns = now_ns.max(at_ns);
        // As in the fleet: who comes does so before a step of that moment ends.
        if let Some((_, job)) = come.next_if(|(at_ns, _)| *at_ns <= now_ns) {
            engine.put(*job);
        } else {
            engine.end(now_ns, &mut ended);
        }
        for one in ended.drain(..) {
            if let Ended::First { nth, .. } = one {
                left -= 1;
                say(nth, now_ns);
            }
        }
        // Either leaves behind when the step ends that then runs.
        let _ = engine.interrupt(now_ns).or_else(|| engine.begin(now_ns));
    }
}
