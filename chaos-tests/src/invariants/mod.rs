//! What must hold whatever dies: one property per file, each a function from what was seen to a verdict.
//!
//! Every property is also shown a history it must refuse. Not here: making the history (`drive.rs`).

pub mod announces_kept;
pub mod epochs_grow;
pub mod fenced_stay_silent;
pub mod pins_kept;
pub mod replicas_agree;

/// What went wrong, in words a person can act on.
pub type Verdict = Result<(), String>;
