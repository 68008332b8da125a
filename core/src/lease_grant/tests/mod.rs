//! Tests of grants: against naive models, and in every order of events.
#![allow(clippy::unwrap_used)]

mod rules;
mod search;
mod world;
