"""Builds a model from its folder: first a dry run over names and shapes, so that a bad folder fails before memory is
allocated, then with the weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, cast

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.open import is_packed, open_weights
from quire.checkpoint.packed import PACKED_FILE, PackedFile
from quire.checkpoint.weights import CheckpointWeights, DryRunWeights, DummyWeights, MetaWeights
from quire.errors import ConfigError, ModelError, echo
from quire.kernels.backend import Backend
from quire.kernels.meta import MetaBackend
from quire.layers.builder import Builder
from quire.layers.lora import LoRASlots
from quire.models.interface import Model
from quire.models.registry import build_model

logger = logging.getLogger(__name__)

GIB = 2**30
MB = 10**6
BAR_AFTER = 1.0  # seconds
LINE_EVERY = 5.0


def load_model(
    info: ModelInfo,
    backend: Backend,
    *,
    max_model_len: int | None = None,
    load_format: str = "auto",
    strategy: str = "lazy",
    allow_nonfinite: bool = False,
    seed: int = 0,
    lora: LoRASlots | None = None,
    latent_cache: bool = True,
    layers: range | None = None,
) -> Model:
    """Build the model of `info` on `backend`, with this rank's share of its weights.

    Args:
        info: from `load_model_info`.
        max_model_len: longest sequence it must serve; `info.max_model_len` if None.
        load_format, strategy: as in `open_weights`; "dummy" makes random weights from `seed`.
        allow_nonfinite: load weights that hold NaN or infinity, with a warning.
        lora: slots in which layers register, so that adapters can change them.
        latent_cache, layers: see `Builder`. Of a pipeline stage only its own layers' tensors are read.

    Raises:
        ModelError: weights are missing, malformed, not finite, or larger than the free memory.
        ConfigError: max_model_len or the number of ranks does not suit the model.
    """
    length = info.max_model_len if max_model_len is None else max_model_len
    if length > info.longest_model_len:
        raise ConfigError(
            f"max_model_len is {length}; this model can serve at most {info.longest_model_len}", param="max_model_len"
        )
    builder = partial(Builder, backend=backend, lora=lora, latent_cache=latent_cache, layers=layers)
    if load_format == "dummy":
        return build_model(info, builder(DummyWeights(seed)), length)
    if load_format == "auto" and is_packed(info):
        return _load_packed(info, builder(MetaWeights()), length)
    checkpoint = open_weights(info, load_format, strategy)
    dry_run = DryRunWeights(checkpoint)
    counter, sizes = _byte_counter(backend.dtype, backend.quantization)
    counter.rank, counter.world_size = backend.rank, backend.world_size
    model = build_model(info, Builder(dry_run, counter, latent_cache=latent_cache, layers=layers), 1)
    tied = (r"^lm_head\.weight$",) if info.tie_word_embeddings else ()
    others = (r"",) if layers is not None else ()  # tensors of other stages
    dry_run.check(model.ignored_weights + tied + _mtp_layers(info) + others)
    free = backend.available_memory()
    if sum(sizes) > free:  # before the system starts to swap or kill
        raise ModelError(
            f"{info.path}: weights need {sum(sizes) / GIB:.1f} GiB in {backend.quantization or backend.dtype}, "
            f"{free / GIB:.1f} GiB are available"
        )
    with LoadProgress(info.path.name, dry_run.num_bytes) as progress:
        weights = CheckpointWeights(checkpoint, allow_nonfinite=allow_nonfinite, on_read=progress.add)
        return build_model(info, builder(weights), length)


def config_digest(info: ModelInfo) -> str:
    """Return a digest of config.json."""
    text = json.dumps(dict(info.raw), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _load_packed(info: ModelInfo, builder: Builder, length: int) -> Model:
    """Build a model from packed weights. Raises ModelError if they are for another backend, or of another model."""
    from quire.kernels.cpu.packed_weights import packing_traits, replaying_weights  # imports the CPU's kernels

    path = info.path / PACKED_FILE
    file, mine = PackedFile(path), {**packing_traits(builder.backend), "config": config_digest(info)}
    again = f"quire convert {file.header.get('source', 'MODEL')} {info.path} --format packed --force"
    for name, value in mine.items():
        if file.header.get(name) != value:
            found = f"{name} {echo(file.header.get(name))}, and this is {echo(value)}"
            raise ModelError(f"{path}: was packed for {found}; convert again: {again}")
    if builder.lora is not None or builder.layers is not None or builder.backend.world_size > 1:
        raise ModelError(f"{path}: packed weights take no LoRA adapters, and are not split over ranks or stages")
    names = file.header.get("names")
    weights = MetaWeights(frozenset(names) if isinstance(names, list) else frozenset())
    with replaying_weights(builder.backend, file.records, f"{path}"):
        return build_model(info, replace(builder, weights=weights), length)


def weight_bytes(info: ModelInfo, dtype: str, quantization: str | None) -> int:
    """Return the memory that the weights of `info` take on a backend with this dtype and quantization [bytes]."""
    counter, sizes = _byte_counter(dtype, quantization)
    build_model(info, Builder(DryRunWeights(open_weights(info)), counter), 1)
    return sum(sizes)


def _byte_counter(dtype: str, quantization: str | None) -> tuple[Backend, list[int]]:
    """Return a backend that packs nothing, and a list to which it appends the bytes of each weight."""
    sizes: list[int] = []
    counter = MetaBackend(dtype, dtype, quantization, 1, None, lambda kind, nbytes, total: sizes.append(nbytes))
    return cast(Backend, counter), sizes


def _mtp_layers(info: ModelInfo) -> tuple[str, ...]:
    """Return patterns of the layers for multi-token prediction that follow the last, which are not used."""
    first = info.num_hidden_layers
    number = info.fields.integer("num_nextn_predict_layers", 0, high=64)
    return tuple(rf"\.layers\.{layer}\." for layer in range(first, first + number))


class LoadProgress:
    """Shows how many bytes of weights were read: a bar on a terminal, lines in the log elsewhere.

    Short loads show nothing. It is a context manager, whose end removes the bar.

    Args:
        name: of the model, as it is shown. total: bytes there are. clock: seconds, for tests.
    """

    def __init__(self, name: str, total: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._started = self._line_at = clock()
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def add(self, num_bytes: int) -> None:
        """Count bytes that are about to be read."""
        self._done += num_bytes
        now = self._clock()
        if sys.stderr.isatty():
            if self._bar is None and now - self._started >= BAR_AFTER:
                self._start_bar()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=min(self._done, self._total))
        elif now - self._line_at >= LINE_EVERY:
            self._line_at = now
            logger.info(
                "loading %s: %d of %d MB (%d %%) after %.0f s",
                self._name,
                self._done // MB,
                self._total // MB,
                100 * self._done // max(1, self._total),
                now - self._started,
            )

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._bar.add_task(self._name, total=self._total)
        self._bar.start()
