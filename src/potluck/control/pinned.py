"""TLS that trusts one certificate, known by its fingerprint, and no authority."""

import hashlib
import hmac
import socket
import ssl

from potluck.errors import BadInput

_HANDSHAKE_S = 5.0


def pinned_context(host: str, port: int, fingerprint: bytes) -> ssl.SSLContext:
    """A TLS context that accepts only the certificate with this SHA-256.

    A first handshake, after which nothing is sent, fetches the certificate; every later connection is checked
    against it in its own handshake, which also proves that the other side has its key.

    Raises:
        BadInput: the certificate is another one, or what answers does not speak TLS.
        OSError: nothing answers.
    """
    probe = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    probe.check_hostname = False
    probe.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout=_HANDSHAKE_S) as connection,
            probe.wrap_socket(connection) as tls,
        ):
            certificate = tls.getpeercert(binary_form=True) or b""
    except ssl.SSLError as error:
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise ConnectionResetError(str(error)) from None
        raise BadInput(f"What answers at {host}:{port} is no potluck coordinator ({error.reason}).") from None
    if not hmac.compare_digest(hashlib.sha256(certificate).digest(), fingerprint):
        raise BadInput(
            f"What answers at {host}:{port} is not the coordinator that made this invite: its certificate is another "
            "one. Nothing was sent. Ask for a new invite."
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is pinned, whatever address shows it
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    return context
