//! What every process of a cluster does around its service: logs and traces, metrics, the READY line,
//! and a clean stop.
//!
//! Not here: the services themselves (`kvfleet-router`, `kvfleet-node`, `crate::instance`).

mod drain;
mod files;
mod health;
mod metrics;
mod ready;
mod signals;
mod start;
mod telemetry;

pub use ready::{Ready, ReadyError};
pub use signals::{Stop, StopSignal};
pub(crate) use start::RouterProcessConfig;
pub use start::{Role, run};
