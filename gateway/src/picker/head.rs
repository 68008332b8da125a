//! Reads the headers of a request and Envoy's metadata, as far as a pick needs them.
//!
//! All values are untrusted: an invalid one counts as absent, except for a restriction of the
//! destination. Not here: how they are used (`exchange.rs`, `pick.rs`).

use kvfleet_proto::envoy::base::{HeaderMap, HeaderValue, Metadata};
use kvfleet_proto::envoy::well_known::{Struct, Value, value::Kind};

use crate::decide::RequestSlo;

/// Header and metadata key of the destination.
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Header that names the prefill endpoint to the decode endpoint, as in llm-d.
pub(crate) const PREFILL: &str = "x-prefiller-host-port";
/// Metadata namespace of endpoints.
pub(crate) const NAMESPACE: &str = "envoy.lb";
/// Response header of the conformance tests with the endpoint that answered.
pub(crate) const CONFORMANCE_SERVED: &str = "x-conformance-test-served-endpoint";
/// Response header with the reason of a refusal.
pub(crate) const DROPPED_REASON: &str = "x-llm-d-request-dropped-reason";

const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
const SERVED: &str = "x-gateway-destination-endpoint-served";
const MODEL_REWRITE: &str = "x-gateway-model-name-rewrite";
const CONFORMANCE_SELECTION: &str = "test-epp-endpoint-selection";
/// Namespace of the attributes that Envoy is configured to send.
const ATTRIBUTES: &str = "envoy.filters.http.ext_proc";

/// Most headers of one request; Envoy's default limit is 100.
const HEADERS_MAX: usize = 1_024;
/// Most bytes of all headers; Envoy's default limit is 60 KiB.
const HEADER_BYTES_MAX: usize = 1 << 20;
/// Longest value that is kept.
const VALUE_BYTES_MAX: usize = 1_024;
/// Most endpoints in a subset.
const SUBSET_MAX: usize = 4_096;

/// Values read from a request's headers and metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// Path without the query.
    pub(crate) path: String,
    pub(crate) traceparent: String,
    pub(crate) slo: RequestSlo,
    /// Model that replaces the one in the body.
    pub(crate) model: Option<String>,
    /// Endpoints that a conformance test selects.
    pub(crate) selection: Option<Vec<String>>,
    /// Endpoints that the request may go to; `None` allows all.
    pub(crate) subset: Option<Vec<String>>,
}

impl RequestHead {
    /// Reads headers and metadata; `None` if the headers exceed the limits.
    pub(crate) fn read(headers: &HeaderMap, metadata: Option<&Metadata>) -> Option<RequestHead> {
        let bytes: usize = headers
            .headers
            .iter()
            .map(|header| header.key.len() + header.value.len() + header.raw_value.len())
            .sum();
        if headers.headers.len() > HEADERS_MAX || bytes > HEADER_BYTES_MAX {
            return None;
        }
        let mut head = RequestHead { subset: metadata.and_then(subset), ..RequestHead::default() };
        for header in &headers.headers {
            let Ok(text) = std::str::from_utf8(raw(header)) else { continue };
            head.read_header(&header.key.to_ascii_lowercase(), text.trim());
        }
        Some(head)
    }

    fn read_header(&mut self, name: &str, text: &str) {
        if name == ":path" {
            text.split('?').next().unwrap_or_default().clone_into(&mut self.path);
            return;
        }
        if name == CONFORMANCE_SELECTION {
            self.selection = Some(split_list(text));
            return;
        }
        if text.is_empty() || text.len() > VALUE_BYTES_MAX {
            return;
        }
        if self.slo.read_latency_header(name, text) || self.slo.read_objective_header(name, text) {
            return;
        }
        match name {
            "traceparent" => text.clone_into(&mut self.traceparent),
            MODEL_REWRITE => self.model = Some(text.to_owned()),
            _ => {}
        }
    }
}

/// Endpoint that answered, from the protocol's metadata or from an attribute.
pub(crate) fn served_endpoint(
    metadata: Option<&Metadata>,
    attributes: &std::collections::HashMap<String, Struct>,
) -> Option<String> {
    let from_metadata = metadata
        .and_then(|metadata| metadata.filter_metadata.get(NAMESPACE))
        .and_then(|fields| text(fields.fields.get(SERVED)?));
    from_metadata.or_else(|| text(attributes.get(ATTRIBUTES)?.fields.get("upstream.address")?))
}

/// Value of a response header, by its name in lower case.
pub(crate) fn header_value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let header = headers.headers.iter().find(|header| header.key.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(raw(header)).ok()
}

/// Newer versions of Envoy send values as bytes.
fn raw(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}

/// Endpoints that the request may go to. An invalid value allows none.
fn subset(metadata: &Metadata) -> Option<Vec<String>> {
    let value = metadata.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    Some(match &value.kind {
        Some(Kind::StringValue(text)) => split_list(text),
        Some(Kind::ListValue(list)) => {
            list.values.iter().filter_map(text).flat_map(|text| split_list(&text)).take(SUBSET_MAX).collect()
        }
        _ => Vec::new(),
    })
}

fn text(value: &Value) -> Option<String> {
    match &value.kind {
        Some(Kind::StringValue(text)) if !text.is_empty() && text.len() <= VALUE_BYTES_MAX => {
            Some(text.clone())
        }
        _ => None,
    }
}

fn split_list(text: &str) -> Vec<String> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.take(SUBSET_MAX).map(str::to_owned).collect()
}
