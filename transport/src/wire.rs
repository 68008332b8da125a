//! Conversion between the messages of `data.proto` and the types of this crate.
//!
//! Not here: reading and writing messages on a stream (`stream.rs`). All values from a peer are
//! checked here, so that the code behind sees only valid ones.

use std::time::Duration;

use kv_core::id::{Epoch, IdentityDigest, LeaseId, NodeId, RequestId, Seq, TenantId, Tier, TrafficClass};
use kv_core::pipeline::ArrivalOrder;
use kvfleet_proto::convert::{
    ConvertError, category_from_parts, category_to_parts, hashes_from_bytes, hashes_to_bytes, identity_field,
    parent_from_bytes, parent_to_bytes, tier_field,
};
use kvfleet_proto::data;
use kvfleet_proto::frame::{SLICES_MAX, SliceLayout};

use crate::{
    AnnouncePosition, FetchAnswer, FetchRequest, LayerRequest, MissReason, Progress, RequestContext,
    SaveAnswer, SaveDone, SaveOffer, SaveRefusal, SaveRequest,
};

/// Protocol version of this release, sent in every pong.
pub const PROTOCOL_VERSION: u32 = 2;

/// Numbers of `FetchHead.outcome` and `SaveOffer.outcome`.
mod outcome {
    pub(super) const HIT: u32 = 1;
    pub(super) const PARTIAL: u32 = 2;
    pub(super) const BUSY: u32 = 3;
    pub(super) const MISS: u32 = 4;
    pub(super) const WANTED: u32 = 1;
    pub(super) const REFUSED: u32 = 2;
}

/// A client's request on a new stream.
#[derive(Debug)]
pub enum Operation {
    /// With a layer request if the blocks are wanted layer by layer.
    Fetch(FetchRequest, Option<LayerRequest>),
    /// With a slice layout if the blocks come layer by layer.
    Save(SaveRequest, Option<SliceLayout>),
    /// End of a lease.
    Release(LeaseId),
    /// A ping.
    Ping,
}

/// Reads a request.
///
/// # Errors
/// If a field has no valid value.
pub fn operation_from_pb(request: data::DataRequest) -> Result<Operation, ConvertError> {
    use data::data_request::Op;
    let traceparent = request.traceparent;
    match request.op.ok_or(ConvertError::Absent { field: "op" })? {
        Op::Fetch(fetch) => {
            let layers = fetch.layers.as_ref().map(layer_request_from_pb);
            Ok(Operation::Fetch(fetch_from_pb(&fetch, traceparent)?, layers))
        }
        Op::Save(save) => {
            let layout = layout_from_pb(&save)?;
            Ok(Operation::Save(save_from_pb(&save, traceparent)?, layout))
        }
        Op::Release(data::Release { lease }) => Ok(Operation::Release(LeaseId(lease))),
        Op::Ping(data::Ping {}) => Ok(Operation::Ping),
        // If RDMA is offered, the server answers it before.
        Op::Attach(_) => Err(ConvertError::Unknown { field: "op", number: 5 }),
    }
}

fn fetch_from_pb(fetch: &data::Fetch, traceparent: String) -> Result<FetchRequest, ConvertError> {
    Ok(FetchRequest {
        context: RequestContext {
            lease: LeaseId(fetch.lease),
            request: RequestId(fetch.request),
            tenant: TenantId(fetch.tenant),
            category: category_from_parts(fetch.kind, fetch.turn),
            identity: identity_field("fetch.identity", &fetch.identity)?,
            traceparent,
            class: class_from_pb(fetch.class),
        },
        epoch: Epoch(fetch.epoch),
        first_offset_blocks: fetch.first_offset_blocks,
        hashes: hashes_from_bytes("fetch.hashes", &fetch.hashes)?,
        deadline: Duration::from_micros(fetch.deadline_us),
        progress: Progress::default(),
    })
}

fn save_from_pb(save: &data::Save, traceparent: String) -> Result<SaveRequest, ConvertError> {
    Ok(SaveRequest {
        context: RequestContext {
            lease: LeaseId(save.lease),
            request: RequestId(save.request),
            tenant: TenantId(save.tenant),
            category: category_from_parts(save.kind, save.turn),
            identity: identity_field("save.identity", &save.identity)?,
            traceparent,
            class: class_from_pb(save.class),
        },
        parent: parent_from_bytes("save.parent", &save.parent)?,
        first_offset_blocks: save.first_offset_blocks,
        hashes: hashes_from_bytes("save.hashes", &save.hashes)?,
        frame_bytes: save.frame_bytes,
    })
}

/// Like [`fetch_to_pb`], for these layers.
#[must_use]
pub fn layers_to_pb(request: &FetchRequest, asked: &LayerRequest) -> data::DataRequest {
    let number = |layer: usize| u32::try_from(layer).unwrap_or(u32::MAX);
    let LayerRequest { layers, arrive } = asked;
    let mut wire = fetch_to_pb(request);
    if let Some(data::data_request::Op::Fetch(fetch)) = &mut wire.op {
        let is_by_block = *arrive == ArrivalOrder::ByBlock;
        fetch.layers =
            Some(data::Layers { first: number(layers.start), end: number(layers.end), is_by_block });
    }
    wire
}

fn layer_request_from_pb(layers: &data::Layers) -> LayerRequest {
    let arrive = if layers.is_by_block { ArrivalOrder::ByBlock } else { ArrivalOrder::ByLayer };
    LayerRequest { layers: layers.first as usize..layers.end as usize, arrive }
}

/// A fetch as a request.
#[must_use]
pub fn fetch_to_pb(request: &FetchRequest) -> data::DataRequest {
    let (kind, turn) = category_to_parts(request.context.category);
    let fetch = data::Fetch {
        lease: request.context.lease.0,
        request: request.context.request.0,
        tenant: request.context.tenant.0,
        kind,
        turn,
        identity: identity_bytes(request.context.identity),
        epoch: request.epoch.0,
        first_offset_blocks: request.first_offset_blocks,
        hashes: hashes_to_bytes(&request.hashes),
        deadline_us: u64::try_from(request.deadline.as_micros()).unwrap_or(u64::MAX),
        layers: None,
        class: class_to_pb(request.context.class),
    };
    data::DataRequest {
        op: Some(data::data_request::Op::Fetch(fetch)),
        traceparent: request.context.traceparent.clone(),
    }
}

/// The layout of the announced slices, which must match the frame length; `None` if frames come
/// whole.
fn layout_from_pb(save: &data::Save) -> Result<Option<SliceLayout>, ConvertError> {
    if save.slice_bytes.is_empty() {
        return Ok(None);
    }
    let number = save.slice_bytes.len();
    let odd = |_| ConvertError::Count { field: "save.slice_bytes", number, expected: SLICES_MAX };
    let layout = SliceLayout::new(&save.slice_bytes).map_err(odd)?;
    let (number, said) = (layout.frame_bytes(), usize::try_from(save.frame_bytes).unwrap_or(usize::MAX));
    if number != said {
        return Err(ConvertError::Count { field: "save.frame_bytes", number, expected: said });
    }
    Ok(Some(layout))
}

/// Like [`save_to_pb`], with slices of these lengths.
pub(crate) fn save_layers_to_pb(request: &SaveRequest, slice_bytes: &[u32]) -> data::DataRequest {
    let mut wire = save_to_pb(request);
    if let Some(data::data_request::Op::Save(save)) = &mut wire.op {
        save.slice_bytes = slice_bytes.to_vec();
    }
    wire
}

/// A save as a request.
#[must_use]
pub fn save_to_pb(request: &SaveRequest) -> data::DataRequest {
    let (kind, turn) = category_to_parts(request.context.category);
    let save = data::Save {
        lease: request.context.lease.0,
        request: request.context.request.0,
        tenant: request.context.tenant.0,
        kind,
        turn,
        identity: identity_bytes(request.context.identity),
        parent: parent_to_bytes(request.parent),
        first_offset_blocks: request.first_offset_blocks,
        hashes: hashes_to_bytes(&request.hashes),
        frame_bytes: request.frame_bytes,
        class: class_to_pb(request.context.class),
        slice_bytes: Vec::new(),
    };
    data::DataRequest {
        op: Some(data::data_request::Op::Save(save)),
        traceparent: request.context.traceparent.clone(),
    }
}

pub(crate) fn release_to_pb(lease: LeaseId) -> data::DataRequest {
    let op = data::data_request::Op::Release(data::Release { lease: lease.0 });
    data::DataRequest { op: Some(op), traceparent: String::new() }
}

pub(crate) fn ping_to_pb() -> data::DataRequest {
    data::DataRequest { op: Some(data::data_request::Op::Ping(data::Ping {})), traceparent: String::new() }
}

fn class_from_pb(number: u32) -> Option<TrafficClass> {
    (number != 0).then(|| TrafficClass::from_number(number))
}

fn class_to_pb(class: Option<TrafficClass>) -> u32 {
    class.map_or(0, |class| class as u32)
}

/// Priority class of a request. Releases and pings never wait behind others.
pub(crate) fn class_of(request: &data::DataRequest) -> TrafficClass {
    use data::data_request::Op;
    match &request.op {
        Some(Op::Fetch(fetch)) => TrafficClass::for_fetch(class_from_pb(fetch.class)),
        Some(Op::Save(save)) => TrafficClass::for_save(class_from_pb(save.class)),
        Some(Op::Release(_) | Op::Ping(_) | Op::Attach(_)) | None => TrafficClass::Fetch,
    }
}

fn identity_bytes(identity: IdentityDigest) -> Vec<u8> {
    identity.0.to_vec()
}

/// The answer to a fetch, with the node's epoch.
#[must_use]
pub fn head_to_pb(answer: &FetchAnswer, epoch: Epoch) -> data::FetchHead {
    let mut head = data::FetchHead { epoch: epoch.0, ..data::FetchHead::default() };
    match answer {
        FetchAnswer::Hit { tiers } => {
            head.outcome = outcome::HIT;
            set_tiers(&mut head, tiers);
        }
        FetchAnswer::Partial { tiers, reason } => {
            head.outcome = outcome::PARTIAL;
            head.reason = *reason as u32;
            set_tiers(&mut head, tiers);
        }
        FetchAnswer::Busy { retry_after } => {
            head.outcome = outcome::BUSY;
            head.retry_after_ms = millis(*retry_after);
        }
        FetchAnswer::Miss { reason } => {
            head.outcome = outcome::MISS;
            head.reason = *reason as u32;
        }
    }
    head
}

fn set_tiers(head: &mut data::FetchHead, tiers: &[Tier]) {
    head.blocks = u32::try_from(tiers.len()).unwrap_or(u32::MAX);
    head.tiers = tiers.iter().map(|tier| *tier as u8).collect();
}

/// Reads the answer to a fetch of `asked` blocks, and the node's epoch.
///
/// # Errors
/// If a field has no valid value.
pub fn head_from_pb(head: &data::FetchHead, asked: usize) -> Result<(FetchAnswer, Epoch), ConvertError> {
    let tiers = || tiers_from_pb(head, asked);
    let answer = match head.outcome {
        outcome::HIT if head.tiers.len() == asked => FetchAnswer::Hit { tiers: tiers()? },
        outcome::PARTIAL => FetchAnswer::Partial { tiers: tiers()?, reason: reason_from_pb(head.reason)? },
        outcome::BUSY => FetchAnswer::Busy { retry_after: Duration::from_millis(head.retry_after_ms) },
        outcome::MISS => FetchAnswer::Miss { reason: reason_from_pb(head.reason)? },
        number => return Err(ConvertError::Unknown { field: "head.outcome", number }),
    };
    Ok((answer, Epoch(head.epoch)))
}

fn tiers_from_pb(head: &data::FetchHead, asked: usize) -> Result<Vec<Tier>, ConvertError> {
    let tier_count = head.tiers.len();
    if tier_count > asked {
        return Err(ConvertError::Count {
            field: "length of head.tiers",
            number: tier_count,
            expected: asked,
        });
    }
    if u32::try_from(tier_count) != Ok(head.blocks) {
        let number = usize::try_from(head.blocks).unwrap_or(usize::MAX);
        return Err(ConvertError::Count { field: "head.blocks", number, expected: tier_count });
    }
    head.tiers.iter().map(|tier| tier_field("head.tiers", u32::from(*tier))).collect()
}

fn reason_from_pb(number: u32) -> Result<MissReason, ConvertError> {
    MissReason::ALL
        .into_iter()
        .find(|reason| *reason as u32 == number)
        .ok_or(ConvertError::Unknown { field: "head.reason", number })
}

/// The answer to an offered save.
#[must_use]
pub fn offer_to_pb(offer: &SaveOffer) -> data::SaveOffer {
    let mut wire = data::SaveOffer::default();
    match offer {
        SaveOffer::Wanted(wanted) => {
            wire.outcome = outcome::WANTED;
            wire.wanted = wanted.iter().map(|wanted| u8::from(*wanted)).collect();
        }
        SaveOffer::Busy { retry_after } => {
            wire.outcome = outcome::BUSY;
            wire.retry_after_ms = millis(*retry_after);
        }
        SaveOffer::Refused(refusal) => {
            wire.outcome = outcome::REFUSED;
            wire.reason = *refusal as u32;
        }
    }
    wire
}

/// Reads the answer to an offer of `offered` blocks.
///
/// # Errors
/// If a field has no valid value.
pub fn offer_from_pb(offer: &data::SaveOffer, offered: usize) -> Result<SaveOffer, ConvertError> {
    match offer.outcome {
        outcome::WANTED if offer.wanted.len() == offered => {
            Ok(SaveOffer::Wanted(offer.wanted.iter().map(|wanted| *wanted != 0).collect()))
        }
        outcome::BUSY => Ok(SaveOffer::Busy { retry_after: Duration::from_millis(offer.retry_after_ms) }),
        outcome::REFUSED => SaveRefusal::ALL
            .into_iter()
            .find(|refusal| *refusal as u32 == offer.reason)
            .map(SaveOffer::Refused)
            .ok_or(ConvertError::Unknown { field: "offer.reason", number: offer.reason }),
        number => Err(ConvertError::Unknown { field: "offer.outcome", number }),
    }
}

/// The result of a save.
#[must_use]
pub fn done_to_pb(done: &SaveDone) -> data::SaveDone {
    let visible = done.visible_at;
    let visible =
        visible.unwrap_or(AnnouncePosition { node: NodeId(0), epoch: Epoch(0), shard: 0, seq: Seq(0) });
    data::SaveDone {
        stored_blocks: done.stored_blocks,
        present_blocks: done.present_blocks,
        refused_blocks: done.refused_blocks,
        stored_bytes: done.stored_bytes,
        epoch: visible.epoch.0,
        seq: visible.seq.0,
        node: visible.node.0,
        shard: visible.shard.into(),
        reason: 0,
    }
}

/// Reads the result of a save. Sequence numbers start at 1; 0 means that no block was announced.
#[must_use]
pub fn done_from_pb(done: &data::SaveDone) -> SaveAnswer {
    // Shard 0 lists no blocks, so an invalid number makes no client wait.
    let shard = u16::try_from(done.shard).unwrap_or(0);
    let visible =
        AnnouncePosition { node: NodeId(done.node), epoch: Epoch(done.epoch), shard, seq: Seq(done.seq) };
    SaveAnswer::Done(SaveDone {
        stored_blocks: done.stored_blocks,
        present_blocks: done.present_blocks,
        refused_blocks: done.refused_blocks,
        stored_bytes: done.stored_bytes,
        visible_at: (done.seq != 0).then_some(visible),
    })
}

/// Milliseconds, rounded up so that a short hint does not become zero.
fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kv_core::id::{BlockHash, Category, RequestKind};

    fn context() -> RequestContext {
        RequestContext {
            lease: LeaseId(1),
            request: RequestId(2),
            tenant: TenantId(3),
            category: Category { kind: RequestKind::Agent, conversation_turn: 4 },
            identity: IdentityDigest([5; 16]),
            traceparent: "tp".into(),
            class: Some(TrafficClass::Replicate),
        }
    }

    #[test]
    fn requests_round_trip() {
        let fetch = FetchRequest {
            context: context(),
            epoch: Epoch(6),
            first_offset_blocks: 7,
            hashes: vec![BlockHash([8; _]); 3],
            deadline: Duration::from_micros(9),
            progress: Progress::default(),
        };
        let back = operation_from_pb(fetch_to_pb(&fetch)).unwrap();
        assert_eq!(format!("{back:?}"), format!("{:?}", Operation::Fetch(fetch.clone(), None)));
        for arrive in [ArrivalOrder::ByLayer, ArrivalOrder::ByBlock] {
            let asked = LayerRequest { layers: 3..7, arrive };
            let back = operation_from_pb(layers_to_pb(&fetch, &asked)).unwrap();
            assert_eq!(format!("{back:?}"), format!("{:?}", Operation::Fetch(fetch.clone(), Some(asked))));
        }
        let save = SaveRequest {
            context: context(),
            parent: Some(BlockHash([1; _])),
            first_offset_blocks: 7,
            hashes: vec![BlockHash([8; _]); 3],
            frame_bytes: 10,
        };
        let back = operation_from_pb(save_to_pb(&save)).unwrap();
        assert_eq!(format!("{back:?}"), format!("{:?}", Operation::Save(save.clone(), None)));
        let layout = SliceLayout::new(&[5, 0, 7]).unwrap();
        let save = SaveRequest { frame_bytes: layout.frame_bytes() as u64, ..save };
        let back = operation_from_pb(save_layers_to_pb(&save, &[5, 0, 7])).unwrap();
        assert_eq!(format!("{back:?}"), format!("{:?}", Operation::Save(save.clone(), Some(layout))));
        for slices in [vec![5, 0, 8], vec![0; SLICES_MAX + 1], vec![u32::MAX; 3], vec![5, 7]] {
            assert!(operation_from_pb(save_layers_to_pb(&save, &slices)).is_err(), "{} slices", slices.len());
        }
        assert!(matches!(operation_from_pb(release_to_pb(LeaseId(4))), Ok(Operation::Release(LeaseId(4)))));
        assert!(matches!(operation_from_pb(ping_to_pb()), Ok(Operation::Ping)));
        assert!(operation_from_pb(data::DataRequest::default()).is_err());
    }

    #[test]
    fn request_class_is_explicit_or_usual_or_lowest() {
        use data::data_request::Op;
        let named = |number: u32| {
            let fetch = data::Fetch { class: number, identity: vec![0; 16], ..data::Fetch::default() };
            let save = data::Save { class: number, identity: vec![0; 16], ..data::Save::default() };
            [Op::Fetch(fetch), Op::Save(save)].map(|op| {
                let request = data::DataRequest { op: Some(op), traceparent: String::new() };
                let class = class_of(&request);
                let read = match operation_from_pb(request).unwrap() {
                    Operation::Fetch(fetch, _) => fetch.class(),
                    Operation::Save(save, _) => save.class(),
                    other => panic!("{other:?}"),
                };
                assert_eq!(read, class, "the request's class differs from the operation's");
                class
            })
        };
        assert_eq!(named(0), [TrafficClass::Fetch, TrafficClass::Save], "a peer that names no class");
        assert_eq!(named(TrafficClass::Replicate as u32), [TrafficClass::Replicate; 2]);
        assert_eq!(named(TrafficClass::Prefetch as u32), [TrafficClass::Prefetch; 2]);
        assert_eq!(
            named(TrafficClass::Fetch as u32),
            [TrafficClass::Fetch, TrafficClass::Prefetch],
            "a save is never a fetch"
        );
        assert_eq!(named(TrafficClass::Save as u32), [TrafficClass::Prefetch, TrafficClass::Save]);
        assert_eq!(named(5), [TrafficClass::Prefetch; 2], "a class of a later release");
        assert_eq!(class_of(&release_to_pb(LeaseId(1))), TrafficClass::Fetch);
    }

    #[test]
    fn fetch_heads_round_trip() {
        let tiers = vec![Tier::Dram, Tier::Ssd];
        let mut answers = vec![
            FetchAnswer::Hit { tiers: tiers.clone() },
            FetchAnswer::Busy { retry_after: Duration::from_millis(3) },
        ];
        for reason in MissReason::ALL {
            answers.push(FetchAnswer::Partial { tiers: tiers.clone(), reason });
            answers.push(FetchAnswer::Miss { reason });
        }
        for answer in answers {
            assert_eq!(head_from_pb(&head_to_pb(&answer, Epoch(4)), 2), Ok((answer, Epoch(4))));
        }
    }

    #[test]
    fn malformed_fetch_heads_are_rejected() {
        let hit = head_to_pb(&FetchAnswer::Hit { tiers: vec![Tier::Dram; 2] }, Epoch(1));
        assert!(head_from_pb(&hit, 3).is_err(), "a hit with a block too few");
        assert!(head_from_pb(&hit, 1).is_err(), "a hit with a block too many");
        let bad = [
            data::FetchHead { tiers: vec![0, 9], ..hit.clone() },
            data::FetchHead { blocks: 7, ..hit.clone() },
            data::FetchHead { outcome: 9, ..hit.clone() },
            data::FetchHead { outcome: outcome::MISS, reason: 99, ..hit },
        ];
        for head in bad {
            assert!(head_from_pb(&head, 2).is_err(), "{head:?}");
        }
    }

    #[test]
    fn offers_and_results_round_trip() {
        let mut offers = vec![
            SaveOffer::Wanted(vec![true, false]),
            SaveOffer::Busy { retry_after: Duration::from_millis(3) },
        ];
        offers.extend(SaveRefusal::ALL.map(SaveOffer::Refused));
        for offer in offers {
            assert_eq!(offer_from_pb(&offer_to_pb(&offer), 2), Ok(offer));
        }
        let wanted = offer_to_pb(&SaveOffer::Wanted(vec![true]));
        assert!(offer_from_pb(&wanted, 2).is_err());
        assert!(offer_from_pb(&data::SaveOffer { outcome: 2, reason: 77, ..wanted }, 2).is_err());
        let visible_at = Some(AnnouncePosition { node: NodeId(1), epoch: Epoch(2), shard: 4, seq: Seq(3) });
        for visible_at in [None, visible_at] {
            let done = SaveDone {
                stored_blocks: 1,
                present_blocks: 2,
                refused_blocks: 3,
                stored_bytes: 4,
                visible_at,
            };
            assert_eq!(done_from_pb(&done_to_pb(&done)), SaveAnswer::Done(done));
        }
    }

    #[test]
    fn hints_round_up() {
        assert_eq!(millis(Duration::from_micros(1)), 1);
        assert_eq!(millis(Duration::from_millis(2)), 2);
    }
}
