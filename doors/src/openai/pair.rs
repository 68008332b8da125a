//! The bodies of a request that one engine begins and another goes on with, in the words of vLLM's and SGLang's engines behind a proxy.
//!
//! The first is asked for one token and to keep what it computed for another; what it answers in `kv_transfer_params` says how that is got, in its own words
//! which are nobody's here, and the second is asked for all of it with these. Pure. Not here: who they are (`kv_core::schedule`), and the sending (`forward.rs`).

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::value::{RawValue, to_raw_value};

/// What says how KV is got.
const PARAMS: &str = "kv_transfer_params";

/// What bounds an answer or asks for it in pieces; the one token that the first says is read by nobody.
const OF_ANSWERS: [&str; 8] = [
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
];

/// The body is no JSON object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoObject;

type Fields<'a> = BTreeMap<String, &'a RawValue>;

fn fields(body: &[u8]) -> Result<Fields<'_>, NoObject> {
    serde_json::from_slice(body).map_err(|_| NoObject)
}

fn written(fields: &BTreeMap<String, &RawValue>) -> Bytes {
    // Text that was read is written; an empty body would be refused by the engine.
    Bytes::from(serde_json::to_vec(fields).unwrap_or_default())
}

/// What the first is asked.
///
/// # Errors
/// [`NoObject`].
pub(super) fn first(body: &[u8], is_chat: bool) -> Result<Bytes, NoObject> {
    let mut all = fields(body)?;
    let [one, no] = [to_raw_value(&1), to_raw_value(&false)].map(|value| value.map_err(|_| NoObject));
    let (one, no) = (one?, no?);
    // Those of others are kept by the first as well, so that nothing is lost where a caller names a way of its own.
    let own = all.get(PARAMS).and_then(|own| serde_json::from_str::<serde_json::Map<_, _>>(own.get()).ok());
    let mut params = own.unwrap_or_default();
    params.insert("do_remote_decode".into(), true.into());
    params.insert("do_remote_prefill".into(), false.into());
    for unknown in ["remote_engine_id", "remote_block_ids", "remote_host", "remote_port"] {
        params.insert(unknown.into(), serde_json::Value::Null);
    }
    let params = to_raw_value(&params).map_err(|_| NoObject)?;
    let has_newer = all.contains_key("max_completion_tokens");
    for name in OF_ANSWERS {
        all.remove(name);
    }
    all.insert("stream".into(), &no);
    all.insert("max_tokens".into(), &one);
    if is_chat && has_newer {
        all.insert("max_completion_tokens".into(), &one);
    }
    all.insert(PARAMS.into(), &params);
    Ok(written(&all))
}

/// What the second is asked: the same as the caller asked, with what the first said of where its KV is. An answer without that says that the KV
/// is where the second finds it by itself.
///
/// # Errors
/// [`NoObject`].
pub(super) fn second(body: &Bytes, answer: &[u8]) -> Result<Bytes, NoObject> {
    let said = fields(answer)?;
    let params = said.get(PARAMS).filter(|params| params.get() != "null");
    let mut all = fields(body)?;
    // A caller's own would have the second fetch what the first did not give it.
    let own = all.remove(PARAMS);
    if own.is_none() && params.is_none() {
        return Ok(body.clone());
    }
    all.extend(params.map(|params| (PARAMS.to_owned(), *params)));
    Ok(written(&all))
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
    fn the_first_says_one_token_and_keeps_what_it_computed() {
        let body = br#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"n":4,"min_tokens":9,
            "max_tokens":50,"messages":[{"role":"user","content":"\u00e9 1e400"}],"seed":12345678901234567890}"#;
        let params = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null,
        });
        let first = value(&first(body, true).unwrap());
        assert_eq!(
            first,
            json!({
                "model": "m", "stream": false, "max_tokens": 1, "messages": [{"role": "user", "content": "é 1e400"}],
                "seed": 12_345_678_901_234_567_890_u64, "kv_transfer_params": params,
            })
        );
        let newer = value(&super::first(br#"{"max_completion_tokens":5}"#, true).unwrap());
        assert_eq!((&newer["max_tokens"], &newer["max_completion_tokens"]), (&json!(1), &json!(1)));
        let own =
            value(&super::first(br#"{"kv_transfer_params":{"a":1,"remote_host":"x"}}"#, false).unwrap());
        assert_eq!(
            (&own["kv_transfer_params"]["a"], &own["kv_transfer_params"]["remote_host"]),
            (&json!(1), &Value::Null)
        );
    }

    #[test]
    fn the_second_is_asked_all_of_it_where_the_kv_is() {
        let body = Bytes::from_static(br#"{"stream":true,"prompt":[1,2],"kv_transfer_params":{"a":1}}"#);
        let answer = br#"{"id":"x","kv_transfer_params":{"remote_block_ids":[7,8],"remote_host":"h","big":1e400},"choices":[]}"#;
        let second = second(&body, answer).unwrap();
        let text = std::str::from_utf8(&second).unwrap();
        assert!(
            text.contains(r#""kv_transfer_params":{"remote_block_ids":[7,8],"remote_host":"h","big":1e400}"#),
            "{text}"
        );
        assert!(text.contains(r#""stream":true"#) && !text.contains(r#""a":1"#), "{text}");
        for none in [&b"{}"[..], br#"{"kv_transfer_params":null}"#] {
            let plain = Bytes::from_static(br#"{"stream":true, "prompt":[1,2]}"#);
            assert_eq!(super::second(&plain, none).unwrap(), plain, "as the caller wrote it");
            let without = super::second(&body, none).unwrap();
            assert_eq!(without, br#"{"prompt":[1,2],"stream":true}"#[..], "but for what is not its to say");
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for wrong in ["", "[1]", "{", "7", "nul"] {
            assert_eq!(first(wrong.as_bytes(), false), Err(NoObject), "{wrong}");
            assert_eq!(second(&Bytes::from_static(b"{}"), wrong.as_bytes()), Err(NoObject), "{wrong}");
        }
    }
}
