"""Training over a store: resumed it is the unbroken run, its adapter is for everybody, its judgement is right."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import little_store
import pytest
import torch
from little_store import COMMANDS, HELD_OUT, OWN, fill, little_job, written
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from potluck.errors import BadInput, PotluckError
from potluck.job import Job, load_job
from potluck.models.checkpoint import Checkpoint
from potluck.models.evaluate import evaluate
from potluck.models.inference import load_for_inference
from potluck.models.merge import merge
from potluck.models.precision import torch_dtype
from potluck.split import checkpoint as stored
from potluck.split import trainer
from potluck.split.assembly import assembly_of, example_weights, judging_table
from potluck.split.dataset import Dataset
from potluck.split.listener import SplitListener
from potluck.split.quality import Quality
from potluck.split.settings import settle
from potluck.split.store import Store
from potluck.split.trainer import CHECKPOINT_FILE, train_store
from potluck.texts.batch import Example
from potluck.texts.tokenizer import load_tokenizer

TRAIN = {client: len(rows) - HELD_OUT for client, rows in OWN.items()}


class Told(SplitListener):
    """Keeps what it is told, and gives up after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.steps: list[tuple[int, int]] = []
        self.losses: list[float] = []
        self.judgements: dict[str, Mapping[str, Quality]] = {}
        self.texts: list[str] = []
        self.done: list[tuple[str, int, int]] = []

    def tell(self, text: str) -> None:
        self.texts.append(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.done.append((what, done, total))

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        self.steps.append((step, steps))
        self.losses.append(loss)
        if step == self.stop_after:
            raise KeyboardInterrupt

    def judged(self, when: str, quality: Mapping[str, Quality]) -> None:
        self.judgements[when] = quality


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def adapter_of(job: Job) -> dict[str, Tensor]:
    return load_file(job.output / "adapter_model.safetensors")


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def with_output(job: Job, output: Path) -> Job:
    """The same job, elsewhere, over the same store."""
    assert job.split is not None
    split = job.split.model_copy(update={"store": settle(job, SplitListener()).store_dir})
    return job.model_copy(update={"output": output, "split": split})


def test_a_run_learns_and_says_what_it_did(tmp_path: Path) -> None:
    job = little_job(tmp_path, epochs=12)
    fill(job, tmp_path)
    told = Told()
    outcome = train_store(job, listener=told)
    examples = sum(TRAIN.values())
    steps = 12 * -(-examples // 8)
    assert told.steps == [(step, steps) for step in range(1, steps + 1)]
    assert (outcome.steps, outcome.examples, outcome.clients) == (steps, examples, ("ann", "bob"))
    assert outcome.loss_last == told.losses[-1] < outcome.loss_first == told.losses[0]
    assert outcome.before == told.judgements["before"]
    assert outcome.after == told.judgements["after"]
    for who in ("ann", "bob", "overall"):
        assert outcome.after[who].loss < 0.5 * outcome.before[who].loss
        assert outcome.after[who].examples == (2 if who == "overall" else 1) * HELD_OUT
    assert outcome.after["overall"].accuracy >= 0.5 > outcome.before["overall"].accuracy
    assert outcome.distinct_targets > 0 < outcome.negatives
    assert outcome.target_tokens == 3 * examples  # two letters and the end
    lines = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == told.losses
    written_quality = json.loads((job.output / "quality.json").read_text())
    assert written_quality["after"]["overall"]["loss"] == outcome.after["overall"].loss
    assert load_job(job.output / "job.yaml").split == job.split
    assert {"Judging before training", "Judging after training"} == {what for what, _, _ in told.done}
    assert all(done <= total for _, done, total in told.done)
    assert not (settle(job, SplitListener()).store_dir / CHECKPOINT_FILE).exists()


VARIANTS: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "ids": {"split": {"targets": "ids"}},
    "lion": {"optimizer": "lion", "weight_decay": 0.1},
    "int8, micro-batches, dropout, a cap": {
        "split": {"encoding": "int8", "weight_cap": 0.5},
        "micro_batch_size": 3,
        "lora": {"rank": 2, "dropout": 0.2, "targets": ["q_proj", "up_proj"]},
        "checkpointing": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop_after", [1, 6])
def test_resumed_it_is_the_unbroken_run_bit_for_bit(tmp_path: Path, variant: str, stop_after: int) -> None:
    job = little_job(tmp_path, **VARIANTS[variant])
    fill(job, tmp_path)
    unbroken = Told()
    train_store(job, listener=unbroken)
    again = with_output(job, tmp_path / "again")
    with pytest.raises(KeyboardInterrupt):
        train_store(again, listener=Told(stop_after), checkpoint_every_s=0)
    assert not again.output.exists()
    resumed = Told()
    train_store(again, listener=resumed, checkpoint_every_s=0)
    # the checkpoint of the step that was interrupted had not been written
    assert [step for step, _ in resumed.steps] == list(range(stop_after, len(unbroken.steps) + 1))
    assert resumed.losses == unbroken.losses[stop_after - 1 :]
    assert any(f"after step {stop_after - 1}," in text for text in resumed.texts) == (stop_after > 1)
    assert_equal(adapter_of(again), adapter_of(job))
    assert (again.output / "metrics.jsonl").read_bytes() == (job.output / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("change", [{"learning_rate": 0.01}, {"seed": 1}, {"epochs": 4}, "contribution"], ids=str)
def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path: Path, change: dict[str, Any] | str) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path, {"ann": COMMANDS[:20]})
    with pytest.raises(KeyboardInterrupt):
        train_store(job, listener=Told(2), checkpoint_every_s=0)
    if isinstance(change, str):
        fill(job, tmp_path, {"ann": COMMANDS[:20], "bob": COMMANDS[20:40]})
    else:
        job = job.model_copy(update=change)
    told = Told()
    train_store(job, listener=told)
    assert told.steps[0][0] == 1


def test_a_damaged_checkpoint_is_none(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_store(job, listener=Told(3), checkpoint_every_s=0)
    path = settle(job, SplitListener()).store_dir / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-7])
    told = Told()
    train_store(job, listener=told)
    assert told.steps[0][0] == 1


def test_trained_further_it_begins_with_the_adapter(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path)
    first = train_store(job)
    adapter = adapter_of(job)
    slow = job.model_copy(update={"learning_rate": 1e-9, "warmup": 0.0})
    with pytest.raises(BadInput, match="is not empty"):
        train_store(slow)
    second = train_store(slow, further=True)
    for name, tensor in adapter_of(job).items():
        torch.testing.assert_close(tensor, adapter[name], rtol=0, atol=1e-6)
    assert second.after["overall"].loss == pytest.approx(first.after["overall"].loss, abs=1e-5)
    third = train_store(job, further=True)
    assert third.after["overall"].loss < first.after["overall"].loss


def test_trained_further_it_is_resumed_from_the_same_adapter_only(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path)
    train_store(job)
    unbroken = with_output(job, tmp_path / "unbroken")
    for source in job.output.iterdir():
        unbroken.output.mkdir(exist_ok=True)
        (unbroken.output / source.name).write_bytes(source.read_bytes())
    train_store(unbroken, further=True)
    before = {path.name: path.read_bytes() for path in job.output.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        train_store(job, further=True, listener=Told(4), checkpoint_every_s=0)
    assert {path.name: path.read_bytes() for path in job.output.iterdir()} == before
    told = Told()
    train_store(job, further=True, listener=told)
    assert told.steps[0][0] == 4
    assert_equal(adapter_of(job), adapter_of(unbroken))


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"split": {"cut": 2}}, "it holds model.layers.1"),
        ({"lora": {"rank": 3}}, "it lacks model.layers.1.* of shape"),
        ({"lora": {"rank": 4, "alpha": 32.0}}, "its alpha is 16, but lora.alpha is 32"),
        ({"lora": {"rank": 4, "targets": ["q_proj"]}}, "which is not trained here"),
        ({"lora": {"rank": 4, "use_dora": True}}, "its use_dora is False, but lora.use_dora is True"),
        ({"lora": {"rank": 4, "use_rslora": True}}, "its use_rslora is False, but lora.use_rslora is True"),
        ({"train": "ia3", "lora": {}}, "it is of kind LORA, but train is ia3"),
    ],
    ids=["cut", "rank", "alpha", "targets", "dora", "rslora", "ia3"],
)
def test_an_adapter_of_something_else_is_not_trained_further(
    tmp_path: Path, differs: dict[str, Any], message: str
) -> None:
    job = little_job(tmp_path, steps=1)
    fill(job, tmp_path)
    train_store(job)
    before = adapter_of(job)
    elsewhere = {**differs, "split": {**differs.get("split", {}), "store": tmp_path / "other"}}
    other = little_job(tmp_path, steps=1, **elsewhere)
    fill(other, tmp_path)
    with pytest.raises(BadInput, match=message):
        train_store(other, further=True)
    assert_equal(adapter_of(job), before)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_adapter_is_one_for_stock_peft_and_merged_the_same(tmp_path: Path, tied: bool) -> None:
    little_store.save_word_model(tmp_path / "model", little_store.WORDS, num_hidden_layers=3, tie_word_embeddings=tied)
    job = little_job(tmp_path, epochs=6)
    held_out = fill(job, tmp_path)
    outcome = train_store(job)
    ids = torch.tensor([[1, 7, 12, 13, 14]])
    base = AutoModelForCausalLM.from_pretrained(job.model)
    plain = base(ids).logits.detach()
    adapted = PeftModel.from_pretrained(base, str(job.output))
    names = {n.replace(".default", "") for n, _ in adapted.named_parameters() if "lora_" in n}
    assert names == adapter_of(job).keys()
    assert {name.split("layers.")[1][0] for name in names} == {"1", "2"}
    logits = adapted(ids).logits.detach()
    assert (logits - plain).abs().max() > 0.1
    merge(job.output, Path(job.model), tmp_path / "merged", overwrite=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits.detach()
    torch.testing.assert_close(merged, logits, rtol=1e-4, atol=1e-4)
    assert_judged_as_by_stock_tools(job, outcome.before, outcome.after, held_out)


def assert_judged_as_by_stock_tools(
    job: Job, before: Mapping[str, Quality], after: Mapping[str, Quality], held_out: Mapping[str, Sequence[Example]]
) -> None:
    tokenizer = load_tokenizer(Path(job.model))
    everybody = [example for examples in held_out.values() for example in examples]
    for adapter, quality in ((None, before), (job.output, after)):
        model = load_for_inference(Path(job.model), adapter, torch.float32)
        for who, examples in {**held_out, "overall": everybody}.items():
            scores = evaluate(model, tokenizer, examples, batch_size=8, generate=True)
            assert quality[who].loss == pytest.approx(scores.loss, abs=1e-4)
            assert quality[who].perplexity == pytest.approx(scores.perplexity, rel=1e-4)
            assert quality[who].accuracy == scores.accuracy
            assert (quality[who].examples, quality[who].target_tokens) == (scores.examples, scores.target_tokens)


@pytest.mark.parametrize("targets", ["embeddings", "ids"])
def test_its_judgement_is_that_of_stock_tools(tmp_path: Path, targets: str) -> None:
    job = little_job(tmp_path, {"targets": targets}, epochs=8)
    held_out = fill(job, tmp_path)
    outcome = train_store(job)
    assert outcome.after["overall"].accuracy > 0
    assert_judged_as_by_stock_tools(job, outcome.before, outcome.after, held_out)


def test_with_every_row_drawn_rows_train_what_ids_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(little_store, "NEGATIVES", len(little_store.WORDS))
    adapters = []
    for targets in ("embeddings", "ids"):
        job = little_job(tmp_path, {"targets": targets, "store": tmp_path / targets}, output=tmp_path / f"of-{targets}")
        fill(job, tmp_path)
        train_store(job)
        adapters.append(adapter_of(job))
    rows, ids = adapters
    for name in ids:
        torch.testing.assert_close(rows[name], ids[name], rtol=0, atol=1e-4)


def test_the_servers_own_table_trains_what_ids_train(tmp_path: Path) -> None:
    adapters = []
    for name, split in (("ids", {"targets": "ids"}), ("rows", {"negatives": "table"})):
        job = little_job(tmp_path, {**split, "store": tmp_path / name}, output=tmp_path / f"of-{name}")
        fill(job, tmp_path)
        outcome = train_store(job)
        assert outcome is not None
        adapters.append(adapter_of(job))
    assert outcome.distinct_targets + outcome.negatives == len(little_store.WORDS)
    ids, rows = adapters
    for name in ids:
        torch.testing.assert_close(rows[name], ids[name], rtol=0, atol=1e-4)


def test_ids_and_rows_judge_the_same_model_the_same(tmp_path: Path) -> None:
    found = []
    for targets in ("embeddings", "ids"):
        job = little_job(tmp_path, {"targets": targets, "store": tmp_path / targets}, steps=1)
        fill(job, tmp_path)
        told = Told()
        train_store(job.model_copy(update={"output": tmp_path / f"adapter-{targets}"}), listener=told)
        found.append(told.judgements["before"])
    rows, ids = found
    for who in ("ann", "bob", "overall"):
        assert rows[who].loss == pytest.approx(ids[who].loss, abs=1e-6)
        assert rows[who].accuracy == ids[who].accuracy


@pytest.mark.parametrize(("targets", "encoding"), [("ids", "fp32"), ("embeddings", "bf16"), ("embeddings", "int8")])
def test_targets_are_rows_of_the_judging_table_in_any_precision(tmp_path: Path, targets: str, encoding: str) -> None:
    """Else the model's first choice would not be found to be the target's row."""
    job = little_job(tmp_path, {"targets": targets, "encoding": encoding})
    fill(job, tmp_path)
    settled = settle(job, SplitListener())
    store = Store(settled.store_dir)
    with (
        Dataset(store) as data,
        Dataset(store, "held-out") as held,
        Checkpoint.open(settled.model_dir) as checkpoint,
    ):
        table_VD = judging_table(checkpoint, settled.decoder, settled.split)
        assembly = assembly_of(data.tables(), checkpoint, settled.decoder, settled.split, torch_dtype("bf16"))
        batches = list(assembly.held(held, table_VD, batch_size=3))
    assert sum(len(batch.counts) for batch in batches) == 2 * HELD_OUT
    for batch in batches:
        same = (batch.rows_ND[:, None] == table_VD).all(-1)
        assert bool(same.any(-1).all())


def test_without_held_out_examples_nothing_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(little_store, "HELD_OUT", 0)
    job = little_job(tmp_path, steps=2)
    fill(job, tmp_path)
    told = Told()
    outcome = train_store(job, listener=told)
    assert outcome.before == outcome.after == told.judgements == {}


def test_what_comes_while_it_begins_is_left_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its examples must not be judged by another contribution's table."""
    job = little_job(tmp_path, steps=1)
    fill(job, tmp_path, {"zoe": COMMANDS[:20]})
    alone = train_store(job)
    again = with_output(job, tmp_path / "again")

    class Interrupted(Dataset):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if len(self.contributions) == 1:
                fill(again, tmp_path, {"zoe": COMMANDS[:20], "ann": COMMANDS[20:]})

    monkeypatch.setattr(trainer, "Dataset", Interrupted)
    outcome = train_store(again)
    assert outcome.clients == alone.clients == ("zoe",)
    assert (outcome.before, outcome.after) == (alone.before, alone.after)


def test_with_nothing_contributed_nothing_is_trained(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    with pytest.raises(BadInput, match="Nothing has been contributed to"):
        train_store(job)
    assert not job.output.exists()


def test_a_cap_is_kept_per_client_over_all_its_contributions(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path, {"ann": COMMANDS[:40], "bob": COMMANDS[40:]})
    with Dataset(Store(settle(job, SplitListener()).store_dir)) as data:
        weights = example_weights(data, 0.6)
        assert weights is not None
        tokens = [int(data.target_counts[data.clients == client].sum()) for client in range(2)]
        assert weights[1] == 1.0
        assert tokens[0] * weights[0] == pytest.approx(0.6 * (tokens[0] * weights[0] + tokens[1]))
        assert example_weights(data, None) is None
        assert example_weights(data, 0.95) is None


def test_a_loss_that_is_no_number_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    job = little_job(tmp_path, learning_rate=1e30, schedule="constant", warmup=0.0)
    fill(job, tmp_path)
    with pytest.raises(PotluckError, match=r"of step \d+ is not a finite number"):
        train_store(job)
    assert not job.output.exists()


def test_a_checkpoint_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "training" / "checkpoint.safetensors"
    stored.save_checkpoint(path, [], None, {"key": "a", "losses": [1.5]})
    before = path.read_bytes()
    assert stored.read_meta(path) == {"key": "a", "losses": [1.5]}

    def full(tensors: object, target: Path, metadata: object) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        stored.save_checkpoint(path, [], None, {"key": "b", "losses": []})
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"x" * 100, (9).to_bytes(8, "little") + b"{}"], ids=["empty", "noise", "short"]
)
def test_what_is_no_checkpoint_has_no_meta(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "checkpoint"
    assert stored.read_meta(path) is None
    path.write_bytes(content)
    assert stored.read_meta(path) is None
    save_file({"a": torch.zeros(1)}, path)
    assert stored.read_meta(path) is None


def environment() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_killed_at_any_step_it_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    fill(job, tmp_path)
    unbroken = Told()
    train_store(job, listener=unbroken)
    again = with_output(job, tmp_path / "again")
    path = written(again, tmp_path / "job.yaml")
    command = [sys.executable, str(Path(little_store.__file__)), str(path)]
    last = 0
    for _ in range(2):
        with subprocess.Popen([*command, "0.3"], stdout=subprocess.PIPE, text=True, env=environment()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.split()[0].isdigit() and int(line.split()[0]) >= last + 3:
                    last = int(line.split()[0])
                    process.send_signal(signal.SIGKILL)
                    break
    resumed = Told()
    train_store(again, listener=resumed, checkpoint_every_s=0)
    assert resumed.steps[0][0] in (last, last + 1)
    assert_equal(adapter_of(again), adapter_of(job))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"batch_size": 5, "micro_batch_size": 2, "split": {"weight_cap": 0.5}}], ids=["plain", "uneven"]
)
def test_two_processes_train_the_adapter_of_one(tmp_path: Path, fields: dict[str, Any]) -> None:
    job = little_job(tmp_path, **fields)
    fill(job, tmp_path)
    alone = train_store(job)
    again = with_output(job, tmp_path / "again")
    path = written(again, tmp_path / "job.yaml")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no_python", sys.executable]
    script = [str(Path(little_store.__file__)), str(path), "0"]
    done = subprocess.run(
        [sys.executable, *launch, *script], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = [line.split() for line in done.stdout.splitlines() if line and line.split()[0].isdigit()]
    assert [int(step) for step, _, _ in told] == list(range(1, alone.steps + 1))  # once, by the first one
    together, expected = adapter_of(again), adapter_of(job)
    assert together.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(together[name], expected[name], rtol=0, atol=5e-5)
    quality = json.loads((again.output / "quality.json").read_text())
    assert quality["after"]["overall"]["loss"] == pytest.approx(alone.after["overall"].loss, abs=1e-5)
    assert quality["loss_last"] == pytest.approx(alone.loss_last, abs=1e-5)
