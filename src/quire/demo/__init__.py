"""The model in the box: its location, and nothing that needs PyTorch.

The folder holds the checkpoint (`config.json`, `model.safetensors`, `tokenizer.json`, ...), the definition of what
it was trained to do (`tasks.py`, `facts.json`), the generator of its chat corpus (`corpus.py`) and its measured
figures (`metrics.json`). Training itself lives in `quire.train`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder of the demo checkpoint, in the layout that any Hugging Face loader reads.

    The package is always installed unpacked (its weights are memory-mapped), so the folder is a real path.
    """
    return Path(str(resources.files(__name__)))
