"""What a curious server, which has the public model, can read in a contribution; found out by reading it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import eq
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from potluck.control.files import ModelFiles
from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.shapes import check_shapes
from potluck.models.source import resolve
from potluck.models.tables import embedding_tables, head_of
from potluck.split.agreement import Manifest, agreement_of, differences
from potluck.split.check import Limits
from potluck.split.forward import supervised_positions
from potluck.split.invert import CERTAIN, Inverter, Reading, nearest_rows
from potluck.split.kept import KeptExample, longest_example, read_examples, read_manifest, read_table
from potluck.split.listener import SplitListener
from potluck.split.parts import client_part
from potluck.texts.codec import codec_of
from potluck.texts.encode import encode
from potluck.texts.formats import Row
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer

LONGEST = 128
"""Positions of an example that are read; those behind them can be read in the same way."""

_OWN_AT_ONCE = 64
_SAME = 5 * CERTAIN  # on the average of an example's positions


@dataclass(frozen=True)
class Shares:
    """Parts of the tokens that were read rightly, 0 to 1."""

    targets: float
    """Of the tokens to be learned, from the rows (or ids) that were uploaded for them."""
    activations: float
    """Of the tokens that went through the client part, from the activations; the last of an example does not."""
    together: float
    """Of all tokens of the examples, from both."""


@dataclass(frozen=True)
class Audit:
    """What was read in a contribution."""

    client: str
    cut: int
    encoding: str
    target_kind: str
    """``embeddings`` or ``ids``."""
    examples: int
    """How many were read, of those the contribution holds."""
    tokens: int
    """Tokens of these examples, as far as they were read."""
    shortened: int
    """Examples of which only the first :data:`LONGEST` positions were read; the others can be read in the same way."""
    certain: float
    """Part of the positions, 0 to 1, at which the tokens read give back the very activation that was uploaded."""
    compared: int
    """Examples found in the person's own file; 0 without one."""
    shares: Shares | None
    """Over the examples compared."""
    texts: tuple[str, ...]
    """What was read, as text, of each example."""

    def sentences(self) -> list[str]:
        """The result in plain words."""
        place = f"{self.encoding}, behind block {self.cut}"
        if self.shares is None:
            return [
                f"The words below were read out of {self.examples} examples as you uploaded them ({place}). The server "
                "can read them too, and so can whoever has the model and your upload.",
                f"{self.certain:.0%} of the tokens are certain: they give back the very activations you uploaded.",
            ]
        s = self.shares
        lines = [
            f"From the targets: {s.targets:.1%} of the tokens to be learned.",
            f"From the activations ({place}): {s.activations:.1%} of the tokens.",
            f"From both together: {s.together:.1%} of all tokens.",
            f"Whoever has the model reads {s.together:.0%} of the tokens (words and parts of words) of these "
            f"{self.compared} examples from what you uploaded.",
            "A better attack than this one may read more. Fewer bits (int8, int4) save traffic; they do not protect.",
        ]
        if self.shortened:
            lines.append(f"Of {self.shortened} long examples only the first {LONGEST} tokens were tried.")
        if missing := self.examples - self.compared:
            lines.append(f"{missing} more examples were not found in your file and are not counted.")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object."""
        return asdict(self)


def audit(
    contribution_dir: Path,
    *,
    model: str,
    data: str | None = None,
    examples: int = 20,
    seed: int = 0,
    listener: SplitListener | None = None,
) -> Audit:
    """Read a contribution as a curious server could.

    Args:
        contribution_dir: shards and their manifest, as ``potluck contribute --keep`` leaves them.
        model: the public model: a directory, a hub id or a .gguf file.
        data: the person's own file, to count what was read rightly; None reads only.
        examples: how many, drawn uniformly.
        seed: of the draw.
        listener: told how it goes.

    Raises:
        BadInput: the directory is no contribution or is damaged, it was made with another model, or ``data`` holds none
            of its examples.
    """
    listener = listener or SplitListener()
    if examples < 1:
        raise BadInput(f"--examples is {examples}: at least one is needed.")
    manifest = read_manifest(contribution_dir)
    agreement = manifest.agreement
    rows = None if data is None else read_rows([data], "auto")
    model_dir = resolve(model, tell=listener.tell)
    mine = agreement_of(ModelFiles(model_dir).listing(), agreement.cut, agreement.encoding, agreement.targets)
    if told := differences(mine, agreement):
        raise BadInput(f"{contribution_dir} was made with another model than {model_dir}. {told}")
    decoder = decoder_of(read_config(model_dir))
    limits = Limits(agreement, decoder.hidden_size, decoder.vocab_size, decoder.max_positions)
    kept = read_examples(contribution_dir, manifest, limits, examples, seed)
    with Checkpoint.open(model_dir) as checkpoint:
        check_shapes(checkpoint, decoder)
        targets = _targets(contribution_dir, manifest, limits, kept, checkpoint.read(head_of(decoder)))
        inverter = Inverter(
            client_part(checkpoint, decoder, agreement.cut, compute=torch.float32, adapter=None, seed=0),
            checkpoint.read(embedding_tables(decoder)[0], dtype=torch.float32),
            agreement.encoding,
            seed,
            lambda done, total: listener.progress("Learning to read, tokens", done, total),
        )
        read: list[_Read] = []
        for example, target_ids in zip(kept, targets, strict=True):
            begun = example.begin(LONGEST)
            reading = inverter.read(begun.sent)
            read.append(_Read(begun, reading, target_ids[: len(begun.targets)]))
            listener.progress("Reading examples", len(read), len(kept))
        own: list[tuple[int, ...]] = []
        if rows is not None:
            mine_by_shape = _by_shape(rows, model_dir, 1 + longest_example(contribution_dir, manifest))
            for example, each in zip(kept, read, strict=True):
                own.append(_found(inverter, each, mine_by_shape.get(_shape(example), [])))
                listener.progress("Comparing with your examples", len(own), len(kept))
            if not any(own):
                raise BadInput(
                    f"{data} holds none of the {len(kept)} examples drawn from {contribution_dir}: name the file that "
                    "was contributed."
                )
    codec = codec_of(load_tokenizer(model_dir))
    certain = [each for one in read for each in one.reading.certain]
    return Audit(
        client=manifest.client,
        cut=agreement.cut,
        encoding=agreement.encoding,
        target_kind=agreement.targets,
        examples=len(kept),
        tokens=sum(len(one.ids) for one in read),
        shortened=sum(len(example.sent.x_TD) > LONGEST for example in kept),
        certain=sum(certain) / len(certain),
        compared=sum(bool(ids) for ids in own),
        shares=_shares([(one, ids) for one, ids in zip(read, own, strict=True) if ids]) if own else None,
        texts=tuple(codec.decode(one.ids) for one in read),
    )


@dataclass(frozen=True)
class _Read:
    """An example's first positions, and what was read of them."""

    example: KeptExample
    reading: Reading
    target_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens as far as they are told: those that are targets by their rows, the others by activations."""
        told = dict(enumerate(self.reading.ids))
        told |= {p + 1: token for p, token in zip(self.example.positions, self.target_ids, strict=True)}
        return tuple(told[i] for i in sorted(told))


def _targets(
    directory: Path, manifest: Manifest, limits: Limits, kept: Sequence[KeptExample], table_VD: Tensor
) -> list[tuple[int, ...]]:
    """Token ids of each example's targets, as they are read from their rows."""
    if manifest.agreement.targets == "ids":
        return [example.targets for example in kept]
    rows_UD = read_table(directory, manifest, "table", limits)
    places = sorted({place for example in kept for place in example.targets})
    if places[-1] >= len(rows_UD):
        raise BadInput(
            f"A target has row {places[-1]}, but the table in {directory} has {len(rows_UD)}: it is damaged."
        )
    ids = dict(zip(places, nearest_rows(rows_UD[places], table_VD, manifest.agreement.encoding), strict=True))
    return [tuple(ids[place] for place in example.targets) for example in kept]


_Shape = tuple[int, tuple[int, ...]]


def _shape(example: KeptExample) -> _Shape:
    return len(example.sent.x_TD), example.positions


def _by_shape(rows: Sequence[Row], model_dir: Path, longest: int) -> dict[_Shape, list[tuple[int, ...]]]:
    """Ids of the person's examples, by the positions and supervised positions they have.

    An example that the server's job had cut has as many tokens as the longest one that was sent.
    """
    tokenizer = load_tokenizer(model_dir)
    found: dict[_Shape, dict[tuple[int, ...], None]] = {}
    for supervise in get_args(Data.model_fields["supervise"].annotation):
        data = Data(supervise=supervise, max_length=longest)
        for example in encode(rows, tokenizer, data).examples:
            found.setdefault((len(example.ids) - 1, supervised_positions(example)), {})[example.ids] = None
    return {shape: [*ids] for shape, ids in found.items()}


def _found(inverter: Inverter, read: _Read, own: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The person's example whose activations were uploaded, as far as it was read; empty if it is none of them."""
    sent = read.example.sent
    T = len(sent.x_TD)
    if all(read.reading.certain):  # what was read gives back the activations: an equal example needs no other proof
        for ids in own:
            if ids[:T] == read.reading.ids:
                return ids[: T + 1]
    nearest, found = _SAME, tuple[int, ...]()
    for start in range(0, len(own), _OWN_AT_ONCE):
        some = own[start : start + _OWN_AT_ONCE]
        distance, at = inverter.distances(torch.tensor([ids[:T] for ids in some]), sent).mean(1).min(0)
        if distance < nearest:
            nearest, found = float(distance), some[int(at)][: T + 1]
    return found


def _shares(compared: Sequence[tuple[_Read, tuple[int, ...]]]) -> Shares:
    targets: list[bool] = []
    activations: list[bool] = []
    together: list[bool] = []
    for read, ids in compared:
        true_targets = [ids[position + 1] for position in read.example.positions]
        targets += map(eq, read.target_ids, true_targets)
        activations += map(eq, read.reading.ids, ids)
        together += map(eq, read.ids, ids)
    return Shares(*(sum(right) / len(right) if right else 0.0 for right in (targets, activations, together)))
