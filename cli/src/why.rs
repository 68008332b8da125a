//! `kvfleet why`: where a request ran and why, and why blocks of its prompt were missing.
//!
//! Each router remembers the last requests that it decided, so all of them are asked. Not here: the reasons (`kv_core::schedule::missing`).

use std::fmt::Write;

use kvfleet_proto::pb;
use serde::Serialize;

use crate::args::WhyArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// The story of a request, as JSON has it.
#[derive(Debug, Serialize)]
struct Story {
    request: u64,
    router: String,
    age_ms: u64,
    tenant: u32,
    blocks: u32,
    rejected: Option<String>,
    instance: Option<u32>,
    /// Another one, if that is known to have answered in its place.
    answered_by: Option<u32>,
    resident_blocks: u32,
    fetch_blocks: u32,
    predicted_ttft_us: u64,
    /// Of that, waiting for room in GPU memory.
    predicted_room_us: u64,
    predicted_tbt_us: u64,
    observed_tbt_us: Option<u64>,
    observed_ttft_us: Option<u64>,
    hit_blocks: Option<u32>,
    reasons: Vec<String>,
    missing: Vec<Missing>,
}

#[derive(Debug, Serialize)]
struct Missing {
    start_blocks: u32,
    len_blocks: u32,
    reason: String,
    text: String,
}

/// Asks every router for the request and prints what it knows.
pub async fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let connection = Connection::open(&args.connect)?;
    let mut said = Vec::new();
    let mut told = None;
    for router in connection.all()? {
        match router.why(args.request).await {
            Ok(reply) if reply.known => {
                // The last one that decided it is whose decision was sent.
                let is_newer = told
                    .as_ref()
                    .is_none_or(|(_, before): &(String, pb::WhyReply)| reply.age_ms < before.age_ms);
                if is_newer {
                    told = Some((router.address, reply));
                }
            }
            Ok(_) => {}
            Err(status) => said.push(explain(&router.address, &status)),
        }
    }
    let Some((router, reply)) = told else {
        let mut text = format!(
            "no router remembers request {}: each knows the last 4096 that it decided since it started; look at the number, and ask sooner",
            args.request
        );
        said.iter().for_each(|one| text += &format!("\n{one}"));
        anyhow::bail!(text);
    };
    let story = story(args.request, router, reply);
    let text = if args.json { serde_json::to_string_pretty(&story)? + "\n" } else { render(&story) };
    print!("{text}");
    Ok(())
}

fn story(request: u64, router: String, reply: pb::WhyReply) -> Story {
    let is_sent = reply.rejected.is_empty();
    let missing = reply.missing.into_iter().map(|one| {
        let pb::MissingBlocks { start_blocks, len_blocks, reason, text } = one;
        Missing { start_blocks, len_blocks, reason, text }
    });
    let predicted = reply.predicted.unwrap_or_default();
    Story {
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
        predicted_room_us: predicted.room_us,
        predicted_tbt_us: predicted.tbt_us,
        observed_tbt_us: (reply.tbt_us > 0).then_some(reply.tbt_us),
        observed_ttft_us: (reply.came && reply.ttft_us > 0).then_some(reply.ttft_us),
        hit_blocks: reply.came.then_some(reply.hit_blocks),
        reasons: reply.reasons,
        missing: missing.collect(),
    }
}

fn render(story: &Story) -> String {
    let seconds = |ms: u64| ms as f64 / 1e3;
    let mut text = format!(
        "request {} of tenant {}, decided {:.1} s ago by {}\n",
        story.request,
        story.tenant,
        seconds(story.age_ms),
        story.router
    );
    if let Some(why) = &story.rejected {
        let _ = writeln!(text, "  sent nowhere: {why}");
        return text;
    }
    let Story { blocks, resident_blocks, fetch_blocks, .. } = story;
    let _ = writeln!(
        text,
        "  sent to instance-{}: of {blocks} blocks {resident_blocks} were in its GPU memory, {fetch_blocks} to be fetched",
        story.instance.unwrap_or_default()
    );
    if let Some(by) = story.answered_by {
        let _ = writeln!(text, "  answered by instance-{by} in its place");
    }
    let observed = story.observed_ttft_us.map(|us| format!(", and came after {:.1} ms", us as f64 / 1e3));
    let _ = writeln!(
        text,
        "  first token predicted after {:.1} ms{}",
        story.predicted_ttft_us as f64 / 1e3,
        observed.unwrap_or_default()
    );
    if story.predicted_room_us > 0 {
        let _ = writeln!(
            text,
            "  of that, {:.1} ms were to be waiting for room in GPU memory",
            story.predicted_room_us as f64 / 1e3
        );
    }
    if story.predicted_tbt_us > 0 {
        let observed = story.observed_tbt_us.map(|us| format!(", and came {:.1} ms apart", us as f64 / 1e3));
        let _ = writeln!(
            text,
            "  other tokens predicted {:.1} ms apart{}",
            story.predicted_tbt_us as f64 / 1e3,
            observed.unwrap_or_default()
        );
    }
    match story.hit_blocks {
        // An engine that plans for itself fetches also what the router took it to have.
        Some(hit) if hit > story.fetch_blocks => {
            let _ =
                writeln!(text, "  {hit} blocks came: its engine fetched more than the router reckoned with");
        }
        Some(hit) => {
            let _ = writeln!(text, "  {hit} of the blocks to be fetched came");
        }
        None => text += "  its instance has told nothing of it yet\n",
    }
    story.reasons.iter().for_each(|reason| {
        let _ = writeln!(text, "  because  {reason}");
    });
    for Missing { start_blocks, len_blocks, reason, text: why } in &story.missing {
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
    use kv_core::schedule::{Told, Why};

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
    fn the_story_is_told_in_the_order_in_which_it_happened() {
        let text = render(&story(9, "r:1".into(), reply()));
        assert_eq!(
            text,
            "request 9 of tenant 0, decided 1.5 s ago by r:1\n  sent to instance-3: of 10 blocks 2 were in its GPU memory, 4 to be fetched\n  \
             first token predicted after 3.5 ms\n  its instance has told nothing of it yet\n  because  only instance that can take it\n  \
             missing  blocks 6..=9: never seen here (never_seen)\n"
        );
        let came = pb::WhyReply { came: true, hit_blocks: 3, ttft_us: 4_000, ..reply() };
        let predicted =
            pb::Prediction { room_us: 700, tbt_us: 9_000, ..reply().predicted.unwrap_or_default() };
        let ended = pb::WhyReply { predicted: Some(predicted), tbt_us: 9_500, ..came.clone() };
        let text = render(&story(9, "r:1".into(), ended));
        assert!(
            text.contains("3.5 ms, and came after 4.0 ms\n  of that, 0.7 ms were to be waiting for room"),
            "{text}"
        );
        assert!(text.contains("other tokens predicted 9.0 ms apart, and came 9.5 ms apart\n"), "{text}");
        let text = render(&story(9, "r:1".into(), came));
        assert!(text.contains("predicted after 3.5 ms, and came after 4.0 ms\n  3 of the blocks"), "{text}");
        let more = pb::WhyReply { came: true, hit_blocks: 6, ..reply() };
        let text = render(&story(9, "r:1".into(), more));
        assert!(
            text.contains("  6 blocks came: its engine fetched more than the router reckoned with\n"),
            "{text}"
        );
        let elsewhere = pb::WhyReply { answered_by: Some(5), ..reply() };
        let text = render(&story(9, "r:1".into(), elsewhere));
        assert!(text.contains("4 to be fetched\n  answered by instance-5 in its place\n"), "{text}");
    }

    /// Every reason there is, with what differs from case to case as the document has it.
    fn all_reasons() -> Vec<Why> {
        let (node, age) = (NodeId(2), Duration::from_secs(4));
        let causes = [DropCause::Room, DropCause::Quota, DropCause::Ttl, DropCause::Failed];
        let evicted = causes.map(|cause| Why::Evicted { node, cause, age });
        let not_fetched = Told::ALL.map(|told| Why::NotFetched { node, told });
        let lost = [Some(node), None].map(|node| Why::NodeLost { node });
        let held = [Why::SlowerThanRecompute, Why::FetchesNothing];
        [&[Why::NeverSeen][..], &evicted, &lost, &held, &not_fetched, &[Why::OtherIdentity]].concat()
    }

    #[test]
    fn each_reason_is_told_as_the_document_has_it() {
        let document = include_str!("../../docs/WHY.md");
        for why in all_reasons() {
            let missing = pb::MissingBlocks {
                start_blocks: 6,
                len_blocks: 4,
                reason: why.name().to_owned(),
                text: why.to_string(),
            };
            let text = render(&story(9, "r:1".into(), pb::WhyReply { missing: vec![missing], ..reply() }));
            let told = format!("  missing  blocks 6..=9: {why} ({})\n", why.name());
            assert!(text.ends_with(&told), "{text}");
            let row = format!("| `{}` | {why} | ", why.name());
            // Two are told in other words than the row of their reason has.
            let is_another = matches!(why, Why::NodeLost { node: None } | Why::OtherIdentity);
            let is_there = is_another && document.contains(&why.to_string());
            assert!(is_there || document.contains(&row), "{row} is not in docs/WHY.md");
        }
        let rows = document.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
        assert_eq!(rows.collect::<Vec<_>>(), Why::NAMES, "and no others, in their order");
    }

    #[test]
    fn of_one_that_was_sent_nowhere_the_reason_is_told() {
        let rejected = pb::WhyReply { rejected: "queues are full".into(), ..reply() };
        let text = render(&story(9, "r:1".into(), rejected));
        assert!(text.ends_with("  sent nowhere: queues are full\n"), "{text}");
    }
}
