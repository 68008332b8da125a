//! Doors that are open: how they are put together and taken apart.
//!
//! Not here: what happens at each of them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use kv_core::prefix::IdentityManifest;
use kvfleet_router::{Desk, EnginesConfig, Tenants};
use prometheus::Registry;
use tokio_util::sync::CancellationToken;

use crate::config::{ConfigError, DoorsConfig};
use crate::decide::Decider;
use crate::endpoints::{self, Opened};
use crate::metrics::{Metrics, PromptMetrics};
use crate::openai::OpenAi;
use crate::picker;
use crate::prompt::Reader;

/// Why the doors did not open.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The router's part of it is refused.
    #[error(transparent)]
    Engines(#[from] kvfleet_router::ConfigError),
    /// Engines cannot be followed.
    #[error(transparent)]
    Endpoints(#[from] endpoints::OpenError),
    /// The door of Envoy.
    #[error(transparent)]
    Picker(#[from] picker::OpenError),
    /// Nobody may listen there.
    #[error(
        "doors.{key}: cannot listen on {address}: {cause}; set another address, or stop who listens there"
    )]
    Listen {
        /// Which key.
        key: &'static str,
        /// Where.
        address: String,
        /// Why not.
        cause: io::Error,
    },
    /// A figure of that name is there already.
    #[error("figures of the doors cannot be shown: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Prompts are hashed under the identity of the engines. One that cannot be is refused; one that nobody wrote makes hashes that no engine has.
fn check_identity(config: &DoorsConfig, engines: &EnginesConfig) -> Result<(), kvfleet_router::ConfigError> {
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
            "prompts are hashed under the identity that nobody set, and no engine's blocks are found by it: write engines.identity as the nodes and engines have it"
        );
    }
    Ok(())
}

/// Open doors. Dropped, they close at once.
#[derive(Debug)]
pub struct Doors {
    admin: Option<SocketAddr>,
    picker: Option<picker::Open>,
    openai: Option<OpenAi>,
    stop: CancellationToken,
}

impl Drop for Doors {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Doors {
    /// Opens what the configuration names; `engines` says whose hashes prompts have.
    ///
    /// # Errors
    /// [`StartError`]: a refused configuration, a file that cannot be read, a port in use.
    // Boxed, so that all doors are compiled here, and not once more in every program and test that opens one.
    pub fn open<'a>(
        config: &'a DoorsConfig,
        engines: &'a EnginesConfig,
        desk: Desk,
        registry: &'a Registry,
    ) -> BoxFuture<'a, Result<Doors, StartError>> {
        Box::pin(Doors::begin(config, engines, desk, registry))
    }

    async fn begin(
        config: &DoorsConfig,
        engines: &EnginesConfig,
        desk: Desk,
        registry: &Registry,
    ) -> Result<Doors, StartError> {
        config.validate()?;
        let stop = CancellationToken::new();
        // Whatever fails from here on takes the standing tasks with it.
        let opened = stop.clone().drop_guard();
        let Opened { endpoints, admin } = endpoints::open(config, &desk, registry, &stop).await?;
        let objectives = config.objectives.iter().map(|of| (of.name.clone(), of.priority));
        let decider = Decider::new(desk, endpoints).with_objectives(objectives).with_models(&config.models);
        let decider = decider.with_identity(&engines.identity.manifest(), &config.models);
        let (mut picker, mut openai) = (None, None);
        if config.openai.is_open() || config.picker.is_open() {
            check_identity(config, engines)?;
            let tenants = Arc::new(Tenants::load(engines)?);
            let block_tokens = tenants.block_tokens();
            let reader = Reader::load(config, tenants, PromptMetrics::register(registry)?)?;
            let reader = Arc::new(reader.of_engines(decider.endpoints()));
            picker = picker::serve(&config.picker, &decider, &reader, block_tokens, registry, &stop).await?;
            if config.openai.is_open() {
                let metrics = Metrics::register(registry)?;
                openai = Some(OpenAi::open(config, decider, reader, metrics).await?);
            }
        }
        opened.disarm();
        Ok(Doors { admin, picker, openai, stop })
    }

    /// Where they listen, by what for.
    #[must_use]
    pub fn addresses(&self) -> Vec<(&'static str, SocketAddr)> {
        let openai = self.openai.as_ref().map(|openai| ("openai", openai.address()));
        let picker = self.picker.as_ref().map(|picker| ("picker", picker.address()));
        let admin = self.admin.map(|address| ("admin", address));
        openai.into_iter().chain(picker).chain(admin).collect()
    }

    /// Ends what is under way, for a while, and closes.
    pub fn shutdown(self) -> BoxFuture<'static, ()> {
        Box::pin(self.end())
    }

    async fn end(mut self) {
        // Requests that are under way go on to their engines until they have ended.
        if let Some(openai) = self.openai.take() {
            openai.shutdown().await;
        }
        self.stop.cancel();
        if let Some(picker) = self.picker.take() {
            picker.ended().await;
        }
    }
}
