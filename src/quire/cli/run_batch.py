"""`quire run-batch`: answers a file of requests in OpenAI's batch format, with the server's code but without a port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import (
    OFFLINE_GROUPS,
    READY_PER_RUNNING,
    LogOptions,
    engine_config,
    options_from,
    started_llm,
    with_long_queues,
)
from quire.cli.output import open_output
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.options import option

if TYPE_CHECKING:
    from quire.server.batches.lines import Batch

STDIO = "-"
PROGRESS_SECONDS = 10.0
SPOOL_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Input and output"""

    input: str | None = option(None, "File with one request per line, or - for standard input.", metavar="FILE")
    output: str | None = option(
        None, "File for results, in the order of input, or - for standard output.", metavar="FILE"
    )
    max_concurrency: int | None = option(
        None, "Maximum number of concurrent requests; default: 2 x max-num-seqs.", low=1, high=65536, metavar="N"
    )


FLAGS = [*flags_of((BatchOptions,)), *flags_of(OFFLINE_GROUPS)]


def run(values: dict[str, Any]) -> int:
    """Answer the file; return 0, or 1 if any request failed."""
    options: BatchOptions = options_from(BatchOptions, values)
    config = engine_config(values)
    concurrency = options.max_concurrency or READY_PER_RUNNING * config.scheduler.max_num_seqs
    logs.setup(options_from(LogOptions, values).log_level)
    _check_files(options)
    output = None if options.output == STDIO else options.output
    with _open_input(str(options.input)) as lines, open_output(output) as write:
        done, failed = asyncio.run(_answer_all(config, concurrency, lines, write))
    if failed:
        print(f"error: {failed} of {done} requests failed; their lines say why", file=sys.stderr)
    return 1 if failed else 0


@contextlib.contextmanager
def _open_input(path: str) -> Iterator[IO[bytes]]:
    """Yield the file of requests. Standard input is read to its end first, so that reading never blocks later."""
    if path == STDIO:
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.seek(0)
            yield spool
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise ConfigError(f"input: cannot read {path!r}: {error.strerror}", param="input") from None
        yield file


def _check_files(options: BatchOptions) -> None:
    """Raise `ConfigError` unless there are an input to read and another file to write."""
    source, target = options.input, options.output
    if source is None or target is None:
        name = "input" if source is None else "output"
        raise ConfigError(f"{name}: give a file with -{name[0]}, or - for standard {name}", param=name)
    if source == STDIO and sys.stdin.isatty():
        raise ConfigError("input: standard input is a terminal; give a file, or lines through a pipe", param="input")
    if os.path.exists(target) and os.path.exists(source) and os.path.samefile(target, source):
        raise ConfigError(f"output: {target!r} is the input", param="output")


async def _answer_all(
    config: EngineConfig, concurrency: int, source: IO[bytes], write: Callable[[bytes], None]
) -> tuple[int, int]:
    """Answer all requests; return how many there were, and how many of them failed."""
    from quire.server.app import build_app  # heavy: only once the options are known to be good
    from quire.server.batches.lines import Batch, split_lines
    from quire.server.generation import MAX_PROMPTS

    config = with_long_queues(config, (concurrency + 1) * MAX_PROMPTS)
    async with started_llm(config) as llm:
        limit = config.server.max_body_bytes
        app = build_app(llm, config)
        batch = Batch(app, concurrency=concurrency, max_body_bytes=limit, check=llm.check_health)
        async with _progress(batch):
            await batch.run(split_lines(source, batch.reader.longest), write)
    return batch.num_done, batch.num_failed


@contextlib.asynccontextmanager
async def _progress(batch: Batch) -> AsyncIterator[None]:
    """Report progress on standard error, every few seconds and at the end."""

    def report() -> None:
        failed = f", {batch.num_failed} of them failed" if batch.num_failed else ""
        print(f"{batch.num_done} requests done{failed}", file=sys.stderr, flush=True)

    async def keep_reporting() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            report()

    task = asyncio.create_task(keep_reporting())
    try:
        yield
        report()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


COMMAND = Command(
    run=run,
    flags=FLAGS,
    usage="-i FILE -o FILE [OPTIONS]",
    description="Answer a file of requests in OpenAI's batch format, without opening a port. A line of input has "
    '"custom_id", "method" (POST), "url" (/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, '
    '/v1/score, /v1/rerank) and "body"; a line of output has "custom_id" and "response" or "error".',
    short={"input": "-i", "output": "-o"},
)
