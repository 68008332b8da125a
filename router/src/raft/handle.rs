//! What the rest of the router may ask of consensus: propose, who leads, how far it is.
//!
//! Not here: the protocol (openraft), and retries that a client can do better itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_core::index::command::{Applied, Command};
use openraft::Instant as _;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{ClientWriteError, ForwardReason, ForwardToLeader, RaftError};
use openraft::impls::{BasicNode, ProgressResponder};
use openraft::raft::ClientWriteResult;
use openraft::{ChangeMembers, ReadPolicy};

use super::{LogId, Proposal, Raft, StoredMembership, TypeConfig, Vote};

/// How long a proposal is tried again while a fresh leader has not yet been confirmed by a quorum.
/// openraft refuses writes of a leader whose lease is not valid; right after an election that is the
/// rule and lasts about one heartbeat.
const LEASE_PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two such tries: a tenth of a heartbeat.
const LEASE_PAUSE: Duration = Duration::from_millis(10);

/// After so long a snapshot that has not come is asked for again: one that was refused, or that failed, comes no more.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Time between two looks at whether consensus has stopped: the process ends then, which may take that long.
const FAILED_LOOK: Duration = Duration::from_millis(100);

/// Why a proposal has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProposeError {
    /// Another router leads, or none does.
    #[error("not the leader")]
    NotLeader(Option<LeaderAt>),
    /// The leader changed under way: the command may or may not have taken effect.
    #[error("the leader changed while the command was under way; ask for the state before trying again")]
    Unknown(Option<LeaderAt>),
    /// A change of members cannot be made now.
    #[error("the members cannot be changed now: {0}; ask again")]
    Members(String),
    /// This router's consensus has stopped.
    #[error("consensus has stopped on this router: {0}")]
    Stopped(String),
}

/// Where the leader is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaderAt {
    pub(crate) router: u64,
    pub(crate) address: String,
}

/// When the leader was last heard: by a follower through its append calls.
#[derive(Debug)]
pub(crate) struct Contact {
    started: Instant,
    /// Microseconds after `started`; 0 before the first contact.
    heard_us: AtomicU64,
}

impl Contact {
    pub(crate) fn new() -> Contact {
        Contact { started: Instant::now(), heard_us: AtomicU64::new(0) }
    }

    /// A leader spoke just now.
    pub(crate) fn heard(&self) {
        let now = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.heard_us.store(now.max(1), Ordering::Relaxed);
    }

    fn age(&self) -> Option<Duration> {
        let heard = self.heard_us.load(Ordering::Relaxed);
        (heard > 0).then(|| self.started.elapsed().saturating_sub(Duration::from_micros(heard)))
    }
}

/// A change of the members of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemberChange {
    /// A new router follows without a vote.
    Learn { router: u64, address: String },
    /// A learner gets a vote.
    Vote(u64),
    /// A router is no member any more.
    Remove(u64),
}

/// A reading of where consensus stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Standing {
    pub(crate) term: u64,
    pub(crate) leader: Option<LeaderAt>,
    pub(crate) last_log_index: u64,
    pub(crate) snapshot_index: u64,
    /// Every member with its address; whether it only learns.
    pub(crate) members: Vec<(u64, String, bool)>,
    /// Last index known on each voter; only the leader knows.
    pub(crate) matched: BTreeMap<u64, u64>,
}

/// Handle on this router's part of one Raft group.
#[derive(Clone)]
pub(crate) struct Consensus {
    group: u16,
    raft: Raft,
    contact: Arc<Contact>,
    /// Silence of its quorum after which a leader must expect that another one was elected.
    office: Duration,
}

/// Answer of a submitted proposal, when it comes.
pub(crate) type Pending = tokio::sync::oneshot::Receiver<ClientWriteResult<TypeConfig>>;

impl Consensus {
    pub(crate) fn new(group: u16, raft: Raft, office: Duration) -> Consensus {
        Consensus { group, raft, contact: Arc::new(Contact::new()), office }
    }

    /// Number of the group.
    pub(crate) fn group(&self) -> u16 {
        self.group
    }

    /// The leader of the group spoke just now.
    pub(crate) fn heard(&self) {
        self.contact.heard();
    }

    pub(crate) fn raft(&self) -> &Raft {
        &self.raft
    }

    pub(crate) fn id(&self) -> u64 {
        *self.raft.node_id()
    }

    /// Whether this router leads, as far as it knows.
    pub(crate) fn is_leader(&self) -> bool {
        self.raft.is_leader()
    }

    /// Whether this router leads and its quorum confirmed it lately. openraft keeps a leader that is cut
    /// off in the role until it hears of another: nodes must not wait for it that long.
    pub(crate) fn holds_office(&self) -> bool {
        self.is_leader() && self.contact_age().is_some_and(|age| age < self.office)
    }

    /// Who leads, as far as this router knows.
    pub(crate) fn leader(&self) -> Option<LeaderAt> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let router = metrics.current_leader?;
        let address = metrics.membership_config.get_node(&router).map(|node| node.addr.clone())?;
        Some(LeaderAt { router, address })
    }

    /// Time since a leader confirmed this replica: its own quorum when it leads, the leader's last call
    /// when it follows; `None` before the first time.
    pub(crate) fn contact_age(&self) -> Option<Duration> {
        if !self.is_leader() {
            return self.contact.age();
        }
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        if metrics.membership_config.voter_ids().eq([self.id()]) {
            return Some(Duration::ZERO);
        }
        let acked = metrics.last_quorum_acked?;
        Some(acked.into_inner().elapsed())
    }

    /// Whether this router leads and has applied everything that was committed before now. Waits for a
    /// quorum to confirm it; gives up with the patience of a proposal.
    pub(crate) async fn caught_up(&self) -> bool {
        let confirmed = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        matches!(tokio::time::timeout(LEASE_PATIENCE, confirmed).await, Ok(Ok(_)))
    }

    /// An entry that a read must have seen to be linearizable; none unless this router leads and a quorum
    /// confirms it in time.
    pub(crate) async fn read_index_here(&self) -> Option<u64> {
        let asked = self.raft.get_read_linearizer(ReadPolicy::ReadIndex);
        let linearizer = tokio::time::timeout(LEASE_PATIENCE, asked).await.ok()?.ok()?;
        Some(linearizer.read_log_id().index())
    }

    /// Term, leader and progress.
    pub(crate) fn standing(&self) -> Standing {
        let leader = self.leader();
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let matched = metrics.replication.iter().flatten();
        Standing {
            term: metrics.current_term,
            leader,
            last_log_index: metrics.last_log_index.unwrap_or(0),
            snapshot_index: metrics.snapshot.map_or(0, |log_id| log_id.index()),
            members: members(&metrics.membership_config),
            matched: matched.map(|(id, log_id)| (*id, log_id.map_or(0, |log_id| log_id.index()))).collect(),
        }
    }

    /// The vote that this router stands by: of its leader, or for a candidate.
    pub(crate) fn vote(&self) -> Vote {
        self.raft.metrics().borrow_watched().vote
    }

    /// Asks for a snapshot now.
    pub(crate) async fn snapshot_now(&self) {
        if let Err(error) = self.raft.trigger().snapshot().await {
            tracing::warn!(%error, "a snapshot was not started");
        }
    }

    /// Waits until a snapshot on this router's disk reaches this entry, and asks for one, again and again, once it
    /// could; false when consensus stops before.
    pub(crate) async fn has_on_disk(&self, entry: LogId) -> bool {
        let mut metrics = self.raft.metrics();
        let mut asked = None;
        loop {
            let (applied, snapshot) = {
                let metrics = metrics.borrow_watched();
                (metrics.last_applied, metrics.snapshot)
            };
            if snapshot >= Some(entry) {
                return true;
            }
            if applied >= Some(entry) && asked.is_none_or(|at: Instant| at.elapsed() >= ASK_AGAIN) {
                asked = Some(Instant::now());
                self.snapshot_now().await;
            }
            if let Ok(Err(_)) = tokio::time::timeout(ASK_AGAIN, metrics.changed()).await {
                return false;
            }
        }
    }

    /// Campaigns no more: this router is about to go.
    pub(crate) fn stand_aside(&self) {
        self.raft.runtime_config().elect(false);
    }

    /// Whether another router could lead instead.
    pub(crate) fn has_heir(&self) -> bool {
        self.standing().members.iter().any(|(id, _, learns)| *id != self.id() && !learns)
    }

    /// Gives leadership to the voter that is furthest, and waits until it is gone.
    pub(crate) async fn hand_over(&self) {
        let standing = self.standing();
        let is_voter = |id: u64| standing.members.iter().any(|(member, _, learns)| *member == id && !learns);
        let others = standing.matched.iter().filter(|(id, _)| **id != self.id() && is_voter(**id));
        let Some((to, _)) = others.max_by_key(|(_, index)| **index) else { return };
        self.transfer(*to).await;
    }

    /// Gives leadership to this voter, and waits until it is gone. The caller bounds the wait.
    pub(crate) async fn transfer(&self, to: u64) {
        if self.raft.trigger().transfer_leader(to).await.is_err() {
            return;
        }
        let mut metrics = self.raft.server_metrics();
        while self.raft.is_leader() && metrics.changed().await.is_ok() {}
    }

    /// Changes the members and waits until that is committed; gives its log index.
    ///
    /// # Errors
    /// See [`ProposeError`]; a change that is under way already is `Stopped` with its reason.
    pub(crate) async fn change_member(&self, change: MemberChange) -> Result<u64, ProposeError> {
        let answer = match change {
            MemberChange::Learn { router, address } => {
                self.raft.add_learner(router, BasicNode::new(address), false).await
            }
            MemberChange::Vote(router) => {
                let vote = ChangeMembers::AddVoterIds([router].into());
                self.raft.change_membership(vote, true).await
            }
            MemberChange::Remove(router) => {
                let is_voter = self.standing().members.iter().any(|(id, _, learns)| *id == router && !learns);
                if is_voter {
                    let gone = ChangeMembers::RemoveVoters([router].into());
                    self.raft.change_membership(gone, false).await
                } else {
                    let gone = ChangeMembers::RemoveNodes([router].into());
                    self.raft.change_membership(gone, false).await
                }
            }
        };
        answer.map(|response| response.log_id.index()).map_err(propose_error)
    }

    /// Resolves when consensus has stopped for good, with the reason. Looks now and then: who waits for the metrics
    /// to change is woken several times by every entry.
    pub(crate) async fn failed(&self) -> String {
        let metrics = self.raft.metrics();
        loop {
            if let Err(fatal) = &metrics.borrow_watched().running_state {
                return fatal.to_string();
            }
            tokio::time::sleep(FAILED_LOOK).await;
        }
    }

    /// Proposes and waits until the command is applied here.
    ///
    /// # Errors
    /// See [`ProposeError`]; after `Unknown` the caller must look before it tries again.
    pub(crate) async fn propose(&self, command: &Command) -> Result<(u64, Applied), ProposeError> {
        let proposal = Proposal::of(command);
        let deadline = Instant::now() + LEASE_PATIENCE;
        loop {
            let error = match self.raft.client_write(proposal.clone()).await {
                Ok(response) => {
                    let index = response.log_id.index();
                    return response.data.0.map(|applied| (index, applied)).ok_or_else(no_answer);
                }
                Err(error) => error,
            };
            if lease_expired(&error) && Instant::now() < deadline {
                tokio::time::sleep(LEASE_PAUSE).await;
                continue;
            }
            return Err(propose_error(error));
        }
    }

    /// Puts a command in line and returns at once: two submits are applied in the order of the calls.
    ///
    /// # Errors
    /// Only when consensus has stopped; everything else comes through the receiver.
    pub(crate) async fn submit(&self, command: &Command) -> Result<Pending, ProposeError> {
        let (responder, _committed, complete) = ProgressResponder::new();
        let sent = self.raft.client_write_ff(Proposal::of(command), Some(responder)).await;
        sent.map(|()| complete).map_err(|fatal| ProposeError::Stopped(fatal.to_string()))
    }

    /// What a submitted command answered.
    pub(crate) async fn answer(pending: Pending) -> Result<Applied, ProposeError> {
        match pending.await {
            Ok(Ok(response)) => response.data.0.ok_or_else(no_answer),
            Ok(Err(error)) => Err(propose_error(RaftError::APIError(error))),
            Err(_) => Err(ProposeError::Stopped("it dropped a proposal".into())),
        }
    }
}

fn members(membership: &StoredMembership) -> Vec<(u64, String, bool)> {
    let voters: BTreeSet<u64> = membership.voter_ids().collect();
    membership.nodes().map(|(id, node)| (*id, node.addr.clone(), !voters.contains(id))).collect()
}

fn no_answer() -> ProposeError {
    ProposeError::Stopped("a command was applied without an answer".into())
}

type WriteError = RaftError<TypeConfig, ClientWriteError<TypeConfig>>;

fn lease_expired(error: &WriteError) -> bool {
    let forward = error.forward_to_leader();
    forward.is_some_and(|forward| forward.reason == ForwardReason::LeaseExpired)
}

fn propose_error(error: WriteError) -> ProposeError {
    match error {
        RaftError::APIError(ClientWriteError::ForwardToLeader(forward)) => {
            ProposeError::NotLeader(leader_of(forward))
        }
        RaftError::APIError(ClientWriteError::LogEntryDiscarded(forward)) => {
            ProposeError::Unknown(leader_of(forward))
        }
        RaftError::APIError(ClientWriteError::ChangeMembershipError(why)) => {
            ProposeError::Members(why.to_string())
        }
        other => ProposeError::Stopped(other.to_string()),
    }
}

fn leader_of(forward: ForwardToLeader<TypeConfig>) -> Option<LeaderAt> {
    let BasicNode { addr: address } = forward.leader_node?;
    Some(LeaderAt { router: forward.leader_id?, address })
}
