import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from potluck.bench import fetch
from potluck.bench.html import text_of
from potluck.bench.manual import postgres_manual
from potluck.bench.partition import partition
from potluck.bench.tasks import load_task, pieces_of, subset, text_task, write_clients
from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.texts.encode import encode
from potluck.texts.rows import read_rows


def byte_tokenizer(bos=False):
    """A token a byte, as byte-level BPE begins: a character may take four, and all of them begin where it does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, "<s>": 1, **{letter: n for n, letter in enumerate(letters, 2)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", **special)


PLAIN, WITH_BOS = byte_tokenizer(), byte_tokenizer(bos=True)
DOCUMENTS = {f"topic {n}": f"words of topic {n} " * (3 + n) for n in range(20)}


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab é\n\N{GRINNING FACE}", max_size=120), bos=st.booleans(), longest=st.integers(7, 40))
def test_pieces_are_the_text_and_each_is_one_example(text, bos, longest):
    tokenizer = WITH_BOS if bos else PLAIN
    pieces = pieces_of(text, tokenizer, longest)
    assert "".join(pieces) == text
    for piece in pieces:
        assert len(tokenizer(piece, add_special_tokens=False)["input_ids"]) + 1 + bos <= longest


def test_pieces_are_as_long_as_they_may_be():
    assert [len(piece) for piece in pieces_of("a" * 70, PLAIN, 32)] == [31, 31, 8]


def test_text_holds_out_whole_topics():
    task = text_task("text", DOCUMENTS, PLAIN, seed=0, max_length=32)
    learned = set(task.labels)
    assert len(learned) == 18
    assert len(task.labels) == len(task.train)
    held_out_topics = DOCUMENTS.keys() - learned
    assert len(held_out_topics) == 2
    for row in task.held_out:
        assert any(row["text"] in DOCUMENTS[topic] for topic in held_out_topics)
    assert not {row["text"] for row in task.held_out} & {row["text"] for row in task.train}
    assert task == text_task("text", DOCUMENTS, PLAIN, seed=0, max_length=32)
    assert task != text_task("text", DOCUMENTS, PLAIN, seed=1, max_length=32)


def test_every_token_of_a_text_is_learned():
    task = load_task("text", PLAIN, examples=20)
    assert len(task.train) == 20
    encoded = encode(task.held_out_rows(), PLAIN, Data(max_length=task.max_length))
    assert len(encoded.examples) == len(task.held_out)
    for example in encoded.examples:
        assert len(example.ids) <= 128
        assert all(example.supervised[1:])


def test_intents_are_held_out_by_template():
    pytest.importorskip("home_assistant_intents", reason="pip install 'potluck[demo]'")
    pytest.importorskip("hassil", reason="pip install 'potluck[demo]'")
    from potluck.demo.intents import sample_commands

    task = load_task("intents")
    assert 100 <= len(task.held_out) <= 130
    assert all(row["completion"] == f" {label}" for row, label in zip(task.train, task.labels, strict=True))
    commands = sample_commands(0)
    assert not {c.template for c in commands.held_out} & {c.template for c in commands.train}
    assert [c.row() for c in commands.held_out] == list(task.held_out)


def test_a_subset_keeps_rows_with_their_labels():
    task = text_task("text", DOCUMENTS, PLAIN, seed=0, max_length=32)
    part = subset(task, 7, 3)
    assert len(part.train) == 7
    assert part.held_out == task.held_out
    pairs = list(zip(task.labels, (row["text"] for row in task.train), strict=True))
    assert all(pair in pairs for pair in zip(part.labels, (row["text"] for row in part.train), strict=True))
    assert subset(task, 10**6, 3) is task
    with pytest.raises(BadInput, match="0 examples"):
        subset(task, 0, 3)


def test_clients_files_are_read_back(tmp_path):
    task = text_task("text", DOCUMENTS, PLAIN, seed=0, max_length=32)
    parts = partition(task.labels, 3, "topic", 0)
    files = write_clients(task, parts, tmp_path / "data")
    assert [file.name for file in files] == ["client-0.jsonl", "client-1.jsonl", "client-2.jsonl"]
    for file, part in zip(files, parts, strict=True):
        assert [row.text for row in read_rows([str(file)], "auto")] == [task.train[i]["text"] for i in part]
    assert json.loads(files[0].read_text().splitlines()[0]).keys() == {"text"}


def test_what_cannot_be_a_task():
    with pytest.raises(BadInput, match="no task 'poems'"):
        load_task("poems")
    with pytest.raises(BadInput, match="tokenizer"):
        load_task("text")
    with pytest.raises(BadInput, match="1 topics"):
        text_task("text", {"one": "a b"}, PLAIN, seed=0)


def test_a_page_is_read_without_navigation():
    page = """<html><head><title>no</title><meta charset="utf-8" /></head><body>
      <div class="navheader"><table><tr><td>Prev<br>up<hr /></td></tr></table></div>
      <h1>VACUUM</h1><p>Some <code>code</code>  &amp;
      more<br />after</p><pre>a (
    b
)</pre><div class="navfooter">Next</div></body></html>"""
    assert text_of(page) == "VACUUM\nSome code & more\nafter\na (\n    b\n)\n"


def test_a_manual_that_cannot_be_fetched_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def refused(command, **_):
        return subprocess.CompletedProcess(command, 100, b"", b"E: Unable to locate package postgresql-doc-15\n")

    monkeypatch.setattr(fetch.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(fetch.subprocess, "run", refused)
    with pytest.raises(BadInput, match="cannot be fetched: E: Unable to locate package"):
        postgres_manual(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(fetch.shutil, "which", lambda tool: None)
    with pytest.raises(BadInput, match="there is no apt-get"):
        postgres_manual(tmp_path)


@pytest.mark.slow
def test_the_manual_is_fetched_once(tmp_path, monkeypatch):
    try:
        pages = postgres_manual(tmp_path)
    except BadInput as reason:
        pytest.skip(str(reason))
    assert len(pages) > 1000
    assert "garbage-collect" in pages["sql-vacuum"]
    assert "Prev" not in pages["sql-vacuum"].splitlines()[0]
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert postgres_manual(tmp_path) == pages
