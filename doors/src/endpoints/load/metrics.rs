//! What a router counts of the engines that it asks.
//!
//! Not here: what engines say of their events, and what the router makes of their load (`kvfleet_router`).

use kv_core::id::InstanceId;
use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry};

use crate::endpoints::{Endpoints, Heard, Origin};

/// Outcomes of a question for the load.
const OUTCOMES: [&str; 8] = ["ok", "refused", "late", "status", "long", "failed", "malformed", "nonsense"];

/// Handles; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct EndpointMetrics {
    known: IntGaugeVec,
    up: IntGaugeVec,
    asked: IntCounterVec,
    restarts: IntCounterVec,
    running: IntGaugeVec,
    waiting: IntGaugeVec,
    usage: GaugeVec,
    models: IntGaugeVec,
    models_asked: IntCounterVec,
}

impl EndpointMetrics {
    /// Registers all of them.
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
                "kvfleet_doors_endpoint_kv_usage_ratio",
                "Part of an engine's KV memory that is taken, as it says",
            ),
            &["instance"],
        )?;
        registry.register(Box::new(usage.clone()))?;
        Ok(EndpointMetrics {
            known: gauge(
                "kvfleet_doors_endpoints",
                "Engines that take requests, by who named them",
                "origin",
            )?,
            up: gauge(
                "kvfleet_doors_endpoint_up",
                "1 while an engine answers and may be sent requests",
                "instance",
            )?,
            asked: counter(
                "kvfleet_doors_endpoint_asked_total",
                "Questions to an engine for its load, by what came of them",
                &["instance", "outcome"],
            )?,
            restarts: counter(
                "kvfleet_doors_endpoint_restarts_total",
                "Times that an engine was another process than before",
                &["instance"],
            )?,
            running: gauge(
                "kvfleet_doors_endpoint_running",
                "Requests that an engine computes, as it says",
                "instance",
            )?,
            waiting: gauge(
                "kvfleet_doors_endpoint_waiting",
                "Requests that wait at an engine, as it says",
                "instance",
            )?,
            usage,
            models: gauge(
                "kvfleet_doors_endpoint_models",
                "Names of models and adapters that an engine serves, as it says",
                "instance",
            )?,
            models_asked: counter(
                "kvfleet_doors_endpoint_models_asked_total",
                "Questions to an engine which models it serves, by what came of them",
                &["instance", "outcome"],
            )?,
        })
    }

    /// Counts who is known.
    pub(super) fn known(&self, endpoints: &Endpoints) {
        let all = endpoints.list();
        for origin in Origin::ALL {
            let known = all.iter().filter(|endpoint| endpoint.origin == origin).count();
            self.known.with_label_values(&[origin.name()]).set(i64::try_from(known).unwrap_or(i64::MAX));
        }
    }

    /// Those of one engine, which go with the last of its handles.
    pub(super) fn of(&self, instance: InstanceId) -> OneMetrics {
        let name = instance.0.to_string();
        OneMetrics {
            up: self.up.with_label_values(&[&name]),
            restarts: self.restarts.with_label_values(&[&name]),
            running: self.running.with_label_values(&[&name]),
            waiting: self.waiting.with_label_values(&[&name]),
            usage: self.usage.with_label_values(&[&name]),
            models: self.models.with_label_values(&[&name]),
            all: self.clone(),
            name,
        }
    }
}

/// Handles for one engine. Dropped, its numbers are shown no more.
#[derive(Debug)]
pub(super) struct OneMetrics {
    all: EndpointMetrics,
    name: String,
    pub(super) up: IntGauge,
    pub(super) restarts: IntCounter,
    running: IntGauge,
    waiting: IntGauge,
    usage: Gauge,
    pub(super) models: IntGauge,
}

impl OneMetrics {
    pub(super) fn asked(&self, outcome: &str) {
        self.all.asked.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn asked_for_models(&self, outcome: &str) {
        self.all.models_asked.with_label_values(&[&self.name, outcome]).inc();
    }

    pub(super) fn heard(&self, heard: Heard) {
        self.running.set(heard.running.into());
        self.waiting.set(heard.waiting.into());
        if let Some(usage) = heard.usage {
            self.usage.set(usage);
        }
    }
}

impl Drop for OneMetrics {
    fn drop(&mut self) {
        let EndpointMetrics { known: _, up, asked, restarts, running, waiting, usage, models, models_asked } =
            &self.all;
        let name = [self.name.as_str()];
        // One that was never set is not there.
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
