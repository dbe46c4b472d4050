"""`quire train`: options come from TrainConfig, missing packages are named, a run leaves a checkpoint."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from quire.cli.flags import Parser, given_values
from quire.cli.train import COMMAND, run, train_config
from quire.train.config import TrainConfig, config_from_preset


def parse(*words: str) -> dict[str, Any]:
    parser = Parser()
    COMMAND.add_parser(parser.add_subparsers(), "quire train", "")
    return given_values(parser.parse_args(["train", *words]), COMMAND.flags)


def test_no_options_give_the_defaults() -> None:
    assert train_config(parse()) == TrainConfig()


def test_every_field_can_be_set_and_only_that_one_changes() -> None:
    values = {"str": "char", "int": "7", "float": "0.25"}
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            words, expected = [flag], True
        else:
            word = "fp32" if field.name == "precision" else values[str(field.type).split(" ")[0]]
            words, expected = [flag, word], {"7": 7, "0.25": 0.25}.get(word, word)
        assert train_config(parse(*words)) == dataclasses.replace(TrainConfig(), **{field.name: expected})


def test_options_override_the_preset_whatever_the_order() -> None:
    expected = config_from_preset("shakespeare-char", steps=3)
    assert train_config(parse("--steps", "3", "--preset", "shakespeare-char")) == expected


def test_missing_packages_are_named_with_the_extra_that_brings_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert run(parse()) == 2
    assert capsys.readouterr().err == "quire train needs torch: pip install 'quire[train]'\n"


def test_building_the_parser_does_not_import_torch() -> None:
    code = "import sys, quire.cli.train, quire.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
