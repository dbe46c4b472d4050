"""The file of `quire serve --models`: what stands there is checked as flags are, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.cli.serve import check_room, read_entries, with_environment
from quire.errors import ConfigError

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(text: str) -> Path:
        path = tmp_path / "models.yaml"
        path.write_text(text)
        return path

    return put


def test_each_entry_has_options_of_its_own_over_those_of_the_command_line(write: Write) -> None:
    path = write(
        """
        - model: quire-demo
          served-model-name: small
          kv_cache_memory_bytes: 512MiB
          pinned: true
        - model: org/large
          served_model_name: [large, gpt-4o]
          quantization: int8
          max_num_seqs: 4
        - {model: org/other, load: start}
        - {model: org/pinned, load: demand, pinned: true}
        """
    )
    entries = read_entries(path, {"max_num_seqs": 8, "port": 9000})
    assert [entry.names for entry in entries] == [["small"], ["large", "gpt-4o"], ["org/other"], ["org/pinned"]]
    assert [entry.config.scheduler.max_num_seqs for entry in entries] == [8, 4, 8, 8]
    assert [entry.config.server.port for entry in entries] == [9000] * 4
    assert entries[0].config.cache.kv_cache_memory_bytes == 512 * 2**20
    assert entries[1].config.model.quantization == "int8"
    assert [(entry.pinned, entry.at_start) for entry in entries] == [
        (True, True),
        (False, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["must hold a list of models"]),
        ("model: quire-demo", ["must hold a list of models"]),
        ("[]", ["must hold a list of models"]),
        ("- quire-demo", ["entry 1", "must be a mapping"]),
        ("- {model: a}\n- {served_model_name: b}", ["entry 2 (b)", "model is missing"]),
        ("- {model: a, max_num_seq: 4}", ["entry 1 (a)", "unknown option max_num_seq", "did you mean max_num_seqs?"]),
        ("- {model: a, pined: true}", ["entry 1 (a)", "did you mean pinned?"]),
        ("- {model: a, max_num_seqs: 0}", ["entry 1 (a)", "max_num_seqs", "at least 1"]),
        ("- {model: a, max_num_seqs: many}", ["entry 1 (a)", "max_num_seqs", "an integer"]),
        ("- {model: a, load: later}", ["entry 1 (a)", "load", "one of start, demand"]),
        ("- {model: a, pinned: 1}", ["entry 1 (a)", "pinned", "true or false"]),
        ("- {model: a, port: 80}", ["entry 1 (a)", "port is an option of the server"]),
        ("- {model: a, api-key: x}", ["entry 1 (a)", "api_key is an option of the server"]),
        ("- {model: a, model: b}", ["model is given twice"]),
        ("- {model: a, max-num-seqs: 1, max_num_seqs: 2}", ["entry 1 (a)", "max_num_seqs is given twice"]),
        ("- {model: a, kv_disk_dir: x}", ["entry 1 (a)", "kv_disk_dir needs kv_disk_space"]),
        ("- {model: a}\n- {model: b, served_model_name: a}", ["entries 1 and 2 are both called a"]),
        ("- {model: a}\n- {model: a}", ["entries 1 and 2 are both called a"]),
        ("- {model: a, served_model_name: [x, x]}", ["entry 1", "twice"]),
        ("- {model: a", ["not valid YAML"]),
        ("- !!python/object/apply:os.system [ls]", ["not valid YAML"]),
    ],
)
def test_mistakes_are_named_with_entry_and_option(write: Write, text: str, words: list[str]) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_entries(path, {})
    assert [word for word in (str(path), *words) if word not in caught.value.message] == []
    assert caught.value.exit_code == 2


def test_two_folders_of_one_name_are_told_apart_only_by_other_names(write: Write, tmp_path: Path) -> None:
    folders = [tmp_path / "x" / "model", tmp_path / "y" / "model"]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="both called model"):
        read_entries(write("".join(f"- model: {folder}\n" for folder in folders)), {})
    named = write(f"- model: {folders[0]}\n- {{model: {folders[1]}, served_model_name: second}}\n")
    assert [entry.names for entry in read_entries(named, {})] == [["model"], ["second"]]


@pytest.mark.parametrize("name", ["model", "served_model_name"])
def test_the_command_line_names_no_model_beside_it(write: Write, name: str) -> None:
    with pytest.raises(ConfigError, match=f"models contradicts {name}"):
        read_entries(write("- model: a"), {name: "b"})


@pytest.mark.parametrize(
    ("text", "most", "words"),
    [
        ("- {model: a, pinned: true}\n- {model: b, load: start}\n- {model: c}", 1, "2 models are pinned or loaded"),
        ("- {model: a, pinned: true}\n- {model: b}", 1, "the other 1 could never be loaded"),
        ("- {model: a, pinned: true}\n- {model: b}", 2, None),
        ("- {model: a, pinned: true}\n- {model: b, pinned: true}", None, None),
    ],
)
def test_those_that_must_stay_must_leave_room(write: Write, text: str, most: int | None, words: str | None) -> None:
    path = write(text)
    options: dict[str, Any] = {"models": str(path), "max_loaded_models": most}
    entries = read_entries(path, options)
    if words is None:
        check_room(path, entries)
    else:
        with pytest.raises(ConfigError, match=words):
            check_room(path, entries)


def test_the_command_ends_with_code_2_and_one_line(quire: Callable[..., Any], write: Write) -> None:
    assert quire("plan", "--models", "models.yaml").code == 2
    for words in (
        ("--models", str(write("- {model: a, max_num_seq: 4}"))),
        ("--models", "no-such-file.yaml"),
        ("quire-demo", "--models", str(write("- {model: a}"))),
        ("--max-loaded-models", "2"),
        ("--models", str(write("- {model: a, chat_template: no-such-file}"))),
    ):
        run = quire("serve", *words)
        assert run.code == 2, words
        assert len(run.err.strip().splitlines()) == 1
        assert "Traceback" not in run.err


def test_a_data_dir_that_cannot_be_used_is_known_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["serve", "--data-dir", str(tmp_path / "file")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "data_dir" in line or "--data-dir" in line


def test_the_key_of_vllm_is_one_unless_there_are_others(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    assert with_environment({}) == {"api_key": ["s3cret"]}
    lines = capsys.readouterr().err
    assert "VLLM_API_KEY is set: it is this server's API key" in lines and "s3cret" not in lines
    assert "VLLM_USE_V1 is set, and changes nothing here" in lines
    for values in ({"api_key": ["other"]}, {"api_key_file": "keys"}):
        assert with_environment(values) == values


def test_the_profiler_folder_of_vllm_is_one_unless_there_is_another(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/traces")
    assert with_environment({}) == {"profiler_dir": "/traces"}
    assert capsys.readouterr().err == "VLLM_TORCH_PROFILER_DIR is set: it is --profiler-dir\n"
    assert with_environment({"profiler_dir": "other"}) == {"profiler_dir": "other"}


def test_a_profiler_folder_that_cannot_be_written_is_one_line_and_2(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").touch()
    assert main(["serve", "--profiler-dir", str(tmp_path / "file" / "below")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "profiler_dir" in line or "--profiler-dir" in line


@pytest.mark.parametrize("model", ["/nothing/here", "./absent.gguf", "~/absent:Q4_K_M"])
def test_a_path_with_nothing_there_is_refused_before_the_server_listens(model: str, capfd: Any) -> None:
    assert main(["serve", model, "--port", "0"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == f"error: '{model}': no such file or folder\n"


def test_an_empty_key_of_vllm_opens_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "error: VLLM_API_KEY is empty; unset it, or give --api-key\n"


def test_a_model_after_several_names_is_not_one_of_them(tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", "--served-model-name", "a", "b", str(tmp_path)]) == 2
    assert "give it before --served-model-name" in capsys.readouterr().err
