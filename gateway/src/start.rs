//! Starts and stops the gateway's listeners.
//!
//! Not here: how each listener serves requests.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use kv_core::prefix::IdentityManifest;
use kvfleet_net::tls::TlsError;
use kvfleet_router::{EnginesConfig, RouterHandle, Tenants};
use prometheus::Registry;
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::config::{ConfigError, GatewayConfig};
use crate::decide::Decider;
use crate::endpoints::{self, StartedEndpoints};
use crate::keys::KeyFileError;
use crate::metrics::{OpenAiMetrics, PromptMetrics};
use crate::openai::OpenAiServer;
use crate::picker;
use crate::prompt::RequestReader;
use crate::upstream::{EngineAccess, UpstreamConfigError};

/// Why the gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The router's part of the configuration is invalid.
    #[error(transparent)]
    Engines(#[from] kvfleet_router::ConfigError),
    /// Endpoints of engines cannot be opened or discovered.
    #[error(transparent)]
    Endpoints(#[from] endpoints::EndpointsError),
    /// The endpoint picker cannot be opened.
    #[error(transparent)]
    Picker(#[from] picker::PickerError),
    /// The file of API keys cannot be used.
    #[error("gateway.openai.api_keys_file: {0}")]
    Keys(#[from] KeyFileError),
    /// Files for calls to engines cannot be used.
    #[error(transparent)]
    Upstream(#[from] UpstreamConfigError),
    /// The certificate of the OpenAI-compatible API cannot be used.
    #[error("gateway.openai.tls: {0}")]
    Tls(#[from] TlsError),
    /// A listener cannot be opened.
    #[error(
        "gateway.{key}: cannot listen on {address}: {cause}; set another address, or stop the process that \
         listens there"
    )]
    Listen {
        /// Configuration key of the address.
        key: &'static str,
        /// Configured address.
        address: String,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// Its threads cannot be started.
    #[error("the gateway's threads cannot be started: {0}; raise the limit on threads or memory")]
    Threads(io::Error),
    /// Metrics cannot be registered, for example because a name is taken.
    #[error("metrics of the gateway cannot be registered: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Checks the key and the identity under which prompts are hashed. An invalid one is an error; the default one
/// is only warned about, because no engine has such hashes.
fn check_identity(
    config: &GatewayConfig,
    engines: &EnginesConfig,
) -> Result<(), kvfleet_router::ConfigError> {
    engines.require_hash_key()?;
    if engines.secret_file.as_os_str().is_empty() {
        tracing::warn!(
            "engines.public_hashes is set: callers can compute the hashes of any prompt, and learn which were sent"
        );
    }
    let manifest = engines.identity.manifest();
    manifest.validate().map_err(|error| kvfleet_router::ConfigError {
        key: "engines.identity",
        problem: error.to_string(),
    })?;
    let has_tokenizer = config.models.iter().any(|model| !model.tokenizer.as_os_str().is_empty());
    if has_tokenizer && manifest == IdentityManifest::default() {
        tracing::warn!(
            model = manifest.model,
            block_tokens = manifest.block_tokens,
            "engines.identity is not set, so prompts are hashed under the default identity and match no \
             engine's blocks: set engines.identity to the value that nodes and engines use"
        );
    }
    Ok(())
}

/// Threads of the gateway alone: reading prompts and passing answers on take processor time that
/// callers decide about, and consensus shares the process.
#[derive(Debug)]
struct GatewayThreads(Option<Runtime>);

impl GatewayThreads {
    fn start() -> io::Result<GatewayThreads> {
        let runtime = Builder::new_multi_thread().thread_name("gateway").enable_all().build()?;
        Ok(GatewayThreads(Some(runtime)))
    }

    /// Runs a future on these threads. Its panic is passed on.
    async fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Option<T> {
        let running = self.0.as_ref()?.spawn(future);
        match running.await {
            Ok(result) => Some(result),
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => None,
            },
        }
    }
}

impl Drop for GatewayThreads {
    fn drop(&mut self) {
        // To wait for them would block a thread of the caller's runtime.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A running gateway. Dropping it closes all listeners at once.
#[derive(Debug)]
pub struct Gateway {
    listeners: Listeners,
    threads: GatewayThreads,
}

/// The listeners of a gateway, and what stops them.
#[derive(Debug)]
struct Listeners {
    admin: Option<SocketAddr>,
    picker: Option<picker::PickerServer>,
    openai: Option<OpenAiServer>,
    stop: CancellationToken,
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Gateway {
    /// Opens the listeners that the configuration names, on threads of their own; `engines` sets
    /// the identity of prompt hashes.
    ///
    /// # Errors
    /// [`StartError`]: an invalid configuration, an unreadable file, or a port in use.
    // Boxed, so that the future is compiled once here and not in every caller's crate.
    pub fn open(
        config: &GatewayConfig,
        engines: &EnginesConfig,
        router: RouterHandle,
        registry: &Registry,
    ) -> BoxFuture<'static, Result<Gateway, StartError>> {
        let (config, engines, registry) = (config.clone(), engines.clone(), registry.clone());
        Box::pin(async move {
            let threads = GatewayThreads::start().map_err(StartError::Threads)?;
            let opening = async move { Listeners::open(&config, &engines, router, &registry).await };
            match threads.run(opening).await {
                Some(listeners) => Ok(Gateway { listeners: listeners?, threads }),
                None => Err(StartError::Threads(io::ErrorKind::Interrupted.into())),
            }
        })
    }

    /// Addresses of the listeners, each with its name.
    #[must_use]
    pub fn addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        self.listeners.addresses()
    }

    /// Waits for requests in flight, for a limited time, and closes the listeners.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Gateway { listeners, threads } = self;
            threads.run(listeners.shutdown()).await;
        })
    }
}

impl Listeners {
    async fn open(
        config: &GatewayConfig,
        engines: &EnginesConfig,
        router: RouterHandle,
        registry: &Registry,
    ) -> Result<Listeners, StartError> {
        config.validate()?;
        let stop = CancellationToken::new();
        // On any error below, the guard stops the tasks that already run.
        let guard = stop.clone().drop_guard();
        let access = EngineAccess::load(&config.upstream)?;
        let StartedEndpoints { endpoints, admin } =
            endpoints::start(config, &router, access.clone(), registry, &stop).await?;
        let objectives = config.objectives.iter().map(|of| (of.name.clone(), of.priority));
        let decider = Decider::new(router, endpoints).with_objectives(objectives).with_models(&config.models);
        let decider = decider.with_identity(&engines.identity.manifest(), &config.models);
        let (mut picker, mut openai) = (None, None);
        if config.computes_hashes() {
            check_identity(config, engines)?;
        }
        if config.openai.is_enabled() || config.picker.is_open() {
            let tenants = Arc::new(Tenants::load(engines)?);
            let block_tokens = tenants.block_tokens();
            let reader = RequestReader::load(config, tenants, PromptMetrics::register(registry)?)?;
            let reader = Arc::new(reader.with_endpoints(decider.endpoints()));
            picker = picker::serve(&config.picker, &decider, &reader, block_tokens, registry, &stop).await?;
            if config.openai.is_enabled() {
                let metrics = OpenAiMetrics::register(registry)?;
                openai = Some(OpenAiServer::open(config, decider, access, reader, metrics).await?);
            }
        }
        guard.disarm();
        Ok(Listeners { admin, picker, openai, stop })
    }

    fn addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        let openai = self.openai.as_ref().map(|openai| ("openai", openai.address()));
        let picker = self.picker.as_ref().map(|picker| ("picker", picker.address()));
        let admin = self.admin.map(|address| ("admin", address));
        openai.into_iter().chain(picker).chain(admin).collect()
    }

    async fn shutdown(mut self) {
        // Endpoints stay open until the requests in flight have ended.
        if let Some(openai) = self.openai.take() {
            openai.shutdown().await;
        }
        self.stop.cancel();
        if let Some(picker) = self.picker.take() {
            picker.drain().await;
        }
    }
}
