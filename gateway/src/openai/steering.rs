//! Removes fields that callers may not send to an engine: where to get or leave KV, which rank computes, and
//! which request goes first.
//!
//! An engine obeys such fields from any source: it would connect to a host of the
//! caller's choice, or read the KV of another request. Pure. Not here: the fields that the gateway
//! itself adds (`pair.rs`, `priority.rs`), and which callers are trusted (`config.rs`).

use std::collections::BTreeMap;

use axum::http::header::HeaderName;
use bytes::Bytes;
use serde_json::value::RawValue;

use super::forward::ForwardRequest;
use crate::prompt::STEERING_FIELDS;

/// Headers that choose a rank of the engine.
const HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("x-data-parallel-rank"), HeaderName::from_static("x-data-parallel-host-port")];

/// Removes all that steers the engine; `has_fields` says whether the body has such fields.
pub(super) fn strip(sending: &mut ForwardRequest, has_fields: bool) {
    for name in &HEADERS {
        sending.headers.remove(name);
    }
    if has_fields {
        sending.body = strip_fields(&sending.body);
        sending.has_priority = false;
    }
}

/// The body without fields that steer the engine. A body that is no JSON object is returned
/// unchanged; engines refuse it.
fn strip_fields(body: &Bytes) -> Bytes {
    let Ok(mut fields) = serde_json::from_slice::<BTreeMap<String, &RawValue>>(body) else {
        return body.clone();
    };
    fields.retain(|name, _| !STEERING_FIELDS.contains(&name.as_str()));
    serde_json::to_vec(&fields).map_or_else(|_| body.clone(), Bytes::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steering_fields_are_removed() {
        let strip = |body: &'static str| strip_fields(&Bytes::from_static(body.as_bytes()));
        let body = r#"{"prompt":"a","kv_transfer_params":{"remote_host":"192.0.2.1"},"priority":-9,"x":[1.0,1e400]}"#;
        assert_eq!(strip(body), r#"{"prompt":"a","x":[1.0,1e400]}"#.as_bytes());
        for name in STEERING_FIELDS {
            let body = Bytes::from(format!(r#"{{"{name}":1}}"#));
            assert_eq!(strip_fields(&body), "{}".as_bytes(), "{name}");
        }
        assert_eq!(strip(r#"{"kv_transfer\u005fparams":1}"#), "{}".as_bytes(), "engines decode names too");
        for other in ["[1]", "x", ""] {
            assert_eq!(strip(other), other.as_bytes());
        }
    }
}
