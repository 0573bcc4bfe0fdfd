"""What the processes of one training must have in common, however the store or the machine changes meanwhile."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from potluck.split.agreement import Manifest, contribution_id
from potluck.split.store import Store

_DTYPES = ("auto", "fp32", "bf16", "fp64")
_DIGEST_BYTES = 32


def same_contributions(store: Store, accelerator: Accelerator) -> list[Manifest]:
    """The contributions the first process sees: clients may commit more between one process's look and another's.

    Raises:
        BadInput: a manifest was damaged.
    """
    found = store.contributions()
    if accelerator.num_processes == 1:
        return found
    ids = [contribution_id(manifest) for manifest in found]
    count = int(_from_first(torch.tensor([len(ids)]), accelerator))
    mine = torch.frombuffer(bytearray(b"".join(bytes.fromhex(i) for i in ids)), dtype=torch.uint8) if ids else None
    told = torch.zeros(count * _DIGEST_BYTES, dtype=torch.uint8)
    if accelerator.is_main_process and mine is not None:
        told.copy_(mine)
    wanted = bytes(_from_first(told, accelerator).tolist()).hex()
    named = {wanted[at : at + 2 * _DIGEST_BYTES] for at in range(0, len(wanted), 2 * _DIGEST_BYTES)}
    return [manifest for manifest, identity in zip(found, ids, strict=True) if identity in named]


def same_dtype(dtype: str, accelerator: Accelerator) -> str:
    """The first process's choice."""
    return _DTYPES[int(_from_first(torch.tensor([_DTYPES.index(dtype)]), accelerator))]


def _from_first(tensor: Tensor, accelerator: Accelerator) -> Tensor:
    if accelerator.num_processes == 1:
        return tensor
    sent: Tensor = broadcast(tensor.to(accelerator.device), from_process=0)
    return sent.cpu()
