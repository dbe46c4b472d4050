"""LM programs: Python functions that interleave text, generation and control flow.

    from quire.lang import LocalBackend, gen, program

    @program
    def greet(s, name):
        s += f"My name is {name}. What is yours?\\n"
        s += gen("answer", max_tokens=20, stop="\\n")

    with LocalBackend() as backend:
        print(greet.run(name="Ada", backend=backend)["answer"])

`parts` is what programs append, `state` and `program` carry it out, `local` and `endpoint` generate. See docs/lang.md.
"""

from __future__ import annotations

from quire.lang.backend import Backend, Capture
from quire.lang.endpoint import OpenAIBackend
from quire.lang.local import LocalBackend
from quire.lang.parts import Expression, assistant, gen, select, system, user
from quire.lang.program import Program, Stream, program
from quire.lang.state import ProgramCancelledError, State

__all__ = [
    "Backend",
    "Capture",
    "Expression",
    "LocalBackend",
    "OpenAIBackend",
    "Program",
    "ProgramCancelledError",
    "State",
    "Stream",
    "assistant",
    "gen",
    "program",
    "select",
    "system",
    "user",
]
