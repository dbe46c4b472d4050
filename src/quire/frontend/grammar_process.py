"""A process of its own that compiles grammars, so that one which takes too long can be stopped.

It reads jobs, as JSON, from standard input and writes answers, as msgpack, to standard output, each behind its length
in four bytes. What it answers was compiled by the same code, within the same limits, that the engine will use. It
ends with its parent.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys

import msgspec

from quire import logs
from quire.errors import RequestError
from quire.frontend.formats.registry import REASONING_FORMATS, TOOL_FORMATS, MessageFormat
from quire.frontend.grammar_jobs import FAULT, Answer, Job, StructuredOutputJob, read_frame, write_frame
from quire.structured.compile import checked, compile_structured_output

logger = logging.getLogger(__name__)

MEMORY = 1 << 30  # bytes of address space; about 200 MiB of it are the interpreter and its libraries

_decode_job = msgspec.json.Decoder(Job).decode
_encode = msgspec.msgpack.Encoder().encode


def answer_to(job: Job) -> Answer:
    """Compile; what is wrong with the request is an answer, too."""
    try:
        if isinstance(job, StructuredOutputJob):
            return Answer(compile_structured_output(job.params, job.special_tokens))
        calls = None if job.tool_format is None else TOOL_FORMATS[job.tool_format]
        reasoning = None if job.reasoning_format is None else REASONING_FORMATS[job.reasoning_format]
        grammar = MessageFormat(calls, reasoning, job.message_spec.special_tokens).grammar(job.message_spec)
        return Answer(None if grammar is None else checked(grammar))
    except RequestError as error:
        return Answer(error=error.message, param=error.param, code=error.code)
    except RecursionError:
        return Answer(error="it is nested too deeply", code="grammar_too_complex")
    except MemoryError:
        return Answer(error="compiling it takes too much memory", code="grammar_too_complex")
    except Exception as error:  # the boundary of the process: a fault of ours must not look like one of the request
        logger.exception("compiling a grammar failed")
        return Answer(error=f"compiling a grammar failed: {type(error).__name__}", code=FAULT)


def main() -> None:
    """Answer jobs until standard input ends; an empty message says that it is ready."""
    logs.setup(*sys.argv[1:3], process="grammar")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    write_frame(sys.stdout.buffer, b"")
    while (data := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, _encode(answer_to(_decode_job(data))))
