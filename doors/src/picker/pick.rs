//! Which engine a request of Envoy goes to: its prompt is read, the router is asked.
//!
//! Not here: when that is asked (`exchange.rs`), and how the router chooses (`kv_core::schedule`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use kv_core::id::InstanceId;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::exchange::Question;
use super::head::Head;
use super::words::Refused;
use crate::decide::{Chosen, Decider, Refusal, Terms, Way};
use crate::endpoints::Endpoint;
use crate::endpoints::models::Need;
use crate::prompt::{Prompt, Reader};

/// Blocks of a prompt that are kept until it is known who answers: a hundred thousand tokens and more, a hundred kilobytes.
const KEPT_BLOCKS_MAX: usize = 8_192;

/// Picks.
#[derive(Debug)]
pub(crate) struct Picks {
    decider: Decider,
    reader: Arc<Reader>,
    /// What a request without a prompt counts as.
    empty: Prompt,
    /// Endpoints that one answer names: the best, and where else Envoy may try.
    named_max: usize,
    next: AtomicU64,
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub(crate) struct Picked {
    /// Its number, by which the router knows it.
    pub(crate) request: u64,
    /// Best first; never empty.
    pub(crate) endpoints: Vec<Arc<Endpoint>>,
    /// What was asked, until it is known who answers; nothing where nobody was asked, or it is longer than is kept.
    pub(crate) asked: Option<Box<(Prompt, Terms)>>,
    /// Who computes the prompt before that, where it is another.
    pub(crate) prefill: Option<Arc<Endpoint>>,
}

impl Picked {
    /// As Envoy is told.
    pub(crate) fn destination(&self) -> String {
        self.endpoints.iter().map(|endpoint| endpoint.authority.as_str()).collect::<Vec<_>>().join(",")
    }
}

impl Picks {
    /// `first` is the number of the first request; those of another process or an earlier start are others.
    pub(crate) fn new(
        decider: Decider,
        reader: Arc<Reader>,
        block_tokens: u32,
        named_max: usize,
        first: u64,
    ) -> Picks {
        let empty = Prompt { block_tokens, ..Prompt::default() };
        Picks { decider, reader, empty, named_max, next: AtomicU64::new(first) }
    }

    pub(crate) fn decider(&self) -> &Decider {
        &self.decider
    }

    /// Decides.
    pub(crate) async fn pick(&self, question: &Question) -> Result<Picked, Refused> {
        let Question { head, body } = question;
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let among = self.among(head)?;
        if let Some(selection) = &head.selection {
            let endpoints = self.selected(selection, &among)?;
            return Ok(Picked { request, endpoints, prefill: None, asked: None });
        }
        // A request that has no prompt that we know of still goes somewhere.
        let (prompt, need) = match body {
            Some(body) if Reader::reads(&head.path) => self.read(head, body).await?,
            Some(_) | None => (self.empty.clone(), Need::default()),
        };
        let terms = Terms {
            request,
            need,
            among: Some(among),
            traceparent: head.traceparent.clone(),
            wishes: head.wishes.clone(),
            ..Terms::default()
        };
        let chosen = self.decider.decide(&prompt, &terms).await.map_err(refused)?;
        let Chosen { way, fallbacks, .. } = chosen;
        let first = way.endpoint.instance;
        let is_pair = way.partner.is_some();
        // One header says who computes, whichever of these answers: others of its kind only.
        let alike = fallbacks.into_iter().filter(|other| {
            other.partner.is_some() == is_pair && (!is_pair || other.endpoint.instance == first)
        });
        let prefill = if is_pair { self.dialable(&way.endpoint) } else { None };
        let answering = std::iter::once(way).chain(alike);
        let endpoints = answering.filter_map(|way| self.dialable(way.answers()));
        let endpoints: Vec<_> = endpoints.take(self.named_max).collect();
        if endpoints.is_empty() || is_pair != prefill.is_some() {
            // It counts as sent.
            self.decider.desk().left(request);
            let reason = "the engines that were chosen have just lost their addresses; ask again";
            return Err(Refused::new(503, "no_endpoint", reason));
        }
        let is_kept = prompt.hashes.len() <= KEPT_BLOCKS_MAX;
        let asked = is_kept.then(|| Box::new((prompt, terms)));
        Ok(Picked { request, endpoints, prefill, asked })
    }

    /// Another endpoint answers than the one that was picked.
    pub(crate) fn answered_by(&self, picked: &mut Picked, by: &Arc<Endpoint>) {
        let Some(asked) = picked.asked.take() else { return };
        let (prompt, terms) = &*asked;
        let by = Arc::clone(by);
        // Who computes is said in a header, whoever answers.
        let way = match &picked.prefill {
            Some(prefill) => Way { endpoint: Arc::clone(prefill), partner: Some(by) },
            None => Way { endpoint: by, partner: None },
        };
        self.decider.goes(prompt, terms, &way);
    }

    /// Which instances may be chosen: Envoy sends to addresses and to no names, and may have its own bounds.
    fn among(&self, head: &Head) -> Result<Vec<InstanceId>, Refused> {
        let known = self.decider.endpoints().list();
        let dialable: Vec<_> = known.iter().filter_map(|endpoint| self.dialable(endpoint)).collect();
        if dialable.is_empty() && !known.is_empty() {
            let reason = "no name of an engine has an address; Envoy is sent to addresses: look at the names of the endpoints, or list them as ip:port";
            return Err(Refused::new(503, "no_endpoint", reason));
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
                Err(Refused::new(503, "subset", reason))
            }
            _ => Ok(among),
        }
    }

    /// The endpoint with an address in place of its name, which Envoy does not resolve; nothing where it has none.
    fn dialable(&self, endpoint: &Arc<Endpoint>) -> Option<Arc<Endpoint>> {
        if endpoint.authority.parse::<SocketAddr>().is_ok() {
            return Some(Arc::clone(endpoint));
        }
        let address = self.decider.endpoints().addresses(endpoint.instance).first()?.to_string();
        Some(Arc::new(Endpoint { authority: address, ..Endpoint::clone(endpoint) }))
    }

    /// The conformance tests say where it goes, by address with or without a port.
    fn selected(&self, selection: &[String], among: &[InstanceId]) -> Result<Vec<Arc<Endpoint>>, Refused> {
        let known = self.decider.endpoints().list();
        let known: Vec<_> = known.iter().filter_map(|endpoint| self.dialable(endpoint)).collect();
        let is_named = |endpoint: &Endpoint, name: &str| {
            let host = endpoint.authority.rsplit_once(':').map_or("", |(host, _)| host);
            endpoint.authority == name || host == name
        };
        let find = |name: &String| {
            known.iter().find(|one| among.contains(&one.instance) && is_named(one, name)).cloned()
        };
        let endpoints: Vec<_> = selection.iter().filter_map(find).take(self.named_max).collect();
        match endpoints.is_empty() {
            false => Ok(endpoints),
            true => Err(Refused::new(503, "selection", "none of the endpoints that the test names is known")),
        }
    }

    async fn read(&self, head: &Head, body: &Bytes) -> Result<(Prompt, Need), Refused> {
        let (path, model, own) = (head.path.clone(), head.model.clone(), body.clone());
        let read = move |reader: &Reader| match model {
            Some(model) => reader.read(&path, &named(&own, &model)),
            None => reader.read(&path, &own),
        };
        match self.reader.read_in_turn(body.len(), read).await {
            Ok(asked) => {
                let need = asked.need(&head.path);
                Ok((asked.prompt, need))
            }
            Err(unreadable) => Err(Refused::new(unreadable.status(), "unreadable", unreadable.to_string())),
        }
    }
}

fn refused(refusal: Refusal) -> Refused {
    match refusal {
        Refusal::Busy { reason, retry_after } => {
            Refused { retry_after: Some(retry_after), ..Refused::new(429, "busy", reason) }
        }
        Refusal::Nobody { reason, retry_after } => {
            Refused { retry_after: Some(retry_after), ..Refused::new(503, "no_endpoint", reason) }
        }
        Refusal::Invalid(reason) => Refused::new(400, "invalid", reason),
        Refusal::Misfit(misfit) => Refused::new(misfit.status(), misfit.code(), misfit.to_string()),
    }
}

#[derive(Deserialize)]
struct Named<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
}

/// The body with another model. All else stays letter for letter: templates render tools in the order that they come in. One that is
/// no JSON object stays what it is, and is found unreadable.
fn named(body: &[u8], model: &str) -> Vec<u8> {
    if body.iter().find(|letter| !letter.is_ascii_whitespace()) != Some(&b'{') {
        return body.to_vec();
    }
    let Ok(found) = serde_json::from_slice::<Named<'_>>(body) else { return body.to_vec() };
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
    fn a_model_takes_the_place_of_another_and_nothing_else_moves() {
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
            assert_eq!(String::from_utf8(named(before.as_bytes(), "new")).unwrap(), after);
        }
    }
}
