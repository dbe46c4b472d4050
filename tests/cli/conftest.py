"""Fakes that stand in for the engine, so that commands are tested without a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import main as cli_main
from quire.errors import ContextLengthError, GenerationError, QuireError
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

TOO_LONG = "too long"
FAILING = "failing"


class Run(SimpleNamespace):
    """What a command did: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Run a `quire` command in this process."""

    def run(*words: str) -> Run:
        code = cli_main.main(words)
        captured = capsys.readouterr()
        return Run(code=code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put lines on standard input, as a pipe or as a terminal."""

    def put(*lines: str, tty: bool = False) -> None:
        class Stdin:
            def __iter__(self) -> Any:
                return iter(line + "\n" for line in lines)

            def read(self) -> str:
                return "".join(self)

            def isatty(self) -> bool:
                return tty

        monkeypatch.setattr(sys, "stdin", Stdin())
        typed = iter(lines)

        def read(prompt: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", read)

    return put


class FakeStream:
    """Outputs of one request: the text word by word, or all at once."""

    def __init__(self, llm: FakeAsyncLLM, ids: list[int], text: str, params: SamplingParams) -> None:
        self._llm = llm
        pieces = text.split(" ")
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            pieces = [text]
        count = params.num_sequences
        self._outputs = []
        for place, piece in enumerate(pieces):
            last = place == len(pieces) - 1
            ending = "" if last else " "
            items = [
                CompletionOutput(index, piece + ending, [7] * 3, finish_reason="stop" if last else None)
                for index in range(params.n)
            ]
            if last and text.startswith(FAILING):
                items[0].finish_reason, items[0].error = "error", GenerationError("logits are not finite")
            self._outputs.append(
                RequestOutput("r", None, ids, items, finished=last, num_generated_tokens=3 * count * (place + 1))
            )

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._outputs:
            raise StopAsyncIteration
        return self._outputs.pop(0)

    async def aclose(self) -> None:
        self._llm.closed_streams += 1


class FakeAsyncLLM:
    """Echoes prompts: "<prompt> back"; refuses the prompt `TOO_LONG`, and fails at the end of `FAILING`."""

    def __init__(self) -> None:
        self.config: Any = None
        self.started = self.closed = False
        self.fail_start: QuireError | None = None
        self.closed_streams = 0
        self.requests: list[tuple[Any, Any]] = []
        self.recommended: dict[str, Any] = {}

    @property
    def front_model(self) -> SimpleNamespace:
        return SimpleNamespace(sampling_defaults=self.recommended)

    async def start(self) -> None:
        if self.fail_start is not None:
            raise self.fail_start
        self.started = True

    async def close(self) -> None:
        self.closed = True

    async def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return "|".join(f"{message['role']}:{message['content']}" for message in messages)

    async def submit(self, prompt: Any, params: SamplingParams) -> FakeStream:
        if prompt == TOO_LONG:
            raise ContextLengthError("the prompt does not fit", param="prompt")
        self.requests.append((prompt, params))
        ids = prompt if isinstance(prompt, list) else [1] * len(prompt)
        return FakeStream(self, ids, f"{prompt} back", params)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> FakeAsyncLLM:
    """Let `generate` and `chat` open a fake engine."""
    llm = FakeAsyncLLM()

    def open_fake(config: Any) -> FakeAsyncLLM:
        llm.config = config
        return llm

    for module in ("offline", "chat"):
        monkeypatch.setattr(f"quire.cli.{module}.open_async_llm", open_fake)
    return llm
