//! The client's end of the four operations, over any stream.
//!
//! Not here: where a stream comes from (`quic/path.rs`, `tcp/path.rs`), checking what the bytes are (the
//! caller verifies every frame), retrying, choosing.

use std::time::Duration;

use kv_core::id::LeaseId;
use kvfleet_proto::data;
use kvfleet_proto::frame::{FRAME_BYTES_MAX, Frame};
use prost::Message;
use tokio::time::{Instant, timeout_at};

use crate::dial::within;
use crate::layered::{Handed, Patience};
use crate::slices::{Filling, Whole};
use crate::stream::{MESSAGE_BYTES_MAX, Next, Stream, read_frame, read_message};
use crate::{
    AskedLayers, FetchAnswer, FetchRequest, LayerSource, MissReason, PathError, Progress, SaveAnswer,
    SaveOffer, SaveRequest, SliceSink, Streamed, layered, pieces, wire,
};

/// Longest deadline a fetch can have; more is the same as none, and would overflow the clock.
const DEADLINE_MAX: Duration = Duration::from_secs(3600);

/// Whether an operation's request is all that its client sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sends {
    /// Nothing but the request.
    Request,
    /// Frames after it.
    Frames,
}

/// A client's end that gives each operation a stream.
pub(crate) trait Asks: Sync {
    type Stream: Stream;

    /// Who is asked.
    fn peer(&self) -> &str;

    /// Time without progress after which a save, release or ping counts as lost.
    fn stall_timeout(&self) -> Duration;

    /// Asks, and reads the message that answers. Of a fetch it is noted when it is asked.
    fn call<M: Message + Default>(
        &self,
        request: &data::DataRequest,
        sends: Sends,
        fetch: Option<&Progress>,
    ) -> impl Future<Output = Result<(M, Self::Stream), PathError>> + Send;

    /// The peer answered a fetch by layers with frames.
    fn sends_frames(&self);

    /// The peer does not seem to know of saves that come by layer.
    fn saves_frames(&self);

    /// The operation is over at both ends: nothing of it is under way any more.
    fn over(&self, stream: Self::Stream);
}

pub(crate) async fn fetch<A: Asks>(
    asks: &A,
    request: &FetchRequest,
    sink: &mut (dyn FnMut(Frame) + Send),
) -> Result<FetchAnswer, PathError> {
    let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
    let begun = match begin(asks, request, &wire::fetch_to_pb(request), deadline).await? {
        Ok(begun) => begun,
        Err(reason) => return Ok(FetchAnswer::Miss { reason }),
    };
    let Begun { answer, mut stream, .. } = begun;
    let received = receive(&mut stream, answer.tiers().len(), deadline, sink).await;
    if received.is_over {
        asks.over(stream);
    }
    Ok(answer.cut_short(received.blocks, received.reason))
}

/// The same of these layers, one after the other; frames from a node that sends nothing else.
pub(crate) async fn fetch_layers<A: Asks>(
    asks: &A,
    request: &FetchRequest,
    asked: AskedLayers,
    sink: &mut dyn SliceSink,
) -> Result<FetchAnswer, PathError> {
    let deadline = Instant::now() + request.deadline.min(DEADLINE_MAX);
    let begun = match begin(asks, request, &wire::layers_to_pb(request, &asked), deadline).await? {
        Ok(begun) => begun,
        Err(reason) => return Ok(FetchAnswer::Miss { reason }),
    };
    let Begun { answer, mut stream, is_by_layer } = begun;
    let wanted = answer.tiers().len();
    let (received, spoilt) = if is_by_layer {
        (receive_layers(&mut stream, wanted, deadline, Filling::new(sink, asked.layers)).await, None)
    } else {
        asks.sends_frames();
        let mut whole = Whole::new(sink, asked);
        let received = receive(&mut stream, wanted, deadline, &mut |frame| whole.take(&[frame])).await;
        (received, whole.spoilt())
    };
    if received.is_over {
        asks.over(stream);
    }
    let answer = answer.cut_short(received.blocks, received.reason);
    Ok(match spoilt {
        Some(good) => answer.cut_short(good, MissReason::Corrupt),
        None => answer,
    })
}

/// A fetch that was answered.
struct Begun<S> {
    answer: FetchAnswer,
    stream: S,
    /// Whether slices follow, and not frames.
    is_by_layer: bool,
}

/// Asks for blocks, and reads the answer; or says why nothing of it counts.
async fn begin<A: Asks>(
    asks: &A,
    request: &FetchRequest,
    wire: &data::DataRequest,
    deadline: Instant,
) -> Result<Result<Begun<A::Stream>, MissReason>, PathError> {
    let progress = &request.progress;
    let call = asks.call::<data::FetchHead>(wire, Sends::Request, Some(progress));
    let Ok(called) = timeout_at(deadline, call).await else {
        return Ok(Err(MissReason::TooLate));
    };
    let (head, stream) = called?;
    progress.answered();
    let (answer, epoch) =
        wire::head_from_pb(&head, request.hashes.len()).map_err(|error| protocol(asks, &error))?;
    if epoch != request.epoch && !answer.tiers().is_empty() {
        return Ok(Err(MissReason::StaleEpoch));
    }
    Ok(Ok(Begun { answer, stream, is_by_layer: head.is_by_layer }))
}

pub(crate) async fn save<A: Asks>(
    asks: &A,
    request: &SaveRequest,
    source: &(dyn Fn(usize) -> Frame + Send + Sync),
) -> Result<SaveAnswer, PathError> {
    let lost = |loss: crate::stream::Loss| loss.at(asks.peer());
    let Offered { wanted, mut stream, .. } = match offer(asks, request, &wire::save_to_pb(request)).await? {
        Ok(offered) => offered,
        Err(answer) => return Ok(answer),
    };
    for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
        timed(asks, async { stream.write(source(position).bytes).await.map_err(lost) }).await?;
    }
    done(asks, stream).await
}

/// The end of a save that was sent, and what became of it.
async fn done<A: Asks>(asks: &A, mut stream: A::Stream) -> Result<SaveAnswer, PathError> {
    timed(asks, async { stream.end(None).await.map_err(|loss| loss.at(asks.peer())) }).await?;
    let answered = async { read_message(&mut stream).await.map_err(|error| error.at(asks.peer())) };
    let done: data::SaveDone = timed(asks, answered).await?;
    asks.over(stream);
    Ok(wire::done_from_pb(&done))
}

/// A save that was offered.
struct Offered<S> {
    wanted: Vec<bool>,
    stream: S,
    /// Whether slices are to come, and not frames.
    is_by_layer: bool,
}

/// Offers blocks; or says what became of it, where nothing is wanted.
async fn offer<A: Asks>(
    asks: &A,
    request: &SaveRequest,
    wire: &data::DataRequest,
) -> Result<Result<Offered<A::Stream>, SaveAnswer>, PathError> {
    let (offer, stream) = timed(asks, asks.call::<data::SaveOffer>(wire, Sends::Frames, None)).await?;
    let is_by_layer = offer.is_by_layer;
    let offer = wire::offer_from_pb(&offer, request.hashes.len()).map_err(|error| protocol(asks, &error))?;
    let answer = match offer {
        SaveOffer::Wanted(wanted) => return Ok(Ok(Offered { wanted, stream, is_by_layer })),
        SaveOffer::Busy { retry_after } => SaveAnswer::Busy { retry_after },
        SaveOffer::Refused(refusal) => SaveAnswer::Refused(refusal),
    };
    asks.over(stream);
    Ok(Err(answer))
}

/// The same of blocks that are being computed: slices as they come. Where that is not to be its turn is others', and the whole frames are
/// the caller's to save.
pub(crate) async fn save_layers<A: Asks>(
    asks: &A,
    request: &SaveRequest,
    layers: &mut dyn LayerSource,
) -> Result<Streamed, PathError> {
    let wire = wire::save_layers_to_pb(request, layers.slice_bytes());
    // What no peer would take may do without the lengths.
    if wire.encoded_len() > MESSAGE_BYTES_MAX {
        return Ok(Streamed::Nothing);
    }
    // Who was busy or refused may not be when all is there.
    let Ok(Offered { wanted, stream, is_by_layer }) = offer(asks, request, &wire).await? else {
        return Ok(Streamed::Nothing);
    };
    if !wanted.contains(&true) {
        return done(asks, stream).await.map(Streamed::Answered);
    }
    if is_by_layer {
        return send_layers(asks, stream, &wanted, layers).await;
    }
    // Only a node that knows of it answers an end before the first frame. Silence says nothing of what it knows, and what broke may not.
    match done(asks, stream).await {
        Ok(_) => return Ok(Streamed::Nothing),
        Err(PathError::TimedOut { .. }) => {}
        Err(_) => asks.saves_frames(),
    }
    Ok(Streamed::Left)
}

/// Sends the slices of wanted blocks as they come, then their heads.
async fn send_layers<A: Asks>(
    asks: &A,
    mut stream: A::Stream,
    wanted: &[bool],
    layers: &mut dyn LayerSource,
) -> Result<Streamed, PathError> {
    let lost = |loss: crate::stream::Loss| loss.at(asks.peer());
    let mut patience = Patience::new(asks.peer(), asks.stall_timeout());
    for layer in 0.. {
        let slices = match layered::next_layer(layers, (layer, wanted.len()), &patience).await? {
            Handed::Layer(slices) => slices,
            Handed::End => break,
            Handed::Slow => return Ok(Streamed::Left),
        };
        for (slice, _) in
            slices.into_iter().zip(wanted).filter(|(slice, wanted)| **wanted && !slice.is_empty())
        {
            if patience.is_over() {
                return Ok(Streamed::Left);
            }
            let bytes = slice.len();
            timed(asks, async { stream.write(slice).await.map_err(lost) }).await?;
            layers.sent(bytes);
            patience.heard();
        }
        // The next layer may be long in coming.
        timed(asks, async { stream.flush().await.map_err(lost) }).await?;
    }
    for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
        let head = layers.head(position);
        let bytes = head.len();
        timed(asks, async { stream.write(head).await.map_err(lost) }).await?;
        layers.sent(bytes);
    }
    done(asks, stream).await.map(Streamed::Answered)
}

pub(crate) async fn release<A: Asks>(asks: &A, lease: LeaseId) -> Result<(), PathError> {
    let request = wire::release_to_pb(lease);
    let (_, stream) = timed(asks, asks.call::<data::Pong>(&request, Sends::Request, None)).await?;
    asks.over(stream);
    Ok(())
}

pub(crate) async fn ping<A: Asks>(asks: &A) -> Result<Duration, PathError> {
    let asked = Instant::now();
    let ping = wire::ping_to_pb();
    let (pong, stream) = timed(asks, asks.call::<data::Pong>(&ping, Sends::Request, None)).await?;
    asks.over(stream);
    if pong.version != wire::PROTOCOL_VERSION {
        return Err(protocol(asks, &format_args!("protocol version {}", pong.version)));
    }
    Ok(asked.elapsed())
}

/// What came of a fetch's frames.
struct Received {
    blocks: usize,
    /// Why not more.
    reason: MissReason,
    /// Whether nothing of the fetch is under way any more.
    is_over: bool,
}

/// Hands up to `wanted` frames to `sink`.
async fn receive(
    stream: &mut impl Stream,
    wanted: usize,
    deadline: Instant,
    sink: &mut (dyn FnMut(Frame) + Send),
) -> Received {
    for blocks in 0..wanted {
        let cut = |reason, is_over| Received { blocks, reason, is_over };
        match timeout_at(deadline, read_frame(stream, FRAME_BYTES_MAX)).await {
            Ok(Ok(Next::Frame(frame))) => sink(frame),
            // A node that says nothing more had no bytes.
            Ok(Ok(Next::End(reason))) => return cut(reason.unwrap_or(MissReason::MediumFailed), true),
            Ok(Err(error)) if error.is_loss() => return cut(MissReason::NodeLost, false),
            Ok(Err(_)) => return cut(MissReason::Corrupt, false),
            Err(_) => return cut(MissReason::TooLate, false),
        }
    }
    Received { blocks: wanted, reason: MissReason::NotHeld, is_over: true }
}

/// Reads the slices of `wanted` blocks.
async fn receive_layers(
    stream: &mut impl Stream,
    wanted: usize,
    deadline: Instant,
    mut filling: Filling<'_>,
) -> Received {
    let ended = timeout_at(deadline, pieces::receive(stream, wanted, &mut filling)).await;
    let (reason, is_over) = match ended {
        Ok(Ok(None)) => (MissReason::NotHeld, true),
        Ok(Ok(Some(reason))) => (reason.unwrap_or(MissReason::MediumFailed), true),
        Ok(Err(error)) if error.is_loss() => (MissReason::NodeLost, false),
        Ok(Err(_)) => (MissReason::Corrupt, false),
        Err(_) => (MissReason::TooLate, false),
    };
    let reason = if filling.is_spoilt() { MissReason::Corrupt } else { reason };
    Received { blocks: filling.whole(), reason, is_over }
}

fn protocol(asks: &impl Asks, what: &dyn std::fmt::Display) -> PathError {
    PathError::Protocol {
        peer: asks.peer().to_owned(),
        what: format!("a message that makes no sense: {what}"),
    }
}

async fn timed<T>(
    asks: &impl Asks,
    work: impl Future<Output = Result<T, PathError>>,
) -> Result<T, PathError> {
    within(asks.peer(), asks.stall_timeout(), work).await
}
