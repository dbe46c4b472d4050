"""`quire chat`: a conversation in the terminal, with a model in this process or behind `--url`.

At a terminal it prompts and knows a few /commands; with standard input from a pipe each line is a turn of the user and
only the replies are written, so that it can be scripted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import (
    OFFLINE_GROUPS,
    LogOptions,
    engine_config,
    open_async_llm,
    options_from,
    sampling_flags,
    sampling_values,
    utf8_stdin,
)
from quire.config import EngineConfig
from quire.errors import ConfigError, QuireError
from quire.options import option, option_fields
from quire.sampling_params import OPTIONS, RequestOutputKind, SamplingParams, with_recommended

Message = dict[str, str]
# Removed from replies, so that a model cannot send escape sequences to the terminal.
CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
COMMANDS = {"/reset": "forget the conversation", "/help": "show these commands", "/exit": "leave (or /bye, Ctrl-D)"}
LEAVE = ("/exit", "/bye")
NOT_FOR_CHAT = tuple(name for name, field in OPTIONS.items() if field.affects != "text")


class ChatModel(Protocol):
    """The model that replies."""

    name: str

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """Yield the answer piece by piece. Raises `QuireError`."""

    def close(self) -> None:
        """Release the model or the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Conversation"""

    url: str | None = option(
        None, "Use a server, such as http://127.0.0.1:8000/v1, instead of loading a model.", metavar="URL"
    )
    api_key: str | None = option(None, "Key for the server at --url.", secret=True, metavar="KEY")
    system: str | None = option(None, "System message at the start of the conversation.")


FLAGS = [
    *flags_of((ChatOptions,)),
    *sampling_flags(exclude=NOT_FOR_CHAT, defaults={"max_tokens": "as many as fit"}),
    *flags_of(OFFLINE_GROUPS),
]


def run(values: dict[str, Any]) -> int:
    """Chat until /exit or the end of input."""
    with open_chat(values) as (model, conversation):
        chat = _chat_at_terminal if sys.stdin.isatty() else _chat_through_pipe
        chat(model, conversation)
    return 0


@contextlib.contextmanager
def open_chat(values: dict[str, Any]) -> Iterator[tuple[ChatModel, Conversation]]:
    """Yield the model of these options, loaded or reached, and an empty conversation. Raises `QuireError`."""
    options: ChatOptions = options_from(ChatOptions, values)
    sampling = {"max_tokens": None, **sampling_values(values)}
    SamplingParams(**sampling)  # raises for contradictions before a model is loaded
    logs.setup(options_from(LogOptions, values).log_level)
    if options.url is None:
        if options.api_key is not None:
            raise ConfigError("api_key needs url", param="api_key")
        config = engine_config(values)
        model: ChatModel = LocalModel(config, sampling)
    else:
        _refuse_engine_options(values)
        from quire.cli.remote import RemoteModel

        model = RemoteModel(options.url, values.get("model"), options.api_key, sampling)
    with contextlib.closing(model):
        yield model, Conversation(options.system)


def _refuse_engine_options(values: dict[str, Any]) -> None:
    for item in option_fields(OFFLINE_GROUPS):
        if item.name in values and item.name not in ("model", "log_level"):
            raise ConfigError(f"{item.name} contradicts url: the server has its own", param=item.name)


class Conversation:
    """The messages so far."""

    def __init__(self, system: str | None) -> None:
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._start)

    def turn(self, text: str, model: ChatModel) -> Generator[str, None, None]:
        """Send `text` and yield the reply piece by piece.

        A turn whose reply fails or is stopped before its first piece is dropped; a complete reply may be empty.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        complete = False
        try:
            with contextlib.closing(model.reply(list(self.messages))) as reply:
                for piece in reply:
                    pieces.append(piece)
                    yield piece
            complete = True
        finally:
            if complete or pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self.messages.pop()


class LocalModel:
    """A model in this process. Its event loop runs only while a reply is awaited."""

    def __init__(self, config: EngineConfig, sampling: dict[str, Any]) -> None:
        self.name = config.model.model
        self._runner = asyncio.Runner()
        self._llm = open_async_llm(config)
        try:
            self._runner.run(self._llm.start())
        except BaseException:
            self.close()
            raise
        values = with_recommended(self._llm.front_model.sampling_defaults, sampling)
        self._params = SamplingParams(**{**values, "output_kind": RequestOutputKind.DELTA})

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """Yield the reply; the request is aborted if the caller stops early."""

        async def start() -> Any:
            return await self._llm.submit(await self._llm.chat_prompt(messages), self._params)

        stream = self._runner.run(start())
        try:
            while (output := self._runner.run(_next(stream))) is not None:
                if output.outputs[0].text:
                    yield output.outputs[0].text
                if output.outputs[0].error is not None:
                    raise output.outputs[0].error
        finally:
            self._runner.run(stream.aclose())

    def close(self) -> None:
        """End the engine and the event loop."""
        self._runner.run(self._llm.close())
        self._runner.close()


async def _next(stream: Any) -> Any:
    return await anext(stream, None)


def print_reply(pieces: Iterable[str]) -> None:
    """Write a reply to standard output as it is generated; to a terminal without what could control it."""
    controls = CONTROLS if sys.stdout.isatty() else {}
    for piece in pieces:
        print(piece.translate(controls), end="", flush=True)
    print()


def _chat_through_pipe(model: ChatModel, conversation: Conversation) -> None:
    with utf8_stdin() as lines:
        for line in lines:
            text = line.strip()
            if text in LEAVE:
                return
            if text in COMMANDS:
                if text == "/reset":
                    conversation.reset()
                continue
            if text:
                print_reply(conversation.turn(text, model))


def _chat_at_terminal(model: ChatModel, conversation: Conversation) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives input() its line editing and history
    from rich.console import Console

    console = Console(highlight=False)
    console.print(model.name, style="bold", markup=False, end="  ")
    console.print("/help shows the commands", style="dim")
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in LEAVE:
            return
        if text.startswith("/"):
            _run_command(text, conversation, console)
        elif text:
            _show_reply(text, model, conversation, console)


def _run_command(command: str, conversation: Conversation, console: Any) -> None:
    if command == "/reset":
        conversation.reset()
        console.print("[dim]the conversation starts anew[/dim]")
        return
    for name, effect in COMMANDS.items():
        console.print(f"[dim]{name:8} {effect}[/dim]")


def _show_reply(text: str, model: ChatModel, conversation: Conversation, console: Any) -> None:
    """Print the reply as it is generated; Ctrl-C stops it and keeps the part that has come."""
    pieces = conversation.turn(text, model)
    try:
        for piece in pieces:
            console.out(piece.translate(CONTROLS), end="")
        console.print()
    except KeyboardInterrupt:
        pieces.close()
        console.print("\n[dim]stopped[/dim]")
    except QuireError as error:
        console.print(f"error: {error.message}", style="red", markup=False)


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Talk to a model. With input from a pipe, each line is a turn and only the replies are written.",
)
