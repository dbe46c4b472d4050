"""Runs decode steps of real models, at their real widths, on a GPU that is not there, and counts what is launched.

Two layers and a small vocabulary stand for the whole model; products of PyTorch are not computed. Must run under
`pretend_gpu()` in a process that has not set TRITON_INTERPRET; `python -m tests.kernels.gpu.compile_model` prints what
each layer launches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu import shapes
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.backend import AttentionMetadata, LayerCache
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.tuned_configs import TunedConfigs
from quire.models.loader import load_model
from tests.helpers.pretend_gpu import pretend_gpu

LAYERS = 2
CONTEXT = 1024  # tokens that block tables have room for
# Of PyTorch, what only looks at a tensor in another way, or makes room for one, and launches nothing.
SILENT = {"view", "_unsafe_view", "t", "slice", "transpose", "empty", "empty_strided", "select", "unsqueeze", "detach"}
SILENT |= {"expand", "alias", "as_strided", "split", "reshape", "permute", "_reshape_alias", "new_empty"}


class Launches(TorchDispatchMode):
    """Names of kernels in the order of their launches; PyTorch's begin with "torch."."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in SILENT:
            self.names.append(f"torch.{name}")
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            return left.new_empty((left.shape[0], right.shape[1]))
        return func(*args, **(kwargs or {}))


@contextmanager
def launched() -> Iterator[list[str]]:
    """Yield what is launched meanwhile, one name for each launch."""
    seen, original = Launches(), JITFunction.run

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            seen.names.append(self.__name__)
        return original(self, *args, **kwargs)

    with patch.object(JITFunction, "run", run), seen:
        yield seen.names


def backend_for(capability: tuple[int, int], *, pdl: bool) -> GPUBackend:
    """Return a backend for the chip that is pretended; `pdl`: launches overlap, if it can do that."""
    backend = GPUBackend("bfloat16", "bfloat16", "cpu")
    backend.capability, backend.num_sms = capability, 132
    if pdl:
        backend.tuned_configs = TunedConfigs({"pdl": {"all": {"on": 1}}})
    return backend


def model_of(name: str, backend: GPUBackend) -> Any:
    """Return a model of one of `benchmarks.gpu.shapes` with fewer layers, tokens and experts than it has."""
    small = {"num_hidden_layers": LAYERS, "vocab_size": 1024}
    with tempfile.TemporaryDirectory() as folder, patch.dict(shapes.SHAPES[name], small):
        info = load_model_info(shapes.write_config(name, Path(folder)))
    return load_model(info, backend, max_model_len=CONTEXT, load_format="dummy")


def decode(model: Any, backend: GPUBackend, tokens: int) -> list[str]:
    """Run a step of one token for each of so many sequences, as it is captured; return what it launches."""
    spec = model.kv_cache_spec().layers
    blocks = CONTEXT // 16
    caches = [LayerCache(backend.new_kv_cache(blocks, 16, layer.num_kv_heads, layer.head_size), 0) for layer in spec]
    metadata = AttentionMetadata(
        cu_query_lens=torch.arange(tokens + 1, dtype=torch.int32),
        seq_lens=torch.full((tokens,), CONTEXT, dtype=torch.int32),
        block_tables=torch.zeros((tokens, blocks), dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        single=True,
    )
    ids = torch.zeros(tokens, dtype=torch.int64)
    with launched() as names:
        model.compute_logits(model.forward(ids, ids, caches, metadata))
    return names


def launch(capability: tuple[int, int] = (9, 0), *, pdl: bool = False) -> dict[str, list[str]]:
    """Decode one sequence and 64 with each shape; return the launches of each."""
    found = {}
    for name in shapes.SHAPES:
        backend = backend_for(capability, pdl=pdl)
        model = model_of(name, backend)
        for tokens in (1, 64):
            found[f"{name} {tokens}"] = decode(model, backend, tokens)
    return found


def main() -> None:
    """Print the launches of each step."""
    with pretend_gpu() as compiled:
        for name, names in launch().items():
            print(f"{name}: {len(names)} launches", *names, sep="\n  ")
    print(*sorted({str(made) for made in compiled}), sep="\n")


if __name__ == "__main__":
    main()
