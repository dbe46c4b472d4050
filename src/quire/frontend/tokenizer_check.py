"""Tries out a tokenizer in a worker process before the front loads it.

A tokenizer is data for a library in Rust: regular expressions, normalizers and models that may take for ever, or all
memory, or end the process. So the first time that a tokenizer is used, a worker loads it and encodes and decodes some
texts, within limits of time and memory. That it did so is remembered in the user's cache directory by the digest of its
files. A tokenizer that fails only on other texts is not found out; then what it does happens in the front
(docs/limits.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from functools import partial
from pathlib import Path

import tokenizers

from quire.checkpoint.gguf.reader import GGUFFile
from quire.checkpoint.gguf.source import is_gguf
from quire.demo import demo_model_path
from quire.errors import GenerationError, ModelError, RequestError
from quire.frontend.worker_process import JobDiedError, JobKilledError, WorkerPool, serve
from quire.tokenizer.files import FILES, VOCABULARY_FILES
from quire.tokenizer.tokenizer import Tokenizer, TokenizerPanicError

logger = logging.getLogger(__name__)

VERSION = 1  # of the check; another one is made again
GOOD = b"good\n"
LOAD_SECONDS = 8.0
SECONDS_PER_BYTE = 1e-6
TEXT_SECONDS = 4.0
MEMORY = 1 << 30  # bytes of address space for it, and as many times the size of the files
MEMORY_PER_BYTE = 16
MAX_COUNTED = 1 << 27  # bytes of a file: beyond, it has neither more time and memory nor a remembered verdict
LONG = 100_000
_PRINTABLE = "".join(map(chr, range(32, 127)))
_SCRIPTS = "Ünïcödé, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย, 日本語, 한국어, e\u0301\u0302, \ufb01, \u2028. "
_EMOJI = "\U0001f600\U0001f469\u200d\U0001f680\U0001f1eb\U0001f1f7\u2764\ufe0f"
PROBES = {
    "no text": "",
    "a sentence": "The quick brown fox doesn't jump over 12 lazy dogs; it's <|im_start|>asleep</s>.\n",
    "texts in many scripts": _SCRIPTS * 50,
    "characters of the whole of Unicode": "".join(map(chr, [*range(0xA0, 0xD800, 5), *range(0xE000, 0x20000, 37)])),
    "runs of printable characters": "".join([char * 50 for char in _PRINTABLE]),
    "control characters": "".join(map(chr, range(32))) * 50 + "\x7f\x80\ufeff\ufffe" * 50,
    "emoji": _EMOJI * 1000,
    "many words": " ".join([_PRINTABLE[i % 94 : i % 94 + i % 11] for i in range(10_000)]),
    "a long word": "a" * LONG,
    "a long number": "7" * LONG,
    "many blanks": " " * LONG + "x",
    "many line breaks": "\n\t \r\n" * (LONG // 5),
    "one character and another at the end": "a" * 5000 + "!",
}


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder or GGUF file, once it is known to be good.

    Raises:
        ModelError: as `Tokenizer.from_folder`; or it takes too long, or too much memory, or panics; the message names
            the file, and says with what.
    """
    files = _files(folder)
    if files and folder != demo_model_path():
        _check(folder, files)
    return Tokenizer.from_folder(folder)


def _files(folder: Path) -> list[Path]:
    """Return the files that a tokenizer is made of, that with the vocabulary first; none if there is none."""
    if is_gguf(folder):
        return [folder]
    found = [folder / name for name in FILES if (folder / name).is_file()]
    return found if found and found[0].name in VOCABULARY_FILES else []


def _check(folder: Path, files: list[Path]) -> None:
    known = _remembered(files)
    if known is not None and _is_good(known):
        return
    try:
        _try_out(folder, files)
    except JobDiedError:  # by the tokenizer, or killed from outside: a second try shows which
        try:
            _try_out(folder, files)
        except JobKilledError as error:
            raise ModelError(f"{files[0]}: the tokenizer takes {error}") from None
    if known is not None:
        _note_good(known)


def _try_out(folder: Path, files: list[Path]) -> None:
    """Load the tokenizer and encode and decode each text in a worker. Raises `ModelError`, or `JobDiedError`."""
    size = sum(min(path.stat().st_size, MAX_COUNTED) for path in files)
    memory = MEMORY + MEMORY_PER_BYTE * size
    if files == [folder]:
        memory += folder.stat().st_size  # it is mapped
    pool = WorkerPool(__name__, "tokenizers", max_processes=1, memory=memory)
    jobs: list[tuple[str, str | None, float]] = [("to load", None, LOAD_SECONDS + SECONDS_PER_BYTE * size)]
    jobs += [(f"to encode and decode {name}", name, TEXT_SECONDS) for name in PROBES]
    try:
        for what, probe, seconds in jobs:
            try:
                problem = pool.run(json.dumps([str(folder), probe]).encode(), seconds, retry=False)
            except JobDiedError as error:
                raise JobDiedError(f"{error} {what}") from None
            except JobKilledError as error:
                raise ModelError(f"{files[0]}: the tokenizer takes {error} {what}") from None
            if problem:
                raise ModelError(problem.decode() if probe is None else f"{files[0]}: {problem.decode()}")
    finally:
        pool.close()


def _remembered(files: list[Path]) -> Path | None:
    """Return the file in which a good verdict would be remembered; None if there cannot be one."""
    digest = hashlib.blake2b(f"{VERSION} {tokenizers.__version__}".encode(), digest_size=24)
    try:
        for path in files:
            size = path.stat().st_size
            if path.name not in FILES:
                size = _header_size(path, size)
            if size > MAX_COUNTED:
                return None
            with path.open("rb") as file:
                digest.update(f"\0{path.name if path.name in FILES else 'gguf'} {size}\0".encode())
                digest.update(file.read(size))
        return _cache_folder() / digest.hexdigest()
    except (OSError, RuntimeError, ModelError):  # not readable, no home, no GGUF file: loading it says what is wrong
        return None


def _cache_folder() -> Path:
    """Return the folder of verdicts. Raises `RuntimeError` if the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored unless absolute, says the specification
    return (Path(cache) if cache.startswith("/") else Path("~/.cache").expanduser()) / "quire" / "tokenizers"


def _header_size(path: Path, size: int) -> int:
    """Return the bytes of a GGUF file before its tensors."""
    return min((entry.begin for entry in GGUFFile(path).entries.values()), default=size)


def _is_good(known: Path) -> bool:
    try:
        return known.read_bytes() == GOOD
    except OSError:
        return False


def _note_good(known: Path) -> None:
    """Remember a verdict; a folder that cannot be written only means that the check is made again."""
    with contextlib.suppress(OSError):
        known.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=known.parent)
        try:
            with open(handle, "wb") as file:
                file.write(GOOD)
            os.replace(name, known)
        except OSError:
            os.unlink(name)
            raise


# ---- the child process ----


class _Trial:
    """The tokenizer that is tried out."""

    def __init__(self) -> None:
        self._loaded: dict[str, Tokenizer] = {}

    def do(self, job: bytes) -> bytes:
        """Load the tokenizer, or encode and decode a text; return what is wrong with it."""
        folder, probe = json.loads(job)
        try:
            tokenizer = self._loaded.get(folder)
            if tokenizer is None:
                tokenizer = self._loaded[folder] = Tokenizer.from_folder(Path(folder))
            if probe is not None:
                _use(tokenizer, PROBES[probe])
        except ModelError as error:
            return error.message.encode()
        except TokenizerPanicError as error:
            return f"the tokenizer panics on {probe} ({error.reason})".encode()
        except GenerationError as error:
            return f"{error.message}, those of {probe}".encode()
        except RequestError:
            pass  # some have no token for a text; that is the request's error
        return b""


def _use(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    tokenizer.decode(ids, skip_special_tokens=False)
    if len(text) < 1000:
        tokenizer.encode_segments([text])
        tokenizer.encode_pair(text, text)


def main() -> None:
    """Try out tokenizers until the connection is closed."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)  # where a panic writes its stack
    serve("tokenizer", partial(_Trial.do, _Trial()))
