//! Configuration of the gateway: keys, defaults and validation.
//!
//! Not here: the identity of prompt hashes, which is the router's `engines` section.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use kv_core::schedule::{Domain, InstanceRole};

use crate::endpoints::address::EngineUrl;
use crate::endpoints::admin::AdminConfig;
use crate::endpoints::config::{KubernetesConfig, LoadConfig};
use crate::openai::{OpenAiConfig, PriorityOrder};
use crate::picker::PickerConfig;
use crate::upstream::UpstreamConfig;

/// Most endpoints in a configuration file. Discovery may find as many as the router knows
/// instances.
pub(crate) const ENDPOINTS_MAX: usize = 4_096;

/// Gateway of one router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GatewayConfig {
    /// Models that are served, with their tokenizers and chat templates.
    pub models: Vec<ModelConfig>,
    /// Engines that take requests, in addition to discovered ones.
    pub endpoints: Vec<EndpointConfig>,
    /// Priorities of the objectives that requests name (`x-llm-d-inference-objective`).
    pub objectives: Vec<ObjectiveConfig>,
    /// How engines order requests by `priority`: `none` for first come, first served, `lower-first`
    /// or `higher-first`.
    pub priorities: PriorityOrder,
    /// How engines are called.
    pub upstream: UpstreamConfig,
    /// How engines are probed for their load.
    pub load: LoadConfig,
    /// Admin API that adds and removes endpoints.
    pub admin: AdminConfig,
    /// Discovery of endpoints in Kubernetes.
    pub kubernetes: KubernetesConfig,
    /// Endpoint picker for Envoy.
    pub picker: PickerConfig,
    /// OpenAI-compatible API.
    pub openai: OpenAiConfig,
}

/// One model, as requests name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Value of `model` in requests.
    pub name: String,
    /// Adapter that requests with this name use, as engines call it; empty for none.
    pub adapter: String,
    /// Path of its `tokenizer.json`. If empty, text prompts are compared by their text instead of
    /// tokens.
    pub tokenizer: PathBuf,
    /// Path of its chat template (Jinja), or of the `tokenizer_config.json` that holds it; empty
    /// for the one next to the tokenizer.
    pub chat_template: PathBuf,
    /// Longest prompt plus answer, in tokens; 0 if only the engine knows.
    pub context_tokens: u32,
}

/// One objective, as requests name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Name of the objective.
    pub name: String,
    /// Priority when not all requests can be served in time; higher is served first, 0 is the
    /// default.
    pub priority: i32,
}

/// One engine that takes requests over HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EndpointConfig {
    /// Number of its instance; the same as in `engines.list`, and on every router.
    pub instance: u32,
    /// Base URL for requests, `http://host:port` or `https://host:port`.
    pub url: String,
    /// Whether its engine links the kvfleet client, so that it can fetch from nodes.
    pub fetches: bool,
    /// Whether it reports its load to routers through the kvfleet client; if so, it is not probed.
    pub reports_itself: bool,
    /// Role of the engine: `both` or empty, `prefill` (computes prompts, another engine decodes),
    /// or `decode`.
    pub role: String,
    /// Topology, largest domain first, as in `zone-a/rack-7/host-3`; empty if unknown.
    pub place: String,
}

/// Role of this name, [`Role::Both`] for an empty one; `None` for an unknown name.
pub(crate) fn role(name: &str) -> Option<InstanceRole> {
    if name.is_empty() { Some(InstanceRole::Both) } else { InstanceRole::by_name(name) }
}

impl EndpointConfig {
    pub(crate) fn role(&self) -> Option<InstanceRole> {
        role(&self.role)
    }
}

/// A configuration value that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("gateway.{key}: {problem}")]
pub struct ConfigError {
    /// Key of the value.
    pub key: &'static str,
    /// The problem, and what to write instead.
    pub problem: String,
}

pub(crate) fn refuse<T>(key: &'static str, problem: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError { key, problem: problem.into() })
}

impl GatewayConfig {
    /// Whether it computes block hashes, of prompts or of the events of discovered engines, and so
    /// needs their key.
    #[must_use]
    pub fn computes_hashes(&self) -> bool {
        self.openai.is_enabled() || self.picker.is_open() || self.kubernetes.enabled
    }

    /// Longest time that requests in flight may take after the process is asked to stop.
    #[must_use]
    pub fn drain_timeout(&self) -> Duration {
        let openai = &self.openai;
        let ms = if openai.is_enabled() { openai.drain_notice_ms.saturating_add(openai.drain_ms) } else { 0 };
        Duration::from_millis(ms)
    }

    /// Checks everything that can be checked without disk or network access.
    ///
    /// # Errors
    /// [`ConfigError`] names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut names = HashSet::new();
        for model in &self.models {
            if model.name.is_empty() || !names.insert(&model.name) {
                return refuse(
                    "models",
                    format!("the name {:?} is empty or duplicated; give each model its own name", model.name),
                );
            }
        }
        if self.endpoints.len() > ENDPOINTS_MAX {
            return refuse(
                "endpoints",
                format!("has {} entries, the limit is {ENDPOINTS_MAX}", self.endpoints.len()),
            );
        }
        let mut instances = HashSet::new();
        for endpoint in &self.endpoints {
            if !instances.insert(endpoint.instance) {
                return refuse("endpoints", format!("instance {} is listed twice", endpoint.instance));
            }
            if let Err(error) = EngineUrl::parse(&endpoint.url) {
                return refuse("endpoints", format!("instance {}: {error}", endpoint.instance));
            }
            if endpoint.role().is_none() {
                let problem = format!(
                    "instance {} has the role {:?}; expected both, prefill or decode",
                    endpoint.instance, endpoint.role
                );
                return refuse("endpoints", problem);
            }
            if let Err(error) = Domain::parse(&endpoint.place) {
                let problem =
                    format!("instance {} has the place {:?}: {error}", endpoint.instance, endpoint.place);
                return refuse("endpoints", problem);
            }
        }
        self.load.check()?;
        self.admin.check()?;
        self.kubernetes.check()?;
        self.picker.validate()?;
        self.openai.check()
    }
}

#[cfg(test)]
mod tests {
    use kvfleet_errors_doc::says;

    use super::*;

    #[test]
    fn refuses_unknown_roles_and_places() {
        let config = |role: &str, place: &str| {
            let (role, place) = (role.to_owned(), place.to_owned());
            let url = "http://engine-3:8000".to_owned();
            let endpoint = EndpointConfig { instance: 3, url, role, place, ..EndpointConfig::default() };
            GatewayConfig { endpoints: vec![endpoint], ..GatewayConfig::default() }.validate()
        };
        for role in ["", "both", "prefill", "decode"] {
            assert_eq!(config(role, "zone-a/rack-7/host-3"), Ok(()));
        }
        let refused = |role, place| config(role, place).expect_err("must be refused").to_string();
        says("an engine with a role that is none", &refused("Prefill", ""), &[]);
        says("an engine at a place that is none", &refused("", "zone-a/"), &[]);
    }

    #[test]
    fn drain_timeout_covers_an_open_openai_listener() {
        let mut config = GatewayConfig::default();
        (config.openai.drain_notice_ms, config.openai.drain_ms) = (2_000, 40_000);
        assert_eq!(config.drain_timeout(), Duration::ZERO, "no listener is configured");
        config.openai.listen = "0.0.0.0:8000".into();
        assert_eq!(config.drain_timeout(), Duration::from_secs(42));
    }
}
