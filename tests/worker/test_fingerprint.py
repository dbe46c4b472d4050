"""The fingerprint is the same for what computes the same bits, and another one for everything else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.errors import ModelError
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.reference.backend import ReferenceBackend
from quire.step import KVCacheSpec, LayerKVSpec
from quire.worker import fingerprint as module
from quire.worker.fingerprint import digest_file, fingerprint
from tests.helpers.checkpoints import write_checkpoint

WEIGHTS = "model.safetensors"
WINDOWED = KVCacheSpec([LayerKVSpec(4, 8, "float32", window) for window in (None, 64)])
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A model folder that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def of(folder: Path, overrides: dict[str, Any] | None = None, **changes: Any) -> str:
    """Return the fingerprint of a model on a CPU, where nothing else is asked for."""
    backend = changes.pop("backend", None) or CPUBackend("bfloat16", "bfloat16", 1)
    spec = changes.pop("spec", KVCacheSpec([LayerKVSpec(4, 8, "float32")] * 2))
    options = {"load_format": "auto", "seed": 0, "block_size": 16, "max_model_len": 256}
    options["digest_cache"] = folder.parent / "notes.json"
    return fingerprint(load_model_info(folder, overrides), backend, spec, **{**options, **changes})


def test_it_outlives_restarts_copies_and_downloads(folder: Path, tmp_path: Path) -> None:
    first = of(folder)
    assert len(first) == 64 and first == of(folder) == of(folder, digest_cache=tmp_path / "none.json")
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "copy"))
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    assert of(copied) == first
    assert of(folder, backend=CPUBackend("bfloat16", "bfloat16", 2)) == first, "threads change no bit"
    assert of(folder, seed=1) == first, "the seed is one of dummy weights only"
    assert of(folder, max_model_len=128) == first


def test_everything_that_may_change_bits_changes_it(folder: Path) -> None:
    def backend(*args: Any, **options: Any) -> dict[str, Any]:
        return {"backend": CPUBackend(*args, num_threads=1, **options)}

    found = [
        of(folder),
        of(folder, {"rms_norm_eps": 1e-3}),
        of(folder, {"rope_theta": 5e5}),
        of(folder, DYNAMIC),
        of(folder, DYNAMIC, max_model_len=512),
        of(folder, block_size=32),
        of(folder, **backend("float32", "bfloat16")),
        of(folder, **backend("bfloat16", "int8")),
        of(folder, **backend("bfloat16", "bfloat16", quantization="int8")),
        of(folder, **backend("bfloat16", "bfloat16", quantization="int4")),
        of(folder, backend=ReferenceBackend("bfloat16", "bfloat16")),
        of(folder, load_format="dummy"),
        of(folder, load_format="dummy", seed=1),
        of(folder, spec=WINDOWED),
        of(folder, spec=WINDOWED, max_model_len=64),
    ]
    assert len(set(found)) == len(found)
    assert of(folder, spec=WINDOWED, max_model_len=65) == of(folder, spec=WINDOWED)


@pytest.mark.skipif(not HAS_BF16_DOT, reason="this CPU has one level only")
def test_instructions_change_it(folder: Path) -> None:
    assert of(folder) != of(folder, backend=CPUBackend("bfloat16", "bfloat16", 1, dot_products=False))


@pytest.mark.parametrize("place", [0.5, 0.999])
def test_one_bit_of_the_weights_changes_it_even_if_times_do_not_tell(folder: Path, place: float) -> None:
    path = folder / WEIGHTS
    first, status = of(folder), path.stat()
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    new = folder / "new"
    new.write_bytes(data)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)
    assert of(folder) != first


def test_code_that_computes_changes_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(folder)
    monkeypatch.setattr(module, "CODE", ("kernels",))
    assert of(folder) != first
    monkeypatch.undo()
    monkeypatch.setattr(module, "__version__", "0.0.0")
    assert of(folder) != first


def test_names_of_shards_count_with_what_they_hold(original: Path, tmp_path: Path) -> None:
    sharded = write_checkpoint(tmp_path / "sharded", "llama", max_shard_size="60KB")
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 1
    first = of(sharded)
    assert first == of(sharded) != of(original)
    data = bytearray(files[-1].read_bytes())
    data[-1] ^= 1
    files[-1].unlink()
    files[-1].write_bytes(data)
    assert of(sharded) != first


def test_weights_are_digested_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, digested = of(folder), []

    def digest(path: Path) -> str:
        digested.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(module, "digest_file", digest)
    assert of(folder) == first and digested == []
    os.utime(folder / WEIGHTS, (1, 1))
    assert of(folder) == first and digested == [WEIGHTS]
    assert of(folder) == first and digested == [WEIGHTS]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"x": [1, 2]}'])
def test_damaged_notes_are_written_anew(folder: Path, damage: bytes) -> None:
    first = of(folder)
    notes = folder.parent / "notes.json"
    good = notes.read_bytes()
    notes.write_bytes(damage)
    assert of(folder) == first
    assert notes.read_bytes() == good


def test_notes_that_cannot_be_written_are_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "file").write_text("")
    assert of(folder, digest_cache=folder.parent / "file" / "notes.json") == of(folder)
    assert "digested at every start" in caplog.text


def test_notes_of_files_that_are_gone_are_dropped(folder: Path, original: Path) -> None:
    notes = folder.parent / "notes.json"
    of(folder)
    (folder / WEIGHTS).unlink()
    of(original, digest_cache=notes)
    assert str(folder) not in notes.read_text() and str(original) in notes.read_text()


def test_weights_that_cannot_be_read_are_a_clear_error(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"12")
    with pytest.raises(ModelError, match="truncated"):
        of(folder)


def test_a_digest_is_of_all_pieces_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4)
    contents = [b"", b"aaaa", b"aaaabbbbc", b"bbbbaaaac", b"aaaabbbb", b"aaaabbbbd"]
    digests = set()
    for content in contents:
        (tmp_path / "file").write_bytes(content)
        digests.add(digest_file(tmp_path / "file"))
    assert len(digests) == len(contents)
