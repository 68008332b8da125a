//! The OpenAI-compatible door: requests over HTTP go to the engine that the router chooses, and answers come back as they are.
//!
//! `routes.rs` has the paths, `forward.rs` the way of a request, `relay.rs` that of its answer, `breaker.rs` and `backoff.rs` what happens when engines
//! fail. Not here: the prompt (`crate::prompt`), the choice (`crate::decide`).

mod backoff;
mod breaker;
mod config;
mod forward;
mod headers;
mod pair;
mod priority;
mod relay;
mod routes;
mod upstream;

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;

pub use config::{BreakerConfig, OpenAiConfig, RetryConfig};
pub use priority::Priorities;

use crate::config::DoorsConfig;
use crate::decide::Decider;
use crate::metrics::Metrics;
use crate::prompt::Reader;
use crate::serve::{self, Limits, Orders};
use crate::start::StartError;
use forward::Forward;
use routes::Door;

/// Numbers of requests begin below this by chance, so that those of a process that was started again are others, and all are whole
/// numbers in JSON.
const FIRST_NUMBER_BITS: u32 = 52;

/// How long the head of a request may take, and a connection stay idle.
const HEAD: Duration = Duration::from_secs(75);

/// The door, open.
#[derive(Debug)]
pub(crate) struct OpenAi {
    address: SocketAddr,
    door: Arc<Door>,
    orders: Orders,
    notice: Duration,
    drain: Duration,
}

impl OpenAi {
    /// Opens it.
    pub(crate) async fn open(
        config: &DoorsConfig,
        decider: Decider,
        reader: Arc<Reader>,
        metrics: Metrics,
    ) -> Result<OpenAi, StartError> {
        let own = &config.openai;
        let listen = |cause| StartError::Listen { key: "openai.listen", address: own.listen.clone(), cause };
        let listener = TcpListener::bind(&own.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let seed = || RandomState::new().hash_one(address);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let first_number = seed() >> (u64::BITS - FIRST_NUMBER_BITS);
        let forward = Forward::new(decider, (own.clone(), config.priorities), metrics.clone(), seed());
        let door = Arc::new(Door::new(config, forward, reader, metrics, first_number, created));
        let orders = Orders::default();
        let limits = Limits { connections: own.connections_max, head: HEAD, unread: own.idle() };
        let serving = serve::serve(listener, routes::router(door.clone()), limits, orders.clone());
        tokio::spawn(serving);
        let (notice, drain) =
            (Duration::from_millis(own.drain_notice_ms), Duration::from_millis(own.drain_ms));
        Ok(OpenAi { address, door, orders, notice, drain })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Says that it is not ready, takes no more connections after a while, and waits for what is under way, for a while.
    pub(crate) async fn shutdown(self) {
        self.door.drain();
        tokio::time::sleep(self.notice).await;
        self.orders.close.cancel();
        self.orders.tasks.close();
        if tokio::time::timeout(self.drain, self.orders.tasks.wait()).await.is_err() {
            let running = self.orders.tasks.len();
            tracing::warn!(running, "requests are still under way and are ended (doors.openai.drain_ms)");
            self.orders.abort.cancel();
            self.orders.tasks.wait().await;
        }
    }
}

impl Drop for OpenAi {
    fn drop(&mut self) {
        self.orders.close.cancel();
        self.orders.abort.cancel();
    }
}
