//! What the door of Envoy counts and times.
//!
//! Not here: what the router behind it counts (`kvfleet_router`), and serving the numbers (the process does).

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// Handles; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub(crate) picked: IntCounter,
    refused: IntCounterVec,
    pub(crate) served_elsewhere: IntCounter,
    pub(crate) faults: IntCounter,
    pub(crate) streams: IntGauge,
    pub(crate) turned_away: IntCounter,
    seconds: Histogram,
}

impl Metrics {
    pub(crate) fn register(registry: &Registry) -> prometheus::Result<Metrics> {
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let name = "kvfleet_doors_picker_refused_total";
        let help = "Requests that Envoy was told to answer itself, by the status it answers with";
        let refused = IntCounterVec::new(Opts::new(name, help), &["status"])?;
        registry.register(Box::new(refused.clone()))?;
        let name = "kvfleet_doors_picker_streams";
        let streams = IntGauge::new(name, "Requests under way whose streams are open")?;
        registry.register(Box::new(streams.clone()))?;
        let name = "kvfleet_doors_picker_seconds";
        let help = "From the last of a request to where it goes";
        let buckets = prometheus::exponential_buckets(0.000_05, 2.0, 16)?;
        let seconds = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
        registry.register(Box::new(seconds.clone()))?;
        Ok(Metrics {
            picked: counter("kvfleet_doors_picker_picked_total", "Requests that were given an engine")?,
            refused,
            served_elsewhere: counter(
                "kvfleet_doors_picker_served_elsewhere_total",
                "Requests that another engine answered than the one chosen first",
            )?,
            faults: counter(
                "kvfleet_doors_picker_faults_total",
                "Streams that ended because a message did not belong where it came",
            )?,
            streams,
            turned_away: counter(
                "kvfleet_doors_picker_turned_away_total",
                "Streams beyond the limit, which were refused",
            )?,
            seconds,
        })
    }

    pub(crate) fn refused(&self, status: u16) {
        self.refused.with_label_values(&[&status.to_string()]).inc();
    }

    pub(crate) fn timed(&self, took: Duration) {
        self.seconds.observe(took.as_secs_f64());
    }
}
