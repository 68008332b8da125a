//! Converts the structs of callers to operations. Everything is copied except the slices.
//!
//! Every function here is unsafe for one reason: the pointers in the structs belong to the caller
//! and must satisfy the header.
//!
//! Not here: checks of pointers (`raw.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044

use std::time::Duration;

use kv_core::id::{
    BlockHash, Category, Epoch, IdentityDigest, InstanceId, LeaseId, NodeId, RequestId, RequestKind,
    TenantId, TrafficClass,
};
use kv_core::pipeline::{ArrivalOrder, ComputeCosts};
use kv_core::prefix::{IdentityManifest, KeyForm as ManifestForm};
use kv_core::schedule::{Domain, InstanceRole};
use kvfleet_client::{
    AdmitDecodeCall, ClientConfig, FetchCall, FetchLayersOperation, HeldLease, InstanceLoad, LayerFetchCall,
    LayerSaveCall, NetworkPreference, Operation, PrefillCall, QueueLimits, RdmaSettings, ReporterConfig,
    RequestContext, RequestOutcome, RouteCall, SAVE_DEADLINE, SAVE_QUEUE_BYTES_MAX, SaveCall, Submission,
    SubmitError, Transport,
};
use kvfleet_proto::frame::{KeyForm, PAYLOAD_BYTES_MAX, SLICES_MAX, encoded_len};
use kvfleet_proto::pb;
use kvfleet_transport::shm::ShmConfig;

use crate::abi;
use crate::handles::{ClientHandle, tls_files};
use crate::raw::{array, check_size, optional_text, reference, sized_struct, text};
use crate::slices::{CallerBuffer, ReleaseSignal, SliceTable};
use crate::status::Failure;

/// Blocks, sources or leases of one call: a prompt of 33 million tokens at 512 each.
pub(crate) const BLOCKS_MAX: usize = 1 << 16;

/// Operations of one batch.
pub(crate) const BATCH_MAX: usize = 1 << 16;

/// Maximum routers of a cluster, several times the usual number.
const ROUTERS_MAX: usize = 64;

/// Threads of a client: more than any network path can use.
const THREADS_MAX: u32 = 256;

/// Default threads of a client: one copies while another receives.
const THREADS: u32 = 2;

/// Default expected throughput of a prefill's sources, in bytes a second: a network of ten
/// gigabits. A wrong value costs at most a 64th of the request.
const BYTES_PER_S: u64 = 1_000_000_000;

/// Default report interval, in milliseconds.
const REPORT_MS: u32 = 200;

/// Longest report interval; beyond it routers rarely send requests.
const REPORT_MS_MAX: u32 = 10_000;

/// Default duration of repeating a load with work, in milliseconds: many engine steps. It bounds
/// how long a stalled engine still gets requests.
const SILENT_AFTER_MS: u32 = 10_000;

/// Longest such time.
const SILENT_AFTER_MS_MAX: u32 = 3_600_000;

/// # Safety
/// As the header requires of `kvf_client_config`.
pub(crate) unsafe fn client(config: *const abi::ClientConfig) -> Result<ClientHandle, Failure> {
    // SAFETY: this and all below is the caller's promise.
    let (config, routers) = unsafe {
        let config = sized_struct(config, "config")?;
        (config, array(config.routers, config.routers_count, ROUTERS_MAX, "routers")?)
    };
    // SAFETY: the same.
    let routers: Vec<String> =
        unsafe { routers.iter().map(|router| text(*router, "router")).collect::<Result<_, _>>()? };
    // SAFETY: the same.
    let (files, transport, network, shm) = unsafe {
        let files = tls_files(
            text(config.ca_file, "ca_file")?,
            text(config.cert_file, "cert_file")?,
            text(config.key_file, "key_file")?,
        );
        let transport = optional_text(config.transport, "transport")?;
        let network = optional_text(config.network, "network")?;
        (files, transport, network, optional_text(config.shm_dir, "shm_dir")?)
    };
    // SAFETY: the same.
    let rdma = unsafe { rdma_settings(config)? };
    let transport = transport.map_or(Ok(Transport::default()), |name| name.parse());
    let transport = transport.map_err(|error| Failure::Failed(error.to_string()))?;
    let network = network.map_or(Ok(NetworkPreference::default()), |name| name.parse());
    let network = network.map_err(|error| Failure::Failed(error.to_string()))?;
    let threads = check_range(config.threads, 0, THREADS_MAX, "threads")?;
    let threads = if threads == 0 { THREADS } else { threads };
    ClientHandle::open(threads as usize, files, |identity| {
        let defaults = ClientConfig::new(routers, identity);
        ClientConfig {
            seed: if config.seed == 0 { defaults.seed } else { config.seed },
            transport,
            network,
            shm: shm.map(|dir| ShmConfig::new(dir.into())),
            rdma,
            ..defaults
        }
    })
}

/// # Safety
/// As the header requires of `kvf_client_config`.
unsafe fn rdma_settings(config: &abi::ClientConfig) -> Result<RdmaSettings, Failure> {
    // SAFETY: the caller's promise.
    let (device, near) = unsafe {
        (optional_text(config.rdma_device, "rdma_device")?, optional_text(config.rdma_near, "rdma_near")?)
    };
    let least = RdmaSettings::MEMORY_BYTES_MIN;
    let memory_bytes = match usize::try_from(config.rdma_memory_bytes).unwrap_or(usize::MAX) {
        0 => RdmaSettings::default().memory_bytes,
        bytes if bytes >= least => bytes,
        bytes => {
            let what = format!("rdma_memory_bytes is {bytes}: give at least {least}, or 0 for the default");
            return Err(Failure::Failed(what));
        }
    };
    Ok(RdmaSettings { devices: device.into_iter().collect(), near, memory_bytes, ..RdmaSettings::default() })
}

/// # Safety
/// As the header requires of `kvf_model`.
pub(crate) unsafe fn manifest(model: *const abi::Model) -> Result<IdentityManifest, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let model = sized_struct(model, "model")?;
        check_range(model.reserved, 0, 0, "model.reserved")?;
        let key_form = match key_form(model.key_form)? {
            KeyForm::Raw => ManifestForm::Raw,
            KeyForm::Rotated => ManifestForm::Rotated,
        };
        Ok(IdentityManifest {
            model: text(model.model, "model.model")?,
            weights_digest: text(model.weights_digest, "weights_digest")?,
            dtype: text(model.dtype, "dtype")?,
            layout: text(model.layout, "layout")?,
            layers: model.layers,
            tp: model.tp,
            pp: model.pp,
            rank: model.rank,
            block_tokens: model.block_tokens,
            rope: text(model.rope, "rope")?,
            key_form,
            adapter: text(model.adapter, "adapter")?,
        })
    }
}

/// # Safety
/// As the header requires of `kvf_queue_limits`.
pub(crate) unsafe fn limits(limits: *const abi::QueueLimits) -> Result<QueueLimits, Failure> {
    if limits.is_null() {
        return Ok(QueueLimits::default());
    }
    // SAFETY: the caller's promise.
    let limits = unsafe { sized_struct(limits, "limits")? };
    check_range(limits.reserved, 0, 0, "limits.reserved")?;
    // 0 selects the default.
    let count = |number: u64, default: usize| match number {
        0 => default,
        said => usize::try_from(said).unwrap_or(usize::MAX),
    };
    let defaults = QueueLimits::default();
    Ok(QueueLimits {
        operations_max: count(limits.operations_max, defaults.operations_max),
        blocks_max: count(limits.blocks_max, defaults.blocks_max),
    })
}

/// Copies no further operation once the batch exceeds the queue's limits.
///
/// # Safety
/// As the header requires of `kvf_operation`, and of its slices until it ended.
pub(crate) unsafe fn batch(
    operations: *const abi::Operation,
    count: usize,
    limits: QueueLimits,
) -> Result<Vec<Submission<CallerBuffer>>, Failure> {
    // SAFETY: the caller's promise. The size of the first one applies to all of them, so it is
    // checked separately.
    let operations = unsafe {
        if count > 0 {
            check_size(operations, "operation")?;
        }
        array(operations, count, BATCH_MAX, "operations")?
    };
    let too_large = |blocks| SubmitError::TooLarge { operations: count, blocks, limits };
    if count > limits.operations_max {
        return Err(too_large(0).into());
    }
    let mut blocks = 0;
    let one = |operation: &abi::Operation| {
        // SAFETY: the caller's promise.
        let operation = unsafe { sized_struct(operation, "operation")? };
        let submission = Submission {
            tag: operation.tag,
            // SAFETY: the caller's promise for a call of this kind.
            operation: unsafe {
                match operation.kind {
                    abi::ROUTE => route(operation.call.cast())?,
                    abi::FETCH => fetch(operation.call.cast())?,
                    abi::SAVE => save(operation.call.cast())?,
                    abi::RELEASE => release(operation.call.cast())?,
                    abi::ADMIT_DECODE => admit_decode(operation.call.cast())?,
                    other => return Err(range_error("operation.kind", other, "1 to 5")),
                }
            },
        };
        blocks += submission.operation.blocks();
        if blocks > limits.blocks_max { Err(too_large(blocks).into()) } else { Ok(submission) }
    };
    operations.iter().map(one).collect()
}

unsafe fn route(call: *const abi::RouteCall) -> Result<Operation<CallerBuffer>, Failure> {
    // SAFETY: the caller's promise.
    let (call, hashes, after) = unsafe {
        let call = sized_struct(call, "route_call")?;
        check_range(call.asker.qos, 0, 0, "asker.qos")?;
        let after = array(call.after, call.after_count, BLOCKS_MAX, "after")?;
        (call, hashes(call.hashes, call.hashes_count)?, after)
    };
    let seen = |seen: &abi::AnnouncePosition| pb::AnnouncePosition {
        node: seen.node,
        epoch: seen.epoch,
        seq: seen.seq,
        shard: seen.shard,
    };
    Ok(Operation::Route(RouteCall {
        request: RequestId(call.asker.request),
        tenant: TenantId(call.asker.tenant),
        category: category(&call.asker)?,
        hashes,
        block_tokens: call.block_tokens,
        input_tokens: call.input_tokens,
        output_tokens: call.output_tokens,
        tbt_max_us: call.tbt_max_us.into(),
        identity: IdentityDigest(call.asker.identity.bytes),
        after: after.iter().map(seen).collect(),
        fresh: check_range(call.fresh, 0, 1, "fresh")? == 1,
    }))
}

unsafe fn fetch(call: *const abi::FetchCall) -> Result<Operation<CallerBuffer>, Failure> {
    // SAFETY: the caller's promise.
    let (call, hashes, sources, slice_bytes) = unsafe {
        let call = sized_struct(call, "fetch_call")?;
        let sources = sources(call.sources, call.sources_count)?;
        (call, hashes(call.hashes, call.hashes_count)?, sources, slice_bytes(call.slice_bytes, call.layers)?)
    };
    let flags = check_range(
        call.flags,
        0,
        abi::FETCH_EACH_BLOCK | abi::FETCH_DEFERRED | abi::FETCH_EACH_LAYER,
        "flags",
    )?;
    // SAFETY: the caller's promise; fetches write their slices, which do not overlap and are not
    // used otherwise.
    let rooms = unsafe {
        let slices = all_slices(call.slices, call.slices_count, blocks_of(&sources), slice_bytes)?;
        SliceTable::buffers(&SliceTable::new(slices.iter().map(|slice| slice.cast()), slice_bytes))
    };
    let deadline = Duration::from_micros(call.deadline_us);
    Ok(Operation::FetchLayers(FetchLayersOperation {
        call: LayerFetchCall {
            fetch: fetch_call(&call.asker, hashes, call.resident_blocks, sources, deadline)?,
            frame_bytes: encoded_len(slice_bytes) as u64,
            read_buffer_bytes: call.read_buffer_bytes,
            in_flight_bytes_max: zero_as_unlimited(call.in_flight_bytes_max),
            layers_per_request: u32::MAX,
            arrival_order: if flags & abi::FETCH_EACH_LAYER == 0 {
                ArrivalOrder::ByBlock
            } else {
                ArrivalOrder::ByLayer
            },
        },
        buffers: rooms,
        start_now: flags & abi::FETCH_DEFERRED == 0,
        each_block: flags & abi::FETCH_EACH_BLOCK != 0,
    }))
}

/// Also returns the buffers, one for each block of the sources, and a signal of the last buffer's
/// drop.
///
/// # Safety
/// As the header requires of `kvf_prefill_call`, and of its slices until they are returned.
pub(crate) unsafe fn prefill(
    call: *const abi::PrefillCall,
) -> Result<(PrefillCall, Vec<CallerBuffer>, ReleaseSignal), Failure> {
    // SAFETY: the caller's promise.
    let (call, hashes, sources, slice_bytes) = unsafe {
        let call = sized_struct(call, "prefill_call")?;
        let sources = sources(call.sources, call.sources_count)?;
        (call, hashes(call.hashes, call.hashes_count)?, sources, slice_bytes(call.slice_bytes, call.layers)?)
    };
    check_range(call.reserved, 0, 0, "prefill_call.reserved")?;
    let blocks = blocks_of(&sources);
    // SAFETY: the caller's promise; prefills write their slices, which do not overlap and are not
    // used otherwise.
    let (slices, block_layer_ns) = unsafe {
        let slices = all_slices(call.slices, call.slices_count, blocks, slice_bytes)?;
        (slices, block_costs(&call.costs, blocks)?)
    };
    let deadline =
        if call.deadline_us == 0 { Duration::MAX } else { Duration::from_micros(call.deadline_us) };
    let prefill = PrefillCall {
        fetch: fetch_call(&call.asker, hashes, call.resident_blocks, sources, deadline)?,
        costs: ComputeCosts { block_layer_ns, new_layer_ns: call.costs.new_layer_ns, layers: call.layers },
        frame_bytes: encoded_len(slice_bytes) as u64,
        bytes_per_s: if call.bytes_per_s == 0 { BYTES_PER_S } else { call.bytes_per_s },
        read_buffer_bytes_max: call.read_buffer_bytes_max,
        in_flight_bytes_max: zero_as_unlimited(call.in_flight_bytes_max),
    };
    // SAFETY: the same.
    let (rooms, gone) =
        unsafe { SliceTable::buffers_with_signal(slices.iter().map(|slice| slice.cast()), slice_bytes) };
    Ok((prefill, rooms, gone))
}

/// The compute time of one layer of each block.
unsafe fn block_costs(costs: &abi::Costs, blocks: u64) -> Result<Vec<u64>, Failure> {
    if costs.blocks_count as u64 != blocks {
        let expected = format!("{blocks}: one for each block of the sources");
        return Err(Failure::Range { what: "costs.blocks_count", got: costs.blocks_count as u64, expected });
    }
    // SAFETY: the caller's promise.
    let each =
        unsafe { array(costs.block_layer_ns, costs.blocks_count, BLOCKS_MAX, "costs.block_layer_ns")? };
    Ok(each.to_vec())
}

/// The fetch call for a request context.
fn fetch_call(
    asker: &abi::RequestContext,
    hashes: Vec<BlockHash>,
    resident_blocks: u32,
    sources: Vec<pb::Source>,
    deadline: Duration,
) -> Result<FetchCall, Failure> {
    Ok(FetchCall {
        lease: LeaseId(asker.lease),
        request: RequestId(asker.request),
        tenant: TenantId(asker.tenant),
        category: category(asker)?,
        identity: IdentityDigest(asker.identity.bytes),
        hashes,
        resident_blocks,
        sources,
        deadline,
        class: qos(asker, TrafficClass::Save)?,
    })
}

unsafe fn sources(pointer: *const abi::Source, count: usize) -> Result<Vec<pb::Source>, Failure> {
    // SAFETY: the caller's promise.
    let sources = unsafe { array(pointer, count, BLOCKS_MAX, "sources")? };
    let source = |source: &abi::Source| {
        Ok(pb::Source {
            node: source.node,
            epoch: source.epoch,
            // SAFETY: the caller's promise.
            address: unsafe { text(source.address, "source.address")? },
            start_blocks: source.start_blocks,
            len_blocks: source.len_blocks,
            tier: source.tier,
        })
    };
    sources.iter().map(source).collect()
}

fn blocks_of(sources: &[pb::Source]) -> u64 {
    sources.iter().map(|source| u64::from(source.len_blocks)).sum()
}

fn zero_as_unlimited(bytes: u64) -> u64 {
    if bytes == 0 { u64::MAX } else { bytes }
}

unsafe fn save(call: *const abi::SaveCall) -> Result<Operation<CallerBuffer>, Failure> {
    // SAFETY: the caller's promise.
    let (call, hashes, slice_bytes, address, parent) = unsafe {
        let call = sized_struct(call, "save_call")?;
        let bytes = slice_bytes(call.slice_bytes, call.layers)?;
        let address = text(call.address, "address")?;
        (call, hashes(call.hashes, call.hashes_count)?, bytes, address, parent(call.parent)?)
    };
    let (identity, key_form) = (IdentityDigest(call.asker.identity.bytes), key_form(call.key_form)?);
    // SAFETY: the caller's promise; a save reads its slices, which are not written meanwhile.
    let table = unsafe {
        let slices = all_slices(call.slices, call.slices_count, hashes.len() as u64, slice_bytes)?;
        SliceTable::new(slices.iter().map(|slice| slice.cast_mut().cast()), slice_bytes)
    };
    Ok(Operation::Save(SaveCall {
        asker: request_context(&call.asker)?,
        address,
        epoch: Epoch(call.epoch),
        parent,
        first_offset_blocks: call.first_offset_blocks,
        frame_bytes: encoded_len(slice_bytes) as u64,
        frame: SliceTable::frames(table, identity, hashes.clone(), key_form),
        hashes,
        deadline: save_deadline(call.deadline_us),
    }))
}

/// # Safety
/// As the header requires of `kvf_save_layers_call`.
pub(crate) unsafe fn save_layers(call: *const abi::SaveLayersCall) -> Result<LayerSaveCall, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let call = sized_struct(call, "save_layers_call")?;
        let call = LayerSaveCall {
            asker: request_context(&call.asker)?,
            address: text(call.address, "address")?,
            epoch: Epoch(call.epoch),
            parent: parent(call.parent)?,
            first_offset_blocks: call.first_offset_blocks,
            hashes: hashes(call.hashes, call.hashes_count)?,
            key_form: key_form(call.key_form)?,
            slice_bytes: slice_bytes(call.slice_bytes, call.layers)?.to_vec(),
            then_release: leases(call.then_release, call.then_release_count, "then_release")?,
            deadline: save_deadline(call.deadline_us),
        };
        let bytes = encoded_len(&call.slice_bytes).saturating_mul(call.hashes.len());
        if bytes > SAVE_QUEUE_BYTES_MAX {
            // It can never fit the queue.
            let limit = SAVE_QUEUE_BYTES_MAX;
            return Err(Failure::TooLong { what: "the save, in bytes,", got: bytes as u64, limit });
        }
        Ok(call)
    }
}

unsafe fn release(call: *const abi::ReleaseCall) -> Result<Operation<CallerBuffer>, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let call = sized_struct(call, "release_call")?;
        check_range(call.reserved, 0, 0, "release_call.reserved")?;
        Ok(Operation::Release(leases(call.leases, call.leases_count, "leases")?))
    }
}

unsafe fn admit_decode(call: *const abi::AdmitDecodeCall) -> Result<Operation<CallerBuffer>, Failure> {
    // SAFETY: the caller's promise.
    let abi::AdmitDecodeCall { instance, request, tbt_max_us, .. } =
        *unsafe { sized_struct(call, "admit_decode_call")? };
    Ok(Operation::AdmitDecode(AdmitDecodeCall {
        request: RequestId(request),
        instance: InstanceId(instance),
        tbt_max_us,
    }))
}

unsafe fn leases(
    pointer: *const abi::Lease,
    count: usize,
    what: &'static str,
) -> Result<Vec<HeldLease>, Failure> {
    // SAFETY: the caller's promise.
    let leases = unsafe { array(pointer, count, BLOCKS_MAX, what)? };
    let lease = |lease: &abi::Lease| {
        // SAFETY: the caller's promise.
        let address = unsafe { text(lease.address, "lease.address")? };
        Ok(HeldLease { address, lease: LeaseId(lease.lease) })
    };
    leases.iter().map(lease).collect()
}

unsafe fn parent(pointer: *const abi::Hash) -> Result<Option<BlockHash>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    Ok(Some(BlockHash(unsafe { reference(pointer, "parent")? }.bytes)))
}

/// Time limit of a save; 0 selects the library's default.
fn save_deadline(us: u64) -> Duration {
    if us == 0 { SAVE_DEADLINE } else { Duration::from_micros(us) }
}

/// The request context of a save.
fn request_context(asker: &abi::RequestContext) -> Result<RequestContext, Failure> {
    Ok(RequestContext {
        lease: LeaseId(asker.lease),
        request: RequestId(asker.request),
        tenant: TenantId(asker.tenant),
        category: category(asker)?,
        identity: IdentityDigest(asker.identity.bytes),
        traceparent: String::new(),
        class: qos(asker, TrafficClass::Fetch)?,
    })
}

unsafe fn hashes(pointer: *const abi::Hash, count: usize) -> Result<Vec<BlockHash>, Failure> {
    // SAFETY: the caller's promise.
    let hashes = unsafe { array(pointer, count, BLOCKS_MAX, "hashes")? };
    Ok(hashes.iter().map(|hash| BlockHash(hash.bytes)).collect())
}

unsafe fn slice_bytes<'a>(pointer: *const u32, layers: u32) -> Result<&'a [u32], Failure> {
    check_range(layers, 1, u32::try_from(SLICES_MAX).unwrap_or(u32::MAX), "layers")?;
    // SAFETY: the caller's promise.
    let lengths = unsafe { array(pointer, layers as usize, SLICES_MAX, "slice_bytes")? };
    let all: u64 = lengths.iter().map(|bytes| u64::from(*bytes)).sum();
    if all > PAYLOAD_BYTES_MAX as u64 {
        return Err(Failure::TooLong { what: "slice_bytes", got: all, limit: PAYLOAD_BYTES_MAX });
    }
    Ok(lengths)
}

/// The addresses of a call's slices: one for each layer of each block, null only if the slice is
/// empty.
unsafe fn all_slices<'a, P: Copy + NullablePointer>(
    pointer: *const P,
    count: usize,
    blocks: u64,
    slice_bytes: &[u32],
) -> Result<&'a [P], Failure> {
    if blocks > BLOCKS_MAX as u64 {
        return Err(Failure::TooLong { what: "blocks", got: blocks, limit: BLOCKS_MAX });
    }
    let expected = blocks * slice_bytes.len() as u64;
    if count as u64 != expected {
        let expected = format!("{expected}: {blocks} blocks of {} layers", slice_bytes.len());
        return Err(Failure::Range { what: "slices_count", got: count as u64, expected });
    }
    // SAFETY: the caller's promise.
    let slices = unsafe { array(pointer, count, count, "slices")? };
    let is_bad = |(slice, bytes): (&P, &u32)| slice.is_null_pointer() && *bytes > 0;
    if slices.iter().zip(slice_bytes.iter().cycle()).any(is_bad) {
        return Err(Failure::Null { what: "one of the slices" });
    }
    Ok(slices)
}

/// A const or mutable raw pointer.
trait NullablePointer {
    fn is_null_pointer(&self) -> bool;
}

impl<T> NullablePointer for *mut T {
    fn is_null_pointer(&self) -> bool {
        self.is_null()
    }
}

impl<T> NullablePointer for *const T {
    fn is_null_pointer(&self) -> bool {
        self.is_null()
    }
}

fn category(asker: &abi::RequestContext) -> Result<Category, Failure> {
    let kinds = u32::try_from(RequestKind::ALL.len() - 1).unwrap_or(u32::MAX);
    let kind = u8::try_from(check_range(asker.kind, 0, kinds, "asker.kind")?).unwrap_or_default();
    // Conversation turns saturate.
    let turn = u8::try_from(asker.turn).unwrap_or(u8::MAX);
    Ok(Category { kind: RequestKind::from_u8(kind), conversation_turn: turn })
}

/// The traffic class of an operation; `None` if not set. `other` is the one class that it cannot
/// have.
fn qos(asker: &abi::RequestContext, other: TrafficClass) -> Result<Option<TrafficClass>, Failure> {
    let may_be = || TrafficClass::ALL.into_iter().filter(|class| *class != other);
    match asker.qos {
        0 => Ok(None),
        number => may_be().find(|class| *class as u32 == number).map(Some).ok_or_else(|| {
            let numbers: Vec<_> =
                may_be().map(|class| format!("{} ({})", class as u32, class.name())).collect();
            range_error("asker.qos", number, &format!("0 or one of {}", numbers.join(", ")))
        }),
    }
}

/// # Safety
/// As the header requires of `kvf_reporter_config`.
///
/// Also returns the duration of repeating a load.
pub(crate) unsafe fn reporter(
    config: *const abi::ReporterConfig,
) -> Result<(ReporterConfig, Duration), Failure> {
    // SAFETY: the caller's promise.
    let (config, address, host, place) = unsafe {
        let config = sized_struct(config, "reporter_config")?;
        let host = optional_text(config.host, "host")?;
        (
            config,
            text(config.address, "address")?,
            host,
            optional_text(config.place, "place")?.unwrap_or_default(),
        )
    };
    let has_node = check_range(config.has_node, 0, 1, "has_node")? == 1;
    if !has_node {
        check_range(config.node, 0, 0, "node")?;
    }
    let every_ms = match check_range(config.every_ms, 0, REPORT_MS_MAX, "every_ms")? {
        0 => REPORT_MS,
        said => said,
    };
    let silent_after_ms =
        match check_range(config.silent_after_ms, 0, SILENT_AFTER_MS_MAX, "silent_after_ms")? {
            0 => SILENT_AFTER_MS,
            // A shorter time would leave gaps between reports, however often the load is set.
            said if said < every_ms => {
                let expected = format!("every_ms, {every_ms}, or more; or 0 for {SILENT_AFTER_MS}");
                return Err(Failure::Range { what: "silent_after_ms", got: said.into(), expected });
            }
            said => said,
        };
    if address.is_empty() {
        return Err(Failure::Failed(
            "address is empty: give the address at which the instance takes requests".to_owned(),
        ));
    }
    check_range(config.reserved, 0, 0, "reporter_config.reserved")?;
    let role = check_range(config.role, 0, InstanceRole::Decode as u32, "role")?;
    let role = InstanceRole::from_number(role).unwrap_or_default();
    if let Err(error) = Domain::parse(&place) {
        return Err(Failure::Failed(format!("place {place:?}: {error}")));
    }
    let reporter = ReporterConfig {
        // C callers give only a digest.
        manifest: None,
        instance: InstanceId(config.instance),
        address,
        host: host.unwrap_or_default(),
        node: has_node.then_some(NodeId(config.node)),
        interval: Duration::from_millis(every_ms.into()),
        links: check_range(config.without_links, 0, 1, "without_links")? == 0,
        role,
        place,
        orders_by_deadline: check_range(config.orders_by_deadline, 0, 1, "orders_by_deadline")? == 1,
    };
    Ok((reporter, Duration::from_millis(silent_after_ms.into())))
}

/// # Safety
/// As the header requires of `kvf_load`.
pub(crate) unsafe fn load(load: *const abi::Load) -> Result<InstanceLoad, Failure> {
    // SAFETY: the caller's promise.
    let load = unsafe { sized_struct(load, "load")? };
    check_range(load.reserved, 0, 0, "load.reserved")?;
    let abi::Load { running, waiting, queue_tokens, kv_tokens_max, kv_tokens, tbt_us, chunk_tokens, .. } =
        *load;
    // An engine may count shared blocks once per request; that must not invalidate its report.
    let kv_tokens = kv_tokens.min(kv_tokens_max);
    Ok(InstanceLoad { queue_tokens, running, waiting, kv_tokens_max, kv_tokens, tbt_us, chunk_tokens })
}

/// # Safety
/// As the header requires of `kvf_outcome`.
pub(crate) unsafe fn outcome(outcome: *const abi::Outcome) -> Result<RequestOutcome, Failure> {
    // SAFETY: the caller's promise.
    let abi::Outcome { output_tokens, request, ttft_us, tbt_us, fetched, .. } =
        *unsafe { sized_struct(outcome, "outcome")? };
    let measured = |us: u64| (us > 0).then(|| Duration::from_micros(us));
    let ended = RequestOutcome::ended(RequestId(request), output_tokens, measured(tbt_us));
    let (hit_blocks, misses) = if fetched.is_null() {
        (0, Vec::new())
    } else {
        // SAFETY: the caller's promise.
        unsafe { reference(fetched, "outcome.fetched")? }.arrived_blocks()?
    };
    Ok(RequestOutcome { hit_blocks, misses, ttft: measured(ttft_us), ..ended })
}

fn key_form(number: u32) -> Result<KeyForm, Failure> {
    match number {
        0 => Ok(KeyForm::Raw),
        1 => Ok(KeyForm::Rotated),
        other => Err(range_error("key_form", other, "0 or 1")),
    }
}

fn check_range(number: u32, least: u32, most: u32, what: &'static str) -> Result<u32, Failure> {
    if (least..=most).contains(&number) {
        return Ok(number);
    }
    let expected = if least == most { least.to_string() } else { format!("{least} to {most}") };
    Err(range_error(what, number, &expected))
}

fn range_error(what: &'static str, got: u32, expected: &str) -> Failure {
    Failure::Range { what, got: u64::from(got), expected: expected.to_owned() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::ptr::null;

    use super::*;

    #[test]
    fn save_deadline_defaults_to_one_minute() {
        let (slice_bytes, hashes) = ([0u32], [abi::Hash::default()]);
        let (address, nowhere) = (c"127.0.0.1:9".as_ptr(), [null()]);
        for (deadline_us, expected) in [(0, SAVE_DEADLINE), (250_000, Duration::from_millis(250))] {
            let call = abi::SaveCall {
                size: u32::try_from(size_of::<abi::SaveCall>()).unwrap(),
                key_form: 1,
                asker: abi::RequestContext::default(),
                address,
                epoch: 1,
                parent: null(),
                hashes: hashes.as_ptr(),
                hashes_count: 1,
                slice_bytes: slice_bytes.as_ptr(),
                slices: nowhere.as_ptr(),
                slices_count: 1,
                layers: 1,
                first_offset_blocks: 0,
                deadline_us,
            };
            let by_layers = abi::SaveLayersCall {
                size: u32::try_from(size_of::<abi::SaveLayersCall>()).unwrap(),
                key_form: 1,
                asker: abi::RequestContext::default(),
                address,
                epoch: 1,
                parent: null(),
                hashes: hashes.as_ptr(),
                hashes_count: 1,
                slice_bytes: slice_bytes.as_ptr(),
                then_release: null(),
                then_release_count: 0,
                layers: 1,
                first_offset_blocks: 0,
                deadline_us,
            };
            // SAFETY: everything pointed to outlives the calls; the slice is empty.
            unsafe {
                let Operation::Save(whole) = save(&raw const call).unwrap() else { panic!("a save") };
                assert_eq!(whole.deadline, expected);
                assert_eq!(save_layers(&raw const by_layers).unwrap().deadline, expected);
            }
        }
    }
}
