"""What a client and the server must have in common, and the manifest that makes a contribution whole."""

import hashlib
import json
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.control.files import ModelFile
from potluck.control.names import Name
from potluck.errors import BadInput, from_outside
from potluck.split.encoding import Encoding

Targets = Literal["embeddings", "ids"]
Part = Literal["train", "held-out", "table", "negatives"]
RECORD_PARTS: tuple[Part, ...] = ("train", "held-out")

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""A digest in hexadecimal."""
Count = Annotated[int, Field(ge=0, lt=1 << 48)]

_MOST_SHARDS = 50_000
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Agreement(_Strict):
    """Records of clients can be trained on together only where all of this is equal."""

    model: Sha256
    """Of the weights and the configuration."""
    tokenizer: Sha256
    cut: Annotated[int, Field(ge=1, lt=100_000)]
    """Blocks on the client's side."""
    encoding: Encoding
    targets: Targets


class Shard(_Strict):
    """One shard, as the manifest lists it."""

    sha256: Sha256
    """Of the whole file; its name."""
    bytes: Count
    part: Part
    examples: Count = 0
    """0 in tables, as are ``tokens`` and ``targets``."""
    tokens: Count = 0
    """Positions of all examples."""
    targets: Count = 0
    """Supervised positions."""
    rows: Count
    """Activations stored (fewer than ``tokens`` where prefixes are shared), or rows of the table."""


class Manifest(_Strict):
    """All shards of one contribution. Several table shards are one table, in this order; so are negatives."""

    format: Literal[1] = 1
    client: Name
    agreement: Agreement
    data: Sha256
    """Over what was encoded: a contribution of the same data replaces the one before."""
    shards: Annotated[tuple[Shard, ...], Field(min_length=1, max_length=_MOST_SHARDS, strict=False)]

    def to_json(self) -> bytes:
        """Canonical JSON: equal manifests are equal bytes."""
        return _canonical(self.model_dump(mode="json"))


def parse_manifest(content: bytes | str) -> Manifest:
    """A manifest from outside.

    Raises:
        BadInput: it is not JSON, or a field is missing, unknown or impossible; names the field.
    """
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "it"
        raise BadInput(from_outside(f"This is no manifest of a contribution: {where}: {first['msg']}.")) from None


def contribution_id(manifest: Manifest) -> str:
    """SHA-256, hexadecimal, over agreement, data and client: the same data sent again is the same contribution."""
    named = {"agreement": manifest.agreement.model_dump(), "data": manifest.data, "client": manifest.client}
    return hashlib.sha256(_canonical(named)).hexdigest()


def agreement_of(files: Sequence[ModelFile], cut: int, encoding: Encoding, targets: Targets) -> Agreement:
    """The agreement on a model, from the digests of its files.

    Raises:
        BadInput: the files lack weights, the configuration or a tokenizer.
    """
    digests = {file.name: file.sha256 for file in files}
    weights = [name for name in sorted(digests) if name.endswith(".safetensors")]
    tokenizer = ["tokenizer.json"] if "tokenizer.json" in digests else _tokenizer_files(digests)
    for what, found in (("weights", weights), ("tokenizer", tokenizer)):
        if not found:
            raise BadInput(f"The model has no file of its {what}: copy it again.")
    if "config.json" not in digests:
        raise BadInput("The model has no config.json: copy it again.")
    return Agreement(
        model=_joined([digests[name] for name in [*weights, "config.json"]]),
        tokenizer=_joined([digests[name] for name in tokenizer]),
        cut=cut,
        encoding=encoding,
        targets=targets,
    )


def differences(mine: Agreement, theirs: Agreement) -> str | None:
    """One sentence that names what differs and both values; None if the two are equal."""
    ours, others = mine.model_dump(), theirs.model_dump()
    told = [f"{key} {_short(ours[key])} here, {_short(others[key])} there" for key in ours if ours[key] != others[key]]
    return f"The two sides do not agree: {'; '.join(told)}." if told else None


def _tokenizer_files(names: dict[str, str]) -> list[str]:
    return [name for name in sorted(names) if any(fnmatch(name, pattern) for pattern in _TOKENIZER_FILES)]


def _joined(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _short(value: object) -> str:
    return str(value)[:12]


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
