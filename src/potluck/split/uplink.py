"""A client's side of split training: says hello, fetches its part of the model, uploads, steps, fetches the result."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from potluck.control.connection import Access, Connection
from potluck.control.invite import Invite
from potluck.control.versions import versions
from potluck.errors import PotluckError
from potluck.split.keys import key_digest
from potluck.split.traffic import Traffic

PATIENCE_S = 60.0
"""A server that is started again meanwhile was never away."""
_STORED_S = 120.0  # the server checks a shard and sees it on its disk before it answers
_STEP_S = 60.0  # much longer than a slice of waiting, in which the server answers that there is no answer yet
_CONTROL = {"received": "control"}


class Uplink(Connection):
    """A client's connection to the server; raises as :class:`Connection` says."""

    def __init__(self, access: Access, *, patience_s: float = PATIENCE_S, traffic: Traffic | None = None) -> None:
        """See that the server is who it must be; :meth:`open` also says hello."""
        self.traffic = traffic or Traffic()
        self.terms: dict[str, Any] = {}
        """What the server asks of its clients."""
        super().__init__(access, patience_s=patience_s, who="server", through=self.traffic.over)

    @classmethod
    def open(
        cls,
        invite: Invite,
        name: str,
        key: str,
        *,
        patience_s: float = PATIENCE_S,
        traffic: Traffic | None = None,
    ) -> Self:
        """Say hello, which may be said again.

        Args:
            invite: from the server.
            name: unique among the clients.
            key: proves from now on, after a restart of either side too, that it is this client
                (:func:`potluck.split.keys.own_key`).
            patience_s: how long the server may be away.
            traffic: counts, and may slow, what passes.

        Raises:
            BadInput: refused, or another server answers there; the sentence says why.
            DeviceLost: nothing answers.
        """
        uplink = cls(Access.by_invite(invite, key), patience_s=patience_s, traffic=traffic)
        hello = {
            "name": name,
            "key_digest": key_digest(key),
            "versions": versions(),
        }
        try:
            # the key itself is shown in later requests only; this one shows that the client was invited
            invited = {"Authorization": f"Bearer {invite.secret}"}
            uplink.terms = uplink.ask("POST", "/hello", hello, headers=invited, extensions=_CONTROL).json()
        except BaseException:
            uplink.close()
            raise
        return uplink

    def missing(self, shas: Sequence[str]) -> list[str]:
        """Those of the shards, by SHA-256, that the server does not have."""
        body = {"shas": list(shas)}
        return list(self.ask("POST", "/shards/missing", body, extensions=_CONTROL).json()["missing"])

    def send_shard(self, path: Path, sha256: str, kinds: Mapping[str, int] | None = None) -> None:
        """Upload a shard; returns when it is safe on the server's disk.

        Args:
            path: of the shard's file.
            sha256: of its content, in hexadecimal.
            kinds: bytes of each kind of tensors in it, for ``traffic``.
        """
        told = {"sent": kinds or {"shards": path.stat().st_size}, **_CONTROL}
        self.ask("PUT", f"/shards/{sha256}", path, read_s=_STORED_S, extensions=told)

    def commit(self, contribution: str, manifest: Mapping[str, Any]) -> None:
        """Make the shards that a manifest lists one contribution; again is as good as once."""
        told = {"sent": {"manifest": 1 << 62}, **_CONTROL}
        self.ask("PUT", f"/contributions/{contribution}", manifest, read_s=_STORED_S, extensions=told)

    def withdraw(self) -> None:
        """Let the server delete all that this client contributed."""
        self.ask("DELETE", "/contributions", read_s=_STORED_S, extensions=_CONTROL)

    def result(self) -> dict[str, Any] | None:
        """``{"files": [{"name", "size", "sha256"}], "state": ...}``, or None as long as nothing was trained."""
        response = self.ask("GET", "/result", accept=(404,), extensions=_CONTROL)
        return None if response.status_code == 404 else dict(response.json())

    def fetch_result(self, name: str) -> Iterator[bytes]:
        """A file of the result, in chunks as they come.

        Raises:
            PotluckError: at the end, where the server replaced it meanwhile: what came is not to be used.
        """
        listed = {file["name"]: file["sha256"] for file in (self.result() or {}).get("files", [])}
        path, got, digest = f"/result/{quote(name, safe='')}", 0, hashlib.sha256()

        def asking() -> dict[str, Any]:
            return {"headers": {"Range": f"bytes={got}-"}} if got else {}

        for chunk in self.streamed("GET", path, asking, {"received": "result"}):
            got += len(chunk)
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != listed.get(name):
            raise PotluckError(f"{self._other_side} replaced {name} while it was fetched: fetch the result again.")

    def step(
        self, number: int, body: bytes, kinds: Mapping[str, int] | None = None, received: str = "answers"
    ) -> bytes:
        """Send a step's message and wait for its answer, however long that takes while the server is there.

        Args:
            number: ascending; the same again is the same step.
            body: at most 64 MiB.
            kinds: bytes of each kind of tensors in it, for ``traffic``.
            received: the kind of the answer.
        """
        path = f"/step?number={number}"
        while True:
            told = {"sent": {"steps": len(body)} if kinds is None else kinds, "received": received}
            response = self.ask("POST", path, body, read_s=_STEP_S, extensions=told)
            while response.status_code == 204:
                response = self.ask("GET", path, read_s=_STEP_S, accept=(404,), extensions={"received": received})
            if response.status_code == 200:
                return response.content
            # 404: the server was started again and does not know the step

    def alive(self) -> None:
        """Let the server know that this client is still here."""
        self.ask("POST", "/alive", extensions=_CONTROL)
