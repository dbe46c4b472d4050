"""Floats of 8 and 4 bits, as tables of the value of each code.

The formats are those of the OCP specifications "8-bit Floating Point" and "Microscaling Formats" (2023): E4M3 has no
infinities and one size of NaN, E5M2 is a float16 cut short, E8M0 is a power of two, E2M1 has neither NaN nor infinity.
"""

from __future__ import annotations

import numpy as np


def _e4m3() -> np.ndarray:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    sizes[codes & 127 == 127] = np.nan
    return np.where(codes >= 128, -sizes, sizes).astype(np.float32)


def _e5m2() -> np.ndarray:
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _e8m0() -> np.ndarray:
    values = np.ldexp(np.float64(1), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


E4M3, E5M2, E8M0 = _e4m3(), _e5m2(), _e8m0()
FLOAT8 = {"float8_e4m3": E4M3, "float8_e5m2": E5M2, "float8_e8m0": E8M0}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NONFINITE = {
    kind: np.flatnonzero(~np.isfinite(table)).astype(np.uint8) for kind, table in (("e4m3", E4M3), ("e5m2", E5M2))
}
"""Codes that are NaN or infinite."""
