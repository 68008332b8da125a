//! Several callers and tenants at one store: whose lease is whose, what may be lent, and frames that change while they
//! are saved.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use kv_core::id::{CallerId, Generation, LeaseId, TenantId, Tier};
use kv_core::tier::{Asker, Offer, Offered};
use kvfleet_errors_doc::says;
use kvfleet_proto::frame::{Copies, Unsettled};
use kvfleet_proto::tls::SERVER_NAME;
use kvfleet_transport::{
    Admission, BlockService, Caller, FetchAnswer, FetchReply, MissReason, SaveOffer, SaveRefusal,
};
use rcgen::{CertificateParams, KeyPair};
use tokio::sync::oneshot;

use super::tests::{
    BLOCK_BYTES, Bench, PATIENCE, block_on_ssd, config, fetch_request, frame, hash, open, open_of, parts,
    parts_on, save_request,
};
use super::*;
use crate::NodeConfig;
use crate::arena::Purpose;
use crate::serve::Service;
use crate::start;
use crate::test_log::Log;
use crate::tiers::ssd::SsdFaults;

fn certified(byte: u8) -> Caller {
    Caller::Certified([byte; 40].into())
}

/// A caller with a certificate of these names.
fn named(names: &[&str]) -> Caller {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let certificate =
        CertificateParams::new(names).unwrap().self_signed(&KeyPair::generate().unwrap()).unwrap();
    Caller::Certified(certificate.der().to_vec().into())
}

/// What the node answers this caller by.
fn admitted(bench: &Bench, caller: &Caller) -> Arc<dyn BlockService> {
    match bench.service.admit(caller) {
        Admission::Scoped { service, maps: false } => service,
        _ => panic!("{caller:?} is not admitted as it should be"),
    }
}

async fn is_wanted(service: &dyn BlockService, lease: u64, number: u64) -> bool {
    let (offer, session) = service.save(save_request(lease, number..number + 1)).await;
    drop(session);
    matches!(offer, SaveOffer::Wanted(wanted) if wanted == [true])
}

#[tokio::test]
async fn a_lease_is_its_callers_own() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 1, 0)).await;
    let callers = [named(&[SERVER_NAME]), named(&[SERVER_NAME])];
    let [ours, again, theirs] = [0, 0, 1].map(|at: usize| admitted(&bench, &callers[at]));
    bench.saved(1, 0..1).await;
    assert_eq!(ours.fetch(fetch_request(7, 0..1)).await.answer, FetchAnswer::Hit { tiers: vec![Tier::Dram] });
    theirs.release(LeaseId(7)).await;
    bench.service.release(LeaseId(7)).await;
    assert!(!is_wanted(&*theirs, 8, 5).await, "block 0 is held, by nobody who released it");
    again.release(LeaseId(7)).await;
    assert!(is_wanted(&*theirs, 9, 5).await);
}

#[tokio::test]
async fn processes_of_this_host_are_not_served_before_somebody_says_so_and_this_one_is() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 1, 0)).await;
    let local = Caller::Local { uid: 0, pid: 1, connection: 1 };
    assert!(matches!(bench.service.admit(&local), Admission::Refused));
    assert!(matches!(bench.service.admit(&Caller::Own), Admission::Same));
}

#[tokio::test]
async fn a_tenant_outside_a_callers_scope_is_a_miss_and_refused_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 4, 0)).await, Log::start());
    bench.saved(1, 0..1).await;
    let service = bench.service.scoped(&certified(1), Some([TenantId(3), TenantId(4)].into()));
    let answer = service.fetch(fetch_request(2, 0..1)).await.answer;
    assert_eq!(answer, FetchAnswer::Miss { reason: MissReason::NotHeld });
    let (offer, session) = service.save(save_request(2, 5..6)).await;
    assert_eq!(offer, SaveOffer::Refused(SaveRefusal::IdentityDiffers));
    assert!(session.is_none());
    assert_eq!(bench.status().await.leases, 0, "nothing of it came to the book");
    assert_eq!(log.count("asks as a tenant"), 2);
    says("a caller that names a tenant not its own, in the log", &log.line("asks as a tenant"), &[]);
    let mut own = save_request(2, 5..6);
    own.asker.tenant = TenantId(4);
    assert!(matches!(service.save(own).await.0, SaveOffer::Wanted(_)));
}

#[tokio::test]
async fn a_certificate_names_the_tenants_of_its_caller_and_who_has_some_maps_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 4, 0)).await;
    let lending = bench.service.clone().lending_in_place(true);
    let of = |names: &[&str]| match lending.admit(&named(names)) {
        Admission::Scoped { service, maps } => Some((service, maps)),
        Admission::Refused => None,
        Admission::Same => panic!("a caller is this process"),
    };
    let wants = async |service: &dyn BlockService, tenant: u32, number: u64| {
        let mut request = save_request(u64::from(tenant), number..number + 1);
        request.asker.tenant = TenantId(tenant);
        matches!(service.save(request).await.0, SaveOffer::Wanted(_))
    };
    let (member, maps) = of(&[SERVER_NAME, "node-1"]).unwrap();
    assert!(maps && wants(&*member, 0, 1).await && wants(&*member, 4, 2).await);
    let (some, maps) = of(&["tenant-3.kvfleet", "tenant-5.kvfleet"]).unwrap();
    assert!(!maps, "the memory is every tenant's");
    let mut wanted = vec![];
    for tenant in 0..8 {
        if wants(&*some, tenant, 10 + u64::from(tenant)).await {
            wanted.push(tenant);
        }
    }
    assert_eq!(wanted, [3, 5]);
}

#[tokio::test]
async fn a_certificate_that_does_not_say_whose_it_is_is_refused_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let (bench, log) = (open(&config(dir.path(), 1, 0)).await, Log::start());
    let refused = |caller: &Caller| assert!(matches!(bench.service.admit(caller), Admission::Refused));
    let said = |word: &str| log.line(word);
    refused(&named(&[SERVER_NAME, "tenant-03.kvfleet"]));
    says("a caller whose certificate names a tenant wrongly, in the log", &said("nor a tenant's"), &[]);
    refused(&named(&[SERVER_NAME, "tenant-3.kvfleet"]));
    says("a caller whose certificate names tenants and the cluster, in the log", &said("could pose"), &[]);
    refused(&named(&["node-1"]));
    says("a caller whose certificate names neither, in the log", &said("it names neither"), &[]);
    refused(&certified(1));
    assert_eq!(log.count("cannot be read"), 1);
    for _ in 0..100 {
        refused(&certified(1));
    }
    assert_eq!(log.count("a certificate is refused"), 16, "who comes again and again does not fill the log");
}

#[tokio::test]
async fn a_caller_that_releases_nothing_leaves_leases_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&NodeConfig { lease_ms: 3_600_000, ..config(dir.path(), 1, 0) }).await;
    bench.saved(1, 0..1).await;
    let callers = [named(&[SERVER_NAME]), named(&[SERVER_NAME])];
    let [ours, theirs, again] = [0, 1, 0].map(|at: usize| admitted(&bench, &callers[at]));
    let is_busy = async |service: &dyn BlockService, lease: u64| {
        matches!(service.fetch(fetch_request(lease, 0..1)).await.answer, FetchAnswer::Busy { .. })
    };
    let mut taken = 0;
    while !is_busy(&*ours, taken).await {
        taken += 1;
    }
    let left = start::LEASES_MAX as u64 - taken - 1; // and one of this process
    assert!(taken - left <= 1, "it may have half: {taken}");
    assert!(is_busy(&*again, taken + 1).await, "over whichever connection");
    assert!(!is_busy(&*again, 7).await, "what it has goes on");
    assert!(!is_busy(&*theirs, 7).await && !is_busy(&bench.service, 7).await);
}

#[tokio::test]
async fn renewing_reaches_the_lease_of_the_caller() {
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
    let Some(Ask::Fetch { asker, .. }) = inbox.recv().await else { panic!("no fetch") };
    asking.abort();
    service.renew(LeaseId(7));
    let Ok(Ask::Renew { lease }) = inbox.try_recv() else { panic!("no renewal") };
    assert_eq!(lease, asker.lease);
    // As long as it is renewed it goes on, and who uses it does so often enough.
    assert!(2 * service.renew_every() < Duration::from_millis(config.lease_ms));
    let later = |store: &mut Store, ms: u64| {
        store.parts.started -= Duration::from_millis(ms);
        store.tick();
        store.parts.book.lease_count()
    };
    let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &[], charge: Default::default() };
    let now = store.now();
    store.parts.book.offer(asker, offer, now).unwrap();
    for _ in 0..3 {
        assert_eq!(later(&mut store, config.lease_ms / 2), 1);
        store.answer(Ask::Renew { lease });
    }
    assert_eq!(later(&mut store, config.lease_ms + 1), 0);
}

/// Bytes that are others after so many loads of any of them.
struct Changing {
    before: Bytes,
    after: Bytes,
    loads_before: usize,
    loads: AtomicUsize,
}

impl Changing {
    fn of(before: Bytes, loads_before: usize) -> Arc<Changing> {
        let after = before.iter().map(|byte| !byte).collect();
        Arc::new(Changing { before, after, loads_before, loads: AtomicUsize::new(0) })
    }

    fn now(&self) -> &Bytes {
        let is_before = self.loads.fetch_add(1, Ordering::Relaxed) < self.loads_before;
        if is_before { &self.before } else { &self.after }
    }
}

impl Unsettled for Changing {
    fn len_bytes(&self) -> usize {
        self.before.len()
    }

    fn copy(&self, at: usize, to: &mut [u8]) {
        self.now().copy(at, to);
    }

    fn copy_crc32c(&self, at: usize, to: &mut [u8], copies: &Copies) -> u32 {
        self.now().copy_crc32c(at, to, copies)
    }
}

#[tokio::test]
async fn a_frame_that_changes_while_it_is_saved_is_what_was_copied_or_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 8, 0)).await;
    // The start of the header, the rest of it, and the one slice.
    const LOADS: usize = 3;
    let (_, session) = bench.service.save(save_request(1, 0..6)).await;
    let mut session = session.unwrap();
    let whole = |number| frame(number, BLOCK_BYTES).bytes;
    for number in 0..=LOADS {
        let changing = Changing::of(whole(number as u64), number);
        session.put_unsettled(Arc::clone(&changing) as Arc<dyn Unsettled>).await;
        assert!(changing.loads.load(Ordering::Relaxed) <= LOADS);
    }
    session.put_unsettled(Arc::new(whole(77))).await;
    session.put_unsettled(Arc::new(Bytes::from([&whole(5)[..], b"x"].concat()))).await;
    let done = session.finish().await;
    assert_eq!((done.stored_blocks, done.refused_blocks), (1, 5), "only what changed after its copy");
    bench.service.release(LeaseId(1)).await;
    assert_eq!(bench.status().await.tiers[0].blocks, 1, "room of refused blocks is free again");
    assert_eq!(bench.arena.used_bytes(), crate::arena::slot_bytes(whole(0).len()));
    assert_eq!(bench.fetch(2, LOADS as u64..LOADS as u64 + 1).await.1, 1);
    for number in [0, 1, 2, 4, 5] {
        assert!(is_wanted(&bench.service, 3, number).await, "block {number} was aborted");
    }
}

async fn lendable(service: &Service, lease: u64, numbers: std::ops::Range<u64>) -> (FetchReply, Vec<bool>) {
    let reply = service.fetch(fetch_request(lease, numbers)).await;
    let lendable = reply.lendable.clone();
    (reply, lendable)
}

#[tokio::test]
async fn what_has_its_place_in_dram_may_be_lent_loaded_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let bench = open(&config(dir.path(), 2, 8)).await;
    bench.saved(1, 0..2).await;
    let (reply, is_lendable) = lendable(&bench.service, 2, 0..3).await;
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Dram; 2][..], vec![true, true]));
    bench.service.release(LeaseId(2)).await;
    bench.saved(3, 5..7).await;
    let slot = crate::arena::slot_bytes(frame(0, BLOCK_BYTES).bytes.len());
    drop(reply);
    bench
        .until("0 and 1 are on SSD only", |status, used| status.tiers[1].blocks == 2 && used == 2 * slot)
        .await;
    let (reply, is_lendable) = lendable(&bench.service, 4, 0..2).await;
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Ssd; 2][..], vec![true, true]), "they come up");
    assert_eq!(bench.service.fetch(fetch_request(5, 90..91)).await.lendable, [false; 0]);
}

#[tokio::test]
async fn what_is_read_past_dram_is_not_lent() {
    let dir = tempfile::tempdir().unwrap();
    let bench = block_on_ssd(&config(dir.path(), 1, 8)).await;
    let (mut reply, is_lendable) = lendable(&bench.service, 4, 0..1).await;
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Ssd][..], vec![false]));
    assert!(
        tokio::time::timeout(PATIENCE, reply.frames.next()).await.unwrap().is_some(),
        "it is read all the same"
    );
}

#[tokio::test]
async fn what_is_on_its_way_out_is_not_lent() {
    let dir = tempfile::tempdir().unwrap();
    let (config, faults) = (config(dir.path(), 1, 8), Arc::new(SsdFaults::default()));
    let bench = open_of(&config, parts_on(&config, Arc::clone(&faults)).await, |_| {});
    bench.saved(1, 0..1).await;
    faults.hangs.store(true, Ordering::Relaxed);
    // It takes the place of block 0 in DRAM, and keeps it; whose bytes are there until they are written.
    assert_eq!(bench.save(2, 1..2, |_| BLOCK_BYTES).await, 1);
    let (reply, is_lendable) = lendable(&bench.service, 3, 0..1).await;
    // Nobody ends a node whose SSD hangs.
    faults.hangs.store(false, Ordering::Relaxed);
    assert_eq!((reply.answer.tiers(), is_lendable), (&[Tier::Dram][..], vec![false]));
}

/// A load may end after its block is over and another tenant took the hash.
#[tokio::test]
async fn bytes_that_were_loaded_go_to_their_tenants_readers_only() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path(), 2, 8);
    let (mut store, _handle, _inbox) = Store::new(parts(&config).await);
    let (caller, tenant) = (CallerId(1), TenantId(2));
    let asker = Asker { lease: LeaseId(1), caller, tenant, category: Default::default() };
    let charge = store.parts.capacities.slots.largest();
    let offer = Offer { parent: None, first_offset_blocks: 0, hashes: &[hash(0)], charge };
    let offered = store.parts.book.offer(asker, offer, store.now()).unwrap();
    let [Offered::Wanted(key)] = offered[..] else { panic!("{offered:?}") };
    let mut waiting = [TenantId(1), TenantId(2)].map(|tenant| {
        let (tell, told) = oneshot::channel();
        store.loads.entry((hash(0), Generation(0))).or_default().waiting.push((tenant, tell));
        told
    });
    let slot = store.parts.arena.take(100, Purpose::Load).unwrap();
    store.loaded(key, hash(0), slot.freeze());
    assert_eq!(waiting[0].try_recv().unwrap(), Err(MissReason::NotHeld));
    assert_eq!(waiting[1].try_recv().unwrap().map(|bytes| bytes.len()), Ok(100));
    assert!(store.loads.is_empty());
}
