"""`Builder`: the weights and the backend from which every layer is built, passed down the tree of modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import WeightSource
from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.layers.lora import LoRASlots


@dataclass(frozen=True, slots=True)
class Builder:
    """Weights below a prefix, and the backend that packs this rank's share of them.

    `builder.under("model").under("norm").get("weight", (64,))` reads the tensor "model.norm.weight".

    Attributes:
        lora: slots in which layers register, for adapters to change them.
        headless: the model's output is hidden states: its file may have no output head, and none is packed.
        latent_cache: whether latent attention caches latent vectors, or keys and values of every head.
        layers: numbers of the layers of this pipeline stage; None for all.
    """

    weights: WeightSource
    backend: Backend
    prefix: str = ""
    lora: LoRASlots | None = None
    headless: bool = False
    latent_cache: bool = True
    layers: range | None = None

    def under(self, name: str) -> Builder:
        """Return a builder one level further down; of an empty name, this one."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self

    def under_if(self, name: str, probe: str) -> Builder:
        """Like `under`, or this builder if `probe` exists without `name`: some files omit the outermost prefix."""
        return self if f"{self.prefix}{name}.{probe}" not in self.weights and self.has(probe) else self.under(name)

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self.prefix + name in self.weights

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the whole tensor, which has this shape."""
        return self.weights.read(self.prefix + name, shape)


def share_of(backend: Backend, total: int, what: str) -> int:
    """Return a rank's part of `total`; raise ConfigError if it cannot be split evenly over the backend's ranks."""
    if total % backend.world_size:
        raise ConfigError(
            f"tensor_parallel_size is {backend.world_size}; it must divide the model's {what}, {total}",
            param="tensor_parallel_size",
        )
    return total // backend.world_size


def span_of(backend: Backend, total: int, what: str) -> range:
    """Return the numbers, of 0 to `total` - 1, that are this rank's; raise what `share_of` does."""
    share = share_of(backend, total, what)
    return range(backend.rank * share, (backend.rank + 1) * share)
