//! The certificate of a connection determines its service.

use std::sync::Mutex;

use kv_core::id::LeaseId;

use super::*;
use crate::{
    BoxFuture, Caller, CallerAdmission, FetchReply, FetchRequest, SaveOffer, SaveRequest, SaveSession,
};

/// Admits only the first caller, with a service of its own.
struct FirstCallerOnly {
    service: MemoryService,
    first: Mutex<Option<Arc<[u8]>>>,
}

impl BlockService for FirstCallerOnly {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        panic!("the unscoped service was called")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("the unscoped service was called")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        panic!("the unscoped service was called")
    }

    fn admit(&self, caller: &Caller) -> CallerAdmission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        let mut first = self.first.lock().unwrap();
        match &*first.get_or_insert_with(|| Arc::clone(leaf)) == leaf {
            true => CallerAdmission::Scoped { service: Arc::new(self.service.clone()), may_map: false },
            false => CallerAdmission::Refused,
        }
    }
}

#[tokio::test]
async fn admitted_callers_get_their_own_service_and_others_are_refused() {
    let authority = TestAuthority::new();
    let gate = Arc::new(FirstCallerOnly { service: MemoryService::default(), first: Mutex::default() });
    let server = TcpServer::bind(ANY, &authority.member(), gate.clone()).unwrap();
    let (address, ours) = (server.local_addr().to_string(), authority.member());
    let path = TcpDialer::new(&ours, TcpConfig::default()).dial(address.clone()).await.unwrap();
    path.release(LeaseId(7)).await.unwrap();
    assert_eq!(gate.service.released(), [LeaseId(7)]);
    let other = TcpDialer::new(&authority.member(), TcpConfig::default()).dial(address.clone()).await;
    assert!(matches!(other.err(), Some(PathError::Broken { .. } | PathError::Unreachable { .. })));
    let again = TcpDialer::new(&ours, TcpConfig::default()).dial(address).await.unwrap();
    again.ping().await.unwrap();
}
