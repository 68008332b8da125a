//! Structs of the C interface, field by field as in `include/kvfleet.h`; `tests/header.rs` compares
//! them.
//!
//! Not here: the meaning of the fields (the header), and validation (`calls.rs`).
#![allow(missing_docs)] // the header describes them

use std::ffi::{c_char, c_void};

use kv_core::id::HASH_BYTES;

use crate::ResultHandle;
use crate::status::Status;

/// See `KVF_ABI_VERSION`.
pub const ABI_VERSION: u32 = 7;

pub const ROUTE: u32 = 1;
pub const FETCH: u32 = 2;
pub const SAVE: u32 = 3;
pub const RELEASE: u32 = 4;
pub const ADMIT_DECODE: u32 = 5;

pub const FETCH_EACH_BLOCK: u32 = 1;
pub const FETCH_DEFERRED: u32 = 2;
pub const FETCH_EACH_LAYER: u32 = 4;

pub const QOS_FETCH: u32 = 1;
pub const QOS_SAVE: u32 = 2;
pub const QOS_REPLICATE: u32 = 3;
pub const QOS_PREFETCH: u32 = 4;

pub const PATH_SHM: u32 = 1;
pub const PATH_RDMA: u32 = 2;
pub const PATH_QUIC: u32 = 3;
pub const PATH_TCP: u32 = 4;

pub const STEP_LAYER: u32 = 1;
pub const STEP_CATCH_UP: u32 = 2;
pub const STEP_WAIT: u32 = 3;
pub const STEP_DONE: u32 = 4;

pub const ARRIVED: u32 = 1;
pub const RECOMPUTE: u32 = 2;
pub const LAYER: u32 = 3;
pub const ENDED: u32 = 4;

/// Declares structs, and lists their sizes and field offsets for the test.
macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident as $c_name:literal { $($field:ident: $type:ty,)* })*) => {
        $($(#[$meta])* #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type,)* })*

        /// C name of each struct, its size, and the name, offset and size of each field, in bytes.
        #[must_use]
        pub fn layouts() -> Vec<(&'static str, usize, Vec<(&'static str, usize, usize)>)> {
            vec![$((
                $c_name,
                size_of::<$name>(),
                vec![$((stringify!($field), std::mem::offset_of!($name, $field), size_of::<$type>())),*],
            )),*]
        }
    };
}

structs! {
    #[derive(Default, PartialEq, Eq)]
    Hash as "kvf_hash" { bytes: [u8; HASH_BYTES], }

    #[derive(Default, PartialEq, Eq)]
    Identity as "kvf_identity" { bytes: [u8; 16], }

    ClientConfig as "kvf_client_config" {
        size: u32,
        threads: u32,
        routers: *const *const c_char,
        routers_count: usize,
        ca_file: *const c_char,
        cert_file: *const c_char,
        key_file: *const c_char,
        transport: *const c_char,
        shm_dir: *const c_char,
        seed: u64,
        rdma_device: *const c_char,
        rdma_near: *const c_char,
        rdma_memory_bytes: u64,
        network: *const c_char,
    }

    Model as "kvf_model" {
        size: u32,
        key_form: u32,
        model: *const c_char,
        weights_digest: *const c_char,
        dtype: *const c_char,
        layout: *const c_char,
        rope: *const c_char,
        adapter: *const c_char,
        layers: u32,
        tp: u32,
        pp: u32,
        rank: u32,
        block_tokens: u32,
        reserved: u32,
    }

    #[derive(Default)]
    RequestContext as "kvf_request_context" {
        request: u64,
        lease: u64,
        tenant: u32,
        kind: u32,
        turn: u32,
        qos: u32,
        identity: Identity,
    }

    #[derive(Default, PartialEq, Eq)]
    AnnouncePosition as "kvf_announce_position" { node: u32, shard: u32, epoch: u64, seq: u64, }

    Source as "kvf_source" {
        address: *const c_char,
        epoch: u64,
        node: u32,
        tier: u32,
        start_blocks: u32,
        len_blocks: u32,
    }

    Lease as "kvf_lease" { address: *const c_char, lease: u64, }

    RouteCall as "kvf_route_call" {
        size: u32,
        fresh: u32,
        asker: RequestContext,
        hashes: *const Hash,
        hashes_count: usize,
        after: *const AnnouncePosition,
        after_count: usize,
        block_tokens: u32,
        input_tokens: u32,
        output_tokens: u32,
        tbt_max_us: u32,
    }

    FetchCall as "kvf_fetch_call" {
        size: u32,
        flags: u32,
        asker: RequestContext,
        hashes: *const Hash,
        hashes_count: usize,
        sources: *const Source,
        sources_count: usize,
        slice_bytes: *const u32,
        slices: *const *mut c_void,
        slices_count: usize,
        layers: u32,
        resident_blocks: u32,
        deadline_us: u64,
        read_buffer_bytes: u64,
        in_flight_bytes_max: u64,
    }

    SaveCall as "kvf_save_call" {
        size: u32,
        key_form: u32,
        asker: RequestContext,
        address: *const c_char,
        epoch: u64,
        parent: *const Hash,
        hashes: *const Hash,
        hashes_count: usize,
        slice_bytes: *const u32,
        slices: *const *const c_void,
        slices_count: usize,
        layers: u32,
        first_offset_blocks: u32,
        deadline_us: u64,
    }

    SaveLayersCall as "kvf_save_layers_call" {
        size: u32,
        key_form: u32,
        asker: RequestContext,
        address: *const c_char,
        epoch: u64,
        parent: *const Hash,
        hashes: *const Hash,
        hashes_count: usize,
        slice_bytes: *const u32,
        then_release: *const Lease,
        then_release_count: usize,
        layers: u32,
        first_offset_blocks: u32,
        deadline_us: u64,
    }

    Costs as "kvf_costs" { block_layer_ns: *const u64, blocks_count: usize, new_layer_ns: u64, }

    PrefillCall as "kvf_prefill_call" {
        size: u32,
        layers: u32,
        asker: RequestContext,
        hashes: *const Hash,
        hashes_count: usize,
        sources: *const Source,
        sources_count: usize,
        slice_bytes: *const u32,
        slices: *const *mut c_void,
        slices_count: usize,
        costs: Costs,
        bytes_per_s: u64,
        read_buffer_bytes_max: u64,
        in_flight_bytes_max: u64,
        deadline_us: u64,
        resident_blocks: u32,
        reserved: u32,
    }

    #[derive(Default, PartialEq, Eq)]
    Step as "kvf_step" { size: u32, kind: u32, layer: u32, blocks: u32, wait_us: u64, }

    #[derive(Default, PartialEq, Eq)]
    ReturnedBlock as "kvf_returned_block" { block: u32, layers: u32, }

    ReleaseCall as "kvf_release_call" {
        size: u32,
        reserved: u32,
        leases: *const Lease,
        leases_count: usize,
    }

    AdmitDecodeCall as "kvf_admit_decode_call" { size: u32, instance: u32, request: u64, tbt_max_us: u64, }

    Operation as "kvf_operation" { size: u32, kind: u32, tag: u64, call: *const c_void, }

    QueueLimits as "kvf_queue_limits" {
        size: u32,
        reserved: u32,
        operations_max: u64,
        blocks_max: u64,
    }

    Completion as "kvf_completion" {
        tag: u64,
        kind: u32,
        status: Status,
        block: u32,
        layer: u32,
        result: *mut ResultHandle,
    }

    Decision as "kvf_decision" {
        size: u32,
        instance: u32,
        instance_address: *const c_char,
        save_address: *const c_char,
        save_epoch: u64,
        save_node: u32,
        save_tier: u32,
        fetch_blocks: u32,
        recompute_blocks: u32,
        resident_blocks: u32,
        sources: u32,
        priority_deadline_ms: u64,
        handover_address: *const c_char,
        handover_us: u64,
        handover_instance: u32,
        reserved: u32,
    }

    Fetched as "kvf_fetched" {
        size: u32,
        end_block: u32,
        came: *const u8,
        came_count: usize,
        received_bytes: u64,
        wrong_blocks: u32,
        misses: u32,
    }

    Prefilled as "kvf_prefilled" {
        size: u32,
        misses: u32,
        computed: *const u8,
        computed_count: usize,
        received_bytes: u64,
        idle_us: u64,
        saved_us: u64,
        wrong_blocks: u32,
        reserved: u32,
    }

    Miss as "kvf_miss" {
        size: u32,
        node: u32,
        address: *const c_char,
        first_missing_block: u32,
        reason: u32,
    }

    Saved as "kvf_saved" {
        size: u32,
        stored_blocks: u32,
        present_blocks: u32,
        refused_blocks: u32,
        stored_bytes: u64,
        visible_at: AnnouncePosition,
    }

    NodePath as "kvf_node_path" {
        size: u32,
        path: u32,
        address: *const c_char,
        reason: *const c_char,
    }

    PathTraffic as "kvf_path_traffic" { size: u32, path: u32, fetched_bytes: u64, saved_bytes: u64, }

    #[derive(Default, PartialEq, Eq)]
    Link as "kvf_link" {
        epoch: u64,
        latency_us: u64,
        bytes: u64,
        stream_us: u64,
        node: u32,
        fetches: u32,
        path: u32,
        tier: u32,
    }

    ReporterConfig as "kvf_reporter_config" {
        size: u32,
        instance: u32,
        address: *const c_char,
        host: *const c_char,
        node: u32,
        has_node: u32,
        every_ms: u32,
        without_links: u32,
        silent_after_ms: u32,
        orders_by_deadline: u32,
        place: *const c_char,
        role: u32,
        reserved: u32,
    }

    Load as "kvf_load" {
        size: u32,
        running: u32,
        waiting: u32,
        tbt_us: u32,
        queue_tokens: u64,
        kv_tokens_max: u64,
        kv_tokens: u64,
        chunk_tokens: u32,
        reserved: u32,
    }

    Outcome as "kvf_outcome" {
        size: u32,
        output_tokens: u32,
        request: u64,
        ttft_us: u64,
        tbt_us: u64,
        fetched: *const ResultHandle,
    }
}
