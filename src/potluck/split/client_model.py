"""A client's side of the model: its own copy, or just the parts it computes, fetched from the server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from potluck.control.files import ModelFile, ModelFiles
from potluck.errors import BadInput
from potluck.models.cache import user_cache
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.families.decoder import Decoder
from potluck.models.fetched import Fetched
from potluck.models.precision import choose_dtype, torch_dtype
from potluck.models.prefetch import Listed
from potluck.models.shapes import check_shapes
from potluck.models.source import resolve
from potluck.models.tables import tables
from potluck.split.agreement import agreement_of, differences
from potluck.split.listener import SplitListener
from potluck.split.parts import ClientPart, check_cut, client_part
from potluck.split.terms import Terms
from potluck.split.uplink import Uplink


def find_model(
    uplink: Uplink, terms: Terms, model: str | None, fingerprint: bytes, tell: Callable[[str], None]
) -> "ClientModel":
    """The model that the terms are about.

    Args:
        uplink: to the server.
        terms: the server's.
        model: the person's own copy; None fetches what is needed.
        fingerprint: the server's: what one of them announced under a hash need not be what another one means by it.
        tell: told what goes on.

    Raises:
        BadInput: the copy is another model, or what the server announces is not what its terms say.
        SaveFailed: the cache cannot be written.
    """
    if model is not None:
        directory = resolve(model, tell=tell)
        files, fetched = list(ModelFiles(directory).listing()), None
    else:
        announced = uplink.model_files()
        fetched = Fetched(user_cache() / "model" / fingerprint.hex()[:16], announced, uplink.ranges)
        fetched.fetch_small()
        directory = fetched.directory
        files = [ModelFile(str(f["name"]), int(f["size"]), str(f["sha256"])) for f in announced]
    split = terms.split
    mine = agreement_of(files, split.cut, split.encoding, split.targets)
    if told := differences(mine, terms.agreement):
        which = f"{directory} is not the server's model. " if fetched is None else ""
        raise BadInput(f"{which}{told}")
    decoder = decoder_of(read_config(directory))
    dtype = choose_dtype(terms.dtype, decoder.hidden_size, decoder.intermediate_size)
    return ClientModel(directory, fetched, decoder, torch_dtype(dtype))


class ClientModel:
    """A directory with tokenizer and configuration, and weights as far as they are here."""

    def __init__(self, directory: Path, fetched: Fetched | None, decoder: Decoder, compute: torch.dtype) -> None:
        """``compute``: the dtype of this client's linears."""
        self.directory, self.decoder, self.compute = directory, decoder, compute
        self._fetched = fetched

    @contextmanager
    def part(self, terms: Terms, listener: SplitListener, *, trainable: bool) -> Iterator[ClientPart]:
        """Embedding and first blocks; where weights are fetched, the whole tables are: rows would tell token ids.

        Args:
            terms: the server's.
            listener: told how far fetching is.
            trainable: whether the blocks get adapters.
        """
        cut, adapter = terms.split.cut, terms.adapter if trainable else None
        check_cut(self.decoder, cut)

        def fetching(done: int, total: int) -> None:
            listener.progress("Fetching the model, MiB", done >> 20, total >> 20)

        with Checkpoint.open(self.directory, None if self._fetched is None else self._fetched.need) as checkpoint:
            check_shapes(checkpoint, self.decoder)
            if self._fetched is not None:
                listed = Listed(checkpoint)
                client_part(listed, self.decoder, cut, compute=torch.float32, adapter=adapter, seed=0)
                checkpoint.fetch([*((name, None, None) for name in tables(self.decoder)), *listed.parts], fetching)
            yield client_part(checkpoint, self.decoder, cut, compute=self.compute, adapter=adapter, seed=terms.seed)
