"""The block formats of GGUF weights: a block has adjacent weights of a row, and their scales.

Sources: the specification's list of types and ggml's description of each block. Every format is integers with a scale
and for some a minimum for each group of 16 or 32 weights: weight = scale * value - minimum, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

TYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
SUPER = 256  # weights of a block of the K formats


class Decoded(NamedTuple):
    """Decoded blocks: values uint8 or int8 [n, size], scales and minima float32 [n, size / group].

    weight = scale * (value - middle) - minimum; without minima where they are None.
    """

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of blocks, or of unquantized weights.

    Attributes:
        size: weights in a block. bytes: of a block. group: weights that share a scale; 0 for unquantized weights.
        bits: of values in memory, 4 or 8. middle: the value that stands for zero.
        dtype: of unquantized weights, as in `HostTensor`.
        decode: blocks uint8 [n, bytes] -> values, scales and minima.
    """

    name: str
    size: int
    bytes: int
    group: int = 0
    bits: int = 8
    middle: int = 0
    minima: bool = False
    dtype: str = ""
    decode: Callable[[np.ndarray], Decoded] | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at a byte of each block as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _halves(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of bytes [n, m], then the high ones, [n, 2 m]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return the bits of the 32-bit word at a byte of each block, as 0 or 16, [n, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q8_0(blocks: np.ndarray) -> Decoded:
    return Decoded(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Decoded:
    return Decoded(_halves(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Decoded:
    return Decoded(_halves(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Decoded:
    values = _halves(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return Decoded(values.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Decoded:
    values = _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return Decoded(values.view(np.int8), _half(blocks, 0), -_half(blocks, 2))


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight minima of six bits, float32 [n, 8] each, from twelve bytes."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 2 & 48)], axis=-1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 2 & 48)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _by_32(packed: np.ndarray) -> np.ndarray:
    """Return 256 values of 4 bits: of each 32 bytes the low halves, then the high ones."""
    pieces = packed.reshape(len(packed), -1, 1, 32)
    return np.concatenate([pieces & 15, pieces >> 4], axis=2).reshape(len(packed), -1)


def _q4_k(blocks: np.ndarray) -> Decoded:
    scales, minima = _six_bits(blocks[:, 4:16])
    return Decoded(_by_32(blocks[:, 16:]), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _q5_k(blocks: np.ndarray) -> Decoded:
    scales, minima = _six_bits(blocks[:, 4:16])
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = _by_32(blocks[:, 48:]) | (bits << 4).reshape(len(blocks), -1)
    return Decoded(values.view(np.int8), _half(blocks, 0) * scales, _half(blocks, 2) * minima)


def _pairs(packed: np.ndarray) -> np.ndarray:
    """Return 256 values of 2 bits: of each 32 bytes the lowest pairs, then the next ones, and so on."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, 32) >> shifts & 3).reshape(len(packed), -1)


def _q6_k(blocks: np.ndarray) -> Decoded:
    low = blocks[:, :128].reshape(len(blocks), 2, 1, 64)
    values = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), -1) | _pairs(blocks[:, 128:192]) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Decoded(values.view(np.int8) - np.int8(32), _half(blocks, 208) * scales)


def _q2_k(blocks: np.ndarray) -> Decoded:
    packed, values = blocks[:, :16], _pairs(blocks[:, 16:80])
    scales, minima = (packed & 15).astype(np.float32), (packed >> 4).astype(np.float32)
    return Decoded(values.view(np.int8), _half(blocks, 80) * scales, _half(blocks, 82) * minima)


def _q3_k(blocks: np.ndarray) -> Decoded:
    # Of each weight's three bits the highest is inverted: where it is clear, 4 is taken off.
    high = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(blocks), -1)
    values = _pairs(blocks[:, 32:96]).view(np.int8) - ((high ^ 1) << 2).view(np.int8)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=-1)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    top = (packed[:, None, 8:] >> shifts & 3).reshape(len(blocks), 16)
    scales = (low | top << 4).view(np.int8) - np.int8(32)
    return Decoded(values, _half(blocks, 108) * scales.astype(np.float32))


FORMATS = {
    form.name: form
    for form in (
        Format("F32", 1, 4, dtype="float32"),
        Format("F16", 1, 2, dtype="float16"),
        Format("BF16", 1, 2, dtype="bfloat16"),
        Format("Q8_0", 32, 34, 32, decode=_q8_0),
        Format("Q4_0", 32, 18, 32, bits=4, middle=8, decode=_q4_0),
        Format("Q4_1", 32, 20, 32, bits=4, minima=True, decode=_q4_1),
        Format("Q5_0", 32, 22, 32, decode=_q5_0),
        Format("Q5_1", 32, 24, 32, minima=True, decode=_q5_1),
        Format("Q2_K", SUPER, 84, 16, minima=True, decode=_q2_k),
        Format("Q3_K", SUPER, 110, 16, decode=_q3_k),
        Format("Q4_K", SUPER, 144, 32, bits=4, minima=True, decode=_q4_k),
        Format("Q5_K", SUPER, 176, 32, minima=True, decode=_q5_k),
        Format("Q6_K", SUPER, 210, 16, decode=_q6_k),
    )
}
