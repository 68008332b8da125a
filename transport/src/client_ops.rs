//! The client side of the four operations, over any stream.
//!
//! Not here: opening streams (`quic/path.rs`, `tcp/path.rs`), verification of frames (the caller),
//! retries, choice of sources.

use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use prost::Message;
use tokio::time::{Instant, timeout_at};

use crate::dial::within;
use crate::layered::{LayerWait, NextLayer};
use crate::slices::{FetchAssembly, FrameSplitter};
use crate::stream::{MESSAGE_BYTES_MAX, NextItem, Stream, read_frame, read_message};
use crate::{
    FetchAnswer, FetchRequest, LayerRequest, LayerSource, LayeredSaveOutcome, MissReason, PathError,
    Progress, SaveAnswer, SaveOffer, SaveRequest, SliceSink, layered, pieces, wire,
};

/// Longest deadline of a fetch. A longer one is as good as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// What a client sends in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientPayload {
    /// Only the request.
    RequestOnly,
    /// Frames after the request.
    Frames,
}

/// A client that opens a stream for each operation.
pub(crate) trait OperationClient: Sync {
    type Stream: Stream;

    /// Address of the peer.
    fn peer(&self) -> &str;

    /// Time without progress after which a save, release or ping counts as lost.
    fn stall_timeout(&self) -> Duration;

    /// Sends a request and reads the answering message. Marks `fetch` as asked.
    fn call<M: Message + Default>(
        &self,
        request: &data::DataRequest,
        sends: ClientPayload,
        fetch: Option<&Progress>,
    ) -> impl Future<Output = Result<(M, Self::Stream), PathError>> + Send;

    /// Records that the peer answered a layer-wise fetch with frames.
    fn note_frames_only_fetch(&self);

    /// Records that the peer seems not to support layer-wise saves.
    fn note_frames_only_saves(&self);

    /// The operation is complete on both sides; the stream may be reused.
    fn finish(&self, stream: Self::Stream);
}

pub(crate) async fn fetch<A: OperationClient>(
    asks: &A,
    request: &FetchRequest,
    sink: &mut (dyn FnMut(Frame) + Send),
) -> Result<FetchAnswer, PathError> {
    let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
    let begun = match start_fetch(asks, request, &wire::fetch_to_pb(request), deadline).await? {
        Ok(begun) => begun,
        Err(reason) => return Ok(FetchAnswer::Miss { reason }),
    };
    let AnsweredFetch { answer, mut stream, .. } = begun;
    let received = receive(&mut stream, answer.tiers().len(), deadline, sink).await;
    if received.is_over {
        asks.finish(stream);
    }
    Ok(answer.cut_short(received.blocks, received.reason))
}

/// Like [`fetch`], layer by layer; whole frames from a node that sends only these.
pub(crate) async fn fetch_layers<A: OperationClient>(
    asks: &A,
    request: &FetchRequest,
    asked: LayerRequest,
    sink: &mut dyn SliceSink,
) -> Result<FetchAnswer, PathError> {
    let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
    let begun = match start_fetch(asks, request, &wire::layers_to_pb(request, &asked), deadline).await? {
        Ok(begun) => begun,
        Err(reason) => return Ok(FetchAnswer::Miss { reason }),
    };
    let AnsweredFetch { answer, mut stream, is_by_layer } = begun;
    let wanted = answer.tiers().len();
    let (received, spoilt) = if is_by_layer {
        (receive_layers(&mut stream, wanted, deadline, FetchAssembly::new(sink, asked.layers)).await, None)
    } else {
        asks.note_frames_only_fetch();
        let mut whole = FrameSplitter::new(sink, asked);
        let received = receive(&mut stream, wanted, deadline, &mut |frame| whole.split(&[frame])).await;
        (received, whole.good_blocks())
    };
    if received.is_over {
        asks.finish(stream);
    }
    let answer = answer.cut_short(received.blocks, received.reason);
    Ok(match spoilt {
        Some(good) => answer.cut_short(good, MissReason::Corrupt),
        None => answer,
    })
}

/// A fetch after its answer.
struct AnsweredFetch<S> {
    answer: FetchAnswer,
    stream: S,
    /// Whether slices follow, not frames.
    is_by_layer: bool,
}

/// Requests blocks and reads the answer; the inner error is the reason of a miss.
async fn start_fetch<A: OperationClient>(
    asks: &A,
    request: &FetchRequest,
    wire: &data::DataRequest,
    deadline: Instant,
) -> Result<Result<AnsweredFetch<A::Stream>, MissReason>, PathError> {
    let progress = &request.progress;
    let call = asks.call::<data::FetchHead>(wire, ClientPayload::RequestOnly, Some(progress));
    let Ok(called) = timeout_at(deadline, call).await else {
        return Ok(Err(MissReason::TooLate));
    };
    let (head, stream) = called?;
    progress.mark_answered();
    let (answer, epoch) =
        wire::head_from_pb(&head, request.hashes.len()).map_err(|error| protocol(asks, &error))?;
    if epoch != request.epoch && !answer.tiers().is_empty() {
        return Ok(Err(MissReason::StaleEpoch));
    }
    Ok(Ok(AnsweredFetch { answer, stream, is_by_layer: head.is_by_layer }))
}

pub(crate) async fn save<A: OperationClient>(
    asks: &A,
    request: &SaveRequest,
    source: &(dyn Fn(usize) -> Frame + Send + Sync),
) -> Result<SaveAnswer, PathError> {
    let lost = |loss: crate::stream::StreamError| loss.at(asks.peer());
    let OfferedSave { wanted, mut stream, .. } =
        match offer(asks, request, &wire::save_to_pb(request)).await? {
            Ok(offered) => offered,
            Err(answer) => return Ok(answer),
        };
    for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
        with_stall_timeout(asks, async { stream.write(source(position).bytes).await.map_err(lost) }).await?;
    }
    finish_save(asks, stream).await
}

/// Ends a completely sent save and reads its result.
async fn finish_save<A: OperationClient>(asks: &A, mut stream: A::Stream) -> Result<SaveAnswer, PathError> {
    with_stall_timeout(asks, async { stream.end(None).await.map_err(|loss| loss.at(asks.peer())) }).await?;
    let answered = async { read_message(&mut stream).await.map_err(|error| error.at(asks.peer())) };
    let done: data::SaveDone = with_stall_timeout(asks, answered).await?;
    asks.finish(stream);
    Ok(wire::done_from_pb(&done))
}

/// A save after its offer was accepted.
struct OfferedSave<S> {
    wanted: Vec<bool>,
    stream: S,
    /// Whether slices are expected, not frames.
    is_by_layer: bool,
}

/// Offers blocks; the inner error is the final answer if no block is wanted.
async fn offer<A: OperationClient>(
    asks: &A,
    request: &SaveRequest,
    wire: &data::DataRequest,
) -> Result<Result<OfferedSave<A::Stream>, SaveAnswer>, PathError> {
    let (offer, stream) =
        with_stall_timeout(asks, asks.call::<data::SaveOffer>(wire, ClientPayload::Frames, None)).await?;
    let is_by_layer = offer.is_by_layer;
    let offer = wire::offer_from_pb(&offer, request.hashes.len()).map_err(|error| protocol(asks, &error))?;
    let answer = match offer {
        SaveOffer::Wanted(wanted) => return Ok(Ok(OfferedSave { wanted, stream, is_by_layer })),
        SaveOffer::Busy { retry_after } => SaveAnswer::Busy { retry_after },
        SaveOffer::Refused(refusal) => SaveAnswer::Refused(refusal),
    };
    asks.finish(stream);
    Ok(Err(answer))
}

/// Saves blocks while they are computed, slice by slice. If the node does not accept slices, the
/// caller saves the whole frames later.
pub(crate) async fn save_layers<A: OperationClient>(
    asks: &A,
    request: &SaveRequest,
    layers: &mut dyn LayerSource,
) -> Result<LayeredSaveOutcome, PathError> {
    let wire = wire::save_layers_to_pb(request, layers.slice_bytes());
    // The list of lengths would make the message too large.
    if wire.encoded_len() > MESSAGE_BYTES_MAX {
        return Ok(LayeredSaveOutcome::NotStreamed);
    }
    // A busy or refusing node may accept the save once all is computed.
    let Ok(OfferedSave { wanted, stream, is_by_layer }) = offer(asks, request, &wire).await? else {
        return Ok(LayeredSaveOutcome::NotStreamed);
    };
    if !wanted.contains(&true) {
        return finish_save(asks, stream).await.map(LayeredSaveOutcome::Answered);
    }
    if is_by_layer {
        return send_layers(asks, stream, &wanted, layers).await;
    }
    // Only a node that supports layer-wise saves answers an end before the first frame. A timeout
    // proves neither, and a failure suggests that it does not.
    match finish_save(asks, stream).await {
        Ok(_) => return Ok(LayeredSaveOutcome::NotStreamed),
        Err(PathError::TimedOut { .. }) => {}
        Err(_) => asks.note_frames_only_saves(),
    }
    Ok(LayeredSaveOutcome::Abandoned)
}

/// Sends the slices of wanted blocks as they are computed, then their headers.
async fn send_layers<A: OperationClient>(
    asks: &A,
    mut stream: A::Stream,
    wanted: &[bool],
    layers: &mut dyn LayerSource,
) -> Result<LayeredSaveOutcome, PathError> {
    let lost = |loss: crate::stream::StreamError| loss.at(asks.peer());
    let mut patience = LayerWait::new(asks.peer(), asks.stall_timeout());
    for layer in 0.. {
        let slices = match layered::next_layer(layers, layer, wanted.len(), &patience).await? {
            NextLayer::Layer(slices) => slices,
            NextLayer::End => break,
            NextLayer::Slow => return Ok(LayeredSaveOutcome::Abandoned),
        };
        for (slice, _) in
            slices.into_iter().zip(wanted).filter(|(slice, wanted)| **wanted && !slice.is_empty())
        {
            if patience.is_expired() {
                return Ok(LayeredSaveOutcome::Abandoned);
            }
            let bytes = slice.len();
            with_stall_timeout(asks, async { stream.write(slice).await.map_err(lost) }).await?;
            layers.sent(bytes);
            patience.record_progress();
        }
        // The next layer may take long.
        with_stall_timeout(asks, async { stream.flush().await.map_err(lost) }).await?;
    }
    for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
        let head = layers.head(position);
        let bytes = head.len();
        with_stall_timeout(asks, async { stream.write(head).await.map_err(lost) }).await?;
        layers.sent(bytes);
    }
    finish_save(asks, stream).await.map(LayeredSaveOutcome::Answered)
}

pub(crate) async fn release<A: OperationClient>(asks: &A, lease: LeaseId) -> Result<(), PathError> {
    let request = wire::release_to_pb(lease);
    let (_, stream) =
        with_stall_timeout(asks, asks.call::<data::Pong>(&request, ClientPayload::RequestOnly, None)).await?;
    asks.finish(stream);
    Ok(())
}

pub(crate) async fn ping<A: OperationClient>(asks: &A) -> Result<Duration, PathError> {
    let asked = Instant::now();
    let ping = wire::ping_to_pb();
    let (pong, stream) =
        with_stall_timeout(asks, asks.call::<data::Pong>(&ping, ClientPayload::RequestOnly, None)).await?;
    asks.finish(stream);
    if pong.version != wire::PROTOCOL_VERSION {
        return Err(protocol(asks, &format_args!("protocol version {}", pong.version)));
    }
    Ok(asked.elapsed())
}

/// Result of receiving a fetch's blocks.
struct ReceivedBlocks {
    blocks: usize,
    /// Why no more blocks arrived.
    reason: MissReason,
    /// Whether the operation is complete on both sides.
    is_over: bool,
}

/// Passes up to `wanted` frames to `sink`.
async fn receive(
    stream: &mut impl Stream,
    wanted: usize,
    deadline: Instant,
    sink: &mut (dyn FnMut(Frame) + Send),
) -> ReceivedBlocks {
    for blocks in 0..wanted {
        let cut = |reason, is_over| ReceivedBlocks { blocks, reason, is_over };
        match timeout_at(deadline, read_frame(stream, FRAME_BYTES_MAX)).await {
            Ok(Ok(NextItem::Frame(frame))) => sink(frame),
            // Without a stated reason, the node could not read the bytes.
            Ok(Ok(NextItem::End(reason))) => return cut(reason.unwrap_or(MissReason::MediumFailed), true),
            Ok(Err(error)) if error.is_loss() => return cut(MissReason::NodeLost, false),
            Ok(Err(_)) => return cut(MissReason::Corrupt, false),
            Err(_) => return cut(MissReason::TooLate, false),
        }
    }
    ReceivedBlocks { blocks: wanted, reason: MissReason::NotHeld, is_over: true }
}

/// Receives the slices of `wanted` blocks.
async fn receive_layers(
    stream: &mut impl Stream,
    wanted: usize,
    deadline: Instant,
    mut filling: FetchAssembly<'_>,
) -> ReceivedBlocks {
    let ended = timeout_at(deadline, pieces::receive(stream, wanted, &mut filling)).await;
    let (reason, is_over) = match ended {
        Ok(Ok(None)) => (MissReason::NotHeld, true),
        Ok(Ok(Some(reason))) => (reason.unwrap_or(MissReason::MediumFailed), true),
        Ok(Err(error)) if error.is_loss() => (MissReason::NodeLost, false),
        Ok(Err(_)) => (MissReason::Corrupt, false),
        Err(_) => (MissReason::TooLate, false),
    };
    let reason = if filling.has_bad_slice() { MissReason::Corrupt } else { reason };
    ReceivedBlocks { blocks: filling.complete_blocks(), reason, is_over }
}

fn protocol(asks: &impl OperationClient, what: &dyn std::fmt::Display) -> PathError {
    PathError::Protocol { peer: asks.peer().to_owned(), what: format!("a malformed message: {what}") }
}

async fn with_stall_timeout<T>(
    asks: &impl OperationClient,
    work: impl Future<Output = Result<T, PathError>>,
) -> Result<T, PathError> {
    within(asks.peer(), asks.stall_timeout(), work).await
}
