"""Potluck fine-tunes language models on the devices people already have.

>>> import potluck
>>> job = potluck.load_job("job.yaml")  # doctest: +SKIP
>>> result = potluck.tune(job)  # doctest: +SKIP
>>> potluck.generate(result.adapter, ["turn on the kitchen light"])  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

from potluck.errors import BadInput, DeviceLost, PotluckError, SaveFailed

if TYPE_CHECKING:
    from potluck.job import Job, load_job
    from potluck.job_sections import IA3, Data, Lora, Shares, Split
    from potluck.models.evaluate import Scores
    from potluck.models.evaluate_classes import ClassScores
    from potluck.pool.crew import Gathering, Manners
    from potluck.pool.join import Guest, join
    from potluck.pool.listener import Listener
    from potluck.pool.profile import read_profile, write_profile
    from potluck.pool.profiling import profile_job, profile_work
    from potluck.pool.result import Result
    from potluck.pool.tune import tune
    from potluck.pool.what_if import what_if
    from potluck.split.audit import audit
    from potluck.split.client import Client, contribute, fetch, withdraw
    from potluck.split.serve import Serving, serve
    from potluck.split.trainer import train_store
    from potluck.use import evaluate_result, generate, merge_result

__version__ = "0.1.0"

__all__ = [
    "IA3",
    "BadInput",
    "ClassScores",
    "Client",
    "Data",
    "DeviceLost",
    "Gathering",
    "Guest",
    "Job",
    "Listener",
    "Lora",
    "Manners",
    "PotluckError",
    "Result",
    "SaveFailed",
    "Scores",
    "Serving",
    "Shares",
    "Split",
    "__version__",
    "audit",
    "contribute",
    "evaluate_result",
    "fetch",
    "generate",
    "join",
    "load_job",
    "merge_result",
    "profile_job",
    "profile_work",
    "read_profile",
    "serve",
    "train_store",
    "tune",
    "what_if",
    "withdraw",
    "write_profile",
]

_HOMES = {
    "ClassScores": "potluck.models.evaluate_classes",
    "Client": "potluck.split.client",
    "Data": "potluck.job_sections",
    "Gathering": "potluck.pool.crew",
    "Guest": "potluck.pool.join",
    "Job": "potluck.job",
    "Listener": "potluck.pool.listener",
    "IA3": "potluck.job_sections",
    "Lora": "potluck.job_sections",
    "Manners": "potluck.pool.crew",
    "Result": "potluck.pool.result",
    "Scores": "potluck.models.evaluate",
    "Serving": "potluck.split.serve",
    "Shares": "potluck.job_sections",
    "Split": "potluck.job_sections",
    "audit": "potluck.split.audit",
    "contribute": "potluck.split.client",
    "evaluate_result": "potluck.use",
    "fetch": "potluck.split.client",
    "generate": "potluck.use",
    "join": "potluck.pool.join",
    "load_job": "potluck.job",
    "merge_result": "potluck.use",
    "profile_job": "potluck.pool.profiling",
    "profile_work": "potluck.pool.profiling",
    "read_profile": "potluck.pool.profile",
    "serve": "potluck.split.serve",
    "train_store": "potluck.split.trainer",
    "tune": "potluck.pool.tune",
    "what_if": "potluck.pool.what_if",
    "withdraw": "potluck.split.client",
    "write_profile": "potluck.pool.profile",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for: torch takes seconds, and ``potluck --help`` needs none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
