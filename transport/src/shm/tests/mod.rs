//! The behaviour suite over shared memory, in place and by copies, and tests of this path alone.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kv_core::id::LeaseId;
use tokio::runtime::Handle;

use super::*;
use crate::suite::{BumpArena, MemoryService, SuitePath, fetch, fetch_request, frame, hash, hashes, in_dram};
use crate::{
    BlockService, BoxFuture, Caller, CallerAdmission, Dialer, FetchAnswer, FetchReply, FetchRequest, Path,
};
use crate::{SaveOffer, SaveRequest, SaveSession, SharedArena};

mod eager_saves;
mod grants;
mod hostile;
mod layered_saves;
mod stalls;

/// Address of the suite's nodes.
const ADDRESS: &str = "node.example:7000";

/// Size for the suite's largest case: two blocks of 9 MiB, and the saved ones.
const ARENA_BYTES: u64 = 64 << 20;

/// Admits every client with or without mapping, or none.
struct TestGate {
    service: Arc<dyn BlockService>,
    maps_arena: bool,
    is_open: Arc<AtomicBool>,
}

impl BlockService for TestGate {
    fn admit(&self, caller: &Caller) -> CallerAdmission {
        let own = rustix::process::geteuid().as_raw();
        assert!(matches!(caller, Caller::Local { uid, .. } if *uid == own), "{caller:?}");
        match self.is_open.load(Ordering::Relaxed) {
            true => CallerAdmission::Scoped { service: Arc::clone(&self.service), may_map: self.maps_arena },
            false => CallerAdmission::Refused,
        }
    }

    fn fetch(&self, _: FetchRequest) -> BoxFuture<'_, FetchReply> {
        unreachable!("the admitting service serves the connection")
    }

    fn save(&self, _: SaveRequest) -> BoxFuture<'_, (SaveOffer, Option<Box<dyn SaveSession>>)> {
        unreachable!("the admitting service serves the connection")
    }

    fn release(&self, _: LeaseId) -> BoxFuture<'_, ()> {
        unreachable!("the admitting service serves the connection")
    }
}

fn server_config() -> ShmServerConfig {
    ShmServerConfig {
        address: ADDRESS.to_owned(),
        frame_bytes_max: 10 << 20,
        granted_bytes_max: 1 << 30,
        bounce_bytes_max: 1 << 30,
        lease: Duration::from_secs(60),
        stall_timeout: Duration::from_secs(10),
        spin_wait: SPIN_WAIT,
        serves_other_users: false,
    }
}

/// A node of the suite with its own socket.
pub(crate) struct ShmTestNode {
    dir: tempfile::TempDir,
    server: Option<ShmServer>,
    /// Whether it admits clients.
    is_open: Arc<AtomicBool>,
}

impl ShmTestNode {
    fn start(
        service: Arc<dyn BlockService>,
        arena: Option<Arc<BumpArena>>,
        config: ShmServerConfig,
        is_open: bool,
    ) -> ShmTestNode {
        let dir = tempfile::tempdir().unwrap();
        let mut node = ShmTestNode { dir, server: None, is_open: Arc::new(AtomicBool::new(is_open)) };
        node.bind(service, arena, config);
        node
    }

    /// A node with the usual settings that admits every client.
    pub(crate) fn serving(service: Arc<MemoryService>) -> ShmTestNode {
        let arena = service.arena();
        ShmTestNode::start(service, arena, server_config(), true)
    }

    /// Stops, and starts again at the same socket.
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
        let gate = Arc::new(TestGate { service, maps_arena: maps, is_open: Arc::clone(&self.is_open) });
        let ends = ShmRuntimes { event_loop: Handle::current(), may_move: false, bulk: Handle::current() };
        let arena = arena.map(|arena| arena as Arc<dyn SharedArena>);
        let socket = socket_path(self.dir.path(), ADDRESS);
        self.server = Some(ShmServer::bind(&socket, config, arena, gate, ends).unwrap());
    }

    fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    pub(crate) async fn dial(&self) -> Result<Arc<dyn Path>, crate::PathError> {
        ShmDialer::new(ShmConfig::new(self.dir())).dial(ADDRESS.to_owned()).await
    }

    fn stats(&self) -> ShmStats {
        self.server.as_ref().unwrap().stats()
    }

    /// Waits until the node's statistics satisfy `what`.
    async fn until(&self, what: impl Fn(ShmStats) -> bool) {
        let patience = tokio::time::Instant::now() + crate::suite::PATIENCE;
        while !what(self.stats()) {
            assert!(tokio::time::Instant::now() < patience, "{:?}", self.stats());
            tokio::task::yield_now().await;
        }
    }
}

/// The suite with all blocks read in place.
mod mapped {
    use super::*;

    pub(super) async fn pair(service: Arc<MemoryService>) -> SuitePath {
        let node = ShmTestNode::serving(service);
        let path = node.dial().await.unwrap();
        SuitePath { path, keep: Box::new(node) }
    }

    crate::behaviour_suite!(pair; MemoryService::new(Some(BumpArena::new(ARENA_BYTES))));
    crate::behaviour_suite!(
        pair;
        MemoryService::new(Some(BumpArena::new(ARENA_BYTES)));
        layers_come_one_after_the_other, slices_leave_before_the_last_layer
    );
}

/// The suite with all blocks copied.
mod copied {
    use super::*;

    async fn pair(service: Arc<MemoryService>) -> SuitePath {
        let node = ShmTestNode::start(service, None, server_config(), true);
        let path = node.dial().await.unwrap();
        SuitePath { path, keep: Box::new(node) }
    }

    crate::behaviour_suite!(pair);
    crate::behaviour_suite!(pair; MemoryService::default(); slices_leave_before_the_last_layer);
}
