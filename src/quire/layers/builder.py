"""`Builder`: what every layer is made from, handed down the tree of a model while it is built, and dropped after."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import WeightSource
from quire.kernels.backend import Backend
from quire.layers.lora import LoRASlots
from quire.layers.parallel import ParallelContext


@dataclass(frozen=True, slots=True)
class Builder:
    """Weights below a prefix, the backend that packs them, and this rank's place.

    `builder.under("model").under("norm").get("weight", (64,))` reads the tensor "model.norm.weight".

    Attributes:
        lora: slots in which layers register what adapters may change.
        headless: the model's output is hidden states: its file may have no output head, and none is packed.
        latent_cache: layers with latent attention cache latent vectors; otherwise keys and values of every head.
        layers: numbers of the layers of this pipeline stage; None for all.
    """

    weights: WeightSource
    backend: Backend
    parallel: ParallelContext = field(default_factory=ParallelContext)
    prefix: str = ""
    lora: LoRASlots | None = None
    headless: bool = False
    latent_cache: bool = True
    layers: range | None = None

    def under(self, name: str) -> Builder:
        """Return a builder one level further down; of an empty name, this one."""
        return replace(self, prefix=f"{self.prefix}{name}.") if name else self

    def under_if(self, name: str, probe: str) -> Builder:
        """Like `under`, unless tensor `probe` lies directly here: some files leave the outermost prefix out."""
        return self if f"{self.prefix}{name}.{probe}" not in self.weights and self.has(probe) else self.under(name)

    def has(self, name: str) -> bool:
        """Whether the tensor exists."""
        return self.prefix + name in self.weights

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the whole tensor, which has this shape."""
        return self.weights.read(self.prefix + name, shape)
