"""Where embeddings may be trained: what of the texts would have to travel for it, and whether it may."""

from potluck.job import Job
from potluck.models.families.decoder import Decoder

_HEAD = "train_embeddings: the embedding is the LM head too, whose rows all devices share, so that"
_ONE_OWNER = (
    "train_embeddings: only the coordinator has the embedding tables, and looks up its own texts alone, so that"
)


def moves_all(job: Job, decoder: Decoder, strategy: str, devices: int) -> bool:
    """Whether every device gets the token ids and labels of all texts: the rows that are trained lie on all of them."""
    return job.train_embeddings and decoder.embedding_is_head and strategy.startswith("tensor") and devices > 1


def why_not(job: Job, decoder: Decoder, strategy: str, devices: int, owners: int) -> str:
    """Why the job's embeddings cannot be trained so, and what to do, in a sentence; empty where they can.

    Args:
        job: the job.
        decoder: the model's description.
        strategy: of the plan.
        devices: that take part.
        owners: how many of them have data.
    """
    if not job.train_embeddings or devices == 1 or strategy.startswith("pipeline"):  # which moves data anyway
        return ""
    if strategy == "data":
        if not job.data_stays:
            return ""
        return (
            "train_embeddings: the gradient of the embedding shows which tokens its owner's rows have (data_stays: true"
            " forbids it; set data_stays: false)."
        )
    if moves_all(job, decoder, strategy, devices):
        if not job.data_stays:
            return ""
        return f"{_HEAD} they need the token ids and labels (data_stays: true forbids it; set data_stays: false)."
    if owners == 1:
        return ""
    what = "strategy: data" if not job.data_stays else "strategy: data and data_stays: false"
    return f"{_ONE_OWNER} nobody else can bring data: leave it to one owner, or use {what}."
