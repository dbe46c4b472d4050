"""Reads an adapter's folder, and checks all of it against the model before it is used.

Every tensor must belong to a layer of the model and have its shape, every value must be finite, and nothing may be
missing or left over: an adapter that loads does what it was trained to do.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from quire.checkpoint.safetensors import SafetensorsFile
from quire.checkpoint.tensor import HostTensor, count_nonfinite
from quire.errors import ModelError, echo, listed
from quire.kernels.lora import LoRAChange
from quire.layers.lora import LoRATarget
from quire.lora.patterns import Pattern
from quire.lora.peft_config import CONFIG_FILE, PeftConfig, read_peft_config

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
FLOATS = ("float32", "float16", "bfloat16", "float64")
DIGEST_BYTES = 16
MAX_NAMED = 8
NO_LAYER = "this model has no such layer, or none that adapters can change"
# Ends of tensor names -> the role of the tensor in its module.
TAILS = (
    (re.compile(r"\.lora_A(?:\.default)?\.weight$"), "a"),
    (re.compile(r"\.lora_B(?:\.default)?\.weight$"), "b"),
    (re.compile(r"\.lora_embedding_A(?:\.default)?$"), "embedding_a"),
    (re.compile(r"\.lora_embedding_B(?:\.default)?$"), "embedding_b"),
    (re.compile(r"(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight$"), "whole"),
)


@dataclass(frozen=True, slots=True)
class Adapter:
    """The changes of an adapter by the names of the model's targets, float32.

    vocab_size: ids that its prompts may have. num_logits: ids that it can generate. digest: of its files' contents.
    """

    changes: dict[str, LoRAChange]
    vocab_size: int
    num_logits: int
    digest: str


@dataclass(slots=True)
class _Found:
    """The tensors of one module by role: name in the file and tensor."""

    target: LoRATarget
    tensors: dict[str, tuple[str, HostTensor]] = field(default_factory=dict)


def read_adapter(
    folder: Path, targets: Mapping[str, LoRATarget], *, max_rank: int, vocab_size: int, extra_vocab: int = 0
) -> Adapter:
    """Read a PEFT folder for a model that has these targets.

    Args:
        max_rank: of any factors. vocab_size: of the model; extra_vocab: by how many ids an adapter may enlarge it.

    Raises:
        ModelError: something is missing, malformed, or does not belong to this model; names file, tensor or field.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder (expected one with {CONFIG_FILE} and {WEIGHTS_FILE})")
    config = read_peft_config(folder, max_rank)
    path = folder / WEIGHTS_FILE
    if not os.path.lexists(path):
        if os.path.lexists(folder / PICKLE_FILE):
            raise ModelError(f"{folder / PICKLE_FILE}: pickle weights are not supported (expected {WEIGHTS_FILE})")
        raise ModelError(f"{path}: no such file (expected an adapter's weights)")
    file = SafetensorsFile(path)
    modules = _sort(file, targets)
    _check_targets(config, modules, targets, path)
    reader = _Reader(config, path, vocab_size + extra_vocab)
    changes = {name: reader.change(found) for name, found in modules.items()}
    known = _max_rows(changes, targets, "embedding", vocab_size)
    scored = _max_rows(changes, targets, "head", vocab_size)
    if scored > known:
        raise ModelError(
            f"{path}: the output head has {scored} rows, but the embedding has {known} (expected as many: what is "
            "generated must be looked up)"
        )
    if config.ties and any(targets[name].kind != "linear" for name in changes):
        raise ModelError(f"{config.path}: ensure_weight_tying is true (expected false: a head of its own)")
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for each in (folder / CONFIG_FILE, path):
        digest.update(each.read_bytes())
    return Adapter(changes, known, scored, digest.hexdigest())


def _max_rows(changes: Mapping[str, LoRAChange], targets: Mapping[str, LoRATarget], kind: str, least: int) -> int:
    wholes = [change.whole for name, change in changes.items() if targets[name].kind == kind]
    return max([least, *[whole.shape[0] for whole in wholes if whole is not None]])


def _sort(file: SafetensorsFile, targets: Mapping[str, LoRATarget]) -> dict[str, _Found]:
    """Return the file's tensors by the target that they belong to."""
    if not file.entries:
        raise ModelError(f"{file.path}: holds no tensors (expected those of an adapter)")
    modules: dict[str, _Found] = {}
    for name in file.entries:
        where = f"{file.path}: tensor {echo(name)}"
        role, module = next(
            ((role, name[: found.start()]) for tail, role in TAILS if (found := tail.search(name))), ("", name)
        )
        if "lora_magnitude_vector" in name:
            raise ModelError(f"{where} belongs to DoRA, which is not supported")
        if not role:
            raise ModelError(f"{where} is no part of an adapter that is supported (expected lora_A, lora_B, ...)")
        target = _find(module.removeprefix(PREFIX), targets)
        if target is None:
            reason = "experts cannot be changed by adapters" if ".experts." in name else NO_LAYER
            raise ModelError(f"{where}: {reason} (expected one of {_last_names(targets)})")
        tensors = modules.setdefault(target.name, _Found(target)).tensors
        if role in tensors:
            raise ModelError(f"{where}: the same as {echo(tensors[role][0])} (expected it once)")
        tensors[role] = name, file.read(name)
    return modules


def _find(module: str, targets: Mapping[str, LoRATarget]) -> LoRATarget | None:
    """Return the target of this name; files of some models lack the outermost part of names.

    Of models that take images too, the language model is adapted: "language_model" is inside their names.
    """
    names = (module, module.partition(".")[2], module.replace("language_model.", "", 1))
    return next((targets[name] for name in names if name in targets), None)


def _check_targets(
    config: PeftConfig, modules: Mapping[str, _Found], targets: Mapping[str, LoRATarget], path: Path
) -> None:
    """Check that there are tensors for all modules that the config names, and for no others."""
    selected = [name for name in targets if config.selects(name)]
    if config.targets is not None and not selected and not config.saved:
        shown = config.targets.text if isinstance(config.targets, Pattern) else list(config.targets)
        raise ModelError(
            f"{config.path}: target_modules is {echo(shown)}, of which this model has none (expected some of "
            f"{_last_names(targets)})"
        )
    for name in selected:
        if name not in modules:
            raise ModelError(f"{path}: no tensors for {name} (expected by target_modules of {CONFIG_FILE})")
    if isinstance(config.targets, tuple):
        for item in config.targets:
            if not any(name == item or name.endswith(f".{item}") for name in targets):
                raise ModelError(
                    f"{config.path}: target_modules has {echo(item)}, which this model has not (expected some of "
                    f"{_last_names(targets)})"
                )
    for name, found in modules.items():
        if "whole" not in found.tensors and config.selects(name) is False:
            raise ModelError(f"{path}: tensors for {name}, which target_modules of {CONFIG_FILE} does not name")


def _last_names(targets: Mapping[str, LoRATarget]) -> str:
    """Return the last parts of the targets' names, for an error."""
    return listed(dict.fromkeys(name.rpartition(".")[2] for name in targets), MAX_NAMED)


class _Reader:
    """Makes changes of tensors; `max_rows` are those that a table may have."""

    def __init__(self, config: PeftConfig, path: Path, max_rows: int) -> None:
        self._config, self._path, self._max_rows = config, path, max_rows

    def change(self, found: _Found) -> LoRAChange:
        """Return what the tensors of one module do to it."""
        target, tensors = found.target, dict(found.tensors)
        whole = tensors.pop("whole", None)
        table = None if whole is None else self._whole(target, *whole)
        rows = target.outputs if table is None else table.shape[0]
        names = ("embedding_a", "embedding_b") if target.kind == "embedding" else ("a", "b")
        if not tensors:
            return LoRAChange(whole=table)
        for role in tensors:
            if role not in names:
                raise ModelError(f"{self._where(tensors[role][0])}: {target.name} is {_KINDS[target.kind]}")
        for role, other in (names, names[::-1]):
            if role not in tensors:
                raise ModelError(f"{self._where(tensors[other][0])} has no counterpart (expected A and B)")
        rank = self._config.rank_of(target.name)
        inputs, outputs = (rows, target.inputs) if target.kind == "embedding" else (target.inputs, rows)
        a = self._read(*tensors[names[0]], (rank, inputs))
        b = self._read(*tensors[names[1]], (outputs, rank))
        with np.errstate(over="ignore", invalid="ignore"):
            b = b * np.float32(self._config.scale_of(target.name, rank))
        if not np.isfinite(b).all():
            raise ModelError(f"{self._config.path}: with this lora_alpha, {target.name} is too large for float32")
        return LoRAChange(a, b, table)

    def _whole(self, target: LoRATarget, name: str, tensor: HostTensor) -> np.ndarray:
        if target.kind == "linear":
            raise ModelError(
                f"{self._where(name)}: {target.name} is held whole (expected only embeddings and the output head)"
            )
        rows = tensor.shape[0] if tensor.array.ndim == 2 else 0
        if rows > self._max_rows:
            raise ModelError(
                f"{self._where(name)} has {rows} rows, {rows - target.outputs} more than the model (expected at most "
                f"{self._max_rows - target.outputs} more, --lora-extra-vocab-size)"
            )
        return self._read(name, tensor, (max(rows, target.outputs), target.inputs))

    def _read(self, name: str, tensor: HostTensor, shape: tuple[int, int]) -> np.ndarray:
        if tensor.dtype not in FLOATS:
            raise ModelError(f"{self._where(name)} has dtype {tensor.dtype} (expected one of {', '.join(FLOATS)})")
        if tensor.shape != shape:
            raise ModelError(f"{self._where(name)} has shape {list(tensor.shape)} (expected {list(shape)})")
        bad = count_nonfinite(tensor)
        if bad:
            raise ModelError(f"{self._where(name)} has {bad} values that are NaN or infinite (expected none)")
        values = tensor.to_float32()
        if tensor.dtype == "float64" and not np.isfinite(values).all():
            raise ModelError(f"{self._where(name)} has values too large for float32")
        return values

    def _where(self, name: str) -> str:
        return f"{self._path}: tensor {echo(name)}"


_KINDS = {
    "linear": "a linear layer (expected lora_A and lora_B)",
    "head": "a linear layer (expected lora_A and lora_B)",
    "embedding": "an embedding (expected lora_embedding_A and lora_embedding_B)",
}
