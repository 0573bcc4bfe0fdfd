"""Which tensors a model's config promises, of which shapes, and whether a checkpoint keeps the promise."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from potluck.errors import BadInput
from potluck.models.checkpoint import Checkpoint
from potluck.models.families.decoder import Decoder

_BUFFERS = re.compile(r"attn\.bias$|attention\.bias$|masked_bias$|inv_freq$|\.rotary_emb\.|position_ids$")
"""What old transformers stored in blocks beside weights: computed, never learned."""


def check_model(model_dir: Path, decoder: Decoder) -> None:
    """See whether a model's weights are those that its config says; none is read.

    Raises:
        BadInput: as :func:`check_shapes`, or there are no weights.
    """
    with Checkpoint.open(model_dir) as checkpoint:
        check_shapes(checkpoint, decoder)


def check_shapes(checkpoint: Checkpoint, decoder: Decoder) -> None:
    """See whether all tensors that are needed are there, in the shapes that the config says.

    A head of whole sequences is not looked at.

    Raises:
        BadInput: some are not, or the blocks have tensors beyond them (names the first, and says how many more); or
            one has no float dtype.
    """
    shapes = shapes_of(decoder)
    for name in sorted(shapes.keys() & checkpoint.names):
        if not (dtype := checkpoint.dtype(name)).is_floating_point:
            raise BadInput(
                f"{name} in {checkpoint.directory} is stored as {str(dtype).removeprefix('torch.')}, as quantised"
                " weights are: use the same model with weights in float32, float16 or bfloat16."
            )
    faults = list(_faults(checkpoint, decoder, shapes))
    if faults:
        others = len(faults) - 1
        more = f" {others:,} more do{'es' if others == 1 else ''} not fit either." if others else ""
        raise BadInput(
            f"The weights in {checkpoint.directory} are not those of its config.json: {faults[0]}.{more} Copy config"
            " and weights again, both of the same model."
        )


def _faults(checkpoint: Checkpoint, decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    names, stored = decoder.names, set(checkpoint.names)
    hidden = None if names.classifier is None else names.classifier.hidden
    for name, shape in shapes.items():
        linear = name.rpartition(".")[0]
        if name in stored:
            if (found := tuple(checkpoint.shape(name))) != shape:
                yield f"{name} has shape {found}, and by the config it has {shape}"
        elif linear != hidden and not (linear == names.head and decoder.sequence is not None):
            yield f"{name}, of shape {shape}, is missing"
    for i in range(len(decoder.layers)):
        for linear in decoder.cuts:
            bias = f"{decoder.full_name(i, linear)}.bias"
            if bias in stored and linear not in decoder.biased:
                yield f"it has {bias}, and by the config that linear has no bias"
    yield from _beyond(stored - shapes.keys(), decoder)


def _beyond(names: Collection[str], decoder: Decoder) -> Iterator[str]:
    """Of tensors that the config does not promise, those that would change what the blocks compute."""
    for name in sorted(names):
        if not name.startswith(f"{decoder.names.blocks}.") or _BUFFERS.search(name):
            continue
        number = name.removeprefix(f"{decoder.names.blocks}.").partition(".")[0]
        if number.isdecimal() and int(number) >= len(decoder.layers):
            yield f"it has {name}, and by the config block {len(decoder.layers) - 1} is the last"
        elif number.isdecimal() and name.endswith(".weight"):
            yield f"it has {name}, and by the config blocks have no such tensor"


def shapes_of(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes by name of all tensors of a model, its head of whole sequences left out."""
    D, names = decoder.hidden_size, decoder.names
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    block: dict[str, tuple[int, ...]] = {}
    for name, cut in decoder.cuts.items():
        by_head, by_kv_head, by_column = decoder.units(name)
        units = by_head * decoder.num_heads + by_kv_head * decoder.num_kv_heads + by_column * decoder.intermediate_size
        out, into = (units, D) if cut == "column" else (D, units)
        block[f"{name}.weight"] = (into, out) if decoder.inputs_first else (out, into)
        if name in decoder.biased:
            block[f"{name}.bias"] = (out,)
    if decoder.head_norms != "none":
        normed = (queries, keys) if decoder.head_norms == "all" else (decoder.head_dim, decoder.head_dim)
        block |= {f"{norm}.weight": (size,) for norm, size in zip(names.head_norms, normed, strict=True)}
    block |= {name: (D,) for norm in decoder.norm_names() for name in _norm(decoder, norm)}
    ends: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (decoder.vocab_size, D)}
    for end in filter(None, (names.embedding_norm, names.last_norm)):
        ends |= dict.fromkeys(_norm(decoder, end), (D,))
    if names.positions is not None:
        ends[f"{names.positions}.weight"] = (decoder.position_offset + decoder.max_positions, D)
    if names.types is not None:
        ends[f"{names.types}.weight"] = (decoder.segments, D)
    if names.classifier is not None and names.classifier.hidden_of_base:
        ends |= {f"{names.classifier.hidden}.weight": (D, D), f"{names.classifier.hidden}.bias": (D,)}
    if not decoder.tied:
        ends[f"{names.head}.weight"] = (decoder.vocab_size, D)
    layers = range(len(decoder.layers))
    return ends | {decoder.full_name(i, name): shape for i in layers for name, shape in block.items()}


def _norm(decoder: Decoder, name: str) -> list[str]:
    return [f"{name}.weight", *([f"{name}.bias"] if decoder.norm == "layer" else [])]
