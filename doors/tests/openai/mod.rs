//! The OpenAI-compatible door: engines of our own that answer as a test says, and callers.

mod answers;
mod broken;
mod ends;
mod engine;
mod failures;
mod house;
mod limits;
mod models;
mod pairs;
mod prompts;
