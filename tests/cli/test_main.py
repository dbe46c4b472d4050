"""Bad command lines: one line on standard error, exit code 2, nothing heavy imported."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli import main as cli_main
from quire.cli import serve
from quire.errors import EngineDeadError, ModelError
from tests.meta.source import ENVIRONMENT

HEAVY = ("torch", "numba", "numpy", "fastapi", "uvicorn", "zmq", "tokenizers", "transformers", "rich", "yaml")

BAD_FLAGS = [
    (["--port", "99999"], ["--port", "99999", "65535"]),
    (["--port", "-1"], ["--port", "-1"]),
    (["--port", "abc"], ["--port", "'abc'", "integer"]),
    (["--port"], ["--port", "expected"]),
    (["--port", "1", "--port", "2"], ["--port", "more than once"]),
    (["--port=1", "--port=8000"], ["--port", "more than once"]),
    (["--host", "192.0.2.1"], ["192.0.2.1:8000"]),
    (["--host", "no.such.host.invalid"], ["no.such.host.invalid"]),
    (["--max-model-len", "0"], ["--max-model-len", "at least 1"]),
    (["--max-model-len", "-1"], ["--max-model-len", "at least 1"]),
    (["--max-num-seqs", "0"], ["--max-num-seqs", "at least 1"]),
    (["--max-num-seqs", "1e3"], ["--max-num-seqs", "integer"]),
    (["--dtype", "banana"], ["--dtype", "banana", "bfloat16"]),
    (["--tensor-parallel-size", "3"], ["--tensor-parallel-size", "3"]),
    (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "at most 1"]),
    (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "nan"]),
    (["--kv-cache-memory-bytes", "1XB"], ["--kv-cache-memory-bytes", "1XB"]),
    (["--kv-cache-memory-bytes", "1GiB", "--num-gpu-blocks-override", "3"], ["contradicts"]),
    (["--api-key", ""], ["--api-key", "non-empty"]),
    (["--api-key=--"], ["--api-key", "'--'"]),
    (["--model", ""], ["--model", "non-empty"]),
    (["--hf-overrides", "{"], ["--hf-overrides", "JSON"]),
    (["--hf-overrides", "[1]"], ["--hf-overrides", "JSON object"]),
    (["--unknown-flag"], ["--unknown-flag"]),
    (["--max-model-length", "7"], ["--max-model-length", "did you mean --max-model-len?"]),
    (["--max-model", "7"], ["unknown option --max-model"]),
    (["--evil\x1b[31m"], ["\\x1b"]),
    (["one", "two"], ["unexpected argument 'two'"]),
    (["one", "--model", "two"], ["twice"]),
    (["--served-model-name", "a", "--served-model-name", "a"], ["'a'", "twice"]),
    (["--enable-prefix-caching", "--no-enable-prefix-caching"], ["more than once"]),
    (["--no-port"], ["unknown option --no-port"]),
    (["--ssl-certfile", "cert.pem"], ["ssl_keyfile"]),
    (["--ssl-certfile", "no.pem", "--ssl-keyfile", "no.key"], ["no.pem", "does not exist"]),
    (["--chat-template", "no.jinja"], ["no.jinja", "does not exist"]),
]


@pytest.mark.parametrize(("flags", "parts"), BAD_FLAGS, ids=lambda value: " ".join(value) if value else "")
def test_bad_serve_flags_are_refused_in_one_line(quire, flags, parts):
    result = quire("serve", *flags)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert result.err.rstrip("\n").isprintable()
    for part in parts:
        assert part in result.err


def test_a_certificate_that_is_none_is_refused(quire, tmp_path: Path):
    path = tmp_path / "cert.pem"
    path.write_text("hello\n")
    result = quire("serve", "--ssl-certfile", str(path), "--ssl-keyfile", str(path))
    assert result.code == 2
    assert str(path) in result.err and result.err.count("\n") == 1


def test_a_secret_is_not_repeated_in_an_error(quire, tmp_path: Path):
    config = tmp_path / "serve.yaml"
    config.write_text("api_key: [hunter2, '']\n")
    assert "hunter2" not in quire("serve", "--config", str(config)).err


def test_a_port_in_use_is_reported_before_the_model_loads(quire):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = quire("serve", "--port", str(port))
    assert result.code == 98
    assert result.err == f"error: address already in use: 127.0.0.1:{port}\n"


def test_nothing_heavy_is_imported_before_arguments_are_checked():
    commands = [
        *("--version", "--help", "generate --temperature 3", "generate --help", "chat --help"),
        *("bench throughput --num-prompts 0", "bench serve --help", "serve --port abc", "serve --host 192.0.2.1"),
        "serve --help",
    ]
    code = f"""
import sys
from quire.cli.main import main
for command in {commands!r}:
    try:
        main(command.split())
    except SystemExit:
        pass
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    if heavy:
        sys.exit(f"HEAVY: {{command}} imports {{heavy}}")
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "HEAVY" not in done.stderr, done.stderr


def test_the_commands_are_listed(quire, capsys):
    with pytest.raises(SystemExit) as leaving:
        quire("--help")
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name in ("serve", "chat", "generate", "bench", "train"):
        assert name in shown


def test_no_command_shows_help_and_fails(quire):
    result = quire()
    assert result.code == 2
    assert "usage: quire" in result.err


def test_an_unknown_command_names_the_nearest(quire):
    result = quire("serv")
    assert (result.code, result.err) == (2, "error: unknown command serv; did you mean serve?\n")


def _fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(values: object) -> int:
        raise error

    monkeypatch.setattr("quire.cli.serve.COMMAND", dataclasses.replace(serve.COMMAND, run=run))


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ModelError("model.safetensors: is cut short"), 2, "error: model.safetensors: is cut short\n"),
        (EngineDeadError("two\nlines"), 70, "error: two lines\n"),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oops"), 1, "error: unexpected ZeroDivisionError: oops; --debug shows where\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_has_an_exit_code_and_at_most_one_line(quire, monkeypatch, error, code, shown):
    _fail_with(monkeypatch, error)
    result = quire("serve")
    assert (result.code, result.err) == (code, shown)


@pytest.mark.parametrize("words", [["--debug", "serve"], ["serve", "--debug"]], ids=" ".join)
def test_debug_shows_the_traceback(quire, monkeypatch, words):
    _fail_with(monkeypatch, ModelError("bad"))
    result = quire(*words)
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.endswith("error: bad\n")


def test_a_reader_that_went_away_is_no_error():
    code = "from quire.cli import main; import sys; main.COMMANDS and sys.exit(main.main(['--help']))"
    done = subprocess.run(
        f"{sys.executable} -c {code!r} | true", shell=True, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", cli_main.COMMANDS)
def test_every_command_explains_itself_and_refuses_unknown_flags(quire, capsys, name):
    with pytest.raises(SystemExit) as leaving:
        quire(name, "--help")
    assert leaving.value.code == 0
    assert f"usage: quire {name}" in capsys.readouterr().out
    result = quire(name, "--no-such-flag")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def test_control_characters_of_a_model_do_not_reach_the_terminal(monkeypatch, capsys):
    def fail(words: list[str]) -> int:
        raise ModelError("a\nb \x1b[31m \u2028 " + "x" * 10_000)

    monkeypatch.setattr(cli_main, "_run", fail)
    assert cli_main.main([]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: a b \\x1b[31m \\u2028 xxx") and line.endswith("x...\n")
    assert len(line) < 5000 and line.count("\n") == 1


CODE = "open({mark!r}, 'w').close()"


@pytest.mark.parametrize("module", ["quire", "quire.child_process"])
def test_modules_of_the_current_directory_are_not_imported(tmp_path, module):
    """It may be the model's folder."""
    mark = tmp_path / "EXECUTED"
    for name in ("json", "numpy", "tokenizers", "msgspec", "logging", "argparse"):
        (tmp_path / f"{name}.py").write_text(CODE.format(mark=str(mark)))
    if module == "quire":
        command = [sys.executable, "-m", module, "generate", "--model", ".", "--prompt", "x"]
    else:
        start = "from quire.child_process import start_module; start_module('quire.engine.process', stdin=-3).wait()"
        command = [sys.executable, "-P", "-c", start]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert not mark.exists()
    if module == "quire":
        assert done.returncode == 2 and "config.json is missing" in done.stderr
    else:
        assert "JSONDecodeError" in done.stderr  # it was started, with no options
