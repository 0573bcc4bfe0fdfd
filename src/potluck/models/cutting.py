"""One device's part of each linear and norm, read from disk, and the tensors among them that are trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import torch
from torch import Tensor, nn

from potluck.chain.dora import squares
from potluck.chain.linear import CutLinears
from potluck.chain.low_rank import LoraPart
from potluck.chain.ranges import Ranges
from potluck.chain.residual import LayerNorm, Norm
from potluck.chain.trained import Gradient, Trained
from potluck.chain.trained_embedding import Table
from potluck.errors import BadInput
from potluck.job_sections import IA3, Adapter, Lora
from potluck.models.weights import Weights


@dataclass
class Cutter:
    """Reads parts of a checkpoint for one rank and collects what is trained of them, piece by piece."""

    checkpoint: Weights
    rank: int
    compute: torch.dtype
    adapter: Adapter | None
    """Adapters on ``targets``; None trains every linear and norm itself."""
    targets: frozenset[str]
    seed: int
    device: torch.device | None = None
    """Where adapters are made, the CPU if None; base weights are where the checkpoint's reads leave them."""
    inputs_first: bool = False
    """Whether the checkpoint's linears are ``[in, out]``."""
    frozen: tuple[str, ...] = ()
    """What the names of tensors begin with that are not trained without adapters either."""
    weight_bytes: int = 0
    """Memory of what was read and made so far."""
    _trained: list[Trained] = field(default_factory=list)

    def taken(self) -> tuple[Trained, ...]:
        """What has become trained since the last call."""
        taken, self._trained = tuple(self._trained), []
        return taken

    def column(self, names: Sequence[str], held: Sequence[tuple[Ranges, ...]]) -> CutLinears:
        """Linears over one input, each with the rows (outputs) that its ``held[rank]`` says; ``held`` may overlap."""
        weights, biases, sizes, start = [], [], [], 0
        adapters: list[LoraPart] = []
        vectors: list[Tensor | None] = []
        for name, ranges in zip(names, held, strict=True):
            part = _overlaps(ranges)
            weights.append(self._weight(name, 0, ranges, part))
            biases.append(self._read(f"{name}.bias", 0, ranges, part) if self._has_bias(name) else None)
            sizes.append(len(ranges[self.rank]))
            vectors.append(None)
            if self._is_adapted(name):
                out, _ = self._shape_OI(name)
                if isinstance(self.adapter, Lora):
                    A_RI = self._initial_A(name)
                    B_OR = A_RI.new_zeros(sizes[-1], self.adapter.rank)
                    A_RI = self._train(f"{name}.lora_A.weight", A_RI, tuple(A_RI.shape), None, (), "partial")
                    B_OR = self._train(f"{name}.lora_B.weight", B_OR, (out, self.adapter.rank), 0, ranges, part)
                    m_O = self._magnitudes(name, weights[-1], (out,), 0, ranges, part)
                    adapters.append(LoraPart(A_RI, B_OR, start, m_O))
                else:
                    vectors[-1] = self._vector(name, (out,), ranges, part)
            start += sizes[-1]
        return self._group(names[0], weights, biases, sizes, adapters, vectors, None)

    def row(self, name: str, held: tuple[Ranges, ...]) -> CutLinears:
        """The linear ``name`` with the columns (inputs) that ``held[rank]`` says; its bias is left to ``row_bias``."""
        weight = self._weight(name, 1, held, "cut")
        out, inputs = self._shape_OI(name)
        adapters: list[LoraPart] = []
        vector = None
        if self._is_adapted(name):
            if isinstance(self.adapter, Lora):
                whole_RI = self._initial_A(name)
                A_RI = whole_RI[:, list(held[self.rank])].contiguous()
                B_OR = whole_RI.new_zeros(out, self.adapter.rank)
                A_RI = self._train(f"{name}.lora_A.weight", A_RI, tuple(whole_RI.shape), 1, held, "cut")
                B_OR = self._train(f"{name}.lora_B.weight", B_OR, tuple(B_OR.shape), None, (), "partial")
                m_O = self._magnitudes(name, weight, (out,), None, (), "partial")
                adapters.append(LoraPart(A_RI, B_OR, 0, m_O))
            else:
                vector = self._vector(name, (inputs,), held, "cut")
        return self._group(name, [weight], [None], [out], adapters, [vector], self.rank)

    def _is_adapted(self, name: str) -> bool:
        return self.adapter is not None and name in self.targets

    def _magnitudes(
        self,
        name: str,
        weight: Tensor,
        shape: tuple[int, ...],
        dim: int | None,
        held: tuple[Ranges, ...],
        gradient: Gradient,
    ) -> Tensor | None:
        """With DoRA, what the rows that are here begin with: their norms, as ``B`` is zero."""
        if not isinstance(self.adapter, Lora) or not self.adapter.use_dora:
            return None
        norms_O = squares(weight, _master(self.compute)).sqrt()
        return self._train(f"{name}.lora_magnitude_vector", norms_O, shape, dim, held, gradient)

    def _vector(self, name: str, shape: tuple[int, ...], held: tuple[Ranges, ...], gradient: Gradient) -> Tensor:
        ones = torch.ones(len(held[self.rank]), dtype=_master(self.compute), device=self.device)
        return self._train(f"{name}.ia3_l", ones, shape, 0, held, gradient)

    def _group(
        self,
        name: str,
        weights: list[Tensor],
        biases: list[Tensor | None],
        sizes: list[int],
        adapters: list[LoraPart],
        vectors: list[Tensor | None],
        cut_input_of: int | None,
    ) -> CutLinears:
        if self.adapter is None:
            return CutLinears(name, tuple(weights), tuple(biases), tuple(sizes), cut_input_of=cut_input_of)
        bias = None
        if any(part is not None for part in biases):
            filled = [weights[i].new_zeros(sizes[i]) if part is None else part for i, part in enumerate(biases)]
            bias = torch.cat(filled)
        whole = torch.cat(weights) if len(weights) > 1 else weights[0]
        group = CutLinears(name, (whole,), (bias,), tuple(sizes), cut_input_of=cut_input_of)
        if isinstance(self.adapter, IA3):
            return replace(group, vectors=tuple(vectors) if any(v is not None for v in vectors) else ())
        squares_O = None
        if self.adapter.use_dora and adapters:
            squares_O = squares(whole, _master(self.compute))
            self.weight_bytes += squares_O.nbytes
        return replace(
            group,
            adapters=tuple(adapters),
            scale=self.adapter.scale,
            dropout=self.adapter.dropout,
            squares_O=squares_O,
        )

    def _has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self.checkpoint.names

    def row_bias(self, name: str) -> Tensor | None:
        """The bias of a row-cut linear, which every device has whole."""
        return self._read(f"{name}.bias", None, (), "equal") if self._has_bias(name) else None

    def norm(self, name: str, eps: float, offset: float, *, per_head: bool = False) -> Norm:
        """A root-mean-square norm; one per head sees only this device's heads, so its gradient is partial."""
        weight = self._read(f"{name}.weight", None, (), "partial" if per_head else "equal")
        return Norm(weight, eps, offset)

    def cut_norm(self, name: str, held: tuple[Ranges, ...]) -> Tensor:
        """The weight of a norm over all heads, as far as this device has them."""
        return self._read(f"{name}.weight", 0, held, _overlaps(held))

    def layer_norm(self, name: str, eps: float) -> LayerNorm:
        """A norm with mean and, where the checkpoint has one, bias."""
        weight = self._read(f"{name}.weight", None, (), "equal")
        return LayerNorm(weight, self.row_bias(name), eps)

    def of_head(self, name: str, shape: tuple[int, ...], *, spread: float, trained: bool) -> Tensor:
        """A tensor of the head of whole sequences, in float32 or better; every device has it whole.

        Where the checkpoint has none, it is drawn from a normal distribution with standard deviation ``spread``: the
        same on every device. Only who has labels has a gradient of it.

        Raises:
            BadInput: the checkpoint's has another shape: it is for other classes.
        """
        if name in self.checkpoint.names:
            if (stored := tuple(self.checkpoint.shape(name))) != shape:
                raise BadInput(
                    f"The model has a head of its own for another task: {name} has shape {stored}, and this one needs"
                    f" {shape}. Use the model without that head, or the classes it was trained on."
                )
            tensor = self.checkpoint.read(name, dtype=_master(self.compute))
        else:
            drawn = torch.zeros(shape)
            if spread:
                drawn.normal_(0, spread, generator=self._generator(name))
            tensor = drawn.to(self.device, _master(self.compute))
        if not trained or self.adapter is None:
            self.weight_bytes += tensor.nbytes
        return self._train(name, tensor, shape, None, (), "partial") if trained else tensor

    def table(self, name: str, held: tuple[Ranges, ...]) -> Table:
        """The rows of a trained table that ``held[rank]`` says; no row may be held twice."""
        return Table(self._read(f"{name}.weight", 0, held, "cut"), held[self.rank])

    def _weight(self, name: str, dim: int, held: tuple[Ranges, ...], gradient: Gradient) -> Tensor:
        """A linear's weight as ``[out, in]``, cut along ``dim`` of that."""
        if not self.inputs_first:
            return self._read(f"{name}.weight", dim, held, gradient)
        W_IO = self._read(f"{name}.weight", 1 - dim, held, gradient)
        return W_IO.T if W_IO.requires_grad else W_IO.T.contiguous()

    def _shape_OI(self, name: str) -> tuple[int, int]:
        first, second = self.checkpoint.shape(f"{name}.weight")
        return (second, first) if self.inputs_first else (first, second)

    def _read(self, name: str, dim: int | None, held: tuple[Ranges, ...], gradient: Gradient) -> Tensor:
        """A tensor of the base model in the compute dtype; trained itself, in float32 or better, without adapters."""
        trained = self.adapter is None and not name.startswith(self.frozen)
        dtype = _master(self.compute) if trained else self.compute
        rows = held[self.rank] if dim == 0 else None
        columns = held[self.rank] if dim == 1 else None
        tensor = self.checkpoint.read(name, dtype=dtype, rows=rows, columns=columns)
        self.weight_bytes += tensor.nbytes
        if trained:
            return self._train(name, tensor, tuple(self.checkpoint.shape(name)), dim, held, gradient)
        return tensor

    def _train(
        self,
        name: str,
        local: Tensor,
        shape: tuple[int, ...],
        dim: int | None,
        held: tuple[Ranges, ...],
        gradient: Gradient,
    ) -> nn.Parameter:
        parameter = nn.Parameter(local)
        if self.adapter is not None:
            self.weight_bytes += local.nbytes
        self._trained.append(Trained(name, parameter, shape, dim, held, gradient))
        return parameter

    def _initial_A(self, name: str) -> Tensor:
        """Whole ``A [r, in]``, uniform within ``1 / sqrt(in)`` as PEFT draws it; the same on every device."""
        assert isinstance(self.adapter, Lora)
        _, inputs = self._shape_OI(name)
        bound = 1 / math.sqrt(inputs)
        drawn = torch.empty(self.adapter.rank, inputs).uniform_(-bound, bound, generator=self._generator(name))
        return drawn.to(self.device, _master(self.compute))

    def _generator(self, name: str) -> torch.Generator:
        """The same on every device for a name."""
        key = blake2b(f"{self.seed} {name}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(key) >> 1)


def _overlaps(held: tuple[Ranges, ...]) -> Gradient:
    rows = [row for ranges in held for row in ranges]
    return "partial" if len(rows) > len(set(rows)) else "cut"


def _master(compute: torch.dtype) -> torch.dtype:
    return torch.promote_types(compute, torch.float32)
