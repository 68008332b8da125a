"""A vLLM with two layers of random weights and ten blocks of memory, which computes the prompts that it reads, one JSON object a line, and
publishes its KV events. Started by router/tests/cluster/engines.rs."""

import json
import os
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config.kv_events import KVEventsConfig  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def main(events: str, replay: str) -> None:
    with tempfile.TemporaryDirectory() as model:
        with open(os.path.join(model, "config.json"), "w", encoding="utf-8") as file:
            json.dump(CONFIG, file)
        engine = LLM(
            model=model, skip_tokenizer_init=True, load_format="dummy", block_size=32, max_model_len=256,
            enforce_eager=True, num_gpu_blocks_override=10,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq", endpoint=f"tcp://*:{events}",
                replay_endpoint=f"tcp://*:{replay}", topic="kv",
            ),
        )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = {"prompt_token_ids": asked["tokens"]}
        if asked["salt"]:
            prompt["cache_salt"] = asked["salt"]
        engine.generate([prompt], sampling, use_tqdm=False)
        print("done", flush=True)


main(*sys.argv[1:])
