"""`quire plan`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.advice import advised

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "eos_token_id": 999, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
    "use_sliding_window": True, "sliding_window": 256, "max_window_layers": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model folder without weights, two of whose four layers have a window."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_demo_is_planned_with_its_weights(quire):
    result = quire("plan")
    assert (result.code, result.err) == (0, "")
    for words in ("on disk", "embeddings", "left for KV blocks", "longest request", "limited by", "num_blocks="):
        assert words in result.out


def test_json_has_the_same_numbers(quire, folder):
    result = quire("plan", folder, "--memory", "4GiB", "--json")
    plan = json.loads(result.out)
    assert result.code == 0
    assert plan["available"] == 4 * 2**30
    assert plan["weights"] == sum(plan["in_memory"].values())
    assert plan["settings"]["max_model_len"] == plan["fit"]["max_model_len"] == 8192
    assert [entry["length"] for entry in plan["concurrency"]] == [1024, 4096, 8192]
    assert f"{plan['fit']['num_blocks']}," in quire("plan", folder, "--memory", "4GiB").out


def test_a_folder_without_weights_is_said_to_be_one_and_groups_are_shown(quire, folder):
    out = quire("plan", folder, "--memory", "4GiB").out
    assert "No weights are read" in out
    assert "a window of 256 tokens" in out
    assert "the whole context" in out


def test_requests_of_a_given_length_are_counted(quire, folder):
    out = quire("plan", folder, "--memory", "4GiB", "--request-len", "777").out
    assert "requests of 777" in out
    assert "requests of 1024" not in out


def test_what_does_not_fit_ends_with_1_and_a_command_that_is_planned_without_a_problem(quire, folder):
    result = quire("plan", folder, "--memory", "240MiB", "--max-model-len", "8192", "--kv-cache-memory-bytes", "64KiB")
    assert result.code == 1
    last = result.out.strip().splitlines()[-1]
    assert last.startswith("It does not fit. ")
    words = last.rpartition("quire serve ")[2].split()
    assert advised(last).model.model == folder
    assert quire("plan", *words, "--memory", "240MiB").code == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--memory", "x"], "--memory"),
        (["--request-len", "0"], "at least 1"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["no-such/folder/here"], "no-such/folder/here"),
    ],
)
def test_bad_flags_are_refused_in_one_line(quire, flags, part):
    result = quire("plan", *flags)
    assert result.code == 2
    assert result.out == ""
    assert part in result.err
    assert result.err.count("\n") == 1


def test_layers_on_the_host_are_part_of_a_plan_for_a_gpu(quire, tmp_path):
    config = {**CONFIG, "use_sliding_window": False, "num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--device", "cuda", "--memory", "1600MiB", "--kv-resident-layers", "2", "--swap-space", "200MiB"]
    result = quire("plan", str(tmp_path), *flags)
    assert (result.code, result.err) == (0, "")
    plan = json.loads(quire("plan", str(tmp_path), *flags, "--json").out)
    layerwise, blocks = plan["fit"]["num_thin_blocks"], plan["fit"]["num_blocks"]
    assert f"{blocks}: {blocks - layerwise} resident, " in result.out
    assert f"and {layerwise} layer-wise offloaded, " in result.out
    assert layerwise * plan["thin_host_bytes"] <= 200 * 2**20 < (layerwise + 1) * plan["thin_host_bytes"]
    assert "200 MiB of layers of these" in result.out
    assert "swapped out" not in result.out
    refused = quire("plan", str(tmp_path), *flags[:5], "10")
    assert refused.code == 1
    assert "kv_resident_layers: 10 is not possible: this model has 12 attention layers" in refused.out
