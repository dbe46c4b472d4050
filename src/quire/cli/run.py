"""`quire run`: what `ollama run` does, with the conversation of `quire chat`.

A prompt among the arguments or from a pipe is answered once. Without one the conversation begins at the terminal.
"""

from __future__ import annotations

import sys
from typing import Any

from quire.cli import chat
from quire.cli.flags import MODEL, Argument, Command
from quire.cli.offline import utf8_stdin
from quire.errors import ConfigError

PROMPT = Argument("prompt", "a prompt to answer once; input from a pipe is appended to it", many=True)


def run(values: dict[str, Any]) -> int:
    """Answer the prompt; chat if there is none."""
    parts = [" ".join(values.get("prompt", []))]
    if not sys.stdin.isatty():
        with utf8_stdin() as text:
            parts.append(text.read())
    prompt = "\n\n".join(part.rstrip() for part in parts if part.strip())
    if not prompt and sys.stdin.isatty():
        return chat.run(values)
    if not prompt:
        raise ConfigError("there is nothing to answer: give a prompt after the model, or text on stdin", param="prompt")
    with chat.open_chat(values) as (model, conversation):
        chat.print_reply(conversation.turn(prompt, model))
    return 0


COMMAND = Command(
    run=run,
    flags=chat.FLAGS,
    description="Talk to a model, or have it answer one prompt and exit. Words after MODEL are the prompt; input from "
    "a pipe is appended to it.",
    arguments=(MODEL, PROMPT),
)
