//! Connections of kvfleet's control calls: TLS identities and their renewal, listeners and accept
//! limits, the HTTP server, channels, and trace context.
//!
//! Not here: the messages (`proto/`), the block path (`transport/`), and what a server answers.

pub mod accept_limits;
pub mod certificates;
pub mod channel;
pub mod fleet_certificates;
pub mod http;
pub mod secrets;
pub mod tls;
pub mod trace_context;
