"""A tokenizer is tried out in a worker before it is loaded, and what it does to one text is that request's error."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers

from quire.errors import GenerationError, ModelError, RequestError
from quire.frontend import tokenizer_check
from quire.frontend.tokenizer_check import load_tokenizer
from quire.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import write_folder
from tests.helpers.fake_engine import fake_async_llm, fake_front_model, small_backend


class Panic(BaseException):
    """What the library raises when it panics is no `Exception` either."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "tokenizers"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were tried out in a worker."""
    made: list[Path] = []
    original = tokenizer_check._try_out

    def noted(folder: Path, files: list[Path]) -> None:
        made.append(folder)
        original(folder, files)

    monkeypatch.setattr(tokenizer_check, "_try_out", noted)
    return made


def folder_with(path: Path, **changes: Any) -> Path:
    """Write a tokenizer with other parts."""
    path.mkdir()
    form = json.loads(small_backend().to_str())
    (path / "tokenizer.json").write_text(json.dumps({**form, **changes}))
    return path


def replacing(old: Any, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": old, "content": new}


GROWING = {"type": "Sequence", "normalizers": [replacing({"String": "q"}, "q" * 200)] * 4}
BAD = {
    "a pre-tokenizer that panics": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "panics"),
    "an expression that explodes": ({"normalizer": replacing({"Regex": "(a|a)*$"}, "b")}, "panics|takes"),
    "a decoder that panics": (
        {"decoder": {"type": "Strip", "content": "a", "start": 2**60, "stop": 2**60}},
        "fails to decode",
    ),
    "a normalizer that grows texts": ({"normalizer": GROWING}, "takes too much memory|takes more than"),
    "a post-processor that grows texts": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {},
            }
        },
        "takes too much memory|takes more than",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tokenizer_is_refused_by_name(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_check, "TEXT_SECONDS", 1.0)
    changes, words = BAD[name]
    folder = folder_with(tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=words) as caught:
        load_tokenizer(folder)
    assert caught.value.message.startswith(f"{folder}/tokenizer.json: the tokenizer ")
    assert any(probe in caught.value.message for probe in tokenizer_check.PROBES)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2 and not list(cache.glob("*"))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A folder with a tokenizer that takes some memory and time to load."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {str(number): number for number in range(800_000)}, "unk_token": "0"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    return folder


def test_one_that_takes_for_ever_to_load_is_refused(large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "LOAD_SECONDS", 0.02)
    monkeypatch.setattr(tokenizer_check, "SECONDS_PER_BYTE", 0.0)
    monkeypatch.setattr("quire.frontend.worker_process.WALL_FACTOR", 1e3)
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer takes more than [0-9.]+ seconds to load"):
        load_tokenizer(large)


def test_one_that_takes_too_much_memory_to_load_is_refused(
    large: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_check, "MEMORY", 100 << 20)
    monkeypatch.setattr(tokenizer_check, "MEMORY_PER_BYTE", 0)
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer takes too much memory"):
        load_tokenizer(large)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_a_good_one_is_tried_out_once(kind: str, tmp_path: Path, cache: Path, trials: list[Path]) -> None:
    one, other = write_folder(tmp_path / "one", kind), write_folder(tmp_path / "other", kind)
    for folder in (one, one, other):
        assert load_tokenizer(folder).encode("hello")
    assert trials == [one]
    [known] = cache.iterdir()
    for damage in (b"", b"gone", b"good\n" * 2):
        known.write_bytes(damage)
        load_tokenizer(one)
        assert known.read_bytes() == b"good\n"
    assert len(trials) == 4
    config = json.loads((one / "tokenizer_config.json").read_text())
    (one / "tokenizer_config.json").write_text(json.dumps({**config, "x": 1}))
    load_tokenizer(one)
    assert len(trials) == 5 and len(list(cache.iterdir())) == 2


def test_another_version_of_the_library_is_tried_out_again(
    tmp_path: Path, cache: Path, trials: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path / "model")
    load_tokenizer(folder)
    monkeypatch.setattr(tokenizers, "__version__", "0.0.1")
    load_tokenizer(folder)
    assert len(trials) == 2


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, cache: Path, trials: list[Path]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    folder = folder_with(tmp_path / "model")
    for _ in range(2):
        assert load_tokenizer(folder).encode("hello")
    assert len(trials) == 2


@pytest.mark.parametrize(("variable", "place"), [("", ".cache"), ("relative", ".cache"), ("/NEW", "NEW")])
def test_verdicts_are_remembered_where_the_user_keeps_caches(
    variable: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", variable.replace("/", f"{tmp_path}/"))
    load_tokenizer(folder_with(tmp_path / "model"))
    assert len(list((tmp_path / place / "quire" / "tokenizers").iterdir())) == 1


def test_errors_of_files_are_those_of_loading(tmp_path: Path, cache: Path) -> None:
    for text in ("", "{}", "[1]", '{"model": {"type": "BPE", "vocab": 5}}'):
        folder = tmp_path / f"model{len(text)}"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        messages = []
        for load in (load_tokenizer, Tokenizer.from_folder):
            with pytest.raises(ModelError) as caught:
                load(folder)
            messages.append(caught.value.message)
        assert messages[0] == messages[1]


def test_the_built_in_one_needs_no_worker(cache: Path, trials: list[Path]) -> None:
    from quire.demo import demo_model_path

    assert load_tokenizer(demo_model_path()).encode("hello") and not trials


def test_a_worker_that_is_killed_is_tried_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = tokenizer_check.WorkerPool.run
    killed: list[int] = []

    def run(pool: Any, job: bytes, timeout: float, **options: Any) -> bytes:
        result = original(pool, job, timeout, **options)
        if not killed:
            for child in psutil.Process().children():
                if "quire.frontend.tokenizer_check" in child.cmdline():
                    child.kill()
                    killed.append(child.pid)
        return result

    monkeypatch.setattr(tokenizer_check.WorkerPool, "run", run)
    assert load_tokenizer(folder_with(tmp_path / "model")).encode("hello") and killed


# ---- what gets past the check ----


def test_a_panic_is_an_error_of_the_text(tmp_path: Path) -> None:
    panics = tokenizers.Tokenizer.from_str(small_backend().to_str())
    panics.pre_tokenizer = tokenizers.pre_tokenizers.FixedLength(0)
    tokenizer = Tokenizer(panics)
    for text in ("hello", "hello " * 1000):
        for use in (tokenizer.encode, lambda text: tokenizer.encode_pair(text, text)):
            with pytest.raises(RequestError, match="the tokenizer fails on this text"):
                use(text)
    with pytest.raises(RequestError, match="the tokenizer fails on this text"):
        tokenizer.encode_segments(["hello"])


class Spoiled:
    """A tokenizer of the library that panics when it decodes, or adds tokens."""

    def __init__(self, backend: Any, method: str) -> None:
        self._backend, self._method = backend, method

    def __getattr__(self, name: str) -> Any:
        def panic(*args: Any, **kwargs: Any) -> Any:
            raise Panic("assertion failed")

        return panic if name == self._method else getattr(self._backend, name)


def test_a_panic_while_loading_is_an_error_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model", "byte_level")
    files = "quire.tokenizer.tokenizer.read_tokenizer_folder"
    read = tokenizer_check.Tokenizer.from_folder(folder)
    spoiled = Spoiled(read._backend, "get_added_tokens_decoder")
    monkeypatch.setattr(files, lambda path: (spoiled, {}, None, None))
    with pytest.raises(ModelError, match="assertion failed"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"n": 2}, {"prompt_logprobs": 1}])
def test_a_panic_while_decoding_ends_that_request_alone(options: dict[str, Any]) -> None:
    front = fake_front_model()
    assert front.tokenizer is not None
    tokenizer = front.tokenizer
    tokenizer.pieces = None  # so that the library decodes
    good = tokenizer._backend

    async def check() -> None:
        llm, _ = fake_async_llm(front_model=front)
        async with llm:
            params = SamplingParams(max_tokens=3, **options)
            tokenizer._backend = Spoiled(good, "decode")  # type: ignore[assignment]
            tokenizer._texts.clear()
            outputs = [output async for output in llm.generate([1, 2, 3], params)]
            assert {choice.finish_reason for choice in outputs[-1].outputs} == {"error"}
            for choice in outputs[-1].outputs:
                assert isinstance(choice.error, GenerationError) and "fails to decode" in choice.error.message
            tokenizer._backend = good
            outputs = [output async for output in llm.generate([1, 2, 3], SamplingParams(max_tokens=3))]
            assert outputs[-1].outputs[0].finish_reason == "length" and not llm.errored and llm.num_unfinished == 0

    asyncio.run(check())
