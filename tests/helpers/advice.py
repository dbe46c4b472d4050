"""Reading the command line that an error message ends with, as a user's shell would."""

from __future__ import annotations

import shlex

from quire.cli.flags import given_values
from quire.cli.main import _build_parser
from quire.cli.serve import FLAGS
from quire.config import SERVER_GROUPS, EngineConfig


def advised(message: str) -> EngineConfig:
    """Return the options of the command at the end of `message`."""
    words = shlex.split(message.rpartition("works: ")[2])
    assert words[:2] == ["quire", "serve"], message
    return EngineConfig.from_kwargs(
        groups=SERVER_GROUPS, **given_values(_build_parser("serve").parse_args(words[1:]), FLAGS)
    )
