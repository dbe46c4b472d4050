"""How to read the config.json of each supported architecture: names of its keys, defaults, positions, windows.

There is one row for each architecture. It also names the function in `quire.models` that returns the architecture's
`DecoderOptions`. Defaults are those of transformers' configuration class, for keys that a config.json omits.
"""

from __future__ import annotations

from quire.checkpoint.families.dense import DENSE
from quire.checkpoint.families.experts import EXPERTS
from quire.checkpoint.families.family import Family, Windows
from quire.checkpoint.families.hybrid import HYBRID
from quire.checkpoint.families.latent import LATENT
from quire.checkpoint.families.local import LOCAL
from quire.checkpoint.families.pooling import POOLING

__all__ = ["EARLIER_NAMES", "FAMILIES", "Family", "Windows"]

# Names under which models were published before transformers had a class for them -> that class.
EARLIER_NAMES = {"MPTForCausalLM": "MptForCausalLM"}

FAMILIES: dict[str, Family] = {**DENSE, **LOCAL, **EXPERTS, **LATENT, **HYBRID, **POOLING}
