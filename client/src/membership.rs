//! Changes the routers of a cluster and the leaders of its Raft groups: one group after the other,
//! control first.
//!
//! Every step requests a state, not a change, so an interrupted change is finished by requesting it
//! again. Not here: one step's work (the router that leads the group), and output for a person
//! (`kvfleet members`).

use std::collections::BTreeMap;
use std::time::Duration;

use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::ClientError;
use crate::retry::channel;

/// Timeout of one call: a membership change is two log entries.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of one status call.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a group may be without a leader that accepts the call.
const LEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Time without progress after which a new router counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// Time between two status polls.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Entries that a learner may lag when it gets its vote: fewer than are written during the change.
const CAUGHT_UP_LAG_MAX: u64 = 64;

/// Error of a membership change that was not made, or not completed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MembersError {
    /// No router answered.
    #[error("none of the routers {0} answers: name running ones")]
    NoneAnswers(String),
    /// The leader of a group refused the change.
    #[error("group {group}: {why}")]
    Refused {
        /// The group.
        group: u32,
        /// The leader's message.
        why: String,
    },
    /// No leader accepted the call in time.
    #[error(
        "group {group} has no leader that takes the change ({why}); when a majority of its voters runs, run the same \
         command again: it goes on where it stopped"
    )]
    NoLeader {
        /// The group.
        group: u32,
        /// The last message received.
        why: String,
    },
    /// A new router does not catch up.
    #[error(
        "router {router} stays {behind} entries behind in group {group}: see whether it runs, then run the \
         same command again: it goes on where it stopped"
    )]
    Stuck {
        /// The router.
        router: u64,
        /// The group.
        group: u32,
        /// Entries it lags behind.
        behind: u64,
    },
    /// The group has no other voter that could lead.
    #[error("router {router} is the only voter of group {group}: add another one first")]
    OnlyVoter {
        /// The router.
        router: u64,
        /// The group.
        group: u32,
    },
}

/// One completed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipStep {
    /// The router follows the group as a learner.
    LearnerAdded(u32),
    /// The router votes in the group.
    VoterPromoted(u32),
    /// The router is not a member of the group.
    Removed(u32),
    /// The group has this leader.
    LeaderTransferred(u32, u64),
}

/// One group's status as its leader reports it, or else the member with the newest term.
pub type GroupMembers = pb::GroupStatus;

/// A client for changing the routers of a cluster.
#[derive(Debug)]
pub struct MembershipClient {
    identity: Identity,
    routers: BTreeMap<String, RouterClient<Channel>>,
}

impl MembershipClient {
    /// Starts from these routers and discovers the others through them. Makes no call yet.
    ///
    /// # Errors
    /// If no router is named or an address is malformed.
    pub fn new(routers: &[String], identity: &Identity) -> Result<MembershipClient, ClientError> {
        if routers.is_empty() {
            return Err(ClientError::NoRouters);
        }
        let mut members = MembershipClient { identity: identity.clone(), routers: BTreeMap::new() };
        routers.iter().try_for_each(|address| members.add_client(address))?;
        Ok(members)
    }

    fn add_client(&mut self, address: &str) -> Result<(), ClientError> {
        if !self.routers.contains_key(address) {
            let client = RouterClient::new(channel(address, &self.identity, Role::Router(None))?);
            self.routers.insert(address.to_owned(), client);
        }
        Ok(())
    }

    /// Every group with its members, ordered by number.
    ///
    /// # Errors
    /// If no router answers.
    pub async fn list(&mut self) -> Result<Vec<GroupMembers>, MembersError> {
        let mut groups: BTreeMap<u32, (bool, u64, GroupMembers)> = BTreeMap::new();
        for client in self.routers.clone().into_values() {
            let Ok(status) = status(client).await else { continue };
            for group in status.groups {
                let rank = (group.leader == status.router, group.term);
                let best = groups.entry(group.group).or_insert((rank.0, rank.1, group.clone()));
                if rank > (best.0, best.1) {
                    *best = (rank.0, rank.1, group);
                }
            }
        }
        if groups.is_empty() {
            let named: Vec<_> = self.routers.keys().map(String::as_str).collect();
            return Err(MembersError::NoneAnswers(named.join(", ")));
        }
        let groups: Vec<GroupMembers> = groups.into_values().map(|(_, _, group)| group).collect();
        for member in groups.iter().flat_map(|group| &group.members) {
            // A malformed address was registered by another caller and is skipped.
            let _ = self.add_client(&member.address);
        }
        Ok(groups)
    }

    /// Makes a router a member of every group. It first becomes a learner in all of them, then a
    /// voter, unless `is_learner` is set.
    ///
    /// # Errors
    /// See [`MembersError`]; a repeated call continues where it stopped.
    pub async fn add(
        &mut self,
        router: u64,
        address: &str,
        is_learner: bool,
        mut on_step: impl FnMut(MembershipStep),
    ) -> Result<(), MembersError> {
        let groups = self.group_ids().await?;
        for &group in &groups {
            let learn = pb::ChangeMemberRequest { group, router, address: address.to_owned(), change: 1 };
            self.change(learn).await?;
            on_step(MembershipStep::LearnerAdded(group));
        }
        if is_learner {
            return Ok(());
        }
        for &group in &groups {
            self.wait_until_caught_up(group, router).await?;
            let vote = pb::ChangeMemberRequest { group, router, address: String::new(), change: 2 };
            self.change(vote).await?;
            on_step(MembershipStep::VoterPromoted(group));
        }
        Ok(())
    }

    /// Removes a router from every group, after another voter takes over the groups that it leads.
    ///
    /// # Errors
    /// See [`MembersError`]; a repeated call continues where it stopped.
    pub async fn remove(
        &mut self,
        router: u64,
        mut on_step: impl FnMut(MembershipStep),
    ) -> Result<(), MembersError> {
        for group in self.group_ids().await? {
            let deadline = Instant::now() + LEADER_TIMEOUT;
            loop {
                if let Some(to) = self.successor(group, router).await? {
                    self.transfer(group, to).await?;
                    on_step(MembershipStep::LeaderTransferred(group, to));
                }
                let gone = pb::ChangeMemberRequest { group, router, address: String::new(), change: 3 };
                match self.change(gone).await {
                    Ok(()) => break,
                    // The router was elected again meanwhile.
                    Err(MembersError::Refused { .. })
                        if Instant::now() < deadline && self.successor(group, router).await?.is_some() => {}
                    Err(error) => return Err(error),
                }
            }
            on_step(MembershipStep::Removed(group));
        }
        Ok(())
    }

    /// Transfers leadership of a group to one of its voters.
    ///
    /// # Errors
    /// See [`MembersError`].
    pub async fn transfer(&mut self, group: u32, to: u64) -> Result<(), MembersError> {
        self.call_leader(group, |mut client| async move {
            let request = with_timeout(pb::TransferLeadRequest { group, to }, CALL_TIMEOUT);
            client.transfer_lead(request).await.map(drop)
        })
        .await
    }

    /// Transfers leadership of every group to one router.
    ///
    /// # Errors
    /// See [`MembersError`].
    pub async fn transfer_all(
        &mut self,
        to: u64,
        mut on_step: impl FnMut(MembershipStep),
    ) -> Result<(), MembersError> {
        for group in self.group_ids().await? {
            self.transfer(group, to).await?;
            on_step(MembershipStep::LeaderTransferred(group, to));
        }
        Ok(())
    }

    async fn group_ids(&mut self) -> Result<Vec<u32>, MembersError> {
        Ok(self.list().await?.iter().map(|group| group.group).collect())
    }

    /// The voter that should lead a group before `router` leaves it: the one with the highest
    /// matched index. `None` if `router` does not lead.
    async fn successor(&mut self, group: u32, router: u64) -> Result<Option<u64>, MembersError> {
        let groups = self.list().await?;
        let Some(known) = groups.iter().find(|known| known.group == group) else { return Ok(None) };
        if known.leader != router {
            return Ok(None);
        }
        let others = known.members.iter().filter(|member| !member.learner && member.router != router);
        let successor = others.max_by_key(|member| member.matched_index).map(|member| member.router);
        successor.map(Some).ok_or(MembersError::OnlyVoter { router, group })
    }

    async fn change(&mut self, request: pb::ChangeMemberRequest) -> Result<(), MembersError> {
        self.call_leader(request.group, |mut client| {
            let request = with_timeout(request.clone(), CALL_TIMEOUT);
            async move { client.change_member(request).await.map(drop) }
        })
        .await
    }

    async fn wait_until_caught_up(&mut self, group: u32, router: u64) -> Result<(), MembersError> {
        let (mut best, mut since) = (u64::MAX, Instant::now());
        loop {
            let groups = self.list().await?;
            let known = groups.iter().find(|known| known.group == group);
            let member = known.and_then(|known| known.members.iter().find(|member| member.router == router));
            if member.is_some_and(|member| !member.learner) {
                return Ok(());
            }
            let matched = member.map_or(0, |member| member.matched_index);
            let behind = known.map_or(u64::MAX, |known| known.last_log_index.saturating_sub(matched));
            if matched > 0 && behind <= CAUGHT_UP_LAG_MAX {
                return Ok(());
            }
            if behind < best {
                (best, since) = (behind, Instant::now());
            }
            if since.elapsed() > STUCK_AFTER {
                return Err(MembersError::Stuck { router, group, behind });
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Calls the group's current leader until the call is accepted or refused.
    async fn call_leader<Fut>(
        &mut self,
        group: u32,
        call: impl Fn(RouterClient<Channel>) -> Fut,
    ) -> Result<(), MembersError>
    where
        Fut: Future<Output = Result<(), Status>>,
    {
        let deadline = Instant::now() + LEADER_TIMEOUT;
        let mut why = "no leader is known".to_owned();
        while Instant::now() < deadline {
            let groups = self.list().await?;
            let leader = groups.iter().find(|known| known.group == group).map(|known| &known.leader_address);
            let client = leader.and_then(|address| self.routers.get(address)).cloned();
            match client {
                None => {}
                Some(client) => match call(client).await {
                    Ok(()) => return Ok(()),
                    Err(status) if is_permanent(&status) => {
                        return Err(MembersError::Refused { group, why: status.message().to_owned() });
                    }
                    Err(status) => status.message().clone_into(&mut why),
                },
            }
            sleep(POLL_INTERVAL).await;
        }
        Err(MembersError::NoLeader { group, why })
    }
}

async fn status(mut client: RouterClient<Channel>) -> Result<pb::StatusReply, Status> {
    client.status(with_timeout(pb::StatusRequest {}, STATUS_TIMEOUT)).await.map(tonic::Response::into_inner)
}

fn is_permanent(status: &Status) -> bool {
    matches!(status.code(), Code::InvalidArgument | Code::PermissionDenied | Code::NotFound)
}

fn with_timeout<M>(message: M, timeout: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}
