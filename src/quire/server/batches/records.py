"""`FileRecord` and `BatchRecord`: files and batches as they are stored. How an API shows them is for its routes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

DAY = 86400
WINDOW = "24h"
# Of files that clients see, and of those that are parts of Anthropic's batches.
BATCH, OUTPUT = "batch", "batch_output"
MESSAGES, RESULTS = "message_batch", "message_batch_results"
OPENAI, ANTHROPIC = "openai", "anthropic"  # whose batch it is
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "total_tokens")


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


class FileRecord(msgspec.Struct, kw_only=True):
    """A file, without its content.

    Attributes:
        created_at, expires_at: seconds since 1970.
    """

    file_id: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch.

    Attributes:
        api: whose routes show it. status: in OpenAI's words. input_file_id, output_file_id, error_file_id: its files.
        created_at and so on: seconds since 1970; None for what has not happened. expires_at: from when on no line is
            run. num_lines, num_completed, num_failed: its lines; the last two as far as results are stored. num_unrun:
            at the end, those without a result.
        errors: why it failed. usage: tokens of all results, by `COUNTS`. output_seconds: for which its output is kept;
            None for as long as any file. metadata: the client's.
    """

    batch_id: str
    api: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_unrun: int = 0
    errors: list[dict[str, Any]] = []
    usage: dict[str, int] = {}
    output_seconds: int | None = None
    metadata: dict[str, str] | None = None

    @property
    def finished(self) -> bool:
        """Whether it will not change any more."""
        return self.status not in UNFINISHED

    def count(self, *, failed: bool, usage: Mapping[str, int]) -> None:
        """Count the result of a line."""
        self.num_failed += failed
        self.num_completed += not failed
        for name, number in usage.items():
            self.usage[name] = self.usage.get(name, 0) + number


class LineResult(msgspec.Struct, kw_only=True):
    """The stored result of a line of input: a line of output, and whether it belongs among the errors."""

    number: int
    failed: bool
    data: bytes
