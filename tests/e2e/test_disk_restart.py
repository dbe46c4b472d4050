"""The disk tier: a prompt that was computed before the engine ended is read by the next one, and says the same.

"The next one" is an engine in a process of its own where that could matter, and otherwise one in this process.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from tests.helpers.checkpoints import plain_tensors, write_plain

ROOT = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
LENGTH = 330
COVERED = (LENGTH - 1) // BLOCK_SIZE * BLOCK_SIZE  # whole blocks, and a token is left to compute
PARAMS = {"temperature": 0.0, "max_tokens": 24, "logprobs": 3, "ignore_eos": True}

CHILD = """
import json, os, signal, sys
from quire import LLM, SamplingParams

given = json.loads(sys.argv[1])
llm = LLM(**given["options"])
prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
outputs = [llm.generate(prompt, SamplingParams(**given["params"]), use_tqdm=False)[0] for prompt in prompts]
told = [
    [output.num_cached_tokens, output.outputs[0].token_ids,
     [[(token, entry.logprob) for token, entry in place.items()] for place in output.outputs[0].logprobs]]
    for output in outputs
]
print(json.dumps(told), flush=True)
llm.llm_engine.core.executor.worker.runner.transfers.flush()  # what is under way to the disk gets there in a moment
os.kill(os.getpid(), signal.SIGKILL)
"""


def prompt_of(start: int, length: int = LENGTH) -> list[int]:
    """Return a prompt of the demo model's ordinary tokens."""
    return [(start + 37 * index + index * index) % 800 + 100 for index in range(length)]


def options_of(disk: Path | None, **more: Any) -> dict[str, Any]:
    """Return options for few device blocks, no host blocks, and a disk tier in `disk`."""
    tier = {} if disk is None else {"kv_disk_space": "256MiB", "kv_disk_dir": str(disk)}
    return {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": 30, "swap_space": 0, "device": "cpu", **tier, **more}


Said = tuple[list[int], list[list[tuple[int, float]]]]


def said(output: RequestOutput) -> Said:
    """Return tokens and log-probabilities."""
    item = output.outputs[0]
    assert item.logprobs is not None
    return item.token_ids, [[(token, entry.logprob) for token, entry in place.items()] for place in item.logprobs]


def here(prompts: list[list[int]], disk: Path | None, **options: Any) -> list[tuple[int, Said]]:
    """Run prompts one after the other on an engine in this process: cached tokens, and what was said."""
    with LLM(**options_of(disk, **options)) as llm:
        outputs = [
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(**PARAMS), use_tqdm=False)[0]
            for prompt in prompts
        ]
    return [(output.num_cached_tokens, said(output)) for output in outputs]


def elsewhere(prompts: list[list[int]], disk: Path) -> list[tuple[int, Said]]:
    """Do the same in a process of its own, which is killed at once when it has spoken."""
    given = {"options": options_of(disk), "params": PARAMS, "prompts": prompts}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(given)],
        cwd=ROOT / "src",
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    return [
        (cached, (tokens, [[(token, value) for token, value in place] for place in logprobs]))
        for cached, tokens, logprobs in json.loads(done.stdout)
    ]


@pytest.fixture(scope="module")
def cold() -> Said:
    """What the prompt gives without a disk tier."""
    [(cached, expected)] = here([prompt_of(0)], None)
    assert cached == 0
    return expected


def damage(disk: Path, number: int) -> None:
    """Turn over a bit of block `number` of the prompt; blocks are saved in the order in which they come to be known."""
    stores = [path for path in disk.iterdir() if path.is_dir()]
    assert len(stores) == 1
    stride = store_stride(stores[0])
    with (stores[0] / "blocks").open("r+b") as file:
        file.seek(number * stride + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))


def store_stride(store: Path) -> int:
    """Return the distance of two blocks in a store's file: their bytes, rounded up to 4 KiB."""
    return -(-json.loads((store / "meta").read_text())["block_nbytes"] // 4096) * 4096


def test_another_process_reads_what_one_has_computed_that_was_killed(tmp_path: Path, cold: Said) -> None:
    """Finished prompts are written while the engine goes on, not when it ends, which it may never do in order."""
    killed = elsewhere([prompt_of(0), prompt_of(1, 60)], tmp_path)
    assert killed[0] == (0, cold)
    # What one has said is there as well: the conversation goes on.
    second_turn = [*prompt_of(0), *cold[0], 300, 301]
    again, other, (cached, _) = here([prompt_of(0), prompt_of(2), second_turn], tmp_path)
    assert again == (COVERED, cold)
    assert other[0] == 0
    assert cached == (LENGTH + len(cold[0]) - 1) // BLOCK_SIZE * BLOCK_SIZE > COVERED


def test_damaged_blocks_are_computed_again(tmp_path: Path, cold: Said) -> None:
    here([prompt_of(0)], tmp_path)
    for number in (0, 7, 15):
        damage(tmp_path, number)
    [(cached, again)] = here([prompt_of(0)], tmp_path)
    assert again == cold
    assert cached < COVERED
    assert here([prompt_of(0)], tmp_path) == [(COVERED, cold)]


def test_another_model_shares_nothing(tmp_path: Path, cold: Said) -> None:
    here([prompt_of(0)], tmp_path)
    for change in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}, {"block_size": 8}):
        more = {"num_gpu_blocks_override": 60} if "block_size" in change else {}
        [(cached, _)] = here([prompt_of(0)], tmp_path, **change, **more)
        assert cached == 0
    assert here([prompt_of(0)], tmp_path) == [(COVERED, cold)]


def test_a_model_with_one_other_weight_shares_nothing(tmp_path: Path) -> None:
    """Same shapes, same config, same folder and file names: only the bytes of the weights tell them apart."""
    disk, model = tmp_path / "kv", tmp_path / "model"
    model.mkdir()
    tensors = plain_tensors()
    options: dict[str, Any] = {"model": str(model), "skip_tokenizer_init": True}
    prompt = [index % 150 + 5 for index in range(100)]
    write_plain(model, tensors)
    [(cached, first)] = here([prompt], disk, **options)
    assert cached == 0
    tensors["model.layers.0.self_attn.k_proj.weight"] = changed = tensors[
        "model.layers.0.self_attn.k_proj.weight"
    ].copy()
    changed[3, 4] = np.nextafter(changed[3, 4], np.float32(1))
    write_plain(model, tensors)
    [(cached, _)] = here([prompt], disk, **options)
    assert cached == 0
    write_plain(model, plain_tensors())
    assert here([prompt], disk, **options) == [(96, first)]


@pytest.mark.slow
def test_a_folder_too_small_for_everything_keeps_what_was_used_last(tmp_path: Path) -> None:
    """Room for one prompt and a half: the older one is only partly there, and nothing that is read is wrong."""
    prompts = [prompt_of(number, 400) for number in range(2)]
    expected = [item for _, item in here(prompts, None)]
    small = {"kv_disk_space": "1500KiB"}
    here(prompts, tmp_path, **small)
    found = []
    for number in (1, 1, 0, 0, 1):
        [(cached, item)] = here([prompts[number]], tmp_path, **small)
        assert item == expected[number]
        found.append(cached)
    assert found[1] == found[3] == 384  # whole, where it was the last one
    assert found[2] < 384 > found[4]


def test_a_reset_erases_the_disk_too(tmp_path: Path, cold: Said) -> None:
    with LLM(**options_of(tmp_path)) as llm:
        run = [{"prompt_token_ids": prompt_of(0)}]
        llm.generate(run, SamplingParams(max_tokens=4), use_tqdm=False)
        llm.reset_prefix_cache()
    [(num_cached, again)] = here([prompt_of(0)], tmp_path)
    assert (num_cached, again) == (0, cold)
