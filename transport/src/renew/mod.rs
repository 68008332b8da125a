//! Renewal of a process's certificate files (`kvfleet_proto::tls`), re-exported and tested here
//! with the connections of both network paths.
//!
//! Not here: which certificates are accepted (`kvfleet_proto::tls`).

pub use kvfleet_net::tls::{RENEW_INTERVAL, keep_renewed};

#[cfg(test)]
mod tests;
