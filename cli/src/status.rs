//! `kvfleet status`: routers, nodes, instances and the index of a running cluster.

use std::fmt::Write;

use kvfleet_proto::pb;
use serde::Serialize;

use crate::args::StatusArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// What one router said, or why it did not.
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
}

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Fleet {
    routers: Vec<RouterLine>,
    nodes: Vec<NodeLine>,
    instances: Vec<InstanceLine>,
    pins: u64,
}

/// Asks every router named and every voter it knows, and prints what they say.
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
    let fleet = gather(answers);
    let text = if args.json { serde_json::to_string_pretty(&fleet)? + "\n" } else { render(&fleet) };
    print!("{text}");
    Ok(())
}

type Answer = (String, Result<pb::StatusReply, String>);

async fn ask(connection: &Connection) -> anyhow::Result<Vec<Answer>> {
    let mut answers = vec![];
    for router in connection.all()? {
        let answer = router.status().await.map_err(|status| explain(&router.address, &status));
        answers.push((router.address, answer));
    }
    Ok(answers)
}

fn gather(answers: Vec<Answer>) -> Fleet {
    let reached = || answers.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let newest = reached().max_by_key(|status| status.applied_index).cloned().unwrap_or_default();
    let last = reached().map(|status| status.last_log_index).max().unwrap_or_default();
    Fleet {
        nodes: newest.nodes.iter().map(node_line).collect(),
        instances: newest.instances.iter().map(instance_line).collect(),
        pins: newest.pins,
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
        digest: status.digest.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

fn node_line(node: &pb::NodeStatus) -> NodeLine {
    NodeLine {
        node: node.node,
        live: node.live,
        epoch: node.epoch,
        blocks: node.blocks,
        silent_ms: node.silent_ms,
        data_address: node.data_address.clone(),
        control_address: node.control_address.clone(),
    }
}

fn instance_line(instance: &pb::InstanceStatus) -> InstanceLine {
    InstanceLine {
        instance: instance.instance,
        address: instance.address.clone(),
        queue_tokens: instance.queue_tokens,
        running: instance.running,
        report_age_ms: instance.report_age_ms,
        node: instance.has_node.then_some(instance.node),
    }
}

fn render(fleet: &Fleet) -> String {
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
    let _ = writeln!(out, "\nnode    data address           state  epoch  blocks     last word");
    for node in &fleet.nodes {
        let state = if node.live { "live" } else { "gone" };
        let _ = writeln!(
            out,
            "{:<7} {:<22} {state:<6} {:<6} {:<10} {} ms ago",
            node.node, node.data_address, node.epoch, node.blocks, node.silent_ms
        );
    }
    let _ = writeln!(out, "\ninst.   address                node  running  queued tokens  last report");
    for instance in &fleet.instances {
        let node = instance.node.map_or("-".to_owned(), |node| node.to_string());
        let _ = writeln!(
            out,
            "{:<7} {:<22} {node:<5} {:<8} {:<14} {} ms ago",
            instance.instance,
            instance.address,
            instance.running,
            instance.queue_tokens,
            instance.report_age_ms
        );
    }
    if fleet.pins > 0 {
        let _ = writeln!(out, "\n{} pins", fleet.pins);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_router_is_shown_with_its_problem() {
        let up = pb::StatusReply {
            router: 2,
            leader: 2,
            last_log_index: 9,
            applied_index: 7,
            ..Default::default()
        };
        let fleet =
            gather(vec![("a:1".into(), Err("router a:1 cannot be reached".into())), ("b:2".into(), Ok(up))]);
        assert_eq!(fleet.routers[1].lag_entries, 2);
        let text = render(&fleet);
        assert!(text.contains("a:1 cannot be reached"), "{text}");
        assert!(text.contains("leads"), "{text}");
    }
}
