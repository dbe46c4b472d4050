"""Logits processors for tests of whole engines, which are told of them by module and attribute."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np


def only(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Callable[[np.ndarray, np.ndarray], Any]:
    """Allow the tokens in `args["ids"]`; every `args["every"]`-th time, only the first of them. "fail": raise."""

    def process(output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if args.get("fail"):
            raise RuntimeError("asked to fail")
        ids = args["ids"]
        if "every" in args and len(output_ids) % args["every"] == 0:
            ids = ids[:1]
        kept = np.full_like(logits, -np.inf)
        kept[ids] = logits[ids]
        return kept

    return process


def killer(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Callable[[np.ndarray, np.ndarray], Any]:
    """Kill the engine's process as soon as there are `args["after"]` tokens."""

    def process(output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        if len(output_ids) >= args["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return logits

    return process
