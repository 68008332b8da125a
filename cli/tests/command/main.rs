//! Tests of the built `kvfleet` binary: real process clusters that replay, fail, get interrupted
//! and receive invalid input.
#![allow(clippy::unwrap_used)]

mod access;
mod bad_input;
mod crosscheck;
mod gateway;
mod half_messages;
mod lifecycle;
mod links;
mod prefill;
mod probes;
mod replay;
mod restart;
mod support;
mod trace;
mod transport;
mod weights;
mod why;
