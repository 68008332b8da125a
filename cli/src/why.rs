//! `kvfleet why`: where a request ran and why, and why blocks of its prompt were missing.
//!
//! Each router keeps its last decisions, so all of them are asked. Not here: the reasons
//! (`kv_core::schedule::missing`).

use std::fmt::Write;

use kvfleet_proto::pb;
use serde::Serialize;

use crate::args::WhyArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// Decision of a request, in the form of the JSON output.
#[derive(Debug, Serialize)]
struct DecisionReport {
    request: u64,
    router: String,
    age_ms: u64,
    tenant: u32,
    blocks: u32,
    rejected: Option<String>,
    instance: Option<u32>,
    /// Instance that answered instead of the chosen one, if known.
    answered_by: Option<u32>,
    resident_blocks: u32,
    fetch_blocks: u32,
    predicted_ttft_us: u64,
    /// Part of the predicted TTFT spent waiting for GPU memory.
    predicted_room_us: u64,
    predicted_tbt_us: u64,
    observed_tbt_us: Option<u64>,
    observed_ttft_us: Option<u64>,
    hit_blocks: Option<u32>,
    reasons: Vec<String>,
    missing: Vec<MissingRange>,
}

#[derive(Debug, Serialize)]
struct MissingRange {
    start_blocks: u32,
    len_blocks: u32,
    reason: String,
    text: String,
}

/// Asks every router for the request and prints its decision.
pub async fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let connection = Connection::open(&args.connect)?;
    let mut problems = Vec::new();
    let mut newest = None;
    for router in connection.all()? {
        match router.why(args.request).await {
            Ok(reply) if reply.known => {
                // Several routers may have decided it; the latest decision was used.
                let is_newer = newest
                    .as_ref()
                    .is_none_or(|(_, before): &(String, pb::WhyReply)| reply.age_ms < before.age_ms);
                if is_newer {
                    newest = Some((router.address, reply));
                }
            }
            Ok(_) => {}
            Err(status) => problems.push(explain(&router.address, &status)),
        }
    }
    let Some((router, reply)) = newest else {
        let mut text = format!(
            "no router remembers request {}: each keeps its last 4096 decisions since its start; check the \
             number, and ask sooner",
            args.request
        );
        problems.iter().for_each(|one| text += &format!("\n{one}"));
        anyhow::bail!(text);
    };
    let story = decision_report(args.request, router, reply);
    let text = if args.json { serde_json::to_string_pretty(&story)? + "\n" } else { render(&story) };
    print!("{text}");
    Ok(())
}

fn decision_report(request: u64, router: String, reply: pb::WhyReply) -> DecisionReport {
    let is_sent = reply.rejected.is_empty();
    let missing = reply.missing.into_iter().map(|one| {
        let pb::MissingBlocks { start_blocks, len_blocks, reason, text } = one;
        MissingRange { start_blocks, len_blocks, reason, text }
    });
    let predicted = reply.predicted.unwrap_or_default();
    DecisionReport {
        request,
        router,
        age_ms: reply.age_ms,
        tenant: reply.tenant,
        blocks: reply.blocks,
        rejected: (!is_sent).then_some(reply.rejected),
        instance: is_sent.then_some(reply.instance),
        answered_by: reply.answered_by.filter(|_| is_sent),
        resident_blocks: reply.resident_blocks,
        fetch_blocks: reply.fetch_blocks,
        predicted_ttft_us: predicted.queue_us + predicted.transfer_us + predicted.prefill_us,
        predicted_room_us: predicted.kv_wait_us,
        predicted_tbt_us: predicted.tbt_us,
        observed_tbt_us: (reply.tbt_us > 0).then_some(reply.tbt_us),
        observed_ttft_us: (reply.has_outcome && reply.ttft_us > 0).then_some(reply.ttft_us),
        hit_blocks: reply.has_outcome.then_some(reply.hit_blocks),
        reasons: reply.reasons,
        missing: missing.collect(),
    }
}

fn render(story: &DecisionReport) -> String {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let mut text = format!(
        "request {} of tenant {}, decided {:.1} s ago by {}\n",
        story.request,
        story.tenant,
        seconds(story.age_ms),
        story.router
    );
    if let Some(why) = &story.rejected {
        let _ = writeln!(text, "  not placed: {why}");
        return text;
    }
    let DecisionReport { blocks, resident_blocks, fetch_blocks, .. } = story;
    let _ = writeln!(
        text,
        "  sent to instance-{}: of {blocks} blocks {resident_blocks} were in its GPU memory, {fetch_blocks} \
         to be fetched",
        story.instance.unwrap_or_default()
    );
    if let Some(by) = story.answered_by {
        let _ = writeln!(text, "  answered by instance-{by} instead");
    }
    let observed = story.observed_ttft_us.map(|us| format!(", observed after {:.1} ms", us as f64 / 1e3));
    let _ = writeln!(
        text,
        "  first token predicted after {:.1} ms{}",
        story.predicted_ttft_us as f64 / 1e3,
        observed.unwrap_or_default()
    );
    if story.predicted_room_us > 0 {
        let _ = writeln!(
            text,
            "  including {:.1} ms of predicted wait for GPU memory",
            story.predicted_room_us as f64 / 1e3
        );
    }
    if story.predicted_tbt_us > 0 {
        let observed = story.observed_tbt_us.map(|us| format!(", observed {:.1} ms apart", us as f64 / 1e3));
        let _ = writeln!(
            text,
            "  other tokens predicted {:.1} ms apart{}",
            story.predicted_tbt_us as f64 / 1e3,
            observed.unwrap_or_default()
        );
    }
    match story.hit_blocks {
        // An engine with its own plan also fetches blocks that the router assumed to be resident.
        Some(hit) if hit > story.fetch_blocks => {
            let _ = writeln!(
                text,
                "  {hit} blocks were fetched: its engine fetched more than the router had planned"
            );
        }
        Some(hit) => {
            let _ = writeln!(text, "  {hit} of the blocks to be fetched arrived");
        }
        None => text += "  its instance has not reported on it yet\n",
    }
    story.reasons.iter().for_each(|reason| {
        let _ = writeln!(text, "  because  {reason}");
    });
    for MissingRange { start_blocks, len_blocks, reason, text: why } in &story.missing {
        let last = start_blocks + len_blocks.saturating_sub(1);
        let _ = writeln!(text, "  missing  blocks {start_blocks}..={last}: {why} ({reason})");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kv_core::id::NodeId;
    use kv_core::index::command::DropCause;
    use kv_core::schedule::{FetchFailure, MissReason};

    use super::*;

    fn reply() -> pb::WhyReply {
        let missing = pb::MissingBlocks {
            start_blocks: 6,
            len_blocks: 4,
            reason: "never_seen".into(),
            text: "never seen here".into(),
        };
        pb::WhyReply {
            known: true,
            age_ms: 1_500,
            blocks: 10,
            instance: 3,
            resident_blocks: 2,
            fetch_blocks: 4,
            predicted: Some(pb::Prediction {
                queue_us: 1_000,
                transfer_us: 500,
                prefill_us: 2_000,
                ..pb::Prediction::default()
            }),
            reasons: vec!["only instance that can take it".into()],
            missing: vec![missing],
            ..pb::WhyReply::default()
        }
    }

    #[test]
    fn renders_a_decision_in_order() {
        let text = render(&decision_report(9, "r:1".into(), reply()));
        assert_eq!(
            text,
            "request 9 of tenant 0, decided 1.5 s ago by r:1\n  sent to instance-3: of 10 blocks 2 were in \
             its GPU memory, 4 to be fetched\n  first token predicted after 3.5 ms\n  its instance has not \
             reported on it yet\n  because  only instance that can take it\n  missing  blocks 6..=9: never \
             seen here (never_seen)\n"
        );
        let came = pb::WhyReply { has_outcome: true, hit_blocks: 3, ttft_us: 4_000, ..reply() };
        let predicted =
            pb::Prediction { kv_wait_us: 700, tbt_us: 9_000, ..reply().predicted.unwrap_or_default() };
        let ended = pb::WhyReply { predicted: Some(predicted), tbt_us: 9_500, ..came.clone() };
        let text = render(&decision_report(9, "r:1".into(), ended));
        assert!(
            text.contains("3.5 ms, observed after 4.0 ms\n  including 0.7 ms of predicted wait"),
            "{text}"
        );
        assert!(text.contains("other tokens predicted 9.0 ms apart, observed 9.5 ms apart\n"), "{text}");
        let text = render(&decision_report(9, "r:1".into(), came));
        assert!(text.contains("predicted after 3.5 ms, observed after 4.0 ms\n  3 of the blocks"), "{text}");
        let more = pb::WhyReply { has_outcome: true, hit_blocks: 6, ..reply() };
        let text = render(&decision_report(9, "r:1".into(), more));
        assert!(
            text.contains("  6 blocks were fetched: its engine fetched more than the router had planned\n"),
            "{text}"
        );
        let elsewhere = pb::WhyReply { answered_by: Some(5), ..reply() };
        let text = render(&decision_report(9, "r:1".into(), elsewhere));
        assert!(text.contains("4 to be fetched\n  answered by instance-5 instead\n"), "{text}");
    }

    /// All reasons, with the varying values that the document uses.
    fn all_reasons() -> Vec<MissReason> {
        let (node, age) = (NodeId(2), Duration::from_secs(4));
        let causes = [DropCause::Capacity, DropCause::Quota, DropCause::Ttl, DropCause::Failed];
        let evicted = causes.map(|cause| MissReason::Evicted { node, cause, age });
        let not_fetched = FetchFailure::ALL.map(|told| MissReason::NotFetched { node, failure: told });
        let lost = [Some(node), None].map(|node| MissReason::NodeLost { node });
        let held = [MissReason::SlowerThanRecompute, MissReason::CannotFetch];
        [&[MissReason::NeverSeen][..], &evicted, &lost, &held, &not_fetched, &[MissReason::IdentityMismatch]]
            .concat()
    }

    #[test]
    fn reasons_match_the_document() {
        let document = include_str!("../../docs/guide/troubleshoot.md");
        for why in all_reasons() {
            let missing = pb::MissingBlocks {
                start_blocks: 6,
                len_blocks: 4,
                reason: why.name().to_owned(),
                text: why.to_string(),
            };
            let text =
                render(&decision_report(9, "r:1".into(), pb::WhyReply { missing: vec![missing], ..reply() }));
            let told = format!("  missing  blocks 6..=9: {why} ({})\n", why.name());
            assert!(text.ends_with(&told), "{text}");
            let row = format!("| `{}` | {why} | ", why.name());
            // These two differ from the row of their reason.
            let is_another =
                matches!(why, MissReason::NodeLost { node: None } | MissReason::IdentityMismatch);
            let is_there = is_another && document.contains(&why.to_string());
            assert!(is_there || document.contains(&row), "{row} is not in docs/guide/troubleshoot.md");
        }
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        assert_eq!(rows.collect::<Vec<_>>(), MissReason::NAMES, "the rows, in their order");
    }

    #[test]
    fn renders_a_rejection() {
        let rejected = pb::WhyReply { rejected: "queues are full".into(), ..reply() };
        let text = render(&decision_report(9, "r:1".into(), rejected));
        assert!(text.ends_with("  not placed: queues are full\n"), "{text}");
    }
}
