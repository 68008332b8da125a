//! Callers with tenant certificates over RDMA: served for their tenants, by copies, beside callers
//! that read in place.

use std::collections::BTreeSet;

use kv_core::id::{LeaseId, TenantId};
use kvfleet_net::tls::{Role, role_of};
use kvfleet_transport::{
    BoxFuture, Caller, CallerAdmission, FetchReply, Frames, SaveAnswer, SaveOffer, SaveRefusal, SaveRequest,
    SaveSession,
};

use super::*;

/// One service for all tenants, scoped by each caller's certificate, as in a node.
#[derive(Clone)]
struct TenantGate {
    room: SharedArenaService,
    tenants: Option<BTreeSet<TenantId>>,
}

impl TenantGate {
    fn allows(&self, tenant: TenantId) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(&tenant))
    }
}

impl BlockService for TenantGate {
    fn fetch(&self, request: FetchRequest) -> BoxFuture<'_, FetchReply> {
        if self.allows(request.context.tenant) {
            return self.room.fetch(request);
        }
        let answer = FetchAnswer::Miss { reason: MissReason::NotHeld };
        let none = FetchReply { answer, frames: Frames::empty(), epoch: request.epoch, lendable: vec![] };
        Box::pin(std::future::ready(none))
    }

    fn save(&self, request: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        if self.allows(request.context.tenant) {
            return self.room.save(request);
        }
        Box::pin(std::future::ready((SaveOffer::Refused(SaveRefusal::IdentityDiffers), None)))
    }

    fn release(&self, lease: LeaseId) -> BoxFuture<'_, ()> {
        self.room.release(lease)
    }

    fn admit(&self, caller: &Caller) -> CallerAdmission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} must have a certificate") };
        match role_of(leaf) {
            Ok(role) => {
                let tenants = match role {
                    Role::Tenants(tenants) => Some(tenants),
                    _ => None,
                };
                let maps = tenants.is_none();
                CallerAdmission::Scoped {
                    service: Arc::new(TenantGate { tenants, ..self.clone() }),
                    may_map: maps,
                }
            }
            Err(_) => CallerAdmission::Refused,
        }
    }
}

#[tokio::test]
async fn a_tenant_certificate_serves_its_tenant_and_gets_copies() {
    let fabric = Fabric::default();
    let rails = [1, 2, 3].map(|number| Rdma::from_rail(fabric.rail(number), &small()).unwrap());
    let [node, member, tenant] = &rails;
    let memory = Arc::new(RdmaMemory::zeroed(64 << 20).unwrap());
    let arena = RdmaBufferPool::new(&memory, 0..memory.len_bytes());
    let low = arena.take(64).unwrap().address() & !0xFFF;
    let in_arena = low..low + (64 << 20);
    let room = SharedArenaService { inner: service_with_blocks(3, 100_000), arena, may_map: true };
    let authority = TestAuthority::new();
    let offer = RdmaServer::new(node, Some(&memory)).unwrap();
    let gate = Arc::new(TenantGate { room, tenants: None });
    let server = bind(&authority.member(), &TcpConfig::default(), offer, gate.clone());
    let address = server.local_addr().to_string();
    let dial = async |rdma: &Arc<Rdma>, identity: &Identity| {
        let dialer = RdmaDialer::new(rdma, identity, TcpConfig::default()).unwrap();
        dialer.dial(address.clone()).await.unwrap()
    };
    let member = dial(member, &authority.member()).await;
    let tenant = dial(tenant, &authority.holder(&Role::tenant(TenantId(3)))).await;
    let fetched = async |path: &dyn kvfleet_transport::Path, as_tenant: u32| {
        let mut request = fetch_request(&hashes(3));
        request.context.tenant = TenantId(as_tenant);
        let before = fabric.transfers().len();
        let answer = suite::fetch(path, request).await.unwrap();
        let read = fabric.transfers().split_off(before);
        (answer, read.len(), read.iter().filter(|read| in_arena.contains(&read.remote_address)).count())
    };
    let hit = FetchAnswer::Hit { tiers: in_dram(3) };
    for _ in 0..3 {
        let (answer, read, in_place) = fetched(&*tenant, 3).await;
        assert_eq!((&answer, in_place), (&hit, 0));
        assert!(read >= 3, "the card must bring copies: {read}");
        assert_eq!(fetched(&*tenant, 4).await.0, FetchAnswer::Miss { reason: MissReason::NotHeld });
        let (answer, _, in_place) = fetched(&*member, 4).await;
        assert_eq!((answer, in_place), (hit.clone(), 3), "a member reads in place");
    }
    let saved = async |as_tenant: u32, number: u32| {
        let mut request = save_request(&[hash(number)]);
        request.context.tenant = TenantId(as_tenant);
        suite::save(&*tenant, request, 1000).await.unwrap()
    };
    assert_eq!(saved(4, 8).await, SaveAnswer::Refused(SaveRefusal::IdentityDiffers));
    assert!(matches!(saved(3, 9).await, SaveAnswer::Done(done) if done.stored_blocks == 1));
    assert!(!gate.room.inner.holds(hash(8)) && gate.room.inner.holds(hash(9)));
}
