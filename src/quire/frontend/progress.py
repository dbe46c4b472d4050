"""The progress bar of `LLM.generate`, on standard error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Takes note of progress; this one shows nothing."""

    def advance(self, num_requests: int, num_tokens: int) -> None:
        """Report requests that finished, and tokens that were generated."""


@contextlib.contextmanager
def progress_bar(num_requests: int, num_prompt_tokens: int, *, enabled: bool) -> Iterator[Progress]:
    """Show a bar with finished requests and tokens per second; nothing if not `enabled` or without requests."""
    if not enabled or not num_requests:
        yield Progress()
        return
    from rich.console import Console  # lazy: only those who show a bar pay for it
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bar = RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("Generating", total=num_requests, speed="")
        started = time.monotonic()
        num_generated = 0

        class _Bar(Progress):
            def advance(self, num_requests: int, num_tokens: int) -> None:
                nonlocal num_generated
                num_generated += num_tokens
                seconds = max(time.monotonic() - started, 1e-9)
                speed = f"{num_prompt_tokens / seconds:.0f} in, {num_generated / seconds:.0f} out tokens/s"
                bar.update(task, advance=num_requests, speed=speed)

        yield _Bar()
