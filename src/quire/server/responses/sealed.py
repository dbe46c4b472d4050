"""`encrypted_content` of reasoning items: a text from which the reasoning can be restored, by any server of this kind.

It is an encoding with a checksum, no encryption: what it holds is shown beside it anyway. Clients are to pass it on as
it is.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from quire.checks import wrong_value

VERSION = "qr1"


def seal(text: str) -> str:
    """Return a text as `encrypted_content`."""
    data = text.encode()
    return f"{VERSION}.{zlib.crc32(data):08x}.{base64.urlsafe_b64encode(data).decode()}"


def unseal(sealed: str, where: str) -> str:
    """Return the text that `seal` was given. Raises `RequestError` if it was not, or if some of it is missing."""
    version, _, rest = sealed.partition(".")
    checksum, _, encoded = rest.partition(".")
    if version == VERSION:
        try:
            data = base64.b64decode(encoded, altchars=b"-_", validate=True)
            if checksum == f"{zlib.crc32(data):08x}":
                return data.decode()
        except (binascii.Error, ValueError):
            pass
    raise wrong_value(where, "as a reasoning item of this server had it", sealed)
