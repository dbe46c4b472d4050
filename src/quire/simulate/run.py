"""`simulate` replays a trace under a config and a cost model; the result is a `RunLog`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.layerwise import layer_split
from quire.engine.messages import Ready
from quire.engine.resolve import resolve_config
from quire.kvcache.block_hash import DIGEST_BYTES, BlockHasher
from quire.simulate.cost import ROOFLINE, CostModel, load_cost, parse_roofline
from quire.simulate.driver import RunLog, VirtualClock, drive
from quire.simulate.executor import Observer, SimulatedExecutor
from quire.simulate.trace import TraceRequest
from quire.simulate.waste import WasteMeter
from quire.worker.disk_store import StoreGeometry, header_nbytes
from quire.worker.footprint import Footprint

logger = logging.getLogger(__name__)

UNLIMITED = 2**62  # bytes


class RunHasher(BlockHasher):
    """Hashes blocks by Python's hash of their tokens: deterministic, and several times as fast as BLAKE2b.

    A simulation has no attackers. Of a few million hashes of 64 bits, padded to the engine's length, two are equal with
    a probability of less than one in a million.
    """

    __slots__ = ()

    def extend(self, parent: bytes, token_ids: list[int]) -> bytes:
        """Return the hash of the block after `parent`."""
        # Hashes of bytes are salted by the process, hashes of integers are not.
        number = hash((int.from_bytes(parent, "little"), *token_ids))
        return number.to_bytes(DIGEST_BYTES, "little", signed=True)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A replay, its executor, and the sizes of the engine."""

    log: RunLog
    executor: SimulatedExecutor
    ready: Ready


def long_enough(info: ModelInfo, config: EngineConfig, requests: Sequence[TraceRequest]) -> ModelInfo:
    """Return `info` with a context long enough for `requests`.

    A simulation has no positions that a model was not trained on: unless `max_model_len` is given, the context is as
    long as the model's or the longest request, whichever is longer.
    """
    longest = max(request.num_tokens for request in requests)
    context = config.model.max_model_len or max(info.max_model_len, longest)
    return dataclasses.replace(info, max_model_len=context, longest_model_len=max(info.longest_model_len, context))


def make_cost(spec: str, config: EngineConfig, info: ModelInfo) -> tuple[CostModel, int]:
    """Return the cost model that `spec` (a file, or "roofline:...") means, and the bytes for the KV cache.

    Raises:
        ConfigError: the file or the text is wrong.
    """
    resolved = resolve_config(config, info)
    if spec.startswith(ROOFLINE):
        return parse_roofline(spec, resolved, info)
    cost = load_cost(Path(spec))
    dtypes = {"dtype": (cost.dtype, resolved.model.dtype)}
    dtypes["kv_cache_dtype"] = (cost.kv_dtype, resolved.cache.kv_cache_dtype)
    for name, (measured, simulated) in dtypes.items():
        if measured != simulated:
            logger.warning("the cost model was measured with %s %s, not %s", name, measured, simulated)
    return cost, cost.memory


def simulate(
    config: EngineConfig,
    info: ModelInfo,
    requests: Sequence[TraceRequest],
    cost: CostModel,
    memory: int,
    observer: Observer | WasteMeter | None = None,
) -> SimulatedRun:
    """Replay `requests` against the production scheduler in virtual time.

    Args:
        info: of the model, see `long_enough`. memory: bytes for the KV cache, unless the options say how many.
        observer: called for every step that has tokens.
    """
    clock = VirtualClock()
    cache = config.cache
    if cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None:
        memory = UNLIMITED
    resolved = resolve_config(config, info)
    spec = Footprint(resolved, info).spec
    split = layer_split(resolved, spec)
    block_bytes = spec.block_bytes(cache.block_size, info.max_model_len)
    geometry = StoreGeometry("", block_bytes, cache.block_size, header_nbytes(cache.block_size))
    num_disk_slots = geometry.num_slots(cache.kv_disk_space) if cache.kv_disk_space else 0
    executor = SimulatedExecutor(
        spec,
        cost,
        clock,
        memory,
        observer,
        num_disk_slots,
        block_size=cache.block_size,
        streamed_share=0.0 if split is None else 1.0 - split.num_resident_layers / split.num_layers,
    )
    core = EngineCore(config, executor=executor, info=info, clock=clock, hasher=RunHasher(b""))
    if isinstance(observer, WasteMeter):
        observer.begin(core.ready)
    return SimulatedRun(drive(core, requests, clock), executor, core.ready)
