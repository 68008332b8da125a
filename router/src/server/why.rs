//! Why a request ran where it did and what it missed; and what instances tell of the requests they served.
//!
//! Not here: the reasons (`kv_core::schedule::missing`) and what is remembered (`crate::view::recall`).

use std::time::Duration;

use kv_core::id::{BlockHash, InstanceId, NodeId, Timestamp};
use kv_core::index::Index;
use kv_core::schedule::{
    Counted, Decision, Found, Missing, Paced, Rejection, RouteRequest, Told, Why, missing,
};
use kvfleet_proto::pb;

use super::{Shared, millis};
use crate::view::fleet::Addresses;
use crate::view::holders;
use crate::view::recall::{Answer, Came, Decided, Ended, Outcome, Said, Sent, Where};

/// Outcomes of one report, and misses of one outcome, that are read.
const OUTCOMES_MAX: usize = 256;

/// What was known when a request was decided.
pub(super) struct Known<'a> {
    pub(super) request: &'a RouteRequest,
    pub(super) hashes: &'a [BlockHash],
    /// Which nodes live.
    pub(super) control: &'a Index,
    /// Blocks that live nodes hold, from the first on.
    pub(super) held_blocks: u32,
    /// Whether its blocks are pieces of text, which nobody holds and nobody misses.
    pub(super) is_text: bool,
    /// Whether its hashes are of another identity than the nodes'.
    pub(super) is_foreign: bool,
    /// Whether it comes with a certificate of its tenant's own.
    pub(super) is_tenants: bool,
}

/// The limit between tokens whose keeping the end of a request will show, of what was asked for and the router's own. What a tenant asks for beyond that one may be what
/// nothing can keep, and would take room from all others.
fn taught_us(asked_us: u64, own_us: u64, is_tenants: bool) -> u64 {
    match asked_us {
        0 => 0,
        _ if is_tenants && own_us == 0 => 0,
        asked_us => asked_us.max(own_us),
    }
}

/// Remembers what was decided, and when it was counted, if it was; counts what is missing.
pub(super) fn remember(
    shared: &Shared,
    known: &Known<'_>,
    chosen: &Result<(Decision, Addresses), Rejection>,
    counted_at: Option<Timestamp>,
) {
    let counted_as = |(decision, _): &(Decision, Addresses)| Some(Counted::of(decision, counted_at?));
    let counted = chosen.as_ref().ok().and_then(counted_as);
    let (answer, missing) = match chosen {
        Err(rejection) => (Answer::Rejected(rejection.to_string()), Vec::new()),
        Ok((decision, _)) => {
            let missing = if known.is_text { Vec::new() } else { missing_of(shared, known, decision) };
            shared.metrics.missing(&missing);
            let sent = Sent { to: Where::of(decision), reasons: decision.reasons.clone() };
            (Answer::Sent(sent), missing)
        }
    };
    let RouteRequest { request, tenant, category, blocks, tbt_max_us, .. } = *known.request;
    let (request, at) = (request.0, shared.clock.now());
    shared.recall.lock().decided(Decided {
        request,
        tenant,
        category,
        tbt_max_us,
        taught_us: taught_us(tbt_max_us, shared.tbt_max_us, known.is_tenants),
        at,
        blocks,
        answer,
        missing,
        outcome: None,
        is_timed: false,
        said: Said::default(),
        is_left: false,
        moved: None,
        counted,
    });
}

fn missing_of(shared: &Shared, known: &Known<'_>, decision: &Decision) -> Vec<Missing> {
    let fetches = shared.fleet.fetches(decision.instance);
    let found = Found {
        served_blocks: decision.resident_blocks + decision.fetch_blocks,
        held_blocks: known.held_blocks,
        blocks: known.hashes.len() as u32,
        fetches,
    };
    let there = found.held_blocks.max(found.served_blocks);
    if found.served_blocks >= found.blocks {
        return Vec::new();
    }
    if known.is_foreign {
        let (start_blocks, len_blocks) = (found.served_blocks, found.blocks - found.served_blocks);
        return vec![Missing { start_blocks, len_blocks, why: Why::OtherIdentity }];
    }
    let lost = holders::lost(&shared.groups, known.control, known.hashes, there);
    let group = holders::answering(&shared.groups, known.hashes);
    let left = |block: u32| group.published.left(*known.hashes.get(block as usize)?);
    missing(found, lost, left)
}

/// Takes what an instance tells of requests that it served.
pub(super) fn came(shared: &Shared, instance: InstanceId, outcomes: &[pb::Outcome]) {
    for told in outcomes.iter().take(OUTCOMES_MAX) {
        let misses =
            told.misses.iter().take(OUTCOMES_MAX).filter_map(|miss| {
                Some((NodeId(miss.node), miss.start_blocks, Told::from_number(miss.reason)?))
            });
        let outcome =
            Outcome { hit_blocks: told.hit_blocks, ttft_us: told.ttft_us, misses: misses.collect() };
        let ttft_us = outcome.ttft_us;
        ended(
            shared,
            (told.request, instance),
            Said { output_tokens: told.output_tokens, tbt_us: told.tbt_us },
        );
        let came = shared.recall.lock().came(told.request, instance, outcome);
        if came.is_some() {
            over(shared, told.request);
        }
        if let Some(Came { predicted, added }) = came {
            shared.metrics.missing(&added);
            if let Some((predicted, parts)) = predicted.filter(|_| ttft_us > 0) {
                shared.metrics.observed(predicted.ttft_us(), ttft_us);
                shared.fleet.first_token(instance, &parts, ttft_us, shared.clock.now());
            }
        }
    }
}

/// Takes how much a request said, and how fast, from its instance or from who saw its answer pass.
pub(crate) fn ended(shared: &Shared, (request, instance): (u64, InstanceId), said: Said) {
    let ended = shared.recall.lock().ended(request, instance, said);
    if let Some(Ended { category, predicted, parts, taught_us, tokens, news }) = ended {
        if news.tbt_us > 0 {
            shared.metrics.paced(predicted.tbt_us, news.tbt_us);
        }
        let paced = Paced {
            parts: &parts,
            predicted_us: predicted.tbt_us,
            tokens,
            tbt_us: news.tbt_us,
            limit_us: taught_us,
        };
        shared.fleet.ended(category, news.output_tokens, paced, shared.clock.now());
    }
}

/// A request is over before its answer was: how much it said is not how much it would have said.
pub(crate) fn left(shared: &Shared, request: u64) {
    shared.recall.lock().left(request);
    over(shared, request);
}

/// A request waits nowhere any more, wherever it was.
pub(crate) fn over(shared: &Shared, request: u64) {
    if let Some(waits) = &shared.waits {
        waits.lock().begun(request);
    }
}

/// Takes when the first token of a request came, from who saw it pass.
pub(crate) fn first_token(shared: &Shared, request: u64, instance: InstanceId, after: Duration) {
    let timed = shared.recall.lock().timed(request, instance);
    if let Some((predicted, parts)) = timed {
        over(shared, request);
        let ttft_us = u64::try_from(after.as_micros()).unwrap_or(u64::MAX).max(1);
        shared.metrics.observed(predicted.ttft_us(), ttft_us);
        shared.fleet.first_token(instance, &parts, ttft_us, shared.clock.now());
    }
}

/// Tells the story of a request.
pub(super) async fn why(shared: &Shared, request: &pb::WhyRequest) -> pb::WhyReply {
    let known = shared.recall.lock().of(request.request).cloned();
    let Some(decided) = known else { return pb::WhyReply::default() };
    let age: Duration = shared.clock.now().since(decided.at);
    let reply = pb::WhyReply {
        known: true,
        tenant: decided.tenant.0,
        age_ms: millis(age),
        blocks: decided.blocks,
        missing: missing_to_pb(shared, &decided).await,
        ..pb::WhyReply::default()
    };
    let reply = match &decided.answer {
        Answer::Rejected(reason) => pb::WhyReply { rejected: reason.clone(), ..reply },
        Answer::Sent(sent) => pb::WhyReply {
            instance: sent.to.instance.0,
            resident_blocks: sent.to.resident_blocks,
            fetch_blocks: sent.to.fetch_blocks,
            predicted: Some(super::route::prediction_to_pb(&sent.to.predicted)),
            reasons: sent.reasons.iter().map(ToString::to_string).collect(),
            ..reply
        },
    };
    let Said { output_tokens, tbt_us } = decided.said;
    let answered_by = decided.moved.map(|moved| moved.decodes().0);
    let reply = pb::WhyReply { output_tokens, tbt_us, answered_by, ..reply };
    match &decided.outcome {
        None => reply,
        Some(outcome) => {
            pb::WhyReply { came: true, hit_blocks: outcome.hit_blocks, ttft_us: outcome.ttft_us, ..reply }
        }
    }
}

/// All that is missing, and of another identity also the fields, if they are known.
async fn missing_to_pb(shared: &Shared, decided: &Decided) -> Vec<pb::MissingBlocks> {
    let mut all: Vec<_> = decided.missing.iter().map(missing_as_told).collect();
    for (missing, told) in decided.missing.iter().zip(&mut all) {
        let text = match missing.why {
            Why::OtherIdentity => other_identity(shared).await,
            Why::NotFetched { node, told: Told::IdentityDiffers } => {
                not_the_same(shared, node, decided).await
            }
            _ => None,
        };
        if let Some(text) = text {
            told.text = text;
        }
    }
    all
}

async fn other_identity(shared: &Shared) -> Option<String> {
    let fields = shared.manifests.of_engines_and_nodes().await?;
    Some(format!("hashed under another identity than the nodes': it differs in {fields}"))
}

async fn not_the_same(shared: &Shared, node: NodeId, decided: &Decided) -> Option<String> {
    let instance = decided.computes()?;
    let fields = shared.manifests.of_nodes_and(instance).await?;
    Some(format!("{node} serves another identity than {instance}: it differs in {fields}"))
}

fn missing_as_told(missing: &Missing) -> pb::MissingBlocks {
    pb::MissingBlocks {
        start_blocks: missing.start_blocks,
        len_blocks: missing.len_blocks,
        reason: missing.why.name().to_owned(),
        text: missing.why.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_that_a_tenant_chose_teaches_what_all_others_leave_free() {
        for is_tenants in [false, true] {
            assert_eq!(taught_us(0, 0, is_tenants), 0);
            assert_eq!(taught_us(8_000, 8_000, is_tenants), 8_000, "the router's own");
            assert_eq!(taught_us(5_000, 8_000, is_tenants), 8_000, "tighter than it");
        }
        assert_eq!((taught_us(5_000, 0, false), taught_us(5_000, 0, true)), (5_000, 0), "its own");
    }
}
