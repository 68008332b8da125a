//! Every function of `include/kvfleet.h`, thin: read, do, write. What each does and asks for is said there.
//!
//! Each runs inside a guard, so that a panic is a status. Arguments that are written are looked at before anything is
//! done, so that nothing is lost for want of a place.
//!
//! Not here: reading and writing (`raw.rs`), and what calls mean (`calls.rs`).
#![allow(unsafe_code)] // the caller's pointers: docs/adr/0044
#![allow(clippy::missing_safety_doc)] // the header says what each asks for
#![allow(missing_docs)] // and what each does

use std::ffi::{c_char, c_void};
use std::time::Duration;

use kvfleet_client::{Completion, CompletionQueue, Progress, SubmitError};

use crate::raw::{check_size, give, one, put, put_several, put_text, several, take, writable};
use crate::results::name_of;
use crate::slices::Room;
use crate::status::{Failure, Status, guard, guard_number, last_error};
use crate::{
    ClientHandle, HasherHandle, LayerSaveHandle, PathsHandle, PrefillHandle, QueueHandle, ReporterHandle,
    ResultHandle, abi, calls, raw,
};

/// Entries that are moved at a time: what a thread that computes can spare.
const ENTRIES_AT_ONCE: usize = 64;

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
    // SAFETY: as the header asks.
    guard_number(|| unsafe { put_text(&last_error(), text, text_bytes) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_open(
    config: *const abi::ClientConfig,
    client: *mut *mut ClientHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(client, "client")?;
        put(client, give(calls::client(config)?), "client")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_free(client: *mut ClientHandle) {
    // SAFETY: as the header asks.
    guard_number(|| unsafe { take(client) }.into_iter().for_each(|client| client.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_open(
    model: *const abi::Model,
    tenant_salt: *const u8,
    hasher: *mut *mut HasherHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(hasher, "hasher")?;
        let salt: &[u8; SALT_BYTES] = one(tenant_salt.cast(), "tenant_salt")?;
        put(hasher, give(HasherHandle::open(&calls::manifest(model)?, salt)?), "hasher")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_identity(
    hasher: *const HasherHandle,
    identity: *mut abi::Hash,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let hasher = one(hasher, "hasher")?;
        put(identity, abi::Hash { bytes: hasher.identity.0 }, "identity")
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
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let hasher = one(hasher, "hasher")?;
        let found = hasher.hasher.blocks(several(tokens, tokens_count, TOKENS_MAX, "tokens")?);
        put(count, found.len(), "count")?;
        if found.len() > hashes_count {
            return Err(Failure::TooLong {
                what: "the prompt",
                got: found.len() as u64,
                limit: hashes_count,
            });
        }
        let found: Vec<_> = found.iter().map(|hash| abi::Hash { bytes: hash.0 }).collect();
        put_several(hashes, &found, "hashes")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_hasher_free(hasher: *mut HasherHandle) {
    // SAFETY: as the header asks.
    guard_number(|| drop(unsafe { take(hasher) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_open(
    client: *mut ClientHandle,
    limits: *const abi::QueueLimits,
    queue: *mut *mut QueueHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(queue, "queue")?;
        put(queue, give(one(client, "client")?.queue(calls::limits(limits)?)?), "queue")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_submit(
    queue: *mut QueueHandle,
    operations: *const abi::Operation,
    operations_count: usize,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let queue = one(queue, "queue")?.queue()?;
        let batch = calls::batch(operations, operations_count, queue.limits())?;
        queue.submit(batch).map_err(|refused| refused.why.into())
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
    // SAFETY: as the header asks.
    unsafe { polled(queue, (entries, entries_count, entry_bytes), count, |queue, into| Ok(queue.poll(into))) }
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
    // SAFETY: as the header asks.
    unsafe {
        polled(queue, (entries, entries_count, entry_bytes), count, |queue, into| {
            let came = queue.wait(into, timeout);
            // Whoever waits in a loop must hear that nothing comes any more.
            if came == 0 && queue.is_over() { Err(SubmitError::Closed.into()) } else { Ok(came) }
        })
    }
}

/// Writes entries as they come: the first ones by `first`, and more while there are some without waiting.
unsafe fn polled(
    queue: *mut QueueHandle,
    (entries, entries_count, entry_bytes): (*mut abi::Completion, usize, usize),
    count: *mut usize,
    first: impl Fn(&CompletionQueue<Room>, &mut [Completion<Room>]) -> Result<usize, Failure>,
) -> Status {
    // SAFETY: as the header asks of both callers.
    guard(|| unsafe {
        let queue = one(queue, "queue")?.queue()?;
        put(count, 0, "count")?;
        let expected = size_of::<abi::Completion>();
        if entry_bytes != expected {
            return Err(Failure::Size { what: "entry", got: entry_bytes as u64, expected });
        }
        if entries_count == 0 {
            return Ok(());
        }
        writable(entries, "entries")?;
        let mut into: [Completion<Room>; ENTRIES_AT_ONCE] = std::array::from_fn(|_| Completion::default());
        let mut written = 0;
        while written < entries_count {
            let room = (entries_count - written).min(ENTRIES_AT_ONCE);
            let came =
                if written == 0 { first(queue, &mut into[..room])? } else { queue.poll(&mut into[..room]) };
            for completion in into.iter_mut().take(came).map(std::mem::take) {
                put(entries.add(written), entry(completion), "entries")?;
                written += 1;
                put(count, written, "count")?;
            }
            if came < room {
                break;
            }
        }
        Ok(())
    })
}

/// A completion as C sees it.
fn entry(completion: Completion<Room>) -> abi::Completion {
    let plain = |kind, block, layer| abi::Completion {
        tag: completion.tag,
        kind,
        status: crate::status::OK,
        block,
        layer,
        result: std::ptr::null_mut(),
    };
    match completion.progress {
        Progress::Nothing => plain(0, 0, 0),
        // The room is an address: what is there stays the caller's.
        Progress::Arrived { block, .. } => plain(abi::ARRIVED, block, 0),
        Progress::Recompute { from_block } => plain(abi::RECOMPUTE, from_block, 0),
        Progress::Layer { layer, end_block } => plain(abi::LAYER, end_block, layer),
        Progress::Ended(ended) => {
            let result = ResultHandle::of(*ended);
            abi::Completion { status: result.status, result: give(result), ..plain(abi::ENDED, 0, 0) }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_begin(queue: *mut QueueHandle, tag: u64) -> Status {
    // SAFETY: as the header asks.
    guard(|| found(unsafe { one(queue, "queue")? }.queue()?.begin(tag)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_cancel(queue: *mut QueueHandle, tag: u64) -> Status {
    // SAFETY: as the header asks.
    guard(|| found(unsafe { one(queue, "queue")? }.queue()?.cancel(tag)))
}

fn found(is_found: bool) -> Result<(), Failure> {
    if is_found { Ok(()) } else { Err(Failure::NotFound { what: "operation in flight with this tag" }) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_close(queue: *mut QueueHandle, timeout_us: u64) -> Status {
    guard(|| {
        // SAFETY: as the header asks.
        let ended = unsafe { one(queue, "queue")? }.queue()?.close(Duration::from_micros(timeout_us));
        if ended { Ok(()) } else { Err(Failure::TimedOut) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_queue_free(queue: *mut QueueHandle) {
    guard_number(|| {
        // SAFETY: as the header asks.
        if let Some(queue) = unsafe { take(queue) } {
            queue.close_for_good();
        }
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_begin(
    client: *mut ClientHandle,
    call: *const abi::PrefillCall,
    prefill: *mut *mut PrefillHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(prefill, "prefill")?;
        put(prefill, give(one(client, "client")?.prefill(calls::prefill(call)?)?), "prefill")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_read_buffer_bytes(prefill: *const PrefillHandle) -> u64 {
    // SAFETY: as the header asks.
    guard_number(|| unsafe { one(prefill, "prefill") }.map_or(0, PrefillHandle::read_buffer_bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_next(
    prefill: *mut PrefillHandle,
    timeout_us: u64,
    step: *mut abi::Step,
    blocks: *mut u32,
    blocks_count: usize,
) -> Status {
    // SAFETY: as the header asks. No step is lost for want of a place.
    guard(|| unsafe {
        let prefill = one(prefill, "prefill")?;
        check_size(step, "step")?;
        if blocks_count < prefill.blocks() {
            let expected = format!("{} or more: one for each block of the sources", prefill.blocks());
            return Err(Failure::Range { what: "blocks_count", got: blocks_count as u64, expected });
        }
        if prefill.blocks() > 0 {
            writable(blocks, "blocks")?;
        }
        let (said, numbers) = prefill.next(Duration::from_micros(timeout_us))?;
        put_several(blocks, &numbers, "blocks")?;
        put(step, said, "step")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_end(
    prefill: *mut PrefillHandle,
    result: *mut *mut ResultHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(result, "result")?;
        put(result, give(one(prefill, "prefill")?.end()?), "result")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_back(
    prefill: *mut PrefillHandle,
    entries: *mut abi::Back,
    entries_count: usize,
    entry_bytes: usize,
    timeout_us: u64,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header asks. Nothing is taken that cannot be written.
    guard(|| unsafe {
        let prefill = one(prefill, "prefill")?;
        put(count, 0, "count")?;
        let expected = size_of::<abi::Back>();
        if entry_bytes != expected {
            return Err(Failure::Size { what: "entry", got: entry_bytes as u64, expected });
        }
        if entries_count > 0 {
            writable(entries, "entries")?;
        }
        let came = prefill.back(entries_count, Duration::from_micros(timeout_us))?;
        put_several(entries, &came, "entries")?;
        put(count, came.len(), "count")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_prefill_free(prefill: *mut PrefillHandle) {
    // SAFETY: as the header asks.
    guard_number(|| unsafe { take(prefill) }.into_iter().for_each(|prefill| prefill.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_begin(
    client: *mut ClientHandle,
    call: *const abi::SaveLayersCall,
    save: *mut *mut LayerSaveHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(save, "save")?;
        put(save, give(one(client, "client")?.save_layers(calls::save_layers(call)?)?), "save")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_put(
    save: *mut LayerSaveHandle,
    slices: *const *const c_void,
    slices_count: usize,
) -> Status {
    // SAFETY: as the header asks. What is read of the slices is copied before this returns.
    guard(|| unsafe {
        one(save, "save")?.put(|wanted| {
            if slices_count != wanted.slices {
                let (got, expected) = (slices_count as u64, format!("{}: one for each block", wanted.slices));
                return Err(Failure::Range { what: "slices_count", got, expected });
            }
            let pointers = several(slices, slices_count, slices_count, "slices")?;
            raw::slices(pointers, wanted.bytes, "one of the slices")
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_finish(save: *mut LayerSaveHandle) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe { one(save, "save")?.finish() })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_save_layers_drop(save: *mut LayerSaveHandle) {
    // SAFETY: as the header asks.
    guard_number(|| unsafe { take(save) }.into_iter().for_each(|save| save.free()));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_decision(
    result: *const ResultHandle,
    decision: *mut abi::Decision,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(result, "result")?.decision()?;
        check_size(decision, "decision")?;
        put(decision, found, "decision")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_source(
    result: *const ResultHandle,
    position: usize,
    source: *mut abi::Source,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe { put(source, one(result, "result")?.source(position)?, "source") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_fetched(
    result: *const ResultHandle,
    fetched: *mut abi::Fetched,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(result, "result")?.fetched()?;
        check_size(fetched, "fetched")?;
        put(fetched, found, "fetched")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_miss(
    result: *const ResultHandle,
    position: usize,
    miss: *mut abi::Miss,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(result, "result")?.miss(position)?;
        check_size(miss, "miss")?;
        put(miss, found, "miss")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_prefilled(
    result: *const ResultHandle,
    prefilled: *mut abi::Prefilled,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(result, "result")?.prefilled()?;
        check_size(prefilled, "prefilled")?;
        put(prefilled, found, "prefilled")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_saved(result: *const ResultHandle, saved: *mut abi::Saved) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(result, "result")?.saved()?;
        check_size(saved, "saved")?;
        put(saved, found, "saved")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_lease(
    result: *const ResultHandle,
    position: usize,
    lease: *mut abi::Lease,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe { put(lease, one(result, "result")?.lease(position)?, "lease") })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_retry_after_us(result: *const ResultHandle) -> u64 {
    // SAFETY: as the header asks.
    let wait =
        guard_number(|| unsafe { one(result, "result") }.map_or(Duration::ZERO, |result| result.retry_after));
    u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_message(
    result: *const ResultHandle,
    text: *mut c_char,
    text_bytes: usize,
) -> usize {
    // SAFETY: as the header asks.
    guard_number(|| unsafe {
        let message = one(result, "result").map_or("", |result| &result.message);
        put_text(message, text, text_bytes)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_result_free(result: *mut ResultHandle) {
    // SAFETY: as the header asks.
    guard_number(|| drop(unsafe { take(result) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_paths(
    client: *const ClientHandle,
    paths: *mut *mut PathsHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(paths, "paths")?;
        put(paths, give(one(client, "client")?.paths()?), "paths")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_node(
    paths: *const PathsHandle,
    position: usize,
    path: *mut abi::NodePath,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(paths, "paths")?.node(position)?;
        check_size(path, "path")?;
        put(path, found, "path")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_carried(
    paths: *const PathsHandle,
    position: usize,
    carried: *mut abi::Carried,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        let found = one(paths, "paths")?.carried(position)?;
        check_size(carried, "carried")?;
        put(carried, found, "carried")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_paths_free(paths: *mut PathsHandle) {
    // SAFETY: as the header asks.
    guard_number(|| drop(unsafe { take(paths) }));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_client_links(
    client: *mut ClientHandle,
    links: *mut abi::Link,
    links_count: usize,
    link_bytes: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: as the header asks. Nothing is taken that cannot be written.
    guard(|| unsafe {
        let client = one(client, "client")?;
        let expected = size_of::<abi::Link>();
        if link_bytes != expected {
            return Err(Failure::Size { what: "link", got: link_bytes as u64, expected });
        }
        if links_count > 0 {
            writable(links, "links")?;
        }
        writable(count, "count")?;
        let taken = client.links(links_count)?;
        put_several(links, &taken, "links")?;
        put(count, taken.len(), "count")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_open(
    client: *mut ClientHandle,
    config: *const abi::ReporterConfig,
    reporter: *mut *mut ReporterHandle,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe {
        writable(reporter, "reporter")?;
        let client = one(client, "client")?;
        let (config, silent_after) = calls::reporter(config)?;
        put(reporter, give(client.reporter(&config, silent_after)?), "reporter")
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_load(reporter: *mut ReporterHandle, load: *const abi::Load) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe { one(reporter, "reporter")?.set_load(calls::load(load)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_tell(
    reporter: *mut ReporterHandle,
    outcome: *const abi::Outcome,
) -> Status {
    // SAFETY: as the header asks.
    guard(|| unsafe { one(reporter, "reporter")?.tell(&calls::outcome(outcome)?) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_reporter_free(reporter: *mut ReporterHandle) {
    // SAFETY: as the header asks.
    guard_number(|| unsafe { take(reporter) }.into_iter().for_each(|reporter| reporter.free()));
}
