"""What the front and the process that compiles grammars say to each other, and how it is framed."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from quire.frontend.formats.message import MessageSpec
from quire.structured_outputs import StructuredOutputParams

HEADER = struct.Struct("<I")
FAULT = "internal_error"  # the code of what is nobody's fault but ours


class StructuredOutputJob(msgspec.Struct, tag=True, frozen=True):
    """Compile the structured output of a text that is no chat message."""

    params: StructuredOutputParams
    special_tokens: dict[str, int] = {}


class MessageJob(msgspec.Struct, tag=True, frozen=True):
    """Compile what a message of a model may be; the names are those of its formats."""

    tool_format: str | None
    reasoning_format: str | None
    message_spec: MessageSpec


class Answer(msgspec.Struct):
    """A grammar (None: nothing is to be constrained), or the error, by its parts; `fleeting`: another try may do."""

    grammar: str | None = None
    error: str | None = None
    param: str | None = None
    code: str | None = None
    fleeting: bool = False


Job = StructuredOutputJob | MessageJob


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the next message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (size,) = HEADER.unpack(header)
    data = stream.read(size)
    return data if len(data) == size else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Send one message."""
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()
