"""PyTorch modules whose products and tables are a backend's; for models that are run by transformers' own code.

PyTorch is imported when something is called, not before: only who runs such a model has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.errors import ConfigError
from quire.kernels.backend import Array, Backend
from quire.layers.parallel import ParallelContext

COLUMN_WISE, ROW_WISE = "colwise", "rowwise"


def host_tensor(tensor: Any) -> HostTensor:
    """Return a torch tensor as one of a checkpoint; shares its memory."""
    import torch

    flat = tensor.detach()
    if flat.dtype == torch.bfloat16:
        return HostTensor(flat.contiguous().view(torch.int16).numpy().view(np.uint16), "bfloat16")
    return HostTensor(flat.contiguous().numpy(), str(flat.dtype).removeprefix("torch."))


def to_torch(array: Array) -> Any:
    """Return a backend's array as a torch tensor of the same memory."""
    import torch

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def to_array(backend: Backend, tensor: Any) -> Array:
    """Return a torch tensor as an array of the backend: float32 where it holds floats, and contiguous."""
    flat = tensor.detach()
    flat = (flat.float() if flat.is_floating_point() else flat.long()).contiguous()
    return flat.numpy() if backend.name == "cpu" else flat


def call(module: Any, function: Callable[[Any], Any]) -> Any:
    """Return a module without parameters that computes `function`, in the place of `module`."""
    import torch

    class Packed(torch.nn.Module):
        """Stands where a linear layer or a table stood."""

        def forward(self, x: Any) -> Any:
            return function(x)

        def extra_repr(self) -> str:
            return f"for {type(module).__name__}"

    return Packed()


def packed_linear(backend: Backend, parallel: ParallelContext, linear: Any, style: str | None, *, exact: bool) -> Any:
    """Return a module that computes a `torch.nn.Linear` on the backend.

    `style` is how transformers' plan splits it over ranks: "colwise", "rowwise", or None for not at all.
    """
    weight, bias = host_tensor(linear.weight), None if linear.bias is None else host_tensor(linear.bias)
    if parallel.tp_size > 1 and style == COLUMN_WISE:
        share = parallel.share(linear.out_features, "columns of a linear layer")
        start = parallel.tp_rank * share
        weight = weight.rows(start, start + share)
        bias = None if bias is None else bias.rows(start, start + share)
    elif parallel.tp_size > 1 and style == ROW_WISE:
        share = parallel.share(linear.in_features, "rows of a linear layer")
        start = parallel.tp_rank * share
        weight = weight.columns(start, start + share)
        bias = bias if parallel.tp_rank == 0 else None  # the sum over ranks must hold it once
    packed = backend.pack_linear([weight], None if bias is None else [bias], exact=exact)
    inputs, outputs = weight.shape[1], weight.shape[0]

    def compute(x: Any) -> Any:
        rows = backend.linear(to_array(backend, x.reshape(-1, inputs)), packed)
        if style == ROW_WISE:
            rows = parallel.sum_ranks(rows)
        return to_torch(rows).reshape(*x.shape[:-1], outputs)

    return call(linear, compute)


def packed_table(backend: Backend, table: Any, *, exact: bool) -> tuple[Any, Any]:
    """Return a module that looks up a `torch.nn.Embedding` on the backend, and one that scores all of its rows."""
    packed = backend.pack_linear([host_tensor(table.weight)], table=True, exact=exact)
    width, rows = table.embedding_dim, table.num_embeddings

    def look_up(ids: Any) -> Any:
        found = backend.embedding(to_array(backend, ids.reshape(-1)), packed)
        return to_torch(found).reshape(*ids.shape, width)

    def score(x: Any) -> Any:
        return to_torch(backend.linear(to_array(backend, x.reshape(-1, width)), packed)).reshape(*x.shape[:-1], rows)

    return call(table, look_up), call(table, score)


def named_modules(model: Any, kind: Any) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield (parent, name in it, full name, module) of modules of exactly this type."""
    for full, module in list(model.named_modules()):
        if type(module) is kind:
            prefix, _, name = full.rpartition(".")
            yield model.get_submodule(prefix), name, full, module


def check_ranks(parallel: ParallelContext, plan: dict[str, str], architecture: str) -> None:
    """Refuse several ranks for a model that does not say how it is split. Raises ConfigError."""
    if parallel.tp_size > 1 and not {COLUMN_WISE, ROW_WISE} <= set(plan.values()):
        raise ConfigError(
            f"tensor_parallel_size is {parallel.tp_size}; {architecture} of transformers has no plan for several ranks",
            param="tensor_parallel_size",
        )
