//! The behaviour suite over shared memory, in place and by copies, and what only this path has.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use tokio::runtime::Handle;

use super::*;
use crate::suite::{BumpArena, MemoryService, Pair, fetch, fetch_request, frame, hash, hashes, in_dram};
use crate::{
    Admission, BlockService, BoxFuture, Caller, Dialer, FetchAnswer, FetchReply, FetchRequest, Path,
};
use crate::{SaveOffer, SaveRequest, SaveSession, SharedArena};

mod hostile;
mod layered;
mod loans;
mod saves;
mod stalls;

/// How the suite's nodes are known to others.
const ADDRESS: &str = "node.example:7000";

/// Room for the suite's largest case: two blocks of 9 MiB, and what is saved.
const ARENA_BYTES: u64 = 64 << 20;

/// Lets every client map, or none, or lets none in.
struct Door {
    service: Arc<dyn BlockService>,
    maps: bool,
    is_open: Arc<AtomicBool>,
}

impl BlockService for Door {
    fn admit(&self, caller: &Caller) -> Admission {
        let own = rustix::process::geteuid().as_raw();
        assert!(matches!(caller, Caller::Local { uid, .. } if *uid == own), "{caller:?}");
        match self.is_open.load(Ordering::Relaxed) {
            true => Admission::Scoped { service: Arc::clone(&self.service), maps: self.maps },
            false => Admission::Refused,
        }
    }

    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        unreachable!("connections are answered by what admitted them")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        unreachable!("connections are answered by what admitted them")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        unreachable!("connections are answered by what admitted them")
    }
}

fn server_config() -> ShmServerConfig {
    ShmServerConfig {
        address: ADDRESS.to_owned(),
        frame_bytes_max: 10 << 20,
        lent_bytes_max: 1 << 30,
        tray_bytes_max: 1 << 30,
        lease: Duration::from_secs(60),
        stall_timeout: Duration::from_secs(10),
        awake: AWAKE,
        serves_others: false,
    }
}

/// A node of the suite at a socket of its own.
pub(crate) struct Node {
    dir: tempfile::TempDir,
    server: Option<ShmServer>,
    /// Whether it lets clients in.
    is_open: Arc<AtomicBool>,
}

impl Node {
    fn start(
        service: Arc<dyn BlockService>,
        arena: Option<Arc<BumpArena>>,
        config: ShmServerConfig,
        is_open: bool,
    ) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Node { dir, server: None, is_open: Arc::new(AtomicBool::new(is_open)) };
        node.bind(service, arena, config);
        node
    }

    /// One of the usual settings that lets everybody in.
    pub(crate) fn holding(service: Arc<MemoryService>) -> Node {
        let arena = service.arena();
        Node::start(service, arena, server_config(), true)
    }

    /// Ends, and starts anew at the same socket.
    pub(crate) async fn restart(&mut self, service: Arc<MemoryService>) {
        if let Some(server) = self.server.take() {
            server.close().await;
        }
        let arena = service.arena();
        self.bind(service, arena, server_config());
    }

    fn bind(
        &mut self,
        service: Arc<dyn BlockService>,
        arena: Option<Arc<BumpArena>>,
        config: ShmServerConfig,
    ) {
        let maps = arena.is_some();
        let door = Arc::new(Door { service, maps, is_open: Arc::clone(&self.is_open) });
        let ends = ShmEnds { quick: Handle::current(), may_move: false, bulk: Handle::current() };
        let arena = arena.map(|arena| arena as Arc<dyn SharedArena>);
        let socket = socket_path(self.dir.path(), ADDRESS);
        self.server = Some(ShmServer::bind(&socket, config, arena, door, ends).unwrap());
    }

    fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    pub(crate) async fn dial(&self) -> Result<Arc<dyn Path>, crate::PathError> {
        ShmDialer::new(ShmConfig::new(self.dir())).dial(ADDRESS.to_owned()).await
    }

    fn numbers(&self) -> ShmNumbers {
        self.server.as_ref().unwrap().numbers()
    }

    /// Waits until the node has noticed what a client did.
    async fn until(&self, what: impl Fn(ShmNumbers) -> bool) {
        let patience = tokio::time::Instant::now() + crate::suite::PATIENCE;
        while !what(self.numbers()) {
            assert!(tokio::time::Instant::now() < patience, "{:?}", self.numbers());
            tokio::task::yield_now().await;
        }
    }
}

/// The suite with everything read in place.
mod mapped {
    use super::*;

    pub(super) async fn pair(service: Arc<MemoryService>) -> Pair {
        let node = Node::holding(service);
        let path = node.dial().await.unwrap();
        Pair { path, keep: Box::new(node) }
    }

    crate::behaviour_suite!(pair; MemoryService::new(Some(BumpArena::new(ARENA_BYTES))));
    crate::behaviour_suite!(pair; MemoryService::new(Some(BumpArena::new(ARENA_BYTES))); layers_come_one_after_the_other, slices_leave_before_the_last_layer);
}

/// The suite with everything copied.
mod tray {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> Pair {
        let node = Node::start(service, None, server_config(), true);
        let path = node.dial().await.unwrap();
        Pair { path, keep: Box::new(node) }
    }

    crate::behaviour_suite!(pair);
    crate::behaviour_suite!(pair; MemoryService::default(); slices_leave_before_the_last_layer);
}
