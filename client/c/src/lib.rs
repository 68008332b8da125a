//! The client for engines that are not written in Rust, as declared by `include/kvfleet.h`.
//!
//! - `entry.rs` has the functions, `abi.rs` the structs of the C interface.
//! - `raw.rs` reads and writes memory that callers point to; `slices.rs` has the memory that they
//!   lend.
//! - `calls.rs` converts calls to operations, and `results.rs` their outcomes to answers.
//! - `layer_saves.rs` is a layer-wise save, `prefills.rs` a prefill that overlaps with its load.
//! - `reports.rs` has paths, links and the instance's reports; `status.rs` has errors.
//!
//! docs/adr/0044 gives the reasons. Not here: running operations (`kvfleet-client`), and wire
//! messages.

pub mod abi;
mod calls;
pub mod entry;
mod handles;
mod layer_saves;
mod prefills;
mod raw;
mod reports;
mod results;
mod slices;
pub mod status;

pub use handles::{ClientHandle, HasherHandle, QueueHandle};
pub use layer_saves::LayerSaveHandle;
pub use prefills::PrefillHandle;
pub use reports::{PathsHandle, ReporterHandle};
pub use results::ResultHandle;
