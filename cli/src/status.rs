//! `kvfleet status`: routers, nodes, instances and the index of a running cluster.

use std::fmt::Write;
use std::time::Duration;

use kvfleet_proto::pb;
use serde::Serialize;

use crate::admin::format_seconds;
use crate::args::StatusArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// Status of one router, or why it is unknown.
#[derive(Debug, Serialize)]
struct RouterLine {
    address: String,
    router: u64,
    reachable: bool,
    problem: String,
    term: u64,
    leader: u64,
    applied_index: u64,
    lag_entries: u64,
    index_blocks: u64,
    index_copies: u64,
    digest: String,
    groups: Vec<GroupLine>,
}

/// Status of one group as one router sees it.
#[derive(Debug, Serialize)]
struct GroupLine {
    group: u32,
    leader: u64,
    applied_index: u64,
    /// Newest log index at which this replica matched another one; 0 before the first comparison.
    agreed_index: u64,
    diverged: bool,
    drifts: u64,
    /// Failed attempts of this replica to install the leader's state.
    repairs_failed: u64,
}

/// One node as the most advanced router sees it.
#[derive(Debug, Serialize)]
struct NodeLine {
    node: u32,
    live: bool,
    epoch: u64,
    blocks: u64,
    silent_ms: u64,
    data_address: String,
    control_address: String,
    /// Share of the audited index entries of the node that it really holds; `None` before the first
    /// audit.
    precision: Option<f64>,
    /// Share of the audited blocks of the node that the index lists.
    recall: Option<f64>,
    drifts: u64,
}

/// One instance as the most advanced router sees it.
#[derive(Debug, Serialize)]
struct InstanceLine {
    instance: u32,
    address: String,
    queue_tokens: u64,
    running: u32,
    report_age_ms: u64,
    node: Option<u32>,
    /// Resident GPU blocks; the largest count of all routers, since each tracks them separately.
    resident_blocks: u64,
    /// Number of routers that miss residency reports of the instance.
    uncertain_at: u64,
}

/// Everything that the command shows.
#[derive(Debug, Serialize)]
struct FleetStatus {
    routers: Vec<RouterLine>,
    nodes: Vec<NodeLine>,
    instances: Vec<InstanceLine>,
    pins: u64,
    soft_pins: u64,
    next_pin_end_ms: Option<u64>,
}

/// Queries the named routers and all voters that they know, and prints the status.
pub async fn run(args: &StatusArgs) -> anyhow::Result<()> {
    let mut connection = Connection::open(&args.connect)?;
    let mut answers = ask(&connection).await?;
    let voters =
        answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).flat_map(|status| &status.voters);
    let unnamed: Vec<String> = voters
        .map(|voter| voter.address.clone())
        .filter(|address| !address.is_empty() && !connection.routers.contains(address))
        .collect();
    if !unnamed.is_empty() {
        connection.routers.extend(unnamed);
        connection.routers.sort();
        connection.routers.dedup();
        answers = ask(&connection).await?;
    }
    if answers.iter().all(|(_, answer)| answer.is_err()) {
        let said: Vec<_> = answers.into_iter().filter_map(|(_, answer)| answer.err()).collect();
        anyhow::bail!("{}", said.join("\n"));
    }
    let fleet = fleet_status(answers);
    let text = if args.json { serde_json::to_string_pretty(&fleet)? + "\n" } else { render(&fleet) };
    print!("{text}");
    Ok(())
}

type RouterAnswer = (String, Result<pb::StatusReply, String>);

async fn ask(connection: &Connection) -> anyhow::Result<Vec<RouterAnswer>> {
    let mut answers = vec![];
    for router in connection.all()? {
        let answer = router.status().await.map_err(|status| explain(&router.address, &status));
        answers.push((router.address, answer));
    }
    Ok(answers)
}

fn fleet_status(answers: Vec<RouterAnswer>) -> FleetStatus {
    let reached = || answers.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let newest = reached().max_by_key(|status| status.applied_index).cloned().unwrap_or_default();
    let last = reached().map(|status| status.last_log_index).max().unwrap_or_default();
    FleetStatus {
        nodes: newest.nodes.iter().map(|node| node_line(node, &audit_totals(reached(), node.node))).collect(),
        instances: newest.instances.iter().map(|one| instance_line(one, reached())).collect(),
        pins: newest.pins,
        soft_pins: newest.soft_pins,
        next_pin_end_ms: newest.next_pin_end_ms,
        routers: answers.into_iter().map(|(address, answer)| router_line(address, answer, last)).collect(),
    }
}

fn router_line(address: String, answer: Result<pb::StatusReply, String>, last: u64) -> RouterLine {
    let reachable = answer.is_ok();
    let problem = answer.as_ref().err().cloned().unwrap_or_default();
    let status = answer.unwrap_or_default();
    RouterLine {
        address,
        router: status.router,
        reachable,
        problem,
        term: status.term,
        leader: status.leader,
        applied_index: status.applied_index,
        lag_entries: if reachable { last.saturating_sub(status.applied_index) } else { 0 },
        index_blocks: status.index_blocks,
        index_copies: status.index_copies,
        groups: status.groups.iter().map(group_line).collect(),
        digest: status.digest.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

fn group_line(group: &pb::GroupStatus) -> GroupLine {
    let pb::GroupStatus {
        group, leader, applied_index, agreed_index, diverged, drifts, repairs_failed, ..
    } = *group;
    GroupLine { group, leader, applied_index, agreed_index, diverged, drifts, repairs_failed }
}

/// Audit results of a node, summed over routers, since each audits the shards that it leads.
fn audit_totals<'a>(statuses: impl Iterator<Item = &'a pb::StatusReply>, node: u32) -> pb::AuditStats {
    let found = statuses.flat_map(|status| &status.nodes).filter(|known| known.node == node);
    found.filter_map(|known| known.audit).fold(pb::AuditStats::default(), |sum, one| pb::AuditStats {
        claimed_blocks: sum.claimed_blocks + one.claimed_blocks,
        claimed_wrong: sum.claimed_wrong + one.claimed_wrong,
        held_blocks: sum.held_blocks + one.held_blocks,
        held_unknown: sum.held_unknown + one.held_unknown,
        drifts: sum.drifts + one.drifts,
    })
}

#[allow(clippy::cast_precision_loss)]
fn share(all: u64, wrong: u64) -> Option<f64> {
    (all > 0).then(|| 1.0 - wrong as f64 / all as f64)
}

fn node_line(node: &pb::NodeStatus, truth: &pb::AuditStats) -> NodeLine {
    NodeLine {
        node: node.node,
        live: node.live,
        epoch: node.epoch,
        blocks: node.blocks,
        silent_ms: node.silent_ms,
        data_address: node.data_address.clone(),
        control_address: node.control_address.clone(),
        precision: share(truth.claimed_blocks, truth.claimed_wrong),
        recall: share(truth.held_blocks, truth.held_unknown),
        drifts: truth.drifts,
    }
}

fn instance_line<'a>(
    instance: &pb::InstanceStatus,
    statuses: impl Iterator<Item = &'a pb::StatusReply>,
) -> InstanceLine {
    let known = statuses.flat_map(|status| &status.instances).filter(|one| one.instance == instance.instance);
    let residency: Vec<_> = known.filter_map(|one| one.residency).collect();
    InstanceLine {
        resident_blocks: residency.iter().map(|one| one.blocks).max().unwrap_or(0),
        uncertain_at: residency.iter().filter(|one| one.uncertain).count() as u64,
        instance: instance.instance,
        address: instance.address.clone(),
        queue_tokens: instance.queue_tokens,
        running: instance.running,
        report_age_ms: instance.report_age_ms,
        node: instance.has_node.then_some(instance.node),
    }
}

/// One line per group: leader, progress, and whether the replicas agree.
fn render_groups(out: &mut String, fleet: &FleetStatus) {
    let up = || fleet.routers.iter().filter(|router| router.reachable);
    let count = up().map(|router| router.groups.len()).max().unwrap_or(0);
    // Writing to a string cannot fail.
    let _ = writeln!(out, "\ngroup   leader  applied   digests agree at  drifts");
    for position in 0..count {
        let lines: Vec<_> = up().filter_map(|router| router.groups.get(position)).collect();
        let Some(newest) = lines.iter().max_by_key(|line| line.applied_index) else { continue };
        let agreed = lines.iter().map(|line| line.agreed_index).max().unwrap_or(0);
        let failed = lines.iter().filter(|line| line.diverged).map(|line| line.repairs_failed).max();
        let agreed = match (failed, agreed) {
            (Some(0), _) => "a replica differs".to_owned(),
            (Some(failed), _) => format!("a replica differs, {failed} repairs of it failed"),
            (None, 0) => "-".to_owned(),
            (None, index) => index.to_string(),
        };
        let drifts: u64 = lines.iter().map(|line| line.drifts).sum();
        let GroupLine { group, leader, applied_index, .. } = newest;
        let _ = writeln!(out, "{group:<7} {leader:<7} {applied_index:<9} {agreed:<17} {drifts}");
    }
}

/// Resident blocks, with a question mark if a router misses reports.
fn format_resident(instance: &InstanceLine) -> String {
    let mark = if instance.uncertain_at > 0 { "?" } else { "" };
    format!("{}{mark}", instance.resident_blocks)
}

fn format_share(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{share:.4}"))
}

fn render(fleet: &FleetStatus) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(out, "router  address                term  leader  applied   lag  index blocks  copies");
    for router in &fleet.routers {
        let _ = if router.reachable {
            writeln!(
                out,
                "{:<7} {:<22} {:<5} {:<7} {:<9} {:<4} {:<13} {}",
                router.router,
                router.address,
                router.term,
                if router.leader == router.router { "leads".to_owned() } else { router.leader.to_string() },
                router.applied_index,
                router.lag_entries,
                router.index_blocks,
                router.index_copies
            )
        } else {
            writeln!(out, "?       {:<22} {}", router.address, router.problem)
        };
    }
    render_groups(&mut out, fleet);
    let _ = writeln!(
        out,
        "\nnode    data address           state  epoch  blocks     precision  recall  drifts  last word"
    );
    for node in &fleet.nodes {
        let state = if node.live { "live" } else { "gone" };
        let _ = writeln!(
            out,
            "{:<7} {:<22} {state:<6} {:<6} {:<10} {:<10} {:<7} {:<7} {} ms ago",
            node.node,
            node.data_address,
            node.epoch,
            node.blocks,
            format_share(node.precision),
            format_share(node.recall),
            node.drifts,
            node.silent_ms
        );
    }
    let _ = writeln!(
        out,
        "\ninst.   address                node  running  queued tokens  GPU blocks  last report"
    );
    for instance in &fleet.instances {
        let node = instance.node.map_or("-".to_owned(), |node| node.to_string());
        let _ = writeln!(
            out,
            "{:<7} {:<22} {node:<5} {:<8} {:<14} {:<11} {} ms ago",
            instance.instance,
            instance.address,
            instance.running,
            instance.queue_tokens,
            format_resident(instance),
            instance.report_age_ms
        );
    }
    if fleet.pins > 0 {
        let hard = fleet.pins.saturating_sub(fleet.soft_pins);
        let ends = next_pin_end(fleet.next_pin_end_ms);
        let _ = writeln!(out, "\n{} pins: {hard} hard, {} soft{ends}", fleet.pins, fleet.soft_pins);
    }
    out
}

/// Text of the next end of a pin; empty if none has an end.
pub(crate) fn next_pin_end(next_pin_end_ms: Option<u64>) -> String {
    let span = next_pin_end_ms.map(Duration::from_millis);
    span.map(|span| format!("; the next ends in {}", format_seconds(span))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_anti_entropy_results() {
        let group = |agreed_index, diverged, repairs_failed| pb::GroupStatus {
            group: 1,
            leader: 2,
            applied_index: 700,
            agreed_index,
            diverged,
            drifts: 1,
            repairs_failed,
            ..Default::default()
        };
        let truth =
            pb::AuditStats { claimed_blocks: 8, claimed_wrong: 2, held_blocks: 4, ..Default::default() };
        let node = pb::NodeStatus { node: 7, audit: Some(truth), ..Default::default() };
        let status = |router, diverged, repairs_failed| pb::StatusReply {
            router,
            groups: vec![group(512, diverged, repairs_failed)],
            nodes: vec![node.clone()],
            ..Default::default()
        };
        // Earlier failed repairs do not matter once the replica matches again.
        let shown = |diverged, failed| {
            let answers = [(1, false, 9), (2, diverged, failed)];
            let answers = answers
                .map(|(router, diverged, failed)| ("a:1".to_owned(), Ok(status(router, diverged, failed))));
            render(&fleet_status(answers.into()))
        };
        let text = shown(false, 9);
        assert!(text.contains("1       2       700       512               2"), "{text}");
        assert!(text.contains("0.7500     1.0000"), "{text}");
        assert!(shown(true, 0).contains("a replica differs 2"));
        assert!(shown(true, 3).contains("a replica differs, 3 repairs of it failed 2"));
    }

    #[test]
    fn shows_pins_and_their_next_end() {
        let shown = |pins, soft_pins, next_pin_end_ms| {
            let status = pb::StatusReply { pins, soft_pins, next_pin_end_ms, ..Default::default() };
            render(&fleet_status(vec![("a:1".to_owned(), Ok(status))]))
        };
        assert!(shown(3, 1, Some(1_500)).contains("3 pins: 2 hard, 1 soft; the next ends in 1.5 s"));
        assert!(shown(1, 0, None).ends_with("1 pins: 1 hard, 0 soft\n"));
        assert!(!shown(0, 0, None).contains("pins"));
    }

    #[test]
    fn shows_resident_blocks() {
        let status = |blocks, uncertain| {
            let residency = pb::Residency { blocks, uncertain, ..Default::default() };
            let one = pb::InstanceStatus { instance: 3, residency: Some(residency), ..Default::default() };
            Ok(pb::StatusReply { instances: vec![one], ..Default::default() })
        };
        let shown =
            |second| render(&fleet_status(vec![("a:1".into(), status(70, false)), ("b:1".into(), second)]));
        let text = shown(status(80, false));
        assert!(text.contains(" 80          0 ms ago"), "{text}");
        let text = shown(status(0, true));
        assert!(text.contains(" 70?         0 ms ago"), "{text}");
    }

    #[test]
    fn shows_unreachable_routers() {
        let up = pb::StatusReply {
            router: 2,
            leader: 2,
            last_log_index: 9,
            applied_index: 7,
            ..Default::default()
        };
        let fleet = fleet_status(vec![
            ("a:1".into(), Err("router a:1 cannot be reached".into())),
            ("b:2".into(), Ok(up)),
        ]);
        assert_eq!(fleet.routers[1].lag_entries, 2);
        let text = render(&fleet);
        assert!(text.contains("a:1 cannot be reached"), "{text}");
        assert!(text.contains("leads"), "{text}");
    }
}
