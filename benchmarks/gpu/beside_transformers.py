"""Beside transformers on the same GPU in the same run: `generate`, and its continuous batching, with weights made up.

Each engine answers the same random prompts greedily with as many tokens; what counts is output tokens per second, the
second time. transformers gets bfloat16, scaled-dot-product attention, and its own continuous batching where the
installed version has it.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_steps import Bench, Scenario
from measure import on_gpu, synchronize
from report import Table
from shapes import write_config

LOADS = (("qwen3-0.6b", 64, 128, 128), ("llama-3.1-8b", 1, 128, 128), ("llama-3.1-8b", 64, 512, 128))


def measure_peers(*, small: bool = False, keep: Callable[[list[Table]], None]) -> list[Table]:
    """Return a table of Quire and transformers; `keep` is called whenever there is more."""
    table = Table("Beside transformers", ("model", "requests", "in", "out", "engine", "output tokens/s", "Quire is"))
    with tempfile.TemporaryDirectory() as folder:
        for shape, requests, inputs, outputs in (("qwen3-0.6b", 2, 6, 4),) if small else LOADS:
            words = (shape, str(requests), str(inputs), str(outputs))
            bench = Bench(Scenario(shape, throughput=(requests, inputs, outputs)), Path(folder), small=small)
            ours = bench.tokens_per_second(requests, inputs, outputs)
            bench.close()
            del bench
            _free()
            table.add(*words, "Quire", f"{ours:.0f}", "")
            model = write_config(shape, Path(folder), small=small)
            for name, speed in _transformers(model, requests, inputs, outputs, small=small):
                ratio = f"{ours / speed:.2f}x" if isinstance(speed, float) else ""
                table.add(*words, name, f"{speed:.0f}" if isinstance(speed, float) else speed, ratio)
            keep([table])
            _free()
    return [table]


def _free() -> None:
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def _transformers(
    folder: Path, requests: int, inputs: int, outputs: int, *, small: bool
) -> list[tuple[str, float | str]]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    device, dtype = ("cuda", torch.bfloat16) if on_gpu() else ("cpu", torch.float32)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    draw = random.Random(0)
    prompts = [[draw.randrange(2, config.vocab_size) for _ in range(inputs)] for _ in range(requests)]
    limits = {"max_new_tokens": outputs, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings: Any = transformers.GenerationConfig(**limits)
    batching: dict[str, Any] = {}
    if small and hasattr(transformers, "ContinuousBatchingConfig"):  # its cache takes all memory otherwise
        sizes = {"num_blocks": 4, "max_batch_tokens": 16}
        batching["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**sizes)

    def plain() -> None:
        ids = torch.tensor(prompts, device=device)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    def batched() -> None:
        model.generate_batch(inputs=prompts, generation_config=settings, **batching)

    found: list[tuple[str, float | str]] = []
    for name, run in (("transformers generate", plain), ("transformers continuous batching", batched)):
        try:
            found.append((name, requests * outputs / _second(run)))
        except Exception as error:  # boundary: whatever another engine may raise
            found.append((name, f"failed: {type(error).__name__}: {str(error)[:80]}"))
    return found


def _second(run: Callable[[], None]) -> float:
    for _ in range(2):
        synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            run()
        synchronize()
        elapsed = time.perf_counter() - started
    return elapsed
