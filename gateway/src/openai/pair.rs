//! Request bodies for disaggregated prefill and decode, in the format of vLLM's and SGLang's
//! proxies.
//!
//! The prefill engine is asked for one token, and to keep its KV. Its answer describes how to get
//! the KV in `kv_transfer_params`, which is opaque here. The decode engine gets the original
//! request with these parameters. Pure. Not here: the choice of the pair (`kv_core::schedule`), and
//! sending (`forward.rs`).

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::value::{RawValue, to_raw_value};

/// Field that describes the KV transfer.
const PARAMS: &str = "kv_transfer_params";

/// Fields that shape the output. The prefill's one token is discarded, so they are removed.
const OUTPUT_FIELDS: [&str; 8] = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
];

/// The body is not a JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotAnObject;

type RawFields<'a> = BTreeMap<String, &'a RawValue>;

fn fields(body: &[u8]) -> Result<RawFields<'_>, NotAnObject> {
    serde_json::from_slice(body).map_err(|_| NotAnObject)
}

fn to_json(fields: &BTreeMap<String, &RawValue>) -> Bytes {
    // The values were parsed from JSON, so this cannot fail; an engine would refuse an empty body.
    Bytes::from(serde_json::to_vec(fields).unwrap_or_default())
}

/// Body of the prefill request.
///
/// # Errors
/// [`NotAnObject`].
pub(super) fn prefill_body(body: &[u8], is_chat: bool) -> Result<Bytes, NotAnObject> {
    let mut all = fields(body)?;
    let [one, no] = [to_raw_value(&1), to_raw_value(&false)].map(|value| value.map_err(|_| NotAnObject));
    let (one, no) = (one?, no?);
    // Unknown parameters of the caller are kept, in case its engines use them.
    let own = all.get(PARAMS).and_then(|own| serde_json::from_str::<serde_json::Map<_, _>>(own.get()).ok());
    let mut params = own.unwrap_or_default();
    params.insert("do_remote_decode".into(), true.into());
    params.insert("do_remote_prefill".into(), false.into());
    for unknown in ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"] {
        params.insert(unknown.into(), serde_json::Value::Null);
    }
    let params = to_raw_value(&params).map_err(|_| NotAnObject)?;
    let has_newer = all.contains_key("max_completion_tokens");
    for name in OUTPUT_FIELDS {
        all.remove(name);
    }
    all.insert("stream".into(), &no);
    all.insert("max_tokens".into(), &one);
    if is_chat && has_newer {
        all.insert("max_completion_tokens".into(), &one);
    }
    all.insert(PARAMS.into(), &params);
    Ok(to_json(&all))
}

/// Body of the decode request: the original one with the transfer parameters of the prefill's
/// answer. If the answer has none, the decode engine finds the KV by itself.
///
/// # Errors
/// [`NotAnObject`].
pub(super) fn second(body: &Bytes, answer: &[u8]) -> Result<Bytes, NotAnObject> {
    let answer_fields = fields(answer)?;
    let params = answer_fields.get(PARAMS).filter(|params| params.get() != "null");
    let mut all = fields(body)?;
    // The caller's own parameters do not describe this prefill's KV.
    let own = all.remove(PARAMS);
    if own.is_none() && params.is_none() {
        return Ok(body.clone());
    }
    all.extend(params.map(|params| (PARAMS.to_owned(), *params)));
    Ok(to_json(&all))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn value(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn prefill_body_requests_one_token_and_remote_decode() {
        let body = br#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"n":4,"min_tokens":9,
            "max_tokens":50,"messages":[{"role":"user","content":"\u00e9 1e400"}],"seed":12345678901234567890}"#;
        let params = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null,
        });
        let first = value(&prefill_body(body, true).unwrap());
        assert_eq!(
            first,
            json!({
                "model": "m", "stream": false, "max_tokens": 1, "messages": [{"role": "user", "content": "é 1e400"}],
                "seed": 12_345_678_901_234_567_890_u64, "kv_transfer_params": params,
            })
        );
        let newer = value(&prefill_body(br#"{"max_completion_tokens":5}"#, true).unwrap());
        assert_eq!((&newer["max_tokens"], &newer["max_completion_tokens"]), (&json!(1), &json!(1)));
        let own =
            value(&prefill_body(br#"{"kv_transfer_params":{"a":1,"remote_host":"x"}}"#, false).unwrap());
        assert_eq!(
            (&own["kv_transfer_params"]["a"], &own["kv_transfer_params"]["remote_host"]),
            (&json!(1), &Value::Null)
        );
    }

    #[test]
    fn decode_body_carries_the_transfer_parameters() {
        let body = Bytes::from_static(br#"{"stream":true,"prompt":[1,2],"kv_transfer_params":{"a":1}}"#);
        let answer =
            br#"{"id":"x","kv_transfer_params":{"remote_block_ids":[7,8],"remote_host":"h","big":1e400},
            "choices":[]}"#;
        let second = second(&body, answer).unwrap();
        let text = std::str::from_utf8(&second).unwrap();
        assert!(
            text.contains(r#""kv_transfer_params":{"remote_block_ids":[7,8],"remote_host":"h","big":1e400}"#),
            "{text}"
        );
        assert!(text.contains(r#""stream":true"#) && !text.contains(r#""a":1"#), "{text}");
        for none in [&b"{}"[..], br#"{"kv_transfer_params":null}"#] {
            let plain = Bytes::from_static(br#"{"stream":true, "prompt":[1,2]}"#);
            assert_eq!(super::second(&plain, none).unwrap(), plain, "unchanged");
            let without = super::second(&body, none).unwrap();
            assert_eq!(
                without,
                br#"{"prompt":[1,2],"stream":true}"#[..],
                "without the caller's transfer parameters"
            );
        }
    }

    #[test]
    fn refuses_bodies_that_are_not_objects() {
        for wrong in ["", "[1]", "{", "7", "nul"] {
            assert_eq!(prefill_body(wrong.as_bytes(), false), Err(NotAnObject), "{wrong}");
            assert_eq!(second(&Bytes::from_static(b"{}"), wrong.as_bytes()), Err(NotAnObject), "{wrong}");
        }
    }
}
