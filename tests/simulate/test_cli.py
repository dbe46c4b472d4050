"""`quire simulate`: what it refuses, and what it prints."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable

import msgspec
import pytest

from quire.cli import main as cli_main
from quire.cli.output import write_json
from tests.simulate.test_cost import made_up_cost

LOAD = ["--synthetic", "poisson:rate=50,num=20,prompt=100,output=10"]
ROOFLINE = ["--cost-model", "roofline:bandwidth=20,gflops=500,memory=1"]


@pytest.fixture
def quire(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = cli_main.main(["simulate", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to replay"),
        (LOAD, "cost_model: say how long steps take"),
        ([*LOAD, "--trace", "x.jsonl", *ROOFLINE], "give either --trace FILE or --synthetic LOAD"),
        (["--trace", "none.jsonl", *ROOFLINE], "cannot read 'none.jsonl'"),
        ([*LOAD, "--cost-model", "none.json"], "cannot read 'none.json'"),
        ([*LOAD, *ROOFLINE, "--save", "x.json"], "save needs calibrate"),
        ([*LOAD, "--calibrate"], "calibrate contradicts trace, synthetic and cost_model"),
        ([*LOAD, *ROOFLINE, "--time-scale", "0"], "--time-scale"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_in_one_line(quire, words, message):
    code, out, err = quire(*words)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_the_table_names_what_was_asked(quire):
    code, out, err = quire(*LOAD, *ROOFLINE, "--slo-ttft", "500", "--waste")
    assert code == 0
    assert out.startswith("20 of 20 requests completed in ")
    for words in ("time to first token", "within the limits", "KV blocks in use", "contiguous", "paged, shared"):
        assert words in out
    assert "simulated in" in err and "simulated in" not in out


def test_json_and_csv_agree(quire, tmp_path):
    code, out, _ = quire(*LOAD, *ROOFLINE, "--json", "--output", str(tmp_path / "out.csv"), "--waste")
    assert code == 0
    result = json.loads(out)
    with (tmp_path / "out.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    ttft = [float(row["first_token"]) - float(row["arrival"]) for row in rows]
    assert result["completed"] == len(rows) == 20
    assert result["ttft"]["mean"] == pytest.approx(sum(ttft) / 20, abs=1e-5)
    assert set(result["waste"]) == {"contiguous", "power of two", "paged", "paged, shared"}


def test_a_fitted_cost_model_is_read_and_other_types_are_pointed_out(quire, tmp_path, caplog):
    write_json(tmp_path / "cost.json", msgspec.to_builtins(made_up_cost()), "save")
    code, out, _ = quire(*LOAD, "--cost-model", str(tmp_path / "cost.json"), "--json")
    assert code == 0
    assert json.loads(out)["new_shapes"] > 0
    assert "was measured with dtype float32, not bfloat16" in caplog.text


def test_a_context_is_as_long_as_the_trace_needs(quire):
    code, out, _ = quire(
        "--synthetic", "burst:num=1,prompt=5000,output=5", *ROOFLINE, "--json", "--kv-cache-memory-bytes", "1GiB"
    )
    assert code == 0
    result = json.loads(out)
    assert (result["completed"], result["max_model_len"]) == (1, 5005)
