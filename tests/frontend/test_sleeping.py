"""Sleep and wake: memory goes back to the system, outputs are the same afterwards, and nobody is lost in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.errors import ConfigError, EngineAsleepError, EngineDeadError, QuireError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.kernels.memory import release_memory, resident_memory
from tests.helpers.fake_engine import fake_async_llm

MIB = 2**20
PROMPTS = ["Once upon a time there was a dog called", "def main():", "Roses are red, and"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2)


def core_of(llm: LLM) -> EngineCore:
    return llm.llm_engine.core


def answers(llm: LLM) -> list[object]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].logprobs)
        for params in (GREEDY, SAMPLED)
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


def write_all_blocks(llm: LLM) -> None:
    """Have the system give memory for the whole KV cache; the text of what is cached no longer matters."""
    for cache in core_of(llm).executor.worker.runner.kv_caches:  # type: ignore[attr-defined]
        cache.keys.fill(1)
        cache.values.fill(1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine that every test leaves awake."""
    with LLM(num_gpu_blocks_override=256) as made:
        yield made


def test_outputs_after_waking_are_those_before(llm: LLM) -> None:
    before = answers(llm)
    for level in (1, 2):
        steps = core_of(llm).call("stats")["num_steps"]
        llm.sleep(level)
        assert llm.is_sleeping
        llm.wake_up()
        assert not llm.is_sleeping
        assert core_of(llm).call("stats")["num_steps"] == steps, "counters only grow"
        first = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
        assert first.num_cached_tokens == 0, "the prefix cache is empty"
        assert answers(llm) == before
        core_of(llm).call("check_integrity")


@pytest.mark.slow
def test_memory_goes_back_to_the_system() -> None:
    """The KV cache's, every block of which was written, at both levels; at level 2 the weights' as well."""
    with LLM(kv_cache_memory_bytes=96 * MIB, swap_space=0) as llm:
        weights = sum(path.stat().st_size for path in llm._front.info.path.glob("*.safetensors"))
        freed = []
        for level in (1, 2):
            write_all_blocks(llm)
            release_memory()
            before = resident_memory()
            llm.sleep(level)
            freed.append(before - resident_memory())
            llm.wake_up()
        assert all(size > 90 * MIB for size in freed)
        assert freed[1] - freed[0] > weights // 2


def test_deeper_sleep_while_asleep(llm: LLM) -> None:
    before = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].text
    llm.wake_up()  # awake: no effect
    llm.sleep(1)
    llm.sleep(2)
    llm.sleep(1)  # no way up but waking
    assert core_of(llm).sleep_level == 2
    llm.wake_up()
    assert llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].text == before


def test_offline_requests_are_refused_while_asleep(llm: LLM) -> None:
    llm.sleep()
    with pytest.raises(EngineAsleepError, match=r"wake_up\(\)"):
        llm.generate("x", use_tqdm=False)
    with pytest.raises(RequestError, match="level"):
        llm.sleep(3)
    llm.wake_up()
    assert llm.generate("x", GREEDY, use_tqdm=False)[0].finished


def test_an_engine_that_finds_no_memory_goes_on_sleeping(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].text
    llm.sleep()
    with monkeypatch.context() as patch:
        patch.setattr(core_of(llm).executor, "available_memory", lambda: 1000)
        with pytest.raises(ConfigError, match="1000 bytes are free"):
            llm.wake_up()
    with monkeypatch.context() as patch:

        def full(*arguments: int) -> None:
            raise MemoryError

        patch.setattr(core_of(llm).executor, "allocate", full)
        with pytest.raises(ConfigError, match="could not be allocated"):
            llm.wake_up()
    assert llm.is_sleeping
    llm.wake_up()
    assert llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0].outputs[0].text == before


def test_what_is_on_disk_is_found_again_and_closing_asleep_is_the_end(tmp_path: Path) -> None:
    prompt = list(range(100, 200))
    with LLM(num_gpu_blocks_override=64, kv_disk_space=2**24, kv_disk_dir=str(tmp_path), swap_space=0) as llm:
        llm.generate([prompt], GREEDY, use_tqdm=False)
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens > 64
        llm.sleep()
    with pytest.raises(EngineDeadError):
        llm.wake_up()


def test_an_engine_with_requests_does_not_sleep() -> None:
    async def main() -> None:
        async with AsyncLLM(num_gpu_blocks_override=64, engine="inline") as llm:
            stream = await llm.submit(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True))
            with pytest.raises(RequestError, match="1 requests are unfinished"):
                await llm.sleep()
            assert not llm.is_sleeping
            with pytest.raises(QuireError, match="unfinished"):
                await llm.call("sleep")  # the engine itself knows, too
            stream.close()
            await llm.sleep(2)
            assert llm.is_sleeping
            with pytest.raises(EngineAsleepError):
                await llm.submit(PROMPTS[0])
            await llm.call("stats")  # operations work
            await llm.wake_up()
            outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY)]
            assert outputs[-1].finished

    asyncio.run(main())


def test_requests_may_not_begin_from_the_moment_it_is_told_to_sleep() -> None:
    async def main() -> None:
        async with AsyncLLM(num_gpu_blocks_override=64, engine="inline") as llm:
            sleeping = asyncio.ensure_future(llm.sleep())
            await asyncio.sleep(0)
            with pytest.raises(EngineAsleepError):
                await llm.submit(PROMPTS[0])
            assert await sleeping > 0
            assert llm.is_sleeping
            sleeping = asyncio.ensure_future(llm.sleep(2))
            waking = asyncio.ensure_future(llm.wake_up())  # in the order of the calls
            await asyncio.gather(sleeping, waking)
            assert not llm.is_sleeping
            assert [output async for output in llm.generate(PROMPTS[0], GREEDY)][-1].finished

    asyncio.run(main())


def test_an_engine_that_dies_is_not_asleep() -> None:
    async def main() -> None:
        llm, client = fake_async_llm()
        async with llm:
            client.die()
            with pytest.raises(EngineDeadError):
                await llm.sleep()
            assert not llm.is_sleeping

    asyncio.run(main())
