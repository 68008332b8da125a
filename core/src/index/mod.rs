//! The replicated index.
pub mod command;
