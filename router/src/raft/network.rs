//! Raft calls to the other routers: gRPC with mutual TLS, one lazily connected channel per peer,
//! shared by all groups.
//!
//! Payloads are MessagePack of openraft's types, with commands of entries out of line
//! (`append.rs`). A snapshot is a stream of checksummed chunks. Not here: reading its file
//! (`snapshot_sender.rs`), the receiving side (`service.rs`) and the decision to call (openraft).

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, Either, select};
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt, Stream, StreamExt};
use kv_core::id::RouterId;
use kv_core::index::SNAPSHOT_FORMAT;
use kvfleet_net::channel::{connect_lazily, endpoint};
use kvfleet_net::tls::{Identity, Role};
use kvfleet_proto::pb;
use kvfleet_proto::pb::raft_client::RaftClient;
use openraft::OptionalSend;
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::impls::BasicNode;
use openraft::network::{RPCOption, RaftNetworkFactory, RaftNetworkV2, stream_append_sequential};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult, TransferLeaderRequest,
    TransferLeaderResponse, VoteRequest, VoteResponse,
};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::snapshot_file::SnapshotFile;
use super::snapshot_sender::{self, SENDING_MAX};
use super::state_machine::SnapshotData;
use super::{ClusterIdentity, Snapshot, SnapshotMeta, TypeConfig, Vote, append, append_stream};

/// Largest Raft message: one replication message (`REPLICATION_BYTES_MAX`), where a single entry
/// may be a full announce batch, with room for its envelope.
pub(crate) const RAFT_MESSAGE_BYTES_MAX: usize = 32 << 20;

/// Connect timeout, below the shortest election timeout, so that a dead peer does not cost a
/// candidate its election.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);

/// Time for entries to reach a follower's disk, from the moment that the previous ones did.
/// openraft would allow one heartbeat, and a slow disk or busy processor then made leaders resend
/// megabytes that had arrived. Heartbeats are separate calls, so this delays no failure detection;
/// [`KEEPALIVE`] detects a vanished peer.
const APPEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Ping interval of an idle connection, to detect a vanished peer.
const KEEPALIVE: Duration = Duration::from_secs(2);

/// Connections to the other routers by number and address, shared by all groups of a process.
#[derive(Clone)]
pub(crate) struct Peers {
    identity: Identity,
    channels: Arc<Mutex<HashMap<PeerKey, Channel>>>,
    /// Slots for outgoing snapshots.
    send_slots: Arc<Semaphore>,
}

/// A router and its address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PeerKey {
    router: u64,
    address: String,
}

impl Peers {
    pub(crate) fn new(identity: Identity) -> Peers {
        Peers { identity, channels: Arc::default(), send_slots: Arc::new(Semaphore::new(SENDING_MAX)) }
    }

    /// A client of this router, a member of a group; it connects on first use, and only to a server
    /// with the certificate of this router.
    pub(crate) fn client(&self, router: u64, address: &str) -> Result<RaftClient<Channel>, String> {
        let key = PeerKey { router, address: address.to_owned() };
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(&key) {
            return Ok(raft_client(channel.clone()));
        }
        let channel = self.channel(address, Role::Router(Some(RouterId(router))))?;
        channels.insert(key, channel.clone());
        Ok(raft_client(channel))
    }

    /// A client of the router at this address, whatever its number. Its connection is not kept.
    pub(crate) fn new_client(&self, address: &str) -> Result<RaftClient<Channel>, String> {
        self.channel(address, Role::Router(None)).map(raft_client)
    }

    /// Waits for a slot to send a snapshot; `None` if the router stops.
    pub(crate) async fn acquire_send_slot(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.send_slots).acquire_owned().await.ok()
    }

    /// A separate channel to the node at this address, connected on first use.
    pub(crate) fn node_channel(&self, address: &str) -> Result<Channel, String> {
        self.channel(address, Role::Node(None))
    }

    fn channel(&self, address: &str, server: Role) -> Result<Channel, String> {
        let endpoint = endpoint(address)
            .map_err(|error| format!("{address} is no address: {error}"))?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE)
            .keep_alive_while_idle(true);
        Ok(connect_lazily(&endpoint, &self.identity, server))
    }
}

fn raft_client(channel: Channel) -> RaftClient<Channel> {
    RaftClient::new(channel)
        .max_decoding_message_size(RAFT_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(RAFT_MESSAGE_BYTES_MAX)
}

/// Envelope of one group's messages.
#[derive(Clone)]
pub(crate) struct Envelope {
    pub(crate) cluster: Arc<ClusterIdentity>,
    pub(crate) group: u16,
}

impl Envelope {
    /// A message with this payload.
    pub(crate) fn frame(&self, payload: Vec<u8>) -> pb::RaftFrame {
        let (cluster, shards) = (self.cluster.name.clone(), self.cluster.shards.into());
        let payload = Bytes::from(payload);
        pb::RaftFrame { group: self.group.into(), payload, cluster, shards, commands: Vec::new() }
    }
}

/// Creates a client per peer, for one group.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) peers: Peers,
    pub(crate) envelope: Envelope,
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = PeerClient;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> PeerClient {
        let (client, sending) = (self.peers.client(target, &node.addr), Arc::clone(&self.peers.send_slots));
        PeerClient { target, client, envelope: self.envelope.clone(), send_slots: sending }
    }
}

/// Client of one peer in one group.
pub(crate) struct PeerClient {
    target: u64,
    client: Result<RaftClient<Channel>, String>,
    envelope: Envelope,
    send_slots: Arc<Semaphore>,
}

type RpcError = RPCError<TypeConfig>;

/// A follower's answers to a stream of append calls.
type AppendAnswers<'s> =
    BoxFuture<'s, Result<BoxStream<'s, Result<StreamAppendResult<TypeConfig>, RpcError>>, RpcError>>;

impl PeerClient {
    fn client(&self) -> Result<RaftClient<Channel>, RpcError> {
        match &self.client {
            Ok(client) => Ok(client.clone()),
            Err(why) => Err(RPCError::Unreachable(Unreachable::from_string(why.clone()))),
        }
    }

    /// A request with a deadline.
    fn request<T: Serialize>(
        &self,
        message: &T,
        deadline: Duration,
    ) -> Result<Request<pb::RaftFrame>, RpcError> {
        let payload =
            rmp_serde::to_vec_named(message).map_err(|error| RPCError::Network(NetworkError::new(&error)))?;
        Ok(with_deadline(self.envelope.frame(payload), deadline))
    }

    /// Sends a snapshot once a slot is free, and waits until it is installed.
    async fn send(
        &self,
        head: &SnapshotHead,
        stored: Arc<SnapshotFile>,
        deadline: Duration,
    ) -> Result<SnapshotResponse<TypeConfig>, RpcError> {
        let group = self.envelope.group;
        let slot = self.send_slots.acquire().await;
        let _slot = slot.map_err(|closed| RPCError::Network(NetworkError::new(&closed)))?;
        let bytes = head.bytes;
        tracing::info!(group, peer = self.target, bytes, "sending a snapshot");
        let encoded =
            rmp_serde::to_vec_named(head).map_err(|error| RPCError::Network(NetworkError::new(&error)))?;
        let mut request = Request::new(snapshot_sender::parts(&self.envelope, encoded, Arc::clone(&stored)));
        request.set_timeout(deadline);
        let answer = self.client()?.snapshot(request).await;
        if stored.is_damaged() {
            let what = "the snapshot on this router is damaged; it is rebuilt and sent again";
            return Err(RPCError::Network(NetworkError::from_string(what)));
        }
        if let Err(status) = &answer {
            let why = status.message();
            tracing::warn!(group, peer = self.target, why, "a snapshot did not arrive; it is sent again");
        }
        decode_reply(answer)
    }
}

fn with_deadline(frame: pb::RaftFrame, deadline: Duration) -> Request<pb::RaftFrame> {
    let mut request = Request::new(frame);
    request.set_timeout(deadline);
    request
}

fn decode_reply<T: DeserializeOwned>(
    answer: Result<tonic::Response<pb::RaftFrame>, Status>,
) -> Result<T, RpcError> {
    let frame = answer.map_err(|status| rpc_error(&status))?.into_inner();
    rmp_serde::from_slice(&frame.payload).map_err(|error| RPCError::Network(NetworkError::new(&error)))
}

/// Error for openraft: an unreachable peer is left alone for a while; anything else is retried at
/// once.
pub(super) fn rpc_error(status: &Status) -> RpcError {
    match status.code() {
        Code::Unavailable | Code::Unimplemented => RPCError::Unreachable(Unreachable::new(status)),
        Code::FailedPrecondition => {
            tracing::error!(why = status.message(), "another router refuses this one");
            RPCError::Unreachable(Unreachable::new(status))
        }
        _ => RPCError::Network(NetworkError::new(status)),
    }
}

impl RaftNetworkV2<TypeConfig> for PeerClient {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RpcError> {
        let deadline = if rpc.entries.is_empty() { option.hard_ttl() } else { APPEND_TIMEOUT };
        let frame = append::to_frame(&self.envelope, rpc);
        let frame = frame.map_err(|error| RPCError::Network(NetworkError::new(&error)))?;
        decode_reply(self.client()?.append(with_deadline(frame, deadline)).await)
    }

    fn stream_append<'s, S>(&'s mut self, mut calls: S, option: RPCOption) -> AppendAnswers<'s>
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            // openraft pauses in here after a failure, so this comes before anything is sent.
            let Some(first) = calls.next().await else { return Ok(stream::empty().boxed()) };
            match calls.next().now_or_never() {
                // A heartbeat or a probe, not worth a stream.
                Some(None) => stream_append_sequential(self, stream::iter([first]), option).await,
                second => {
                    let calls = stream::iter([first].into_iter().chain(second.flatten())).chain(calls);
                    append_stream::send(self.client()?, self.envelope.clone(), calls, APPEND_TIMEOUT).await
                }
            }
        })
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        decode_reply(self.client()?.vote(self.request(&rpc, option.hard_ttl())?).await)
    }

    async fn pre_vote(
        &mut self,
        rpc: VoteRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        decode_reply(self.client()?.pre_vote(self.request(&rpc, option.hard_ttl())?).await)
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let SnapshotData::File(stored) = snapshot.snapshot else {
            return Err(NetworkError::from_string("a received snapshot cannot be sent").into());
        };
        let (format, bytes) = (SNAPSHOT_FORMAT, stored.bytes);
        let head = SnapshotHead { vote, meta: snapshot.meta, format, bytes };
        let sending = Box::pin(self.send(&head, stored, option.hard_ttl()));
        match select(sending, Box::pin(cancel)).await {
            Either::Left((answer, _)) => Ok(answer?),
            Either::Right((closed, _)) => Err(StreamingError::Closed(closed)),
        }
    }

    async fn transfer_leader(
        &mut self,
        rpc: TransferLeaderRequest<TypeConfig>,
        option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RpcError> {
        decode_reply(self.client()?.transfer_leader(self.request(&rpc, option.hard_ttl())?).await)
    }
}

/// First part of a snapshot stream.
#[derive(Serialize, serde::Deserialize)]
pub(crate) struct SnapshotHead {
    pub(crate) vote: Vote,
    pub(crate) meta: SnapshotMeta,
    /// Format of its chunks.
    pub(crate) format: u32,
    /// Number of data bytes that follow.
    pub(crate) bytes: u64,
}
