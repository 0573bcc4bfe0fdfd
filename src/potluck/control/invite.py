"""What a person copies from the coordinator to another device: where to dial, whom to trust, and the secret."""

import base64
import binascii
import hashlib
import ipaddress
import struct
from dataclasses import dataclass, field
from typing import Self

from potluck.errors import BadInput

_START = "potluck1."
_FINGERPRINT_BYTES = 32
_CHECKSUM_BYTES = 4
_LENGTHS = struct.Struct(">HBB")  # port, bytes of the secret, bytes of the host


@dataclass(frozen=True)
class Invite:
    """Leave to join one pool."""

    host: str
    """Numeric address, IPv4 or IPv6, without brackets."""
    port: int
    fingerprint: bytes
    """SHA-256 of the coordinator's certificate, 32 bytes."""
    secret: str = field(repr=False)

    def encode(self) -> str:
        """One word without spaces: ``potluck1.`` and url-safe base64 of the fields and a checksum."""
        secret, host = self.secret.encode(), self.host.encode()
        content = _LENGTHS.pack(self.port, len(secret), len(host)) + self.fingerprint + secret + host
        word = base64.urlsafe_b64encode(content + _checksum(content)).decode()
        return _START + word.rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read an invite; spaces and line breaks that came in while it was copied do not matter.

        Raises:
            BadInput: it is no invite, of another version, or was mistyped or cut short.
        """
        word = "".join(text.split())
        if not word.startswith(_START):
            if word.startswith("potluck"):
                raise BadInput("This invite was made by another version of potluck: install the same one here.")
            raise BadInput(f"This is not an invite: an invite is the word beginning with '{_START}' that tune prints.")
        try:
            whole = base64.b64decode(_padded(word.removeprefix(_START)), altchars=b"-_", validate=True)
            content, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
            if _checksum(content) != checksum:
                raise ValueError("checksum")
            port, secret_size, host_size = _LENGTHS.unpack_from(content)
            fingerprint_end = _LENGTHS.size + _FINGERPRINT_BYTES
            secret_end = fingerprint_end + secret_size
            if len(content) != secret_end + host_size:
                raise ValueError("length")
            host = content[secret_end:].decode()
            ipaddress.ip_address(host)
            fingerprint = content[_LENGTHS.size : fingerprint_end]
            return cls(host, port, fingerprint, content[fingerprint_end:secret_end].decode())
        except (ValueError, struct.error, binascii.Error):
            raise BadInput("This invite was mistyped or cut short: copy the whole word again.") from None


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECKSUM_BYTES]


def _padded(word: str) -> bytes:
    return (word + "=" * (-len(word) % 4)).encode("ascii")
