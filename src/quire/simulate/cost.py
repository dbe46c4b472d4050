"""Cost models predict how many seconds a step takes, from its contents.

`FittedCost` is fitted to measurements of a machine. It is linear in features of a step, except in the number of tokens,
where it interpolates linearly between measured numbers, so the bend of the roofline (Williams et al. 2009), from memory
bandwidth to arithmetic, is in the measurements. `RooflineCost` computes that bend from the rates of a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.meta import Work
from quire.simulate.contents import StepContents
from quire.simulate.trace import parse_values
from quire.step import DTYPE_BYTES
from quire.worker.footprint import Footprint, StepWork

FORMAT = "quire-cost-model-1"

# What a step costs beside its tokens; the names are those of the fields of `StepContents`.
DEVICE_FEATURES = (
    "num_sequences",
    "num_sampled",
    "prefill_pairs",
    "decode_context",
    "num_new",
    "num_new_known_tokens",
    "is_new_shape",
)
HOST_FEATURES = ("num_sequences", "num_new", "num_new_known_tokens", "num_tokens")


class CostModel(Protocol):
    """Predicts how long a step takes."""

    @property
    def num_shapes(self) -> int:
        """Number of shapes of step that the worker keeps, see `StepReader`."""

    def seconds(self, contents: StepContents) -> float:
        """Return the seconds from the start of planning a step to the end of processing its results."""


def token_weights(num_tokens: int, knots: Sequence[int]) -> list[float]:
    """Return how much the time of each of `knots` counts for a step of `num_tokens` tokens.

    Between two knots both count, the nearer more; beyond the last one its time grows in proportion.
    """
    weights = [0.0] * len(knots)
    place = bisect_left(knots, num_tokens)
    if place == len(knots):
        weights[-1] = num_tokens / knots[-1]
    elif place == 0 or knots[place] == num_tokens:
        weights[place] = 1.0
    else:
        low, high = knots[place - 1], knots[place]
        share = (num_tokens - low) / (high - low)
        weights[place - 1], weights[place] = 1.0 - share, share
    return weights


NonNegative = Annotated[float, Meta(ge=0)]


class FittedCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="format", tag=FORMAT):
    """Seconds as measured on one machine with one model.

    Attributes:
        model, machine: what was measured, in words. dtype, kv_dtype: of that run.
        knots: numbers of tokens, rising; knot_seconds: time of a step with so many, apart from what follows.
        device: seconds per unit of each of `DEVICE_FEATURES`. host: the same for `HOST_FEATURES`, and host_base per
            step: planning it and processing its results, without the model.
        num_shapes: see `CostModel`. memory: bytes of the KV cache of that engine.
        moved_block, disk_block: seconds per block moved between device and host, and to or from disk.
        error: median relative error of the fit.
    """

    model: str
    machine: str
    dtype: str
    kv_dtype: str
    knots: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]
    knot_seconds: tuple[NonNegative, ...]
    device: tuple[NonNegative, ...]
    host_base: NonNegative
    host: tuple[NonNegative, ...]
    num_shapes: Annotated[int, Meta(ge=0)] = 0
    memory: Annotated[int, Meta(ge=1)] = 1
    moved_block: NonNegative = 0.0
    disk_block: NonNegative = 0.0
    error: NonNegative = 0.0

    def device_seconds(self, contents: StepContents) -> float:
        """Return the seconds of `Executor.execute`."""
        if contents.num_tokens == 0:
            return 0.0
        weights = token_weights(contents.num_tokens, self.knots)
        total = sum(weight * value for weight, value in zip(weights, self.knot_seconds, strict=True) if weight)
        return total + sum(
            rate * getattr(contents, name) for name, rate in zip(DEVICE_FEATURES, self.device, strict=True)
        )

    def host_seconds(self, contents: StepContents) -> float:
        """Return the seconds of the scheduler."""
        return self.host_base + sum(
            rate * getattr(contents, name) for name, rate in zip(HOST_FEATURES, self.host, strict=True)
        )

    def seconds(self, contents: StepContents) -> float:
        """Return both."""
        moved = (contents.num_moved_blocks + contents.streamed + contents.exchanged) * self.moved_block
        moved += contents.num_disk_blocks * self.disk_block
        return self.device_seconds(contents) + self.host_seconds(contents) + moved


def load_cost(path: Path) -> FittedCost:
    """Read a model from JSON, as `msgspec.to_builtins` makes it. Raises `ConfigError` naming the file and the field."""
    try:
        model = msgspec.json.decode(path.expanduser().read_bytes(), type=FittedCost)
    except OSError as error:
        raise ConfigError(f"cost_model: cannot read {str(path)!r}: {error}", param="cost_model") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"cost_model: {str(path)!r} is no cost model of this version: {error}", param="cost_model"
        ) from None
    lengths = {"knot_seconds": len(model.knots), "device": len(DEVICE_FEATURES), "host": len(HOST_FEATURES)}
    for name, length in lengths.items():
        if len(getattr(model, name)) != length:
            raise ConfigError(f"cost_model: {path}: {name} must have {length} times", param="cost_model")
    if list(model.knots) != sorted(set(model.knots)) or not any(model.knot_seconds):
        raise ConfigError(f"cost_model: {path}: knots must rise and cost something", param="cost_model")
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Seconds as a device of known rates would need at best: what is read over bandwidth, or arithmetic over its rate.

    Weights are read once a step, of experts those that its tokens are expected to choose; cached keys and values once
    for every sequence that decodes; and states are read and written once for every sequence.

    Attributes:
        bandwidth: bytes/s. flops: 1/s. overhead: seconds added to every step. host: seconds per sequence of a step.
        link, disk: bytes/s between device and host, and to disk.
        work: bytes and operations for each token and each sampled token, and of attention for each pair.
        token_kv_bytes: of one token's keys and values in all layers. block_bytes: of one KV block.
        state_bytes: of one sequence, in layers that keep a state.
        num_layers, num_resident: attention layers, and those of them that are on the device in every block.
    """

    bandwidth: float
    flops: float
    overhead: float
    host: float
    link: float
    disk: float
    work: StepWork
    token_kv_bytes: float
    block_bytes: float
    state_bytes: float = 0.0
    num_layers: int = 1
    num_resident: int = 1
    num_shapes: int = 0

    def seconds(self, contents: StepContents) -> float:
        """Return the larger of reading and computing, plus what does not overlap."""
        moved = (contents.num_moved_blocks + contents.exchanged) * self.block_bytes / self.link
        moved += contents.num_disk_blocks * self.block_bytes / self.disk
        if contents.num_tokens == 0:
            return moved
        token, sample, pair_flops = self.work.token, self.work.sample, self.work.pair_flops
        tokens, sampled, decode = contents.num_tokens, contents.num_sampled, contents.decode_context
        linear = max(
            (token.read(tokens) + sample.read(sampled)) / self.bandwidth,
            (tokens * token.flops + sampled * sample.flops) / self.flops,
        )
        attention = contents.prefill_pairs * pair_flops / self.flops
        attention += max(decode * self.token_kv_bytes / self.bandwidth, decode * pair_flops / self.flops)
        states = 2 * contents.num_sequences * self.state_bytes / self.bandwidth
        device = self._beside_streaming(linear + attention + states, contents.streamed)
        return device + self.overhead + self.host * contents.num_sequences + moved

    def _beside_streaming(self, computing: float, streamed: float) -> float:
        """Return the seconds of a step's layers, all alike, if keys and values of those not resident are streamed.

        Each waits for its own. Two of them come while the resident layers compute; the next one each time that one of
        these is done. What goes to the host shares its place with what comes, and so is counted as if it came, too.
        """
        if not streamed:
            return computing
        seconds = streamed * self.block_bytes / self.link
        ahead = computing * self.num_resident / self.num_layers
        first = 2 * seconds / (self.num_layers - self.num_resident)
        return max(computing, seconds + max(0.0, ahead - first))


ROOFLINE = "roofline:"
Positive = Annotated[float, Meta(gt=0)]


class _Roofline(msgspec.Struct, forbid_unknown_fields=True):
    """The names in "roofline:...", in the units that `parse_roofline` tells."""

    bandwidth: Positive
    gflops: Positive
    memory: Positive
    overhead: NonNegative = 0.0
    host: NonNegative = 2.0
    link: Positive = 25.0
    disk: Positive = 2.0
    params: NonNegative = 0.0


def parse_roofline(text: str, config: EngineConfig, info: ModelInfo) -> tuple[RooflineCost, int]:
    """Read "roofline:bandwidth=100,gflops=2000,memory=16"; return the model and the bytes left for the KV cache.

    bandwidth, link and disk in GB/s, gflops in GFLOP/s, memory in GiB, overhead (per step) and host (per sequence of a
    step) in us. `link` is between device and host. With `params`, in billions, the weights are those of a dense model
    of that size instead.

    Args:
        config: resolved.

    Raises:
        ConfigError: names what is missing or wrong, or the weights do not fit the memory.
    """
    rates = parse_values(text.removeprefix(ROOFLINE), _Roofline, "cost_model")
    footprint = Footprint(config, info)
    spec = footprint.spec
    params = int(rates.params * 1e9)
    weights = params * DTYPE_BYTES[config.model.dtype] or footprint.weights
    states = config.scheduler.max_num_seqs * spec.state_bytes
    left = int(rates.memory * 2**30) - weights - states
    if left <= 0:
        beside = f" and the states of sequences {states / 2**30:.2f}" if states else ""
        raise ConfigError(
            f"cost_model: the weights take {weights / 2**30:.2f} GiB{beside}, memory is {rates.memory:g}",
            param="cost_model",
        )
    work = footprint.work(config.cache.block_size)
    if params:
        head = info.vocab_size * info.hidden_size
        token, sample = Work(weights, 2.0 * max(params - head, 0)), Work(0, 2.0 * head)
        work = StepWork(token, sample, work.pair_flops)
    num_layers = max(1, len(spec.layers))
    cost = RooflineCost(
        bandwidth=rates.bandwidth * 1e9,
        flops=rates.gflops * 1e9,
        overhead=rates.overhead * 1e-6,
        host=rates.host * 1e-6,
        link=rates.link * 1e9,
        disk=rates.disk * 1e9,
        work=work,
        token_kv_bytes=sum(layer.block_bytes(1) for layer in spec.layers),
        block_bytes=spec.block_bytes(config.cache.block_size, config.max_model_len),
        state_bytes=spec.state_bytes,
        num_layers=num_layers,
        num_resident=config.cache.kv_resident_layers or num_layers,
    )
    return cost, left
