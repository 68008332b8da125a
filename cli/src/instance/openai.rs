//! Requests as OpenAI's clients send them, so that stand-ins can be asked with `curl` through any door. Their prompts are read as the doors read them,
//! a router is asked how their KV gets here, and they are served as all others; the answer is words that no model made.
//!
//! Not here: serving (`serve.rs`), reading prompts (`kvfleet-doors`), and choosing where a request runs.

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
use kvfleet_client::{MayDecode, RequestOutcome, RouteAnswer, RouteCall};
use kvfleet_doors::{PromptReader, REQUEST_HEADER, ReadPrompt, StartError as ReadError, answer};
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
use super::load::Running;
use super::request::{Job, Numbers};
use super::serve::Engine;

/// Longest body of a request.
const BODY_BYTES_MAX: usize = 32 << 20;

/// Tokens of an answer where the request does not say how many.
const TOKENS_DEFAULT: u32 = 16;

/// Tokens of an answer at most.
const TOKENS_MAX: u32 = 16_384;

/// Pieces of an answer that wait for a caller who does not read.
const PIECES_WAITING_MAX: usize = 16;

/// What is said, over and over; a token is a word.
const WORDS: [&str; 12] =
    ["This", "is", "a", "stand-in:", "it", "moves", "KV", "as", "engines", "do,", "and", "computes nothing."];

/// Where requests come in.
pub(super) struct OpenAi {
    engine: Arc<Engine>,
    reader: PromptReader,
    numbers: Arc<Numbers>,
}

/// What of a request the answer depends on.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Wishes {
    stream_options: StreamOptions,
    kv_transfer_params: Option<Transfer>,
}

/// What passes between the two engines of a pair, as doors carry it: whether another goes on, and where what was saved for it is seen.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Transfer {
    do_remote_decode: bool,
    kvfleet_saved_at: Vec<SavedAt>,
}

/// A point in what a node announces.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct SavedAt {
    node: u32,
    epoch: u64,
    seq: u64,
    shard: u32,
}

impl From<&SavedAt> for pb::Seen {
    fn from(&SavedAt { node, epoch, seq, shard }: &SavedAt) -> Self {
        pb::Seen { node, epoch, seq, shard }
    }
}

impl From<&pb::Seen> for SavedAt {
    fn from(&pb::Seen { node, epoch, seq, shard }: &pb::Seen) -> Self {
        SavedAt { node, epoch, seq, shard }
    }
}

/// Points that are waited for: as many as shards of a few nodes.
const SAVED_AT_MAX: usize = 64;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: bool,
}

/// An answer, but for its words.
#[derive(Clone, Debug)]
struct Answer {
    is_chat: bool,
    number: u64,
    created: u64,
    model: String,
    tokens: u32,
    /// Of prompt and answer.
    kv_tokens: u64,
    usage: Value,
}

impl OpenAi {
    /// Reads the tokenizers.
    pub(super) fn load(
        section: &OpenAiSection,
        engine: Arc<Engine>,
        numbers: Arc<Numbers>,
        registry: &Registry,
    ) -> Result<OpenAi, ReadError> {
        let engines = EnginesConfig {
            identity: section.manifest.clone(),
            secret_file: section.secret_file.clone(),
            ..EnginesConfig::default()
        };
        let reader = PromptReader::load(&section.models, &engines, registry)?;
        Ok(OpenAi { engine, reader, numbers })
    }

    /// Serves until it is stopped.
    pub(super) async fn serve(self, listener: TcpListener, stop: CancellationToken) {
        let app = Router::new()
            .route("/v1/chat/completions", post(ask))
            .route("/v1/completions", post(ask))
            .route("/health", get(|| std::future::ready("ok\n")))
            .with_state(Arc::new(self));
        if let Err(cause) = axum::serve(listener, app).with_graceful_shutdown(stop.cancelled_owned()).await {
            tracing::error!(%cause, "requests of OpenAI's clients are taken no more");
        }
    }

    /// How the KV of a request gets here. Without a router all of it is computed, and nothing is saved.
    async fn plan(
        &self,
        prompt: &ReadPrompt,
        (request, is_sent): (u64, bool),
        transfer: &Transfer,
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
            after: transfer.kvfleet_saved_at.iter().take(SAVED_AT_MAX).map(pb::Seen::from).collect(),
            fresh: false,
        };
        let here = InstanceId(self.engine.config.instance);
        match self.engine.client.plan(call, (here, is_sent)).await {
            Ok(RouteAnswer::Decided(decision)) => decision,
            Ok(RouteAnswer::Rejected { reason, .. }) => {
                tracing::warn!(request, reason, "no plan for a request: all of it is computed");
                pb::Decision::default()
            }
            Err(cause) => {
                tracing::warn!(request, %cause, "no plan for a request: all of it is computed");
                pb::Decision::default()
            }
        }
    }

    /// Serves a prompt as all requests are served. By itself, so that a caller who leaves leaves no leases behind.
    async fn served(
        &self,
        prompt: &ReadPrompt,
        (request, is_sent): (u64, bool),
        transfer: &Transfer,
    ) -> Option<pb::RunReply> {
        let decision = self.plan(prompt, (request, is_sent), transfer).await;
        let job = Job {
            request: RequestId(request),
            tenant: TenantId(0),
            category: Category::default(),
            hashes: prompt.hashes.clone(),
            block_tokens: prompt.block_tokens,
            input_tokens: prompt.input_tokens,
            resident_blocks: decision.resident_blocks,
            turn_ms: decision.turn_ms,
            sources: decision.sources,
            save_to: decision.save_to,
            // Who goes on has nothing to fetch before that.
            wait_save: transfer.do_remote_decode,
            share: None,
        };
        let lease = LeaseId(self.numbers.next());
        let span = tracing::info_span!("openai", request);
        tokio::spawn(Arc::clone(&self.engine).serve(job, lease).instrument(span)).await.ok()
    }

    /// Time between two tokens with what says some now, in that of this instance.
    fn step(&self) -> Duration {
        let profile = &self.engine.profile;
        let each = profile.step_ns_per_running * u64::from(self.engine.working.decoding());
        Duration::from_nanos(profile.step_ns + each).mul_f64(self.engine.config.time_scale)
    }

    /// Why a request that is computed is not to say a token, and when to come again, if a router says so.
    async fn ends(&self, request: u64) -> Option<(String, Duration)> {
        if !self.engine.config.asks_to_decode {
            return None;
        }
        let here = InstanceId(self.engine.config.instance);
        match self.engine.client.may_decode(RequestId(request), here, 0).await {
            MayDecode::Begins => None,
            MayDecode::Ends { reason, retry_after } => Some((reason, retry_after)),
        }
    }

    /// Says that a request ended, with so many tokens in this time.
    fn ended(&self, request: u64, tokens: u32, took: Duration) {
        let tbt = tokens.checked_sub(1).filter(|more| *more > 0).map(|more| took / more);
        self.engine.client.tell(&RequestOutcome::ended(RequestId(request), tokens, tbt));
    }
}

async fn ask(State(door): State<Arc<OpenAi>>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let Ok(body) = to_bytes(body, BODY_BYTES_MAX).await else {
        let text = format!("the body broke off, or is longer than {BODY_BYTES_MAX} bytes");
        return answer::problem(StatusCode::PAYLOAD_TOO_LARGE, &text, None);
    };
    let prompt = match door.reader.read(&path, body.clone()).await {
        Ok(prompt) => prompt,
        Err(error) => {
            let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::BAD_REQUEST);
            return answer::problem(status, &error.message, None);
        }
    };
    let sent = number(&parts.headers);
    let number = sent.unwrap_or_else(|| door.numbers.next());
    let wishes: Wishes = serde_json::from_slice(&body).unwrap_or_default();
    let transfer = wishes.kv_transfer_params.unwrap_or_default();
    let Some(reply) = door.served(&prompt, (number, sent.is_some()), &transfer).await else {
        return answer::problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            "the request broke: the log has why",
            None,
        );
    };
    // Of a pair, it is asked by whoever goes on.
    let ends = if transfer.do_remote_decode { None } else { door.ends(number).await };
    if let Some((reason, retry_after)) = ends {
        return answer::later(StatusCode::TOO_MANY_REQUESTS, &reason, "rate_limit_exceeded", retry_after);
    }
    let tokens = if prompt.output_tokens == 0 { TOKENS_DEFAULT } else { prompt.output_tokens };
    let tokens = tokens.min(TOKENS_MAX);
    let cached = u64::from(reply.hit_blocks) * u64::from(prompt.block_tokens);
    let answer = Answer {
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
        return streamed(&door, answer, wishes.stream_options.include_usage);
    }
    let (running, begun) = (Running::decoding(&door.engine.working, answer.kv_tokens), Instant::now());
    for _ in 1..tokens {
        next(&door, &running).await;
    }
    drop(running);
    if !transfer.do_remote_decode {
        door.ended(number, tokens, begun.elapsed());
    }
    let mut whole = answer.whole();
    if transfer.do_remote_decode {
        let saved_at: Vec<_> = reply.saved_at.iter().map(SavedAt::from).collect();
        whole["kv_transfer_params"] = json!({ "do_remote_prefill": true, "kvfleet_saved_at": saved_at });
    }
    answer::json(StatusCode::OK, &whole)
}

/// Until the next token is there.
async fn next(door: &OpenAi, running: &Running) {
    let step = door.step();
    tokio::time::sleep(step).await;
    running.said(step);
}

/// The number by which the router knows the request, if it came by a door of ours.
fn number(headers: &HeaderMap) -> Option<u64> {
    headers.get(REQUEST_HEADER)?.to_str().ok()?.parse().ok()
}

/// The answer piece by piece, each when its token would be there.
fn streamed(door: &Arc<OpenAi>, answer: Answer, with_usage: bool) -> Response<Body> {
    let (pieces, taken) = mpsc::channel::<String>(PIECES_WAITING_MAX);
    let (running, door) = (Running::decoding(&door.engine.working, answer.kv_tokens), Arc::clone(door));
    tokio::spawn(async move {
        let begun = Instant::now();
        let last = answer.tokens.saturating_sub(1);
        for at in 0..answer.tokens {
            if at > 0 {
                next(&door, &running).await;
            }
            // Who left is not written for.
            if pieces.send(answer.piece(at, at == last)).await.is_err() {
                return;
            }
        }
        drop(running);
        door.ended(answer.number, answer.tokens, begun.elapsed());
        if with_usage && pieces.send(answer.usage_piece()).await.is_err() {
            return;
        }
        let _ = pieces.send("data: [DONE]\n\n".to_owned()).await; // or nobody is there any more
    });
    let pieces = ReceiverStream::new(taken).map(|piece| Ok::<_, Infallible>(Bytes::from(piece)));
    let mut response = Response::new(Body::from_stream(pieces));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl Answer {
    /// One token, with the space before it.
    fn word(at: u32) -> String {
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

    fn whole(&self) -> Value {
        let text: String = (0..self.tokens).map(Self::word).collect();
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

    /// The piece with this token, as one event.
    fn piece(&self, at: u32, is_last: bool) -> String {
        let finish = is_last.then_some("length");
        let (object, choice) = match self.is_chat {
            true => (
                "chat.completion.chunk",
                json!({"index": 0, "delta": {"role": "assistant", "content": Self::word(at)}, "finish_reason": finish}),
            ),
            false => {
                ("text_completion", json!({"index": 0, "text": Self::word(at), "finish_reason": finish}))
            }
        };
        format!("data: {}\n\n", self.envelope(object, &json!([choice])))
    }

    fn usage_piece(&self) -> String {
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

    fn answer(is_chat: bool) -> Answer {
        let usage = json!({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}});
        Answer { is_chat, number: 7, created: 1, model: "m".to_owned(), tokens: 14, kv_tokens: 17, usage }
    }

    /// The JSON of one event.
    fn event(piece: &str) -> Value {
        serde_json::from_str(piece.strip_prefix("data: ").unwrap().strip_suffix("\n\n").unwrap()).unwrap()
    }

    #[test]
    fn the_pieces_of_an_answer_are_the_whole_of_it() {
        for is_chat in [false, true] {
            let (answer, mut text) = (answer(is_chat), String::new());
            for at in 0..answer.tokens {
                let piece = event(&answer.piece(at, at + 1 == answer.tokens));
                let choice = &piece["choices"][0];
                let said = if is_chat { &choice["delta"]["content"] } else { &choice["text"] };
                text.push_str(said.as_str().unwrap());
                assert_eq!(choice["finish_reason"].is_null(), at + 1 < answer.tokens);
            }
            let whole = answer.whole();
            let choice = &whole["choices"][0];
            let all = if is_chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(all, &text);
            assert_eq!(event(&answer.usage_piece())["usage"], whole["usage"]);
        }
    }

    #[test]
    fn a_number_that_is_none_is_the_instances_own() {
        let of = |text: &'static str| {
            number(&[(REQUEST_HEADER.parse().unwrap(), HeaderValue::from_static(text))].into_iter().collect())
        };
        assert_eq!((of("17"), of("-1"), of("x"), number(&HeaderMap::new())), (Some(17), None, None, None));
    }
}
