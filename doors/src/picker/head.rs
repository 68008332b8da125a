//! What the headers of a request and Envoy's metadata say, as far as a pick goes.
//!
//! Everything here comes from outside: values that make no sense count as absent, unless they say where a request may go. Not here: what
//! is done with it (`exchange.rs`, `pick.rs`).

use kvfleet_proto::envoy::base::{HeaderMap, HeaderValue, Metadata};
use kvfleet_proto::envoy::well_known::{Struct, Value, value::Kind};

use crate::decide::Wishes;

/// Header and key of the metadata by which Envoy is told where a request goes.
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Header by which whoever answers is told who computes the prompt before, as llm-d has it.
pub(crate) const PREFILL: &str = "x-prefiller-host-port";
/// Namespace of the metadata about endpoints.
pub(crate) const NAMESPACE: &str = "envoy.lb";
/// Response header of the conformance tests: who answered.
pub(crate) const CONFORMANCE_SERVED: &str = "x-conformance-test-served-endpoint";
/// Response header that says why a request was refused.
pub(crate) const DROPPED: &str = "x-llm-d-request-dropped-reason";

const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
const SERVED: &str = "x-gateway-destination-endpoint-served";
const MODEL_REWRITE: &str = "x-gateway-model-name-rewrite";
const CONFORMANCE_SELECTION: &str = "test-epp-endpoint-selection";
/// Namespace of the attributes that Envoy is configured to send.
const ATTRIBUTES: &str = "envoy.filters.http.ext_proc";

/// Headers of one request: Envoy's own limit is 100 unless an operator raises it.
const HEADERS_MAX: usize = 1_024;
/// Bytes of all of them; Envoy's own limit is 60 KiB unless an operator raises it.
const HEADER_BYTES_MAX: usize = 1 << 20;
/// Longest of the values that are kept.
const VALUE_BYTES_MAX: usize = 1_024;
/// Endpoints that a subset may name.
const SUBSET_MAX: usize = 4_096;

/// What the headers of a request say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Head {
    /// Without the query.
    pub(crate) path: String,
    pub(crate) traceparent: String,
    pub(crate) wishes: Wishes,
    /// The model that it is read as, in place of the one that its body names.
    pub(crate) model: Option<String>,
    /// The endpoints that it is to go to, in the conformance tests.
    pub(crate) selection: Option<Vec<String>>,
    /// The endpoints that it may go to, where Envoy names any.
    pub(crate) subset: Option<Vec<String>>,
}

impl Head {
    /// Reads headers and metadata; nothing where they are more than anyone sends.
    pub(crate) fn read(headers: &HeaderMap, metadata: Option<&Metadata>) -> Option<Head> {
        let bytes: usize = headers
            .headers
            .iter()
            .map(|header| header.key.len() + header.value.len() + header.raw_value.len())
            .sum();
        if headers.headers.len() > HEADERS_MAX || bytes > HEADER_BYTES_MAX {
            return None;
        }
        let mut head = Head { subset: metadata.and_then(subset), ..Head::default() };
        for header in &headers.headers {
            let Ok(text) = std::str::from_utf8(raw(header)) else { continue };
            head.take(&header.key.to_ascii_lowercase(), text.trim());
        }
        Some(head)
    }

    fn take(&mut self, name: &str, text: &str) {
        if name == ":path" {
            text.split('?').next().unwrap_or_default().clone_into(&mut self.path);
            return;
        }
        if name == CONFORMANCE_SELECTION {
            self.selection = Some(listed(text));
            return;
        }
        if text.is_empty() || text.len() > VALUE_BYTES_MAX {
            return;
        }
        if self.wishes.limit(name, text) || self.wishes.whose(name, text) {
            return;
        }
        match name {
            "traceparent" => text.clone_into(&mut self.traceparent),
            MODEL_REWRITE => self.model = Some(text.to_owned()),
            _ => {}
        }
    }
}

/// Who answered, as Envoy says it with the headers of a response: in the metadata of the protocol, or as an attribute.
pub(crate) fn served(
    metadata: Option<&Metadata>,
    attributes: &std::collections::HashMap<String, Struct>,
) -> Option<String> {
    let said = metadata
        .and_then(|metadata| metadata.filter_metadata.get(NAMESPACE))
        .and_then(|fields| text(fields.fields.get(SERVED)?));
    said.or_else(|| text(attributes.get(ATTRIBUTES)?.fields.get("upstream.address")?))
}

/// The value of a header of a response, by its name in lower case.
pub(crate) fn value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let header = headers.headers.iter().find(|header| header.key.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(raw(header)).ok()
}

/// Newer Envoys say values as bytes.
fn raw(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value }
}

/// Where a request may go. The key is there and says nothing of use: nowhere.
fn subset(metadata: &Metadata) -> Option<Vec<String>> {
    let value = metadata.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?;
    Some(match &value.kind {
        Some(Kind::StringValue(text)) => listed(text),
        Some(Kind::ListValue(list)) => {
            list.values.iter().filter_map(text).flat_map(|text| listed(&text)).take(SUBSET_MAX).collect()
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

fn listed(text: &str) -> Vec<String> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.take(SUBSET_MAX).map(str::to_owned).collect()
}
