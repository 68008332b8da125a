//! Tests of the pipeline: each rule beside a naive one that is too simple to be wrong.
#![allow(clippy::unwrap_used)]

mod efficiency;
mod preload;
mod race;
mod world;

use super::*;
