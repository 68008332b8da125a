//! Configuration of load probing and of discovery: keys, defaults and validation.
//!
//! Not here: the endpoints (`crate::config::EndpointConfig`).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, refuse};

/// Probing of engines for load and health.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoadConfig {
    /// Interval of load probes per engine, in milliseconds.
    pub every_ms: u64,
    /// Interval of health checks, in milliseconds.
    pub health_every_ms: u64,
    /// Interval of DNS lookups of its host, in milliseconds.
    pub resolve_every_ms: u64,
    /// Interval of requests for the model list, in milliseconds; 0 disables them.
    pub models_every_ms: u64,
    /// Longest time for an answer, in milliseconds.
    pub timeout_ms: u64,
    /// Failures in a row after which an engine gets no requests. A refused connection counts at
    /// once.
    pub failures_max: u32,
    /// Assumed prompt length in tokens, until an engine's metrics report the mean.
    pub prompt_tokens: u32,
    /// Whether an SGLang engine is asked for the ports of its KV events, unless they are
    /// configured.
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
        // The router ignores a load that is two seconds old.
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
                format!("{models_every_ms} is outside 20 to 3600000; 10000 is usual, and 0 disables it");
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

    pub(crate) fn load_interval(&self) -> Duration {
        Duration::from_millis(self.every_ms)
    }

    pub(crate) fn health_interval(&self) -> Duration {
        Duration::from_millis(self.health_every_ms)
    }

    pub(crate) fn resolve_interval(&self) -> Duration {
        Duration::from_millis(self.resolve_every_ms)
    }

    /// `None` disables it.
    pub(crate) fn models_interval(&self) -> Option<Duration> {
        (self.models_every_ms > 0).then(|| Duration::from_millis(self.models_every_ms))
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// Kind of Kubernetes objects to watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscoveredKind {
    /// Pods that match a selector, with optional annotations.
    #[default]
    #[serde(rename = "pods")]
    Pods,
    /// The EndpointSlices of a Service.
    EndpointSlices,
}

/// Discovery of engines in Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// Whether discovery is enabled.
    pub enabled: bool,
    /// API server, `http://host:port`, as `kubectl proxy` provides it. Empty: the cluster of this
    /// process, or of KUBECONFIG.
    pub server: String,
    /// Kind of objects to watch.
    pub kind: DiscoveredKind,
    /// Namespace of the engines. Empty: the one of this process; `*`: all.
    pub namespace: String,
    /// Label selector of engine Pods, in the syntax of `kubectl -l`.
    pub selector: String,
    /// Service of the engines, for EndpointSlices.
    pub service: String,
    /// Name of the port for requests.
    pub port_name: String,
    /// Pod annotation with the instance number.
    pub instance_annotation: String,
    /// Instance number of a StatefulSet's first Pod; later Pods count up from it.
    pub instance_base: u32,
    /// Whether engines link the kvfleet client, unless an annotation says otherwise.
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
                "this program was built without the feature `kubernetes`; configure engines in \
                 gateway.endpoints or through the admin API",
            );
        }
        if !self.server.is_empty()
            && let Err(error) = super::address::authority(&self.server)
        {
            return refuse("kubernetes.server", format!("{error}, or \"\" for the cluster's own"));
        }
        match self.kind {
            DiscoveredKind::Pods if self.selector.is_empty() => refuse(
                "kubernetes.selector",
                "is empty, but not every Pod is an engine; give the labels of engine Pods, such as \"app=vllm\"",
            ),
            DiscoveredKind::EndpointSlices if self.service.is_empty() => refuse(
                "kubernetes.service",
                "is empty; give the name of the engines' Service, or watch Pods with kind = \"pods\"",
            ),
            _ if self.port_name.is_empty() => {
                refuse("kubernetes.port_name", "is empty; give the name of the port for requests")
            }
            _ => Ok(()),
        }
    }
}
