//! The outcome of an operation, kept until the caller frees it; it holds the C strings.
//!
//! Not here: progress before the end (`entry.rs`).

use std::ffi::{CString, c_char};
use std::fmt::Display;
use std::ops::Range;
use std::ptr::null;
use std::time::Duration;

use kvfleet_client::{
    DecodeAdmission, HeldLease, LayerFetchResult, OperationEnd, OperationOutcome, PrefillResult, RouteAnswer,
    SaveAnswer, SaveDone, SourceMiss,
};
use kvfleet_proto::pb;

use crate::abi;
use crate::slices::CallerBuffer;
use crate::status::{self, Failure, Status};

/// `kvf_result`.
#[derive(Debug)]
pub struct ResultHandle {
    pub(crate) status: Status,
    pub(crate) message: String,
    pub(crate) retry_after: Duration,
    detail: ResultDetail,
    leases: Vec<(CString, u64)>,
}

#[derive(Debug)]
enum ResultDetail {
    None,
    Decision(Box<DecisionData>),
    Fetch(FetchData),
    Prefill(PrefillData),
    Save(SaveDone),
}

/// A decision with its texts as C strings.
#[derive(Debug)]
struct DecisionData {
    decision: pb::Decision,
    instance_address: CString,
    save_address: CString,
    handover_address: CString,
    source_addresses: Vec<CString>,
}

/// A fetch with its texts as C strings.
#[derive(Debug)]
struct FetchData {
    end_block: u32,
    by_block: Vec<u8>,
    received_bytes: u64,
    wrong_blocks: u32,
    misses: MissList,
}

/// A prefill with its texts as C strings.
#[derive(Debug)]
struct PrefillData {
    computed: Vec<u8>,
    received_bytes: u64,
    wrong_blocks: u32,
    idle: Duration,
    saved: Duration,
    misses: MissList,
}

/// Sources with a shortfall, with their addresses as C strings.
#[derive(Debug)]
struct MissList(Vec<(SourceMiss, CString)>);

impl ResultHandle {
    /// The result of an operation.
    pub(crate) fn of(ended: OperationEnd<CallerBuffer>) -> ResultHandle {
        let leases = c_leases(&ended.leases);
        let plain = |status, message: String, part| ResultHandle {
            status,
            message,
            retry_after: Duration::ZERO,
            detail: part,
            leases: Vec::new(),
        };
        let failed = |error: &dyn Display| plain(status::FAILED, error.to_string(), ResultDetail::None);
        let ok = |part| plain(status::OK, String::new(), part);
        let result = match ended.outcome {
            OperationOutcome::Routed(Ok(RouteAnswer::Decided(decision))) => {
                ok(ResultDetail::Decision(Box::new(DecisionData::of(decision))))
            }
            OperationOutcome::Routed(Ok(RouteAnswer::Rejected { reason, retry_after })) => {
                ResultHandle { retry_after, ..plain(status::REJECTED, reason, ResultDetail::None) }
            }
            OperationOutcome::Routed(Err(error)) => failed(&error),
            OperationOutcome::LayersFetched(Ok(came)) if came.misses.is_empty() => {
                ok(ResultDetail::Fetch(FetchData::of(came)))
            }
            OperationOutcome::LayersFetched(Ok(came)) => {
                plain(status::MISSED, join_misses(&came.misses), ResultDetail::Fetch(FetchData::of(came)))
            }
            OperationOutcome::LayersFetched(Err(error)) => failed(&error),
            OperationOutcome::Saved(Ok(SaveAnswer::Done(done))) => ok(ResultDetail::Save(done)),
            OperationOutcome::Saved(Ok(SaveAnswer::Busy { retry_after })) => {
                let message = "the node is too busy for the save now".to_owned();
                ResultHandle { retry_after, ..plain(status::NODE_BUSY, message, ResultDetail::None) }
            }
            OperationOutcome::Saved(Ok(SaveAnswer::Refused(refusal))) => {
                plain(status::REFUSED, format!("the node refuses the save: {refusal:?}"), ResultDetail::None)
            }
            OperationOutcome::Saved(Err(error)) => failed(&error),
            OperationOutcome::Released(left) if left.is_empty() => ok(ResultDetail::None),
            OperationOutcome::Released(left) => {
                let words: Vec<_> = left.iter().map(|(_, error)| error.to_string()).collect();
                failed(&format!(
                    "{} leases were not released and will expire: {}",
                    left.len(),
                    words.join("; ")
                ))
            }
            OperationOutcome::DecodeAdmission(DecodeAdmission::Admitted) => ok(ResultDetail::None),
            OperationOutcome::DecodeAdmission(DecodeAdmission::Rejected { reason, retry_after }) => {
                ResultHandle { retry_after, ..plain(status::REJECTED, reason, ResultDetail::None) }
            }
            // A queue of this library has no fetch into library memory.
            OperationOutcome::Fetched(_) | OperationOutcome::Lost => plain(
                status::LOST,
                "the operation was lost to a bug inside the library".to_owned(),
                ResultDetail::None,
            ),
            OperationOutcome::Cancelled => {
                plain(status::CANCELLED, "the operation was cancelled".to_owned(), ResultDetail::None)
            }
        };
        ResultHandle { leases, ..result }
    }

    /// The result of a prefill of these blocks.
    pub(crate) fn of_prefill<R>(end: &PrefillResult<R>, blocks: Range<u32>) -> ResultHandle {
        let is_computed = |block: u32| u8::from(end.computed.binary_search(&block).is_ok());
        let is_all = end.misses.is_empty();
        ResultHandle {
            status: if is_all { status::OK } else { status::MISSED },
            message: join_misses(&end.misses),
            retry_after: Duration::ZERO,
            leases: c_leases(&end.leases),
            detail: ResultDetail::Prefill(PrefillData {
                computed: blocks.map(is_computed).collect(),
                received_bytes: end.received_bytes,
                wrong_blocks: end.wrong_blocks,
                idle: end.idle_time,
                saved: end.saved_time,
                misses: MissList::of(end.misses.clone()),
            }),
        }
    }

    pub(crate) fn decision(&self) -> Result<abi::Decision, Failure> {
        let ResultDetail::Decision(decided) = &self.detail else {
            return Err(Failure::NotFound { what: "decision" });
        };
        let DecisionData { decision, instance_address, save_address, handover_address, source_addresses } =
            &**decided;
        let save_to = decision.save_to.clone().unwrap_or_default();
        let handover = decision.handover.as_ref();
        Ok(abi::Decision {
            size: size_of_u32::<abi::Decision>(),
            instance: decision.instance,
            instance_address: instance_address.as_ptr(),
            save_address: if decision.save_to.is_some() { save_address.as_ptr() } else { null() },
            save_epoch: save_to.epoch,
            save_node: save_to.node,
            save_tier: save_to.tier,
            fetch_blocks: decision.fetch_blocks,
            recompute_blocks: decision.recompute_blocks,
            priority_deadline_ms: decision.priority_deadline_ms,
            resident_blocks: decision.resident_blocks,
            sources: count(source_addresses.len()),
            handover_address: if handover.is_some() { handover_address.as_ptr() } else { null() },
            handover_us: handover.map_or(0, |handover| handover.us),
            handover_instance: handover.map_or(0, |handover| handover.instance),
            reserved: 0,
        })
    }

    pub(crate) fn source(&self, position: usize) -> Result<abi::Source, Failure> {
        let missing = || Failure::NotFound { what: "source of this number" };
        let ResultDetail::Decision(decided) = &self.detail else { return Err(missing()) };
        let source = decided.decision.sources.get(position).ok_or_else(missing)?;
        Ok(abi::Source {
            address: decided.source_addresses.get(position).ok_or_else(missing)?.as_ptr(),
            epoch: source.epoch,
            node: source.node,
            tier: source.tier,
            start_blocks: source.start_blocks,
            len_blocks: source.len_blocks,
        })
    }

    pub(crate) fn fetched(&self) -> Result<abi::Fetched, Failure> {
        let ResultDetail::Fetch(fetched) = &self.detail else {
            return Err(Failure::NotFound { what: "fetch" });
        };
        Ok(abi::Fetched {
            size: size_of_u32::<abi::Fetched>(),
            end_block: fetched.end_block,
            came: fetched.by_block.as_ptr(),
            came_count: fetched.by_block.len(),
            received_bytes: fetched.received_bytes,
            wrong_blocks: fetched.wrong_blocks,
            misses: count(fetched.misses.0.len()),
        })
    }

    pub(crate) fn prefilled(&self) -> Result<abi::Prefilled, Failure> {
        let ResultDetail::Prefill(prefilled) = &self.detail else {
            return Err(Failure::NotFound { what: "prefill" });
        };
        Ok(abi::Prefilled {
            size: size_of_u32::<abi::Prefilled>(),
            misses: count(prefilled.misses.0.len()),
            computed: prefilled.computed.as_ptr(),
            computed_count: prefilled.computed.len(),
            received_bytes: prefilled.received_bytes,
            idle_us: micros(prefilled.idle),
            saved_us: micros(prefilled.saved),
            wrong_blocks: prefilled.wrong_blocks,
            reserved: 0,
        })
    }

    /// Number of blocks that a fetch or a prefill received, and its misses.
    pub(crate) fn arrived_blocks(&self) -> Result<(u32, Vec<SourceMiss>), Failure> {
        let blocks = |flags: &[u8], flag: u8| count(flags.iter().filter(|one| **one == flag).count());
        let (blocks, misses) = match &self.detail {
            ResultDetail::Fetch(fetched) => (blocks(&fetched.by_block, 1), &fetched.misses),
            ResultDetail::Prefill(prefilled) => (blocks(&prefilled.computed, 0), &prefilled.misses),
            ResultDetail::None | ResultDetail::Decision(_) | ResultDetail::Save(_) => {
                return Err(Failure::NotFound { what: "fetch or prefill" });
            }
        };
        Ok((blocks, misses.0.iter().map(|(miss, _)| miss.clone()).collect()))
    }

    pub(crate) fn miss(&self, position: usize) -> Result<abi::Miss, Failure> {
        let missing = Failure::NotFound { what: "miss of this number" };
        let misses = match &self.detail {
            ResultDetail::Fetch(FetchData { misses, .. })
            | ResultDetail::Prefill(PrefillData { misses, .. }) => misses,
            ResultDetail::None | ResultDetail::Decision(_) | ResultDetail::Save(_) => return Err(missing),
        };
        let (miss, address) = misses.0.get(position).ok_or(missing)?;
        Ok(abi::Miss {
            size: size_of_u32::<abi::Miss>(),
            node: miss.node.0,
            address: address.as_ptr(),
            first_missing_block: miss.first_missing_block,
            reason: miss.reason as u32,
        })
    }

    pub(crate) fn saved(&self) -> Result<abi::Saved, Failure> {
        let ResultDetail::Save(done) = &self.detail else { return Err(Failure::NotFound { what: "save" }) };
        let visible_at =
            done.visible_at.map_or_else(abi::AnnouncePosition::default, |at| abi::AnnouncePosition {
                node: at.node.0,
                shard: u32::from(at.shard),
                epoch: at.epoch.0,
                seq: at.seq.0,
            });
        Ok(abi::Saved {
            size: size_of_u32::<abi::Saved>(),
            stored_blocks: done.stored_blocks,
            present_blocks: done.present_blocks,
            refused_blocks: done.refused_blocks,
            stored_bytes: done.stored_bytes,
            visible_at,
        })
    }

    pub(crate) fn lease(&self, position: usize) -> Result<abi::Lease, Failure> {
        let held = self.leases.get(position).ok_or(Failure::NotFound { what: "lease of this number" })?;
        Ok(abi::Lease { address: held.0.as_ptr(), lease: held.1 })
    }
}

impl DecisionData {
    fn of(decision: pb::Decision) -> DecisionData {
        DecisionData {
            instance_address: c_text(&decision.instance_address),
            save_address: c_text(decision.save_to.as_ref().map_or("", |holder| &holder.address)),
            handover_address: c_text(decision.handover.as_ref().map_or("", |handover| &handover.address)),
            source_addresses: decision.sources.iter().map(|source| c_text(&source.address)).collect(),
            decision,
        }
    }
}

impl FetchData {
    fn of(came: LayerFetchResult) -> FetchData {
        FetchData {
            end_block: came.end_block,
            by_block: came.arrived.iter().map(|came| u8::from(*came)).collect(),
            received_bytes: came.received_bytes,
            wrong_blocks: came.wrong_blocks,
            misses: MissList::of(came.misses),
        }
    }
}

impl MissList {
    fn of(misses: Vec<SourceMiss>) -> MissList {
        let with_address = |miss: SourceMiss| {
            let address = c_text(&miss.address);
            (miss, address)
        };
        MissList(misses.into_iter().map(with_address).collect())
    }
}

fn join_misses(misses: &[SourceMiss]) -> String {
    misses.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn c_leases(leases: &[HeldLease]) -> Vec<(CString, u64)> {
    leases.iter().map(|held| (c_text(&held.address), held.lease.0)).collect()
}

/// The text up to its first 0; addresses have none.
pub(crate) fn c_text(text: &str) -> CString {
    let end = text.find('\0').unwrap_or(text.len());
    CString::new(&text[..end]).unwrap_or_default()
}

pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

pub(crate) fn size_of_u32<T>() -> u32 {
    count(size_of::<T>())
}

/// The name of a status as a C string.
pub(crate) fn name_of(status: Status) -> *const c_char {
    let named = status::NAMES.iter().find(|(number, _)| *number == status);
    named.map_or("unknown\0", |(_, name)| name).as_ptr().cast()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Adjacent fields have the same C type, so a mix-up would compile.
    #[test]
    fn decision_is_copied_to_c_field_by_field() {
        let decision = pb::Decision {
            instance: 1,
            fetch_blocks: 2,
            recompute_blocks: 3,
            resident_blocks: 4,
            priority_deadline_ms: 5,
            save_to: Some(pb::Holder { node: 6, epoch: 7, tier: 1, ..pb::Holder::default() }),
            sources: vec![pb::Source { node: 8, epoch: 9, ..pb::Source::default() }],
            handover: Some(pb::Handover { instance: 10, us: 11, address: "i:12".to_owned() }),
            ..pb::Decision::default()
        };
        let handle = ResultHandle {
            status: status::OK,
            message: String::new(),
            retry_after: Duration::ZERO,
            detail: ResultDetail::Decision(Box::new(DecisionData::of(decision))),
            leases: Vec::new(),
        };
        let seen = handle.decision().unwrap();
        assert_eq!(
            [seen.instance, seen.fetch_blocks, seen.recompute_blocks, seen.resident_blocks],
            [1, 2, 3, 4]
        );
        let ResultDetail::Decision(decided) = &handle.detail else { panic!("a decision") };
        assert_eq!((seen.handover_instance, seen.handover_us), (10, 11));
        assert_eq!(decided.handover_address.as_c_str(), c"i:12");
        assert_eq!(seen.handover_address, decided.handover_address.as_ptr());
        assert_eq!((seen.priority_deadline_ms, seen.save_node, seen.save_epoch, seen.sources), (5, 6, 7, 1));
    }
}
