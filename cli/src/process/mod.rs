//! Common parts of every process: logs and traces, metrics, the READY line, and a clean stop.
//!
//! Not here: the services (`kvfleet-router`, `kvfleet-node`, `crate::instance`).

mod drain;
mod files;
mod health;
mod metrics;
mod ready;
mod signals;
mod start;
mod telemetry;

pub use ready::{ReadyLine, ReadyLineError};
pub use signals::{Stop, StopSignal};
pub(crate) use start::RouterProcessConfig;
pub use start::{Role, run};
