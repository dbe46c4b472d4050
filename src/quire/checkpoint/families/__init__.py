"""What each supported architecture's config.json leaves unsaid: its key names, its defaults, how positions enter.

One row per architecture, in the file of its kind, which also names the function in `quire.models` that describes its
decoder. The defaults are those of the architecture's own configuration class, which apply when a folder's config.json
omits the key.
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
