//! Doors to the router for frontends that do not call it by gRPC: OpenAI-compatible requests, and Envoy's endpoint picker.
//!
//! Every door does three things: it reads which prompt a request has, asks the router in the same process (`decide.rs`), and sends the
//! request, or says where it is to be sent. Not here: the choice (`kv_core::schedule`), and what the router knows (`kvfleet_router`).

pub mod answer;
mod config;
mod decide;
mod endpoints;
mod metrics;
mod openai;
mod picker;
mod prompt;
mod serve;
mod start;
mod tally;
mod under_way;

/// Header by which engines get the number that the router knows a request by, and callers with the answer.
pub const REQUEST_HEADER: &str = "x-kvfleet-request";

// A whole router, as the tests of its own start it.
#[cfg(test)]
#[path = "../../router/tests/cluster/harness.rs"]
#[allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]
mod harness;
#[cfg(test)]
#[path = "../../router/tests/cluster/ports.rs"]
#[allow(missing_docs, unreachable_pub)]
mod ports;

pub use config::{ConfigError, DoorsConfig, EndpointConfig, ModelConfig, ObjectiveConfig};
pub use endpoints::OpenError as EndpointsError;
pub use endpoints::calls::{AdminConfig, AdminError};
pub use endpoints::config::{DiscoveredKind, KubernetesConfig, LoadConfig};
#[cfg(feature = "kubernetes")]
pub use endpoints::kubernetes::KubernetesError;
pub use openai::{BreakerConfig, OpenAiConfig, Priorities, RetryConfig};
pub use picker::{OpenError as PickerError, PickerConfig};
pub use prompt::public::{PromptReader, ReadPrompt, UnreadablePrompt};
pub use start::{Doors, StartError};
