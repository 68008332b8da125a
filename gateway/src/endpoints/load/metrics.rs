//! Metrics of probed engines.
//!
//! Not here: metrics of KV events, and of the router's use of the load (`kvfleet_router`).

use kv_core::id::InstanceId;
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::endpoints::{EndpointRegistry, EngineLoad, Origin};

/// Outcomes of a load probe.
const OUTCOMES: [&str; 8] = ["ok", "refused", "late", "status", "long", "failed", "malformed", "nonsense"];

/// Handles; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct EndpointMetrics {
    endpoints: IntGaugeVec,
    up: IntGaugeVec,
    probes: IntCounterVec,
    restarts: IntCounterVec,
    running: IntGaugeVec,
    waiting: IntGaugeVec,
    usage: GaugeVec,
    models: IntGaugeVec,
    model_probes: IntCounterVec,
}

impl EndpointMetrics {
    /// Registers all metrics.
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<EndpointMetrics> {
        let gauge = |name: &str, help: &str, label: &str| {
            let gauge = IntGaugeVec::new(Opts::new(name, help), &[label])?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        let counter = |name: &str, help: &str, labels: &[&str]| {
            let counter = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let usage = GaugeVec::new(
            Opts::new(
                "kvfleet_gateway_endpoint_kv_usage_ratio",
                "Used share of an engine's KV memory, as the engine reports it, 0 to 1.",
            ),
            &["instance"],
        )?;
        registry.register(Box::new(usage.clone()))?;
        Ok(EndpointMetrics {
            endpoints: gauge(
                "kvfleet_gateway_endpoints",
                "Engines that take requests, by the source that named them.",
                "origin",
            )?,
            up: gauge(
                "kvfleet_gateway_endpoint_up",
                "1 while an engine answers and may get requests, else 0.",
                "instance",
            )?,
            probes: counter(
                "kvfleet_gateway_endpoint_probes_total",
                "Load probes of an engine, by outcome.",
                &["instance", "outcome"],
            )?,
            restarts: counter(
                "kvfleet_gateway_endpoint_restarts_total",
                "Restarts of an engine process.",
                &["instance"],
            )?,
            running: gauge(
                "kvfleet_gateway_endpoint_running",
                "Running requests of an engine, as the engine reports them.",
                "instance",
            )?,
            waiting: gauge(
                "kvfleet_gateway_endpoint_waiting",
                "Waiting requests of an engine, as the engine reports them.",
                "instance",
            )?,
            usage,
            models: gauge(
                "kvfleet_gateway_endpoint_models",
                "Models and adapters that an engine lists.",
                "instance",
            )?,
            model_probes: counter(
                "kvfleet_gateway_endpoint_model_probes_total",
                "Model list requests to an engine, by outcome.",
                &["instance", "outcome"],
            )?,
        })
    }

    /// Updates the number of endpoints by origin.
    pub(super) fn count_endpoints(&self, endpoints: &EndpointRegistry) {
        let all = endpoints.list();
        for origin in Origin::ALL {
            let known = all.iter().filter(|endpoint| endpoint.origin == origin).count();
            self.endpoints.with_label_values(&[origin.name()]).set(i64::try_from(known).unwrap_or(i64::MAX));
        }
    }

    /// Handles for one instance, which remove its series when dropped.
    pub(super) fn instance(&self, instance: InstanceId) -> InstanceMetrics {
        let name = instance.0.to_string();
        InstanceMetrics {
            up: self.up.with_label_values(&[&name]),
            restarts: self.restarts.with_label_values(&[&name]),
            running: self.running.with_label_values(&[&name]),
            waiting: self.waiting.with_label_values(&[&name]),
            usage: self.usage.with_label_values(&[&name]),
            models: self.models.with_label_values(&[&name]),
            shared: self.clone(),
            name,
        }
    }
}

/// Handles for one instance. Dropping them removes its series.
#[derive(Debug)]
pub(super) struct InstanceMetrics {
    shared: EndpointMetrics,
    name: String,
    pub(super) up: IntGauge,
    pub(super) restarts: IntCounter,
    running: IntGauge,
    waiting: IntGauge,
    usage: Gauge,
    pub(super) models: IntGauge,
}

impl InstanceMetrics {
    pub(super) fn count_probe(&self, outcome: &str) {
        self.shared.probes.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn count_model_probe(&self, outcome: &str) {
        self.shared.model_probes.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn set_load(&self, heard: EngineLoad) {
        self.running.set(heard.running.into());
        self.waiting.set(heard.waiting.into());
        if let Some(usage) = heard.usage {
            self.usage.set(usage);
        }
    }
}

impl Drop for InstanceMetrics {
    fn drop(&mut self) {
        let EndpointMetrics {
            endpoints: _,
            up,
            probes: asked,
            restarts,
            running,
            waiting,
            usage,
            models,
            model_probes: models_asked,
        } = &self.shared;
        let name = [self.name.as_str()];
        // Removing a series that was never set fails, which is fine.
        for gauge in [up, running, waiting, models] {
            let _ = gauge.remove_label_values(&name);
        }
        let _ = restarts.remove_label_values(&name);
        let _ = usage.remove_label_values(&name);
        for outcome in OUTCOMES {
            let _ = asked.remove_label_values(&[&self.name, outcome]);
            let _ = models_asked.remove_label_values(&[&self.name, outcome]);
        }
    }
}
