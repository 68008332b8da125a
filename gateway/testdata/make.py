"""Makes the rest of this folder: a small tokenizer.json, a chat template, and what Python makes of some requests.

Run: python make.py FOLDER, with tokenizers 0.23 and jinja2 3.1 from PyPI. Not here: what our reader makes of them (gateway/src/prompt/tests.rs).
"""
import json, sys, pathlib, copy, datetime
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers, processors, AddedToken, Regex
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.ext import Extension
out = pathlib.Path(sys.argv[1])
tok = Tokenizer(models.BPE())
pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tok.decoder = decoders.ByteLevel()
corpus = ["You are a helpful assistant. The quick brown fox jumps over the lazy dog.",
 "What is the capital of France? The capital of France is Paris.",
 "Tell me a story about a router that knows where every prefix of a prompt is kept."] * 4
trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[])
tok.train_from_iterator(corpus, trainer)
tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<|begin|>", "<|im_start|>", "<|im_end|>", "<|tool|>"]])
tok.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("router", normalized=True, single_word=True)])
begin = tok.token_to_id("<|begin|>")
tok.post_processor = processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", begin)])
text = json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":"))
(out / "tokenizer.json").write_text(text, encoding="utf-8")
template = """{#- A template with what real ones have: tools, loops, whitespace control, methods of strings. -#}
{%- if tools %}
    {{- bos_token + '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n<|im_end|>\\n" }}
{%- else %}
    {{- bos_token }}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{% for message in messages %}
    {%- set loud = message.content | trim | upper if message.role == 'shout' else message.content %}
    {%- if message.role == 'nobody' %}
        {{- raise_exception("nobody may speak") }}
    {%- elif message.role == 'system' and loop.first %}
        {%- continue %}
    {%- elif message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}
{{ loud.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
<|tool|>{{ call.function.name }} {{ call.function.arguments | tojson }} {{ call.function.arguments.items() | list | length }} {{ call.id is defined }}
{%- endfor %}
<|im_end|>
{% endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + loud + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
(out / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|begin|>", "lstrip": False}, "eos_token": "<|im_end|>", "chat_template": template}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

class Generation(Extension):
    tags = {"generation"}
    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(lineno)
    def _same(self, caller): return caller()
env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
def raise_exception(m): raise jinja2.exceptions.TemplateError(m)
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
compiled = env.from_string(template)

def vllm_messages(messages):
    made = []
    for m in messages:
        c = m.get("content")
        if c is None: c = []
        if isinstance(c, str): c = [{"type": "text", "text": c}]
        r = {"role": m["role"], "content": "\n".join(p if isinstance(p, str) else p["text"] for p in c)}
        if m["role"] == "assistant" and m.get("tool_calls"):
            calls = copy.deepcopy(m["tool_calls"])
            for call in calls:
                a = call["function"].get("arguments")
                call["function"]["arguments"] = json.loads(a) if isinstance(a, str) and a else (a or {})
            r["tool_calls"] = calls
        if m["role"] == "tool" and "tool_call_id" in m: r["tool_call_id"] = m["tool_call_id"]
        if isinstance(m.get("name"), str): r["name"] = m["name"]
        made.append(r)
    return made
def vllm_tools(tools):
    if tools is None: return None
    r = []
    for t in tools:
        f = t["function"]
        d = {"name": f["name"], "description": f.get("description"), "parameters": f.get("parameters")}
        d.update({k: v for k, v in f.items() if k not in d})
        r.append({"type": t["type"], "function": d})
    return r
chats = [
 {"model": "m", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
 {"model": "m", "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": "about a router <b> & 'quotes' é😀"}]}], "stream": True, "max_tokens": 7},
 {"model": "m", "cache_salt": None, "messages": [{"role": "user", "content": "a <|im_start|> in the text, and <think>"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"b\": \"\u00fc\", \"a\": [1, 2.0, null, true]}"}}]}, {"role": "tool", "tool_call_id": "c1", "content": "15 \u00b0C"}, {"role": "shout", "content": "  stop  "}], "tools": [{"function": {"parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "number", "default": 1e-7}}}, "name": "weather"}, "type": "function"}]},
 {"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>hm</think>\n\nyes"}, {"role": "user", "content": ""}], "chat_template_kwargs": {"enable_thinking": False}},
 {"model": "m", "messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False, "add_special_tokens": True},
]
cases = []
for c in chats:
    ctx = dict(messages=vllm_messages(c["messages"]), tools=vllm_tools(c.get("tools")), documents=None, add_generation_prompt=c.get("add_generation_prompt", True), bos_token="<|begin|>", eos_token="<|im_end|>")
    ctx.update(c.get("chat_template_kwargs") or {})
    text = compiled.render(**ctx)
    ids = tok.encode(text, add_special_tokens=c.get("add_special_tokens", False)).ids
    cases.append({"path": "/v1/chat/completions", "body": json.dumps(c, ensure_ascii=False), "text": text, "tokens": ids})
for path, key, value in [("/v1/completions", "prompt", "The quick brown fox"), ("/v1/completions", "prompt", ["Paris 12345 é😀\r\n\n  x", "ignored"]), ("/v1/embeddings", "input", "a router <|im_end|> routers router"), ("/v1/completions", "prompt", "")]:
    first = value if isinstance(value, str) else value[0]
    cases.append({"path": path, "body": json.dumps({"model": "m", key: value}, ensure_ascii=False), "text": first, "tokens": tok.encode(first, add_special_tokens=True).ids})
with open(out / "prompts.jsonl", "w", encoding="utf-8") as f:
    for c in cases: f.write(json.dumps(c, ensure_ascii=False) + "\n")
