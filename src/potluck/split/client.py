"""A client, top to bottom: say hello, compute activations once, upload them, and leave."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.control.identity import user_data
from potluck.control.invite import Invite
from potluck.control.names import check_name, host_name
from potluck.errors import BadInput, SaveFailed
from potluck.models.cache import user_cache
from potluck.models.durable import saving
from potluck.models.memory import free_at_once, memory_mib, trim
from potluck.models.save import check_output
from potluck.split.client_data import ClientData, client_data, parse_holdout
from potluck.split.client_model import find_model
from potluck.split.fetch import fetch_adapter, wait_for_result
from potluck.split.keys import own_key
from potluck.split.listener import SplitListener
from potluck.split.one_shot import contribute_once
from potluck.split.terms import Terms, parse_terms
from potluck.split.traffic import Traffic
from potluck.split.uplink import PATIENCE_S, Uplink
from potluck.texts.rows import read_rows


@dataclass(frozen=True)
class Client:
    """Who contributes, and how."""

    name: str = ""
    """Unique among the server's clients; the host name if empty."""
    model: str | None = None
    """A copy of the model on this machine; None fetches the parts that are needed from the server."""
    holdout: str = "0"
    """Examples held back to judge by: a part (``10%``) or a number."""
    send_ids: bool = False
    """Whether the server may have token ids, which are the text itself."""
    patience_s: float = PATIENCE_S
    """How long the server may be away."""
    home: Path | None = None
    """Where keys are kept; the user's data directory if left out."""
    spool: Path | None = None
    """Where shards lie until they are uploaded; the user's cache directory if left out."""
    keep: Path | None = None
    """A directory that gets a copy of what is uploaded (one-shot only)."""


@dataclass(frozen=True)
class Contributed:
    """What a client did."""

    name: str
    contribution: str
    """Its id; empty in step schemes."""
    examples: int
    held_out: int
    dropped: int
    target_tokens: int
    bytes: dict[str, dict[str, int]]
    """``sent`` and ``received``, by kind of message."""
    active_s: float
    """Seconds computing or connected, without waiting for a result."""
    peak_rss_mib: float
    adapter: str | None = None
    """Where the adapter was put, if it was waited for."""

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object."""
        return asdict(self)


def contribute(
    invite: str,
    data: Sequence[str],
    client: Client | None = None,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    traffic: Traffic | None = None,
    listener: SplitListener | None = None,
) -> Contributed:
    """Contribute examples to a server: once, or in step schemes for as long as training takes.

    Ended at any time, it goes on where it was when it is called again with the same data.

    Args:
        invite: what ``potluck serve`` printed.
        data: files, directories or hub ids (see :func:`potluck.texts.rows.read_rows`).
        client: who contributes, and how.
        output: wait for the adapter and put it there; None leaves after the upload.
        overwrite: replace what is at ``output``.
        traffic: counts, and may slow, what passes.
        listener: told how it goes.

    Raises:
        BadInput: the invite, the data or the name cannot be used, or the server refuses.
        DeviceLost: the server does not answer.
        SaveFailed: the disk is full.
    """
    client, listener, traffic = client or Client(), listener or SplitListener(), traffic or Traffic()
    free_at_once()
    name = _name(client)
    holdout = parse_holdout(client.holdout)
    invitation = Invite.decode(invite)
    for target in (output, client.keep):
        if target is not None:
            check_output(target, overwrite and target is output)
    rows = read_rows(list(data), "auto")  # what cannot be read is refused before anybody is dialled
    key = _key(client, invitation, name)
    spool = _own_directory(client.spool or user_cache() / "contributions", invitation, name)
    began = time.monotonic()
    listener.tell(f"Contributing to the server at {invitation.host} as {name}.")
    with Uplink.open(invitation, name, key, patience_s=client.patience_s, traffic=traffic) as uplink:
        terms = parse_terms(uplink.terms)
        _check_terms(terms, client)
        model = find_model(uplink, terms, client.model, invitation.fingerprint, listener.tell)
        if terms.data.format != "auto":
            rows = read_rows(list(data), terms.data.format)
        _make(spool)
        trained_before = uplink.result() if output is not None else None
        examples = client_data(rows, model.directory, terms, holdout, key, spool)
        del rows
        trim()
        _tell_examples(examples, listener)
        contribution = ""
        if terms.split.scheme == "one-shot":
            contribution = contribute_once(uplink, terms, model, examples, name, spool, client.keep, listener)
        else:
            from potluck.split.step_client import take_steps  # brings the optimizer along

            take_steps(uplink, terms, model, examples, listener)
        active_s = time.monotonic() - began
        adapter = None
        if output is not None:
            but = "" if contribution or trained_before is None else str(trained_before["state"])
            wait_for_result(uplink, listener, contribution=contribution, but=but)
            fetch_adapter(uplink, output, client.model, overwrite=overwrite, tell=listener.tell, format=examples.format)
            adapter = str(output)
    return Contributed(
        name=name,
        contribution=contribution,
        examples=len(examples.train),
        held_out=len(examples.held_out),
        dropped=examples.dropped,
        target_tokens=sum(sum(example.supervised) for example in examples.train),
        bytes=traffic.to_json(),
        active_s=active_s,
        peak_rss_mib=memory_mib("VmHWM"),
        adapter=adapter,
    )


def withdraw(invite: str, client: Client | None = None) -> str:
    """Have the server delete all that this client contributed; the client's name.

    Raises:
        BadInput: the invite cannot be used, or the server refuses.
        DeviceLost: the server does not answer.
    """
    client, invitation = client or Client(), Invite.decode(invite)
    name = _name(client)
    with Uplink.open(invitation, name, _key(client, invitation, name), patience_s=client.patience_s) as uplink:
        uplink.withdraw()
    return name


def fetch(
    invite: str,
    output: Path,
    client: Client | None = None,
    *,
    overwrite: bool = False,
    listener: SplitListener | None = None,
) -> None:
    """Put the server's adapter into a directory.

    Args:
        invite: what ``potluck serve`` printed.
        output: empty or absent, unless ``overwrite``.
        client: who asks; with ``model``, the adapter names that copy as its base.
        overwrite: replace what is there.
        listener: told what the adapter needs.

    Raises:
        BadInput: the invite cannot be used, nothing was trained yet, or the output may not be written.
        DeviceLost: the server does not answer.
        SaveFailed: the disk is full.
    """
    client, listener, invitation = client or Client(), listener or SplitListener(), Invite.decode(invite)
    check_output(output, overwrite)
    name = _name(client)
    with Uplink.open(invitation, name, _key(client, invitation, name), patience_s=client.patience_s) as uplink:
        fetch_adapter(uplink, output, client.model, overwrite=overwrite, tell=listener.tell)


def _name(client: Client) -> str:
    name = client.name or host_name()
    check_name(name)
    return name


def _key(client: Client, invite: Invite, name: str) -> str:
    return own_key(_own_directory(client.home or user_data(), invite, name))


def _own_directory(base: Path, invite: Invite, name: str) -> Path:
    """A directory for one client of one server: a client's key must not tell one server what it is at another."""
    named = hashlib.sha256(invite.fingerprint + name.casefold().encode()).hexdigest()[:32]
    return base / "clients" / named


def _make(spool: Path) -> None:
    try:
        with saving(spool):
            spool.mkdir(parents=True, exist_ok=True, mode=0o700)  # whoever reads it can read the texts
    except OSError as error:
        raise SaveFailed(
            f"{spool}, where activations lie until they are sent, cannot be made: {error.strerror}."
        ) from None


def _check_terms(terms: Terms, client: Client) -> None:
    """See that this client agrees to what the server asks for."""
    if client.keep is not None and terms.split.scheme != "one-shot":
        raise BadInput(
            f"--keep is for one-shot: this server's scheme is {terms.split.scheme}, in which no contribution is"
            " uploaded. Leave it out."
        )
    if terms.split.targets == "ids" and terms.split.scheme != "u-shaped" and not client.send_ids:
        raise BadInput(
            "This server asks for token ids, which are your text itself. If you trust it with your text, say"
            " --send-ids; else ask for a server with 'targets: embeddings'."
        )


def _tell_examples(examples: ClientData, listener: SplitListener) -> None:
    held = f", {len(examples.held_out):,} more held back to judge by" if examples.held_out else ""
    dropped = (
        f"; {examples.dropped:,} rows dropped, their answers lie beyond the longest example" if examples.dropped else ""
    )
    listener.tell(f"{len(examples.train):,} examples{held}{dropped}.")
