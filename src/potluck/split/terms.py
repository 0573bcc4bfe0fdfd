"""What a server asks of its clients: all they need to know of its job, as JSON from outside."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.errors import BadInput, from_outside
from potluck.job_sections import IA3, Adapter, Data, Lora, OptimizerName, Split
from potluck.split.agreement import Agreement

QUALITY_FILE = "quality.json"
"""What came of a training, handed out beside the adapter."""


class Terms(BaseModel):
    """One client's; checked before anything is done with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    split: Split
    data: Data
    """How examples become token ids; its sources are left out."""
    template: Annotated[str, Field(max_length=1 << 20)] | None
    """Text of the chat template, where the server's job names a file."""
    agreement: Agreement
    negatives: Annotated[int, Field(ge=0)]
    """How many rows this client is to draw."""
    hidden_size: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=1)]
    longest: Annotated[int, Field(ge=1)]
    """Positions an example may have."""
    train: Literal["lora", "ia3"]
    lora: Lora
    ia3: IA3
    seed: int
    optimizer: OptimizerName
    learning_rate: float
    schedule: str
    warmup: float
    weight_decay: float
    clip: float
    dtype: str

    @property
    def adapter(self) -> Adapter:
        """What is trained beside the model."""
        return self.ia3 if self.train == "ia3" else self.lora


def parse_terms(content: dict[str, Any]) -> Terms:
    """Terms from a server.

    Raises:
        BadInput: they cannot be understood.
    """
    try:
        return Terms.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(from_outside(f"The server's terms cannot be understood: {where}: {first['msg']}.")) from None
