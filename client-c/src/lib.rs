//! The client for engines that are not in Rust: what `include/kvfleet.h` declares.
//!
//! Functions are in `entry.rs`, structs as C sees them in `abi.rs`. `raw.rs` is all that reads and writes what callers
//! point to, `slices.rs` the memory that they lend, `calls.rs` makes operations of their calls and `results.rs` answers
//! of what came of them; `layer_saves.rs` is a save that takes layers, `prefills.rs` a prefill beside its load, `reports.rs` what is told of paths, links and the instance, `status.rs` what goes wrong. docs/adr/0044 says why it is so.
//!
//! Not here: what operations do and when they end (`kvfleet-client`), and words of the wire.

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
