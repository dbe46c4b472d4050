"""Compares `quire plan` with what an engine's process really takes at its peak.

    python benchmarks/plan_accuracy.py [--shapes demo small large] [--quantization int8] [--json FILE]

For each shape one process plans and another one runs: prompts that fill every block of the cache, computed in steps of
max_num_batched_tokens, then a full batch of decodes. Its peak is VmHWM of /proc (Linux). Shapes other than the demo are
configs of common sizes with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "large": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "window": {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 3072,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "sliding_window": 256,
    },
}
COMMON = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
FAMILY = {"window": ("MistralForCausalLM", "mistral")}


def main() -> None:
    """Plan and run every shape; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["demo", "small", "large"], choices=["demo", *SHAPES])
    parser.add_argument("--tokens", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--seqs", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence; all of them fill the cache")
    parser.add_argument("--quantization")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--bound", type=float, default=0.05, help="largest error; beyond it the exit code is 1")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run(json.loads(args.child), args.length)
        return
    rows = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compare(shape, options_of(shape, Path(folder), args), args))
        print(row_text(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    if any(abs(error_of(row)) > args.bound for row in rows):
        raise SystemExit(f"a plan is off by more than {args.bound:.0%}")


def options_of(shape: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options of a run."""
    options = {
        "max_num_batched_tokens": args.tokens,
        "max_num_seqs": args.seqs,
        "num_gpu_blocks_override": args.seqs * (args.length // 16),
        "swap_space": 0,
        **shape_options(shape, folder),
    }
    return options | ({"quantization": args.quantization} if args.quantization else {})


def shape_options(shape: str, folder: Path) -> dict[str, Any]:
    """Return the options of a model with this shape and dummy weights, after writing its config.json."""
    if shape == "demo":
        return {"model": "quire-demo"}
    architecture, model_type = FAMILY.get(shape, ("LlamaForCausalLM", "llama"))
    config = {"architectures": [architecture], "model_type": model_type, **COMMON, **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load_format": "dummy"}


def compare(shape: str, options: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return the plan's peak and the real one."""
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    planned = subprocess.run(
        [sys.executable, "-m", "quire", "plan", "--json", *flags], check=True, stdout=subprocess.PIPE, text=True
    )
    plan = json.loads(planned.stdout)
    child = [sys.executable, __file__, "--length", str(args.length), "--child", json.dumps(options)]
    subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True)  # once before: kernels may have to be compiled
    real = json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout)
    blocks = plan["fit"]["num_blocks"] * plan["block_bytes"]
    parts = {"weights": plan["weights"] + plan["tables"], "blocks": blocks, "step": plan["step"]["total"]}
    return {"shape": shape, "planned": plan["peak"], **real, **parts, "loading": plan["loading"]}


def error_of(row: dict[str, Any]) -> float:
    """Return by how much of the real peak the planned one is larger."""
    return float(row["planned"] / row["peak"] - 1)


def row_text(row: dict[str, Any]) -> str:
    """Return a line of the table, sizes in MiB."""
    mib = {name: f"{value / 2**20:.1f}" for name, value in row.items() if name != "shape"}
    return (
        f"{row['shape']:8} planned {mib['planned']:>8}  real {mib['peak']:>8}  {error_of(row):+.1%}  "
        f"(weights {mib['weights']}, blocks {mib['blocks']}, step {mib['step']}, loading {mib['loading']}; "
        f"real: loaded {mib['loaded']}, start {mib['start']})"
    )


def run(options: dict[str, Any], length: int) -> None:
    """Fill the cache, decode, and print the peaks; in a process of its own."""
    from quire.config import EngineConfig
    from quire.engine.core import EngineCore
    from quire.engine_request import EngineRequest
    from quire.sampling_params import SamplingParams

    start = peak_rss()
    core = EngineCore(EngineConfig.from_kwargs(**options))
    loaded = peak_rss()
    last = 8
    for number in range(options["max_num_seqs"]):
        core.add(
            EngineRequest(
                request_id=str(number),
                sequence_ids=[str(number)],
                prompt_token_ids=[(7 * number + i) % 900 + 5 for i in range(length - last)],
                sampling_params=SamplingParams(temperature=1.0, max_tokens=last, ignore_eos=True),
                seeds=[number],
                stop_ids=[],
                bad_words_ids=[],
                max_tokens=last,
                arrival_time=0.0,
            )
        )
    while core.has_unfinished():
        core.step()
    print(json.dumps({"start": start, "loaded": loaded, "peak": peak_rss()}))


def peak_rss() -> int:
    """Return this process's peak resident memory so far [bytes]."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell a process's peak")


if __name__ == "__main__":
    main()
