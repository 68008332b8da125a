//! Headers that the gateway forwards, removes and adds, in both directions.
//!
//! Pure. Not here: the choice of an engine (`forward.rs`).

use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::{HeaderMap, HeaderValue};

use crate::decide::RequestSlo;

/// Caller's id of the request.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// W3C trace context.
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Instance that answered.
pub(super) const INSTANCE: HeaderName = HeaderName::from_static("x-kvfleet-instance");

/// Instance that computed the prompt, if another one answered.
pub(super) const PREFILL_INSTANCE: HeaderName = HeaderName::from_static("x-kvfleet-prefill-instance");

/// Names the prefill endpoint to sidecars of engines.
const PREFILLER: HeaderName = HeaderName::from_static("x-prefiller-host-port");

/// Number of the request at the router.
pub(super) const REQUEST: HeaderName = HeaderName::from_static(crate::REQUEST_HEADER);

/// Latency limits that callers may set.
const LATENCY_HEADERS: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"];

/// Objective and fairness id.
const OBJECTIVE_HEADERS: [&str; 3] =
    ["x-gateway-inference-objective", "x-llm-d-inference-objective", "x-gateway-inference-fairness-id"];

/// Longest objective or fairness id.
const NAME_BYTES_MAX: usize = 256;

/// Hop-by-hop headers.
const HOP_BY_HOP: [HeaderName; 7] =
    [CONNECTION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];

/// Hop-by-hop headers without a constant in the library.
const LEGACY_HOP_BY_HOP: [HeaderName; 2] =
    [HeaderName::from_static("keep-alive"), HeaderName::from_static("proxy-connection")];

/// Longest request id that is kept.
const REQUEST_ID_BYTES_MAX: usize = 256;

/// Removes hop-by-hop headers.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&LEGACY_HOP_BY_HOP).chain(&named) {
        headers.remove(name);
    }
}

/// Headers of a request to the engine. `number` is the request's number at the router, which
/// engines use in calls to it.
pub(super) fn engine_headers(
    mut headers: HeaderMap,
    request_id: &HeaderValue,
    number: u64,
    traceparent: &str,
) -> HeaderMap {
    remove_hop_by_hop(&mut headers);
    // Callers must not choose the prefill endpoint.
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

/// Removes hop-by-hop headers from an answer.
pub(super) fn strip_answer_headers(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
}

/// The caller's request id, or a new one made of `random`.
pub(super) fn request_id(headers: &HeaderMap, random: u128) -> HeaderValue {
    match headers.get(REQUEST_ID) {
        Some(id) if (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) => id.clone(),
        _ => HeaderValue::from_str(&format!("{random:032x}")).unwrap_or(HeaderValue::from_static("none")),
    }
}

/// Objectives of a request from its headers. Objective and fairness id are read only if the caller
/// is trusted.
pub(super) fn request_slo(headers: &HeaderMap, trusts_caller: bool) -> RequestSlo {
    let mut wishes = RequestSlo::default();
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    for name in LATENCY_HEADERS {
        if let Some(text) = text(name) {
            wishes.read_latency_header(name, text);
        }
    }
    if trusts_caller {
        for name in OBJECTIVE_HEADERS {
            if let Some(text) = text(name).filter(|text| (1..=NAME_BYTES_MAX).contains(&text.len())) {
                wishes.read_objective_header(name, text);
            }
        }
    }
    wishes
}

/// Caller's trace context; empty for none.
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
    fn forwards_end_to_end_headers_only() {
        let came = headers(&[
            ("authorization", "Bearer secret"),
            ("connection", "close, X-Mine"),
            ("x-mine", "1"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("host", "gateway"),
            ("content-length", "7"),
            ("x-data-parallel-rank", "3"),
            ("x-prefiller-host-port", "of a caller:1"),
            ("x-kvfleet-request", "of a caller"),
        ]);
        let id = HeaderValue::from_static("a");
        let sent = engine_headers(came, &id, 7, "00-t-s-01");
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
    fn keeps_or_creates_a_request_id() {
        assert_eq!(request_id(&headers(&[("x-request-id", "mine")]), 1), "mine");
        assert_eq!(request_id(&headers(&[("x-request-id", "")]), 255), format!("{:032x}", 255).as_str());
    }

    #[test]
    fn reads_latency_limits_and_ignores_invalid_ones() {
        let of = |ttft: &'static str, tpot: &'static str| {
            let pairs = LATENCY_HEADERS.into_iter().zip([ttft, tpot]);
            let headers =
                pairs.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            let RequestSlo { ttft, tpot, fairness, .. } = request_slo(&headers.collect(), true);
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
    fn reads_objectives_of_trusted_callers_only() {
        let said = headers(&[
            ("x-llm-d-inference-objective", " interactive "),
            ("x-gateway-inference-fairness-id", "team-a"),
            ("x-llm-d-slo-ttft-ms", "250"),
        ]);
        let of = |are_trusted| {
            let RequestSlo { objective, fairness, ttft, .. } = request_slo(&said, are_trusted);
            assert_eq!(ttft, Some(std::time::Duration::from_millis(250)));
            (objective, fairness)
        };
        assert_eq!(of(false), (String::new(), String::new()));
        assert_eq!(of(true), ("interactive".to_owned(), "team-a".to_owned()));
    }
}
