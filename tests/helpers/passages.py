"""The held-back passages on which the demo model's test loss was measured.

The chats ship with the model. The plays' part is cut again, exactly as the trainer did, from the public-domain text it
was trained on, which stands beside the repository where it is developed and is not part of it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from quire.demo import demo_model_path
from quire.train.data import TextSource
from quire.train.evaluate import PASSAGES_FILE, read_passages
from quire.train.tokenizer import load_tokenizer

SHAKESPEARE = Path(__file__).resolve().parents[3] / "shared" / "data" / "tinyshakespeare.txt"


def metrics() -> dict[str, Any]:
    """Return the figures the trainer wrote."""
    found: dict[str, Any] = json.loads((demo_model_path() / "metrics.json").read_text())
    return found


def chats() -> list[str]:
    """Return the shipped passages."""
    return [passage["text"] for passage in read_passages(demo_model_path() / PASSAGES_FILE)]


@cache
def plays() -> list[str]:
    """Return the passages of the plays; empty where their text is not at hand."""
    if not SHAKESPEARE.exists():
        return []
    source = TextSource(SHAKESPEARE.read_text(), load_tokenizer(demo_model_path()), "shakespeare")
    return list(source.test_passages(metrics()["recipe"]["passage_tokens"]))


def passages() -> tuple[list[str], dict[str, float]]:
    """Return all passages that are at hand, and the trainer's figures for exactly these."""
    figures = metrics()
    return plays() + chats(), figures if plays() else figures["test_by_source"]["chat"]
