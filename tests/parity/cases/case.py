"""What a case is: a family (a key of `tests.helpers.checkpoints.FAMILIES`) and what its config.json changes or adds."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any]]
