//! Changes which routers a cluster has, and who leads what: one group after the other, control first.
//!
//! Every step asks for a state and not for a change, so a change that was cut short is finished by asking for it
//! again. Not here: what one step does (the router that leads the group), and words for a person (`kvfleet
//! members`).

use std::collections::BTreeMap;
use std::time::Duration;

use kvfleet_proto::pb;
use kvfleet_proto::pb::router_client::RouterClient;
use kvfleet_proto::tls::Identity;
use tokio::time::{Instant, sleep};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::ClientError;
use crate::retry::channel;

/// Time for one call: a membership change is two entries of a log.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time for one status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a group may be without a leader that takes the call.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long a new router may make no progress before it counts as stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Entries that a learner may be behind when it gets its vote: fewer than are written during the change.
const LEVEL_ENTRIES: u64 = 64;

/// Why a change of members was not made, or not to its end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MembersError {
    /// No router answered at all.
    #[error("none of the routers {0} answers: name running ones")]
    NoneAnswers(String),
    /// The leader of a group says no.
    #[error("group {group}: {why}")]
    Refused {
        /// The group.
        group: u32,
        /// What it said.
        why: String,
    },
    /// No leader took the call in time.
    #[error(
        "group {group} has no leader that takes the change ({why}); when a majority of its voters runs, run the same \
         command again: it goes on where it stopped"
    )]
    NoLeader {
        /// The group.
        group: u32,
        /// The last that was said.
        why: String,
    },
    /// A new router does not get level with the others.
    #[error(
        "router {router} stays {behind} entries behind in group {group}: see whether it runs, then run the same command \
         again: it goes on where it stopped"
    )]
    Stuck {
        /// The router.
        router: u64,
        /// The group.
        group: u32,
        /// Entries it lacks.
        behind: u64,
    },
    /// Nobody else could lead.
    #[error("router {router} is the only voter of group {group}: add another one first")]
    OnlyVoter {
        /// The router.
        router: u64,
        /// The group.
        group: u32,
    },
}

/// One step that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The router follows the group without a vote.
    Learns(u32),
    /// The router votes in the group.
    Votes(u32),
    /// The router is no member of the group.
    Gone(u32),
    /// The group has another leader.
    Led(u32, u64),
}

/// One group as its leader sees it, or the newest other member.
pub type GroupMembers = pb::GroupStatus;

/// The routers of a cluster, for whoever changes them.
#[derive(Debug)]
pub struct Members {
    identity: Identity,
    routers: BTreeMap<String, RouterClient<Channel>>,
}

impl Members {
    /// Starts from these routers; others are found through them. No call is made yet.
    ///
    /// # Errors
    /// When no router is named or an address is malformed.
    pub fn new(routers: &[String], identity: &Identity) -> Result<Members, ClientError> {
        if routers.is_empty() {
            return Err(ClientError::NoRouters);
        }
        let mut members = Members { identity: identity.clone(), routers: BTreeMap::new() };
        routers.iter().try_for_each(|address| members.know(address))?;
        Ok(members)
    }

    fn know(&mut self, address: &str) -> Result<(), ClientError> {
        if !self.routers.contains_key(address) {
            let client = RouterClient::new(channel(address, &self.identity)?);
            self.routers.insert(address.to_owned(), client);
        }
        Ok(())
    }

    /// Every group with its members, by number.
    ///
    /// # Errors
    /// When no router answers.
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
            // An address that is none was given to the cluster by someone else.
            let _ = self.know(&member.address);
        }
        Ok(groups)
    }

    /// Makes a router a member of every group: first it learns in all of them, then it gets its votes, unless
    /// it is to stay a learner.
    ///
    /// # Errors
    /// See [`MembersError`]; asked again, it goes on where it stopped.
    pub async fn add(
        &mut self,
        router: u64,
        address: &str,
        is_learner: bool,
        mut made: impl FnMut(Step),
    ) -> Result<(), MembersError> {
        let groups = self.numbers().await?;
        for &group in &groups {
            let learn = pb::ChangeMemberRequest { group, router, address: address.to_owned(), change: 1 };
            self.change(learn).await?;
            made(Step::Learns(group));
        }
        if is_learner {
            return Ok(());
        }
        for &group in &groups {
            self.until_level(group, router).await?;
            let vote = pb::ChangeMemberRequest { group, router, address: String::new(), change: 2 };
            self.change(vote).await?;
            made(Step::Votes(group));
        }
        Ok(())
    }

    /// Takes a router out of every group; what it leads is led by another one first.
    ///
    /// # Errors
    /// See [`MembersError`]; asked again, it goes on where it stopped.
    pub async fn remove(&mut self, router: u64, mut made: impl FnMut(Step)) -> Result<(), MembersError> {
        for group in self.numbers().await? {
            let deadline = Instant::now() + PATIENCE;
            loop {
                if let Some(to) = self.heir(group, router).await? {
                    self.transfer(group, to).await?;
                    made(Step::Led(group, to));
                }
                let gone = pb::ChangeMemberRequest { group, router, address: String::new(), change: 3 };
                match self.change(gone).await {
                    Ok(()) => break,
                    // It was elected again meanwhile.
                    Err(MembersError::Refused { .. })
                        if Instant::now() < deadline && self.heir(group, router).await?.is_some() => {}
                    Err(error) => return Err(error),
                }
            }
            made(Step::Gone(group));
        }
        Ok(())
    }

    /// Gives leadership of a group to one of its voters.
    ///
    /// # Errors
    /// See [`MembersError`].
    pub async fn transfer(&mut self, group: u32, to: u64) -> Result<(), MembersError> {
        self.at_leader(group, |mut client| async move {
            let request = limited(pb::TransferLeadRequest { group, to }, CALL_TIMEOUT);
            client.transfer_lead(request).await.map(drop)
        })
        .await
    }

    /// Gives leadership of every group to one router.
    ///
    /// # Errors
    /// See [`MembersError`].
    pub async fn transfer_all(&mut self, to: u64, mut made: impl FnMut(Step)) -> Result<(), MembersError> {
        for group in self.numbers().await? {
            self.transfer(group, to).await?;
            made(Step::Led(group, to));
        }
        Ok(())
    }

    async fn numbers(&mut self) -> Result<Vec<u32>, MembersError> {
        Ok(self.list().await?.iter().map(|group| group.group).collect())
    }

    /// Who should lead a group before `router` leaves it: the voter that is furthest. None when it does not lead.
    async fn heir(&mut self, group: u32, router: u64) -> Result<Option<u64>, MembersError> {
        let groups = self.list().await?;
        let Some(known) = groups.iter().find(|known| known.group == group) else { return Ok(None) };
        if known.leader != router {
            return Ok(None);
        }
        let others = known.members.iter().filter(|member| !member.learner && member.router != router);
        let heir = others.max_by_key(|member| member.matched_index).map(|member| member.router);
        heir.map(Some).ok_or(MembersError::OnlyVoter { router, group })
    }

    async fn change(&mut self, request: pb::ChangeMemberRequest) -> Result<(), MembersError> {
        self.at_leader(request.group, |mut client| {
            let request = limited(request.clone(), CALL_TIMEOUT);
            async move { client.change_member(request).await.map(drop) }
        })
        .await
    }

    async fn until_level(&mut self, group: u32, router: u64) -> Result<(), MembersError> {
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
            if matched > 0 && behind <= LEVEL_ENTRIES {
                return Ok(());
            }
            if behind < best {
                (best, since) = (behind, Instant::now());
            }
            if since.elapsed() > STUCK_AFTER {
                return Err(MembersError::Stuck { router, group, behind });
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Makes a call on the leader of a group, whoever that is, until it is taken or refused.
    async fn at_leader<Answer>(
        &mut self,
        group: u32,
        call: impl Fn(RouterClient<Channel>) -> Answer,
    ) -> Result<(), MembersError>
    where
        Answer: Future<Output = Result<(), Status>>,
    {
        let deadline = Instant::now() + PATIENCE;
        let mut why = "no leader is known".to_owned();
        while Instant::now() < deadline {
            let groups = self.list().await?;
            let leader = groups.iter().find(|known| known.group == group).map(|known| &known.leader_address);
            let client = leader.and_then(|address| self.routers.get(address)).cloned();
            match client {
                None => {}
                Some(client) => match call(client).await {
                    Ok(()) => return Ok(()),
                    Err(status) if is_final(&status) => {
                        return Err(MembersError::Refused { group, why: status.message().to_owned() });
                    }
                    Err(status) => status.message().clone_into(&mut why),
                },
            }
            sleep(LOOK_EVERY).await;
        }
        Err(MembersError::NoLeader { group, why })
    }
}

async fn status(mut client: RouterClient<Channel>) -> Result<pb::StatusReply, Status> {
    client.status(limited(pb::StatusRequest {}, STATUS_TIMEOUT)).await.map(tonic::Response::into_inner)
}

fn is_final(status: &Status) -> bool {
    matches!(status.code(), Code::InvalidArgument | Code::PermissionDenied | Code::NotFound)
}

fn limited<M>(message: M, timeout: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}
