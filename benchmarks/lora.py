"""What LoRA adapters cost: steps with enable_lora and rows of no, one and eight adapters, beside steps without it.

A model of 135M parameters with invented weights (or one of a folder), adapters of all linear layers. A decode step has
eight rows, one of each adapter where there are eight; a prefill is one prompt, so that it has one adapter at most, and
eight are eight prompts. All variants take turns; ratios are of medians, to the same step without enable_lora.

    python benchmarks/lora.py [--model FOLDER] [--rank 16] [--dtype bfloat16] [--quantization int8] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from common import print_header, print_table

from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.kernels.backend import LayerCache
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.lora import LoRAChange
from quire.layers.lora import LoRASlots
from quire.models.loader import load_model
from quire.worker.graphs import StepGraphs
from quire.worker.input_batch import StepInputs

ADAPTERS = 8
BLOCKS, BLOCK_SIZE, CONTEXT = 1024, 16, 192
STEPS = {"decode, 8 rows": (8, 1), "prefill, 1 x 512": (1, 512), "prefill, 8 x 64": (8, 64)}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class Variant:
    """A model with its caches; with slots filled by adapters of `rank` if there is one."""

    def __init__(self, info: ModelInfo, args: argparse.Namespace, rank: int | None) -> None:
        backend = CPUBackend(args.dtype, args.dtype, args.threads, quantization=args.quantization)
        self.slots: LoRASlots | None = None
        if rank is not None:
            sizes = {"num_slots": ADAPTERS, "max_rank": rank, "max_tokens": 512, "max_rows": 64}
            self.slots = LoRASlots(backend, vocab_size=info.vocab_size, extra_vocab=0, **sizes)
        load_format = "auto" if args.model else "dummy"
        model = load_model(info, backend, max_model_len=2048, load_format=load_format, lora=self.slots)
        caches = [
            backend.new_kv_cache(BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_size)
            for layer in model.kv_cache_spec().layers
        ]
        for cache in caches:  # memory that was never written would be read from one page of zeros
            cache.keys[:] = 0
            cache.values[:] = 0
        if self.slots is not None and rank is not None:
            for slot in range(ADAPTERS):
                self.slots.fill(slot, self.slots.pack(adapter(self.slots, rank, slot)), info.vocab_size)
        self.graphs = StepGraphs(
            model, backend, [LayerCache(cache) for cache in caches],
            max_tokens=512, max_num_seqs=8, max_blocks=BLOCKS, lora=self.slots,
        )  # fmt: skip

    def seconds(self, inputs: StepInputs, adapters: int) -> float:
        """Run a step whose sequences have so many adapters in turn; 0: none."""
        count = len(inputs.seq_lens)
        slots = np.arange(count) % adapters if adapters else np.full(count, -1)
        started = time.perf_counter()
        inputs.adapter_slots = slots
        self.graphs.run(inputs)
        return time.perf_counter() - started


def adapter(slots: LoRASlots, rank: int, seed: int) -> dict[str, LoRAChange]:
    """Return random factors for every linear layer."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32) * 0.01

    return {
        name: LoRAChange(drawn(rank, target.inputs), drawn(target.outputs, rank))
        for name, target in slots.targets.items()
        if target.kind == "linear"
    }


def layout(sequences: int, tokens: int) -> StepInputs:
    """Return a step of sequences that end at the context, in blocks of their own, each sampled."""
    context = max(CONTEXT, tokens)
    width = -(-context // BLOCK_SIZE)
    tables = np.arange(sequences * width, dtype=np.int32).reshape(sequences, width)
    positions = np.tile(np.arange(context - tokens, context), sequences)
    blocks = tables[np.repeat(np.arange(sequences), tokens), positions // BLOCK_SIZE].astype(np.int64)
    return StepInputs(
        sequence_ids=[],
        rows=np.arange(sequences),
        num_scheduled=np.full(sequences, tokens),
        input_ids=np.random.default_rng(0).integers(300, 15900, sequences * tokens),
        positions=positions,
        cu_query_lens=np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32),
        seq_lens=np.full(sequences, context, np.int32),
        block_tables=tables[None],
        slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)[None],
        num_logits=np.ones(sequences, np.int64),
        logits_indices=np.arange(1, sequences + 1) * tokens - 1,
    )


def main() -> None:
    """Time the variants in turns and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        info = load_model_info(args.model or Path(folder))
        off, on = Variant(info, args, None), Variant(info, args, args.rank)
    print_header(f"LoRA adapters of rank {args.rank}, {args.quantization or args.dtype}")
    rows = []
    for title, (sequences, tokens) in STEPS.items():
        inputs = layout(sequences, tokens)
        choices = [(off, 0), *[(on, count) for count in (0, 1, ADAPTERS) if count <= max(1, sequences)]]
        taken: list[list[float]] = [[] for _ in choices]
        for number in range(args.repeat + 1):
            for place, (variant, count) in enumerate(choices):
                seconds = variant.seconds(inputs, count)
                if number:  # the first run records
                    taken[place].append(seconds)
        base, *others = (float(np.median(times)) for times in taken)
        ratios = [f"{other / base:.2f}" for other in others] + ["-"] * (3 - len(others))
        rows.append([title, f"{base * 1e3:.1f}", *ratios])
    print_table(("step", "without, ms", "no adapter", "one", "eight"), rows)


if __name__ == "__main__":
    main()
