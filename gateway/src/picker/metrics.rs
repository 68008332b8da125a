//! Metrics of the endpoint picker.
//!
//! Not here: metrics of the router (`kvfleet_router`), and serving them (the process does).

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// Handles; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct PickerMetrics {
    pub(crate) picked: IntCounter,
    refused: IntCounterVec,
    pub(crate) served_elsewhere: IntCounter,
    pub(crate) protocol_errors: IntCounter,
    pub(crate) streams: IntGauge,
    pub(crate) shed: IntCounter,
    pick_seconds: Histogram,
}

impl PickerMetrics {
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<PickerMetrics> {
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let name = "kvfleet_gateway_picker_refused_total";
        let help = "Requests refused by the picker, by status code.";
        let refused = IntCounterVec::new(Opts::new(name, help), &["status"])?;
        registry.register(Box::new(refused.clone()))?;
        let name = "kvfleet_gateway_picker_streams";
        let streams = IntGauge::new(name, "Open streams, one for each request in flight.")?;
        registry.register(Box::new(streams.clone()))?;
        let name = "kvfleet_gateway_picker_seconds";
        let help = "Seconds from the end of a request to its pick.";
        let buckets = prometheus::exponential_buckets(0.000_05, 2.0, 16)?;
        let seconds = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
        registry.register(Box::new(seconds.clone()))?;
        Ok(PickerMetrics {
            picked: counter("kvfleet_gateway_picker_picked_total", "Requests with a picked endpoint.")?,
            refused,
            served_elsewhere: counter(
                "kvfleet_gateway_picker_served_elsewhere_total",
                "Requests answered by another engine than the one picked first.",
            )?,
            protocol_errors: counter(
                "kvfleet_gateway_picker_faults_total",
                "Streams that ended because of a protocol violation.",
            )?,
            streams,
            shed: counter(
                "kvfleet_gateway_picker_shed_total",
                "Streams refused because streams_max was reached.",
            )?,
            pick_seconds: seconds,
        })
    }

    pub(crate) fn refused(&self, status: u16) {
        self.refused.with_label_values(&[&status.to_string()]).inc();
    }

    pub(crate) fn observe_pick(&self, took: Duration) {
        self.pick_seconds.observe(took.as_secs_f64());
    }
}
