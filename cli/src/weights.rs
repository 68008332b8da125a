//! `kvfleet weights`: shows the current generation of weights, or switches to the next.
//!
//! Each router reports its applied state. Not here: the effect of the change (`kv_core::index`,
//! docs/adr/0060).

use std::fmt::Write;

use kvfleet_proto::pb;

use crate::admin::write_to_leader;
use crate::args::WeightsArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// Shows the generation, or switches to the given one.
pub async fn run(args: &WeightsArgs) -> anyhow::Result<()> {
    match args.next {
        Some(next) => {
            let done =
                write_to_leader(&args.connect, async |router| router.set_generation(next).await).await?;
            print!("{}", describe_change(next, &done));
            Ok(())
        }
        None => show(args).await,
    }
}

fn describe_change(next: u32, done: &pb::AdminReply) -> String {
    let position = done.applied_index;
    if done.changed {
        format!(
            "weights are now of generation {next}: KV of earlier generations is invalid on every node (log \
             position {position})\n"
        )
    } else {
        format!("weights are of generation {next} already: nothing changed (log position {position})\n")
    }
}

async fn show(args: &WeightsArgs) -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for router in Connection::open(&args.connect)?.all()? {
        let answer = router.status().await.map_err(|status| explain(&router.address, &status));
        answers.push((router.address, answer));
    }
    if answers.iter().all(|(_, answer)| answer.is_err()) {
        let said: Vec<_> = answers.into_iter().filter_map(|(_, answer)| answer.err()).collect();
        anyhow::bail!("{}", said.join("\n"));
    }
    print!("{}", render(&answers));
    Ok(())
}

fn render(answers: &[(String, Result<pb::StatusReply, String>)]) -> String {
    let reached = || answers.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    // The router with the newest applied entry is the most recent.
    let newest = reached().max_by_key(|status| status.applied_index).cloned().unwrap_or_default();
    let live = newest.nodes.iter().filter(|node| node.live).count();
    let mut text = format!(
        "weights of generation {}: {live} of {} nodes have joined under it\n",
        newest.generation,
        newest.nodes.len()
    );
    for (address, answer) in answers {
        match answer {
            Ok(status) if status.generation != newest.generation => {
                let _ = writeln!(text, "router {address} is behind: generation {}", status.generation);
            }
            Ok(_) => {}
            Err(why) => {
                let _ = writeln!(text, "{why}");
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(applied_index: u64, generation: u32, live: &[bool]) -> pb::StatusReply {
        let nodes = live.iter().map(|&live| pb::NodeStatus { live, ..pb::NodeStatus::default() });
        pb::StatusReply { applied_index, generation, nodes: nodes.collect(), ..pb::StatusReply::default() }
    }

    #[test]
    fn shows_lagging_and_unreachable_routers() {
        let answers = [
            ("r1:1".to_owned(), Ok(status(9, 3, &[true, false]))),
            ("r2:1".to_owned(), Ok(status(7, 2, &[true, true]))),
            ("r3:1".to_owned(), Err("router r3:1 cannot be reached".to_owned())),
        ];
        let expected = "weights of generation 3: 1 of 2 nodes have joined under it\nrouter r2:1 is behind: \
            generation 2\n\
            router r3:1 cannot be reached\n";
        assert_eq!(render(&answers), expected);
    }

    #[test]
    fn describes_repeated_changes() {
        let reply = |changed| pb::AdminReply { applied_index: 4, changed };
        assert!(describe_change(2, &reply(true)).contains("invalid on every node"));
        assert_eq!(
            describe_change(2, &reply(false)),
            "weights are of generation 2 already: nothing changed (log position 4)\n"
        );
    }
}
