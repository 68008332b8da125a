//! Invariants that hold under any failures: one property per file, each a function from
//! observations to a verdict.
//!
//! Every property is also tested with a history that it must refuse. Not here: producing the
//! history (`drive.rs`).

pub mod announcements_are_kept;
pub mod epochs_grow;
pub mod fenced_stay_silent;
pub mod pins_are_kept;
pub mod replicas_agree;

/// The violation, as text for a person.
pub type Verdict = Result<(), String>;
