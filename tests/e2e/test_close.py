"""`with LLM(...)` gives everything back: memory, threads, and the right to start again."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from quire import LLM, SamplingParams


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's process files")
def test_engines_opened_and_closed_leave_nothing_behind() -> None:
    def once() -> tuple[list[int], int, int]:
        others = set(threading.enumerate())
        with LLM(device="cpu", num_gpu_blocks_override=2000) as llm:
            prompt = {"prompt_token_ids": [1, *range(100, 400)]}
            output = llm.generate([prompt] * 4, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0]
        gc.collect()
        for thread in set(threading.enumerate()) - others:
            thread.join(5)  # those of the kernels have been told to end, and do so in a moment
        return output.outputs[0].token_ids, resident_kib(), len(os.listdir("/proc/self/task"))

    for _ in range(4):
        once()  # compiled kernels stay
    tokens, before, threads = once()
    grown = []
    for _ in range(3):  # a leak would show each time; what the allocator takes for good now and then, does not
        for _ in range(6):
            again, now, tasks = once()
            assert (again, tasks) == (tokens, threads)
        grown.append(now - before)
        if grown[-1] < 8 * 1024:
            return
        before = now
    raise AssertionError(f"an engine here takes some 10 MiB, and six of them left {grown} KiB")
