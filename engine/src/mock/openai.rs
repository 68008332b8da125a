//! OpenAI-compatible API of the mock engine, so that it can be tried with `curl`.
//!
//! Prompts are read as in the gateway, a router plans the sources of their KV, and they are served
//! like any request. The generated text is a fixed phrase. Not here: serving (`serve.rs`), reading
//! prompts (`kvfleet-gateway`), and choosing an instance.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode};
use axum::routing::{get, post};
use kv_core::id::{Category, InstanceId, LeaseId, RequestId, TenantId};
use kvfleet_client::{DecodeAdmission, RequestOutcome, RouteAnswer, RouteCall};
use kvfleet_gateway::{PromptReader, REQUEST_HEADER, ReadPrompt, StartError as ReadError, answer};
use kvfleet_proto::pb;
use kvfleet_router::EnginesConfig;
use prometheus::Registry;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::config::OpenAiSection;
use super::load::InFlightRequest;
use super::request::{IdCounter, Job};
use super::serve::MockEngine;

/// Longest body of a request.
const BODY_BYTES_MAX: usize = 32 << 20;

/// Default number of output tokens.
const TOKENS_DEFAULT: u32 = 16;

/// Most output tokens.
const TOKENS_MAX: u32 = 16_384;

/// Events that are buffered for a slow client.
const BUFFERED_EVENTS_MAX: usize = 16;

/// The repeated text; a token is a word.
const WORDS: [&str; 12] =
    ["This", "is", "a", "stand-in:", "it", "moves", "KV", "as", "engines", "do,", "and", "computes nothing."];

/// The service.
pub(super) struct OpenAiService {
    engine: Arc<MockEngine>,
    reader: PromptReader,
    numbers: Arc<IdCounter>,
}

/// Fields of a request that affect the answer's form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestOptions {
    stream_options: StreamOptions,
    kv_transfer_params: Option<KvTransferParams>,
}

/// Transfer parameters between the engines of a pair, relayed by the gateway: whether another
/// engine decodes, and the positions at which the saved KV is announced.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct KvTransferParams {
    do_remote_decode: bool,
    kvfleet_saved_at: Vec<SavePosition>,
}

/// A position in the announcements of a node.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct SavePosition {
    node: u32,
    epoch: u64,
    seq: u64,
    shard: u32,
}

impl From<&SavePosition> for pb::AnnouncePosition {
    fn from(&SavePosition { node, epoch, seq, shard }: &SavePosition) -> Self {
        pb::AnnouncePosition { node, epoch, seq, shard }
    }
}

impl From<&pb::AnnouncePosition> for SavePosition {
    fn from(&pb::AnnouncePosition { node, epoch, seq, shard }: &pb::AnnouncePosition) -> Self {
        SavePosition { node, epoch, seq, shard }
    }
}

/// Most positions to wait for, enough for the shards of a few nodes.
const SAVE_POSITIONS_MAX: usize = 64;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

/// An answer without its text.
#[derive(Clone, Debug)]
struct GeneratedAnswer {
    is_chat: bool,
    number: u64,
    created: u64,
    model: String,
    tokens: u32,
    /// Tokens of prompt and answer.
    kv_tokens: u64,
    usage: Value,
}

impl OpenAiService {
    /// Loads the tokenizers.
    pub(super) fn load(
        section: &OpenAiSection,
        engine: Arc<MockEngine>,
        numbers: Arc<IdCounter>,
        registry: &Registry,
    ) -> Result<OpenAiService, ReadError> {
        let engines = EnginesConfig {
            identity: section.manifest.clone(),
            secret_file: section.secret_file.clone(),
            public_hashes: section.public_hashes,
            ..EnginesConfig::default()
        };
        let reader = PromptReader::load(&section.models, &engines, registry)?;
        Ok(OpenAiService { engine, reader, numbers })
    }

    /// Serves until stopped.
    pub(super) async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let app = Router::new()
            .route("/v1/chat/completions", post(handle_request))
            .route("/v1/completions", post(handle_request))
            .route("/health", get(|| std::future::ready("ok\n")))
            .with_state(Arc::new(self));
        if let Err(cause) = axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned()).await {
            tracing::error!(%cause, "the OpenAI API stopped");
        }
    }

    /// Plan for the KV of a request. Without a router, everything is computed and nothing is saved.
    async fn plan(
        &self,
        prompt: &ReadPrompt,
        request: u64,
        is_sent: bool,
        transfer: &KvTransferParams,
    ) -> pb::Decision {
        let call = RouteCall {
            request: RequestId(request),
            tenant: TenantId(0),
            category: Category::default(),
            hashes: prompt.hashes.clone(),
            block_tokens: prompt.block_tokens,
            input_tokens: prompt.input_tokens,
            output_tokens: prompt.output_tokens,
            tbt_max_us: 0,
            identity: self.engine.digest,
            after: transfer
                .kvfleet_saved_at
                .iter()
                .take(SAVE_POSITIONS_MAX)
                .map(pb::AnnouncePosition::from)
                .collect(),
            fresh: false,
        };
        let here = InstanceId(self.engine.config.instance);
        match self.engine.client.plan(call, here, is_sent).await {
            Ok(RouteAnswer::Decided(decision)) => decision,
            Ok(RouteAnswer::Rejected { reason, .. }) => {
                tracing::warn!(request, reason, "no plan for the request; computing all of it");
                pb::Decision::default()
            }
            Err(cause) => {
                tracing::warn!(request, %cause, "no plan for the request; computing all of it");
                pb::Decision::default()
            }
        }
    }

    /// Serves a prompt like any request. It runs in a task, so that a disconnecting client leaves
    /// no lease behind.
    async fn serve_prompt(
        &self,
        prompt: &ReadPrompt,
        request: u64,
        is_sent: bool,
        transfer: &KvTransferParams,
    ) -> Option<pb::RunReply> {
        let decision = self.plan(prompt, request, is_sent, transfer).await;
        let job = Job {
            request: RequestId(request),
            tenant: TenantId(0),
            category: Category::default(),
            hashes: prompt.hashes.clone(),
            block_tokens: prompt.block_tokens,
            input_tokens: prompt.input_tokens,
            resident_blocks: decision.resident_blocks,
            priority_deadline_ms: decision.priority_deadline_ms,
            sources: decision.sources,
            save_to: decision.save_to,
            // The decode engine can fetch only after the save.
            wait_save: transfer.do_remote_decode,
            permit: None,
        };
        let lease = LeaseId(self.numbers.next());
        let span = tracing::info_span!("openai", request);
        tokio::spawn(Arc::clone(&self.engine).serve(job, lease).instrument(span)).await.ok()
    }

    /// Time between two tokens at the current number of decoding requests, in scaled time.
    fn step_time(&self) -> Duration {
        let profile = &self.engine.profile;
        let each = profile.step_ns_per_running * u64::from(self.engine.counters.decoding());
        Duration::from_nanos(profile.step_ns + each).mul_f64(self.engine.config.time_scale)
    }

    /// Asks a router whether a computed request may decode. Returns the reason and the delay for a
    /// retry if not.
    async fn decode_refusal(&self, request: u64) -> Option<(String, Duration)> {
        if !self.engine.config.checks_decode_admission {
            return None;
        }
        let here = InstanceId(self.engine.config.instance);
        match self.engine.client.admit_decode(RequestId(request), here, 0).await {
            DecodeAdmission::Admitted => None,
            DecodeAdmission::Rejected { reason, retry_after } => Some((reason, retry_after)),
        }
    }

    /// Reports the end of a request with its output tokens and duration.
    fn report_end(&self, request: u64, tokens: u32, took: Duration) {
        let tbt = tokens.checked_sub(1).filter(|more| *more > 0).map(|more| took / more);
        self.engine.client.record_outcome(&RequestOutcome::ended(RequestId(request), tokens, tbt));
    }
}

async fn handle_request(State(service): State<Arc<OpenAiService>>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let Ok(body) = to_bytes(body, BODY_BYTES_MAX).await else {
        let text = format!("the body broke off, or is longer than {BODY_BYTES_MAX} bytes");
        return answer::error_response(StatusCode::PAYLOAD_TOO_LARGE, &text, None);
    };
    let prompt = match service.reader.read(&path, body.clone()).await {
        Ok(prompt) => prompt,
        Err(error) => {
            let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
            return answer::error_response(status, &error.message, None);
        }
    };
    let sent = request_number(&parts.headers);
    let number = sent.unwrap_or_else(|| service.numbers.next());
    let options: RequestOptions = serde_json::from_slice(&body).unwrap_or_default();
    let transfer = options.kv_transfer_params.unwrap_or_default();
    let Some(reply) = service.serve_prompt(&prompt, number, sent.is_some(), &transfer).await else {
        let text = "the request failed; see the log of the instance";
        return answer::error_response(StatusCode::INTERNAL_SERVER_ERROR, text, None);
    };
    // For the prefill of a pair, the decode engine asks.
    let ends = if transfer.do_remote_decode { None } else { service.decode_refusal(number).await };
    if let Some((reason, retry_after)) = ends {
        return answer::retry_later(
            StatusCode::TOO_MANY_REQUESTS,
            &reason,
            "rate_limit_exceeded",
            retry_after,
        );
    }
    let tokens = if prompt.output_tokens == 0 { TOKENS_DEFAULT } else { prompt.output_tokens };
    let tokens = tokens.min(TOKENS_MAX);
    let cached = u64::from(reply.hit_blocks) * u64::from(prompt.block_tokens);
    let answer = GeneratedAnswer {
        is_chat: path == "/v1/chat/completions",
        number,
        created: std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
        model: prompt.model,
        kv_tokens: u64::from(prompt.input_tokens) + u64::from(tokens),
        tokens,
        usage: json!({
            "prompt_tokens": prompt.input_tokens,
            "completion_tokens": tokens,
            "total_tokens": u64::from(prompt.input_tokens) + u64::from(tokens),
            "prompt_tokens_details": { "cached_tokens": cached },
        }),
    };
    if prompt.stream {
        return stream_response(&service, answer, options.stream_options.include_usage);
    }
    let (running, begun) =
        (InFlightRequest::start_decoding(&service.engine.counters, answer.kv_tokens), Instant::now());
    for _ in 1..tokens {
        next_token(&service, &running).await;
    }
    drop(running);
    if !transfer.do_remote_decode {
        service.report_end(number, tokens, begun.elapsed());
    }
    let mut whole = answer.to_json();
    if transfer.do_remote_decode {
        let saved_at: Vec<_> = reply.saved_at.iter().map(SavePosition::from).collect();
        whole["kv_transfer_params"] = json!({ "do_remote_prefill": true, "kvfleet_saved_at": saved_at });
    }
    answer::json(StatusCode::OK, &whole)
}

/// Waits for the next token.
async fn next_token(service: &OpenAiService, running: &InFlightRequest) {
    let step = service.step_time();
    tokio::time::sleep(step).await;
    running.record_token(step);
}

/// Number of the request at the router, if it came through the gateway.
fn request_number(headers: &HeaderMap) -> Option<u64> {
    headers.get(REQUEST_HEADER)?.to_str().ok()?.parse().ok()
}

/// Streams the answer, each event at the time of its token.
fn stream_response(openai: &Arc<OpenAiService>, answer: GeneratedAnswer, with_usage: bool) -> Response<Body> {
    let (pieces, taken) = mpsc::channel::<String>(BUFFERED_EVENTS_MAX);
    let (running, openai) =
        (InFlightRequest::start_decoding(&openai.engine.counters, answer.kv_tokens), Arc::clone(openai));
    tokio::spawn(async move {
        let begun = Instant::now();
        let last = answer.tokens.saturating_sub(1);
        for at in 0..answer.tokens {
            if at > 0 {
                next_token(&openai, &running).await;
            }
            // Stop when the client disconnects.
            if pieces.send(answer.token_event(at, at == last)).await.is_err() {
                return;
            }
        }
        drop(running);
        openai.report_end(answer.number, answer.tokens, begun.elapsed());
        if with_usage && pieces.send(answer.usage_event()).await.is_err() {
            return;
        }
        let _ = pieces.send("data: [DONE]\n\n".to_owned()).await; // the client may have disconnected
    });
    let pieces = ReceiverStream::new(taken).map(|piece| Ok::<_, Infallible>(Bytes::from(piece)));
    let mut response = Response::new(Body::from_stream(pieces));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl GeneratedAnswer {
    /// One token with its leading space.
    fn word_at(at: u32) -> String {
        let word = WORDS[at as usize % WORDS.len()];
        if at == 0 { word.to_owned() } else { format!(" {word}") }
    }

    fn envelope(&self, object: &str, choices: &Value) -> Value {
        let kind = if self.is_chat { "chatcmpl" } else { "cmpl" };
        json!({
            "id": format!("{kind}-{}", self.number),
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn to_json(&self) -> Value {
        let text: String = (0..self.tokens).map(Self::word_at).collect();
        let (object, choice) = match self.is_chat {
            true => (
                "chat.completion",
                json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}),
            ),
            false => ("text_completion", json!({"index": 0, "text": text, "finish_reason": "length"})),
        };
        let mut whole = self.envelope(object, &json!([choice]));
        whole["usage"] = self.usage.clone();
        whole
    }

    /// The event of one token.
    fn token_event(&self, at: u32, is_last: bool) -> String {
        let finish = is_last.then_some("length");
        let (object, choice) = match self.is_chat {
            true => (
                "chat.completion.chunk",
                json!({"index": 0, "delta": {"role": "assistant", "content": Self::word_at(at)}, "finish_rea\
                    son": finish}),
            ),
            false => {
                ("text_completion", json!({"index": 0, "text": Self::word_at(at), "finish_reason": finish}))
            }
        };
        format!("data: {}\n\n", self.envelope(object, &json!([choice])))
    }

    fn usage_event(&self) -> String {
        let object = if self.is_chat { "chat.completion.chunk" } else { "text_completion" };
        let mut piece = self.envelope(object, &json!([]));
        piece["usage"] = self.usage.clone();
        format!("data: {piece}\n\n")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn answer(is_chat: bool) -> GeneratedAnswer {
        let usage = json!({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}});
        GeneratedAnswer {
            is_chat,
            number: 7,
            created: 1,
            model: "m".to_owned(),
            tokens: 14,
            kv_tokens: 17,
            usage,
        }
    }

    /// JSON of an event.
    fn event(piece: &str) -> Value {
        serde_json::from_str(piece.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
    }

    #[test]
    fn events_add_up_to_the_whole_answer() {
        for is_chat in [false, true] {
            let (answer, mut text) = (answer(is_chat), String::new());
            for at in 0..answer.tokens {
                let piece = event(&answer.token_event(at, at + 1 == answer.tokens));
                let choice = &piece["choices"][0];
                let said = if is_chat { &choice["delta"]["content"] } else { &choice["text"] };
                text.push_str(said.as_str().unwrap());
                assert_eq!(choice["finish_reason"].is_null(), at + 1 < answer.tokens);
            }
            let whole = answer.to_json();
            let choice = &whole["choices"][0];
            let all = if is_chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(all, &text);
            assert_eq!(event(&answer.usage_event())["usage"], whole["usage"]);
        }
    }

    #[test]
    fn ignores_invalid_request_numbers() {
        let of = |text: &'static str| {
            request_number(
                &[(REQUEST_HEADER.parse().unwrap(), HeaderValue::from_static(text))].into_iter().collect(),
            )
        };
        assert_eq!(
            (of("17"), of("-1"), of("x"), request_number(&HeaderMap::new())),
            (Some(17), None, None, None)
        );
    }
}
