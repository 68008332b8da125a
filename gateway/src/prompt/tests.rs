//! Compares prompts with Python: `testdata/prompts.jsonl` holds text rendered by Jinja2 3.1 and
//! tokens of `tokenizers` 0.23.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use kv_core::id::BlockHash;
use kvfleet_errors_doc::says;
use kvfleet_router::{EnginesConfig, Tenants};
use prometheus::Registry;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use super::body::Body;
use super::budget::PromptBudget;
use super::template::{Conversation, Template};
use super::tokenizer::CachedTokenizer;
use super::{ParsedRequest, PromptError, PromptForm, RequestReader};
use crate::config::{GatewayConfig, ModelConfig};
use crate::metrics::PromptMetrics;

const BLOCK_TOKENS: u32 = 4;

const AMPLE: PromptBudget = PromptBudget { text_bytes: 1 << 20 };

/// Python's result for one request.
#[derive(Deserialize)]
struct PythonPrompt {
    path: String,
    body: String,
    text: String,
    tokens: Vec<u32>,
}

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn golden() -> Vec<PythonPrompt> {
    let text = std::fs::read_to_string(testdata("prompts.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn model(name: &str) -> ModelConfig {
    ModelConfig { name: name.into(), tokenizer: testdata("tokenizer.json"), ..ModelConfig::default() }
}

fn tenants() -> Tenants {
    let mut engines = EnginesConfig::default();
    engines.identity.block_tokens = BLOCK_TOKENS;
    engines.public_hashes = true;
    Tenants::load(&engines).unwrap()
}

fn reader_of(models: Vec<ModelConfig>, registry: &Registry) -> RequestReader {
    let config = GatewayConfig { models, ..GatewayConfig::default() };
    RequestReader::load(&config, Arc::new(tenants()), PromptMetrics::register(registry).unwrap()).unwrap()
}

fn reader(models: Vec<ModelConfig>) -> RequestReader {
    reader_of(models, &Registry::new())
}

fn reader_without_models() -> RequestReader {
    reader(vec![])
}

fn hashes(adapter: Option<&str>, tokens: &[u32]) -> Vec<BlockHash> {
    let hasher = tenants().hasher(adapter, None).unwrap();
    let mut hashes = vec![];
    hasher.extend(&mut hasher.start(), tokens, &mut hashes);
    hashes
}

fn refused(reader: &RequestReader, path: &str, body: &str) -> PromptError {
    reader.read(path, body.as_bytes()).expect_err("must be refused")
}

#[test]
fn tokens_match_python() {
    let reader = reader(vec![model("m")]);
    let golden = golden();
    assert_eq!(golden.len(), 9);
    // Twice, so that the second pass uses the cache.
    for PythonPrompt { path, body, tokens, .. } in golden.iter().chain(&golden) {
        let asked = reader.read(path, body.as_bytes()).unwrap();
        assert_eq!(asked.prompt.input_tokens as usize, tokens.len(), "{body}");
        assert_eq!(asked.prompt.hashes, hashes(None, tokens), "{body}");
        assert_eq!((asked.form, asked.model.as_str()), (PromptForm::Tokens, "m"));
    }
    let second = reader.read(&golden[1].path, golden[1].body.as_bytes()).unwrap();
    assert_eq!(
        (second.stream, second.prompt.output_tokens, second.prompt.block_tokens),
        (true, 7, BLOCK_TOKENS)
    );
    assert_eq!(second.expected_prompt_tokens(), Some(second.prompt.input_tokens));
    let several = reader.read(&golden[6].path, golden[6].body.as_bytes()).unwrap();
    assert_eq!((several.prompt_count, several.expected_prompt_tokens()), (2, None));
}

#[test]
fn rendered_chats_match_jinja() {
    let template = Template::load(Path::new(""), &testdata("tokenizer.json")).unwrap().unwrap();
    let chats: Vec<_> = golden().into_iter().filter(|one| one.path.ends_with("chat/completions")).collect();
    assert_eq!(chats.len(), 5);
    for PythonPrompt { body, text, .. } in chats {
        let body = Body::parse(body.as_bytes()).unwrap();
        let conversation = Conversation {
            messages: body.messages.as_deref().unwrap(),
            tools: body.tools.as_deref(),
            kwargs: body.chat_template_kwargs.as_ref(),
            add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
            ..Conversation::default()
        };
        assert_eq!(template.render(&conversation, AMPLE, SystemTime::UNIX_EPOCH).unwrap().unwrap(), text);
    }
}

/// Compares the cached tokenizer, which splits texts, with the plain one.
#[test]
fn cached_tokenization_matches_uncached() {
    let pieces = [
        "<|im_start|>",
        "<|im_end|>",
        "<|begin|>",
        "<|tool|>",
        "<|im_",
        "start|>",
        "<think>",
        "router",
        " router ",
        "routers",
        "\n",
        " ",
        "  ",
        "é",
        "😀",
        "The capital of France",
        "user\n",
        "123456",
        "'s",
        "<",
        "|>",
        "x",
        "a text long enough to be remembered, which is one of some sixty bytes and more",
    ];
    for seed in 0..100 {
        let mut chance = StdRng::seed_from_u64(seed);
        // A new cache for each seed, so that first texts are tokenized without it.
        let tokens = CachedTokenizer::load(&testdata("tokenizer.json")).unwrap();
        let whole = tokenizers::Tokenizer::from_file(testdata("tokenizer.json")).unwrap();
        for _ in 0..10 {
            let count = chance.random_range(0..24);
            let text: String = (0..count).map(|_| pieces[chance.random_range(0..pieces.len())]).collect();
            for with_special in [false, true] {
                let expected = whole.encode(text.as_str(), with_special).unwrap().get_ids().to_vec();
                assert_eq!(tokens.encode(&text, with_special).unwrap(), expected, "seed {seed}: {text:?}");
            }
        }
    }
}

#[test]
fn a_continued_chat_keeps_its_block_hashes() {
    let reader = reader(vec![model("m")]);
    let chat = |messages: &str| {
        let body = format!(r#"{{"model":"m","messages":[{messages}]}}"#);
        reader.read("/v1/chat/completions", body.as_bytes()).unwrap().prompt.hashes
    };
    let first = r#"{"role":"user","content":"What is the capital of France?"}"#;
    let short = chat(first);
    let long = chat(&format!(
        r#"{first},{{"role":"assistant","content":"Paris."}},{{"role":"user","content":"The quick brown fox?"}}"#
    ));
    assert!(long.len() > short.len());
    assert_eq!(long[..short.len() - 1], short[..short.len() - 1], "equal up to the start of the answer");
}

fn text_of(asked: &ParsedRequest) -> &[BlockHash] {
    assert_eq!((asked.form, asked.expected_prompt_tokens()), (PromptForm::Text, None));
    &asked.prompt.hashes
}

#[test]
fn without_a_tokenizer_equal_text_prefixes_share_hashes() {
    let registry = Registry::new();
    let reader = reader_of(vec![], &registry);
    let asked = |prompt: &str| {
        let body = format!(r#"{{"model":"any","prompt":{prompt:?}}}"#);
        reader.read("/v1/completions", body.as_bytes()).unwrap()
    };
    let (one, two) =
        (asked("0123456789abcdef0123456789abcdef one"), asked("0123456789abcdef0123456789abcdef two"));
    assert_eq!((one.prompt.input_tokens, text_of(&one).len(), text_of(&two).len()), (9, 2, 2));
    assert_eq!(text_of(&one), text_of(&two));
    let pieces: Vec<_> =
        b"0123456789abcdef".chunks(4).map(|piece| u32::from_le_bytes(piece.try_into().unwrap())).collect();
    assert_ne!(text_of(&one)[..1], hashes(None, &pieces), "pseudo-tokens never match tokens");
    let chat = |more: &str| {
        let body = format!(
            r#"{{"model":"any","messages":[{{"role":"user","content":"a question that is long"}}{more}]}}"#
        );
        reader.read("/v1/chat/completions", body.as_bytes()).unwrap()
    };
    let (short, long) = (chat(""), chat(r#",{"role":"assistant","content":[{"type":"image_url"}]}"#));
    assert!(text_of(&long).starts_with(text_of(&short)) && text_of(&short).len() == 3);
    // Token ids from the caller are used as they are.
    let ids = reader.read("/v1/completions", br#"{"prompt":[1,2,3,4,5]}"#).unwrap();
    assert_eq!((ids.form, &ids.prompt.hashes), (PromptForm::Tokens, &hashes(None, &[1, 2, 3, 4])));
    let lists =
        reader.read("/v1/completions", br#"{"prompt":[[1,2,3,4],[9]],"truncate_prompt_tokens":4}"#).unwrap();
    assert_eq!((lists.prompt_count, &lists.prompt.hashes), (2, &ids.prompt.hashes));
    let read: Vec<_> = registry.gather().iter().flat_map(|family| family.get_metric().to_vec()).collect();
    let count = |name: &str| {
        let of = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value() == name)
        };
        read.iter().find(of).map(|metric| metric.get_counter().get_value())
    };
    assert_eq!((count("text"), count("tokens")), (Some(4.0), Some(2.0)));
}

#[test]
fn multimodal_content_is_read_as_text() {
    let reader = reader(vec![model("m")]);
    let body = br#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"see"},
        {"type":"image_url","image_url":{"url":"data:,x"}}]}]}"#;
    let asked = reader.read("/v1/chat/completions", body).unwrap();
    assert!(!text_of(&asked).is_empty());
    // The token count does not depend on the size of an image, but its hash does depend on the
    // content.
    let picture = |letter: &str, count: usize| {
        let url = letter.repeat(count);
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":[
                {{"type":"image_url","image_url":{{"url":"{url}"}}}},
                {{"type":"text","text":"see"}}]}}]}}"#
        );
        reader.read("/v1/chat/completions", body.as_bytes()).unwrap()
    };
    let (small, large, other) = (picture("A", 10), picture("A", 2_000_000), picture("B", 2_000_000));
    assert_eq!(small.prompt.input_tokens, large.prompt.input_tokens);
    assert!((257..400).contains(&large.prompt.input_tokens), "{}", large.prompt.input_tokens);
    assert_eq!(text_of(&large), text_of(&picture("A", 2_000_000)));
    assert_ne!(text_of(&large)[20..], text_of(&other)[20..]);
    let own = br#"{"model":"m","chat_template":"{{ 1 }}","messages":[
        {"role":"user","content":"a template of the caller's"}]}"#;
    assert_eq!(reader.read("/v1/chat/completions", own).unwrap().form, PromptForm::Text);
}

#[test]
fn adapters_and_salts_change_hashes() {
    let adapter = ModelConfig { adapter: "french".into(), ..model("m-french") };
    let reader = reader(vec![model("m"), adapter]);
    let of = |body: &str| reader.read("/v1/completions", body.as_bytes()).unwrap().prompt.hashes;
    let tokens = [1, 2, 3, 4];
    assert_eq!(of(r#"{"model":"m","prompt":[1,2,3,4]}"#), hashes(None, &tokens));
    assert_eq!(of(r#"{"model":"m-french","prompt":[1,2,3,4]}"#), hashes(Some("french"), &tokens));
    let salted =
        reader.read("/v1/completions", br#"{"model":"m","prompt":[1,2,3,4],"cache_salt":"s"}"#).unwrap();
    assert_eq!(
        (salted.salt.as_deref(), salted.prompt.hashes.len()),
        (Some("s"), 0),
        "no tenant has this salt"
    );
}

/// The rules are vLLM's.
#[test]
fn request_fields_override_template_kwargs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("template.jinja");
    let text = "{{ reasoning_effort }}|{{ documents }}|{{ add_generation_prompt }}|{{ continue_final_message \
        is defined }}|{{ tools[0].type }}|{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}";
    std::fs::write(&path, text).unwrap();
    let template = Template::load(&path, &testdata("tokenizer.json")).unwrap().unwrap();
    let rendered = |more: &str| {
        let body = format!(
            r#"{{"messages":[{{"role":"assistant","content":"x","reasoning":"so"}}],
                "tools":[{{"function":{{"name":"f"}}}}],{more}}}"#
        );
        let body = Body::parse(body.as_bytes()).unwrap();
        let conversation = Conversation {
            messages: body.messages.as_deref().unwrap(),
            tools: body.tools.as_deref(),
            documents: body.documents.as_ref(),
            reasoning_effort: body.reasoning_effort.as_ref(),
            kwargs: body.chat_template_kwargs.as_ref(),
            add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
            ..Conversation::default()
        };
        template.render(&conversation, AMPLE, SystemTime::UNIX_EPOCH).unwrap().unwrap()
    };
    let kwargs = r#""chat_template_kwargs":{"add_generation_prompt":false,"continue_final_message":true,
        "documents":["a"],"reasoning_effort":"low"}"#;
    assert_eq!(rendered(kwargs), "low|['a']|True|False|function|so so");
    let said = format!(r#"{kwargs},"documents":["b"],"reasoning_effort":"high""#);
    assert_eq!(rendered(&said), "high|['b']|True|False|function|so so");
    assert_eq!(rendered(r#""reasoning_effort":null"#), "|None|True|False|function|so so");
    // A million kwargs, half the size of a body, must render in linear time; a quadratic search
    // would exceed the test's time limit.
    let many: String = (0..1_000_000).map(|at| format!(r#""k{at}":{at},"#)).collect();
    let kwargs = format!(r#""chat_template_kwargs":{{{many}"documents":["a"]}}"#);
    assert_eq!(rendered(&kwargs), "|['a']|True|False|function|so so");
    assert_eq!(rendered(r#""chat_template_kwargs":["documents"]"#), "|None|True|False|function|so so");
}

/// Expected values come from the tokenizer's own truncation.
#[test]
fn truncation_keeps_special_tokens() {
    use tokenizers::{TruncationDirection, TruncationParams};
    let reader = reader(vec![model("m"), ModelConfig { context_tokens: 6, ..model("short") }]);
    let text = "The capital of France is Paris. The quick brown fox";
    let asked = |model: &str, more: &str| {
        let body = format!(r#"{{"model":"{model}","prompt":"{text}",{more}}}"#);
        reader.read("/v1/completions", body.as_bytes()).unwrap()
    };
    let expected = |most: usize, direction, with_special| {
        let mut whole = tokenizers::Tokenizer::from_file(testdata("tokenizer.json")).unwrap();
        let truncation = TruncationParams { max_length: most, direction, ..TruncationParams::default() };
        whole.with_truncation(Some(truncation)).unwrap();
        whole.encode(text, with_special).unwrap().get_ids().to_vec()
    };
    let (left, right) = (TruncationDirection::Left, TruncationDirection::Right);
    for with_special in [true, false] {
        for (side, direction) in [("left", left), ("right", right)] {
            for most in [4, 6, 8, 1_000] {
                let more = format!(
                    r#""truncate_prompt_tokens":{most},"truncation_side":"{side}","add_special_tokens":{with_special}"#
                );
                let (asked, tokens) = (asked("m", &more), expected(most, direction, with_special));
                assert_eq!(
                    (asked.form, asked.prompt.input_tokens as usize),
                    (PromptForm::Tokens, tokens.len())
                );
                assert_eq!(asked.prompt.hashes, hashes(None, &tokens), "{more}");
            }
        }
    }
    let model_length = asked("short", r#""truncate_prompt_tokens":-1"#);
    assert_eq!(model_length.prompt.hashes, hashes(None, &expected(6, left, true)));
    for more in
        [r#""truncate_prompt_tokens":-2"#, r#""truncate_prompt_tokens":0"#, r#""truncation_side":"middle""#]
    {
        assert_eq!(asked("m", more).form, PromptForm::Text, "{more}");
    }
}

#[tokio::test]
async fn long_requests_are_read_on_another_thread() {
    let reader = Arc::new(reader(vec![]));
    let here = std::thread::current().id();
    for (bytes, is_here) in [(100, true), (100_000, false)] {
        let asked = reader.read_async(bytes, move |reader| {
            assert_eq!(std::thread::current().id() == here, is_here);
            reader.read("/v1/completions", br#"{"prompt":[1,2,3,4,5]}"#)
        });
        assert_eq!(asked.await.unwrap().prompt.input_tokens, 5);
    }
}

#[test]
fn continues_the_final_message() {
    let template = Template::load(Path::new(""), &testdata("tokenizer.json")).unwrap().unwrap();
    let body =
        Body::parse(br#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"Par "}]}"#)
            .unwrap();
    let messages = body.messages.unwrap();
    let conversation =
        Conversation { messages: &messages, continue_final_message: true, ..Conversation::default() };
    let text = template.render(&conversation, AMPLE, SystemTime::UNIX_EPOCH).unwrap().unwrap();
    assert!(text.ends_with("<|im_start|>assistant\nPar "), "{text:?}");
}

#[test]
fn refuses_unreadable_requests_with_a_message() {
    let short = ModelConfig { context_tokens: 8, ..model("short") };
    let reader = reader(vec![model("m"), short]);
    let chat = "/v1/chat/completions";
    let bad = |path: &str, body: &str, status: u16| {
        let error = refused(&reader, path, body);
        assert_eq!(error.status(), status, "{error}");
        error
    };
    says("a request that is no JSON", &bad(chat, "{\"model\"", 400), &[]);
    says("a request with a number where text belongs", &bad(chat, r#"{"model":1}"#, 400), &[]);
    says("a request that is a list", &bad(chat, r#" ["m",true]"#, 400), &[]);
    says("a request without messages", &bad(chat, r#"{"model":"m"}"#, 400), &[]);
    says("a request with an empty conversation", &bad(chat, r#"{"model":"m","messages":[]}"#, 400), &[]);
    says("a message that is no object", &bad(chat, r#"{"model":"m","messages":["hello"]}"#, 400), &[]);
    says("a message without a role", &bad(chat, r#"{"model":"m","messages":[{"content":"x"}]}"#, 400), &[]);
    says(
        "content that is a number",
        &bad(chat, r#"{"model":"m","messages":[{"role":"user","content":5}]}"#, 400),
        &[],
    );
    says(
        "what the chat template refuses",
        &bad(chat, r#"{"model":"m","messages":[{"role":"nobody","content":"x"}]}"#, 400),
        &[],
    );
    says("a prompt of another shape", &bad("/v1/completions", r#"{"model":"m","prompt":{"a":1}}"#, 400), &[]);
    says("a token id below zero", &bad("/v1/completions", r#"{"model":"m","prompt":[1,-2]}"#, 400), &[]);
    says(
        "a token id of more than 32 bits",
        &bad("/v1/completions", r#"{"model":"m","prompt":[1,4294967296]}"#, 400),
        &[],
    );
    says(
        "a token id that is no whole number",
        &bad("/v1/completions", r#"{"model":"m","prompt":[1,2.0]}"#, 400),
        &[],
    );
    says("no prompt", &bad("/v1/completions", r#"{"model":"m"}"#, 400), &[]);
    says("an empty list of inputs", &bad("/v1/embeddings", r#"{"model":"m","input":[]}"#, 400), &[]);
    says("a model that is not served", &bad(chat, r#"{"model":"other","messages":[]}"#, 404), &[]);
    says(
        "a prompt longer than the context",
        &bad("/v1/completions", r#"{"model":"short","prompt":"The capital of France is Paris."}"#, 400),
        &[],
    );
    let mut invalid = br#"{"model":"m","prompt":"x"}"#.to_vec();
    invalid[23] = 0xff;
    let error = reader.read("/v1/completions", &invalid).expect_err("no UTF-8");
    assert_eq!(error.status(), 400);
    says("a request that is not UTF-8", &error, &[]);
    let deep = format!(r#"{{"model":"m","messages":[{}{}]}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(refused(&reader, chat, &deep).status(), 400);
    // A request that is cut off anywhere is refused.
    for PythonPrompt { path, body, .. } in golden() {
        for end in (0..body.len()).filter(|end| body.is_char_boundary(*end)) {
            assert_eq!(refused(&reader, &path, &body[..end]).status(), 400);
        }
    }
}

#[test]
fn refuses_unusable_model_files_by_model_name() {
    let folder = tempfile::tempdir().unwrap();
    let shown = folder.path().display().to_string();
    let refused = |model: ModelConfig| {
        let config = GatewayConfig { models: vec![model], ..GatewayConfig::default() };
        let loaded = RequestReader::load(
            &config,
            Arc::new(tenants()),
            PromptMetrics::register(&Registry::new()).unwrap(),
        );
        loaded.expect_err("must be refused")
    };
    let at = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let missing = ModelConfig { tokenizer: folder.path().join("missing.json"), ..model("m") };
    says("a tokenizer that is not there", &refused(missing), &[&shown]);
    let other = ModelConfig { tokenizer: at("other.json", "{}"), ..model("m") };
    says("a tokenizer of another form", &refused(other), &[&shown]);
    let broken = ModelConfig { chat_template: at("broken.jinja", "{% if %}"), ..model("m") };
    says("a chat template that is no Jinja", &refused(broken), &[&shown]);
    let config = ModelConfig { chat_template: at("config.json", "["), ..model("m") };
    says("a tokenizer_config.json that is no JSON", &refused(config), &[&shown]);
}

/// Memory of this process, in bytes, by a name of proc(5).
fn memory(name: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Reads a body, and returns the outcome. Fails if that took more memory than a body may cost:
/// `memory_max` bytes. Each test has a process of its own (`cargo nextest`). The allocator keeps what
/// earlier bodies freed, so a later one seems to take less by as much as they took at most.
fn read_within(
    memory_max: usize,
    reader: &RequestReader,
    path: &str,
    body: &str,
) -> Result<ParsedRequest, PromptError> {
    // Resets the peak.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory("VmRSS");
    let read = reader.read(path, body.as_bytes());
    let taken = memory("VmHWM").saturating_sub(before);
    assert!(taken < memory_max, "{} bytes of body took {} MiB: {body:.60}", body.len(), taken >> 20);
    read
}

/// [`read_within`] the memory of a body of which no text is tokenized.
fn read_within_memory(reader: &RequestReader, path: &str, body: &str) -> Result<ParsedRequest, PromptError> {
    read_within(32 * body.len() + (64 << 20), reader, path, body)
}

#[test]
fn no_body_costs_memory_out_of_proportion() {
    let folder = tempfile::tempdir().unwrap();
    let with_template = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        ModelConfig { chat_template: path, ..model(name) }
    };
    let banner = "{% for m in messages %}{{ m.content }}{{ banner }}{{ eos_token }}{% endfor %}";
    let reader = reader(vec![
        with_template("banner", banner),
        with_template(
            "macro",
            "{% macro one(m) %}{{ m.content }}{{ banner }}{% endmacro %}{% set ns = namespace(text='') %}\
             {% for m in messages %}{% set ns.text = ns.text ~ one(m) %}{% endfor %}{{ ns.text }}",
        ),
        with_template("join", "{{ messages | map(attribute='content') | join(banner) }}"),
        with_template(
            "cubic",
            "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}\
             {% endfor %}",
        ),
        with_template("tools", "{% for m in messages %}{{ tools | tojson(indent=64) }}{% endfor %}"),
        ModelConfig { context_tokens: 1_000, ..with_template("plain", "{{ messages[0].content }}") },
    ]);
    let (chat, plain) = ("/v1/chat/completions", reader_without_models());
    let read = |path: &str, body: &str| read_within_memory(&reader, path, body);
    let message = r#"{"role":"user","content":"x"}"#;
    let many = vec![message; 2_000].join(",");
    let (long, zeros) = ("A".repeat(60 << 10), vec!["0"; 256 << 10].join(","));

    // Without a template, the prompt is what fits the budget.
    for content in [&zeros, &vec![r#"{"type":"a"}"#; 40_000].join(",")] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":[{content}]}}]}}"#);
        let parsed = read_within_memory(&plain, chat, &body).unwrap();
        assert!(parsed.prompt.input_tokens <= 1 << 20);
    }
    let prompts = format!("[{}]", vec!["[0]"; 256 << 10].join(","));
    for prompt in [&format!("[{zeros}]"), &prompts] {
        let body = format!(r#"{{"prompt":{prompt}}}"#);
        read_within_memory(&plain, "/v1/completions", &body).unwrap();
    }

    let with = |model: &str, more: &str| format!(r#"{{"model":"{model}","messages":[{many}]{more}}}"#);
    let kwargs = |name: &str| format!(r#","chat_template_kwargs":{{"{name}":"{long}"}}"#);
    for name in ["banner", "macro", "join"] {
        let refused = read(chat, &with(name, &kwargs("banner"))).expect_err("too much text");
        let PromptError::TooMuchText { limit } = refused else { panic!("{refused}") };
        assert!(read(chat, &with(name, "")).is_ok(), "the same conversation without it");
        says("a prompt that a chat template makes too long", &refused, &[&limit.to_string()]);
    }
    let refused = read(chat, &with("cubic", "")).expect_err("too much work");
    assert_eq!((refused.status(), refused.code()), (400, Some("context_length_exceeded")));
    let tools =
        format!(r#","tools":[{{"type":"function","function":{}1{}}}]"#, "[".repeat(90), "]".repeat(90));
    assert!(matches!(read(chat, &with("tools", &tools)), Err(PromptError::TooMuchText { .. })));
    let refused = read(chat, &with("banner", &kwargs("eos_token"))).expect_err("a token of the model");
    says("a special token that a request sets", &refused, &[]);

    // A known context bounds the text before it is tokenized.
    let prompt = "the cat ".repeat(64 << 10);
    let body = format!(r#"{{"model":"plain","prompt":"{prompt}"}}"#);
    assert!(matches!(read("/v1/completions", &body), Err(PromptError::TooMuchText { limit: 65_536 })));
    let body = format!(r#"{{"model":"plain","messages":[{{"role":"user","content":"{prompt}"}}]}}"#);
    assert!(matches!(read(chat, &body), Err(PromptError::TooMuchText { .. })));
}

#[test]
fn a_truncated_prompt_is_tokenized_within_the_memory_of_its_text() {
    let reader = reader(vec![ModelConfig { context_tokens: 1_000, ..model("short") }]);
    for words in ["the cat ", "a!", "12"] {
        let prompt = words.repeat((512 << 10) / words.len());
        let body = format!(r#"{{"model":"short","prompt":"{prompt}","truncate_prompt_tokens":8}}"#);
        // The tokenizers library takes 100 to 230 bytes for each byte.
        let read = read_within(400 * prompt.len(), &reader, "/v1/completions", &body).unwrap();
        assert_eq!(read.prompt.input_tokens, 8);
    }
    let too_much = "the cat ".repeat(600 << 10);
    let body = format!(r#"{{"model":"short","prompt":"{too_much}","truncate_prompt_tokens":8}}"#);
    assert!(matches!(reader.read("/v1/completions", body.as_bytes()), Err(PromptError::TooMuchText { .. })));
}

#[tokio::test]
async fn prompts_that_are_read_at_once_have_a_limit_together() {
    let reader = Arc::new(reader_without_models());
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    let (finish, finished) = std::sync::mpsc::channel::<()>();
    let finished = Arc::new(parking_lot::Mutex::new(finished));
    let read = || {
        let (reader, started, finished) = (reader.clone(), started.clone(), finished.clone());
        tokio::spawn(async move {
            let body = r#"{"prompt":"x"}"#;
            let read = reader.read_async(16 << 20, move |reader| {
                started.send(()).unwrap();
                finished.lock().recv().unwrap();
                reader.read("/v1/completions", body.as_bytes())
            });
            read.await.unwrap();
        })
    };
    let (first, second) = (read(), read());
    starts.recv().await.unwrap();
    // A short one is read meanwhile.
    reader.read_async(1, |reader| reader.read("/v1/completions", br#"{"prompt":"x"}"#)).await.unwrap();
    // Without the limit it would start at once. A slow machine makes this check weaker, not wrong.
    let second_start = tokio::time::timeout(std::time::Duration::from_millis(200), starts.recv());
    assert!(second_start.await.is_err(), "the second of the largest waits for the first");
    finish.send(()).unwrap();
    starts.recv().await.unwrap();
    finish.send(()).unwrap();
    first.await.unwrap();
    second.await.unwrap();
}
