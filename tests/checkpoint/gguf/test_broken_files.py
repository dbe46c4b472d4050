"""Truncated and malformed files: an error of one line naming file and field, and no large allocation."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.checkpoint.gguf.reader import GGUFFile
from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.open import open_weights
from quire.errors import ModelError
from quire.tokenizer.tokenizer import Tokenizer


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ALIGNMENT = pair(b"general.alignment", 4, struct.pack("<I", 32))
NAME = pair(b"general.architecture", 8, text(b"llama"))


def build(
    pairs: list[bytes],
    entries: list[bytes],
    data: int = 4096,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, keys = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + bytes(data)


GOOD = build([NAME, ALIGNMENT], [entry(b"a", (32, 4), 0, 0), entry(b"b", (32, 4), 8, 512)])


def refusal(folder: Path, content: bytes) -> str:
    """Return the message for a file of this content; memory stays small whatever it says."""
    path = folder / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 20 * len(content)
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message.removeprefix(f"{path}: ")


HUGE = 2**63


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "file is truncated (expected at least 24 bytes, got 0)"),
        (b"GGUF" + bytes(10), "file is truncated (expected at least 24 bytes, got 14)"),
        (b"GGML" + bytes(30), "header: no GGUF file: it begins with b'GGML' (expected b'GGUF')"),
        (build([], [], version=1), "header: GGUF version 1 is not supported (supported: 2, 3)"),
        (build([], [], version=4), "header: GGUF version 4 is not supported"),
        (build([], [], version=3 << 24), "header: GGUF in big-endian order is not supported"),
        (build([], [], counts=(HUGE, 0)), f"header: tensor count {HUGE} does not fit in a file of"),
        (build([], [], counts=(0, HUGE)), f"header: metadata count {HUGE} does not fit in a file of"),
        (build([NAME], [], counts=(0, 40)), "metadata '': is there twice"),
        (build([struct.pack("<Q", HUGE)], []), "metadata entry 0: a name of"),
        (build([pair(b"k", 8, struct.pack("<Q", HUGE))], []), "metadata 'k': file is truncated or a length is wrong"),
        (build([pair(b"k", 8, text(b"\xff\xfe"))], []), "metadata 'k': not UTF-8 at byte 0"),
        (build([pair(b"k", 13, b"")], []), "metadata 'k': unknown type 13"),
        (build([pair(b"k", 9, struct.pack("<IQ", 8, HUGE))], []), f"metadata 'k': {HUGE} entries do not fit"),
        (build([pair(b"k", 9, struct.pack("<IQ", 6, 2**60))], []), "metadata 'k': 1152921504606846976 entries do not"),
        (build([pair(b"k", 9, struct.pack("<IQ", 9, 1))], []), "metadata 'k': an array of type 9"),
        (
            build([pair(b"k", 9, struct.pack("<IQ", 8, 2) + text(b"a") + struct.pack("<Q", HUGE))], []),
            "metadata 'k': text 1",
        ),
        (build([NAME, NAME], []), "metadata 'general.architecture': is there twice"),
        (build([pair(b"general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment: is 0"),
        (build([pair(b"general.alignment", 4, struct.pack("<I", 33))], []), "general.alignment: is 33"),
        (build([pair(b"general.alignment", 8, text(b"32"))], []), "general.alignment: is '32'"),
        (build([], [entry(b"a", (32,), 0, 0)] * 2), "tensor 'a': is there twice"),
        (build([], [entry(b"a", (), 0, 0)]), "tensor 'a': 0 dimensions"),
        (build([], [text(b"a") + struct.pack("<I", 2**31)]), "tensor 'a': 2147483648 dimensions"),
        (build([], [entry(b"a", (0, 4), 0, 0)]), "tensor 'a': sizes [0, 4]"),
        (build([], [entry(b"a", (HUGE, 4), 0, 0)]), "tensor 'a': sizes ["),
        (build([], [entry(b"a", (2**40, 2**40, 2**40, 2**40), 0, 0)]), "tensor 'a': file is truncated"),
        (build([], [entry(b"a", (32, 4), 99, 0)]), "tensor 'a': unknown type 99 is not supported (supported: F32"),
        (build([], [entry(b"a", (256, 4), 16, 0)]), "tensor 'a': type IQ2_XXS is not supported"),
        (
            build([], [entry(b"a", (48, 4), 8, 0)]),
            "tensor 'a': rows of 48 weights (expected a multiple of 32, a block of",
        ),
        (build([], [entry(b"a", (32, 4), 0, 8)]), "tensor 'a': offset 8 is no multiple of general.alignment, 32"),
        (build([], [entry(b"a", (32, 4), 0, 2**62)]), "tensor 'a': file is truncated or an offset is wrong"),
        (build([], [entry(b"a", (32, 4), 0, 0)], data=100), "tensor 'a': file is truncated or an offset is wrong"),
        (build([], [entry(b"a", (32, 4), 0, 0), entry(b"b", (8,), 0, 32)]), "tensor 'b': overlaps tensor 'a'"),
        (build([], [entry(b"a", (32, 4), 0, 0)], data=2**21), "file has 2096640 bytes that belong to no tensor"),
        (build([], [entry(b"a", (32, 4), 0, 2**21)], data=2**21 + 512), "file has 2097152 bytes that belong to no"),
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    assert words in refusal(tmp_path, content)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    for version in (2, 3):
        (tmp_path / "m.gguf").write_bytes(GOOD.replace(b"GGUF\x03", b"GGUF" + bytes([version])))
        assert list(GGUFFile(tmp_path / "m.gguf").entries) == ["a", "b"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever bytes are changed or cut off, there is a file or a ModelError."""
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 250))] = data.draw(st.sampled_from([0, 1, 2, 9, 32, 127, 128, 255]))
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]))
    try:
        file = GGUFFile(path)
    except ModelError:
        return
    assert all(file.view(item.begin, item.end).size == item.end - item.begin for item in file.entries.values())


def small_model(change: Callable[[bytes], bytes] = bytes) -> bytes:
    """Return a file with a config and an embedding, and nothing else."""
    numbers = {
        b"block_count": 1,
        b"embedding_length": 32,
        b"attention.head_count": 4,
        b"feed_forward_length": 32,
        b"context_length": 64,
    }
    pairs = [pair(b"llama." + key, 4, struct.pack("<I", value)) for key, value in numbers.items()]
    pairs.append(pair(b"llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)))
    return change(build([NAME, *pairs], [entry(b"token_embd.weight", (32, 16), 0, 0)]))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"llama.block_count", b"llama.block_counT", "llama.block_count is missing"),
        (b"llama.attention.head_count", b"llama.attention.heaD_count", "llama.attention.head_count is missing"),
        (b"token_embd.weight", b"token_embd.weighT", "tensor 'token_embd.weight' is missing"),
        (b"head_count\x04\0\0\0\x04", b"head_count\x04\0\0\0\x00", "llama.attention.head_count is 0"),
        (b"head_count\x04\0\0\0\x04", b"head_count\x06\0\0\0\x04", "llama.attention.head_count is 5.6"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    assert load_model_info(path).num_hidden_layers == 1
    assert small_model().count(old) == 1
    path.write_bytes(small_model(lambda content: content.replace(old, new)))
    with pytest.raises(ModelError, match=r"m\.gguf: ") as caught:
        load_model_info(path)
    assert words in str(caught.value)


def test_missing_weights_and_tokens_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(small_model())
    info = load_model_info(path)
    assert list(open_weights(info).tensors) == ["model.embed_tokens.weight"]
    with pytest.raises(ModelError, match=r"m.gguf: tokenizer.ggml.tokens is missing"):
        Tokenizer.from_folder(path)
    np.testing.assert_array_equal(open_weights(info).tensors["model.embed_tokens.weight"].read().to_float32(), 0)
