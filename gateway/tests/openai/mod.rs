//! Tests of the OpenAI-compatible API with scripted engines.

mod answers;
mod broken;
mod ends;
mod engine;
mod failures;
mod fixture;
mod keys;
mod limits;
mod models;
mod pairs;
mod prompts;
mod tls;
