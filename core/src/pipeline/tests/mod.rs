//! Tests of the pipeline: each rule against a naive model.
#![allow(clippy::unwrap_used)]

mod efficiency;
mod overlap;
mod preload;
mod world;

use super::*;
