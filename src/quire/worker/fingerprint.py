"""A fingerprint of everything that the bits in a KV cache depend on, the tokens aside.

Two engines may read each other's blocks if and only if their fingerprints agree. It is a digest of contents, never of
times or paths, so that it is the same after a restart, for a copied or downloaded model folder, and for another
installation of the same code. All weights count: samples would miss a few retrained embeddings. Digesting them takes
about as long as reading them, so digests are cached in a file, by the size, times and inode of each weight file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.open import weight_files
from quire.kernels.backend import Backend
from quire.layers.rotary import inverse_frequencies
from quire.step import KVCacheSpec
from quire.version import __version__
from quire.worker.disk_store import read_small_file

logger = logging.getLogger(__name__)

CHUNK_BYTES = 16 * 2**20
CODE = ("checkpoint", "kernels", "layers", "models")  # folders of this package that decide what is computed
DIGEST_BYTES = 32
MAX_CACHE_BYTES = 2**24  # of the file of digests


def fingerprint(
    info: ModelInfo,
    backend: Backend,
    spec: KVCacheSpec,
    *,
    load_format: str,
    seed: int,
    block_size: int,
    max_model_len: int,
    digest_cache: Path,
) -> str:
    """Return the fingerprint as 64 hexadecimal digits.

    Args:
        load_format, seed: as given to `load_model`.
        max_model_len: that the model was built for; rotary frequencies and groups of layers may depend on it.
        digest_cache: file of the digests of weight files; it need not exist, nor be writable.

    Raises:
        ModelError: the weights cannot be read.
    """
    rotary = [inverse_frequencies(rope, max_model_len).tobytes().hex() for rope in dict.fromkeys(info.layer_ropes)]
    parts = {
        "config": dict(info.raw),
        "weights": seed if load_format == "dummy" else _weights(info, load_format, digest_cache),
        "rotary": rotary,
        "backend": [backend.name, backend.dtype, backend.kv_dtype, backend.quantization, backend.arithmetic],
        "layers": msgspec.to_builtins(spec),
        "groups": msgspec.to_builtins(spec.groups(max_model_len)),
        "block_size": block_size,
        "code": [__version__, _code()],
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _code() -> str:
    """Return a digest of the source files that decide what is computed."""
    package = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in sorted(path for folder in CODE for path in (package / folder).rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _weights(info: ModelInfo, load_format: str, digest_cache: Path) -> list[list[str]]:
    """Return name and digest of every file that holds weights."""
    paths = weight_files(info, load_format)
    known = _read_digests(digest_cache)
    started, digested, found = time.perf_counter(), 0, {}
    for path in paths:
        place, stamp = str(path.resolve()), _stamp(path)
        note = known.get(place)
        if note is None or note[:-1] != stamp:
            note = [*stamp, digest_file(path)]
            digested += path.stat().st_size
        found[place] = note
    if digested:
        seconds = time.perf_counter() - started
        logger.info("digested %d MB of weights for the disk tier in %.1f s", digested // 10**6, seconds)
        _write_digests(digest_cache, {**known, **found})
    return [[path.name, found[str(path.resolve())][-1]] for path in paths]


def digest_file(path: Path) -> str:
    """Return a digest of a file's content, whose pieces are digested side by side."""
    with path.open("rb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        size = os.fstat(file.fileno()).st_size

        def digest_piece(offset: int) -> bytes:
            piece = os.pread(file.fileno(), CHUNK_BYTES, offset)
            return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()

        pieces: Iterator[bytes] = pool.map(digest_piece, range(0, size, CHUNK_BYTES))
        return hashlib.blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).hexdigest()


def _stamp(path: Path) -> list[int]:
    """Return what changes when the file is written or replaced; ctime cannot be set back."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_digests(path: Path) -> dict[str, list[Any]]:
    """Return the cached digests, without those of files that are gone; none if they cannot be read."""
    try:
        data = read_small_file(path, MAX_CACHE_BYTES)
        digests = msgspec.json.decode(data, type=dict[str, tuple[int, int, int, int, str]])
    except (OSError, msgspec.DecodeError, RecursionError):
        return {}
    return {place: list(note) for place, note in digests.items() if "\0" not in place and os.path.exists(place)}


def _write_digests(path: Path, digests: dict[str, list[Any]]) -> None:
    """Replace the cached digests as a whole; without them the next start only takes longer."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.write_bytes(msgspec.json.encode(digests))
        new.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written (%s); the weights are digested at every start", path, error)
