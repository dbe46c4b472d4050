"""The plan of a model against its parts, and refusals before anything is loaded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.plan import RUNTIME_BYTES, Plan, check_before_loading, make_plan
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError, ModelError
from tests.helpers.advice import advised
from tests.helpers.checkpoints import write_plain
from tests.meta.source import ENVIRONMENT

MIB = 2**20
LARGE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 20000, "hidden_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 2,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
SMALL_STEPS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "simd_level": "generic", "num_threads": 2}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with the config of a model of some 100 MiB, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return tmp_path


def plan_of(folder: Path, available: int = 2**30, lengths: tuple[int, ...] = (), **options: Any) -> Plan:
    asked = EngineConfig.from_kwargs(model=str(folder), **(SMALL_STEPS | options))
    return make_plan(asked, load_model_info(folder), available, lengths)


def test_a_folder_without_weights_is_planned_from_its_shapes(large: Path) -> None:
    plan = plan_of(large)
    assert (plan.has_weights, plan.on_disk, plan.problem) == (False, None, None)
    assert plan.in_memory["embeddings"] == plan.in_memory["head"] == 20000 * 512 * 4
    assert plan.in_memory["mlp"] == 2 * 3 * 512 * 1024 * 4
    assert plan.in_memory["attention"] == 2 * (512 * (512 + 128 + 128) + 512 * 512) * 4
    assert plan.in_memory["norms"] == 5 * 512 * 4
    assert plan.tables == 2048 * 64 * 4


def test_kv_bytes_follow_from_heads_layers_and_type(large: Path) -> None:
    assert plan_of(large).token_bytes == 2 * 2 * 2 * 64 * 4
    assert plan_of(large, kv_cache_dtype="int8").token_bytes == 2 * 2 * 2 * (64 + 4)
    assert plan_of(large, block_size=32).block_bytes == 32 * 2048


def test_weight_files_are_read_by_their_headers(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    plan = plan_of(folder)
    assert plan.on_disk is not None
    (file,) = folder.glob("*.safetensors")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert sum(plan.on_disk.values()) == file.stat().st_size - 8 - header
    assert plan.on_disk["unused"] == 0


def test_a_broken_weight_file_is_refused(tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match="truncated"):
        plan_of(folder)


def test_requests_are_counted_by_blocks(large: Path) -> None:
    plan = plan_of(large, num_gpu_blocks_override=256, max_num_seqs=16)
    assert [(entry.length, entry.blocks, entry.fit) for entry in plan.concurrency] == [(1024, 64, 4), (2048, 128, 2)]
    (entry,) = plan_of(large, lengths=(100,), num_gpu_blocks_override=256, max_num_seqs=16).concurrency
    assert (entry.blocks, entry.fit) == (7, 16)
    (entry,) = plan_of(large, lengths=(4096,)).concurrency
    assert entry.fit == 0
    assert plan.limit == "num_gpu_blocks_override"


def test_the_peak_is_the_sum_of_its_parts(large: Path) -> None:
    plan = plan_of(large, num_gpu_blocks_override=2048, swap_space=0)
    running = plan.weights + plan.tables + plan.step.total + 2048 * plan.block_bytes
    assert plan.peak == RUNTIME_BYTES + running


def test_memory_or_requests_limit_what_fits(large: Path) -> None:
    plenty = plan_of(large, 2**40)
    assert plenty.limit == "max_num_seqs x max_model_len"
    assert plenty.fit is not None
    assert plenty.fit.num_blocks == 4 * 128
    little = plan_of(large, RUNTIME_BYTES + 110 * MIB)
    assert little.limit == "memory"
    assert little.fit is not None
    blocks = (little.fit.num_blocks + little.fit.num_host_blocks) * little.block_bytes
    assert little.budget - 2 * little.block_bytes < blocks <= little.budget


@pytest.mark.parametrize(
    ("available", "options"),
    [
        (70 * MIB, {}),
        (37 * MIB, {}),
        (34 * MIB, {}),
        (37 * MIB, {"dtype": "bfloat16"}),
        (34 * MIB, {"max_num_seqs": 256}),
        (98 * MIB, {"max_num_batched_tokens": 2048, "max_num_seqs": 256}),
        (98 * MIB, {"max_model_len": 2048, "max_num_batched_tokens": 512}),
        (200 * MIB, {"kv_cache_memory_bytes": "4GiB"}),
    ],
)
def test_what_a_plan_advises_is_planned_without_a_problem(large: Path, available: int, options: dict[str, Any]) -> None:
    problem = plan_of(large, RUNTIME_BYTES + available, **options).problem
    assert problem is not None
    assert len(re.findall(r"\d+(?:\.\d+)? [GMK]iB", problem.partition("works: ")[0])) >= 2, problem
    plan = make_plan(advised(problem), load_model_info(large), RUNTIME_BYTES + available)
    assert plan.problem is None, f"{problem}\n{plan.problem}"


def test_where_no_form_of_the_weights_fits_a_smaller_model_is_advised(large: Path) -> None:
    problem = plan_of(large, RUNTIME_BYTES + 10 * MIB).problem
    assert problem is not None
    assert problem.endswith("a smaller model works: quire serve quire-demo")


def test_the_engine_refuses_before_it_loads(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.plan.available_memory", lambda: RUNTIME_BYTES + 70 * MIB)
    asked = EngineConfig.from_kwargs(model=str(large), **SMALL_STEPS)
    info = load_model_info(large)
    with pytest.raises(ConfigError, match=r"the weights need .* are available; .* this works: quire serve") as caught:
        check_before_loading(asked, info)
    fits = advised(caught.value.message)
    config = resolve_config(fits, info)
    assert check_before_loading(fits, info)(config) > 0


def test_planning_needs_neither_kernels_nor_torch(large: Path) -> None:
    code = (
        "import sys; from quire.cli.main import main; "
        f"assert main(['plan', '--json', {str(large)!r}]) == 0; "
        "print(sorted({'numba', 'llvmlite', 'torch', 'tokenizers', 'fastapi'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["weights"] > 0


def test_the_worked_example_of_the_docs_is_what_the_plan_says(large: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    config = text.partition("```json\n")[2].partition("```")[0]
    (large / "config.json").write_text(config)
    plan = plan_of(large, 8 * 2**30, max_num_seqs=256, max_num_batched_tokens=2048, simd_level="avx512-bf16-vnni")
    assert plan.fit is not None
    numbers = {
        "embeddings": plan.in_memory["embeddings"],
        "attention": plan.in_memory["attention"],
        "mlp": plan.in_memory["mlp"],
        "norms": plan.in_memory["norms"],
        "tables": plan.tables,
        "KV of a token": plan.token_bytes,
        "a block": plan.block_bytes,
        "activations": plan.step.activations,
        "inputs": plan.step.inputs,
        "sampling": plan.step.sampling,
        "programs": plan.step.programs,
        "threads": plan.step.threads,
        "budget": plan.budget,
        "blocks": plan.fit.num_blocks,
        "host blocks": plan.fit.num_host_blocks,
    }
    rows = dict(re.findall(r"^\| ([^|]+?) \|[^|]*\| ([\d ]+) \|$", text, re.MULTILINE))
    assert {name: int(value.replace(" ", "")) for name, value in rows.items()} == numbers
