"""The commands with the real engine and the built-in model."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.cli import main as cli_main
from tests.meta.source import ENVIRONMENT


def test_generate_is_repeatable_and_streams_what_it_would_store(quire):
    words = ("generate", "--prompt", "The king said", "--temperature", "0", "--max-tokens", "12")
    first = quire(*words)
    assert first.code == 0, first.err
    assert quire(*words).out == first.out
    (stored,) = [json.loads(line) for line in quire(*words, "--logprobs", "2").out.splitlines()]
    assert stored["outputs"][0]["text"] + "\n" == first.out
    assert stored["usage"]["completion_tokens"] == len(stored["outputs"][0]["logprobs"])


def test_a_prompt_that_does_not_fit_fails_alone(quire, type_in):
    type_in("The king", "word " * 5000, "The queen")
    result = quire("generate", "--max-tokens", "3")
    assert result.code == 1
    first, second, third = [json.loads(line) for line in result.out.splitlines()]
    assert second["error"]["code"] == "context_length_exceeded"
    assert first["outputs"][0]["finish_reason"] == third["outputs"][0]["finish_reason"] == "length"


def test_long_prompts_wait_unless_a_limit_was_given(quire, type_in):
    """Two of them together are more tokens than the queue of a server of this size takes."""
    words = ("generate", "--max-tokens", "2", "--max-num-seqs", "1", "--max-num-batched-tokens", "32")
    lines = [f"{number} " + "word " * 80 for number in range(4)]
    type_in(*lines)
    assert quire(*words).code == 0
    type_in(*lines)
    limited = quire(*words, "--max-num-queued-tokens", "10")
    assert limited.code == 1
    results = [json.loads(line) for line in limited.out.splitlines()]
    assert len(results) == 4 and "outputs" in results[0]
    assert {item["error"]["code"] for item in results if "error" in item} == {"engine_overloaded"}


@contextlib.contextmanager
def ascii_streams(monkeypatch: pytest.MonkeyPatch, data: bytes) -> Iterator[io.BytesIO]:
    """Replace standard input and output by streams in ASCII, as a C locale makes them; yield what is written."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
    with io.TextIOWrapper(written, encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        yield written
        stdout.flush()
        monkeypatch.undo()


def test_a_terminal_without_unicode_gets_question_marks(monkeypatch):
    with ascii_streams(monkeypatch, b"") as written:
        monkeypatch.setattr(cli_main, "_run", lambda words: print("\xe9") or 0)
        assert cli_main.main([]) == 0
        sys.stdout.flush()
        assert written.getvalue() == b"?\n"


def test_input_and_output_are_utf8_whatever_the_locale(monkeypatch, capsys):
    with ascii_streams(monkeypatch, "caf\u00e9\n".encode()) as written:
        assert cli_main.main(["generate", "--max-tokens", "1"]) == 0
        assert json.loads(written.getvalue())["prompt"] == "caf\u00e9"
    with ascii_streams(monkeypatch, b"\xff\xfe\n"):
        assert cli_main.main(["generate", "--max-tokens", "1"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: standard input is not UTF-8 text") and errors.count("\n") == 1


def test_chat_answers_each_line(quire, type_in):
    type_in("Hello!", "What is Quire?")
    result = quire("chat", "--temperature", "0")
    assert result.code == 0, result.err
    assert len(result.out.splitlines()) >= 2


def test_options_that_the_model_cannot_honour_end_with_code_2(quire):
    result = quire("generate", "--prompt", "x", "--max-model-len", "999999")
    assert result.code == 2
    assert result.err.startswith("error: max_model_len: 999999")


def test_a_folder_that_is_no_model_ends_with_code_2(quire, tmp_path):
    result = quire("serve", str(tmp_path), "--port", "0")
    assert result.code == 2
    assert "config.json" in result.err.splitlines()[-1]


def test_benchmarks_run(quire):
    size = ("--input-len", "8", "--output-len", "2")
    latency = quire("bench", "latency", *size, "--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "0")
    assert latency.code == 0, latency.err
    throughput = quire("bench", "throughput", *size, "--num-prompts", "3")
    assert throughput.code == 0, throughput.err
    assert "requests per second" in throughput.out


def test_interrupted_generation_ends_with_code_130():
    words = ["generate", "--prompt", "The king", "--max-tokens", "1000", "--ignore-eos"]
    # Started in the background, a process would inherit that interrupts are ignored.
    code = f"""
import signal, sys
from quire.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main({words!r}))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
