"""All cases of all kinds of families. A name says the family first: "qwen3-yarn-mscale"."""

from __future__ import annotations

from tests.parity.cases.case import Case
from tests.parity.cases.dense import DENSE
from tests.parity.cases.experts import EXPERTS
from tests.parity.cases.hybrid import HYBRID
from tests.parity.cases.latent import LATENT
from tests.parity.cases.local import LOCAL

EVERY: dict[str, Case] = {**DENSE, **LOCAL, **EXPERTS, **LATENT, **HYBRID}
