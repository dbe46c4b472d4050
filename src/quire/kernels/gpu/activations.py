"""Activations of single numbers, for Triton kernels, which know which one when they are compiled. No kernel is here."""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = {
    name: activation_id
    for activation_id, name in enumerate(
        ("none", "relu", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2", "sigmoid", "softplus", "swiglu_oai")
    )
}
"""Ids of activations by name. "swiglu_oai" is for `gate_and_multiply` only, "none" for kernels that may have one."""


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
def activate(x, ACTIVATION_ID: tl.constexpr):
    """Return the activation ACTIVATION_ID of x, a float32 block."""
    if ACTIVATION_ID == 1:
        # Not a maximum, which would make a number of NaN.
        out = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION_ID == 2:
        out = x * sigmoid(x)
    elif ACTIVATION_ID == 3:
        out = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACTIVATION_ID == 4:
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        out = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION_ID == 5:
        out = x * sigmoid(1.702 * x)
    elif ACTIVATION_ID == 6:
        positive = tl.where(x < 0.0, 0.0, x)
        out = positive * positive
    elif ACTIVATION_ID == 7:
        out = sigmoid(x)
    elif ACTIVATION_ID == 8:
        out = tl.where(x > 0.0, x, 0.0) + _log1p(tl.exp(-tl.abs(x)))
    else:
        tl.static_assert(ACTIVATION_ID == 0, "no activation of one number")
        out = x
    return out


@triton.jit
def gate_and_multiply(gate, up, ACTIVATION_ID: tl.constexpr):
    """Return act(gate) * up of float32 blocks; ACTIVATION_ID may be "swiglu_oai"'s, see `Backend.gated_linear`."""
    if ACTIVATION_ID == 9:
        limited = tl.where(gate > 7.0, 7.0, gate)
        bounded = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        out = (bounded + 1.0) * (limited * sigmoid(1.702 * limited))
    else:
        out = activate(gate, ACTIVATION_ID) * up
    return out
