//! Which headers go on, in both directions, and which are ours.
//!
//! Pure. Not here: where a request goes (`forward.rs`).

use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderValue};

use crate::decide::Wishes;

/// Number by which a caller knows a request again.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The trace that a caller began.
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Which instance answered.
pub(super) const INSTANCE: HeaderName = HeaderName::from_static("x-kvfleet-instance");

/// Which instance computed the prompt, where another answered.
pub(super) const PREFILL_INSTANCE: HeaderName = HeaderName::from_static("x-kvfleet-prefill-instance");

/// By which sidecars before engines are told who computes the prompt.
const PREFILLER: HeaderName = HeaderName::from_static("x-prefiller-host-port");

/// Under which number the router was asked.
pub(super) const REQUEST: HeaderName = HeaderName::from_static(crate::REQUEST_HEADER);

/// Limits of time that callers ask for.
const LIMITS: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"];

/// How much a request matters, by the name of an objective; and among whom the fleet is shared.
const WHOSE: [&str; 3] =
    ["x-gateway-inference-objective", "x-llm-d-inference-objective", "x-gateway-inference-fairness-id"];

/// Longest name of either.
const NAME_BYTES_MAX: usize = 256;

/// Of one connection, not of the request.
const HOP: [HeaderName; 7] =
    [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// The same, without names of their own in the library.
const HOP_OLD: [HeaderName; 2] =
    [HeaderName::from_static("keep-alive"), HeaderName::from_static("proxy-connection")];

/// Longest request id that is taken over.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// Removes what belongs to one connection.
fn without_hops(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP.iter().chain(&HOP_OLD).chain(&named) {
        headers.remove(name);
    }
}

/// Headers of a request as the engine gets them. `number` is the request's at the router, which engines that ask it name.
pub(super) fn onward(
    mut headers: HeaderMap,
    (request_id, number): (&HeaderValue, u64),
    traceparent: &str,
) -> HeaderMap {
    without_hops(&mut headers);
    // Who computes is the router's to say.
    for name in [HOST, CONTENT_LENGTH, EXPECT, PREFILLER] {
        headers.remove(name);
    }
    headers.insert(REQUEST_ID, request_id.clone());
    headers.insert(REQUEST, HeaderValue::from(number));
    if let Ok(value) = HeaderValue::from_str(traceparent)
        && !traceparent.is_empty()
    {
        headers.insert(TRACEPARENT, value);
    }
    headers
}

/// Headers of an answer as the caller gets them.
pub(super) fn back(headers: &mut HeaderMap) {
    without_hops(headers);
}

/// The id that a request has, or one of its own made of `random`.
pub(super) fn request_id(headers: &HeaderMap, random: u128) -> HeaderValue {
    match headers.get(REQUEST_ID) {
        Some(id) if (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) => id.clone(),
        _ => HeaderValue::from_str(&format!("{random:032x}")).unwrap_or(HeaderValue::from_static("none")),
    }
}

/// What its caller wishes for a request, in the words of the Inference Extension: limits of time, and where callers are trusted, who it is for and how much it
/// matters.
pub(super) fn wishes(headers: &HeaderMap, are_trusted: bool) -> Wishes {
    let mut wishes = Wishes::default();
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    for name in LIMITS {
        if let Some(text) = text(name) {
            wishes.limit(name, text);
        }
    }
    if are_trusted {
        for name in WHOSE {
            if let Some(text) = text(name).filter(|text| (1..=NAME_BYTES_MAX).contains(&text.len())) {
                wishes.whose(name, text);
            }
        }
    }
    wishes
}

/// The trace that a request has; empty for none.
pub(super) fn traceparent(headers: &HeaderMap) -> &str {
    headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn what_belongs_to_a_connection_stays_and_the_rest_goes_on() {
        let came = headers(&[
            ("authorization", "Bearer secret"),
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("host", "door"),
            ("content-length", "7"),
            ("x-data-parallel-rank", "3"),
            ("x-prefiller-host-port", "of a caller:1"),
            ("x-kvfleet-request", "of a caller"),
        ]);
        let id = HeaderValue::from_static("a");
        let sent = onward(came, (&id, 7), "00-t-s-01");
        let expected = headers(&[
            ("authorization", "Bearer secret"),
            ("x-data-parallel-rank", "3"),
            ("x-request-id", "a"),
            ("x-kvfleet-request", "7"),
            ("traceparent", "00-t-s-01"),
        ]);
        assert_eq!(sent, expected);
    }

    #[test]
    fn an_id_is_kept_and_made_where_there_is_none() {
        assert_eq!(request_id(&headers(&[("x-request-id", "mine")]), 1), "mine");
        assert_eq!(request_id(&headers(&[("x-request-id", "")]), 255), format!("{:032x}", 255).as_str());
    }

    #[test]
    fn limits_are_read_and_nonsense_is_no_limit() {
        let of = |ttft: &'static str, tpot: &'static str| {
            let pairs = LIMITS.into_iter().zip([ttft, tpot]);
            let headers =
                pairs.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            let Wishes { ttft, tpot, fairness, .. } = wishes(&headers.collect(), true);
            assert!(fairness.is_empty());
            [ttft, tpot].map(|limit| limit.map(|limit| limit.as_micros()))
        };
        assert_eq!(of("250", " 12.5 "), [Some(250_000), Some(12_500)]);
        for nonsense in ["", "soon", "-1", "NaN", "inf", "1e300"] {
            assert_eq!(of(nonsense, nonsense), [None, None], "{nonsense}");
        }
        assert_eq!(of("1", "0"), [Some(1_000), None]);
    }

    #[test]
    fn who_it_is_for_and_how_much_it_matters_is_for_trusted_callers_to_say() {
        let said = headers(&[
            ("x-llm-d-inference-objective", " interactive "),
            ("x-gateway-inference-fairness-id", "team-a"),
            ("x-llm-d-slo-ttft-ms", "250"),
        ]);
        let of = |are_trusted| {
            let Wishes { objective, fairness, ttft, .. } = wishes(&said, are_trusted);
            assert_eq!(ttft, Some(std::time::Duration::from_millis(250)));
            (objective, fairness)
        };
        assert_eq!(of(false), (String::new(), String::new()));
        assert_eq!(of(true), ("interactive".to_owned(), "team-a".to_owned()));
    }
}
