"""Options from flags and YAML: spelling, types, precedence, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.flags import Command, Parser, flags_of, given_values, read_yaml
from quire.config import SERVER_GROUPS, AcceptedOptions, EngineConfig
from quire.errors import ConfigError
from quire.options import option_fields

FLAGS = flags_of((*SERVER_GROUPS, AcceptedOptions))


def parse(*words: str) -> dict:
    parser = Parser()
    command = Command(run=lambda values: 0, flags=FLAGS, description="")
    command.add_parser(parser.add_subparsers(), "quire serve", "")
    return given_values(parser.parse_args(["serve", *words]), FLAGS)


def test_nothing_given_means_nothing_set():
    assert parse() == {}


def test_values_get_their_types():
    values = parse(
        *("folder", "--port", "9000", "--gpu-memory-utilization", "0.5", "--kv-cache-memory-bytes", "2GiB"),
        *("--no-enable-prefix-caching", "--hf-overrides", '{"a": {"b": 1}}', "--api-key", "x", "--api-key", "y"),
    )
    assert values == {
        "model": "folder",
        "port": 9000,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 2**31,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": {"b": 1}},
        "api_key": ["x", "y"],
    }
    assert EngineConfig.from_kwargs(groups=SERVER_GROUPS, **values).server.port == 9000


def test_every_option_has_a_flag_that_sets_it():
    samples = {int: "2", float: "0.5", str: "text", dict: "{}"}
    for flag in FLAGS:
        word = flag.details.choices[-1] if flag.details.choices else samples.get(flag.kind, "")
        word = {
            **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), "1"),
            "max_body_bytes": "2kib",
            **dict.fromkeys(("max_receiving_bytes", "max_file_bytes", "max_stored_file_bytes"), "2kib"),
            "engine_stall_timeout": "2.5",
            "front_stall_timeout": "2.5",
            **dict.fromkeys(("stored_response_ttl", "stored_file_ttl"), "1.5"),
        }.get(flag.name, word)
        words = [flag.option] if flag.kind is bool else [flag.option, word]
        assert set(parse(*words)) == {flag.name}


def write(folder: Path, text: str) -> str:
    path = folder / "options.yaml"
    path.write_text(text)
    return str(path)


def test_flags_override_yaml_and_yaml_overrides_defaults(tmp_path):
    config = write(tmp_path, "port: 9000\nmax-num-seqs: 8\nmax_model_len: 64\nkv-cache-memory-bytes: 1MiB\n")
    assert parse("--config", config, "--max-num-seqs", "4") == {
        "port": 9000,
        "max_num_seqs": 4,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**20,
    }


def test_an_empty_yaml_file_sets_nothing(tmp_path):
    assert parse("--config", write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1\n", ["unknown option prot", "did you mean port?"]),
        ("port: 99999\n", ["port", "99999", "at most 65535"]),
        ("port: '8000'\n", ["port", "integer"]),
        ("port: true\n", ["port", "integer"]),
        ("port: 1\nport: 2\n", ["port", "twice"]),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", ["max_num_seqs", "twice"]),
        ("dtype: banana\n", ["dtype", "banana"]),
        ("api_key: ''\n", ["api_key"]),
        ("enable_prefix_caching: 1\n", ["enable_prefix_caching", "true or false"]),
        ("- port\n", ["mapping"]),
        ("port: [\n", ["not valid YAML"]),
        ("!!python/object/apply:os.system ['true']\n", ["not valid YAML"]),
        ("1: 2\n", ["unknown option 1"]),
    ],
)
def test_mistakes_in_yaml_are_named_with_the_file(tmp_path, text, parts):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        parse("--config", path)
    for part in [path, *parts]:
        assert part in caught.value.message


def test_a_missing_yaml_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        parse("--config", str(tmp_path / "no.yaml"))


WORDS = st.text("abc01 :{}[]'\"-#\u00e9")
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(0, 65535),
        "model": st.text("abc/. \u00e9", min_size=1),
        "max_num_seqs": st.integers(1, 65536),
        "gpu_memory_utilization": st.floats(0.01, 1.0),
        "enable_prefix_caching": st.booleans(),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
        "api_key": st.lists(st.text("abc-\u00e9", min_size=1).filter(lambda key: key != "--"), min_size=1),
        "hf_overrides": st.dictionaries(WORDS, st.integers() | st.none() | WORDS),
    },
)


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_flags_and_yaml_mean_the_same(tmp_path_factory, values):
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag.removeprefix("--"))
        else:
            for item in value if isinstance(value, list) else [value]:
                words.append(f"{flag}={json.dumps(item) if isinstance(item, dict) else item}")
    path = tmp_path_factory.mktemp("yaml") / "options.yaml"
    path.write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")
    assert parse(*words) == values
    assert read_yaml(path, FLAGS) == values


def test_defaults_in_help_are_those_of_the_config():
    shown = {flag.name: flag.default for flag in FLAGS}
    assert shown == {item.name: item.default for item in option_fields((*SERVER_GROUPS, AcceptedOptions))}


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("-tp", "1", "-pp", "1"), {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
        (("--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"), {"dtype": "float16", "kv_cache_dtype": "fp8"}),
        (("--load-format", "bitsandbytes"), {"load_format": "auto"}),
        (
            ("--max-num-batched-tokens", "2K", "--max-model-len", "1.5k"),
            {"max_num_batched_tokens": 2048, "max_model_len": 1500},
        ),
        (
            ("folder", "--served-model-name", "a", "b", "--port", "1"),
            {"model": "folder", "served_model_name": ["a", "b"], "port": 1},
        ),
        (("--served-model-name", "a", "--served-model-name", "b"), {"served_model_name": ["a", "b"]}),
    ],
)
def test_recipes_of_vllm(words, values):
    assert parse(*words) == values


def test_a_seed_of_none_is_the_default():
    assert EngineConfig.from_kwargs(seed=None).model.seed == 0


def test_what_is_always_so_is_accepted_with_a_line_and_is_in_no_config(capsys):
    flags = ["--enable-chunked-prefill", "--trust-remote-code", "--uvicorn-log-level"]
    config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **parse(*flags, "info"))
    assert config == EngineConfig()
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split(":")[0] for line in lines) == flags


def test_what_is_always_so_cannot_be_turned_off():
    with pytest.raises(ConfigError, match=r"enable_chunked_prefill: .*it must be true: Chunked prefill is always on"):
        EngineConfig.from_kwargs(**parse("--no-enable-chunked-prefill"))


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--data-parallel-rank", ""),
        ("--sequence-parallel-size", ""),
        ("--max-seqs", "; did you mean --max-num-seqs?"),
        ("--gpu-mem-utilization", "; did you mean --gpu-memory-utilization?"),
    ],
)
def test_only_a_slip_is_corrected(flag, hint):
    with pytest.raises(ConfigError) as caught:
        parse(flag, "1")
    assert caught.value.message == f"unknown option {flag}{hint}"
