//! The router's interface to consensus: propose, leadership, progress.
//!
//! Not here: the protocol (openraft), and retries that a client can do better.

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

use super::disk_room::DiskRoom;
use super::{LogId, Proposal, Raft, StoredMembership, TypeConfig, Vote};

/// Longest retry of a proposal while a new leader is not confirmed by a quorum. openraft refuses
/// writes of a leader without a valid lease; after an election that lasts about one heartbeat.
const LEASE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Pause between two retries: a tenth of a heartbeat.
const LEASE_PAUSE: Duration = Duration::from_millis(10);

/// Time after which a missing snapshot is requested again, since a refused or failed one is not
/// retried.
const SNAPSHOT_RETRY: Duration = Duration::from_secs(1);

/// Interval between checks of whether consensus has stopped; the process may end this much later.
const FAILURE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Error of a proposal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ProposeError {
    /// Another router leads, or none does.
    #[error("not the leader")]
    NotLeader(Option<LeaderAddress>),
    /// The leader changed meanwhile: the command may or may not have taken effect.
    #[error("the leader changed while the command was in flight; check the state before a retry")]
    Unknown(Option<LeaderAddress>),
    /// The members cannot be changed now.
    #[error("the members cannot be changed now: {0}; ask again")]
    Members(String),
    /// This router has had no room on its disk for a while.
    #[error(
        "the disk of this router is full, and too few others have made the command durable so far: make room in {0}; \
         then check the state before a retry"
    )]
    NoRoom(String),
    /// This router's consensus has stopped.
    #[error("consensus has stopped on this router: {0}")]
    Stopped(String),
}

/// Number and address of the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaderAddress {
    pub(crate) router: u64,
    pub(crate) address: String,
}

/// When a follower last heard from its leader through append calls.
#[derive(Debug)]
pub(crate) struct LeaderContact {
    started: Instant,
    /// Microseconds after `started`; 0 before the first contact.
    last_us: AtomicU64,
}

impl LeaderContact {
    pub(crate) fn new() -> LeaderContact {
        LeaderContact { started: Instant::now(), last_us: AtomicU64::new(0) }
    }

    /// Records a message of the leader.
    pub(crate) fn record(&self) {
        let now = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_us.store(now.max(1), Ordering::Relaxed);
    }

    fn age(&self) -> Option<Duration> {
        let heard = self.last_us.load(Ordering::Relaxed);
        (heard > 0).then(|| self.started.elapsed().saturating_sub(Duration::from_micros(heard)))
    }
}

/// A change of the members of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemberChange {
    /// Adds a router as a learner, without a vote.
    AddLearner { router: u64, address: String },
    /// Makes a learner a voter.
    PromoteVoter(u64),
    /// Removes a router.
    Remove(u64),
}

/// State of consensus at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConsensusStatus {
    pub(crate) term: u64,
    pub(crate) leader: Option<LeaderAddress>,
    pub(crate) last_log_index: u64,
    pub(crate) snapshot_index: u64,
    /// Every member with its address, and whether it is a learner.
    pub(crate) members: Vec<(u64, String, bool)>,
    /// Last matching index of each member; known to the leader only.
    pub(crate) matched: BTreeMap<u64, u64>,
}

/// Handle of this router's part in one Raft group.
#[derive(Clone)]
pub(crate) struct Consensus {
    group: u16,
    raft: Raft,
    contact: Arc<LeaderContact>,
    /// Time without contact to its quorum after which a leader must expect that another was
    /// elected.
    leader_lease: Duration,
    room: Arc<DiskRoom>,
}

/// Receiver of a submitted proposal's result.
pub(crate) type PendingProposal = tokio::sync::oneshot::Receiver<ClientWriteResult<TypeConfig>>;

impl Consensus {
    pub(crate) fn new(group: u16, raft: Raft, leader_lease: Duration, room: Arc<DiskRoom>) -> Consensus {
        Consensus { group, raft, contact: Arc::new(LeaderContact::new()), leader_lease, room }
    }

    /// Number of the group.
    pub(crate) fn group(&self) -> u16 {
        self.group
    }

    /// Records a message of the group's leader.
    pub(crate) fn record_leader_contact(&self) {
        self.contact.record();
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

    /// Whether this router leads and its quorum confirmed it recently. openraft keeps an isolated
    /// leader in its role until it hears of another; nodes must not wait that long.
    pub(crate) fn holds_leader_lease(&self) -> bool {
        self.is_leader() && self.contact_age().is_some_and(|age| age < self.leader_lease)
    }

    /// The leader, as far as this router knows.
    pub(crate) fn leader(&self) -> Option<LeaderAddress> {
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let router = metrics.current_leader?;
        let address = metrics.membership_config.get_node(&router).map(|node| node.addr.clone())?;
        Some(LeaderAddress { router, address })
    }

    /// Time since a leader confirmed this replica: its own quorum if it leads, the leader's last
    /// call if it follows. `None` before the first time.
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

    /// Whether this router leads and has applied everything committed before the call. Waits for a
    /// quorum, up to [`LEASE_WAIT_MAX`].
    pub(crate) async fn caught_up(&self) -> bool {
        let confirmed = self.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        matches!(tokio::time::timeout(LEASE_WAIT_MAX, confirmed).await, Ok(Ok(_)))
    }

    /// Index of the entry that a linearizable read must include; `None` unless this router leads
    /// and a quorum confirms it in time.
    pub(crate) async fn local_read_index(&self) -> Option<u64> {
        let asked = self.raft.get_read_linearizer(ReadPolicy::ReadIndex);
        let linearizer = tokio::time::timeout(LEASE_WAIT_MAX, asked).await.ok()?.ok()?;
        Some(linearizer.read_log_id().index())
    }

    /// Term, leader and progress.
    pub(crate) fn status(&self) -> ConsensusStatus {
        let leader = self.leader();
        let metrics = self.raft.metrics();
        let metrics = metrics.borrow_watched();
        let matched = metrics.replication.iter().flatten();
        ConsensusStatus {
            term: metrics.current_term,
            leader,
            last_log_index: metrics.last_log_index.unwrap_or(0),
            snapshot_index: metrics.snapshot.map_or(0, |log_id| log_id.index()),
            members: members(&metrics.membership_config),
            matched: matched.map(|(id, log_id)| (*id, log_id.map_or(0, |log_id| log_id.index()))).collect(),
        }
    }

    /// The current term.
    pub(crate) fn term(&self) -> u64 {
        self.raft.metrics().borrow_watched().current_term
    }

    /// This router's current vote: for its leader, or for a candidate.
    pub(crate) fn vote(&self) -> Vote {
        self.raft.metrics().borrow_watched().vote
    }

    /// Requests a snapshot now.
    pub(crate) async fn snapshot_now(&self) {
        if let Err(error) = self.raft.trigger().snapshot().await {
            tracing::warn!(%error, "a snapshot was not started");
        }
    }

    /// Waits until a snapshot on disk covers this entry, and requests one repeatedly once the entry
    /// is applied. Returns false if consensus stops first.
    pub(crate) async fn wait_snapshot_covers(&self, entry: LogId) -> bool {
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
            if applied >= Some(entry) && asked.is_none_or(|at: Instant| at.elapsed() >= SNAPSHOT_RETRY) {
                asked = Some(Instant::now());
                self.snapshot_now().await;
            }
            if let Ok(Err(_)) = tokio::time::timeout(SNAPSHOT_RETRY, metrics.changed()).await {
                return false;
            }
        }
    }

    /// Stops campaigning, since this router is about to leave.
    pub(crate) fn stop_campaigning(&self) {
        self.raft.runtime_config().elect(false);
    }

    /// Whether another voter could lead instead.
    pub(crate) fn has_other_voter(&self) -> bool {
        self.status().members.iter().any(|(id, _, learns)| *id != self.id() && !learns)
    }

    /// Transfers leadership to the most advanced voter and waits until it is gone.
    pub(crate) async fn hand_over(&self) {
        let status = self.status();
        let is_voter = |id: u64| status.members.iter().any(|(member, _, learns)| *member == id && !learns);
        let others = status.matched.iter().filter(|(id, _)| **id != self.id() && is_voter(**id));
        let Some((to, _)) = others.max_by_key(|(_, index)| **index) else { return };
        self.transfer(*to).await;
    }

    /// Transfers leadership to this voter and waits until it is gone. The caller bounds the wait.
    pub(crate) async fn transfer(&self, to: u64) {
        if self.raft.trigger().transfer_leader(to).await.is_err() {
            return;
        }
        let mut metrics = self.raft.server_metrics();
        while self.raft.is_leader() && metrics.changed().await.is_ok() {}
    }

    /// Changes the members and waits for the commit; returns its log index.
    ///
    /// # Errors
    /// See [`ProposeError`]; a change that is in progress already is `Members` with its reason.
    pub(crate) async fn change_member(&self, change: MemberChange) -> Result<u64, ProposeError> {
        let answer = match change {
            MemberChange::AddLearner { router, address } => {
                self.raft.add_learner(router, BasicNode::new(address), false).await
            }
            MemberChange::PromoteVoter(router) => {
                let vote = ChangeMembers::AddVoterIds([router].into());
                self.raft.change_membership(vote, true).await
            }
            MemberChange::Remove(router) => {
                let is_voter = self.status().members.iter().any(|(id, _, learns)| *id == router && !learns);
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

    /// Resolves with the reason when consensus has stopped for good. Polls, since waiting on the
    /// metrics would wake several times per entry.
    pub(crate) async fn failed(&self) -> String {
        let metrics = self.raft.metrics();
        loop {
            if let Err(fatal) = &metrics.borrow_watched().running_state {
                return fatal.to_string();
            }
            tokio::time::sleep(FAILURE_POLL_INTERVAL).await;
        }
    }

    /// Proposes a command and waits until it is applied here.
    ///
    /// # Errors
    /// See [`ProposeError`]; after `Unknown` the caller must check the state before a retry.
    pub(crate) async fn propose(&self, command: &Command) -> Result<(u64, Applied), ProposeError> {
        let proposal = Proposal::encode(command);
        let deadline = Instant::now() + LEASE_WAIT_MAX;
        loop {
            let written = tokio::select! {
                written = self.raft.client_write(proposal.clone()) => written,
                () = self.room.missing_for_a_proposal() => {
                    return Err(ProposeError::NoRoom(self.room.directory().display().to_string()));
                }
            };
            let error = match written {
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

    /// Queues a command and returns at once: submitted commands are applied in order.
    ///
    /// # Errors
    /// Only if consensus has stopped; other errors come through the receiver.
    pub(crate) async fn submit(&self, command: &Command) -> Result<PendingProposal, ProposeError> {
        let (responder, _committed, complete) = ProgressResponder::new();
        let sent = self.raft.client_write_ff(Proposal::encode(command), Some(responder)).await;
        sent.map(|()| complete).map_err(|fatal| ProposeError::Stopped(fatal.to_string()))
    }

    /// Awaits the result of a submitted command.
    pub(crate) async fn await_result(pending: PendingProposal) -> Result<Applied, ProposeError> {
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
    ProposeError::Stopped("a command was applied without a result".into())
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

fn leader_of(forward: ForwardToLeader<TypeConfig>) -> Option<LeaderAddress> {
    let BasicNode { addr: address } = forward.leader_node?;
    Some(LeaderAddress { router: forward.leader_id?, address })
}
