//! Rules of lending against naive models.
#![allow(clippy::unwrap_used)]

mod rules;
