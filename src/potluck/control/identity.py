"""Who a coordinator is: a key and a self-signed certificate, made once; its fingerprint is pinned by every invite."""

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from potluck.errors import BadInput, SaveFailed
from potluck.models.durable import locked

_NAME = "potluck"
# the pin is what is trusted, never the dates: devices whose clock is years off must join too
_VALID_FROM = datetime(2000, 1, 1, tzinfo=UTC)
_VALID_UNTIL = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Identity:
    """A key and the certificate that shows it."""

    certificate: Path
    """PEM."""
    key: Path
    """PEM, unencrypted; mode 0600."""
    fingerprint: bytes
    """SHA-256 of the certificate's DER, 32 bytes."""

    @classmethod
    def load(cls, directory: Path | None = None) -> Self:
        """The identity kept in ``directory`` (the user's data directory if left out), made there the first time.

        Processes that come at the same time get the same one.

        Raises:
            BadInput: what lies there is damaged.
            SaveFailed: it could not be written.
        """
        directory = directory or user_data()
        key, certificate = directory / "key.pem", directory / "certificate.pem"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(directory / "lock"):
                if not (key.is_file() and certificate.is_file()):
                    _make(key, certificate)
                return cls(certificate, key, _checked_fingerprint(key, certificate))
        except OSError as error:
            raise SaveFailed(f"This device's identity cannot be kept in {directory}: {error.strerror}.") from None


def user_data() -> Path:
    """The user's data directory for potluck (XDG base directories)."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share") / "potluck"


def _make(key_path: Path, certificate_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID_FROM)
        .not_valid_after(_VALID_UNTIL)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_private(key_path, secret)
    write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))


def _checked_fingerprint(key_path: Path, certificate_path: Path) -> bytes:
    try:
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
    except (ValueError, TypeError):
        raise BadInput(
            f"{key_path} or {certificate_path.name} beside it is damaged: delete both, and new ones are made."
        ) from None
    if key.public_key() != certificate.public_key():
        raise BadInput(f"{key_path} and {certificate_path.name} beside it do not belong together: delete both.")
    return certificate.fingerprint(hashes.SHA256())


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read: whole, or not at all."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
