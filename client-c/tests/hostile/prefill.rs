//! What a careless caller of a prefill gets, and one whose nodes say nothing or are not there.
//!
//! Not here: a prefill whose history comes (`client-c/src/prefills.rs`, and `prefill.c` with a node).

use std::net::{TcpListener, UdpSocket};
use std::ptr::{null, null_mut};

use kvfleet_client_c::{PrefillHandle, ResultHandle};

use super::*;

const HOUR_US: u64 = 3_600_000_000;

/// Recomputing takes 144 seconds, and a wait in vain more than two.
const SECONDS: [u64; 2] = [18_000_000_000; 2];

fn size<T>() -> u32 {
    u32::try_from(size_of::<T>()).unwrap()
}

fn call(memory: &Memory, slices: &[*mut c_void], sources: &[abi::Source]) -> abi::PrefillCall {
    let costs = abi::Costs {
        block_layer_ns: SECONDS.as_ptr(),
        blocks_count: slices.len() / 2,
        new_layer_ns: SECONDS[0],
    };
    abi::PrefillCall {
        size: size::<abi::PrefillCall>(),
        layers: 2,
        asker: abi::Asker { lease: 7, ..abi::Asker::default() },
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

fn begun(opened: &Opened, call: &abi::PrefillCall) -> (Status, *mut PrefillHandle) {
    let mut prefill = null_mut();
    // SAFETY: what is pointed to lives until after the call, and its slices until the prefill is freed.
    let status = unsafe { kvf_prefill_begin(opened.client, call, &raw mut prefill) };
    assert_eq!(prefill.is_null(), status != status::OK);
    (status, prefill)
}

/// What to do next, with which blocks.
fn next(prefill: *mut PrefillHandle, timeout_us: u64) -> Result<(abi::Step, Vec<u32>), Status> {
    let (mut step, mut blocks) = (abi::Step { size: size::<abi::Step>(), ..abi::Step::default() }, [9; 2]);
    // SAFETY: what is pointed to is there, and as long as it says.
    let status = unsafe { kvf_prefill_next(prefill, timeout_us, &raw mut step, blocks.as_mut_ptr(), 2) };
    let count = step.blocks as usize;
    if status == status::OK { Ok((step, blocks[..count].to_vec())) } else { Err(status) }
}

/// All blocks that come back, in ascending order; it ends only where that is said.
fn all_back(prefill: *mut PrefillHandle) -> Vec<(u32, u32)> {
    let mut all = Vec::new();
    loop {
        let (mut back, mut count) = (abi::Back::default(), 7);
        let bytes = size_of::<abi::Back>();
        // SAFETY: what is pointed to is there.
        let status = unsafe { kvf_prefill_back(prefill, &raw mut back, 1, bytes, HOUR_US, &raw mut count) };
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
fn a_prefill_that_makes_no_sense_is_refused() {
    let (opened, mut memory) = (opened(null()), Memory::new());
    let (slices, sources) = (memory.slices(), [source(2)]);
    let good = call(&memory, &slices, &sources);
    let refuses = |call: abi::PrefillCall, expected, words: &str| {
        refused(begun(&opened, &call).0, expected, words);
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
    says("C: a prefill without the costs of a block", &sentence(), &[]);
    let save = abi::Asker { qos: abi::QOS_SAVE, ..abi::Asker::default() };
    refuses(abi::PrefillCall { asker: save, ..good }, status::INVALID, "asker.qos is 2");
    refuses(abi::PrefillCall { resident_blocks: 1, ..good }, status::FAILED, "source 0 covers blocks 0 to 2");
    // SAFETY: nothing is written to null.
    let status = unsafe { kvf_prefill_begin(opened.client, &raw const good, null_mut()) };
    refused(status, status::INVALID, "prefill is null");
}

#[test]
fn a_prefill_whose_node_is_not_there_computes_everything_and_gives_each_block_back_once() {
    let (opened, mut memory) = (opened(null()), Memory::new());
    let (slices, sources) = (memory.slices(), [source(2)]);
    let (status, prefill) = begun(&opened, &call(&memory, &slices, &sources));
    assert_eq!(status, status::OK);
    let (mut step, mut numbers, mut count) = (abi::Step::default(), [0u32; 2], 0);
    let (numbers, bytes) = (numbers.as_mut_ptr(), size_of::<abi::Back>());
    let mut result: *mut ResultHandle = null_mut();
    // SAFETY: what is not null is there, and as long as it says.
    unsafe {
        // What is refused is not done: the first layer is still said below.
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers, 2);
        refused(status, status::INVALID, "step.size is 0");
        step.size = size::<abi::Step>();
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers, 1);
        refused(status, status::INVALID, "blocks_count is 1, expected 2 or more: one for each block");
        says("C: a prefill's step without room for its blocks", &sentence(), &[]);
        let status = kvf_prefill_next(prefill, HOUR_US, &raw mut step, null_mut(), 2);
        refused(status, status::INVALID, "blocks is null");
        refused(kvf_prefill_next(prefill, HOUR_US, null_mut(), numbers, 2), status::INVALID, "step is null");
        let mut back = abi::Back::default();
        let status = kvf_prefill_back(prefill, &raw mut back, 1, bytes, 0, &raw mut count);
        refused(status, status::INVALID, "this prefill has not ended");
        says("C: a prefill that has not ended", &sentence(), &[]);
        for layer in 0..2 {
            let (step, blocks) = next(prefill, HOUR_US).unwrap();
            assert_eq!((step.kind, step.layer, blocks), (abi::STEP_LAYER, layer, vec![0, 1]));
        }
        for _ in 0..2 {
            let (step, blocks) = next(prefill, HOUR_US).unwrap();
            assert_eq!((step.kind, blocks), (abi::STEP_DONE, vec![]));
        }
        refused(kvf_prefill_end(prefill, null_mut()), status::INVALID, "result is null");
        assert_eq!(kvf_prefill_end(prefill, &raw mut result), status::OK);
        let again = kvf_prefill_end(prefill, &raw mut result);
        refused(again, status::CLOSED, "this prefill has ended");
        says("C: a prefill that has ended", &sentence(), &[]);
        assert_eq!(next(prefill, HOUR_US), Err(status::CLOSED));
        let status = kvf_prefill_back(prefill, &raw mut back, 1, bytes + 8, 0, &raw mut count);
        refused(status, status::INVALID, "entry.size is 16");
        let status = kvf_prefill_back(prefill, null_mut(), 1, bytes, 0, &raw mut count);
        refused(status, status::INVALID, "entries is null");
        let status = kvf_prefill_back(prefill, &raw mut back, 1, bytes, 0, null_mut());
        refused(status, status::INVALID, "count is null");
        assert_eq!(all_back(prefill), [(0, 0), (1, 0)]);
        assert_eq!(all_back(prefill), [], "each once");
        says("C: a prefill of which all came back", &sentence(), &[]);
        kvf_prefill_free(prefill);
        judge(result);
    }
}

/// Looks at the end of a prefill whose node is not there, and frees it.
unsafe fn judge(result: *mut ResultHandle) {
    // SAFETY: the result is there until it is freed below; each struct is written before it is read.
    unsafe {
        let mut prefilled: abi::Prefilled = std::mem::zeroed();
        let status = kvf_result_prefilled(result, &raw mut prefilled);
        refused(status, status::INVALID, "prefilled.size is 0");
        refused(kvf_result_prefilled(result, null_mut()), status::INVALID, "prefilled is null");
        prefilled.size = size::<abi::Prefilled>();
        assert_eq!(kvf_result_prefilled(result, &raw mut prefilled), status::OK);
        assert_eq!(std::slice::from_raw_parts(prefilled.computed, prefilled.computed_count), [1, 1]);
        assert_eq!((prefilled.received_bytes, prefilled.saved_us), (0, 0));
        let mut miss: abi::Miss = std::mem::zeroed();
        miss.size = size::<abi::Miss>();
        // The source may be still about to say why.
        if prefilled.misses > 0 {
            assert_eq!(kvf_result_miss(result, 0, &raw mut miss), status::OK);
            assert_eq!((miss.reason, CStr::from_ptr(miss.address)), (6, c"127.0.0.1:9"));
            assert!(kvf_result_message(result, null_mut(), 0) > 0);
        }
        let beyond = kvf_result_miss(result, prefilled.misses as usize, &raw mut miss);
        refused(beyond, status::NOT_FOUND, "miss of this number");
        let mut fetched: abi::Fetched = std::mem::zeroed();
        refused(kvf_result_fetched(result, &raw mut fetched), status::NOT_FOUND, "there is no fetch");
        kvf_result_free(result);
    }
}

/// A node that takes connections and says nothing, by its address.
fn silent() -> (TcpListener, UdpSocket, CString) {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let udp = UdpSocket::bind(address).unwrap();
    (tcp, udp, CString::new(address.to_string()).unwrap())
}

#[test]
fn a_thread_that_waits_for_a_silent_node_hears_of_the_end_and_slices_come_back() {
    struct Shared(*mut PrefillHandle);
    // SAFETY: C uses handles from any thread.
    unsafe impl Sync for Shared {}
    let (_tcp, _udp, address) = silent();
    let (opened, mut memory) = (opened(null()), Memory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    // It takes centuries, and so a wait may take years.
    let endless = [u64::MAX / 8; 2];
    let good = call(&memory, &slices, &sources);
    let costs = abi::Costs { block_layer_ns: endless.as_ptr(), new_layer_ns: endless[0], ..good.costs };
    let (status, prefill) = begun(&opened, &abi::PrefillCall { costs, ..good });
    assert_eq!(status, status::OK);
    let (step, blocks) = next(prefill, 0).unwrap();
    assert_eq!((step.kind, blocks), (abi::STEP_WAIT, vec![]));
    assert!(step.wait_us > HOUR_US, "{step:?}");
    // A wait that is over says so, and it goes on.
    assert_eq!(next(prefill, 1000).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
    let (shared, mut result) = (Shared(prefill), null_mut());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let Shared(prefill) = &shared;
            next(*prefill, HOUR_US)
        });
        // SAFETY: what is pointed to is there; the prefill is freed behind all of these.
        assert_eq!(unsafe { kvf_prefill_end(shared.0, &raw mut result) }, status::OK);
        assert_eq!(waiting.join().unwrap(), Err(status::CLOSED));
    });
    assert_eq!(all_back(prefill), [(0, 0), (1, 0)]);
    // SAFETY: once each.
    unsafe {
        let mut lease: abi::Lease = std::mem::zeroed();
        assert_eq!(kvf_result_lease(result, 0, &raw mut lease), status::OK);
        assert_eq!((CStr::from_ptr(lease.address), lease.lease), (&*address, 7));
        kvf_result_free(result);
        kvf_prefill_free(prefill);
    }
}

#[test]
fn a_prefill_that_is_freed_before_its_end_gives_its_memory_back_and_outlives_its_client() {
    let (_tcp, _udp, address) = silent();
    for asks in [false, true] {
        let (opened, mut memory) = (opened(null()), Memory::new());
        let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
        let (status, prefill) = begun(&opened, &call(&memory, &slices, &sources));
        assert_eq!(status, status::OK);
        drop(opened);
        if asks {
            assert_eq!(next(prefill, 0).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
        }
        // SAFETY: once. Behind it nobody uses the memory.
        unsafe { kvf_prefill_free(prefill) };
        memory.bytes.fill(7);
    }
}

#[test]
fn costs_beyond_all_numbers_are_as_many_as_there_are() {
    let (_tcp, _udp, address) = silent();
    let (opened, mut memory) = (opened(null()), Memory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    let (most, good) = ([u64::MAX; 2], call(&memory, &slices, &sources));
    let costs = abi::Costs { block_layer_ns: most.as_ptr(), new_layer_ns: u64::MAX, ..good.costs };
    let deadline_us = u64::MAX;
    let (status, prefill) = begun(&opened, &abi::PrefillCall { costs, deadline_us, ..good });
    assert_eq!(status, status::OK);
    for _ in 0..8 {
        assert!(next(prefill, 1000).is_ok());
    }
    // SAFETY: once.
    unsafe { kvf_prefill_free(prefill) };
}

#[test]
fn a_prefill_without_a_history_is_its_layers() {
    let (opened, memory) = (opened(null()), Memory::new());
    let (status, prefill) = begun(&opened, &call(&memory, &[], &[]));
    assert_eq!(status, status::OK);
    let (mut step, mut result, mut said) = (abi::Step::default(), null_mut(), Vec::new());
    step.size = size::<abi::Step>();
    // SAFETY: what is not null is there; no block is written where there is none.
    unsafe {
        while step.kind != abi::STEP_DONE {
            let status = kvf_prefill_next(prefill, 0, &raw mut step, null_mut(), 0);
            assert_eq!((status, step.blocks), (status::OK, 0));
            said.push((step.kind, step.layer));
        }
        assert_eq!(said, [(abi::STEP_LAYER, 0), (abi::STEP_LAYER, 1), (abi::STEP_DONE, 0)]);
        assert_eq!(kvf_prefill_end(prefill, &raw mut result), status::OK);
        assert_eq!(all_back(prefill), []);
        kvf_result_free(result);
        kvf_prefill_free(prefill);
    }
}

#[test]
fn a_forked_process_leaves_a_prefill_alone() {
    let (_tcp, _udp, address) = silent();
    let (opened, mut memory) = (opened(null()), Memory::new());
    let (slices, sources) = (memory.slices(), [abi::Source { address: address.as_ptr(), ..source(2) }]);
    let call = call(&memory, &slices, &sources);
    let (status, prefill) = begun(&opened, &call);
    assert_eq!(status, status::OK);
    let (mut step, mut numbers) =
        (abi::Step { size: size::<abi::Step>(), ..abi::Step::default() }, [0u32; 2]);
    // SAFETY: the child calls the library, which leaves it alone, and ends without returning.
    unsafe {
        let child = fork();
        if child == 0 {
            alarm(30);
            let (mut other, mut result, mut count) = (null_mut(), null_mut(), 0);
            let statuses = [
                kvf_prefill_begin(opened.client, &raw const call, &raw mut other),
                kvf_prefill_next(prefill, HOUR_US, &raw mut step, numbers.as_mut_ptr(), 2),
                kvf_prefill_end(prefill, &raw mut result),
                kvf_prefill_back(prefill, null_mut(), 0, size_of::<abi::Back>(), 0, &raw mut count),
            ];
            kvf_prefill_free(prefill);
            _exit(i32::from(statuses != [status::FAILED; 4]));
        }
        let mut ended = -1;
        assert_eq!(waitpid(child, &raw mut ended, 0), child);
        assert_eq!(ended, 0, "it was stopped, or was answered otherwise");
        assert_eq!(next(prefill, 0).map(|(step, _)| step.kind), Ok(abi::STEP_WAIT));
        kvf_prefill_free(prefill);
    }
}
