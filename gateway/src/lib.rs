//! The gateway: frontends that do not call the router by gRPC send OpenAI-compatible requests, or
//! ask through Envoy's endpoint picker.
//!
//! Both entry points read the prompt of a request and ask the router in the same process where it
//! runs (`decide.rs`). Then they forward the request, or name the endpoint to send it to.
//!
//! Not here: the choice of an instance (`kv_core::schedule`), and the router's state
//! (`kvfleet_router`).

pub mod answer;
mod config;
mod decide;
mod endpoints;
mod in_flight;
mod keys;
mod metrics;
mod openai;
mod picker;
mod prompt;
mod start;
mod upstream;
mod usage_scanner;

/// Header that carries the request's number at the router, to engines and back to callers.
pub const REQUEST_HEADER: &str = "x-kvfleet-request";

pub use config::{ConfigError, EndpointConfig, GatewayConfig, ModelConfig, ObjectiveConfig};
pub use endpoints::EndpointsError;
pub use endpoints::admin::{AdminConfig, AdminError};
pub use endpoints::config::{DiscoveredKind, KubernetesConfig, LoadConfig};
#[cfg(feature = "kubernetes")]
pub use endpoints::kubernetes::KubernetesError;
pub use keys::{KeyEntry, KeyEntryError, KeyFileError, NewKey, NewKeyError};
pub use openai::{BreakerConfig, ListenerTlsConfig, OpenAiConfig, PriorityOrder, RetryConfig};
pub use picker::{PickerConfig, PickerError};
pub use prompt::public::{PromptReader, ReadPrompt, UnreadablePrompt};
pub use start::{Gateway, StartError};
pub use upstream::{UpstreamConfig, UpstreamConfigError};
