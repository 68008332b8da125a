//! A careless caller gets a status and a message, without side effects.
//!
//! Not here: pointers that cannot be checked (not null but invalid).
#![allow(unsafe_code, clippy::unwrap_used)] // calls what C calls, with pointers of this test's own

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};

use kvfleet_client::{SAVE_QUEUE_BYTES_MAX, SAVE_QUEUE_CALLS_MAX};
use kvfleet_client_c::entry::*;
use kvfleet_client_c::status::{self, Status};
use kvfleet_client_c::{ClientHandle, HasherHandle, LayerSaveHandle, QueueHandle, ReporterHandle, abi};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::Role;

mod prefill;

fn last_error() -> String {
    let mut text = [0u8; 512];
    // SAFETY: the length is that of the array.
    let length = unsafe { kvf_last_error(text.as_mut_ptr().cast(), text.len()) };
    assert!(length > 0 && length < text.len());
    CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned()
}

/// Asserts a refused call with this status, and a message that contains `words`.
#[track_caller]
fn assert_refused(status: Status, expected: Status, words: &str) {
    assert_eq!(status, expected, "{}", last_error());
    assert!(last_error().contains(words), "{}", last_error());
}

/// Certificate files of a new authority.
fn certificates(place: &Path) -> [CString; 3] {
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority = rcgen::KeyPair::generate().unwrap();
    let authority = rcgen::CertifiedIssuer::self_signed(params, authority).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(Role::Instance(None).dns_names()).unwrap();
    let cert = params.signed_by(&key, &authority).unwrap();
    [("ca.pem", authority.pem()), ("cert.pem", cert.pem()), ("key.pem", key.serialize_pem())].map(
        |(name, text)| {
            let path = place.join(name);
            std::fs::write(&path, text).unwrap();
            CString::new(path.to_str().unwrap()).unwrap()
        },
    )
}

struct TestClient {
    client: *mut ClientHandle,
    queue: *mut QueueHandle,
}

/// A client and a queue of an unreachable cluster.
fn open_client(limits: *const abi::QueueLimits) -> TestClient {
    let place = tempfile::tempdir().unwrap();
    let [ca, cert, key] = certificates(place.path());
    let routers = [c"127.0.0.1:9".as_ptr()];
    let config = config(&routers, [&ca, &cert, &key]);
    let (mut client, mut queue) = (null_mut(), null_mut());
    // SAFETY: everything pointed to outlives the calls.
    unsafe {
        assert_eq!(kvf_client_open(&raw const config, &raw mut client), status::OK);
        assert_eq!(kvf_queue_open(client, limits, &raw mut queue), status::OK);
    }
    TestClient { client, queue }
}

impl Drop for TestClient {
    fn drop(&mut self) {
        // SAFETY: freed once each. The client may be freed before its queue.
        unsafe {
            kvf_client_free(self.client);
            kvf_queue_free(self.queue);
        }
    }
}

fn config(routers: &[*const c_char], [ca, cert, key]: [&CStr; 3]) -> abi::ClientConfig {
    abi::ClientConfig {
        size: u32::try_from(size_of::<abi::ClientConfig>()).unwrap(),
        threads: 1,
        routers: routers.as_ptr(),
        routers_count: routers.len(),
        ca_file: ca.as_ptr(),
        cert_file: cert.as_ptr(),
        key_file: key.as_ptr(),
        transport: null(),
        shm_dir: null(),
        seed: 0,
        rdma_device: null(),
        rdma_near: null(),
        rdma_memory_bytes: 0,
        network: null(),
    }
}

#[test]
fn invalid_client_config_is_refused_with_reason() {
    let place = tempfile::tempdir().unwrap();
    let [ca, cert, key] = certificates(place.path());
    let routers = [c"127.0.0.1:9".as_ptr()];
    let good = config(&routers, [&ca, &cert, &key]);
    let mut client: *mut ClientHandle = null_mut();
    let mut open = |config: *const abi::ClientConfig| {
        // SAFETY: everything pointed to outlives the call.
        let status = unsafe { kvf_client_open(config, &raw mut client) };
        assert!(client.is_null(), "no handle is returned");
        status
    };
    assert_refused(open(null()), status::INVALID, "config is null");
    says("C: a null pointer", &last_error(), &[]);
    let odd = (&raw const good).cast::<u8>().wrapping_add(1).cast();
    assert_refused(open(odd), status::INVALID, "config is misaligned");
    says("C: a misaligned pointer", &last_error(), &[]);
    let unset = abi::ClientConfig { size: 0, ..good };
    assert_refused(open(&raw const unset), status::INVALID, "config.size is 0");
    says("C: a size that was not set", &last_error(), &[]);
    let many = abi::ClientConfig { routers_count: usize::MAX, ..good };
    assert_refused(open(&raw const many), status::TOO_LARGE, "routers has");
    says("C: a length above its limit", &last_error(), &[]);
    let none = abi::ClientConfig { routers_count: 0, ..good };
    assert_refused(open(&raw const none), status::FAILED, "no router is configured");
    let nowhere = [null()];
    let nowhere = abi::ClientConfig { routers: nowhere.as_ptr(), ..good };
    assert_refused(open(&raw const nowhere), status::INVALID, "router is null");
    let threads = abi::ClientConfig { threads: 1 << 20, ..good };
    assert_refused(open(&raw const threads), status::INVALID, "threads is 1048576");
    let pigeon = abi::ClientConfig { transport: c"pigeon".as_ptr(), ..good };
    assert_refused(open(&raw const pigeon), status::FAILED, "`pigeon` is no transport");
    let sea = abi::ClientConfig { network: c"sea".as_ptr(), ..good };
    assert_refused(open(&raw const sea), status::FAILED, "`sea` is no network path");
    let no_text = abi::ClientConfig { transport: c"\xff".as_ptr(), ..good };
    assert_refused(open(&raw const no_text), status::INVALID, "transport is not UTF-8");
    let long = CString::new(vec![b'a'; 5000]).unwrap();
    let long = abi::ClientConfig { transport: long.as_ptr(), ..good };
    assert_refused(open(&raw const long), status::TOO_LARGE, "transport has 4097");
    let shm = abi::ClientConfig { transport: c"shm".as_ptr(), ..good };
    assert_refused(open(&raw const shm), status::FAILED, "needs the directory");
    let little = abi::ClientConfig { rdma_memory_bytes: 4096, ..good };
    assert_refused(
        open(&raw const little),
        status::FAILED,
        "rdma_memory_bytes is 4096: give at least 1048576",
    );
    let nowhere =
        abi::ClientConfig { transport: c"rdma".as_ptr(), rdma_device: c"no_such0".as_ptr(), ..good };
    let reason =
        if cfg!(feature = "rdma") { "transport rdma: " } else { "this program was built without RDMA" };
    assert_refused(open(&raw const nowhere), status::FAILED, reason);
    let lost = abi::ClientConfig { ca_file: c"/nowhere/ca.pem".as_ptr(), ..good };
    assert_refused(open(&raw const lost), status::FAILED, "/nowhere/ca.pem");
    // SAFETY: null is not written.
    let status = unsafe { kvf_client_open(&raw const good, null_mut()) };
    assert_refused(status, status::INVALID, "client is null");
}

#[test]
fn null_is_refused_by_calls_and_ignored_by_free() {
    // SAFETY: every pointer is null, which each function refuses.
    unsafe {
        let count = &mut 0usize as *mut usize;
        for status in [
            kvf_queue_open(null_mut(), null(), null_mut()),
            kvf_queue_submit(null_mut(), null(), 0),
            kvf_queue_poll(null_mut(), null_mut(), 0, 0, count),
            kvf_queue_wait(null_mut(), null_mut(), 0, 0, 0, count),
            kvf_queue_begin(null_mut(), 0),
            kvf_queue_cancel(null_mut(), 0),
            kvf_queue_close(null_mut(), 0),
            kvf_hasher_open(null(), null(), null_mut()),
            kvf_hasher_identity(null(), null_mut()),
            kvf_hasher_blocks(null(), null(), 0, null_mut(), 0, count),
            kvf_result_decision(null(), null_mut()),
            kvf_result_source(null(), 0, null_mut()),
            kvf_result_fetched(null(), null_mut()),
            kvf_result_miss(null(), 0, null_mut()),
            kvf_result_saved(null(), null_mut()),
            kvf_result_lease(null(), 0, null_mut()),
            kvf_client_paths(null(), null_mut()),
            kvf_paths_node(null(), 0, null_mut()),
            kvf_paths_traffic(null(), 0, null_mut()),
            kvf_client_links(null_mut(), null_mut(), 0, size_of::<abi::Link>(), count),
            kvf_reporter_open(null_mut(), null(), null_mut()),
            kvf_reporter_load(null_mut(), null()),
            kvf_reporter_outcome(null_mut(), null()),
            kvf_save_layers_begin(null_mut(), null(), null_mut()),
            kvf_save_layers_put(null_mut(), null(), 0),
            kvf_save_layers_finish(null_mut()),
            kvf_prefill_begin(null_mut(), null(), null_mut()),
            kvf_prefill_next(null_mut(), 0, null_mut(), null_mut(), 0),
            kvf_prefill_end(null_mut(), null_mut()),
            kvf_prefill_returned(null_mut(), null_mut(), 0, size_of::<abi::ReturnedBlock>(), 0, count),
            kvf_result_prefilled(null(), null_mut()),
        ] {
            assert_refused(status, status::INVALID, "is null");
        }
        assert_eq!(kvf_result_retry_after_us(null()), 0);
        assert_eq!(kvf_result_message(null(), null_mut(), 0), 0);
        kvf_client_free(null_mut());
        kvf_queue_free(null_mut());
        kvf_hasher_free(null_mut());
        kvf_result_free(null_mut());
        kvf_paths_free(null_mut());
        kvf_reporter_free(null_mut());
        kvf_save_layers_drop(null_mut());
        assert_eq!(kvf_prefill_read_buffer_bytes(null()), 0);
        kvf_prefill_free(null_mut());
        for number in [status::OK, status::LOST, 999, -1] {
            assert!(!CStr::from_ptr(kvf_status_name(number)).is_empty());
        }
    }
}

#[test]
fn each_null_argument_is_refused() {
    let opened = open_client(null());
    let (queue, salt) = (opened.queue, [0u8; 32]);
    let model = model();
    // SAFETY: pointers that are not null are valid and as long as stated; one argument of each call
    // is null.
    unsafe {
        let mut entry: abi::Completion = std::mem::zeroed();
        let (entry, bytes) = (&raw mut entry, size_of::<abi::Completion>());
        let (mut hasher, mut other): (*mut HasherHandle, *mut QueueHandle) = (null_mut(), null_mut());
        assert_eq!(kvf_hasher_open(&raw const model, salt.as_ptr(), &raw mut hasher), status::OK);
        let (mut hash, mut count, tokens) = (abi::Hash::default(), 0, [1u32; 512]);
        let mut identity = abi::Identity::default();
        let (hash, count) = (&raw mut hash, &raw mut count);
        for (status, what) in [
            (kvf_queue_open(null_mut(), null(), &raw mut other), "client"),
            (kvf_queue_open(opened.client, null(), null_mut()), "queue"),
            (kvf_queue_submit(queue, null(), 1), "operation"),
            (kvf_queue_poll(queue, null_mut(), 1, bytes, count), "entries"),
            (kvf_queue_poll(queue, entry, 1, bytes, null_mut()), "count"),
            (kvf_queue_wait(queue, null_mut(), 1, bytes, 0, count), "entries"),
            (kvf_queue_wait(queue, entry, 1, bytes, 0, null_mut()), "count"),
            (kvf_hasher_open(null(), salt.as_ptr(), &raw mut hasher), "model"),
            (kvf_hasher_open(&raw const model, null(), &raw mut hasher), "tenant_salt"),
            (kvf_hasher_open(&raw const model, salt.as_ptr(), null_mut()), "hasher"),
            (kvf_hasher_identity(null(), &raw mut identity), "hasher"),
            (kvf_hasher_identity(hasher, null_mut()), "identity"),
            (kvf_hasher_blocks(null(), tokens.as_ptr(), 512, hash, 1, count), "hasher"),
            (kvf_hasher_blocks(hasher, null(), 512, hash, 1, count), "tokens"),
            (kvf_hasher_blocks(hasher, tokens.as_ptr(), 512, null_mut(), 1, count), "hashes"),
            (kvf_hasher_blocks(hasher, tokens.as_ptr(), 512, hash, 1, null_mut()), "count"),
        ] {
            assert_eq!(status, status::INVALID, "{what}");
        }
        // The message is only of the last call, so some calls are repeated.
        assert_refused(kvf_queue_submit(queue, null(), 1), status::INVALID, "operation is null");
        assert_refused(
            kvf_queue_poll(queue, null_mut(), 1, bytes, count),
            status::INVALID,
            "entries is null",
        );
        assert_refused(kvf_hasher_identity(hasher, null_mut()), status::INVALID, "identity is null");
        assert!(other.is_null());
        kvf_hasher_free(hasher);
    }
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    fn alarm(seconds: u32) -> u32;
    fn _exit(status: i32) -> !;
}

#[test]
fn forked_process_gets_errors_and_free_does_not_hang() {
    let mut memory = CallMemory::new();
    let (slices, sources) = (memory.slices(), [source(2)]);
    let opened = open_client(null());
    // An operation that never ends by itself, so freeing would wait for it.
    let waits = abi::FetchCall { flags: abi::FETCH_DEFERRED, ..memory.fetch(&slices, &sources) };
    assert_eq!(submit(&opened, &[operation(abi::FETCH, 1, &waits)]), status::OK);
    let (config, mut reporter) = (reporter_config(c"127.0.0.1:9".as_ptr()), null_mut());
    // SAFETY: everything pointed to outlives the call.
    let status = unsafe { kvf_reporter_open(opened.client, &raw const config, &raw mut reporter) };
    assert_eq!(status, status::OK);
    let mut save = null_mut();
    let layers = memory.save_layers();
    // SAFETY: the same.
    let status = unsafe { kvf_save_layers_begin(opened.client, &raw const layers, &raw mut save) };
    assert_eq!(status, status::OK);
    let size = u32::try_from(size_of::<abi::Load>()).unwrap();
    // SAFETY: zeroes are an empty load.
    let load = abi::Load { size, ..unsafe { std::mem::zeroed() } };
    // SAFETY: the child only calls the library, which refuses, and ends without returning.
    unsafe {
        let child = fork();
        if child == 0 {
            alarm(30);
            let (mut count, mut other, mut paths) = (0, null_mut(), null_mut());
            let bytes = size_of::<abi::Completion>();
            let statuses = [
                kvf_queue_poll(opened.queue, null_mut(), 0, bytes, &raw mut count),
                kvf_queue_submit(opened.queue, null(), 0),
                kvf_queue_begin(opened.queue, 1),
                kvf_queue_cancel(opened.queue, 1),
                kvf_queue_close(opened.queue, 1 << 40),
                kvf_queue_open(opened.client, null(), &raw mut other),
                kvf_reporter_load(reporter, &raw const load),
                kvf_reporter_open(opened.client, &raw const config, &raw mut reporter),
                kvf_client_paths(opened.client, &raw mut paths),
                kvf_client_links(opened.client, null_mut(), 0, size_of::<abi::Link>(), &raw mut count),
                kvf_save_layers_begin(opened.client, &raw const layers, &raw mut save),
                kvf_save_layers_put(save, null(), 0),
                kvf_save_layers_finish(save),
            ];
            kvf_save_layers_drop(save);
            kvf_reporter_free(reporter);
            kvf_queue_free(opened.queue);
            kvf_client_free(opened.client);
            _exit(i32::from(statuses != [status::FAILED; 13]));
        }
        let mut ended = -1;
        assert_eq!(waitpid(child, &raw mut ended, 0), child);
        assert_eq!(ended, 0, "the child was killed, or got another status");
        assert_eq!(kvf_reporter_load(reporter, &raw const load), status::OK);
        kvf_reporter_free(reporter);
        kvf_save_layers_drop(save);
        // The parent's operation continues.
        assert_eq!(kvf_queue_cancel(opened.queue, 1), status::OK);
        let entry = wait_entries(&opened)[0];
        assert_eq!((entry.kind, entry.status), (abi::ENDED, status::CANCELLED));
        let mut lease: abi::Lease = std::mem::zeroed();
        assert_eq!(kvf_result_lease(entry.result, 0, &raw mut lease), status::OK);
        assert_refused(kvf_result_lease(entry.result, 0, null_mut()), status::INVALID, "lease is null");
        assert_refused(
            kvf_result_lease(entry.result, 1, &raw mut lease),
            status::NOT_FOUND,
            "lease of this number",
        );
        kvf_result_free(entry.result);
    }
}

#[test]
fn reserved_fields_must_be_0_and_zero_limits_are_defaults() {
    let size = |bytes: usize| u32::try_from(bytes).unwrap();
    let limits = abi::QueueLimits {
        size: size(size_of::<abi::QueueLimits>()),
        reserved: 0,
        operations_max: 0,
        blocks_max: 0,
    };
    let mut memory = CallMemory::new();
    let (slices, sources) = (memory.slices(), [source(2)]);
    let opened = open_client(&raw const limits);
    let fetch = memory.fetch(&slices, &sources);
    let refuses =
        |operation, words: &str| assert_refused(submit(&opened, &[operation]), status::INVALID, words);
    let size_of_release = size(size_of::<abi::ReleaseCall>());
    let release = abi::ReleaseCall { size: size_of_release, reserved: 1, leases: null(), leases_count: 0 };
    refuses(operation(abi::RELEASE, 1, &release), "release_call.reserved is 1");
    let later = abi::QueueLimits { reserved: 1, ..limits };
    let (mut queue, mut hasher) = (null_mut(), null_mut());
    let model = abi::Model { reserved: 1, ..model() };
    // SAFETY: everything pointed to outlives the calls.
    unsafe {
        let status = kvf_queue_open(opened.client, &raw const later, &raw mut queue);
        assert_refused(status, status::INVALID, "limits.reserved is 1");
        let status = kvf_hasher_open(&raw const model, [0u8; 32].as_ptr(), &raw mut hasher);
        assert_refused(status, status::INVALID, "model.reserved is 1");
    }
    // Limits of 0 taken literally would refuse this.
    assert_eq!(submit(&opened, &[operation(abi::FETCH, 1, &fetch)]), status::OK);
}

#[test]
fn qos_must_fit_the_operation() {
    let mut memory = CallMemory::new();
    let (slices, sources) = (memory.slices(), [source(2)]);
    let opened = open_client(null());
    let (fetch, save) = (memory.fetch(&slices, &sources), memory.save(&slices));
    let asker = |qos| abi::RequestContext { qos, ..abi::RequestContext::default() };
    let fetches = |qos| {
        let call = abi::FetchCall { asker: asker(qos), flags: abi::FETCH_DEFERRED, ..fetch };
        submit(&opened, &[operation(abi::FETCH, u64::from(qos), &call)])
    };
    let saves = |qos| {
        let call = abi::SaveCall { asker: asker(qos), ..save };
        submit(&opened, &[operation(abi::SAVE, 100 + u64::from(qos), &call)])
    };
    for qos in [0, abi::QOS_REPLICATE, abi::QOS_PREFETCH] {
        assert_eq!((fetches(qos), saves(qos)), (status::OK, status::OK), "{qos}");
    }
    assert_eq!((fetches(abi::QOS_FETCH), saves(abi::QOS_SAVE)), (status::OK, status::OK));
    assert_refused(
        saves(abi::QOS_FETCH),
        status::INVALID,
        "asker.qos is 1, expected 0 or one of 2 (save), 3",
    );
    says("C: an operation with a class that it cannot have", &last_error(), &[]);
    assert_refused(
        fetches(abi::QOS_SAVE),
        status::INVALID,
        "asker.qos is 2, expected 0 or one of 1 (fetch), 3",
    );
    assert_refused(fetches(5), status::INVALID, "asker.qos is 5");
    // SAFETY: zeroes are an empty call.
    let route: abi::RouteCall = unsafe { std::mem::zeroed() };
    let size = u32::try_from(size_of::<abi::RouteCall>()).unwrap();
    let route = abi::RouteCall { size, asker: asker(abi::QOS_FETCH), ..route };
    let status = submit(&opened, &[operation(abi::ROUTE, 9, &route)]);
    assert_refused(status, status::INVALID, "asker.qos is 1, expected 0");
}

fn reporter_config(address: *const c_char) -> abi::ReporterConfig {
    abi::ReporterConfig {
        size: u32::try_from(size_of::<abi::ReporterConfig>()).unwrap(),
        instance: 1,
        address,
        host: null(),
        node: 0,
        has_node: 0,
        every_ms: 1,
        without_links: 0,
        silent_after_ms: 0,
        orders_by_deadline: 0,
        place: null(),
        role: 0,
        reserved: 0,
    }
}

#[test]
fn invalid_reporter_config_is_refused_and_free_works_without_routers() {
    let opened = open_client(null());
    let good = reporter_config(c"127.0.0.1:9".as_ptr());
    let mut reporter = null_mut();
    let mut open = |config: abi::ReporterConfig| {
        // SAFETY: everything pointed to outlives the call.
        unsafe { kvf_reporter_open(opened.client, &raw const config, &raw mut reporter) }
    };
    assert_refused(
        open(abi::ReporterConfig { size: 4, ..good }),
        status::INVALID,
        "reporter_config.size is 4",
    );
    assert_refused(open(abi::ReporterConfig { address: null(), ..good }), status::INVALID, "address is null");
    assert_refused(
        open(abi::ReporterConfig { address: c"".as_ptr(), ..good }),
        status::FAILED,
        "address is empty",
    );
    says("C: a reporter without an address", &last_error(), &[]);
    assert_refused(open(abi::ReporterConfig { has_node: 2, ..good }), status::INVALID, "has_node is 2");
    assert_refused(open(abi::ReporterConfig { node: 1, ..good }), status::INVALID, "node is 1, expected 0");
    assert_refused(
        open(abi::ReporterConfig { every_ms: 10_001, ..good }),
        status::INVALID,
        "every_ms is 10001",
    );
    assert_refused(
        open(abi::ReporterConfig { without_links: 2, ..good }),
        status::INVALID,
        "without_links is 2",
    );
    let hours = abi::ReporterConfig { silent_after_ms: 3_600_001, ..good };
    assert_refused(open(hours), status::INVALID, "silent_after_ms is 3600001, expected 0 to 3600000");
    let short = abi::ReporterConfig { every_ms: 300, silent_after_ms: 299, ..good };
    assert_refused(open(short), status::INVALID, "silent_after_ms is 299, expected every_ms, 300, or more");
    says("C: a reporter that is silent between its reports", &last_error(), &[]);
    let usual = abi::ReporterConfig { every_ms: 0, silent_after_ms: 199, ..good };
    assert_refused(open(usual), status::INVALID, "silent_after_ms is 199, expected every_ms, 200, or more");
    assert_refused(
        open(abi::ReporterConfig { orders_by_deadline: 2, ..good }),
        status::INVALID,
        "orders_by_deadline is 2",
    );
    assert_refused(
        open(abi::ReporterConfig { role: 3, ..good }),
        status::INVALID,
        "role is 3, expected 0 to 2",
    );
    assert_refused(
        open(abi::ReporterConfig { reserved: 1, ..good }),
        status::INVALID,
        "reporter_config.reserved is 1",
    );
    let nowhere = abi::ReporterConfig { place: c"a//b".as_ptr(), ..good };
    assert_refused(open(nowhere), status::FAILED, "place \"a//b\"");
    says("C: a reporter at a place that is none", &last_error(), &[]);
    assert_eq!(open(good), status::OK);
    let size = u32::try_from(size_of::<abi::Load>()).unwrap();
    // SAFETY: zeroes are an empty load.
    let load: abi::Load = unsafe { std::mem::zeroed() };
    let load = abi::Load { size, running: 1, waiting: 2, queue_tokens: 3, ..load };
    // SAFETY: everything pointed to outlives the calls, and the reporter is freed once.
    unsafe {
        assert_eq!(kvf_reporter_load(reporter, &raw const load), status::OK);
        let later = abi::Load { reserved: 1, ..load };
        assert_refused(kvf_reporter_load(reporter, &raw const later), status::INVALID, "load.reserved is 1");
        for (kv_tokens, kv_tokens_max) in [(7, 6), (7, 0), (u64::MAX, u64::MAX)] {
            let full = abi::Load { kv_tokens, kv_tokens_max, ..load };
            assert_eq!(kvf_reporter_load(reporter, &raw const full), status::OK, "more tokens than fit");
        }
        assert_refused(kvf_reporter_load(reporter, null()), status::INVALID, "load is null");
        check_invalid_outcomes(&opened, reporter);
        // No router gets the final report; freeing ends anyway.
        kvf_reporter_free(reporter);
    }
}

#[test]
fn new_client_has_no_paths_or_links() {
    let opened = open_client(null());
    // SAFETY: pointers that are not null are valid and as long as stated.
    unsafe {
        let (mut paths, mut count) = (null_mut(), 7);
        assert_refused(kvf_client_paths(opened.client, null_mut()), status::INVALID, "paths is null");
        assert_eq!(kvf_client_paths(opened.client, &raw mut paths), status::OK);
        let mut node: abi::NodePath = std::mem::zeroed();
        assert_refused(
            kvf_paths_node(paths, 0, &raw mut node),
            status::NOT_FOUND,
            "there is no node of this number",
        );
        let mut carried: abi::PathTraffic = std::mem::zeroed();
        assert_refused(kvf_paths_traffic(paths, 0, &raw mut carried), status::INVALID, "carried.size is 0");
        carried.size = u32::try_from(size_of::<abi::PathTraffic>()).unwrap();
        let mut kinds = Vec::new();
        while kvf_paths_traffic(paths, kinds.len(), &raw mut carried) == status::OK {
            assert_eq!((carried.fetched_bytes, carried.saved_bytes), (0, 0));
            kinds.push(carried.path);
        }
        assert!(kinds.len() <= 4 && kinds.ends_with(&[abi::PATH_TCP, abi::PATH_QUIC]), "{kinds:?}");
        let beyond = kvf_paths_traffic(paths, kinds.len(), &raw mut carried);
        assert_refused(beyond, status::NOT_FOUND, "no path of this number");
        kvf_paths_free(paths);
        let (mut link, bytes) = (abi::Link::default(), size_of::<abi::Link>());
        let links = |link, count: *mut usize, bytes| kvf_client_links(opened.client, link, 1, bytes, count);
        assert_refused(links(&raw mut link, &raw mut count, bytes + 8), status::INVALID, "link.size is 56");
        assert_refused(links(null_mut(), &raw mut count, bytes), status::INVALID, "links is null");
        assert_refused(links(&raw mut link, null_mut(), bytes), status::INVALID, "count is null");
        assert_eq!((links(&raw mut link, &raw mut count, bytes), count), (status::OK, 0));
        assert_eq!(kvf_client_links(opened.client, null_mut(), 0, bytes, &raw mut count), status::OK);
    }
}

/// Slices of 8 and 4 bytes of two blocks, with the arrays of a call.
struct CallMemory {
    bytes: [u8; 24],
    slice_bytes: [u32; 2],
    hashes: [abi::Hash; 2],
}

impl CallMemory {
    fn new() -> Box<CallMemory> {
        Box::new(CallMemory { bytes: [0; 24], slice_bytes: [8, 4], hashes: [abi::Hash { bytes: [1; _] }; 2] })
    }

    fn slices(&mut self) -> [*mut c_void; 4] {
        [0, 8, 12, 20].map(|at| self.bytes.as_mut_ptr().wrapping_add(at).cast())
    }

    fn fetch(&self, slices: &[*mut c_void], sources: &[abi::Source]) -> abi::FetchCall {
        abi::FetchCall {
            size: u32::try_from(size_of::<abi::FetchCall>()).unwrap(),
            flags: 0,
            asker: abi::RequestContext::default(),
            hashes: self.hashes.as_ptr(),
            hashes_count: 2,
            sources: sources.as_ptr(),
            sources_count: sources.len(),
            slice_bytes: self.slice_bytes.as_ptr(),
            slices: slices.as_ptr(),
            slices_count: slices.len(),
            layers: 2,
            resident_blocks: 0,
            deadline_us: 1_000_000,
            read_buffer_bytes: 0,
            in_flight_bytes_max: 0,
        }
    }

    fn save(&self, slices: &[*mut c_void]) -> abi::SaveCall {
        abi::SaveCall {
            size: u32::try_from(size_of::<abi::SaveCall>()).unwrap(),
            key_form: 1,
            asker: abi::RequestContext::default(),
            address: c"127.0.0.1:9".as_ptr(),
            epoch: 1,
            parent: null(),
            hashes: self.hashes.as_ptr(),
            hashes_count: 2,
            slice_bytes: self.slice_bytes.as_ptr(),
            slices: slices.as_ptr().cast(),
            slices_count: slices.len(),
            layers: 2,
            first_offset_blocks: 0,
            deadline_us: 0,
        }
    }

    fn save_layers(&self) -> abi::SaveLayersCall {
        abi::SaveLayersCall {
            size: u32::try_from(size_of::<abi::SaveLayersCall>()).unwrap(),
            key_form: 1,
            asker: abi::RequestContext::default(),
            address: c"127.0.0.1:9".as_ptr(),
            epoch: 1,
            parent: null(),
            hashes: self.hashes.as_ptr(),
            hashes_count: 2,
            slice_bytes: self.slice_bytes.as_ptr(),
            then_release: null(),
            then_release_count: 0,
            layers: 2,
            first_offset_blocks: 0,
            deadline_us: 0,
        }
    }
}

#[test]
fn invalid_layer_save_is_refused_and_excess_is_busy() {
    let (opened, memory) = (open_client(null()), CallMemory::new());
    let good = memory.save_layers();
    let begin = |call: abi::SaveLayersCall| {
        let mut save: *mut LayerSaveHandle = null_mut();
        // SAFETY: everything pointed to outlives the call.
        let status = unsafe { kvf_save_layers_begin(opened.client, &raw const call, &raw mut save) };
        assert_eq!(save.is_null(), status != status::OK);
        (status, save)
    };
    let refuses = |call, expected, words: &str| assert_refused(begin(call).0, expected, words);
    refuses(abi::SaveLayersCall { size: 8, ..good }, status::INVALID, "save_layers_call.size is 8");
    refuses(abi::SaveLayersCall { key_form: 2, ..good }, status::INVALID, "key_form is 2");
    refuses(abi::SaveLayersCall { address: null(), ..good }, status::INVALID, "address is null");
    refuses(abi::SaveLayersCall { hashes: null(), ..good }, status::INVALID, "hashes is null");
    refuses(abi::SaveLayersCall { hashes_count: usize::MAX, ..good }, status::TOO_LARGE, "hashes has");
    refuses(abi::SaveLayersCall { layers: 0, ..good }, status::INVALID, "layers is 0");
    refuses(abi::SaveLayersCall { layers: u32::MAX, ..good }, status::INVALID, "layers is 4294967295");
    refuses(abi::SaveLayersCall { slice_bytes: null(), ..good }, status::INVALID, "slice_bytes is null");
    refuses(abi::SaveLayersCall { then_release_count: 1, ..good }, status::INVALID, "then_release is null");
    let odd = good.hashes.cast::<u32>().wrapping_byte_add(1).cast();
    refuses(abi::SaveLayersCall { slice_bytes: odd, ..good }, status::INVALID, "slice_bytes is misaligned");
    let huge = [u32::MAX; 2];
    refuses(abi::SaveLayersCall { slice_bytes: huge.as_ptr(), ..good }, status::TOO_LARGE, "slice_bytes has");
    // More than can ever fit, so retrying is useless.
    let (many, mebibyte) = (vec![abi::Hash::default(); 257], [1 << 20, 8]);
    let (hashes, slice_bytes) = (many.as_ptr(), mebibyte.as_ptr());
    let large = abi::SaveLayersCall { hashes, hashes_count: many.len(), slice_bytes, ..good };
    refuses(large, status::TOO_LARGE, "the save, in bytes, has 269");
    assert!(last_error().contains(&format!("the limit is {SAVE_QUEUE_BYTES_MAX}")), "{}", last_error());
    let fetch = abi::RequestContext { qos: abi::QOS_FETCH, ..abi::RequestContext::default() };
    refuses(abi::SaveLayersCall { asker: fetch, ..good }, status::INVALID, "asker.qos is 1");
    // SAFETY: null is not written.
    let status = unsafe { kvf_save_layers_begin(opened.client, &raw const good, null_mut()) };
    assert_refused(status, status::INVALID, "save is null");
    // None of the refused calls kept a reservation: the maximum number still fits.
    let mut taken = Vec::new();
    let full = loop {
        match begin(good) {
            (status::OK, save) => taken.push(save),
            (status, _) => break status,
        }
    };
    assert_refused(full, status::BUSY, "");
    assert_eq!(taken.len(), SAVE_QUEUE_CALLS_MAX);
    // SAFETY: freed once each.
    unsafe {
        kvf_save_layers_drop(taken.pop().unwrap());
        let (status, again) = begin(good);
        assert_eq!(status, status::OK, "a dropped save frees its space");
        taken.into_iter().chain([again]).for_each(|save| kvf_save_layers_drop(save));
    }
}

#[test]
fn layers_are_copied_in_order_once_each() {
    let (opened, memory) = (open_client(null()), CallMemory::new());
    let (call, mut save) = (memory.save_layers(), null_mut());
    // SAFETY: everything pointed to outlives the calls; pointers that are not null have as many
    // bytes as stated.
    unsafe {
        assert_eq!(kvf_save_layers_begin(opened.client, &raw const call, &raw mut save), status::OK);
        let put = |bytes: usize| {
            // Dropped when the call has returned.
            let slices = [vec![7u8; bytes], vec![8u8; bytes]];
            let pointers = slices.each_ref().map(|slice| slice.as_ptr().cast::<c_void>());
            kvf_save_layers_put(save, pointers.as_ptr(), 2)
        };
        let bytes = [0u8; 8];
        let (at, nowhere): (*const c_void, *const c_void) = (bytes.as_ptr().cast(), null());
        assert_refused(kvf_save_layers_put(save, null(), 2), status::INVALID, "slices is null");
        let three = [at; 3];
        let odd = three.as_ptr().wrapping_byte_add(1);
        assert_refused(kvf_save_layers_put(save, odd, 2), status::INVALID, "slices is misaligned");
        for count in [0, 1, 3, usize::MAX] {
            let status = kvf_save_layers_put(save, [at; 3].as_ptr(), count);
            assert_refused(status, status::INVALID, "expected 2: one for each block");
        }
        let status = kvf_save_layers_put(save, [at, nowhere].as_ptr(), 2);
        assert_refused(status, status::INVALID, "one of the slices is null");
        assert_refused(kvf_save_layers_finish(save), status::INVALID, "a save of 2 layers got 0");
        assert_eq!(put(8), status::OK, "refused layers take no effect");
        assert_refused(kvf_save_layers_finish(save), status::INVALID, "a save of 2 layers got 1");
        says("C: a save by layers that lacks one", &last_error(), &[]);
        assert_eq!(put(4), status::OK);
        assert_refused(put(4), status::INVALID, "a save of 2 layers got 3");
        assert_eq!(kvf_save_layers_finish(save), status::OK);
        assert_refused(kvf_save_layers_finish(save), status::CLOSED, "this save was finished");
        says("C: a save by layers that was finished", &last_error(), &[]);
        assert_refused(put(4), status::CLOSED, "this save was finished");
        kvf_save_layers_drop(save);
        // Empty slices may have any address; a save without blocks has no slices.
        let nothing = [0u32; 2];
        let empty = abi::SaveLayersCall { slice_bytes: nothing.as_ptr(), ..call };
        assert_eq!(kvf_save_layers_begin(opened.client, &raw const empty, &raw mut save), status::OK);
        assert_eq!(kvf_save_layers_put(save, [nowhere; 2].as_ptr(), 2), status::OK);
        kvf_save_layers_drop(save);
        let none = abi::SaveLayersCall { hashes_count: 0, ..call };
        assert_eq!(kvf_save_layers_begin(opened.client, &raw const none, &raw mut save), status::OK);
        assert_eq!(kvf_save_layers_put(save, null(), 0), status::OK);
        kvf_save_layers_drop(save);
    }
}

#[test]
fn concurrent_puts_and_finishes_are_serialized() {
    struct SharedSave(*mut LayerSaveHandle);
    // SAFETY: C uses handles from any thread.
    unsafe impl Send for SharedSave {}
    // SAFETY: the same.
    unsafe impl Sync for SharedSave {}
    let (opened, memory) = (open_client(null()), CallMemory::new());
    let layers = [8u32; 64];
    let call = abi::SaveLayersCall { layers: 64, slice_bytes: layers.as_ptr(), ..memory.save_layers() };
    let mut save = null_mut();
    // SAFETY: everything pointed to outlives the call.
    let status = unsafe { kvf_save_layers_begin(opened.client, &raw const call, &raw mut save) };
    assert_eq!(status, status::OK);
    let shared = SharedSave(save);
    let ended: Vec<(u32, u32)> = std::thread::scope(|scope| {
        let one = || {
            let (SharedSave(save), bytes) = (&shared, [1u8; 8]);
            let slices: [*const c_void; 2] = [bytes.as_ptr().cast(); 2];
            let (mut puts, mut finishes) = (0, 0);
            for _ in 0..64 {
                // SAFETY: the save is dropped after all of these.
                unsafe {
                    puts += u32::from(kvf_save_layers_put(*save, slices.as_ptr(), 2) == status::OK);
                    finishes += u32::from(kvf_save_layers_finish(*save) == status::OK);
                }
            }
            (puts, finishes)
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let sums = ended.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert_eq!(sums, (64, 1), "each layer once, and one finish");
    // SAFETY: freed once.
    unsafe { kvf_save_layers_drop(save) };
}

fn operation<T>(kind: u32, tag: u64, call: &T) -> abi::Operation {
    let size = u32::try_from(size_of::<abi::Operation>()).unwrap();
    abi::Operation { size, kind, tag, call: (&raw const *call).cast() }
}

fn source(len_blocks: u32) -> abi::Source {
    abi::Source { address: c"127.0.0.1:9".as_ptr(), epoch: 1, node: 1, tier: 1, start_blocks: 0, len_blocks }
}

fn submit(opened: &TestClient, operations: &[abi::Operation]) -> Status {
    // SAFETY: everything pointed to outlives the call, and slices live until the queue is freed.
    unsafe { kvf_queue_submit(opened.queue, operations.as_ptr(), operations.len()) }
}

#[test]
fn invalid_calls_reject_their_whole_batch() {
    let mut memory = CallMemory::new();
    let slices = memory.slices();
    let sources = [source(2)];
    let opened = open_client(null());
    let fetch = memory.fetch(&slices, &sources);
    let save = memory.save(&slices);
    let bad_fetch = |call: abi::FetchCall, expected, words: &str| {
        let good = operation(abi::SAVE, 1, &save);
        assert_refused(submit(&opened, &[good, operation(abi::FETCH, 2, &call)]), expected, words);
    };
    bad_fetch(abi::FetchCall { size: 8, ..fetch }, status::INVALID, "fetch_call.size is 8");
    bad_fetch(abi::FetchCall { flags: 8, ..fetch }, status::INVALID, "flags is 8");
    bad_fetch(abi::FetchCall { hashes: null(), ..fetch }, status::INVALID, "hashes is null");
    bad_fetch(abi::FetchCall { hashes_count: 1 << 40, ..fetch }, status::TOO_LARGE, "hashes has");
    bad_fetch(abi::FetchCall { sources: null(), ..fetch }, status::INVALID, "sources is null");
    bad_fetch(abi::FetchCall { layers: 0, ..fetch }, status::INVALID, "layers is 0");
    bad_fetch(abi::FetchCall { layers: u32::MAX, ..fetch }, status::INVALID, "layers is 4294967295");
    bad_fetch(abi::FetchCall { slice_bytes: null(), ..fetch }, status::INVALID, "slice_bytes is null");
    bad_fetch(abi::FetchCall { slices: null(), ..fetch }, status::INVALID, "slices is null");
    let odd = slices.as_ptr().cast::<u8>().wrapping_add(1).cast();
    bad_fetch(abi::FetchCall { slices: odd, ..fetch }, status::INVALID, "slices is misaligned");
    bad_fetch(abi::FetchCall { slices_count: 3, ..fetch }, status::INVALID, "slices_count is 3, expected 4");
    says("C: not a slice for each layer of each block", &last_error(), &[]);
    let mut hole = slices;
    hole[2] = null_mut();
    bad_fetch(memory.fetch(&hole, &sources), status::INVALID, "one of the slices is null");
    let endless = [source(u32::MAX), source(u32::MAX)];
    bad_fetch(memory.fetch(&slices, &endless), status::TOO_LARGE, "blocks has 8589934590");
    let huge = [u32::MAX, u32::MAX];
    bad_fetch(
        abi::FetchCall { slice_bytes: huge.as_ptr(), ..fetch },
        status::TOO_LARGE,
        "slice_bytes has 8589934590",
    );
    let kind = abi::RequestContext { kind: 7, ..abi::RequestContext::default() };
    bad_fetch(abi::FetchCall { asker: kind, ..fetch }, status::INVALID, "asker.kind is 7");
    let form = abi::SaveCall { key_form: 2, ..save };
    assert_refused(submit(&opened, &[operation(abi::SAVE, 1, &form)]), status::INVALID, "key_form is 2");
    let nobody = abi::SaveCall { address: null(), ..save };
    assert_refused(submit(&opened, &[operation(abi::SAVE, 1, &nobody)]), status::INVALID, "address is null");
    assert_refused(submit(&opened, &[operation(9, 1, &save)]), status::INVALID, "operation.kind is 9");
    let mut nothing = operation(abi::SAVE, 1, &save);
    nothing.call = null();
    assert_refused(submit(&opened, &[nothing]), status::INVALID, "save_call is null");
    // SAFETY: the count is refused before anything is read.
    let endless = unsafe { kvf_queue_submit(opened.queue, &raw const nothing, usize::MAX) };
    assert_refused(endless, status::TOO_LARGE, "operations has");
    let twice = [operation(abi::SAVE, 1, &save), operation(abi::SAVE, 1, &save)];
    assert_refused(submit(&opened, &twice), status::TAG_IN_USE, "tag 1");
    let mut count = 7;
    // SAFETY: the entry is valid and is written before it is read.
    unsafe {
        let mut entry = std::mem::zeroed();
        let bytes = size_of::<abi::Completion>();
        let status = kvf_queue_poll(opened.queue, &raw mut entry, 1, bytes - 8, &raw mut count);
        assert_refused(status, status::INVALID, "entry.size is 24");
        assert_eq!(kvf_queue_poll(opened.queue, &raw mut entry, 1, bytes, &raw mut count), status::OK);
        assert_eq!(count, 0, "no operation of a refused batch starts");
        assert_refused(kvf_queue_cancel(opened.queue, 1), status::NOT_FOUND, "no operation in flight");
        // A caller that waits on a closed queue learns that no completion follows.
        assert_eq!(kvf_queue_close(opened.queue, 0), status::OK);
        let over = kvf_queue_wait(opened.queue, &raw mut entry, 1, bytes, 1 << 40, &raw mut count);
        assert_refused(over, status::CLOSED, "closed");
    }
}

#[test]
fn full_queue_is_busy_and_unreachable_cluster_is_reported() {
    let limits = abi::QueueLimits {
        size: u32::try_from(size_of::<abi::QueueLimits>()).unwrap(),
        reserved: 0,
        operations_max: 2,
        blocks_max: 100,
    };
    let mut memory = CallMemory::new();
    let slices = memory.slices();
    let sources = [source(2)];
    // Separate memory: slices of a save must not overlap those of a fetch in flight.
    let mut computed = CallMemory::new();
    let saved = computed.slices();
    let opened = open_client(&raw const limits);
    let (fetch, save) = (memory.fetch(&slices, &sources), computed.save(&saved));
    let both = [operation(abi::FETCH, 1, &fetch), operation(abi::SAVE, 2, &save)];
    assert_eq!(submit(&opened, &both), status::OK);
    assert_refused(submit(&opened, &[operation(abi::SAVE, 3, &save)]), status::BUSY, "do not fit");
    let three = [3, 4, 5].map(|tag| operation(abi::SAVE, tag, &save));
    assert_refused(submit(&opened, &three), status::TOO_LARGE, "never fit");
    let mut ended = Vec::new();
    while ended.len() < 2 {
        for entry in wait_entries(&opened) {
            if entry.kind == abi::ENDED {
                ended.push((entry.tag, entry.status));
                // SAFETY: the result belongs to this test and is freed once.
                unsafe { check_result(&entry) };
            } else {
                assert_eq!((entry.kind, entry.tag, entry.block), (abi::RECOMPUTE, 1, 0));
            }
        }
    }
    ended.sort_unstable();
    assert_eq!(ended, [(1, status::MISSED), (2, status::FAILED)]);
    // SAFETY: the queue is valid.
    assert_eq!(unsafe { kvf_queue_close(opened.queue, 0) }, status::OK);
    assert_refused(submit(&opened, &both), status::CLOSED, "closed");
}

#[test]
fn oversized_batch_is_not_read_beyond_the_limits() {
    let limits = abi::QueueLimits {
        size: u32::try_from(size_of::<abi::QueueLimits>()).unwrap(),
        reserved: 0,
        operations_max: 3,
        blocks_max: 3,
    };
    let mut memory = CallMemory::new();
    let (slices, sources) = (memory.slices(), [source(2)]);
    let opened = open_client(&raw const limits);
    let fetch = memory.fetch(&slices, &sources);
    let mut unread = operation(abi::FETCH, 3, &fetch);
    unread.call = null();
    assert_refused(submit(&opened, &[unread]), status::INVALID, "fetch_call is null");
    let blocks = [operation(abi::FETCH, 1, &fetch), operation(abi::FETCH, 2, &fetch), unread];
    assert_refused(submit(&opened, &blocks), status::TOO_LARGE, "of 4 blocks never fit");
    assert_refused(submit(&opened, &[unread; 4]), status::TOO_LARGE, "4 operations");
    let mut short = blocks;
    short[0].size -= 8;
    assert_refused(submit(&opened, &short), status::INVALID, "operation.size is 16");
}

/// Without a router decode is admitted; the result of that operation has no fetch.
///
/// # Safety
/// `reporter` is a valid handle.
unsafe fn check_invalid_outcomes(opened: &TestClient, reporter: *mut ReporterHandle) {
    let size = u32::try_from(size_of::<abi::AdmitDecodeCall>()).unwrap();
    let call = abi::AdmitDecodeCall { size, instance: 1, request: 2, tbt_max_us: 3 };
    let short = abi::AdmitDecodeCall { size: 8, ..call };
    let submitted = submit(opened, &[operation(abi::ADMIT_DECODE, 1, &short)]);
    assert_refused(submitted, status::INVALID, "admit_decode_call.size is 8");
    assert_eq!(submit(opened, &[operation(abi::ADMIT_DECODE, 1, &call)]), status::OK);
    let ended = wait_entries(opened);
    assert_eq!((ended[0].kind, ended[0].tag, ended[0].status), (abi::ENDED, 1, status::OK));
    let size = u32::try_from(size_of::<abi::Outcome>()).unwrap();
    let outcome = abi::Outcome { size, output_tokens: 4, request: 2, ttft_us: 5, tbt_us: 6, fetched: null() };
    // SAFETY: everything pointed to outlives the calls; the result is freed once.
    unsafe {
        let tell = |outcome: abi::Outcome| kvf_reporter_outcome(reporter, &raw const outcome);
        assert_eq!(tell(outcome), status::OK);
        assert_refused(kvf_reporter_outcome(reporter, null()), status::INVALID, "outcome is null");
        assert_refused(tell(abi::Outcome { size: 8, ..outcome }), status::INVALID, "outcome.size is 8");
        let other = abi::Outcome { fetched: ended[0].result, ..outcome };
        assert_refused(tell(other), status::NOT_FOUND, "no fetch or prefill");
        says("C: an outcome with the result of something else", &last_error(), &[]);
        kvf_result_free(ended[0].result);
    }
}

fn wait_entries(opened: &TestClient) -> Vec<abi::Completion> {
    // SAFETY: the number of entries is correct, and only written ones are read.
    unsafe {
        let mut entries: [abi::Completion; 4] = std::mem::zeroed();
        let mut count = 0;
        let bytes = size_of::<abi::Completion>();
        let status = kvf_queue_wait(
            opened.queue,
            entries.as_mut_ptr(),
            entries.len(),
            bytes,
            60_000_000,
            &raw mut count,
        );
        assert!(status == status::OK && count > 0);
        entries[..count].to_vec()
    }
}

/// Checks the result of an operation on an unreachable cluster, and frees it.
unsafe fn check_result(entry: &abi::Completion) {
    let result = entry.result;
    // SAFETY: the result is valid until it is freed below; each struct is written before it is
    // read.
    unsafe {
        let mut message = [0; 400];
        assert!(kvf_result_message(result, message.as_mut_ptr(), message.len()) > 0);
        let message = CStr::from_ptr(message.as_ptr()).to_str().unwrap();
        assert!(message.contains("127.0.0.1:9"), "the message names the address: {message}");
        let mut decision: abi::Decision = std::mem::zeroed();
        decision.size = u32::try_from(size_of::<abi::Decision>()).unwrap();
        assert_refused(kvf_result_decision(result, &raw mut decision), status::NOT_FOUND, "no decision");
        if entry.tag == 1 {
            let mut fetched: abi::Fetched = std::mem::zeroed();
            assert_refused(
                kvf_result_fetched(result, &raw mut fetched),
                status::INVALID,
                "fetched.size is 0",
            );
            fetched.size = u32::try_from(size_of::<abi::Fetched>()).unwrap();
            assert_eq!(kvf_result_fetched(result, &raw mut fetched), status::OK);
            assert_eq!((fetched.end_block, fetched.came_count, fetched.misses), (0, 2, 1));
            assert_eq!(std::slice::from_raw_parts(fetched.came, 2), [0, 0]);
            let mut miss: abi::Miss = std::mem::zeroed();
            miss.size = u32::try_from(size_of::<abi::Miss>()).unwrap();
            assert_eq!(kvf_result_miss(result, 0, &raw mut miss), status::OK);
            assert_eq!((miss.reason, CStr::from_ptr(miss.address)), (6, c"127.0.0.1:9"));
            assert_refused(
                kvf_result_miss(result, 1, &raw mut miss),
                status::NOT_FOUND,
                "miss of this number",
            );
            assert_refused(kvf_result_miss(result, 0, null_mut()), status::INVALID, "miss is null");
            assert_refused(kvf_result_fetched(result, null_mut()), status::INVALID, "fetched is null");
        }
        kvf_result_free(result);
    }
}

fn model() -> abi::Model {
    abi::Model {
        size: u32::try_from(size_of::<abi::Model>()).unwrap(),
        key_form: 1,
        model: c"emulated-8b".as_ptr(),
        weights_digest: c"emulated".as_ptr(),
        dtype: c"bf16".as_ptr(),
        layout: c"layer-major".as_ptr(),
        rope: c"theta=500000".as_ptr(),
        adapter: c"".as_ptr(),
        layers: 32,
        tp: 1,
        pp: 1,
        rank: 0,
        block_tokens: 512,
        reserved: 0,
    }
}

#[test]
fn hashes_match_the_library_and_fit_the_array() {
    let model = model();
    let manifest = kv_core::prefix::IdentityManifest::default();
    let salt = [3u8; 32];
    let tokens: Vec<u32> = (0..1300).collect();
    let expected = kv_core::prefix::PrefixHasher::new(&manifest, &salt).blocks(&tokens);
    let mut hasher: *mut HasherHandle = null_mut();
    let odd = abi::Model { block_tokens: 500, ..model };
    // SAFETY: everything pointed to outlives the calls, and the hasher is freed once.
    unsafe {
        let status = kvf_hasher_open(&raw const odd, salt.as_ptr(), &raw mut hasher);
        assert_refused(status, status::FAILED, "block_tokens is 500");
        let unfinished = abi::Model { rope: null(), ..model };
        let status = kvf_hasher_open(&raw const unfinished, salt.as_ptr(), &raw mut hasher);
        assert_refused(status, status::INVALID, "rope is null");
        assert_eq!(kvf_hasher_open(&raw const model, salt.as_ptr(), &raw mut hasher), status::OK);
        let mut identity = abi::Identity::default();
        assert_eq!(kvf_hasher_identity(hasher, &raw mut identity), status::OK);
        assert_eq!(identity.bytes, manifest.digest().0);
        let mut hashes = [abi::Hash::default(); 3];
        let mut count = 0;
        let mut blocks = |room| {
            kvf_hasher_blocks(
                hasher,
                tokens.as_ptr(),
                tokens.len(),
                hashes.as_mut_ptr(),
                room,
                &raw mut count,
            )
        };
        assert_refused(blocks(2), status::TOO_LARGE, "the prompt has 3");
        assert_eq!(blocks(3), status::OK);
        assert_eq!(count, 3);
        assert_eq!(
            hashes.map(|hash| hash.bytes).to_vec(),
            expected.iter().map(|hash| hash.0).collect::<Vec<_>>()
        );
        kvf_hasher_free(hasher);
    }
}
