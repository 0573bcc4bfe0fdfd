"""The split server's front door: clients dial in, contribute, or take steps."""

from types import TracebackType
from typing import Self

from potluck.control.files import ModelFiles
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.control.server import HttpsServer
from potluck.split.routes import Backend, SplitRoutes


class SplitDoor:
    """Serves from ``with`` to the end of its block, on one address and no other."""

    def __init__(
        self,
        identity: Identity,
        address: str,
        port: int,
        secret: str,
        backend: Backend,
        files: ModelFiles,
        *,
        slice_s: float = 10.0,
    ) -> None:
        """Bind the address; nobody is answered before ``with``.

        Args:
            identity: whose certificate is shown.
            address: numeric, of this machine.
            port: 0 takes a free one; the invite tells it.
            secret: shown by who is invited. With the same port and identity, an invite outlives restarts.
            backend: does what clients ask for.
            files: of the model, handed out to clients.
            slice_s: how long a request for a step's answer waits for it before the client has to ask again.

        Raises:
            BadInput: the address or port cannot be listened on.
        """
        routes = SplitRoutes(backend, files, secret, slice_s=slice_s)
        self._server = HttpsServer(identity, address, port, routes.app(), on_stop=routes.steps.close)
        self.invite = Invite(address, self._server.port, identity.fingerprint, secret)
        self.url = self._server.url

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)
