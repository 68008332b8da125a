//! The `kvfleet` command as a library: everything it does, callable from tests.
//!
//! `args` defines the command line; each other module is one command or shared code. Not here:
//! decisions about blocks (`kv-core`), and the services (`kvfleet-router`, `kvfleet-node`).

pub mod access;
pub mod admin;
pub mod args;
pub mod calls;
pub mod certs;
pub mod cluster;
pub mod config;
pub mod connect;
pub mod demo;
pub mod inspect;
pub mod keys;
pub mod members;
pub mod probe;
pub mod process;
#[cfg(test)]
mod reference;
pub mod replay;
pub mod report;
pub mod status;
pub mod trace;
pub mod up;
pub mod weights;
pub mod why;
