"""What the split server does for its clients, over the store on its disk."""

import hashlib
import json
import math
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from potluck.control.files import ModelFile
from potluck.errors import BadInput
from potluck.models.adapter import CONFIG_FILE, TEMPLATE_FILE, WEIGHTS_FILE
from potluck.split.agreement import contribution_id, parse_manifest
from potluck.split.listener import SplitListener
from potluck.split.quality import OVERALL
from potluck.split.routes import Result
from potluck.split.settings import Settled, own_template
from potluck.split.step_table import StepTable
from potluck.split.store import Store
from potluck.split.terms import QUALITY_FILE, Terms

_HANDED_OUT = (WEIGHTS_FILE, CONFIG_FILE, TEMPLATE_FILE, QUALITY_FILE)
EXPECTED_CLIENTS = 4
"""Where neither the job nor the command line says how many clients will come."""


class StoreBackend:
    """The server behind the door; its methods are called from several threads."""

    def __init__(
        self, settled: Settled, store: Store, expected: int, table: StepTable | None, listener: SplitListener
    ) -> None:
        """Prepare to serve.

        Args:
            settled: the job.
            store: keeps what is contributed; of this process alone to change.
            expected: clients, among whom the negatives are shared out.
            table: takes steps; None in one-shot.
            listener: told who comes and what is contributed.
        """
        self._settled, self._store, self._expected = settled, store, expected
        self._table, self._listener = table, listener
        self.takes_steps = table is not None
        self.commits = 0
        """How many contributions came since the server began."""
        self._template = own_template(settled.job)
        self._lock = threading.Lock()
        self._digests: dict[tuple[str, int, int], str] = {}

    def register(self, name: str, key_digest: str) -> None:
        """Know a client; see :meth:`potluck.split.store.Store.register`."""
        if name.casefold() == OVERALL:
            raise BadInput(f"{name} is what all clients together are called: take another name with --name.")
        known = self._store.client(key_digest) is not None
        self._store.register(name, key_digest)
        if not known:
            self._listener.tell(f"{name} has come.")

    def client(self, key_digest: str) -> str | None:
        """The client with this key."""
        return self._store.client(key_digest)

    def terms(self, client: str) -> dict[str, Any]:
        """What this client is asked for."""
        settled, job = self._settled, self._settled.job
        limits = settled.limits
        return Terms(
            split=settled.split.model_copy(update={"store": None}),
            data=job.data.model_copy(update={"train": [], "eval": []}),
            template=self._template,
            agreement=settled.agreement,
            negatives=self._negatives(client),
            hidden_size=limits.hidden_size,
            vocab_size=limits.vocab_size,
            longest=limits.max_positions,
            train="ia3" if job.train == "ia3" else "lora",
            lora=job.lora,
            ia3=job.ia3,
            seed=job.seed,
            optimizer=job.optimizer,
            learning_rate=job.learning_rate,
            schedule=job.schedule,
            warmup=job.warmup,
            weight_decay=job.weight_decay,
            clip=job.clip,
            dtype=job.dtype,
        ).model_dump(mode="json")

    def missing(self, client: str, shas: list[str]) -> list[str]:
        """Shards that are not here."""
        self._check_scheme()
        return self._store.missing(shas)

    def incoming(self) -> AbstractContextManager[Path]:
        """Where a shard is received."""
        return self._store.incoming()

    def accept(self, client: str, path: Path, sha256: str) -> None:
        """Check and keep a shard."""
        try:
            self._store.accept(path, sha256, self._settled.limits, client)
        except BadInput as error:
            self._listener.tell(f"A shard of {client} was refused: {error}")
            raise

    def commit(self, client: str, contribution: str, manifest: dict[str, Any]) -> None:
        """Make a contribution whole."""
        parsed = parse_manifest(json.dumps(manifest))
        if contribution_id(parsed) != contribution:
            raise BadInput("The contribution's id is not that of its manifest.")
        self._store.commit(parsed, client, self._settled.limits)
        with self._lock:
            self.commits += 1
        train = [shard for shard in parsed.shards if shard.part == "train"]
        mib = sum(shard.bytes for shard in parsed.shards) / 2**20
        self._listener.tell(f"{client} has contributed {sum(s.examples for s in train):,} examples ({mib:,.1f} MiB).")

    def withdraw(self, client: str) -> None:
        """Delete a client's contributions."""
        count = self._store.withdraw(client)
        self._listener.tell(
            f"{client} has withdrawn {count} contribution{'s' * (count != 1)}; their files are deleted."
        )

    def result(self) -> Result | None:
        """The adapter at the job's output."""
        output = self._settled.job.output
        try:
            files = [self._file(output / name) for name in _HANDED_OUT if (output / name).is_file()]
        except OSError:
            return None  # it is being replaced
        named = {file.name: file for file in files}
        if WEIGHTS_FILE not in named or CONFIG_FILE not in named:
            return None
        return Result(named[WEIGHTS_FILE].sha256, output, tuple(files))

    def step(self, client: str, number: int, body: bytes) -> "Future[bytes]":
        """A message of a client that stays connected."""
        if self._table is None:
            raise BadInput("This server's scheme is one-shot: clients upload once, and take no steps.")
        return self._table.put(client, body)

    def alive(self, client: str) -> None:
        """A sign of life."""
        if self._table is not None:
            self._table.alive(client)

    def _negatives(self, client: str) -> int:
        """This client's part of the negatives; none where others brought enough."""
        split = self._settled.split
        if split.targets == "ids" or split.scheme == "u-shaped" or split.negatives == "table":
            return 0
        share = math.ceil(split.negatives / self._expected)
        others = [manifest for manifest in self._store.contributions() if manifest.client != client]
        here = sum(shard.rows for manifest in others for shard in manifest.shards if shard.part == "negatives")
        return max(0, min(share, split.negatives - here))

    def _check_scheme(self) -> None:
        if self._table is not None:
            raise BadInput(
                f"This server's scheme is {self._settled.split.scheme}: clients take steps, and upload nothing."
            )

    def _file(self, path: Path) -> ModelFile:
        status = path.stat()
        stamp = (path.name, status.st_size, status.st_mtime_ns)
        with self._lock:
            if stamp not in self._digests:
                with path.open("rb") as handle:
                    self._digests[stamp] = hashlib.file_digest(handle, "sha256").hexdigest()
            return ModelFile(path.name, status.st_size, self._digests[stamp])
