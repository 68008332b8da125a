//! Every function of `include/kvfleet.h`. Each only reads arguments, calls the library, and writes
//! results; the header documents them.
//!
//! Each runs inside a guard that turns a panic into a status. Output arguments are checked before
//! any work, so that no result is lost for lack of a destination.
//!
//! Not here: reading and writing (`raw.rs`), and the meaning of calls (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044
#![allow(clippy::missing_safety_doc)] // the header states the requirements of each function
#![allow(missing_docs)] // the header documents each function

use std::ffi::{c_char, c_void};
use std::time::Duration;

use kvfleet_client::{Completion, CompletionQueue, Progress, SubmitError};

use crate::raw::{
    array, check_size, check_writable, from_handle, into_handle, reference, write, write_array, write_text,
};
use crate::results::name_of;
use crate::slices::CallerBuffer;
use crate::status::{Failure, Status, guard, guard_value, last_error};
use crate::{
    ClientHandle, HasherHandle, LayerSaveHandle, PathsHandle, PrefillHandle, QueueHandle, ReporterHandle,
    ResultHandle, abi, calls, raw,
};

/// Entries moved at a time: bounded by the stack of a compute thread.
const ENTRIES_PER_BATCH: usize = 64;

/// Longest prompt, in tokens.
const TOKENS_MAX: usize = 1 << 25;

/// Bytes of a tenant's salt.
const SALT_BYTES: usize = 32;

#[unsafe(no_mangle)]
pub extern "C" fn kvf_abi_version() -> u32 {
    abi::ABI_VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn kvf_status_name(status: Status) -> *const c_char {
    name_of(status)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_last_error(text: *mut c_char, text_bytes: usize) -> usize {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { write_text(&last_error(), text, text_bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_open(
    config: *const abi::ClientConfig,
    client: *mut *mut ClientHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(client, "client")?;
        write(client, into_handle(calls::client(config)?), "client")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_free(client: *mut ClientHandle) {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { from_handle(client) }.into_iter().for_each(|client| client.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_open(
    model: *const abi::Model,
    tenant_salt: *const u8,
    hasher: *mut *mut HasherHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(hasher, "hasher")?;
        let salt: &[u8; SALT_BYTES] = reference(tenant_salt.cast(), "tenant_salt")?;
        write(hasher, into_handle(HasherHandle::open(&calls::manifest(model)?, salt)?), "hasher")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_identity(
    hasher: *const HasherHandle,
    identity: *mut abi::Identity,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let hasher = reference(hasher, "hasher")?;
        write(identity, abi::Identity { bytes: hasher.identity.0 }, "identity")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_blocks(
    hasher: *const HasherHandle,
    tokens: *const u32,
    tokens_count: usize,
    hashes: *mut abi::Hash,
    hashes_count: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let hasher = reference(hasher, "hasher")?;
        let found = hasher.hasher.blocks(array(tokens, tokens_count, TOKENS_MAX, "tokens")?);
        write(count, found.len(), "count")?;
        if found.len() > hashes_count {
            return Err(Failure::TooLong {
                what: "the prompt",
                got: found.len() as u64,
                limit: hashes_count,
            });
        }
        let found: Vec<_> = found.iter().map(|hash| abi::Hash { bytes: hash.0 }).collect();
        write_array(hashes, &found, "hashes")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_free(hasher: *mut HasherHandle) {
    // SAFETY: as the header requires.
    guard_value(|| drop(unsafe { from_handle(hasher) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_open(
    client: *mut ClientHandle,
    limits: *const abi::QueueLimits,
    queue: *mut *mut QueueHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(queue, "queue")?;
        write(queue, into_handle(reference(client, "client")?.queue(calls::limits(limits)?)?), "queue")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_submit(
    queue: *mut QueueHandle,
    operations: *const abi::Operation,
    operations_count: usize,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let queue = reference(queue, "queue")?.queue()?;
        let batch = calls::batch(operations, operations_count, queue.limits())?;
        queue.submit(batch).map_err(|refused| refused.error.into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_poll(
    queue: *mut QueueHandle,
    entries: *mut abi::Completion,
    entries_count: usize,
    entry_bytes: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header requires.
    unsafe {
        poll_entries(queue, entries, entries_count, entry_bytes, count, |queue, into| Ok(queue.poll(into)))
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_wait(
    queue: *mut QueueHandle,
    entries: *mut abi::Completion,
    entries_count: usize,
    entry_bytes: usize,
    timeout_us: u64,
    count: *mut usize,
) -> Status {
    let timeout = Duration::from_micros(timeout_us);
    // SAFETY: as the header requires.
    unsafe {
        poll_entries(queue, entries, entries_count, entry_bytes, count, |queue, into| {
            let came = queue.wait(into, timeout);
            // A caller that waits in a loop must learn that no completion follows.
            if came == 0 && queue.is_finished() { Err(SubmitError::Closed.into()) } else { Ok(came) }
        })
    }
}

/// Writes entries as they are available: the first batch by `poll_first`, which may wait, and
/// further ones without waiting.
unsafe fn poll_entries(
    queue: *mut QueueHandle,
    entries: *mut abi::Completion,
    entries_count: usize,
    entry_bytes: usize,
    count: *mut usize,
    poll_first: impl Fn(&CompletionQueue<CallerBuffer>, &mut [Completion<CallerBuffer>]) -> Result<usize, Failure>,
) -> Status {
    // SAFETY: as the header requires of both callers.
    guard(|| unsafe {
        let queue = reference(queue, "queue")?.queue()?;
        write(count, 0, "count")?;
        let expected = size_of::<abi::Completion>();
        if entry_bytes != expected {
            return Err(Failure::Size { what: "entry", got: entry_bytes as u64, expected });
        }
        if entries_count == 0 {
            return Ok(());
        }
        check_writable(entries, "entries")?;
        let mut into: [Completion<CallerBuffer>; ENTRIES_PER_BATCH] =
            std::array::from_fn(|_| Completion::default());
        let mut written = 0;
        while written < entries_count {
            let room = (entries_count - written).min(ENTRIES_PER_BATCH);
            let came = if written == 0 {
                poll_first(queue, &mut into[..room])?
            } else {
                queue.poll(&mut into[..room])
            };
            for completion in into.iter_mut().take(came).map(std::mem::take) {
                write(entries.add(written), completion_entry(completion), "entries")?;
                written += 1;
                write(count, written, "count")?;
            }
            if came < room {
                break;
            }
        }
        Ok(())
    })
}

/// A completion in C form.
fn completion_entry(completion: Completion<CallerBuffer>) -> abi::Completion {
    let plain = |kind, block, layer| abi::Completion {
        tag: completion.tag,
        kind,
        status: crate::status::OK,
        block,
        layer,
        result: std::ptr::null_mut(),
    };
    match completion.progress {
        Progress::Empty => plain(0, 0, 0),
        // The buffer is only an address; its content belongs to the caller.
        Progress::Arrived { block, .. } => plain(abi::ARRIVED, block, 0),
        Progress::Recompute { from_block } => plain(abi::RECOMPUTE, from_block, 0),
        Progress::Layer { layer, end_block } => plain(abi::LAYER, end_block, layer),
        Progress::Ended(ended) => {
            let result = ResultHandle::of(*ended);
            abi::Completion { status: result.status, result: into_handle(result), ..plain(abi::ENDED, 0, 0) }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_begin(queue: *mut QueueHandle, tag: u64) -> Status {
    // SAFETY: as the header requires.
    guard(|| require_found(unsafe { reference(queue, "queue")? }.queue()?.begin(tag)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_cancel(queue: *mut QueueHandle, tag: u64) -> Status {
    // SAFETY: as the header requires.
    guard(|| require_found(unsafe { reference(queue, "queue")? }.queue()?.cancel(tag)))
}

fn require_found(is_found: bool) -> Result<(), Failure> {
    if is_found { Ok(()) } else { Err(Failure::NotFound { what: "operation in flight with this tag" }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_close(queue: *mut QueueHandle, timeout_us: u64) -> Status {
    guard(|| {
        // SAFETY: as the header requires.
        let ended = unsafe { reference(queue, "queue")? }.queue()?.close(Duration::from_micros(timeout_us));
        if ended { Ok(()) } else { Err(Failure::TimedOut) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_free(queue: *mut QueueHandle) {
    guard_value(|| {
        // SAFETY: as the header requires.
        if let Some(queue) = unsafe { from_handle(queue) } {
            queue.close_and_wait();
        }
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_begin(
    client: *mut ClientHandle,
    call: *const abi::PrefillCall,
    prefill: *mut *mut PrefillHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(prefill, "prefill")?;
        let client = reference(client, "client")?;
        let (call, buffers, released) = calls::prefill(call)?;
        write(prefill, into_handle(client.prefill(call, buffers, released)?), "prefill")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_read_buffer_bytes(prefill: *const PrefillHandle) -> u64 {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { reference(prefill, "prefill") }.map_or(0, PrefillHandle::read_buffer_bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_next(
    prefill: *mut PrefillHandle,
    timeout_us: u64,
    step: *mut abi::Step,
    blocks: *mut u32,
    blocks_count: usize,
) -> Status {
    // SAFETY: as the header requires. Destinations are checked first, so no step is lost.
    guard(|| unsafe {
        let prefill = reference(prefill, "prefill")?;
        check_size(step, "step")?;
        if blocks_count < prefill.blocks() {
            let expected = format!("{} or more: one for each block of the sources", prefill.blocks());
            return Err(Failure::Range { what: "blocks_count", got: blocks_count as u64, expected });
        }
        if prefill.blocks() > 0 {
            check_writable(blocks, "blocks")?;
        }
        let (said, numbers) = prefill.next(Duration::from_micros(timeout_us))?;
        write_array(blocks, &numbers, "blocks")?;
        write(step, said, "step")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_end(
    prefill: *mut PrefillHandle,
    result: *mut *mut ResultHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(result, "result")?;
        write(result, into_handle(reference(prefill, "prefill")?.end()?), "result")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_returned(
    prefill: *mut PrefillHandle,
    entries: *mut abi::ReturnedBlock,
    entries_count: usize,
    entry_bytes: usize,
    timeout_us: u64,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header requires. Only writable entries are taken.
    guard(|| unsafe {
        let prefill = reference(prefill, "prefill")?;
        write(count, 0, "count")?;
        let expected = size_of::<abi::ReturnedBlock>();
        if entry_bytes != expected {
            return Err(Failure::Size { what: "entry", got: entry_bytes as u64, expected });
        }
        if entries_count > 0 {
            check_writable(entries, "entries")?;
        }
        let came = prefill.returned_blocks(entries_count, Duration::from_micros(timeout_us))?;
        write_array(entries, &came, "entries")?;
        write(count, came.len(), "count")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_free(prefill: *mut PrefillHandle) {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { from_handle(prefill) }.into_iter().for_each(|prefill| prefill.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_begin(
    client: *mut ClientHandle,
    call: *const abi::SaveLayersCall,
    save: *mut *mut LayerSaveHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(save, "save")?;
        write(save, into_handle(reference(client, "client")?.save_layers(calls::save_layers(call)?)?), "save")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_put(
    save: *mut LayerSaveHandle,
    slices: *const *const c_void,
    slices_count: usize,
) -> Status {
    // SAFETY: as the header requires. The slices are copied before this returns.
    guard(|| unsafe {
        reference(save, "save")?.put(|wanted| {
            if slices_count != wanted.slices {
                let (got, expected) = (slices_count as u64, format!("{}: one for each block", wanted.slices));
                return Err(Failure::Range { what: "slices_count", got, expected });
            }
            let pointers = array(slices, slices_count, slices_count, "slices")?;
            raw::slices(pointers, wanted.bytes, "one of the slices")
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_finish(save: *mut LayerSaveHandle) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe { reference(save, "save")?.finish() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_drop(save: *mut LayerSaveHandle) {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { from_handle(save) }.into_iter().for_each(|save| save.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_decision(
    result: *const ResultHandle,
    decision: *mut abi::Decision,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(result, "result")?.decision()?;
        check_size(decision, "decision")?;
        write(decision, found, "decision")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_source(
    result: *const ResultHandle,
    position: usize,
    source: *mut abi::Source,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe { write(source, reference(result, "result")?.source(position)?, "source") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_fetched(
    result: *const ResultHandle,
    fetched: *mut abi::Fetched,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(result, "result")?.fetched()?;
        check_size(fetched, "fetched")?;
        write(fetched, found, "fetched")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_miss(
    result: *const ResultHandle,
    position: usize,
    miss: *mut abi::Miss,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(result, "result")?.miss(position)?;
        check_size(miss, "miss")?;
        write(miss, found, "miss")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_prefilled(
    result: *const ResultHandle,
    prefilled: *mut abi::Prefilled,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(result, "result")?.prefilled()?;
        check_size(prefilled, "prefilled")?;
        write(prefilled, found, "prefilled")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_saved(result: *const ResultHandle, saved: *mut abi::Saved) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(result, "result")?.saved()?;
        check_size(saved, "saved")?;
        write(saved, found, "saved")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_lease(
    result: *const ResultHandle,
    position: usize,
    lease: *mut abi::Lease,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe { write(lease, reference(result, "result")?.lease(position)?, "lease") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_retry_after_us(result: *const ResultHandle) -> u64 {
    let wait = guard_value(|| {
        // SAFETY: as the header requires.
        unsafe { reference(result, "result") }.map_or(Duration::ZERO, |result| result.retry_after)
    });
    u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_message(
    result: *const ResultHandle,
    text: *mut c_char,
    text_bytes: usize,
) -> usize {
    // SAFETY: as the header requires.
    guard_value(|| unsafe {
        let message = reference(result, "result").map_or("", |result| &result.message);
        write_text(message, text, text_bytes)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_free(result: *mut ResultHandle) {
    // SAFETY: as the header requires.
    guard_value(|| drop(unsafe { from_handle(result) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_paths(
    client: *const ClientHandle,
    paths: *mut *mut PathsHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(paths, "paths")?;
        write(paths, into_handle(reference(client, "client")?.paths()?), "paths")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_node(
    paths: *const PathsHandle,
    position: usize,
    path: *mut abi::NodePath,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(paths, "paths")?.node(position)?;
        check_size(path, "path")?;
        write(path, found, "path")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_traffic(
    paths: *const PathsHandle,
    position: usize,
    carried: *mut abi::PathTraffic,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        let found = reference(paths, "paths")?.traffic(position)?;
        check_size(carried, "carried")?;
        write(carried, found, "carried")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_free(paths: *mut PathsHandle) {
    // SAFETY: as the header requires.
    guard_value(|| drop(unsafe { from_handle(paths) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_links(
    client: *mut ClientHandle,
    links: *mut abi::Link,
    links_count: usize,
    link_bytes: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header requires. Only writable samples are taken.
    guard(|| unsafe {
        let client = reference(client, "client")?;
        let expected = size_of::<abi::Link>();
        if link_bytes != expected {
            return Err(Failure::Size { what: "link", got: link_bytes as u64, expected });
        }
        if links_count > 0 {
            check_writable(links, "links")?;
        }
        check_writable(count, "count")?;
        let taken = client.links(links_count)?;
        write_array(links, &taken, "links")?;
        write(count, taken.len(), "count")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_open(
    client: *mut ClientHandle,
    config: *const abi::ReporterConfig,
    reporter: *mut *mut ReporterHandle,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe {
        check_writable(reporter, "reporter")?;
        let client = reference(client, "client")?;
        let (config, silent_after) = calls::reporter(config)?;
        write(reporter, into_handle(client.reporter(&config, silent_after)?), "reporter")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_load(reporter: *mut ReporterHandle, load: *const abi::Load) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe { reference(reporter, "reporter")?.set_load(calls::load(load)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_outcome(
    reporter: *mut ReporterHandle,
    outcome: *const abi::Outcome,
) -> Status {
    // SAFETY: as the header requires.
    guard(|| unsafe { reference(reporter, "reporter")?.record_outcome(&calls::outcome(outcome)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_free(reporter: *mut ReporterHandle) {
    // SAFETY: as the header requires.
    guard_value(|| unsafe { from_handle(reporter) }.into_iter().for_each(|reporter| reporter.free()));
}
