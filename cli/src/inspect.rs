//! `kvfleet node inspect`: contents of one node, history of its blocks, and expected hit rates at
//! other sizes.
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
use crate::status::next_pin_end;

/// Everything that the command shows.
#[derive(Debug, Serialize)]
struct NodeInspection {
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

/// Partition of the node's DRAM.
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
    /// Share of the charged bytes that no frame fills: rests of slots and slabs.
    lost: Option<f64>,
    /// Share of the class's slots that are free but unusable for other classes until frames are
    /// packed together.
    free: Option<f64>,
}

/// History of blocks of one kind of request and turn in one tier, since the node's start.
#[derive(Debug, Serialize)]
struct ClassLine {
    tier: &'static str,
    kind: &'static str,
    turn: u32,
    hits: u64,
    reuse_gap: DurationStats,
    demoted: u64,
    dropped: u64,
    quota: u64,
    failed: u64,
    ttl: u64,
    age_at_eviction: DurationStats,
}

/// Durations in seconds; `None` without samples. Quantiles are exact to a factor of two.
#[derive(Debug, Default, Serialize)]
struct DurationStats {
    mean_s: Option<f64>,
    p50_s: Option<f64>,
    p90_s: Option<f64>,
    p99_s: Option<f64>,
}

/// Hit rate of DRAM and SSD together at this size, under LRU eviction.
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

/// Finds the node through the routers, queries it, and prints its status.
pub async fn run(args: &InspectArgs) -> anyhow::Result<()> {
    let connection = Connection::open(&args.connect)?;
    let address = control_address(&connection, args.node).await?;
    let calls = client(&connection.routers, &connection.identity, Transport::Quic)?;
    let inspected = inspection_from(calls.node_status(&address).await?);
    let text = if args.json { serde_json::to_string_pretty(&inspected)? + "\n" } else { render(&inspected) };
    print!("{text}");
    Ok(())
}

/// Control address of the node, from the first router that knows it.
async fn control_address(connection: &Connection, number: u32) -> anyhow::Result<String> {
    // Several routers may report the same problem.
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
                problems.insert(format!("node {number} is down: start it again, or name another one"));
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

fn inspection_from(status: pb::NodeStatusReply) -> NodeInspection {
    NodeInspection {
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
    let pb::TierStatus { tier, capacity_bytes, used_bytes, blocks, admitting, reject_reason: why_not } = tier;
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
        reuse_gap: duration_stats(class.reuse_gap.as_ref()),
        demoted: class.demoted,
        dropped: class.dropped,
        quota: class.quota,
        failed: class.failed,
        ttl: class.ttl,
        age_at_eviction: duration_stats(class.age_at_eviction.as_ref()),
    }
}

#[allow(clippy::cast_precision_loss)]
fn duration_stats(spans: Option<&pb::Spans>) -> DurationStats {
    let Some(spans) = spans else { return DurationStats::default() };
    let seconds = |us: u64| Some(us as f64 / 1e6);
    DurationStats {
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

fn format_duration(seconds: Option<f64>) -> String {
    seconds.map_or("-".to_owned(), |seconds| match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{:.1} min", s / 60.0),
    })
}

fn format_mib(bytes: u64) -> String {
    format!("{:.1}", mib(bytes))
}

#[allow(clippy::cast_precision_loss)]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn render(node: &NodeInspection) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "node {} in epoch {}: policy {}, {} requests in flight, {} files quarantined",
        node.node, node.epoch, node.policy, node.leases, node.quarantined_files
    );
    let _ = writeln!(
        out,
        "{} blocks pinned: {} hard, {} soft{}",
        node.pinned_blocks,
        node.pinned_blocks.saturating_sub(node.soft_pinned_blocks),
        node.soft_pinned_blocks,
        next_pin_end(node.next_pin_end_ms)
    );
    let _ = writeln!(
        out,
        "{} blocks needed by waiting requests, {} prefetched for such; {} groups with a time to live",
        node.window_blocks, node.prefetched_blocks, node.ttl_groups
    );
    let (peak, most) = (format_mib(node.memory_peak_bytes), format_mib(node.memory_bytes_max));
    let _ = writeln!(out, "{peak} MiB of memory at peak, of at most {most}\n");
    let _ = writeln!(out, "tier   blocks     MiB used     of           takes new blocks");
    for tier in &node.tiers {
        let (used, all) = (format_mib(tier.used_bytes), format_mib(tier.capacity_bytes));
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
        let _ = writeln!(out, "\nblocks             MiB          hit rate under LRU");
    }
    for point in &node.curve {
        let share = point.hit_rate * 100.0;
        let _ = writeln!(out, "{:<18} {:<12} {share:.1} %", point.blocks, format_mib(point.bytes));
    }
    if !node.tenants.is_empty() {
        let _ = writeln!(out, "\ntenant  MiB          quota");
    }
    for tenant in &node.tenants {
        let quota = tenant.quota_bytes.map_or("-".to_owned(), format_mib);
        let _ = writeln!(out, "{:<7} {:<12} {quota}", tenant.tenant, format_mib(tenant.bytes));
    }
    out
}

fn render_arena(out: &mut String, arena: &ArenaLine) {
    let _ = writeln!(
        out,
        "\nDRAM has {} slabs of {} MiB: {} empty, {} reserved for loads; {} frames ({} MiB) packed",
        arena.slabs,
        format_mib(arena.slab_bytes),
        arena.empty_slabs,
        arena.reserve_slabs,
        arena.moved_frames,
        format_mib(arena.moved_bytes)
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

fn render_classes(out: &mut String, node: &NodeInspection) {
    if node.classes.is_empty() {
        let _ = writeln!(out, "\nno block was used again or evicted yet");
        return;
    }
    let _ = writeln!(
        out,
        "\ntier  kind        turn  hits       gap p50   p90       demoted    dropped    quota    failed   \
         ttl      age p50   p90"
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
            format_duration(gap.p50_s),
            format_duration(gap.p90_s),
            class.demoted,
            class.dropped,
            class.quota,
            class.failed,
            class.ttl,
            format_duration(age.p50_s),
            format_duration(age.p90_s)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_block_history_by_tier_kind_and_turn() {
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
        let text = render(&inspection_from(status));
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
    fn shows_dram_by_size_class() {
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
        let text = render(&inspection_from(pb::NodeStatusReply { arena: Some(arena), ..Default::default() }));
        let told = "40 slabs of 1.0 MiB: 37 empty, 17 reserved for loads; 5 frames (1.2 MiB) packed";
        assert!(text.contains(told), "{text}");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert!(lines.contains(&vec!["0.250", "3", "6", "12", "2.3", "%", "50.0", "%"]), "{text}");
        assert!(lines.contains(&vec!["1.000", "0", "0", "0", "-", "-"]), "{text}");
    }

    #[test]
    fn shows_a_fresh_node() {
        let text = render(&inspection_from(pb::NodeStatusReply::default()));
        assert!(text.contains("no block was used again"), "{text}");
        assert!(!text.contains("hit rate under LRU"), "{text}");
    }
}
