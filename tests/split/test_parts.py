"""A model in two parts is the model: loss, gradients of both parts, and the gradient that passes the cut."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from cut_models import (
    BATCH,
    BLOCKS,
    LORA,
    RATE,
    Oracle,
    examples_of,
    server_of,
    set_adapters,
    three_blocks,
    whole_model,
    whole_table,
)
from torch import Tensor
from transformers import PretrainedConfig

from pool.tiny import FAMILIES, config, save_tiny, shares
from potluck.chain.piece import At
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.tables import embedding_tables, head_of
from potluck.split.forward import activations, supervised_positions
from potluck.split.learner import Fed, Learner, fed_of
from potluck.split.parts import ClientPart, client_part

AT = At(RATE.seed, 0, 0, 0)
EXAMPLES = examples_of(BATCH)
POSITIONS = [torch.tensor(supervised_positions(example), dtype=torch.int64) for example in EXAMPLES]
TARGETS = [torch.tensor([e.ids[p + 1] for p in at.tolist()]) for e, at in zip(EXAMPLES, POSITIONS, strict=True)]
CUTS = range(1, BLOCKS)
Models = Callable[[str, bool], tuple[PretrainedConfig, Path]]
Oracles = Callable[[str, bool], Oracle]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def saved(family: str, tied: bool) -> tuple[PretrainedConfig, Path]:
        cfg = three_blocks(family, tied=tied)
        return cfg, save_tiny(cfg, tmp_path_factory.mktemp("model"))

    return saved


@pytest.fixture(scope="module")
def oracles(models: Models) -> Oracles:
    return cache(lambda family, tied: whole_model(models(family, tied)[1]))


def client_of(
    checkpoint: Checkpoint, cfg: PretrainedConfig, cut: int, *, trainable: bool, seed: int = RATE.seed
) -> ClientPart:
    lora = LORA if trainable else None
    return client_part(checkpoint, decoder_of(cfg), cut, compute=torch.float64, adapter=lora, seed=seed)


def as_leaf(fed: Fed) -> Fed:
    return Fed(fed.x_BSD.detach().requires_grad_(), fed.kept_N, fed.targets_N)


def at_the_cut(x_BSD: Tensor) -> list[Tensor]:
    """Each example's positions; the last token of each is only a target."""
    return [x_SD[: len(example.ids) - 1] for x_SD, example in zip(x_BSD, EXAMPLES, strict=True)]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_parts_have_the_gradients_of_the_whole(
    models: Models, oracles: Oracles, family: str, tied: bool, cut: int, checkpointing: bool
) -> None:
    (cfg, directory), oracle = models(family, tied), oracles(family, tied)
    decoder = decoder_of(cfg)
    with Checkpoint.open(directory) as checkpoint:
        client = client_of(checkpoint, cfg, cut, trainable=True)
        server = server_of(checkpoint, decoder, cut, checkpointing=checkpointing)
        learner = Learner(server, whole_table(checkpoint, decoder), RATE)
        set_adapters([*client.part.trained, *server.trained], oracle.run.initial)
        stream = activations(client, EXAMPLES, AT)
    assert_close(stream, torch.cat(at_the_cut(oracle.streams[cut - 1])))

    fed = as_leaf(fed_of(stream.split([len(e.ids) - 1 for e in EXAMPLES]), POSITIONS, TARGETS, None))
    loss = learner.learn(fed, step_weight=fed.weight)
    assert loss == pytest.approx(oracle.run.losses[0], rel=1e-9)
    assert fed.x_BSD.grad is not None
    assert oracle.streams[cut - 1].grad is not None
    gradient = torch.cat(at_the_cut(fed.x_BSD.grad))
    assert_close(gradient, torch.cat(at_the_cut(oracle.streams[cut - 1].grad)))
    stream.backward(gradient)

    both = [*client.part.trained, *server.trained]
    assert {t.name for t in both} == oracle.run.gradients.keys()
    for t in both:
        assert t.local.grad is not None
        assert oracle.run.gradients[t.name].abs().max() > 1e-6
        assert_close(t.local.grad, oracle.run.gradients[t.name])


@pytest.mark.parametrize("wanted", [True, False], ids=["gradient wanted", "not wanted"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointing"])
@pytest.mark.parametrize("family", FAMILIES)
def test_behind_a_frozen_client_the_gradients_are_there(
    models: Models, oracles: Oracles, family: str, checkpointing: bool, wanted: bool
) -> None:
    """Nothing before the leaf is trained, which is where recomputation may lose its gradient or the adapters'."""
    (cfg, directory), oracle = models(family, True), oracles(family, True)
    x_BSD, decoder = oracle.streams[0], decoder_of(cfg)
    assert x_BSD.grad is not None
    with Checkpoint.open(directory) as checkpoint:
        server = server_of(checkpoint, decoder, 1, checkpointing=checkpointing)
        head = whole_table(checkpoint, decoder)
    set_adapters(server.trained, oracle.run.initial)
    fed = as_leaf(fed_of(at_the_cut(x_BSD), POSITIONS, TARGETS, None))
    fed.x_BSD.requires_grad_(wanted)
    Learner(server, head, RATE).learn(fed, step_weight=fed.weight)
    for t in server.trained:
        assert t.local.grad is not None
        assert_close(t.local.grad, oracle.run.gradients[t.name])
    if wanted:
        assert fed.x_BSD.grad is not None
        assert_close(torch.cat(at_the_cut(fed.x_BSD.grad)), torch.cat(at_the_cut(x_BSD.grad)))
    else:
        assert fed.x_BSD.grad is None


def test_recomputation_repeats_the_masks_of_dropout(models: Models, oracles: Oracles) -> None:
    (cfg, directory), oracle = models("llama", True), oracles("llama", True)
    decoder, lora = decoder_of(cfg), LORA.model_copy(update={"dropout": 0.5})
    found = []
    for checkpointing in (False, True):
        with Checkpoint.open(directory) as checkpoint:
            server = server_of(checkpoint, decoder, 1, lora=lora, checkpointing=checkpointing)
            head = whole_table(checkpoint, decoder)
        set_adapters(server.trained, oracle.run.initial)
        fed = as_leaf(fed_of(at_the_cut(oracle.streams[0]), POSITIONS, TARGETS, None))
        Learner(server, head, RATE).learn(fed, step_weight=fed.weight)
        found.append([fed.x_BSD.grad, *(t.local.grad for t in server.trained)])
    for kept, recomputed in zip(*found, strict=True):
        assert kept is not None
        assert recomputed is not None
        assert_close(recomputed, kept)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_client_gives_the_base_models_stream(models: Models, family: str, cut: int) -> None:
    cfg, directory = models(family, True)
    with Checkpoint.open(directory) as checkpoint:
        frozen = client_of(checkpoint, cfg, cut, trainable=False)
        fresh = client_of(checkpoint, cfg, cut, trainable=True)  # its B are zero
        stream = activations(frozen, EXAMPLES, AT)
        assert not stream.requires_grad
        assert frozen.part.trained == ()
        assert_close(stream, activations(fresh, EXAMPLES, AT).detach())


def test_an_example_is_computed_as_if_it_were_alone(models: Models) -> None:
    """Neither padding nor a neighbour reaches into it: records need no memory of their batch."""
    cfg, directory = models("gemma3", True)
    with Checkpoint.open(directory) as checkpoint:
        client = client_of(checkpoint, cfg, 2, trainable=False)
        together = activations(client, EXAMPLES, AT).split([len(e.ids) - 1 for e in EXAMPLES])
        for example, x_TD in zip(EXAMPLES, together, strict=True):
            assert_close(activations(client, [example], AT), x_TD)


class Noted:
    """Weights that note what is read of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names = checkpoint.names
        self.read_whole: set[str] = set()
        self.read_rows: dict[str, set[int]] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(name)

    def read(
        self, name: str, *, dtype: torch.dtype | None = None, rows: Ranges | None = None, columns: Ranges | None = None
    ) -> Tensor:
        self.read_whole.add(name)
        return self._checkpoint.read(name, dtype=dtype, rows=rows, columns=columns)

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        self.read_rows.setdefault(name, set()).update(ids)
        return self._checkpoint.rows(name, ids, dtype=dtype)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama-biased", "qwen3", "gemma3"])
def test_each_side_reads_its_own_tensors_only(models: Models, family: str, tied: bool, cut: int) -> None:
    cfg, directory = models(family, tied)
    decoder = decoder_of(cfg)
    embedding, head = embedding_tables(decoder)[0], head_of(decoder)
    with Checkpoint.open(directory) as checkpoint:
        noted = Noted(checkpoint)
        client = client_part(noted, decoder, cut, compute=torch.float64, adapter=None, seed=0)
        activations(client, EXAMPLES, AT)
        client.target_rows([5, 7])
        of_client, rows = noted.read_whole, noted.read_rows
        noted = Noted(checkpoint)
        server_of(noted, decoder, cut)
        of_server = noted.read_whole
        inner = {name for name in checkpoint.names if name not in (embedding, head)}
    assert of_client == {n for n in inner if any(n.startswith(f"model.layers.{i}.") for i in range(cut))}
    assert of_server == inner - of_client
    assert noted.read_rows == {}
    seen = {0} | {token for example in EXAMPLES for token in example.ids[:-1]}  # 0 where padded
    assert rows == ({embedding: seen | {5, 7}} if tied else {embedding: seen, head: {5, 7}})


@pytest.mark.parametrize("cut", CUTS)
def test_adapters_begin_as_those_of_a_whole_model_of_the_seed(models: Models, cut: int) -> None:
    cfg, directory = models("llama", True)
    decoder = decoder_of(cfg)
    with Checkpoint.open(directory) as checkpoint:
        plan = shares(cfg, [cfg.num_attention_heads], [cfg.intermediate_size], [cfg.vocab_size])
        whole = build_part(checkpoint, decoder, plan, 0, compute=torch.float64, adapter=LORA, seed=RATE.seed)
        client, server = client_of(checkpoint, cfg, cut, trainable=True), server_of(checkpoint, decoder, cut)
        other = client_of(checkpoint, cfg, cut, trainable=True, seed=RATE.seed + 1)
    expected = {t.name: t.local for t in whole.chain.trained}
    parts = client.part.tensors() | server.tensors()
    assert parts.keys() == expected.keys()
    assert all(torch.equal(parts[name], expected[name]) for name in expected)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in other.part.tensors().items())


@pytest.mark.parametrize("cut", [0, 3, 4])
def test_a_cut_that_leaves_one_side_empty_is_refused(models: Models, cut: int) -> None:
    cfg, directory = models("llama", True)
    with Checkpoint.open(directory) as checkpoint:
        for build in (
            lambda: server_of(checkpoint, decoder_of(cfg), cut),
            lambda: client_of(checkpoint, cfg, cut, trainable=False),
        ):
            with pytest.raises(BadInput, match=rf"split.cut is {cut}, but the model has 3 blocks: 1 to 2"):
                build()


def test_one_block_cannot_be_divided(tmp_path: Path) -> None:
    cfg = config("llama", num_hidden_layers=1)
    with (
        Checkpoint.open(save_tiny(cfg, tmp_path)) as checkpoint,
        pytest.raises(BadInput, match="one block, which cannot be divided"),
    ):
        server_of(checkpoint, decoder_of(cfg), 1)
