"""Activations of single numbers, for Triton kernels, which know the kind when they are compiled. No kernel is here."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.errors import ConfigError

KINDS = {
    name: number
    for number, name in enumerate(
        ("none", "relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "sigmoid", "softplus", "swiglu_oai")
    )
}
"""Activations by name. "swiglu_oai" is for `gate_and_multiply` only, "none" for kernels that may have one."""


def activation_number(kind: str, *, gated: bool) -> int:
    """Return the number of an activation. Raises ConfigError for an unknown name."""
    allowed = [name for name in KINDS if name != "none" and (gated or name != "swiglu_oai")]
    if kind not in allowed:
        raise ConfigError(f"activation is {kind!r}; allowed: {', '.join(allowed)}", param="hidden_act")
    return KINDS[kind]


@triton.jit
def _log1p(e):
    """log(1 + e) for e from 0 to 1, accurate for small e."""
    series = e * (1.0 - e * (0.5 - e * (1.0 / 3.0 - e * (0.25 - e * 0.2))))
    return tl.where(e < 0.03, series, tl.log(1.0 + e))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), float32, without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return activation number KIND of x, a float32 block."""
    if KIND == 1:
        # Not a maximum, which would make a number of NaN.
        out = tl.where(x < 0.0, 0.0, x)
    elif KIND == 2:
        out = x * sigmoid(x)
    elif KIND == 3:
        out = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == 4:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        out = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 5:
        out = x * sigmoid(1.702 * x)
    elif KIND == 6:
        positive = tl.where(x < 0.0, 0.0, x)
        out = positive * positive
    elif KIND == 7:
        out = sigmoid(x)
    elif KIND == 8:
        out = tl.where(x > 0.0, x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    else:
        tl.static_assert(KIND == 0, "no activation of one number")
        out = x
    return out


@triton.jit
def gate_and_multiply(gate, up, KIND: tl.constexpr):
    """Return act(gate) * up of float32 blocks; KIND may be that of "swiglu_oai", see `Backend.gated_linear`."""
    if KIND == 9:
        limited = tl.where(gate > 7.0, 7.0, gate)
        bounded = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        out = (bounded + 1.0) * (limited * sigmoid(1.702 * limited))
    else:
        out = activate(gate, KIND) * up
    return out
