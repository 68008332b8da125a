//! Rules of lending: against naive models, and in every order in which things can happen.
#![allow(clippy::unwrap_used)]

mod rules;
mod search;
mod world;
