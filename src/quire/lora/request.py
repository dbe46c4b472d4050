"""`LoRARequest`: which adapter a request is for. Names and meaning are vLLM's."""

from __future__ import annotations

import msgspec

from quire.errors import RequestError, echo

MAX_NAME_LENGTH = 256
MAX_PATH_LENGTH = 4096


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter, as a caller names it.

    Attributes:
        lora_name: what it is called, in metrics and by clients of a server.
        lora_int_id: at least 1; another adapter must have another one.
        lora_path: its folder, with adapter_config.json and adapter_model.safetensors.

    Raises `RequestError` for a field that cannot be one.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        for name, most in (("lora_name", MAX_NAME_LENGTH), ("lora_path", MAX_PATH_LENGTH)):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
                raise RequestError(
                    f"{name} must be a text of 1 to {most} printable characters, got {echo(value)}", param=name
                )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number < 2**63:
            raise RequestError(f"lora_int_id must be a positive integer, got {echo(number)}", param="lora_int_id")
