//! KV events of inference engines: the ZMTP connection that carries them and the payloads of vLLM and SGLang.
//!
//! Not here: the tasks that follow engines and the index that the events fill (`router/src/engines/`).

pub mod events;
pub mod zmtp;
