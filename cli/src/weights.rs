//! `kvfleet weights`: which generation of weights is in force, and going on to the next.
//!
//! Each router says what it has applied. Not here: what the change does (`kv_core::index`, docs/adr/0060).

use std::fmt::Write;

use kvfleet_proto::pb;

use crate::admin::at_leader;
use crate::args::WeightsArgs;
use crate::calls::explain;
use crate::connect::Connection;

/// Shows the generation, or goes on to the one that was named.
pub async fn run(args: &WeightsArgs) -> anyhow::Result<()> {
    match args.next {
        Some(next) => {
            let done = at_leader(&args.connect, async |router| router.set_generation(next).await).await?;
            print!("{}", said(next, &done));
            Ok(())
        }
        None => show(args).await,
    }
}

fn said(next: u32, done: &pb::AdminReply) -> String {
    let position = done.applied_index;
    if done.changed {
        format!(
            "weights are of generation {next} from now on: what was computed with earlier ones is void on every node (log \
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
    // Whoever has applied most knows best; the others follow.
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
    fn who_is_behind_and_who_does_not_answer_is_shown_beside_what_is_in_force() {
        let answers = [
            ("r1:1".to_owned(), Ok(status(9, 3, &[true, false]))),
            ("r2:1".to_owned(), Ok(status(7, 2, &[true, true]))),
            ("r3:1".to_owned(), Err("router r3:1 cannot be reached".to_owned())),
        ];
        let expected = "weights of generation 3: 1 of 2 nodes have joined under it\nrouter r2:1 is behind: generation 2\n\
                        router r3:1 cannot be reached\n";
        assert_eq!(render(&answers), expected);
    }

    #[test]
    fn a_change_that_was_made_before_is_told_from_one_that_is_made_now() {
        let reply = |changed| pb::AdminReply { applied_index: 4, changed };
        assert!(said(2, &reply(true)).contains("void on every node"));
        assert_eq!(
            said(2, &reply(false)),
            "weights are of generation 2 already: nothing changed (log position 4)\n"
        );
    }
}
