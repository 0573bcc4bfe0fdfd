"""Profiles and tasks made up for tests of the planner."""

from collections.abc import Sequence
from typing import Any

from pool.tiny import config
from potluck import __version__
from potluck.job import Job
from potluck.job_sections import Lora
from potluck.pool.elements import PerUnit
from potluck.pool.profile import Line, Link, Machine, Profile, Work
from potluck.pool.task import Task

GIB = 1 << 30
MIB = 1 << 20
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def work(**differs: Any) -> Work:
    fields: dict[str, Any] = {
        "config": SMOLLM2,
        "rows": 2,
        "length": 128,
        "supervised": 256,
        "dtype": "fp32",
        "train": "lora",
        "lora": Lora(),
        "checkpointing": False,
    }
    return Work(**fields | differs)


def tiny_work(family: str = "llama", **differs: Any) -> Work:
    shape = config(family).to_dict()
    return work(config=shape, rows=2, length=8, supervised=6, **differs)


def job(**fields: Any) -> Job:
    return Job.model_validate({"model": "m", "data": {"train": "d"}, "output": "o", "batch_size": 4, **fields})


def profile(
    name: str,
    *,
    speed: float = 1.0,
    available: int = 64 * GIB,
    link: Link | None = Link(latency_s=0.0003, bytes_per_s=1.1e8),  # noqa: B008
    of: Work | None = None,
    **differs: Any,
) -> Profile:
    """About what SmolLM2 was measured at on one core of a server; ``speed`` 0.5 takes twice as long."""

    def line(alpha: float, beta: float) -> Line:
        return Line(alpha=alpha / speed, beta=beta / speed)

    fields: dict[str, Any] = {
        "potluck": __version__,
        "torch": "2.13.0",
        "device": name,
        "machine": Machine(processor="a processor", architecture="x86_64", cores=4, threads=1),
        "work": of or work(),
        "attention_s": line(0.0012, 0.0011),
        "mlp_s": line(0.0010, 0.0000115),
        "head_s": line(0.0008, 0.0000021),
        "forward_part": 0.35,
        "optimizer_s": line(0.0005, 2.0e-9),
        "attention_bytes": Line(alpha=1.3e6, beta=3.4e5),
        "mlp_bytes": Line(alpha=1.3e6, beta=2100.0),
        "runtime_bytes": 502 * MIB,
        "available_bytes": available,
        "link": link,
    }
    return Profile(**fields | differs)


def small_task(totals: Sequence[int] = (6, 7, 5), kv_heads: int = 3, **differs: Any) -> Task:
    """Few enough units to try all shares; numbers are round and mean nothing."""
    fields: dict[str, Any] = {
        "layers": 3,
        "mlp_layers": 2.5,
        "heads": totals[0],
        "kv_heads": kv_heads,
        "columns": totals[1],
        "vocab_rows": totals[2],
        "half_batches": 2,
        "micro_batches": 2,
        "message_bytes": 40_000.0,
        "head_message_bytes": 9_000.0,
        "pair_bytes": 800.0,
        "partial_bytes": 30_000.0,
        "whole_bytes": 31_000.0,
        "kv_trained_bytes": 500.0,
        "kept_bytes": 10_000.0,
        "head_work_bytes": 5_000.0,
        "weights": PerUnit(head=101_003.0, kv_head=50_021.0, column=70_001.0, vocab_row=30_011.0, replicated=9_000.0),
        "trained": PerUnit(head=300.0, kv_head=200.0, column=100.0, vocab_row=0.0, replicated=1_000.0),
        "checkpointing": False,
    }
    return Task(**fields | differs)
