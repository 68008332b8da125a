//! Logs to stderr and, if configured, spans over OTLP with W3C trace context.
//!
//! Not here: the spans (each crate creates its own), and their propagation between processes
//! (`kvfleet_proto::trace_context`).

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config::ProcessConfig;

/// Keeps the exporter alive; flush with [`Telemetry::finish`] before the process ends.
pub(super) struct Telemetry {
    spans: Option<SdkTracerProvider>,
}

impl Telemetry {
    /// Exports the buffered spans. A missing collector only causes a warning.
    pub(super) fn finish(self) {
        if let Some(Err(cause)) = self.spans.map(|spans| spans.shutdown()) {
            tracing::warn!(%cause, "last spans were not exported");
        }
    }
}

/// Warnings to silence: openraft warns for each proposal with a single waiter, which all proposals
/// here have.
const SILENCED_WARNINGS: &str = "openraft::raft::responder=error";

/// Log filter. A filter that names openraft gets all of its messages.
fn filter(text: &str) -> Result<EnvFilter, Box<dyn std::error::Error>> {
    let filter = EnvFilter::try_new(text)?;
    Ok(if text.contains("openraft") { filter } else { filter.add_directive(SILENCED_WARNINGS.parse()?) })
}

/// Installs the global subscriber. Must run inside the runtime, which the exporter uses.
pub(super) fn install(config: &ProcessConfig, service: &str) -> anyhow::Result<Telemetry> {
    let filter = filter(&config.log).map_err(|cause| {
        anyhow::anyhow!(
            "process.log = {:?} is not a log filter: {cause}; try \"info\" or \"kvfleet_router=debug\"",
            config.log
        )
    })?;
    let spans = (!config.otlp.is_empty()).then(|| exporter(&config.otlp, service)).transpose()?;
    let export =
        spans.as_ref().map(|provider| tracing_opentelemetry::layer().with_tracer(provider.tracer("kvfleet")));
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let text: Box<dyn Layer<_> + Send + Sync> =
        if config.log_json { text.json().boxed() } else { text.with_ansi(false).boxed() };
    Registry::default()
        .with(export)
        .with(text)
        .with(filter)
        .try_init()
        .map_err(|cause| anyhow::anyhow!("logging is already set up: {cause}"))?;
    Ok(Telemetry { spans })
}

fn exporter(endpoint: &str, service: &str) -> anyhow::Result<SdkTracerProvider> {
    opentelemetry::global::set_text_map_propagator(TraceContextPropagator::new());
    let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build().map_err(|cause| {
        anyhow::anyhow!("process.otlp = {endpoint:?} is not a collector: {cause}; expected http://HOST:4317")
    })?;
    let resource = Resource::builder().with_service_name(service.to_owned()).build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}
