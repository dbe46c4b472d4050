"""Loading a model of 0.6 B parameters: from `quire serve` to ready, and the most memory against the weights' own.

The checkpoint has the shapes of Qwen3-0.6B in bfloat16 and invented values; it is written to a folder of its own, once,
together with what `quire convert --format packed` makes of it. "dummy" invents the weights at every start instead.
Memory is that of a process that does nothing but load: the most that was resident, less what was before.

    python benchmarks/loading.py [--folder FOLDER] [--repeat 3] [--quantization int8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import print_header, print_table

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 1024, 3072, 16, 8, 128, 28, 151936
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MEASURE = """
import json, resource, sys, threading, time
from pathlib import Path
from quire.checkpoint.hf_config import load_model_info
from quire.kernels.create import create_backend
from quire.kernels.memory import resident_memory
from quire.models.loader import load_model
folder, quantization, load_format = sys.argv[1:]
info = load_model_info(Path(folder))
backend = create_backend("cpu", "bfloat16", "bfloat16", quantization=quantization or None)
before, peak, done = resident_memory(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, resident_memory())
watcher = threading.Thread(target=watch)
watcher.start()
started = time.perf_counter()
model = load_model(info, backend, max_model_len=2048, load_format=load_format)
seconds = time.perf_counter() - started
done.set()
watcher.join()
print(json.dumps([seconds, peak - before, resident_memory() - before]))
"""


def main() -> None:
    """Write the checkpoint, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quire-loading-benchmark")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quantization", default="", choices=("", "int8", "int4", "int8-weight-only"))
    args = parser.parse_args()
    plain, packed = args.folder / "plain", args.folder / f"packed-{args.quantization or 'bfloat16'}"
    write_checkpoint(plain)
    if not (packed / "model.quire").exists():
        words = ["convert", str(plain), str(packed), "--skip-tokenizer-init", "--force"]
        words += ["--quantization", args.quantization] if args.quantization else []
        subprocess.run([sys.executable, "-m", "quire", *words], check=True)
    print_header(f"Loading Qwen3-0.6B's shapes in {args.quantization or 'bfloat16'}")
    rows = []
    for name, folder, load_format in (
        ("safetensors", plain, "auto"),
        ("packed", packed, "auto"),
        ("dummy", plain, "dummy"),
    ):
        words = [sys.executable, "-c", MEASURE, str(folder), args.quantization, load_format]
        runs = [json.loads(subprocess.run(words, check=True, capture_output=True).stdout) for _ in range(args.repeat)]
        seconds = statistics.median(run[0] for run in runs)
        peak, held = (max(run[at] for run in runs) / 1e6 for at in (1, 2))
        starts = [ready_seconds(folder, load_format, args.quantization) for _ in range(args.repeat)]
        ready = statistics.median(starts)  # most with the files in the page cache, as the runs before have left them
        rows.append([name, f"{ready:.2f}", f"{seconds:.2f}", f"{peak:.0f}", f"{held:.0f}", f"{peak / held - 1:+.1%}"])
    print_table(("weights", "serve to ready s", "load s", "peak MB", "held MB", "peak over held"), rows)


def ready_seconds(folder: Path, load_format: str, quantization: str) -> float:
    """Return the seconds from the command until the server says that it is ready."""
    words = [sys.executable, "-m", "quire", "serve", str(folder), "--port", "0", "--log-level", "error"]
    words += ["--load-format", load_format, "--skip-tokenizer-init", "--max-model-len", "2048"]
    words += ["--kv-cache-memory-bytes", "256MiB", *(["--quantization", quantization] if quantization else [])]
    started = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = any(line.startswith("ready ") for line in process.stdout)
        seconds = time.perf_counter() - started
        process.terminate()
        if not ready:
            raise SystemExit("quire serve failed: see above")
    return seconds


def write_checkpoint(folder: Path) -> None:
    """Write config and weights, unless they are there."""
    path = folder / "model.safetensors"
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes, header, position = tensor_shapes(), {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = (np.random.default_rng(0).standard_normal(1 << 20, np.float32) * 0.02).view(np.uint32) >> 16
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(np.resize(values.astype(np.uint16), int(np.prod(shape))).tobytes())
    part.replace(path)


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (HIDDEN,)}


if __name__ == "__main__":
    main()
