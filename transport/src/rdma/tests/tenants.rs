//! Callers whose certificates name tenants, over RDMA: answered for theirs, and by copy beside others who read in place.

use std::collections::BTreeSet;

use kv_core::id::{LeaseId, TenantId};
use kvfleet_proto::tls::tenants_of;

use super::*;
use crate::{
    Admission, BoxFuture, Caller, FetchReply, Frames, SaveAnswer, SaveOffer, SaveRefusal, SaveRequest,
    SaveSession,
};

/// One room for all, into which callers come as their certificates say: as a node does it.
#[derive(Clone)]
struct Door {
    room: LendingService,
    tenants: Option<BTreeSet<TenantId>>,
}

impl Door {
    fn has(&self, tenant: TenantId) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(&tenant))
    }
}

impl BlockService for Door {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        if self.has(request.asker.tenant) {
            return self.room.fetch(request);
        }
        let answer = FetchAnswer::Miss { reason: MissReason::NotHeld };
        let none = FetchReply { answer, frames: Frames::none(), epoch: request.epoch, lendable: vec![] };
        Box::pin(std::future::ready(none))
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        if self.has(request.asker.tenant) {
            return self.room.save(request);
        }
        Box::pin(std::future::ready((SaveOffer::Refused(SaveRefusal::IdentityDiffers), None)))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.room.release(lease)
    }

    fn admit(&self, caller: &Caller) -> Admission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        match tenants_of(leaf) {
            Ok(tenants) => {
                let maps = tenants.is_none();
                Admission::Scoped { service: Arc::new(Door { tenants, ..self.clone() }), maps }
            }
            Err(_) => Admission::Refused,
        }
    }
}

#[tokio::test]
async fn a_tenants_certificate_is_answered_for_its_tenant_and_reads_nothing_in_place() {
    let fabric = Fabric::default();
    let rails = [1, 2, 3].map(|number| Rdma::over(fabric.rail(number), &small()).unwrap());
    let [node, member, tenant] = &rails;
    let memory = Arc::new(Memory::zeroed(64 << 20).unwrap());
    let arena = Pool::new(&memory, 0..memory.len_bytes());
    let low = arena.take(64).unwrap().address() & !0xFFF;
    let in_arena = low..low + (64 << 20);
    let room = LendingService { inner: holding(3, 100_000), arena, maps: true };
    let authority = Authority::new();
    let offer = RdmaOffer::new(node, Some(&memory)).unwrap();
    let door = Arc::new(Door { room, tenants: None });
    let server = bind(&authority.member(), &TcpConfig::default(), offer, door.clone());
    let address = server.local_addr().to_string();
    let dial = async |rdma: &Arc<Rdma>, identity: &Identity| {
        let dialer = RdmaDialer::new(rdma, identity, TcpConfig::default()).unwrap();
        dialer.dial(address.clone()).await.unwrap()
    };
    let member = dial(member, &authority.member()).await;
    let tenant = dial(tenant, &authority.named("tenant-3.kvfleet")).await;
    let fetched = async |path: &dyn crate::Path, as_tenant: u32| {
        let mut request = fetch_request(&hashes(3));
        request.asker.tenant = TenantId(as_tenant);
        let before = fabric.transfers().len();
        let answer = suite::fetch(path, request).await.unwrap();
        let read = fabric.transfers().split_off(before);
        (answer, read.len(), read.iter().filter(|read| in_arena.contains(&read.remote_address)).count())
    };
    let hit = FetchAnswer::Hit { tiers: in_dram(3) };
    for _ in 0..3 {
        let (answer, read, in_place) = fetched(&*tenant, 3).await;
        assert_eq!((&answer, in_place), (&hit, 0));
        assert!(read >= 3, "the card brings copies: {read}");
        assert_eq!(fetched(&*tenant, 4).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
        let (answer, _, in_place) = fetched(&*member, 4).await;
        assert_eq!((answer, in_place), (hit.clone(), 3), "a member reads in place");
    }
    let saved = async |as_tenant: u32, number: u32| {
        let mut request = save_request(&[hash(number)]);
        request.asker.tenant = TenantId(as_tenant);
        suite::save(&*tenant, request, 1000).await.unwrap()
    };
    assert_eq!(saved(4, 8).await, SaveAnswer::Refused(SaveRefusal::IdentityDiffers));
    assert!(matches!(saved(3, 9).await, SaveAnswer::Done(done) if done.stored_blocks == 1));
    assert!(!door.room.inner.holds(hash(8)) && door.room.inner.holds(hash(9)));
}
