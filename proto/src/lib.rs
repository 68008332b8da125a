//! Wire words of kvfleet. Placeholder, filled by the crate's work.
#![allow(missing_docs)]
pub mod frame;
