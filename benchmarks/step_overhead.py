"""What the engine itself costs per step: schedule, update, and the whole of `EngineCore.step`, without any model.

A null executor returns token ids at once, so that only the control plane is left. The cost should grow with the
sequences running and not with those waiting. Medians over many steps, after warm-up.

    python benchmarks/step_overhead.py [--steps 400] [--running 1 16 64 256] [--waiting 0 1000 100000]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from common import print_header, print_table

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams

VOCAB_SIZE = 1000
BLOCK_SIZE = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 2**20,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def main() -> None:
    """Measure every combination and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps measured")
    parser.add_argument("--warmup", type=int, default=50, help="steps before")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1000, 100000])
    args = parser.parse_args()
    print_header("Host cost per decode step, null model")
    rows = []
    for running in args.running:
        for waiting in args.waiting:
            figures = measure(running, waiting, args.steps, args.warmup, args.prompt_len)
            per_sequence = figures[2] / running
            rows.append([str(running), str(waiting), *(f"{value:.1f}" for value in (*figures, per_sequence))])
    print_table(("running", "waiting", "schedule us", "update us", "step us", "step us per sequence"), rows)


def measure(running: int, waiting: int, steps: int, warmup: int, prompt_len: int) -> tuple[float, float, float]:
    """Return the median microseconds of schedule, update, and a whole step with `running` sequences decoding."""
    # The first sequences generate while the others' prompts are still computed, a budget's worth a step.
    core = make_core(running, 2 * steps + warmup + prompt_len + running)
    rng = random.Random(0)
    for index in range(running):
        core.add(make_request(f"run-{index}", [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]))
    while core.scheduler.stats().num_running < running:
        core.step()
    for index in range(waiting):
        core.add(make_request(f"wait-{index}", [index % VOCAB_SIZE] * 8))
    for _ in range(warmup):
        core.step()
    parts: list[tuple[float, float]] = []
    whole: list[float] = []
    gc.collect()
    gc.freeze()  # so that a collection during the run does not walk the waiting requests
    for _ in range(steps):
        parts.append(step_in_parts(core))
        started = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - started)
    gc.unfreeze()
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (running, waiting), "a sequence ended during the measurement"
    schedule, update = zip(*parts, strict=True)
    return tuple(statistics.median(values) * 1e6 for values in (schedule, update, whole))  # type: ignore[return-value]


def step_in_parts(core: EngineCore) -> tuple[float, float]:
    """Do what `EngineCore.step` does; return the seconds of schedule and of update."""
    before = time.perf_counter()
    plan = core.scheduler.schedule()
    scheduled = time.perf_counter()
    result = core.executor.execute(plan)
    executed = time.perf_counter()
    core.scheduler.update_from_output(plan, result)
    return scheduled - before, time.perf_counter() - executed


def make_core(running: int, tokens_each: int) -> EngineCore:
    """Return an engine with room for `running` sequences of `tokens_each` tokens, and a null executor."""
    blocks = running * (tokens_each // BLOCK_SIZE + 2)
    config = EngineConfig.from_kwargs(
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        num_gpu_blocks_override=blocks + blocks // 50,
        max_model_len=tokens_each + BLOCK_SIZE,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        info = load_model_info(Path(folder))
    return EngineCore(config, executor=NullExecutor(VOCAB_SIZE), info=info)


def make_request(request_id: str, prompt: list[int]) -> EngineRequest:
    """Return a request that never ends by itself."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=None, ignore_eos=True),
        arrival_time=0.0,
        sequence_ids=[request_id],
        seeds=[0],
        stop_ids=[],
        max_tokens=2**19,
    )


if __name__ == "__main__":
    main()
