"""`quire pull`: download a model from the Hugging Face hub, and print where it is.

What is fetched and what can go wrong is the concern of `checkpoint.folder`, which all commands use for such names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.cli.flags import Argument, Command, flags_of
from quire.config import ModelConfig
from quire.errors import ModelError
from quire.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions:
    """Model"""

    token: str | None = option(
        None, "Token of the Hugging Face hub; default: HF_TOKEN, or that of `hf auth login`.", secret=True
    )


FLAGS = [
    *(flag for flag in flags_of((ModelConfig,)) if flag.name in ("revision", "download_dir")),
    *flags_of((PullOptions,)),
]


def run(values: dict[str, Any]) -> int:
    """Download what is not in the cache yet, with a progress bar on standard error."""
    from quire.checkpoint.folder import resolve_model

    name = values.pop("model")
    path = resolve_model(name, **values)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        raise ModelError(f"{name}: no weights that Quire loads (expected *.safetensors or *.gguf)")
    print(path)
    return 0


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Download a model from the Hugging Face hub, unless it is in the cache, and print where it is. "
    "Commands that take a model find it there by the same name.",
    arguments=(Argument("model", "name on the hub: owner/name, or owner/name:Q4_K_M for a GGUF file", required=True),),
    config_file=False,
)
