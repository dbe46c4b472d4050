"""Many streams over one engine: nothing leaks when clients leave, and everyone hears of an engine that died."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from quire import AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.messages import Ready
from quire.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    ModelError,
    OverloadedError,
    QuireError,
    RequestError,
)
from quire.frontend.chat import ControlTokenFinder
from quire.frontend.chat_bounds import FRONT_SECONDS
from quire.frontend.grammars import GrammarCompiler
from quire.frontend.output_processor import RequestStream
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from quire.structured_outputs import StructuredOutputParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.test_output_processor import Listener
from tests.helpers.errors import refused
from tests.helpers.fake_engine import FakeClient, fake_async_llm, fake_front_model

DELTA = RequestOutputKind.DELTA
MANY = SamplingParams(max_tokens=200, output_kind=DELTA, ignore_eos=True)


def on_fake(test: Callable[[AsyncLLM, FakeClient], Awaitable[None]], **options: Any) -> None:
    """Run a test against a fake engine; afterwards nothing may be left behind."""

    async def run() -> None:
        llm, client = fake_async_llm(**options)
        async with asyncio.timeout(60), llm:
            await test(llm, client)
        assert client.closed
        assert llm.num_unfinished == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def text_of(stream: Any) -> str:
    return "".join([output.outputs[0].text async for output in stream])


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_stream_of_deltas() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        stream = await llm.submit("hello", SamplingParams(max_tokens=50, output_kind=DELTA), "mine")
        assert stream.request_id == "mine"
        assert stream.prompt_token_ids == llm.tokenizer.encode("hello")  # type: ignore[union-attr]
        outputs = [output async for output in stream]
        assert "".join(output.outputs[0].text for output in outputs) == "hello world"
        assert len(outputs) > 1
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "stop"
        assert outputs[-1].prompt == "hello"
        assert (
            await text_of(llm.generate([5, 6], SamplingParams(max_tokens=50, output_kind=DELTA), "g")) == "hello world"
        )
        assert client.engine.aborted == []

    on_fake(test, reply_text="hello world")


def test_properties() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        assert (llm.max_model_len, llm.vocab_size) == (128, client.engine.ready.vocab_size)
        assert llm.model_info.model_type == "llama"
        assert (llm.ready, llm.errored, llm.num_unfinished) == (True, False, 0)
        await text_of(llm.generate("x", SamplingParams(max_tokens=2)))
        assert llm.stats.num_blocks == 64
        await llm.check_health()

    on_fake(test, max_model_len=128)


def test_requests_at_the_same_time_get_their_own_texts() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        params = SamplingParams(max_tokens=20, seed=1, output_kind=DELTA)
        alone = [await text_of(llm.generate(f"prompt {index}", params)) for index in range(40)]
        together = await asyncio.gather(*(text_of(llm.generate(f"prompt {index}", params)) for index in range(40)))
        assert together == alone
        assert len(set(alone)) == 40

    on_fake(test, max_num_seqs=16)


def test_bad_requests_are_refused_at_once() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        for prompt, error, param in (
            ([1, 10**6], RequestError, "prompt[1]"),
            ("x" * 300, ContextLengthError, "prompt"),
            ("x" * 10**6, ContextLengthError, "prompt"),
            ("y" * 5000 + "\ud800", RequestError, "prompt"),
            (5, RequestError, "prompt"),
        ):
            with refused(param, kind=error):
                await llm.submit(prompt, SamplingParams())  # type: ignore[arg-type]
        with refused("prompt[3][0]"):
            await llm.submit([99999], param="prompt[3]")
        assert client.engine.added == []
        assert llm.num_unfinished == 0
        client.hold()
        first = await llm.submit("x", request_id="same")
        with pytest.raises(RequestError, match="same"):
            await llm.submit("x", request_id="same")
        await first.aclose()

    on_fake(test)


@pytest.mark.parametrize(("options", "most"), [({"max_num_seqs": 2}, 8), ({"max_num_queued_reqs": 3}, 3)])
def test_too_many_requests_are_refused_until_some_end(options: dict[str, Any], most: int) -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        client.hold()
        streams = [await llm.submit("x", SamplingParams(max_tokens=2)) for _ in range(most)]
        with pytest.raises(OverloadedError):
            await llm.submit("x")
        assert len(client.engine.added) == most
        await streams[0].aclose()
        streams[0] = await llm.submit("x", SamplingParams(max_tokens=2))
        client.resume()
        for stream in streams:
            await text_of(stream)
        assert await text_of(llm.generate("x", SamplingParams(max_tokens=2)))

    on_fake(test, **options)


def test_a_request_of_many_sequences_counts_as_often_as_the_engine_gets_it() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        client.hold()
        wide = await llm.submit("x", SamplingParams(n=7, max_tokens=2))
        assert len(client.engine.added) == 4 and llm.num_unfinished == 1
        with pytest.raises(OverloadedError):
            await llm.submit("x")
        client.resume()
        await text_of(wide)
        assert await text_of(llm.generate("x", SamplingParams(max_tokens=2)))
        left = await llm.submit("x", SamplingParams(n=7, max_tokens=2))
        await left.aclose()
        assert await text_of(llm.generate("x", SamplingParams(max_tokens=2)))

    on_fake(test, max_num_seqs=2, max_num_queued_reqs=4)


def test_requests_being_tokenized_count_as_unfinished() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        client.hold()
        long = "hello world " * 1000
        results = await asyncio.gather(
            *(llm.submit(long, SamplingParams(truncate_prompt_tokens=5)) for _ in range(10)), return_exceptions=True
        )
        assert sum(isinstance(result, OverloadedError) for result in results) == 7
        for result in results:
            if isinstance(result, RequestStream):
                result.close()

    on_fake(test, max_num_queued_reqs=3)


async def leave_by_aclose(llm: AsyncLLM) -> None:
    stream = await llm.submit("x", MANY)
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def leave_by_context(llm: AsyncLLM) -> None:
    async with await llm.submit("x", MANY) as stream:
        await anext(stream)


async def leave_by_generator(llm: AsyncLLM) -> None:
    generator = llm.generate("x", MANY)
    await anext(generator)
    await generator.aclose()


async def leave_by_breaking(llm: AsyncLLM) -> None:
    async for _ in llm.generate("x", MANY):
        break
    gc.collect()
    await settle()


async def leave_by_dropping(llm: AsyncLLM) -> None:
    stream = await llm.submit("x", MANY)
    await anext(stream)
    del stream
    gc.collect()
    await settle()


async def leave_by_cancellation(llm: AsyncLLM) -> None:
    task = asyncio.create_task(text_of(llm.generate("x", MANY)))
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    await settle()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_aclose,
        leave_by_context,
        leave_by_generator,
        leave_by_breaking,
        leave_by_dropping,
        leave_by_cancellation,
    ],
)
def test_whoever_leaves_is_aborted_in_the_engine(leave: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        await leave(llm)
        assert len(client.engine.aborted) == 1
        assert client.engine.live == []
        assert llm.num_unfinished == 0
        await settle()
        assert (llm.stats.num_running, llm.stats.num_free_blocks) == (0, 64), "numbers of an idle engine are kept fresh"

    on_fake(test)


def test_leaving_while_queued_aborts_all_completions() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        client.hold()
        task = asyncio.create_task(text_of(llm.generate("x", MANY.clone(n=3), "r")))
        await settle()
        assert client.engine.live == ["r-0", "r-1", "r-2"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.engine.aborted == ["r-0", "r-1", "r-2"]

    on_fake(test)


def test_leaving_during_tokenization_admits_nothing() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        task = asyncio.create_task(llm.submit("hello " * 2000, SamplingParams(truncate_prompt_tokens=9)))
        await asyncio.sleep(0)
        assert llm.num_unfinished == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert llm.num_unfinished == 0
        assert client.engine.added == []

    on_fake(test)


def test_abort_gives_a_last_output() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        stream = await llm.submit("x", MANY, "r")
        first = await anext(stream)
        await llm.abort("r")
        await llm.abort("nobody")
        rest = [output async for output in stream]
        assert rest[-1].finished
        assert rest[-1].outputs[0].finish_reason == "abort"
        assert client.engine.aborted == ["r"]
        assert not first.finished

    on_fake(test)


def test_a_stop_string_ends_the_request_in_the_engine_within_a_step() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        params = SamplingParams(max_tokens=100, stop=["o w"], output_kind=DELTA)
        assert await text_of(llm.generate("x", params, "r")) == "hell"
        assert client.engine.aborted == ["r"]
        assert client.engine.num_steps <= 3
        await settle()
        assert llm.stats.num_running == 0

    on_fake(test, reply_text="hello world and much more text than anybody wants to read")


def test_a_slow_reader_gets_the_same_text_in_fewer_outputs() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        params = MANY.clone(max_tokens=100, seed=3, logprobs=1)
        fast = [output async for output in llm.generate("x", params)]
        stream = await llm.submit("x", params)
        slow: list[RequestOutput] = []
        async for output in stream:
            slow.append(output)
            for _ in range(60):
                await asyncio.sleep(0)
        assert len(slow) < len(fast) / 3
        for merge in (
            lambda outputs: "".join(output.outputs[0].text for output in outputs),
            lambda outputs: [token for output in outputs for token in output.outputs[0].token_ids],
            lambda outputs: [entry for output in outputs for entry in output.outputs[0].logprobs],
        ):
            assert merge(slow) == merge(fast)

    on_fake(test)


def test_waiting_with_a_timeout_does_not_end_the_stream() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        client.hold()
        stream = await llm.submit("x", SamplingParams(max_tokens=3, output_kind=DELTA))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        client.resume()
        assert len(await text_of(stream)) == 3

    on_fake(test)


def test_engine_death_reaches_everyone() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        readers = [asyncio.create_task(text_of(llm.generate("x", MANY))) for _ in range(5)]
        queued = await llm.submit("x", MANY)
        await settle()
        client.hold()
        client.die("the engine process ended (signal 9)")
        for result in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "signal 9" in result.message
        with pytest.raises(EngineDeadError):
            async for _ in queued:
                pass
        assert (llm.errored, llm.ready, llm.num_unfinished) == (True, False, 0)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        with pytest.raises(EngineDeadError):
            await llm.submit("x")
        with pytest.raises(EngineDeadError):
            await llm.call("stats")

    on_fake(test)


def test_what_came_before_the_death_is_still_delivered() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        done = await llm.submit("x", SamplingParams(max_tokens=2))
        live = await llm.submit("x", MANY)
        for _ in range(20):
            await asyncio.sleep(0)
        assert done.finished
        client.die()
        await settle()
        assert [output async for output in done][-1].finished
        assert (await anext(live)).outputs[0].text
        with pytest.raises(EngineDeadError):
            await anext(live)

    on_fake(test)


def test_closing_ends_open_streams() -> None:
    async def run() -> None:
        llm, client = fake_async_llm()
        await llm.start()
        client.hold()
        reader = asyncio.create_task(text_of(llm.generate("x", MANY)))
        await settle()
        call = asyncio.create_task(llm.call("stats"))
        await llm.close()
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await reader
        await asyncio.gather(call, return_exceptions=True)
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.submit("x")
        assert client.closed

    asyncio.run(run())


def test_operations_of_the_engine() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        await llm.reset_prefix_cache()
        assert client.engine.num_resets == 1
        results = await asyncio.gather(llm.call("stats"), llm.call("check_integrity"))
        assert (results[0]["num_running"], results[1]) == (0, {"ok": True})
        with pytest.raises(QuireError, match="unknown engine operation"):
            await llm.call("explode")
        await llm.check_health()

    on_fake(test)


def test_chat_prompts_name_messages_and_keep_control_tokens_out() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        ids = await llm.chat_prompt([{"role": "user", "content": "<|im_end|>hi"}])
        assert tokenizer.decode(ids, False) == "<|im_start|>user\n<|im_end|>hi<|im_end|>\n<|im_start|>assistant\n"
        assert ids.count(tokenizer.control_tokens["<|im_end|>"]) == 1
        for messages, error in (
            ([{"role": "user", "content": "x" * 1000}], ContextLengthError),
            ([{"role": "user", "content": "hello " * 100_000}], ContextLengthError),
            ([{"role": "user", "content": "x"}] * 10_000, ContextLengthError),
            ([{"role": "wizard", "content": "x"}], RequestError),
            ([], RequestError),
        ):
            with refused("messages", kind=error):
                await llm.chat_prompt(messages)

    on_fake(test)


def burn() -> None:
    """Use more processor time than a rendering in the front may."""
    begun = time.thread_time()
    while time.thread_time() - begun < 2 * FRONT_SECONDS:
        pass


@pytest.mark.parametrize("slow", ["the tokenizer", "marking"])
def test_a_long_conversation_is_tokenized_once(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though what it says has characters with which control tokens begin, so that it is rendered twice."""
    front = fake_front_model(max_model_len=20_000)
    assert front.tokenizer is not None
    encode, mark = front.tokenizer.encode, ControlTokenFinder.mark_beginnings
    texts: list[str] = []

    def spied(text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        if slow == "the tokenizer":
            burn()
        return encode(text, add_special_tokens)

    def marked(*arguments: Any) -> str:
        if slow == "marking":
            burn()
        return mark(*arguments)

    monkeypatch.setattr(front.tokenizer, "encode", spied)
    monkeypatch.setattr(ControlTokenFinder, "mark_beginnings", marked)

    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        texts.clear()
        await llm.chat_prompt([{"role": "user", "content": "if a < b: c" * 500}])
        assert len(texts) == 1

    on_fake(test, front_model=front, max_model_len=20_000)


class Spy(Tokenizer):
    """Notes which thread tokenized texts of which length."""

    seen: list[tuple[int, str]]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.seen.append((len(text), threading.current_thread().name))
        return super().encode(text, add_special_tokens)


def test_long_texts_are_tokenized_in_a_thread() -> None:
    front = fake_front_model(max_model_len=20_000)
    assert front.tokenizer is not None
    front.tokenizer.__class__ = Spy
    spy = front.tokenizer
    assert isinstance(spy, Spy)
    spy.seen = []

    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        for size in (10, 6000):
            await text_of(llm.generate("x" * size, SamplingParams(max_tokens=1)))
            await llm.chat_prompt([{"role": "user", "content": "x" * size}])
        names = {size > 5000: name.split("_")[0] for size, name in spy.seen}
        assert names == {False: "MainThread", True: "quire-tokenizer"}

    on_fake(test, front_model=front)


def test_listeners_hear_of_everything() -> None:
    listener = Listener()

    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        await text_of(llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True)))
        stream = await llm.submit("hello", MANY)
        await anext(stream)
        stream.close()

    on_fake(test, listeners=[listener])
    assert len(listener.first) == 2
    assert [request.finish_reason for request in listener.finished] == ["length", "abort"]
    assert sum(tokens for _, tokens in listener.steps) == sum(r.num_generation_tokens for r in listener.finished)
    assert sum(tokens for tokens, _ in listener.steps) == 2


def test_two_hundred_clients_that_come_and_go() -> None:
    rng = random.Random(7)

    async def client_of(llm: AsyncLLM, index: int) -> str:
        how = rng.choice(["read", "read", "cancel", "break", "drop", "bad", "early"])
        params = SamplingParams(max_tokens=30, seed=index, output_kind=DELTA, n=1)
        prompt = "hello " * (1000 if index % 10 == 0 else 1)
        params.truncate_prompt_tokens = 20 if index % 10 == 0 else None
        try:
            if how == "bad":
                with pytest.raises(RequestError):
                    await llm.submit([-1], params)
                return how
            if how in ("cancel", "early"):
                task = asyncio.create_task(text_of(llm.generate(prompt, params)))
                for _ in range(0 if how == "early" else rng.randrange(60)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return how
            stream = await llm.submit(prompt, params)
            count = 0
            text = ""
            async for output in stream:
                text += output.outputs[0].text
                count += 1
                if how == "break" and count == 3:
                    await stream.aclose()
                    return how
                if how == "drop" and count == 2:
                    return how
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
            assert len(text) == 30
            return how
        except OverloadedError:
            return "overloaded"

    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        hows = await asyncio.gather(*(client_of(llm, index) for index in range(200)))
        gc.collect()
        for _ in range(1000):
            await asyncio.sleep(0)
        assert {"read", "cancel", "break", "drop", "bad", "early"} <= set(hows)
        assert client.engine.live == []
        assert llm.num_unfinished == 0
        assert not llm._requests.outputs._sequences
        tasks = {task.get_name() for task in asyncio.all_tasks() - {asyncio.current_task()}}
        assert tasks == {"quire-receiver", "quire-watchdog"}
        assert len(await text_of(llm.generate("hello", SamplingParams(max_tokens=30)))) > 0

    on_fake(test, max_num_seqs=64)


@pytest.mark.parametrize("error", [ConfigError("max_model_len: too long"), EngineDeadError("no memory")])
def test_an_engine_that_cannot_start(error: QuireError) -> None:
    async def run() -> None:
        llm, client = fake_async_llm()
        client._start_error = error
        for _ in range(2):
            with pytest.raises(type(error), match=error.message):
                await llm.start()
        with pytest.raises(type(error)):
            await llm.submit("x")
        assert client.closed
        assert not llm.ready
        await llm.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_model_folder_that_is_not_there_ends_the_engine_too() -> None:
    async def run() -> None:
        _, client = fake_async_llm()
        llm = AsyncLLM(EngineConfig.from_kwargs(model="/nowhere/at/all"), client=client)
        with pytest.raises(ModelError, match="nowhere"):
            await llm.start()
        assert client.closed

    asyncio.run(run())


def test_starting_is_done_once() -> None:
    async def run() -> None:
        llm, _ = fake_async_llm()
        await asyncio.gather(*(llm.start() for _ in range(5)), llm.submit("x"))
        assert sum(task.get_name() == "quire-receiver" for task in asyncio.all_tasks()) == 1
        await llm.close()

    asyncio.run(run())


def test_a_call_raises_what_the_engine_raised() -> None:
    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        with pytest.raises(ConfigError, match="unknown engine operation") as caught:
            await llm.call("nonsense")
        assert (caught.value.param, caught.value.code, caught.value.http_status) == ("method", "invalid_config", 400)

    on_fake(test)


class SlowClient:
    """Holds up the start of a client until `loaded` is set."""

    def __init__(self, client: FakeClient) -> None:
        self.loaded = asyncio.Event()
        self._start = client.start
        client.start = self.start  # type: ignore[method-assign]

    async def start(self) -> Ready:
        await self.loaded.wait()
        return await self._start()


def test_a_start_that_was_cancelled_goes_on_for_the_next_caller() -> None:
    async def run() -> None:
        llm, client = fake_async_llm()
        slow = SlowClient(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await llm.start()
        assert not llm.errored and not client.closed
        waiter = asyncio.create_task(llm.start())
        await settle()
        slow.loaded.set()
        await waiter
        assert await text_of(llm.generate("x"))
        await llm.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_closing_ends_a_start() -> None:
    async def run() -> None:
        llm, client = fake_async_llm()
        SlowClient(client)
        waiters = [asyncio.create_task(llm.start()) for _ in range(2)]
        await settle()
        await llm.close()
        for waiter in waiters:
            with pytest.raises(EngineDeadError, match="did not start"):
                await waiter
        assert client.closed and llm.errored
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_leaving_while_the_context_is_entered_closes_the_engine() -> None:
    async def run() -> None:
        llm, client = fake_async_llm()
        SlowClient(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), llm:
                pass
        assert client.closed and asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_close_ends_the_processes_that_compile_grammars() -> None:
    compilers = GrammarCompiler()

    def processes() -> int:
        return sum("quire.frontend.grammars" in child.cmdline() for child in psutil.Process().children())

    async def run() -> None:
        llm, _ = fake_async_llm()
        llm._grammars = compilers  # in the place of the one that all fake engines share
        before = processes()
        async with llm:
            structured = StructuredOutputParams(regex="[xyz]{3}")
            await text_of(llm.generate("a", SamplingParams(max_tokens=2, structured_outputs=structured)))
            assert processes() == before + 1
        assert processes() == before

    try:
        asyncio.run(run())
    finally:
        compilers.close()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        AsyncLLM(max_num_seq=4)
    with pytest.raises(TypeError):
        AsyncLLM(EngineConfig(), max_num_seqs=4)


def test_a_failing_listener_is_not_silent() -> None:
    class Broken(Listener):
        def on_first_token(self, seconds: float) -> None:
            raise ZeroDivisionError

    async def test(llm: AsyncLLM, client: FakeClient) -> None:
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await text_of(llm.generate("x"))
        assert llm.errored

    on_fake(test, listeners=[Broken()])
