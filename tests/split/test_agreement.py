import json

import pytest
from contributed import agreement

from potluck.control.files import ModelFile
from potluck.errors import BadInput
from potluck.split.agreement import (
    Agreement,
    Manifest,
    Shard,
    agreement_of,
    contribution_id,
    differences,
    parse_manifest,
)

FILES = [
    ModelFile("config.json", 3, "c" * 64),
    ModelFile("generation_config.json", 3, "d" * 64),
    ModelFile("model-1.safetensors", 9, "1" * 64),
    ModelFile("model-2.safetensors", 9, "2" * 64),
    ModelFile("tokenizer.json", 5, "e" * 64),
]


def _agreed(files: list[ModelFile]) -> Agreement:
    return agreement_of(files, 2, "int8", "embeddings")


def _with(name: str, digest: str) -> list[ModelFile]:
    return [file._replace(sha256=digest) if file.name == name else file for file in FILES]


def _manifest(**changes: object) -> Manifest:
    shard = Shard(sha256="f" * 64, bytes=10, part="train", examples=1, tokens=3, targets=2, rows=3)
    fields = {"client": "ann", "agreement": agreement(), "data": "3" * 64, "shards": (shard,)} | changes
    return Manifest(**fields)  # type: ignore[arg-type]


def test_the_model_is_its_weights_and_configuration() -> None:
    whole = _agreed(FILES)
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors"):
        other = _agreed(_with(name, "9" * 64))
        assert other.model != whole.model
        assert other.tokenizer == whole.tokenizer
    assert _agreed(_with("tokenizer.json", "9" * 64)).tokenizer != whole.tokenizer
    assert _agreed(_with("generation_config.json", "9" * 64)) == whole
    assert _agreed(FILES[::-1]) == whole


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", ".safetensors"])
def test_a_model_without_its_parts_is_refused(lost: str) -> None:
    with pytest.raises(BadInput, match="The model has no"):
        _agreed([file for file in FILES if not file.name.endswith(lost)])


def test_a_slow_tokenizer_counts_by_its_files() -> None:
    files = [file for file in FILES if file.name != "tokenizer.json"]
    vocab = ModelFile("vocab.json", 5, "7" * 64)
    assert _agreed([*files, vocab]).tokenizer != _agreed([*files, vocab._replace(sha256="8" * 64)]).tokenizer


def test_differences_name_what_differs_with_both_values() -> None:
    assert differences(agreement(), agreement()) is None
    told = differences(agreement("int8", cut=2), agreement("bf16", cut=4))
    assert told == "The two sides do not agree: cut 2 here, 4 there; encoding int8 here, bf16 there."
    told = differences(agreement(), _agreed(FILES))
    assert told is not None
    assert "model 111111111111 here" in told
    assert "1" * 13 not in told


def test_a_manifest_is_the_same_after_json() -> None:
    manifest = _manifest()
    assert parse_manifest(manifest.to_json()) == manifest
    assert manifest.to_json() == parse_manifest(json.dumps(json.loads(manifest.to_json()), indent=3)).to_json()


def test_the_id_is_of_agreement_data_and_client() -> None:
    same = contribution_id(_manifest())
    shard = Shard(sha256="e" * 64, bytes=1, part="train", rows=1)
    assert contribution_id(_manifest(shards=(shard,))) == same
    others = [_manifest(client="bob"), _manifest(data="4" * 64), _manifest(agreement=agreement(cut=3))]
    assert len({same, *map(contribution_id, others)}) == 4


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("format",), 2, "format"),
        (("client",), "", "client"),
        (("client",), "../ann\n", "client"),
        (("client",), "a" * 101, "client"),
        (("data",), "xyz", "data"),
        (("data",), "3" * 64 + "\n", "data"),
        (("shards",), [], "shards"),
        (("shards", 0, "sha256"), "../../etc/passwd", "shards.0.sha256"),
        (("shards", 0, "bytes"), -1, "shards.0.bytes"),
        (("shards", 0, "bytes"), 1 << 60, "shards.0.bytes"),
        (("shards", 0, "examples"), "1", "shards.0.examples"),
        (("shards", 0, "part"), "other", "shards.0.part"),
        (("agreement", "cut"), 0, "agreement.cut"),
        (("agreement", "encoding"), "int2", "agreement.encoding"),
        (("agreement", "more"), 1, "agreement.more"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_named(path: tuple[str | int, ...], value: object, told: str) -> None:
    content = json.loads(_manifest().to_json())
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(BadInput, match=f"no manifest of a contribution: {told}"):
        parse_manifest(json.dumps(content))


def test_what_is_no_json_is_no_manifest() -> None:
    for content in (b"", b"\xff\x00", b"[" * 100_000, "null"):
        with pytest.raises(BadInput, match="no manifest"):
            parse_manifest(content)
