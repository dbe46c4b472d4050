"""The engine loop over an executor without a model: requests end, aborts free blocks, operations answer."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.loop import run as run_loop
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest, ResumedSequence
from quire.errors import ConfigError, EngineDeadError
from quire.executor.base import Executor
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.step import KVCacheSpec, LayerStateSpec, PendingOutput, SchedulerOutput, StoredBlocks, Tier, TransferOp
from tests.helpers.loop_clients import ScriptedClients


def make_core(folder: Path, *, executor: Executor | None = None, **options: object) -> EngineCore:
    config = EngineConfig.from_kwargs(model=str(folder), **options)
    return EngineCore(config, executor=executor or NullExecutor(1000), info=load_model_info(folder))


def request(request_id: str, prompt: list[int], max_tokens: int = 5, stop_ids: tuple[int, ...] = ()) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id, prompt, params, max_tokens=max_tokens, stop_ids=list(stop_ids))


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, str]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            tokens.setdefault(output.sequence_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                ends[output.sequence_id] = output.finish_reason
    return tokens, ends


def test_requests_run_to_their_end_together(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=64)
    core.add(request("a", [1, 2, 3]))
    core.add(request("b", [10] * 40, max_tokens=3))
    core.add(request("c", [7], max_tokens=50, stop_ids=(10,)))
    tokens, ends = run(core)
    assert tokens == {"a": [4, 5, 6, 7, 8], "b": [11, 12, 13], "c": [8, 9, 10]}
    assert ends == {"a": "length", "b": "length", "c": "stop"}
    assert core.call("stats")["num_free_blocks"] == 64
    assert core.call("check_integrity") == {"ok": True}


def test_a_step_with_nothing_to_do_is_a_no_op(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=8)
    assert core.step().outputs == []
    assert not core.has_unfinished()


def test_abort_frees_blocks_at_once(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=16)
    core.add(request("a", [1] * 100, max_tokens=50))
    core.step()
    assert core.call("stats")["num_free_blocks"] == 9
    core.abort(AbortRequests(request_ids=["a", "unknown"]))
    assert core.call("stats")["num_free_blocks"] == 16
    assert run(core) == ({}, {})
    core.call("check_integrity")


@pytest.mark.parametrize("step_before_abort", [False, True])
def test_idle_time_is_no_step_time(folder: Path, step_before_abort: bool) -> None:
    now = [0.0]
    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=16)
    core = EngineCore(config, executor=NullExecutor(1000), info=load_model_info(folder), clock=lambda: now[0])
    core.add(request("a", [1], max_tokens=50))
    for now[0] in (1.0, 2.0):
        core.step()
    assert core.call("stats")["step_seconds"] == 1.0
    core.abort(AbortRequests(request_ids=["a"]))
    if step_before_abort:
        core.step()
    for now[0] in (1000.0, 1002.0):
        core.add(request(f"b{now[0]}", [1], max_tokens=9))
        core.step()
    assert core.call("stats")["step_seconds"] == 3.0


def test_the_context_is_limited_to_what_the_cache_holds(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=8)
    assert core.ready.max_model_len == 8 * 16


def test_a_context_that_does_not_fit_is_refused_with_the_numbers_and_a_way_out(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"512 tokens do not fit .* hold \d+ tokens; .* --max-model-len"):
        make_core(folder, max_model_len=512, kv_cache_memory_bytes=4096)


def test_a_context_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 600 exceeds the model's 512"):
        make_core(folder, max_model_len=600)


@pytest.mark.parametrize("option", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_a_cache_larger_than_the_free_memory_is_refused_with_both_numbers(folder: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}: the KV cache would take [\d.]+ TiB, 1 GiB are free"):
        make_core(folder, **{option: 2**40})


def test_a_cache_that_the_system_refuses_is_an_option_to_change_not_a_crash(folder: Path) -> None:
    class Full(NullExecutor):
        def allocate(
            self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
        ) -> None:
            raise MemoryError

    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes: 64 blocks, 65536 bytes, could not be allocated"):
        EngineCore(config, executor=Full(), info=load_model_info(folder))


def test_an_unknown_operation_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine operation"):
        make_core(folder, num_gpu_blocks_override=8).call("explode")


def test_reset_prefix_cache_forgets(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=64)
    for number in range(2):
        core.add(request(f"r{number}", list(range(64))))
        run(core)
    hits = core.call("stats")["prefix_cache_hits"]
    assert hits == 63  # all but the last token, which there must be something to compute
    core.call("reset_prefix_cache")
    core.add(request("again", list(range(64))))
    run(core)
    assert core.call("stats")["prefix_cache_hits"] == hits


def test_a_message_the_scheduler_refuses_gets_an_error_and_does_not_end_the_loop(folder: Path) -> None:
    core = make_core(folder, num_gpu_blocks_override=8)
    clients = ScriptedClients([[(0, request("empty", [])), (0, request("fine", [1], max_tokens=2))]])
    run_loop(core, clients)
    ends = {output.sequence_id: output.finish_reason for output in clients.outputs(0)}
    assert ends == {"empty": "error", "fine": "length"}


def test_a_request_with_a_seed_too_few_is_refused_alone(folder: Path) -> None:
    core = make_core(folder)
    bad = msgspec.structs.replace(request("bad", [1, 2]), sequence_ids=["a", "b"], seeds=[1])
    fewer = [ResumedSequence([5])]
    resumed = msgspec.structs.replace(request("more", [1, 2]), sequence_ids=["c", "d"], seeds=[1, 2], resumed=fewer)
    clients = ScriptedClients([[(0, bad), (0, resumed), (0, request("fine", [1], max_tokens=2))]])
    run_loop(core, clients)
    last = {output.sequence_id: output for output in clients.outputs(0)}
    ends = {name: output.finish_reason for name, output in last.items()}
    assert ends == {**dict.fromkeys(("a", "b", "c", "d"), "error"), "fine": "length"}
    error = last["b"].error
    assert error is not None and error.refused and error.param == "seeds"


def test_drafts_change_no_token_and_save_steps(folder: Path) -> None:
    outputs = []
    for guess in (None, [1, 2, 3], [1, 2, 9]):  # what is added to the last token; the next one is its successor
        core = make_core(folder, num_gpu_blocks_override=64)
        core.add(request("a", [1, 2, 3], max_tokens=12))
        tokens: list[int] = []
        num_steps = 0
        while core.has_unfinished():
            if tokens and guess is not None:
                core.scheduler.propose("a", [tokens[-1] + number for number in guess])
            for output in core.step().outputs:
                tokens += output.new_token_ids
            num_steps += bool(core.has_unfinished())
        assert core.call("check_integrity") == {"ok": True}
        outputs.append((tokens, num_steps))
    assert [tokens for tokens, _ in outputs] == [list(range(4, 16))] * 3
    assert [num_steps for _, num_steps in outputs] == [12, 4, 5]


def test_models_with_recurrent_states_take_no_drafts(folder: Path) -> None:
    class Recurrent(NullExecutor):
        def kv_cache_spec(self) -> KVCacheSpec:
            return KVCacheSpec(super().kv_cache_spec().layers, states=[LayerStateSpec(((2, 2),))])

    core = make_core(folder, executor=Recurrent(), num_gpu_blocks_override=64, enable_prefix_caching=False)
    core.add(request("a", [1, 2, 3], max_tokens=4))
    core.step()
    assert core.scheduler.propose("a", [5, 6]) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_failed_step_should_have_computed_is_not_written_to_disk(folder: Path, fails: bool) -> None:
    class Disk(NullExecutor):
        stored = 0

        def stored_blocks(self) -> StoredBlocks:
            return StoredBlocks(num_slots=64)

        def submit(self, plan: SchedulerOutput) -> PendingOutput:
            if fails and plan.num_scheduled_tokens:
                raise RuntimeError("lost")
            self.stored += plan.num_transfers(TransferOp.STORE, Tier.DISK)
            return super().submit(plan)

    executor = Disk()
    core = make_core(folder, executor=executor, num_gpu_blocks_override=64, block_size=16)
    core.add(request("a", list(range(1, 40)), max_tokens=40))
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        core.step()
    if fails:
        with pytest.raises(EngineDeadError, match="a step has failed"):
            core.step()
    core.close()
    assert executor.stored == (0 if fails else 2)
