//! OpenAI-compatible API: forwards requests to the engine that the router chooses, and relays
//! answers unchanged.
//!
//! - `routes.rs`: paths and admission; `body.rs`: receiving bodies.
//! - `forward.rs`: sending a request, with retries; `breaker.rs` and `backoff.rs` support it.
//! - `relay.rs`: relaying an answer.
//!
//! Not here: keys of callers (`crate::keys`), reading prompts (`crate::prompt`), and the choice
//! (`crate::decide`).

mod backoff;
mod body;
mod breaker;
mod config;
mod forward;
mod headers;
mod pair;
mod priority;
mod relay;
mod routes;
mod steering;
mod upstream;

use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;

pub use config::{BreakerConfig, ListenerTlsConfig, OpenAiConfig, RetryConfig};
pub use priority::PriorityOrder;

use crate::config::GatewayConfig;
use crate::decide::Decider;
use crate::keys::{KeyReload, KeyRing, KeySource, keep_reloaded};
use crate::metrics::OpenAiMetrics;
use crate::prompt::RequestReader;
use crate::start::StartError;
use crate::upstream::EngineAccess;
use forward::Forwarder;
use kvfleet_net::http::{self, ConnectionLimits, ServerControl, WhenFull};
use kvfleet_net::tls::{Renewal, ServerCertificate, keep_renewed};
use kvfleet_router::Tenants;
use routes::ApiState;
use upstream::EngineClient;

/// Bits of the random first request number. It differs after a restart, and numbers stay exact in
/// JSON.
const FIRST_NUMBER_BITS: u32 = 52;

/// Longest time for the head of a request, and longest idle time of a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(75);

/// A running API server.
#[derive(Debug)]
pub(crate) struct OpenAiServer {
    address: SocketAddr,
    api: Arc<ApiState>,
    control: ServerControl,
    drain_notice: Duration,
    drain_timeout: Duration,
}

/// Loads the keys of callers; `None` if no keys are needed.
fn load_keys(
    config: &OpenAiConfig,
    tenants: &Arc<Tenants>,
) -> Result<Option<(Arc<KeyRing>, KeyReload)>, StartError> {
    if config.api_keys_file.as_os_str().is_empty() {
        return Ok(None);
    }
    let source = KeySource {
        path: config.api_keys_file.clone(),
        tenants: Arc::clone(tenants),
        body_bytes_max: config.body_bytes_max,
    };
    Ok(Some(KeyRing::load(source)?))
}

impl OpenAiServer {
    /// Starts the server.
    pub(crate) async fn open(
        config: &GatewayConfig,
        decider: Decider,
        access: EngineAccess,
        reader: Arc<RequestReader>,
        metrics: OpenAiMetrics,
    ) -> Result<OpenAiServer, StartError> {
        let openai = &config.openai;
        let (keys, reload) = load_keys(openai, reader.tenants())?.unzip();
        let has_tls = openai.tls.is_enabled();
        let certificate =
            has_tls.then(|| ServerCertificate::load(&openai.tls.cert, &openai.tls.key)).transpose()?;
        let listen =
            |cause| StartError::Listen { key: "openai.listen", address: openai.listen.clone(), cause };
        let listener = TcpListener::bind(&openai.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let seed = || RandomState::new().hash_one(address);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let first_number = seed() >> (u64::BITS - FIRST_NUMBER_BITS);
        let client = EngineClient::new(access, openai.connect_timeout());
        let forward =
            Forwarder::new(decider, client, openai.clone(), config.priorities, metrics.clone(), seed());
        let state = Arc::new(ApiState::new(config, forward, reader, metrics, keys, first_number, created));
        let orders = ServerControl::default();
        if let Some(reload) = reload {
            let (closed, every) = (orders.close.clone(), openai.reload_interval());
            tokio::spawn(async move { closed.run_until_cancelled(keep_reloaded(reload, every)).await });
        }
        let limits = ConnectionLimits {
            connections: openai.connections_max,
            when_full: WhenFull::Wait,
            head_timeout: HEAD_TIMEOUT,
            write_stall_timeout: openai.idle_timeout(),
        };
        let app = routes::router(state.clone());
        let control = orders.clone();
        match certificate {
            None => drop(tokio::spawn(http::serve(listener, app, limits, control))),
            Some(certificate) => {
                let (closed, every) = (orders.close.clone(), openai.reload_interval());
                let renewing = keep_renewed(Renewal::of_server(certificate.clone()), every);
                tokio::spawn(async move { closed.run_until_cancelled(renewing).await });
                let serving =
                    async move { http::serve_tls(listener, &certificate, app, limits, control).await };
                tokio::spawn(serving);
            }
        }
        let (notice, drain) =
            (Duration::from_millis(openai.drain_notice_ms), Duration::from_millis(openai.drain_ms));
        Ok(OpenAiServer { address, api: state, control: orders, drain_notice: notice, drain_timeout: drain })
    }

    /// Listening address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Fails readiness, closes the listener after the notice time, and waits for requests in flight
    /// for a limited time.
    pub(crate) async fn shutdown(self) {
        self.api.drain();
        tokio::time::sleep(self.drain_notice).await;
        self.control.close.cancel();
        self.control.tasks.close();
        if tokio::time::timeout(self.drain_timeout, self.control.tasks.wait()).await.is_err() {
            let running = self.control.tasks.len();
            tracing::warn!(running, "requests are still in flight and are aborted (gateway.openai.drain_ms)");
            self.control.abort.cancel();
            self.control.tasks.wait().await;
        }
    }
}

impl Drop for OpenAiServer {
    fn drop(&mut self) {
        self.control.close.cancel();
        self.control.abort.cancel();
    }
}
