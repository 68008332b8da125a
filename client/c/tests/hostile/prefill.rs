//! A careless caller of a prefill, and prefills from silent or unreachable nodes.
//!
//! Not here: a prefill with an arriving history (`client/c/src/prefills/mod.rs`, and `prefill.c` with a
//! node).

use std::net::{TcpListener, UdpSocket};
use std::ptr::{null, null_mut};

use kvfleet_client_c::{PrefillHandle, ResultHandle};

use super::*;

const HOUR_US: u64 = 3_600_000_000;

/// Recomputing takes 144 seconds, and a wasted wait more than two.
const SECONDS: [u64; 2] = [18_000_000_000; 2];

fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap()
}

fn call(memory: &CallMemory, slices: &[*mut c_void], sources: &[abi::Source]) -> abi::PrefillCall {
    let costs = abi::Costs {
        block_layer_ns: SECONDS.as_ptr(),
        blocks_count: slices.len() / 2,
        new_layer_ns: SECONDS[0],
    };
    abi::PrefillCall {
        size: size::<abi::PrefillCall>(),
        layers: 2,
        asker: abi::RequestContext { lease: 7, ..abi::RequestContext::default() },
        hashes: memory.hashes.as_ptr(),
        hashes_count: 2,
        sources: sources.as_ptr(),
        sources_count: sources.len(),
        slice_bytes: memory.slice_bytes.as_ptr(),
        slices: slices.as_ptr(),
        slices_count: slices.len(),
        costs,
        bytes_per_s: 0,
        read_buffer_bytes_max: 0,
        in_flight_bytes_max: 0,
        deadline_us: 0,
        resident_blocks: 0,
        reserved: 0,
    }
}

fn begin_prefill(opened: &TestClient, call: &abi::PrefillCall) -> (Status, *mut PrefillHandle) {
    let mut prefill = null_mut();
    // SAFETY: everything pointed to outlives the call, and slices live until the prefill is freed.
    let status = unsafe { kvf_prefill_begin(opened.client, call, &raw mut prefill) };
    assert_eq!(prefill.is_null(), status != status::OK);
    (status, prefill)
}

/// The next step and its blocks.
fn next(prefill: *mut PrefillHandle, timeout_us: u64) -> Result<(abi::Step, Vec<u32>), Status> {
    let (mut step, mut blocks) = (abi::Step { size: size::<abi::Step>(), ..abi::Step::default() }, [9; 2]);
    // SAFETY: everything pointed to is valid, and as long as stated.
    let status = unsafe { kvf_prefill_next(prefill, timeout_us, &raw mut step, blocks.as_mut_ptr(), 2) };
    let count = step.blocks as usize;
    if status == status::OK { Ok((step, blocks[..count].to_vec())) } else { Err(status) }
}

/// All returned blocks in ascending order, until the library reports the end.
fn collect_returned(prefill: *mut PrefillHandle) -> Vec<(u32, u32)> {
    let mut all = Vec::new();
    loop {
        let (mut back, mut count) = (abi::ReturnedBlock::default(), 7);
        let bytes = size_of::<abi::ReturnedBlock>();
        // SAFETY: everything pointed to is valid.
        let status =
            unsafe { kvf_prefill_returned(prefill, &raw mut back, 1, bytes, HOUR_US, &raw mut count) };
        if status == status::CLOSED {
            assert_eq!(count, 0);
            all.sort_unstable();
            return all;
        }
        assert_eq!((status, count), (status::OK, 1));
        all.push((back.block, back.layers));
    }
}

#[test]
fn invalid_prefill_is_refused() {
    let (opened, mut memory) = (open_client(null()), CallMemory::new());
    let (slices, sources) = (memory.slices(), [source(2)]);
    let good = call(&memory, &slices, &sources);
    let refuses = |call: abi::PrefillCall, expected, words: &str| {
        assert_refused(begin_prefill(&opened, &call).0, expected, words);
    };
    refuses(abi::PrefillCall { size: 8, ..good }, status::INVALID, "prefill_call.size is 8");
    refuses(abi::PrefillCall { reserved: 1, ..good }, status::INVALID, "prefill_call.reserved is 1");
    refuses(abi::PrefillCall { hashes: null(), ..good }, status::INVALID, "hashes is null");
    refuses(abi::PrefillCall { sources: null(), ..good }, status::INVALID, "sources is null");
    refuses(abi::PrefillCall { layers: 0, ..good }, status::INVALID, "layers is 0");
    refuses(abi::PrefillCall { layers: u32::MAX, ..good }, status::INVALID, "layers is 4294967295");
    refuses(abi::PrefillCall { slice_bytes: null(), ..good }, status::INVALID, "slice_bytes is null");
    refuses(abi::PrefillCall { slices: null(), ..good }, status::INVALID, "slices is null");
    refuses(abi::PrefillCall { slices_count: 3, ..good }, status::INVALID, "slices_count is 3, expected 4");
    let mut hole = slices;
    hole[2] = null_mut();
    refuses(call(&memory, &hole, &sources), status::INVALID, "one of the slices is null");
    let costs = |costs| abi::PrefillCall { costs, ..good };
    let none = abi::Costs { block_layer_ns: null(), ..good.costs };
    refuses(costs(none), status::INVALID, "costs.block_layer_ns is null");
    let odd = good.costs.block_layer_ns.wrapping_byte_add(1);
    let odd = abi::Costs { block_layer_ns: odd, ..good.costs };
    refuses(costs(odd), status::INVALID, "costs.block_layer_ns is misaligned");
    let few = abi::Costs { blocks_count: 1, ..good.costs };
    refuses(costs(few), status::INVALID, "costs.blocks_count is 1, expected 2: one for each block");
    says("C: a prefill without the costs of a block", &last_error(), &[]);
    let save = abi::RequestContext { qos: abi::QOS_SAVE, ..abi::RequestContext::default() };
    refuses(abi::PrefillCall { asker: save, ..good }, status::INVALID, "asker.qos is 2");
    refuses(abi::PrefillCall { resident_blocks: 1, ..good }, status::FAILED, "source 0 covers blocks 0 to 2");
    // SAFETY: null is not written.
    let status = unsafe { kvf_prefill_begin(opened.client, &raw const good, null_mut()) };
    assert_refused(status, status::INVALID, "prefill is null");
}

#[test]
fn prefill_from_unreachable_node_computes_all_and_returns_each_block_once() {
    let (opened, mut memory) = (open_client(null()), CallMemory::new());
    let (slices, sources) = (memory.slices(), [source(2)]);
    let (status, prefill) = begin_prefill(&opened, &call(&memory, &slices, &sources));
    assert_eq!(status, status::OK);
    let (mut step, mut numbers, mut count) = (abi::Step::default(), [0u32; 2], 0);
    let (numbers, bytes) = (numbers.as_mut_ptr(), size_of::<abi::ReturnedBlock>());
    let mut result: *mut ResultHandle = null_mut();
    // SAFETY: pointers that are not null are valid, and as long as stated.
    unsafe {
        // A refused call has no effect: the first layer still follows below.
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers, 2);
        assert_refused(status, status::INVALID, "step.size is 0");
        step.size = size::<abi::Step>();
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers, 1);
        assert_refused(status, status::INVALID, "blocks_count is 1, expected 2 or more: one for each block");
        says("C: a prefill's step without room for its blocks", &last_error(), &[]);
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, null_mut(), 2);
        assert_refused(status, status::INVALID, "blocks is null");
        assert_refused(
            kvf_prefill_next(prefill, HOUR_US, null_mut(), numbers, 2),
            status::INVALID,
            "step is null",
        );
        let mut back = abi::ReturnedBlock::default();
        let status = kvf_prefill_returned(prefill, &raw mut back, 1, bytes, 0, &raw mut count);
        assert_refused(status, status::INVALID, "this prefill has not ended");
        says("C: a prefill that has not ended", &last_error(), &[]);
        for layer in 0..2 {
            let (step, blocks) = next(prefill, HOUR_US).unwrap();
            assert_eq!((step.kind, step.layer, blocks), (abi::STEP_LAYER, layer, vec![0, 1]));
        }
        for _ in 0..2 {
            let (step, blocks) = next(prefill, HOUR_US).unwrap();
            assert_eq!((step.kind, blocks), (abi::STEP_DONE, vec![]));
        }
        assert_refused(kvf_prefill_end(prefill, null_mut()), status::INVALID, "result is null");
        assert_eq!(kvf_prefill_end(prefill, &raw mut result), status::OK);
        let again = kvf_prefill_end(prefill, &raw mut result);
        assert_refused(again, status::CLOSED, "this prefill has ended");
        says("C: a prefill that has ended", &last_error(), &[]);
        assert_eq!(next(prefill, HOUR_US), Err(status::CLOSED));
        let status = kvf_prefill_returned(prefill, &raw mut back, 1, bytes + 8, 0, &raw mut count);
        assert_refused(status, status::INVALID, "entry.size is 16");
        let status = kvf_prefill_returned(prefill, null_mut(), 1, bytes, 0, &raw mut count);
        assert_refused(status, status::INVALID, "entries is null");
        let status = kvf_prefill_returned(prefill, &raw mut back, 1, bytes, 0, null_mut());
        assert_refused(status, status::INVALID, "count is null");
        assert_eq!(collect_returned(prefill), [(0, 0), (1, 0)]);
        assert_eq!(collect_returned(prefill), [], "each once");
        says("C: a prefill with all blocks returned", &last_error(), &[]);
        kvf_prefill_free(prefill);
        check_prefill_result(result);
    }
}

/// Checks the result of a prefill from an unreachable node, and frees it.
unsafe fn check_prefill_result(result: *mut ResultHandle) {
    // SAFETY: the result is valid until it is freed below; each struct is written before it is
    // read.
    unsafe {
        let mut prefilled: abi::Prefilled = std::mem::zeroed();
        let status = kvf_result_prefilled(result, &raw mut prefilled);
        assert_refused(status, status::INVALID, "prefilled.size is 0");
        assert_refused(kvf_result_prefilled(result, null_mut()), status::INVALID, "prefilled is null");
        prefilled.size = size::<abi::Prefilled>();
        assert_eq!(kvf_result_prefilled(result, &raw mut prefilled), status::OK);
        assert_eq!(std::slice::from_raw_parts(prefilled.computed, prefilled.computed_count), [1, 1]);
        assert_eq!((prefilled.received_bytes, prefilled.saved_us), (0, 0));
        let mut miss: abi::Miss = std::mem::zeroed();
        miss.size = size::<abi::Miss>();
        // The source may still be about to report its reason.
        if prefilled.misses > 0 {
            assert_eq!(kvf_result_miss(result, 0, &raw mut miss), status::OK);
            assert_eq!((miss.reason, CStr::from_ptr(miss.address)), (6, c"127.0.0.1:9"));
            assert!(kvf_result_message(result, null_mut(), 0) > 0);
        }
        let beyond = kvf_result_miss(result, prefilled.misses as usize, &raw mut miss);
        assert_refused(beyond, status::NOT_FOUND, "miss of this number");
        let mut fetched: abi::Fetched = std::mem::zeroed();
        assert_refused(kvf_result_fetched(result, &raw mut fetched), status::NOT_FOUND, "there is no fetch");
        kvf_result_free(result);
    }
}

/// A node that accepts connections and never answers, with its address.
fn silent_node() -> (TcpListener, UdpSocket, CString) {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let udp = UdpSocket::bind(address).unwrap();
    (tcp, udp, CString::new(address.to_string()).unwrap())
}

#[test]
fn thread_waiting_for_silent_node_is_woken_by_the_end() {
    struct SharedPrefill(*mut PrefillHandle);
    // SAFETY: C uses handles from any thread.
    unsafe impl Sync for SharedPrefill {}
    let (_tcp, _udp, address) = silent_node();
    let (opened, mut memory) = (open_client(null()), CallMemory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    // Recomputing takes centuries, so a wait may take years.
    let endless = [u64::MAX / 8; 2];
    let good = call(&memory, &slices, &sources);
    let costs = abi::Costs { block_layer_ns: endless.as_ptr(), new_layer_ns: endless[0], ..good.costs };
    let (status, prefill) = begin_prefill(&opened, &abi::PrefillCall { costs, ..good });
    assert_eq!(status, status::OK);
    let (step, blocks) = next(prefill, 0).unwrap();
    assert_eq!((step.kind, blocks), (abi::STEP_WAIT, vec![]));
    assert!(step.wait_us > HOUR_US, "{step:?}");
    // A wait that times out says so, and the prefill continues.
    assert_eq!(next(prefill, 1000).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
    let (shared, mut result) = (SharedPrefill(prefill), null_mut());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let SharedPrefill(prefill) = &shared;
            next(*prefill, HOUR_US)
        });
        // SAFETY: everything pointed to is valid; the prefill is freed after all of these.
        assert_eq!(unsafe { kvf_prefill_end(shared.0, &raw mut result) }, status::OK);
        assert_eq!(waiting.join().unwrap(), Err(status::CLOSED));
    });
    assert_eq!(collect_returned(prefill), [(0, 0), (1, 0)]);
    // SAFETY: freed once each.
    unsafe {
        let mut lease: abi::Lease = std::mem::zeroed();
        assert_eq!(kvf_result_lease(result, 0, &raw mut lease), status::OK);
        assert_eq!((CStr::from_ptr(lease.address), lease.lease), (&*address, 7));
        kvf_result_free(result);
        kvf_prefill_free(prefill);
    }
}

#[test]
fn prefill_freed_before_its_end_returns_memory_and_outlives_client() {
    let (_tcp, _udp, address) = silent_node();
    for asks in [false, true] {
        let (opened, mut memory) = (open_client(null()), CallMemory::new());
        let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
        let (status, prefill) = begin_prefill(&opened, &call(&memory, &slices, &sources));
        assert_eq!(status, status::OK);
        drop(opened);
        if asks {
            assert_eq!(next(prefill, 0).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
        }
        // SAFETY: freed once. The memory is not used after that.
        unsafe { kvf_prefill_free(prefill) };
        memory.bytes.fill(7);
    }
}

#[test]
fn huge_costs_saturate() {
    let (_tcp, _udp, address) = silent_node();
    let (opened, mut memory) = (open_client(null()), CallMemory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    let (most, good) = ([u64::MAX; 2], call(&memory, &slices, &sources));
    let costs = abi::Costs { block_layer_ns: most.as_ptr(), new_layer_ns: u64::MAX, ..good.costs };
    let deadline_us = u64::MAX;
    let (status, prefill) = begin_prefill(&opened, &abi::PrefillCall { costs, deadline_us, ..good });
    assert_eq!(status, status::OK);
    for _ in 0..8 {
        assert!(next(prefill, 1000).is_ok());
    }
    // SAFETY: freed once.
    unsafe { kvf_prefill_free(prefill) };
}

#[test]
fn prefill_without_history_computes_its_layers() {
    let (opened, memory) = (open_client(null()), CallMemory::new());
    let (status, prefill) = begin_prefill(&opened, &call(&memory, &[], &[]));
    assert_eq!(status, status::OK);
    let (mut step, mut result, mut said) = (abi::Step::default(), null_mut(), Vec::new());
    step.size = size::<abi::Step>();
    // SAFETY: pointers that are not null are valid; without blocks none is written.
    unsafe {
        while step.kind != abi::STEP_DONE {
            let status = kvf_prefill_next(prefill, 0, &raw mut step, null_mut(), 0);
            assert_eq!((status, step.blocks), (status::OK, 0));
            said.push((step.kind, step.layer));
        }
        assert_eq!(said, [(abi::STEP_LAYER, 0), (abi::STEP_LAYER, 1), (abi::STEP_DONE, 0)]);
        assert_eq!(kvf_prefill_end(prefill, &raw mut result), status::OK);
        assert_eq!(collect_returned(prefill), []);
        kvf_result_free(result);
        kvf_prefill_free(prefill);
    }
}

#[test]
fn forked_process_leaves_a_prefill_untouched() {
    let (_tcp, _udp, address) = silent_node();
    let (opened, mut memory) = (open_client(null()), CallMemory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    let call = call(&memory, &slices, &sources);
    let (status, prefill) = begin_prefill(&opened, &call);
    assert_eq!(status, status::OK);
    let (mut step, mut numbers) =
        (abi::Step { size: size::<abi::Step>(), ..abi::Step::default() }, [0u32; 2]);
    // SAFETY: the child only calls the library, which refuses, and ends without returning.
    unsafe {
        let child = fork();
        if child == 0 {
            alarm(30);
            let (mut other, mut result, mut count) = (null_mut(), null_mut(), 0);
            let statuses = [
                kvf_prefill_begin(opened.client, &raw const call, &raw mut other),
                kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers.as_mut_ptr(), 2),
                kvf_prefill_end(prefill, &raw mut result),
                kvf_prefill_returned(
                    prefill,
                    null_mut(),
                    0,
                    size_of::<abi::ReturnedBlock>(),
                    0,
                    &raw mut count,
                ),
            ];
            kvf_prefill_free(prefill);
            _exit(i32::from(statuses != [status::FAILED; 4]));
        }
        let mut ended = -1;
        assert_eq!(waitpid(child, &raw mut ended, 0), child);
        assert_eq!(ended, 0, "the child was killed, or got another status");
        assert_eq!(next(prefill, 0).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
        kvf_prefill_free(prefill);
    }
}
