"""The server, top to bottom: hands out an invite and the model, takes contributions, trains, hands out the adapter."""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.control.address import listening_address
from potluck.control.identity import Identity, write_private
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.adapter import WEIGHTS_FILE
from potluck.models.save import check_output
from potluck.split.backend import EXPECTED_CLIENTS, StoreBackend
from potluck.split.door import SplitDoor
from potluck.split.listener import SplitListener
from potluck.split.result import Outcome
from potluck.split.settings import settle
from potluck.split.step_run import train_in_steps
from potluck.split.step_table import StepTable
from potluck.split.store import Store
from potluck.split.trainer import train_store

SERVER_FILE = "server.json"
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Serving:
    """Where a server is reached, and when it trains."""

    train_when: int | None = None
    """Train as soon as so many clients have contributed; None leaves that to ``potluck train``."""
    address: str | None = None
    """Where clients reach it; the address of the default route if left out."""
    port: int = 0
    """0 takes a free one the first time, and the same again later."""
    home: Path | None = None
    """Where the server's certificate is kept; the user's data directory if left out."""


def serve(
    job: Job,
    serving: Serving | None = None,
    *,
    listener: SplitListener | None = None,
    until: Callable[[Outcome | None], bool] = lambda outcome: False,
) -> Outcome | None:
    """Serve clients until ``until`` says that it is enough; what was trained meanwhile, if anything.

    In the one-shot scheme contributions are kept in the store, and may come at any time. In step schemes training
    begins when the expected clients have come. The invite outlives restarts.

    Args:
        job: the server's.
        serving: where, and when to train.
        listener: told how it goes.
        until: asked about twice a second, with what was trained.

    Raises:
        BadInput: the job cannot be used, or the address or port cannot be listened on.
        DeviceLost: in a step scheme, every client has left.
        SaveFailed: the disk is full.
    """
    listener, serving = listener or SplitListener(), serving or Serving()
    address = listening_address(serving.address)
    settled = settle(job, listener)
    split, stepwise = settled.split, settled.split.scheme != "one-shot"
    expected = serving.train_when or split.clients
    if stepwise and expected is None:
        raise BadInput(
            f"In the scheme {split.scheme} training begins when all clients have come: say how many with --train-when"
            " or split.clients."
        )
    trained_before = not stepwise and not job.overwrite and (job.output / WEIGHTS_FILE).is_file()
    if trained_before and serving.train_when is not None:
        listener.tell(f"Handing out the adapter in {job.output}; to train again, 'potluck train --continue'.")
    elif stepwise or serving.train_when is not None:
        check_output(job.output, job.overwrite)
    train_when = None if trained_before else serving.train_when
    store = Store(settled.store_dir)
    with store.serving():
        kept = _kept(store.directory / SERVER_FILE)
        table = StepTable() if stepwise else None
        backend = StoreBackend(settled, store, expected or EXPECTED_CLIENTS, table, listener)
        port, secret = serving.port or int(kept.get("port", 0)), str(kept.get("secret") or secrets.token_urlsafe(16))
        identity = Identity.load(serving.home)
        with SplitDoor(identity, address, port, secret, backend, settled.files) as door:
            content = json.dumps({"port": door.invite.port, "secret": secret}).encode()
            write_private(store.directory / SERVER_FILE, content)
            listener.invited(door.invite.encode(), split.scheme)
            outcome = None
            if table is not None:
                assert expected is not None
                try:
                    outcome = train_in_steps(settled, table, expected, listener)
                finally:
                    table.end("The server's training is over.")
            looked_at = -1
            while not until(outcome):
                if outcome is None and train_when is not None and looked_at != backend.commits:
                    looked_at = backend.commits
                    if _contributors(store) >= train_when:
                        outcome = train_store(job, listener=listener)
                time.sleep(_LOOK_EVERY_S)
    return outcome


def _contributors(store: Store) -> int:
    return len({manifest.client for manifest in store.contributions()})


def _kept(path: Path) -> dict[str, Any]:
    """Port and secret of this store's server as it was before."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return dict(content) if isinstance(content, dict) else {}
