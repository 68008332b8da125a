//! The one command a person types, as a library: everything `kvfleet` does, callable from tests.
//!
//! `args` is what can be typed; each other module is one command or something several share. Not here:
//! any decision about blocks (`kv-core`) and the services themselves (`kvfleet-router`, `kvfleet-node`).

pub mod admin;
pub mod args;
pub mod calls;
pub mod certificates;
pub mod cluster;
pub mod config;
pub mod connect;
pub mod demo;
pub mod inspect;
pub mod instance;
pub mod members;
pub mod probe;
pub mod process;
pub mod replay;
pub mod report;
pub mod status;
pub mod trace;
pub mod up;
pub mod weights;
pub mod why;
