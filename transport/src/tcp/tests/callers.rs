//! Whom a server answers: the certificate of the connection says it.

use std::sync::Mutex;

use kv_core::id::LeaseId;

use super::*;
use crate::{Admission, BoxFuture, Caller, FetchReply, FetchRequest, SaveOffer, SaveRequest, SaveSession};

/// Serves only the first caller that comes, from a service of its own.
struct FirstOnly {
    room: MemoryService,
    first: Mutex<Option<Arc<[u8]>>>,
}

impl BlockService for FirstOnly {
    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        panic!("nobody is served at the door")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        panic!("nobody is served at the door")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        panic!("nobody is served at the door")
    }

    fn admit(&self, caller: &Caller) -> Admission {
        let Caller::Certified(leaf) = caller else { panic!("{caller:?} came over the network") };
        let mut first = self.first.lock().unwrap();
        match &*first.get_or_insert_with(|| Arc::clone(leaf)) == leaf {
            true => Admission::Scoped { service: Arc::new(self.room.clone()), maps: false },
            false => Admission::Refused,
        }
    }
}

#[tokio::test]
async fn a_caller_is_answered_by_the_service_it_was_admitted_to_and_others_are_refused() {
    let authority = Authority::new();
    let door = Arc::new(FirstOnly { room: MemoryService::default(), first: Mutex::default() });
    let server = TcpServer::bind(ANY, &authority.member(), door.clone()).unwrap();
    let (address, ours) = (server.local_addr().to_string(), authority.member());
    let path = TcpDialer::new(&ours, TcpConfig::default()).dial(address.clone()).await.unwrap();
    path.release(LeaseId(7)).await.unwrap();
    assert_eq!(door.room.released(), [LeaseId(7)]);
    let other = TcpDialer::new(&authority.member(), TcpConfig::default()).dial(address.clone()).await;
    assert!(matches!(other.err(), Some(PathError::Broken { .. } | PathError::Unreachable { .. })));
    let again = TcpDialer::new(&ours, TcpConfig::default()).dial(address).await.unwrap();
    again.ping().await.unwrap();
}
