//! `kvfleet members`: shows and changes the routers of a cluster, their votes and the leaders.
//!
//! Not here: the order of the steps (`kvfleet_client::Members`).

use kvfleet_client::{GroupMembers, MembershipClient, MembershipStep};

use crate::args::{AddMemberArgs, ConnectArgs, GroupChoice, MembersCommand, RemoveMemberArgs, TransferArgs};
use crate::connect::Connection;

/// Runs one of the commands.
pub async fn run(command: &MembersCommand) -> anyhow::Result<()> {
    match command {
        MembersCommand::List(args) => {
            print!("{}", render(&open(args)?.list().await?));
            Ok(())
        }
        MembersCommand::Add(args) => add(args).await,
        MembersCommand::Remove(args) => remove(args).await,
        MembersCommand::Transfer(args) => transfer(args).await,
    }
}

fn open(args: &ConnectArgs) -> anyhow::Result<MembershipClient> {
    let connection = Connection::open(args)?;
    Ok(MembershipClient::new(&connection.routers, &connection.identity)?)
}

async fn add(args: &AddMemberArgs) -> anyhow::Result<()> {
    let router = args.router;
    let made = |step| println!("{}", describe_step(router, &step));
    open(&args.connect)?.add(router, &args.address, args.learner, made).await?;
    let what = if args.learner { "learns" } else { "votes" };
    println!("router {router} {what} in every group");
    Ok(())
}

async fn remove(args: &RemoveMemberArgs) -> anyhow::Result<()> {
    let router = args.router;
    open(&args.connect)?.remove(router, |step| println!("{}", describe_step(router, &step))).await?;
    println!("router {router} is no longer a member of any group: stop its process");
    Ok(())
}

async fn transfer(args: &TransferArgs) -> anyhow::Result<()> {
    let mut members = open(&args.connect)?;
    match args.group {
        GroupChoice::One(group) => {
            members.transfer(group, args.router).await?;
            println!(
                "{}",
                describe_step(args.router, &MembershipStep::LeaderTransferred(group, args.router))
            );
        }
        GroupChoice::All => {
            members
                .transfer_all(args.router, |step| println!("{}", describe_step(args.router, &step)))
                .await?;
        }
    }
    Ok(())
}

/// Text of a step. Groups are numbered as in the log: 0 is control.
fn describe_step(router: u64, step: &MembershipStep) -> String {
    match step {
        MembershipStep::LearnerAdded(group) => format!("group {group}: router {router} learns"),
        MembershipStep::VoterPromoted(group) => format!("group {group}: router {router} votes"),
        MembershipStep::Removed(group) => format!("group {group}: router {router} was removed"),
        MembershipStep::LeaderTransferred(group, to) => format!("group {group}: router {to} leads"),
    }
}

fn render(groups: &[GroupMembers]) -> String {
    let mut out = String::from("group    router  address                role     entries behind\n");
    for group in groups {
        let name = if group.group == 0 { "control".to_owned() } else { format!("shard {}", group.group) };
        for member in &group.members {
            let role = match member.learner {
                _ if member.router == group.leader => "leads",
                true => "learns",
                false => "votes",
            };
            // Only the leader knows the progress of the others.
            let behind = if group.members.iter().any(|member| member.matched_index > 0) {
                group.last_log_index.saturating_sub(member.matched_index).to_string()
            } else {
                "?".to_owned()
            };
            out += &format!("{name:<8} {:<7} {:<22} {role:<8} {behind}\n", member.router, member.address);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvfleet_proto::pb;

    #[test]
    fn roles_and_lag_are_shown_per_group() {
        let member = |router, learner, matched_index| pb::Voter {
            router,
            address: format!("r{router}:1"),
            matched_index,
            learner,
        };
        let members = vec![member(1, false, 9), member(2, false, 7), member(3, true, 0)];
        let group = pb::GroupStatus { group: 1, leader: 2, last_log_index: 9, members, ..Default::default() };
        let text = render(&[group]);
        let lines: Vec<&str> = text.lines().skip(1).collect();
        assert_eq!(lines[0], "shard 1  1       r1:1                   votes    0");
        assert_eq!(lines[1], "shard 1  2       r2:1                   leads    2");
        assert_eq!(lines[2], "shard 1  3       r3:1                   learns   9");
    }
}
