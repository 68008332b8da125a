//! Several callers and tenants at one store: lease ownership, in-place reads, and frames that
//! change during a save.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use kv_core::id::{CallerId, Generation, LeaseId, TenantId, Tier};
use kv_core::tier::{self, OfferOutcome, Requester};
use kvfleet_errors_doc::says;
use kvfleet_net::tls::SERVER_NAME;
use kvfleet_proto::frame::{CopyBatch, VolatileBytes};
use kvfleet_transport::{
    BlockService, Caller, CallerAdmission, FetchAnswer, FetchReply, MissReason, SaveOffer, SaveRefusal,
};
use rcgen::{CertificateParams, KeyPair};
use tokio::sync::oneshot;

use super::tests::{
    BLOCK_BYTES, PATIENCE, StoreFixture, config, fetch_request, fixture_with_block_on_ssd, frame, hash, open,
    open_of, parts, parts_on, save_request,
};
use super::*;
use crate::NodeConfig;
use crate::arena::Purpose;
use crate::block_service::Service;
use crate::start;
use crate::tiers::ssd::SsdFaults;
use kvfleet_errors_doc::log::Log;

fn certified(byte: u8) -> Caller {
    Caller::Certified([byte; 40].into())
}

/// Names in an instance's certificate.
const INSTANCE: &[&str] = &[SERVER_NAME, "kvfleet-instance-1"];

/// A caller with a certificate of these names.
fn named(names: &[&str]) -> Caller {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let certificate =
        CertificateParams::new(names).unwrap().self_signed(&KeyPair::generate().unwrap()).unwrap();
    Caller::Certified(certificate.der().to_vec().into())
}

/// The block service of this caller.
fn admit_scoped(bench: &StoreFixture, caller: &Caller) -> Arc<dyn BlockService> {
    match bench.service.admit(caller) {
        CallerAdmission::Scoped { service, may_map: false } => service,
        _ => panic!("{caller:?} is not admitted with a scoped service"),
    }
}

async fn is_wanted(service: &dyn BlockService, lease: u64, number: u64) -> bool {
    let (offer, session) = service.save(save_request(lease, number..number + 1)).await;
    drop(session);
    matches!(offer, SaveOffer::Wanted(wanted) if wanted == [true])
}

#[tokio::test]
async fn leases_belong_to_their_caller() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 1, 0)).await;
    let callers = [named(INSTANCE), named(INSTANCE)];
    let [ours, again, theirs] = [0, 0, 1].map(|at: usize| admit_scoped(&bench, &callers[at]));
    bench.saved(1, 0..1).await;
    assert_eq!(ours.fetch(fetch_request(7, 0..1)).await.answer, FetchAnswer::Hit { tiers: vec![Tier::Dram] });
    theirs.release(LeaseId(7)).await;
    bench.service.release(LeaseId(7)).await;
    assert!(!is_wanted(&*theirs, 8, 5).await, "block 0 is held; its holder did not release it");
    again.release(LeaseId(7)).await;
    assert!(is_wanted(&*theirs, 9, 5).await);
}

#[tokio::test]
async fn local_processes_are_refused_unless_configured() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 1, 0)).await;
    let local = Caller::Local { uid: 0, pid: 1, connection: 1 };
    assert!(matches!(bench.service.admit(&local), CallerAdmission::Refused));
    assert!(matches!(bench.service.admit(&Caller::ThisProcess), CallerAdmission::Unscoped));
}

#[tokio::test]
async fn foreign_tenant_is_a_miss_and_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 4, 0)).await, Log::start());
    bench.saved(1, 0..1).await;
    let service = bench.service.scoped(&certified(1), Some([TenantId(3), TenantId(4)].into()));
    let answer = service.fetch(fetch_request(2, 0..1)).await.answer;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    let (offer, session) = service.save(save_request(2, 5..6)).await;
    assert_eq!(offer, SaveOffer::Refused(SaveRefusal::IdentityDiffers));
    assert!(session.is_none());
    assert_eq!(bench.status().await.leases, 0, "the request did not reach the book");
    assert_eq!(log.count("asks as a tenant"), 2);
    says("a caller that names a tenant not its own, in the log", &log.line("asks as a tenant"), &[]);
    let mut own = save_request(2, 5..6);
    own.context.tenant = TenantId(4);
    assert!(matches!(service.save(own).await.0, SaveOffer::Wanted(_)));
}

#[tokio::test]
async fn certificate_limits_tenants_and_tenant_callers_may_not_map() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let lending = bench.service.clone().with_rdma_reads_in_place(true);
    let of = |names: &[&str]| match lending.admit(&named(names)) {
        CallerAdmission::Scoped { service, may_map } => Some((service, may_map)),
        CallerAdmission::Refused => None,
        CallerAdmission::Unscoped => panic!("a caller is admitted as this process"),
    };
    let wants = async |service: &dyn BlockService, tenant: u32, number: u64| {
        let mut request = save_request(u64::from(tenant), number..number + 1);
        request.context.tenant = TenantId(tenant);
        matches!(service.save(request).await.0, SaveOffer::Wanted(_))
    };
    let (member, maps) = of(INSTANCE).unwrap();
    assert!(maps && wants(&*member, 0, 1).await && wants(&*member, 4, 2).await);
    let (some, maps) = of(&["tenant-3.kvfleet", "tenant-5.kvfleet"]).unwrap();
    assert!(!maps, "the memory contains every tenant's blocks");
    let mut wanted = vec![];
    for tenant in 0..8 {
        if wants(&*some, tenant, 10 + u64::from(tenant)).await {
            wanted.push(tenant);
        }
    }
    assert_eq!(wanted, [3, 5]);
}

#[tokio::test]
async fn roles_read_and_save_blocks_by_the_access_table() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 8, 0)).await, Log::start());
    let lending = bench.service.clone().with_rdma_reads_in_place(true);
    bench.saved(1, 0..1).await;
    let roles = ["router-1", "node-2", "instance-3", "frontend", "admin"];
    let mut allowed = vec![];
    for (number, role) in (1..).zip(roles) {
        let name = format!("kvfleet-{role}");
        let CallerAdmission::Scoped { service, may_map } = lending.admit(&named(&[SERVER_NAME, &name]))
        else {
            panic!("{role} is not admitted")
        };
        let answer = service.fetch(fetch_request(100 + number, 0..1)).await.answer;
        let fetches = matches!(answer, FetchAnswer::Hit { .. });
        service.release(LeaseId(100 + number)).await;
        allowed.push((role, fetches, is_wanted(&*service, 200 + number, 10 + number).await, may_map));
    }
    let expected = [
        ("router-1", false, false, false),
        ("node-2", true, false, true),
        ("instance-3", true, true, true),
        ("frontend", false, false, false),
        ("admin", false, false, false),
    ];
    assert_eq!(allowed, expected);
    let line = log.line("may not fetch or save");
    says("a caller with a role that may not read blocks, in the log", &line, &[]);
}

#[tokio::test]
async fn ambiguous_certificate_is_refused_and_logged() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 1, 0)).await, Log::start());
    let refused = |caller: &Caller| assert!(matches!(bench.service.admit(caller), CallerAdmission::Refused));
    let said = |word: &str| log.line(word);
    refused(&named(&[SERVER_NAME, "tenant-03.kvfleet"]));
    says("a certificate with a malformed tenant name, in the log", &said("nor a tenant's"), &[]);
    refused(&named(&[SERVER_NAME, "tenant-3.kvfleet"]));
    says("a certificate with tenants and the cluster name, in the log", &said("could pose"), &[]);
    refused(&named(&[SERVER_NAME, "node-1"]));
    says("a certificate without a role, in the log", &said("and no role"), &[]);
    refused(&named(&["node-1"]));
    says("a certificate with neither name, in the log", &said("it names neither"), &[]);
    refused(&certified(1));
    assert_eq!(log.count("cannot be read"), 1);
    for _ in 0..100 {
        refused(&certified(1));
    }
    assert_eq!(log.count("a certificate is refused"), 16, "repeated refusals do not fill the log");
}

#[tokio::test]
async fn caller_without_releases_leaves_leases_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&NodeConfig { lease_ms: 3_600_000, ..config(dir.path(), 1, 0) }).await;
    bench.saved(1, 0..1).await;
    let callers = [named(INSTANCE), named(INSTANCE)];
    let [ours, theirs, again] = [0, 1, 0].map(|at: usize| admit_scoped(&bench, &callers[at]));
    let is_busy = async |service: &dyn BlockService, lease: u64| {
        matches!(service.fetch(fetch_request(lease, 0..1)).await.answer, FetchAnswer::Busy { .. })
    };
    let mut taken = 0;
    while !is_busy(&*ours, taken).await {
        taken += 1;
    }
    let left = start::LEASES_MAX as u64 - taken - 1; // and one of this process
    assert!(taken - left <= 1, "it may hold half: {taken}");
    assert!(is_busy(&*again, taken + 1).await, "also over another connection");
    assert!(!is_busy(&*again, 7).await, "its existing lease continues");
    assert!(!is_busy(&*theirs, 7).await && !is_busy(&bench.service, 7).await);
}

#[tokio::test]
async fn renew_reaches_the_callers_lease() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 1, 0);
    let parts = parts(&config).await;
    let (arena, metrics) = (parts.arena.clone(), parts.metrics.clone());
    let (mut store, handle, mut inbox) = Store::new(parts);
    let service = start::service(&config, handle, arena, metrics).scoped(&certified(1), None);
    let asking = tokio::spawn({
        let service = service.clone();
        async move { service.fetch(fetch_request(7, 0..1)).await }
    });
    let Some(StoreRequest::Fetch { asker, .. }) = inbox.recv().await else { panic!("no fetch") };
    asking.abort();
    service.renew(LeaseId(7));
    let Ok(StoreRequest::Renew { lease }) = inbox.try_recv() else { panic!("no renewal") };
    assert_eq!(lease, asker.lease);
    // It lives as long as it is renewed, and `renew_every` is short enough.
    assert!(2 * service.renew_interval() < Duration::from_millis(config.lease_ms));
    let later = |store: &mut Store, ms: u64| {
        store.parts.started -= Duration::from_millis(ms);
        store.tick();
        store.parts.book.lease_count()
    };
    let offer =
        tier::SaveOffer { parent: None, first_offset_blocks: 0, hashes: &[], charge: Default::default() };
    let now = store.now();
    store.parts.book.offer(asker, offer, now).unwrap();
    for _ in 0..3 {
        assert_eq!(later(&mut store, config.lease_ms / 2), 1);
        store.answer(StoreRequest::Renew { lease });
    }
    assert_eq!(later(&mut store, config.lease_ms + 1), 0);
}

/// Bytes that change after a number of reads.
struct ChangingBytes {
    before: Bytes,
    after: Bytes,
    loads_before: usize,
    loads: AtomicUsize,
}

impl ChangingBytes {
    fn of(before: Bytes, loads_before: usize) -> Arc<ChangingBytes> {
        let after = before.iter().map(|byte| !byte).collect();
        Arc::new(ChangingBytes { before, after, loads_before, loads: AtomicUsize::new(0) })
    }

    fn current(&self) -> &Bytes {
        let is_before = self.loads.fetch_add(1, Ordering::Relaxed) < self.loads_before;
        if is_before { &self.before } else { &self.after }
    }
}

impl VolatileBytes for ChangingBytes {
    fn len_bytes(&self) -> usize {
        self.before.len()
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        self.current().copy(at, to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &CopyBatch) -> u32 {
        self.current().copy_crc32c(at, to, copies)
    }
}

#[tokio::test]
async fn frame_changing_during_a_save_is_stored_as_copied_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 0)).await;
    // The start of the header, the rest of it, and the only slice.
    const LOADS: usize = 3;
    let (_, session) = bench.service.save(save_request(1, 0..6)).await;
    let mut session = session.unwrap();
    let whole = |number| frame(number, BLOCK_BYTES).bytes;
    for number in 0..=LOADS {
        let changing = ChangingBytes::of(whole(number as u64), number);
        session.put_volatile(Arc::clone(&changing) as Arc<dyn VolatileBytes>).await;
        assert!(changing.loads.load(Ordering::Relaxed) <= LOADS);
    }
    session.put_volatile(Arc::new(whole(77))).await;
    session.put_volatile(Arc::new(Bytes::from([&whole(5)[..], b"x"].concat()))).await;
    let done = session.finish().await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 5), "only changes after the copy are harmless");
    bench.service.release(LeaseId(1)).await;
    assert_eq!(bench.status().await.tiers[0].blocks, 1, "space of refused blocks is free again");
    assert_eq!(bench.arena.used_bytes(), crate::arena::slot_bytes(whole(0).len()));
    assert_eq!(bench.fetch(2, LOADS as u64..LOADS as u64 + 1).await.1, 1);
    for number in [0, 1, 2, 4, 5] {
        assert!(is_wanted(&bench.service, 3, number).await, "block {number} was aborted");
    }
}

async fn fetch_in_place_flags(
    service: &Service,
    lease: u64,
    numbers: std::ops::Range<u64>,
) -> (FetchReply, Vec<bool>) {
    let reply = service.fetch(fetch_request(lease, numbers)).await;
    let lendable = reply.lendable.clone();
    (reply, lendable)
}

#[tokio::test]
async fn blocks_assigned_to_dram_may_be_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 2, 8)).await;
    bench.saved(1, 0..2).await;
    let (reply, is_lendable) = fetch_in_place_flags(&bench.service, 2, 0..3).await;
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Dram; 2][..], vec![true, true]));
    bench.service.release(LeaseId(2)).await;
    bench.saved(3, 5..7).await;
    let slot = crate::arena::slot_bytes(frame(0, BLOCK_BYTES).bytes.len());
    drop(reply);
    bench
        .wait_until("0 and 1 are on SSD only", |status, used| status.tiers[1].blocks == 2 && used == 2 * slot)
        .await;
    let (reply, is_lendable) = fetch_in_place_flags(&bench.service, 4, 0..2).await;
    assert_eq!(
        (reply.answer.tiers(), is_lendable),
        (&[Tier::Ssd; 2][..], vec![true, true]),
        "they are promoted"
    );
    assert_eq!(bench.service.fetch(fetch_request(5, 90..91)).await.lendable, [false; 0]);
}

#[tokio::test]
async fn blocks_read_past_dram_are_not_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let bench = fixture_with_block_on_ssd(&config(dir.path(), 1, 8)).await;
    let (mut reply, is_lendable) = fetch_in_place_flags(&bench.service, 4, 0..1).await;
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Ssd][..], vec![false]));
    assert!(
        tokio::time::timeout(PATIENCE, reply.frames.next()).await.unwrap().is_some(),
        "it is readable anyway"
    );
}

#[tokio::test]
async fn blocks_being_demoted_are_not_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let (config, faults) = (config(dir.path(), 1, 8), Arc::new(SsdFaults::default()));
    let bench = open_of(&config, parts_on(&config, Arc::clone(&faults)).await, |_| {});
    bench.saved(1, 0..1).await;
    faults.hangs.store(true, Ordering::Relaxed);
    // Block 1 takes the space of block 0 in DRAM; the bytes of block 0 stay until they are written.
    assert_eq!(bench.save(2, 1..2, |_| BLOCK_BYTES).await, 1);
    let (reply, is_lendable) = fetch_in_place_flags(&bench.service, 3, 0..1).await;
    // A node with a hanging SSD cannot be shut down.
    faults.hangs.store(false, Ordering::Relaxed);
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Dram][..], vec![false]));
}

/// A load may end after its block ended and another tenant saved the same hash.
#[tokio::test]
async fn loaded_bytes_go_to_readers_of_their_tenant_only() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2, 8);
    let (mut store, _handle, _inbox) = Store::new(parts(&config).await);
    let (caller, tenant) = (CallerId(1), TenantId(2));
    let asker = Requester { lease: LeaseId(1), caller, tenant, category: Default::default() };
    let charge = store.parts.capacities.slots.largest();
    let offer = tier::SaveOffer { parent: None, first_offset_blocks: 0, hashes: &[hash(0)], charge };
    let offered = store.parts.book.offer(asker, offer, store.now()).unwrap();
    let [OfferOutcome::Wanted(key)] = offered[..] else { panic!("{offered:?}") };
    let mut waiting = [TenantId(1), TenantId(2)].map(|tenant| {
        let (tell, told) = oneshot::channel();
        let block = BlockVersion { hash: hash(0), generation: Generation(0) };
        store.loads.entry(block).or_default().waiting.push((tenant, tell));
        told
    });
    let slot = store.parts.arena.take(100, Purpose::Load).unwrap();
    store.loaded(key, hash(0), slot.freeze());
    assert_eq!(waiting[0].try_recv().unwrap(), Err(MissReason::NotHeld));
    assert_eq!(waiting[1].try_recv().unwrap().map(|bytes| bytes.len()), Ok(100));
    assert!(store.loads.is_empty());
}
