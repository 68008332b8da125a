//! `kvfleet node inspect`: what one node holds, what happened to its blocks, and what another size would hit.
//!
//! Not here: the whole cluster (`status.rs`).

use std::collections::BTreeSet;
use std::fmt::Write;

use kv_core::id::{RequestKind, Tier};
use kvfleet_client::Transport;
use kvfleet_proto::pb;
use serde::Serialize;

use crate::args::InspectArgs;
use crate::calls::explain;
use crate::connect::{Connection, client};
use crate::status::ends_in;

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Inspected {
    node: u32,
    epoch: u64,
    policy: String,
    leases: u64,
    pinned_blocks: u64,
    soft_pinned_blocks: u64,
    next_pin_end_ms: Option<u64>,
    quarantined_files: u64,
    window_blocks: u64,
    prefetched_blocks: u64,
    ttl_groups: u64,
    memory_peak_bytes: u64,
    memory_bytes_max: u64,
    tiers: Vec<TierLine>,
    arena: Option<ArenaLine>,
    classes: Vec<ClassLine>,
    curve: Vec<CurveLine>,
    tenants: Vec<TenantLine>,
}

#[derive(Debug, Serialize)]
struct TierLine {
    tier: &'static str,
    blocks: u64,
    used_bytes: u64,
    capacity_bytes: u64,
    admitting: bool,
    why_not: String,
}

/// How the node's DRAM is cut.
#[derive(Debug, Serialize)]
struct ArenaLine {
    slab_bytes: u64,
    slabs: u64,
    empty_slabs: u64,
    reserve_slabs: u64,
    moved_frames: u64,
    moved_bytes: u64,
    size_classes: Vec<SizeClassLine>,
}

#[derive(Debug, Serialize)]
struct SizeClassLine {
    slot_bytes: u64,
    slabs: u64,
    slots: u64,
    used_slots: u64,
    frame_bytes: u64,
    /// Share of what frames are charged for that no frame fills: ends of slots and of slabs.
    lost: Option<f64>,
    /// Share of the class's slots that are free, and of no use to other classes until they are moved together.
    free: Option<f64>,
}

/// Blocks of requests of one kind and turn in one tier, since the node's start.
#[derive(Debug, Serialize)]
struct ClassLine {
    tier: &'static str,
    kind: &'static str,
    turn: u32,
    hits: u64,
    reuse_gap: SpansLine,
    demoted: u64,
    dropped: u64,
    quota: u64,
    failed: u64,
    ttl: u64,
    age_at_eviction: SpansLine,
}

/// In seconds; nothing where there was none. Quantiles are right to a factor of two.
#[derive(Debug, Default, Serialize)]
struct SpansLine {
    mean_s: Option<f64>,
    p50_s: Option<f64>,
    p90_s: Option<f64>,
    p99_s: Option<f64>,
}

/// What DRAM and SSD together would hit with this size, evicting by last use.
#[derive(Debug, Serialize)]
struct CurveLine {
    blocks: u64,
    bytes: u64,
    hit_rate: f64,
}

#[derive(Debug, Serialize)]
struct TenantLine {
    tenant: u32,
    bytes: u64,
    quota_bytes: Option<u64>,
}

/// Finds the node through the routers, asks it, and prints what it says.
pub async fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let connection = Connection::open(&args.connect)?;
    let address = control_address(&connection, args.node).await?;
    let calls = client(&connection.routers, &connection.identity, Transport::Quic)?;
    let inspected = gather(calls.node_status(&address).await?);
    let text = if args.json { serde_json::to_string_pretty(&inspected)? + "\n" } else { render(&inspected) };
    print!("{text}");
    Ok(())
}

/// Where the node's control calls are served, by the first router that knows it.
async fn control_address(connection: &Connection, number: u32) -> anyhow::Result<String> {
    // Several routers may say the same.
    let mut problems = BTreeSet::new();
    for router in connection.all()? {
        let status = match router.status().await {
            Ok(status) => status,
            Err(status) => {
                problems.insert(explain(&router.address, &status));
                continue;
            }
        };
        match status.nodes.iter().find(|node| node.node == number) {
            Some(node) if node.live => return Ok(node.control_address.clone()),
            Some(_) => {
                problems.insert(format!("node {number} is gone: start it again, or name another one"));
            }
            None => {
                let known: Vec<_> = status.nodes.iter().map(|node| node.node.to_string()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                problems.insert(format!("there is no node {number}: the routers know of {known}"));
            }
        }
    }
    anyhow::bail!("{}", problems.into_iter().collect::<Vec<_>>().join("\n  "))
}

fn gather(status: pb::NodeStatusReply) -> Inspected {
    Inspected {
        node: status.node,
        epoch: status.epoch,
        policy: status.policy,
        leases: status.leases,
        pinned_blocks: status.pinned_blocks,
        soft_pinned_blocks: status.soft_pinned_blocks,
        next_pin_end_ms: status.next_pin_end_ms,
        quarantined_files: status.quarantined_files,
        window_blocks: status.window_blocks,
        prefetched_blocks: status.prefetched_blocks,
        ttl_groups: status.ttl_groups,
        memory_peak_bytes: status.memory_peak_bytes,
        memory_bytes_max: status.memory_bytes_max,
        tiers: status.tiers.into_iter().map(tier_line).collect(),
        arena: status.arena.map(|arena| arena_line(&arena)),
        classes: status.classes.iter().map(class_line).collect(),
        curve: status.curve.iter().map(curve_line).collect(),
        tenants: status.tenants.iter().map(tenant_line).collect(),
    }
}

fn tier_name(number: u32) -> &'static str {
    let tier = u8::try_from(number).ok().and_then(Tier::from_u8);
    tier.map_or("?", Tier::name)
}

fn tier_line(tier: pb::TierStatus) -> TierLine {
    let pb::TierStatus { tier, capacity_bytes, used_bytes, blocks, admitting, why_not } = tier;
    TierLine { tier: tier_name(tier), blocks, used_bytes, capacity_bytes, admitting, why_not }
}

fn arena_line(arena: &pb::ArenaStatus) -> ArenaLine {
    let slab_bytes = arena.slab_bytes;
    ArenaLine {
        slab_bytes,
        slabs: arena.slabs,
        empty_slabs: arena.empty_slabs,
        reserve_slabs: arena.reserve_slabs,
        moved_frames: arena.moved_frames,
        moved_bytes: arena.moved_bytes,
        size_classes: arena.classes.iter().map(|class| size_class_line(class, slab_bytes)).collect(),
    }
}

#[allow(clippy::cast_precision_loss)]
fn size_class_line(class: &pb::SizeClassStatus, slab_bytes: u64) -> SizeClassLine {
    let missing = |part: f64, whole: f64| (whole > 0.0).then(|| 1.0 - part / whole);
    let slots = class.slabs * class.slots_per_slab;
    let charged = class.used_slots as f64 * slab_bytes as f64 / class.slots_per_slab.max(1) as f64;
    SizeClassLine {
        slot_bytes: class.slot_bytes,
        slabs: class.slabs,
        slots,
        used_slots: class.used_slots,
        frame_bytes: class.frame_bytes,
        lost: missing(class.frame_bytes as f64, charged),
        free: missing(class.used_slots as f64, slots as f64),
    }
}

fn class_line(class: &pb::ClassStatus) -> ClassLine {
    ClassLine {
        tier: tier_name(class.tier),
        kind: RequestKind::from_u8(u8::try_from(class.kind).unwrap_or_default()).name(),
        turn: class.turn,
        hits: class.hits,
        reuse_gap: spans_line(class.reuse_gap.as_ref()),
        demoted: class.demoted,
        dropped: class.dropped,
        quota: class.quota,
        failed: class.failed,
        ttl: class.ttl,
        age_at_eviction: spans_line(class.age_at_eviction.as_ref()),
    }
}

#[allow(clippy::cast_precision_loss)]
fn spans_line(spans: Option<&pb::Spans>) -> SpansLine {
    let Some(spans) = spans else { return SpansLine::default() };
    let seconds = |us: u64| Some(us as f64 / 1e6);
    SpansLine {
        mean_s: seconds(spans.mean_us),
        p50_s: seconds(spans.p50_us),
        p90_s: seconds(spans.p90_us),
        p99_s: seconds(spans.p99_us),
    }
}

fn curve_line(point: &pb::CurvePoint) -> CurveLine {
    CurveLine { blocks: point.blocks, bytes: point.bytes, hit_rate: point.hit_rate }
}

fn tenant_line(tenant: &pb::TenantUse) -> TenantLine {
    let quota_bytes = tenant.has_quota.then_some(tenant.quota_bytes);
    TenantLine { tenant: tenant.tenant, bytes: tenant.bytes, quota_bytes }
}

fn in_words(seconds: Option<f64>) -> String {
    seconds.map_or("-".to_owned(), |seconds| match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.1} min", s / 60.0),
    })
}

fn in_mib(bytes: u64) -> String {
    format!("{:.1}", mib(bytes))
}

#[allow(clippy::cast_precision_loss)]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn render(node: &Inspected) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "node {} in epoch {}: policy {}, {} requests under way, {} files set aside",
        node.node, node.epoch, node.policy, node.leases, node.quarantined_files
    );
    let _ = writeln!(
        out,
        "{} blocks pinned: {} hard, {} soft{}",
        node.pinned_blocks,
        node.pinned_blocks.saturating_sub(node.soft_pinned_blocks),
        node.soft_pinned_blocks,
        ends_in(node.next_pin_end_ms)
    );
    let _ = writeln!(
        out,
        "{} blocks needed by waiting requests, {} prefetched for such; {} groups with a time to live",
        node.window_blocks, node.prefetched_blocks, node.ttl_groups
    );
    let (peak, most) = (in_mib(node.memory_peak_bytes), in_mib(node.memory_bytes_max));
    let _ = writeln!(out, "{peak} MiB of memory in place at most so far, of {most} that it may take\n");
    let _ = writeln!(out, "tier   blocks     MiB used     of           takes new blocks");
    for tier in &node.tiers {
        let (used, all) = (in_mib(tier.used_bytes), in_mib(tier.capacity_bytes));
        let takes = match (tier.admitting, tier.why_not.is_empty()) {
            (true, true) => "yes",
            (true, false) => "yes; ",
            (false, _) => "no: ",
        };
        let _ = writeln!(
            out,
            "{:<6} {:<10} {used:<12} {all:<12} {takes}{}",
            tier.tier, tier.blocks, tier.why_not
        );
    }
    if let Some(arena) = &node.arena {
        render_arena(&mut out, arena);
    }
    render_classes(&mut out, node);
    if !node.curve.is_empty() {
        let _ = writeln!(out, "\nwith room for      MiB          hit rate, evicting by last use");
    }
    for point in &node.curve {
        let share = point.hit_rate * 100.0;
        let _ = writeln!(out, "{:<18} {:<12} {share:.1} %", point.blocks, in_mib(point.bytes));
    }
    if !node.tenants.is_empty() {
        let _ = writeln!(out, "\ntenant  MiB          quota");
    }
    for tenant in &node.tenants {
        let quota = tenant.quota_bytes.map_or("-".to_owned(), in_mib);
        let _ = writeln!(out, "{:<7} {:<12} {quota}", tenant.tenant, in_mib(tenant.bytes));
    }
    out
}

fn render_arena(out: &mut String, arena: &ArenaLine) {
    let _ = writeln!(
        out,
        "\nDRAM lies in {} slabs of {} MiB: {} empty, {} kept for loads; {} frames ({} MiB) moved together",
        arena.slabs,
        in_mib(arena.slab_bytes),
        arena.empty_slabs,
        arena.reserve_slabs,
        arena.moved_frames,
        in_mib(arena.moved_bytes)
    );
    let _ = writeln!(out, "slot MiB  slabs    slots used  of         lost     free");
    for class in &arena.size_classes {
        let share =
            |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0));
        let _ = writeln!(
            out,
            "{:<9} {:<8} {:<11} {:<10} {:<8} {}",
            format!("{:.3}", mib(class.slot_bytes)),
            class.slabs,
            class.used_slots,
            class.slots,
            share(class.lost),
            share(class.free)
        );
    }
}

fn render_classes(out: &mut String, node: &Inspected) {
    if node.classes.is_empty() {
        let _ = writeln!(out, "\nno block was used again and none left yet");
        return;
    }
    let _ = writeln!(
        out,
        "\ntier  kind        turn  hits       gap p50   p90       demoted    dropped    quota    failed   ttl      age p50   p90"
    );
    for class in &node.classes {
        let (gap, age) = (&class.reuse_gap, &class.age_at_eviction);
        let _ = writeln!(
            out,
            "{:<5} {:<11} {:<5} {:<10} {:<9} {:<9} {:<10} {:<10} {:<8} {:<8} {:<8} {:<9} {}",
            class.tier,
            class.kind,
            class.turn,
            class.hits,
            in_words(gap.p50_s),
            in_words(gap.p90_s),
            class.demoted,
            class.dropped,
            class.quota,
            class.failed,
            class.ttl,
            in_words(age.p50_s),
            in_words(age.p90_s)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_shown_by_tier_kind_and_turn() {
        let spans =
            |us| Some(pb::Spans { count: 3, mean_us: us, p50_us: us, p90_us: 4 * us, p99_us: 8 * us });
        let class = pb::ClassStatus {
            tier: Tier::Ssd as u32,
            kind: RequestKind::Agent as u32,
            turn: 3,
            hits: 42,
            reuse_gap: spans(64_000),
            dropped: 7,
            ttl: 5,
            age_at_eviction: spans(131_000_000),
            ..Default::default()
        };
        let point = pb::CurvePoint { blocks: 512, bytes: 3 << 20, hit_rate: 0.25 };
        let status = pb::NodeStatusReply {
            node: 5,
            classes: vec![class],
            curve: vec![point],
            tenants: vec![pb::TenantUse { tenant: 9, bytes: 1 << 20, ..Default::default() }],
            ..Default::default()
        };
        let text = render(&gather(status));
        let line = text.lines().find(|line| line.starts_with("ssd")).unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(
            words,
            [
                "ssd", "agent", "3", "42", "64", "ms", "256", "ms", "0", "7", "0", "0", "5", "2.2", "min",
                "8.7", "min"
            ],
            "{text}"
        );
        assert!(text.contains("512                3.0          25.0 %"), "{text}");
        assert!(text.contains("9       1.0          -"), "{text}");
    }

    #[test]
    fn how_dram_is_cut_is_shown_by_size_class() {
        let class = pb::SizeClassStatus {
            slot_bytes: 256 << 10,
            slots_per_slab: 4,
            slabs: 3,
            used_slots: 6,
            frame_bytes: (6 * 250) << 10,
        };
        let unused = pb::SizeClassStatus { slot_bytes: 1 << 20, slots_per_slab: 1, ..Default::default() };
        let arena = pb::ArenaStatus {
            slab_bytes: 1 << 20,
            slabs: 40,
            empty_slabs: 37,
            reserve_slabs: 17,
            moved_frames: 5,
            moved_bytes: 5 << 18,
            classes: vec![class, unused],
        };
        let text = render(&gather(pb::NodeStatusReply { arena: Some(arena), ..Default::default() }));
        let told = "40 slabs of 1.0 MiB: 37 empty, 17 kept for loads; 5 frames (1.2 MiB) moved together";
        assert!(text.contains(told), "{text}");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["0.250", "3", "6", "12", "2.3", "%", "50.0", "%"]), "{text}");
        assert!(lines.contains(&vec!["1.000", "0", "0", "0", "-", "-"]), "{text}");
    }

    #[test]
    fn a_fresh_node_says_that_nothing_happened() {
        let text = render(&gather(pb::NodeStatusReply::default()));
        assert!(text.contains("no block was used again"), "{text}");
        assert!(!text.contains("with room for"), "{text}");
    }
}
