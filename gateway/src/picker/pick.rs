//! Picks the endpoint for one request of Envoy: reads its prompt and asks the router.
//!
//! Not here: when a pick is needed (`exchange.rs`), and how the router chooses
//! (`kv_core::schedule`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kv_core::id::InstanceId;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::exchange::PickRequest;
use super::head::RequestHead;
use super::messages::Rejection;
use crate::decide::{Decider, Refusal, RequestContext, RouteChoice, RouteTarget};
use crate::endpoints::Endpoint;
use crate::endpoints::models::EngineRequirements;
use crate::prompt::{Prompt, RequestReader};

/// Longest prompt, in blocks, that is kept until the answering endpoint is known. It bounds the
/// memory per request to about 100 KiB.
const REPORTABLE_BLOCKS_MAX: usize = 8_192;

/// Picks endpoints.
#[derive(Debug)]
pub(crate) struct EndpointPicker {
    decider: Decider,
    reader: Arc<RequestReader>,
    /// Stands for a request without a prompt.
    empty: Prompt,
    /// Most endpoints in one answer: the best one and alternatives for Envoy's retries.
    endpoints_max: usize,
    next: AtomicU64,
}

/// The picked endpoints of a request.
#[derive(Clone, Debug)]
pub(crate) struct PickOutcome {
    /// Number of the request at the router.
    pub(crate) request: u64,
    /// Endpoints, best first; never empty.
    pub(crate) endpoints: Vec<Arc<Endpoint>>,
    /// Input of the route call, kept until the answering endpoint is known. `None` if the router
    /// was not asked, or if the prompt is too long to keep.
    pub(crate) routed: Option<Box<(Prompt, RequestContext)>>,
    /// Endpoint that computes the prompt, if another one decodes.
    pub(crate) prefill: Option<Arc<Endpoint>>,
}

impl PickOutcome {
    /// Value of Envoy's destination header.
    pub(crate) fn destination(&self) -> String {
        self.endpoints.iter().map(|endpoint| endpoint.authority.as_str()).collect::<Vec<_>>().join(",")
    }
}

impl EndpointPicker {
    /// `first` is the number of the first request; it must differ from numbers of other processes
    /// and earlier starts.
    pub(crate) fn new(
        decider: Decider,
        reader: Arc<RequestReader>,
        block_tokens: u32,
        endpoints_max: usize,
        first: u64,
    ) -> EndpointPicker {
        let empty = Prompt { block_tokens, ..Prompt::default() };
        EndpointPicker { decider, reader, empty, endpoints_max, next: AtomicU64::new(first) }
    }

    pub(crate) fn decider(&self) -> &Decider {
        &self.decider
    }

    /// Picks endpoints for a request.
    pub(crate) async fn pick(&self, pick_request: &PickRequest) -> Result<PickOutcome, Rejection> {
        let PickRequest { head, body } = pick_request;
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let among = self.candidates(head)?;
        if let Some(selection) = &head.selection {
            let endpoints = self.select_named(selection, &among)?;
            return Ok(PickOutcome { request, endpoints, prefill: None, routed: None });
        }
        // A request without a known prompt is placed by load alone.
        let (prompt, need) = match body {
            Some(body) if RequestReader::has_prompt(&head.path) => self.read(head, body).await?,
            Some(_) | None => (self.empty.clone(), EngineRequirements::default()),
        };
        let terms = RequestContext {
            request,
            requirements: need,
            candidates: Some(among),
            traceparent: head.traceparent.clone(),
            slo: head.slo.clone(),
            ..RequestContext::default()
        };
        let chosen = self.decider.decide(&prompt, &terms).await.map_err(rejection)?;
        let RouteChoice { target: way, fallbacks, .. } = chosen;
        let first = way.endpoint.instance;
        let is_pair = way.partner.is_some();
        // One prefill header serves all alternatives, so they must share the kind of placement and
        // the prefill endpoint.
        let compatible = fallbacks.into_iter().filter(|other| {
            other.partner.is_some() == is_pair && (!is_pair || other.endpoint.instance == first)
        });
        let prefill = if is_pair { self.dialable(&way.endpoint) } else { None };
        let answering = std::iter::once(way).chain(compatible);
        let endpoints = answering.filter_map(|way| self.dialable(way.answering_endpoint()));
        let endpoints: Vec<_> = endpoints.take(self.endpoints_max).collect();
        if endpoints.is_empty() || is_pair != prefill.is_some() {
            // The router counts the request as sent.
            self.decider.router().record_abort(request);
            let reason = "the chosen engines have just lost their addresses; retry the request";
            return Err(Rejection::new(503, "no_endpoint", reason));
        }
        let is_kept = prompt.hashes.len() <= REPORTABLE_BLOCKS_MAX;
        let asked = is_kept.then(|| Box::new((prompt, terms)));
        Ok(PickOutcome { request, endpoints, prefill, routed: asked })
    }

    /// Reports that endpoint `by` answers instead of the picked one.
    pub(crate) fn report_served_by(&self, picked: &mut PickOutcome, by: &Arc<Endpoint>) {
        let Some(asked) = picked.routed.take() else { return };
        let (prompt, terms) = &*asked;
        let by = Arc::clone(by);
        // The prefill header names the prefill endpoint, independent of the answering one.
        let way = match &picked.prefill {
            Some(prefill) => RouteTarget { endpoint: Arc::clone(prefill), partner: Some(by) },
            None => RouteTarget { endpoint: by, partner: None },
        };
        self.decider.report_reroute(prompt, terms, &way);
    }

    /// Instances that may be chosen. Envoy sends to addresses only, and may restrict them to a
    /// subset.
    fn candidates(&self, head: &RequestHead) -> Result<Vec<InstanceId>, Rejection> {
        let known = self.decider.endpoints().list();
        let dialable: Vec<_> = known.iter().filter_map(|endpoint| self.dialable(endpoint)).collect();
        if dialable.is_empty() && !known.is_empty() {
            let reason = "no endpoint name resolves to an address, which Envoy needs: check the names of the \
                endpoints, or configure them as ip:port";
            return Err(Rejection::new(503, "no_endpoint", reason));
        }
        let among: Vec<_> = match &head.subset {
            None => dialable.into_iter().map(|endpoint| endpoint.instance).collect(),
            Some(subset) => dialable
                .into_iter()
                .filter(|endpoint| subset.iter().any(|one| *one == endpoint.authority))
                .map(|endpoint| endpoint.instance)
                .collect(),
        };
        match &head.subset {
            Some(subset) if among.is_empty() => {
                let reason = format!(
                    "none of the {} endpoints that this request may go to is known to the router",
                    subset.len()
                );
                Err(Rejection::new(503, "subset", reason))
            }
            _ => Ok(among),
        }
    }

    /// The endpoint with its name resolved to an address, because Envoy does not resolve names;
    /// `None` if it has no address.
    fn dialable(&self, endpoint: &Arc<Endpoint>) -> Option<Arc<Endpoint>> {
        if endpoint.authority.parse::<SocketAddr>().is_ok() {
            return Some(Arc::clone(endpoint));
        }
        let address = self.decider.endpoints().addresses(endpoint.instance).first()?.to_string();
        Some(Arc::new(Endpoint { authority: address, ..Endpoint::clone(endpoint) }))
    }

    /// Endpoints that a conformance test selects, by address with or without a port.
    fn select_named(
        &self,
        selection: &[String],
        among: &[InstanceId],
    ) -> Result<Vec<Arc<Endpoint>>, Rejection> {
        let known = self.decider.endpoints().list();
        let known: Vec<_> = known.iter().filter_map(|endpoint| self.dialable(endpoint)).collect();
        let is_named = |endpoint: &Endpoint, name: &str| {
            let host = endpoint.authority.rsplit_once(':').map_or("", |(host, _)| host);
            endpoint.authority == name || host == name
        };
        let find = |name: &String| {
            known.iter().find(|one| among.contains(&one.instance) && is_named(one, name)).cloned()
        };
        let endpoints: Vec<_> = selection.iter().filter_map(find).take(self.endpoints_max).collect();
        match endpoints.is_empty() {
            false => Ok(endpoints),
            true => {
                Err(Rejection::new(503, "selection", "none of the endpoints that the test selects is known"))
            }
        }
    }

    async fn read(
        &self,
        head: &RequestHead,
        body: &Bytes,
    ) -> Result<(Prompt, EngineRequirements), Rejection> {
        let (path, model, own) = (head.path.clone(), head.model.clone(), body.clone());
        let read = move |reader: &RequestReader| match model {
            Some(model) => reader.read(&path, &with_model(&own, &model)),
            None => reader.read(&path, &own),
        };
        match self.reader.read_async(body.len(), read).await {
            Ok(asked) => {
                let need = asked.requirements(&head.path);
                Ok((asked.prompt, need))
            }
            Err(unreadable) => Err(Rejection::new(unreadable.status(), "unreadable", unreadable.to_string())),
        }
    }
}

fn rejection(refusal: Refusal) -> Rejection {
    match refusal {
        Refusal::Busy { reason, retry_after } => {
            Rejection { retry_after: Some(retry_after), ..Rejection::new(429, "busy", reason) }
        }
        Refusal::Unavailable { reason, retry_after } => {
            Rejection { retry_after: Some(retry_after), ..Rejection::new(503, "no_endpoint", reason) }
        }
        Refusal::Invalid(reason) => Rejection::new(400, "invalid", reason),
        Refusal::NoFit(misfit) => Rejection::new(misfit.status(), misfit.code(), misfit.to_string()),
    }
}

#[derive(Deserialize)]
struct ModelField<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
}

/// Replaces the model in a JSON body. All other bytes stay, because templates render tools in the
/// order of their keys. A body that is not a JSON object is returned unchanged, and is refused
/// later.
fn with_model(body: &[u8], model: &str) -> Vec<u8> {
    if body.iter().find(|letter| !letter.is_ascii_whitespace()) != Some(&b'{') {
        return body.to_vec();
    }
    let Ok(found) = serde_json::from_slice::<ModelField<'_>>(body) else { return body.to_vec() };
    let value = serde_json::Value::from(model).to_string();
    let (start, length, put) = match found.model {
        Some(raw) => (raw.get().as_ptr() as usize - body.as_ptr() as usize, raw.get().len(), value),
        None => {
            let Some(open) = body.iter().position(|letter| *letter == b'{') else { return body.to_vec() };
            let is_empty =
                body[open + 1..].iter().find(|letter| !letter.is_ascii_whitespace()) == Some(&b'}');
            let comma = if is_empty { "" } else { "," };
            (open + 1, 0, format!("\"model\":{value}{comma}"))
        }
    };
    [&body[..start], put.as_bytes(), &body[start + length..]].concat()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn replaces_the_model_and_nothing_else() {
        let cases = [
            (
                r#"{"z":1, "model" : "a" ,"b":[{"model":"x"}]}"#,
                r#"{"z":1, "model" : "new" ,"b":[{"model":"x"}]}"#,
            ),
            (r#" { "z":1}"#, r#" {"model":"new", "z":1}"#),
            ("{ }", r#"{"model":"new" }"#),
            ("[1]", "[1]"),
            ("{", "{"),
            (r#"{"model":"a\"}"}"#, r#"{"model":"new"}"#),
        ];
        for (before, after) in cases {
            assert_eq!(String::from_utf8(with_model(before.as_bytes(), "new")).unwrap(), after);
        }
    }
}
