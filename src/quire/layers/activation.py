"""Activations by the names that config.json uses for them."""

from __future__ import annotations

from quire.errors import ModelError, echo
from quire.kernels.backend import Array, Backend

# hidden_act -> name in `Backend.activation`. Four of the names mean the same tanh approximation of gelu.
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def activation_name(hidden_act: str) -> str:
    """Return the backend's name; raise ModelError for an unknown one."""
    if hidden_act not in ACTIVATIONS:
        raise ModelError(
            f"config.json: activation {echo(hidden_act)} is not supported (supported: {', '.join(ACTIVATIONS)})"
        )
    return ACTIVATIONS[hidden_act]


def gated_activation_name(hidden_act: str) -> str:
    """Return the backend's name of a gated activation: that of an activation, or "swiglu_oai"."""
    return hidden_act if hidden_act == "swiglu_oai" else activation_name(hidden_act)


class Activation:
    """Elementwise activation: a `hidden_act`, or "tanh" of layers after pooling."""

    def __init__(self, backend: Backend, hidden_act: str) -> None:
        self.backend = backend
        self.activation = hidden_act if hidden_act == "tanh" else activation_name(hidden_act)

    def __call__(self, x: Array) -> Array:
        """[R, N] -> [R, N]; x may be changed in place."""
        if self.activation == "tanh":
            self.backend.softcap(x, 1.0)
            return x
        return self.backend.activation(x, self.activation)
