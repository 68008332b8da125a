//! What an operator can set for how engines are asked for their load, with defaults, and what is refused and why.
//!
//! Not here: the engines themselves (`crate::config::EndpointConfig`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, refuse};

/// How engines are asked for their load, and whether they are there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadConfig {
    /// Between two questions for the load of one engine, in milliseconds.
    pub every_ms: u64,
    /// Between two questions whether it is well, in milliseconds.
    pub health_every_ms: u64,
    /// Between two questions for the addresses of its host, in milliseconds.
    pub resolve_every_ms: u64,
    /// Between two questions which models it serves, in milliseconds; 0: it is never asked.
    pub models_every_ms: u64,
    /// Longest that an answer takes, in milliseconds.
    pub timeout_ms: u64,
    /// Failures in a row after which an engine is left out. One that nobody listens at is left out at once.
    pub failures_max: u32,
    /// Length that prompts are taken to have, in tokens, until an engine's metrics tell.
    pub prompt_tokens: u32,
    /// Whether an SGLang is asked where its events are, and followed, where nobody else said so.
    pub finds_events: bool,
}

impl Default for LoadConfig {
    fn default() -> Self {
        LoadConfig {
            every_ms: 200,
            health_every_ms: 1_000,
            resolve_every_ms: 5_000,
            models_every_ms: 10_000,
            timeout_ms: 1_000,
            failures_max: 3,
            prompt_tokens: 1_024,
            finds_events: true,
        }
    }
}

impl LoadConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        // A load that is two seconds old does not count any more.
        for (key, given, most, usual) in [
            ("load.every_ms", self.every_ms, 1_000, 200),
            ("load.health_every_ms", self.health_every_ms, 60_000, 1_000),
            ("load.resolve_every_ms", self.resolve_every_ms, 3_600_000, 5_000),
            ("load.timeout_ms", self.timeout_ms, 1_500, 1_000),
        ] {
            if !(20..=most).contains(&given) {
                return refuse(key, format!("{given} is outside 20 to {most}; {usual} is usual"));
            }
        }
        let models_every_ms = self.models_every_ms;
        if models_every_ms != 0 && !(20..=3_600_000).contains(&models_every_ms) {
            let problem =
                format!("{models_every_ms} is outside 20 to 3600000; 10000 is usual, and 0 is never");
            return refuse("load.models_every_ms", problem);
        }
        for (key, given, most, usual) in [
            ("load.failures_max", self.failures_max, 1_000, 3),
            ("load.prompt_tokens", self.prompt_tokens, 16_777_216, 1_024),
        ] {
            if !(1..=most).contains(&given) {
                return refuse(key, format!("{given} is outside 1 to {most}; {usual} is usual"));
            }
        }
        Ok(())
    }

    pub(crate) fn every(&self) -> Duration {
        Duration::from_millis(self.every_ms)
    }

    pub(crate) fn health_every(&self) -> Duration {
        Duration::from_millis(self.health_every_ms)
    }

    pub(crate) fn resolve_every(&self) -> Duration {
        Duration::from_millis(self.resolve_every_ms)
    }

    /// None: never.
    pub(crate) fn models_every(&self) -> Option<Duration> {
        (self.models_every_ms > 0).then(|| Duration::from_millis(self.models_every_ms))
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// What of Kubernetes is watched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscoveredKind {
    /// Pods that a selector finds; their annotations say more.
    #[default]
    #[serde(rename = "pods")]
    Single,
    /// The EndpointSlices of a Service.
    EndpointSlices,
}

/// Engines that Kubernetes knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// Whether they are looked for.
    pub enabled: bool,
    /// The API server, `http://host:port`, as `kubectl proxy` gives it. Empty: that of the cluster this process runs in, or of KUBECONFIG.
    pub server: String,
    /// What is watched.
    pub kind: DiscoveredKind,
    /// Namespace of the engines. Empty: the one of this process; `*`: all.
    pub namespace: String,
    /// Labels that Pods of engines have, as `kubectl -l` takes them.
    pub selector: String,
    /// Service of the engines, where EndpointSlices are watched.
    pub service: String,
    /// Name of the port at which engines take requests.
    pub port_name: String,
    /// Annotation of a Pod with its instance number.
    pub instance_annotation: String,
    /// Instance that the first Pod of a StatefulSet is; the one after it is the next, and so on.
    pub instance_base: u32,
    /// Whether engines link our client, where no annotation says otherwise.
    pub fetches: bool,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        KubernetesConfig {
            enabled: false,
            server: String::new(),
            kind: DiscoveredKind::default(),
            namespace: String::new(),
            selector: String::new(),
            service: String::new(),
            port_name: "http".into(),
            instance_annotation: "kvfleet.io/instance".into(),
            instance_base: 0,
            fetches: false,
        }
    }
}

impl KubernetesConfig {
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if !self.enabled {
            return Ok(());
        }
        if cfg!(not(feature = "kubernetes")) {
            return refuse(
                "kubernetes.enabled",
                "this program was built without the feature `kubernetes`; name engines in doors.endpoints or by calls",
            );
        }
        if !self.server.is_empty()
            && let Err(error) = super::address::authority(&self.server)
        {
            return refuse("kubernetes.server", format!("{error}, or \"\" for the cluster's own"));
        }
        match self.kind {
            DiscoveredKind::Single if self.selector.is_empty() => refuse(
                "kubernetes.selector",
                "is empty, and not every Pod is an engine; give the labels of those that are, such as \"app=vllm\"",
            ),
            DiscoveredKind::EndpointSlices if self.service.is_empty() => refuse(
                "kubernetes.service",
                "is empty; give the name of the engines' Service, or watch Pods with kind = \"pods\"",
            ),
            _ if self.port_name.is_empty() => refuse(
                "kubernetes.port_name",
                "is empty; give the name of the port at which engines take requests",
            ),
            _ => Ok(()),
        }
    }
}
