"""What layer-wise KV offloading (`--kv-resident-layers`) does to waiting, simulated with the engine's scheduler.

A GPU of known rates, by default those of an H200 on PCIe 5, serves a model that leaves little room for keys and values.
Prompts arrive at random at several rates; at the higher ones they queue for blocks. Each load is replayed without
layerwise blocks and with several numbers of resident layers and sizes of host memory, all else being equal. Prints
times to the first token, from that to the second and for each token after it, and what the queues were like.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from common import print_header, print_table

from quire.config import EngineConfig
from quire.engine.resolve import load_info
from quire.simulate.contents import StepContents
from quire.simulate.report import summarize_run
from quire.simulate.run import long_enough, make_cost, simulate
from quire.simulate.trace import draw, parse_synthetic
from quire.step import SchedulerOutput

SHAPES: dict[str, dict[str, Any]] = {
    "70B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "eos_token_id": 128001, "rope_theta": 500000.0,
    },
    "8B": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "eos_token_id": 128001, "rope_theta": 500000.0,
    },
}  # fmt: skip
H200 = "roofline:bandwidth=4800,gflops=989000,memory=131,link=50,overhead=500"


class Streaming:
    """An observer: how many steps streamed anything, and how much they brought and took away."""

    def __init__(self) -> None:
        self.num_steps = self.num_streaming = 0
        self.blocks = 0.0

    def __call__(self, plan: SchedulerOutput, contents: StepContents, seconds: float) -> None:
        self.num_steps += 1
        self.num_streaming += contents.streamed + contents.exchanged > 0
        self.blocks += contents.streamed


def run(args: argparse.Namespace, folder: Path, rate: float, options: dict[str, Any]) -> list[str]:
    """Replay one load with `options`; return a row of the table, apart from its name."""
    requests = draw([parse_synthetic(args.synthetic.format(rate=rate, num=args.num))])
    config = EngineConfig.from_kwargs(
        model=str(folder),
        device="cuda",
        quantization=args.quantization,
        max_model_len=max(request.num_tokens for request in requests),
        max_num_batched_tokens=args.max_num_batched_tokens,
        preemption_mode="recompute",
        **options,
    )
    info = long_enough(load_info(config), config, requests)
    cost, memory = make_cost(args.cost_model, config, info)
    streaming = Streaming()
    found = simulate(config, info, requests, cost, memory, streaming)
    result = summarize_run(found)
    times = [
        result[name][point] * scale
        for name, scale in (("ttft", 1.0), ("second", 1.0), ("tpot", 1e3), ("e2e", 1.0))
        for point in ("p50", "p99")
    ]
    return [
        f"{found.ready.num_blocks * config.cache.block_size:,}",
        *(f"{value:.2f}" for value in times[:4]),
        *(f"{value:.0f}" for value in times[4:]),
        f"{result['output_throughput']:.0f}",
        f"{result['waiting']['mean']:.1f}",
        f"{result['running']['mean']:.1f}",
        str(result["preemptions"]),
        f"{streaming.num_streaming / max(1, streaming.num_steps):.0%}",
    ]


def main() -> None:
    """Print one table for each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="70B")
    parser.add_argument("--quantization", default="fp8", help="of the weights")
    parser.add_argument("--rate", type=float, action="append", help="requests per second")
    parser.add_argument("--num", type=int, default=300, help="requests")
    parser.add_argument("--synthetic", default="poisson:rate={rate},num={num},prompt=6000,output=1000,spread=0.5")
    parser.add_argument("--resident", type=int, action="append", help="resident layers")
    parser.add_argument("--host", action="append", help="host memory of layerwise blocks")
    parser.add_argument("--cost-model", default=H200)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    print_header("Layerwise blocks and queueing, simulated")
    print(f"{args.shape} in {args.quantization}, {args.cost_model}; {args.num} requests of {args.synthetic}\n")
    header = (
        "resident, host", "tokens of room", "TTFT p50 s", "p99", "2nd token p50 s", "p99", "TPOT p50 ms", "p99",
        "all p50 s", "p99", "output tokens/s", "waiting", "running", "preempted", "steps that stream",
    )  # fmt: skip
    ways: list[tuple[str, dict[str, Any]]] = [("all", {"swap_space": 0})]
    for resident in args.resident or [8]:
        for host in args.host or ["4GiB", "16GiB", "48GiB"]:
            ways.append((f"{resident}, {host}", {"kv_resident_layers": resident, "swap_space": host}))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES[args.shape]))
        for rate in args.rate or [0.5, 0.6, 0.7]:
            print(f"{rate:g} requests per second\n")
            print_table(header, [[way, *run(args, folder, rate, options)] for way, options in ways])
    print(f"simulated in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
