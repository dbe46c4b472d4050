"""The reference backend: every op in plain torch, on any torch device. Other backends are tested against it."""

from quire.kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
