"""Weights in PyTorch's files (`pytorch_model.bin`, `.pt`, `.pth`), pickles, for `--load-format pt`.

`torch.load(weights_only=True)` runs no code of the file: anything but tensors and containers of them is refused.
PyTorch is imported only when such a file is opened. The mapping of a file lives as long as any of its tensors.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from quire.checkpoint.files import regular_file_size
from quire.checkpoint.safetensors import HEADER_DTYPES, PICKLE_SUFFIXES, read_index
from quire.checkpoint.tensor import HostTensor
from quire.checkpoint.weights import Checkpoint, StoredTensor
from quire.errors import ModelError, first_line

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"
EXTRA = "pip install 'quire[reference]'"
# Beginnings of other files that trainers write beside weights.
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "consolidated")
WRAPPERS = ("state_dict", "model", "module")  # keys under which some programs save the weights


def open_pickles(folder: Path) -> Checkpoint:
    """Open a folder's weight files. Raises ModelError if there are none, for other content, and without torch."""
    paths = _paths(folder)
    if importlib.util.find_spec("torch") is None:
        raise ModelError(f"{paths[0]}: pickle weights need PyTorch ({EXTRA})")
    checkpoint = Checkpoint(folder)
    for path in paths:
        for name, tensor in _load(path).items():
            dtype = _dtype(tensor)
            header = HEADER_DTYPES.get(dtype, dtype)
            size = tensor.numel() * tensor.element_size()
            checkpoint.add(name, StoredTensor(path, header, tuple(tensor.shape), size, partial(host_tensor, tensor)))
    return checkpoint


def _dtype(tensor: Any) -> str:
    """Return the dtype as `HostTensor` names it: torch has an "fn" behind float8_e4m3, for finite numbers only."""
    return str(tensor.dtype).removeprefix("torch.").removesuffix("fn")


def host_tensor(tensor: Any) -> HostTensor:
    """Return a torch tensor as a `HostTensor` that shares its memory, unless it is not contiguous."""
    import torch

    tensor = tensor.detach().contiguous()
    dtype = _dtype(tensor)
    if dtype == "bfloat16":
        return HostTensor(tensor.view(torch.int16).numpy().view("u2"), dtype)
    if dtype.startswith("float8"):
        return HostTensor(tensor.view(torch.uint8).numpy(), dtype)
    return HostTensor(tensor.numpy(), dtype)


def _paths(folder: Path) -> list[Path]:
    """Return the files: those that the index names, the one with the usual name, or all that look like weights."""
    index = folder / INDEX_FILE
    if os.path.lexists(folder / SINGLE_FILE):
        return [folder / SINGLE_FILE]
    if os.path.lexists(index):
        return [folder / shard for shard in dict.fromkeys(read_index(index).values())]
    found = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES) if folder.is_dir() else []
    found = [path for path in found if not path.name.startswith(NO_WEIGHTS)]
    if not found:
        raise ModelError(f"{folder}: no pickle weights (expected {SINGLE_FILE}, {INDEX_FILE} and its shards, or *.pt)")
    return found


def _load(path: Path) -> dict[str, Any]:
    import torch

    regular_file_size(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except UnpicklingError:
        raise ModelError(f"{path}: holds more than tensors, or is damaged; nothing of it was run") from None
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: torch cannot read it ({first_line(error)})") from None
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping):
        raise ModelError(f"{path}: holds a {type(found).__name__} (expected tensors by name)")
    return {str(name): tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def _is_zip(path: Path) -> bool:
    """Whether the file is a zip archive, which can be mapped, as since torch 1.6."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
