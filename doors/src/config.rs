//! What an operator can set for the doors of a router, with defaults, and what is refused and why.
//!
//! Not here: whose hashes prompts have, which is the router's `engines` section.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use kv_core::schedule::{Domain, Role};

use crate::endpoints::address::authority;
use crate::endpoints::calls::AdminConfig;
use crate::endpoints::config::{KubernetesConfig, LoadConfig};
use crate::openai::{OpenAiConfig, Priorities};
use crate::picker::PickerConfig;

/// Endpoints written in a file; discovery finds as many as the router knows instances.
pub(crate) const ENDPOINTS_MAX: usize = 4_096;

/// Doors of one router.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DoorsConfig {
    /// Models that are served, with what their prompts are read by.
    pub models: Vec<ModelConfig>,
    /// Engines that take requests, besides those that are discovered.
    pub endpoints: Vec<EndpointConfig>,
    /// What objectives are worth that requests name (`x-llm-d-inference-objective`).
    pub objectives: Vec<ObjectiveConfig>,
    /// Which requests engines begin first: `none` where it is those that came first, `lower-first`, `higher-first`.
    pub priorities: Priorities,
    /// How they are asked for their load.
    pub load: LoadConfig,
    /// Where calls name more of them.
    pub admin: AdminConfig,
    /// Where Kubernetes names more of them.
    pub kubernetes: KubernetesConfig,
    /// Where Envoy asks.
    pub picker: PickerConfig,
    /// The OpenAI-compatible door.
    pub openai: OpenAiConfig,
}

/// One model, as requests name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// What requests have as `model`.
    pub name: String,
    /// Adapter that requests of this name run with, as engines call it; empty for none.
    pub adapter: String,
    /// Its `tokenizer.json`; empty for none: prompts of text are then told apart by their text.
    pub tokenizer: PathBuf,
    /// Its chat template (Jinja), or the `tokenizer_config.json` that has it; empty for the one beside the tokenizer.
    pub chat_template: PathBuf,
    /// Longest prompt with its answer, in tokens; 0 where only the engine knows.
    pub context_tokens: u32,
}

/// One objective, as requests name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Its name.
    pub name: String,
    /// Above 0 before others where not all requests can be served in time; below behind them.
    pub priority: i32,
}

/// One engine that takes requests over HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EndpointConfig {
    /// Instance that it is; the same number as in `engines.list`, and on every router.
    pub instance: u32,
    /// Where it takes requests, `http://host:port`.
    pub url: String,
    /// Whether its engine links our client, and so can fetch from nodes.
    pub fetches: bool,
    /// Whether it tells routers its load by itself, through our client; then it is not asked.
    pub reports_itself: bool,
    /// What it does of a request: `both`, or empty; `prefill`: it computes prompts, and another goes on; `decode`: it goes on.
    pub role: String,
    /// Where it stands, the largest first, as in `zone-a/rack-7/host-3`; empty: nowhere in particular.
    pub place: String,
}

/// What an engine does, by its name; one without does all. Nothing for a name that is none.
pub(crate) fn role(name: &str) -> Option<Role> {
    if name.is_empty() { Some(Role::Both) } else { Role::by_name(name) }
}

impl EndpointConfig {
    pub(crate) fn role(&self) -> Option<Role> {
        role(&self.role)
    }
}

/// A value that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("doors.{key}: {problem}")]
pub struct ConfigError {
    /// Which key.
    pub key: &'static str,
    /// What is wrong, and what to write instead.
    pub problem: String,
}

pub(crate) fn refuse<T>(key: &'static str, problem: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError { key, problem: problem.into() })
}

impl DoorsConfig {
    /// How long requests that are under way when the process is asked to stop may take.
    #[must_use]
    pub fn ends_within(&self) -> Duration {
        let own = &self.openai;
        let ms = if own.is_open() { own.drain_notice_ms.saturating_add(own.drain_ms) } else { 0 };
        Duration::from_millis(ms)
    }

    /// Checks everything that can be checked without touching the disk or the network.
    ///
    /// # Errors
    /// [`ConfigError`] names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mut names = HashSet::new();
        for model in &self.models {
            if model.name.is_empty() || !names.insert(&model.name) {
                return refuse(
                    "models",
                    format!("the name {:?} is empty or twice there; give each its own", model.name),
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
                return refuse("endpoints", format!("instance {} is twice there", endpoint.instance));
            }
            if let Err(error) = authority(&endpoint.url) {
                return refuse("endpoints", format!("instance {}: {error}", endpoint.instance));
            }
            if endpoint.role().is_none() {
                let problem = format!(
                    "instance {} has the role {:?}; there are both, prefill and decode",
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
    fn what_an_engine_does_and_where_it_stands_is_known_or_refused() {
        let config = |role: &str, place: &str| {
            let (role, place) = (role.to_owned(), place.to_owned());
            let url = "http://engine-3:8000".to_owned();
            let endpoint = EndpointConfig { instance: 3, url, role, place, ..EndpointConfig::default() };
            DoorsConfig { endpoints: vec![endpoint], ..DoorsConfig::default() }.validate()
        };
        for role in ["", "both", "prefill", "decode"] {
            assert_eq!(config(role, "zone-a/rack-7/host-3"), Ok(()));
        }
        let refused = |role, place| config(role, place).expect_err("must be refused").to_string();
        says("an engine with a role that is none", &refused("Prefill", ""), &[]);
        says("an engine at a place that is none", &refused("", "zone-a/"), &[]);
    }

    #[test]
    fn what_is_under_way_has_as_long_as_an_open_door_gives_it() {
        let mut config = DoorsConfig::default();
        (config.openai.drain_notice_ms, config.openai.drain_ms) = (2_000, 40_000);
        assert_eq!(config.ends_within(), Duration::ZERO, "nobody asks here");
        config.openai.listen = "0.0.0.0:8000".into();
        assert_eq!(config.ends_within(), Duration::from_secs(42));
    }
}
