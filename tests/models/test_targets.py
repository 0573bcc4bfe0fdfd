import pytest

from pool.adapters import ia3_targets
from pool.tiny import FAMILIES, config
from potluck.errors import BadInput
from potluck.job_sections import IA3
from potluck.models.families import decoder_of
from potluck.models.targets import match_targets, names_apart, of_divided_rows, targets_of

LINEARS = [
    f"model.layers.{i}.{name}"
    for i in (1, 11)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    ("targets", "matched"),
    [
        (["all-linear"], LINEARS),
        (["q_proj", "all-linear"], LINEARS),
        (["q_proj"], ["model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"]),
        (["mlp.up_proj"], ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"]),
        (["layers.1.mlp.down_proj"], ["model.layers.1.mlp.down_proj"]),
        (["model.layers.11.self_attn.o_proj"], ["model.layers.11.self_attn.o_proj"]),
        (["layers.1.mlp.up_proj", "1.mlp.up_proj"], ["model.layers.1.mlp.up_proj"]),
    ],
    ids=str,
)
def test_a_target_is_a_whole_name_or_its_last_parts(targets: list[str], matched: list[str]) -> None:
    assert match_targets(targets, LINEARS) == frozenset(matched)


@pytest.mark.parametrize("target", ["proj", "_proj", "c_attn", "self_attn", "layers.2.mlp.up_proj", "", ".q_proj"])
def test_a_target_that_matches_nothing_names_the_linears_there_are(target: str) -> None:
    with pytest.raises(BadInput, match="matches no linear") as caught:
        match_targets(["q_proj", target], LINEARS)
    assert f"'{target}'" in str(caught.value)
    assert "down_proj, o_proj, q_proj, up_proj, or all-linear" in str(caught.value)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_the_head_and_the_embedding_stay_frozen(target: str) -> None:
    with pytest.raises(BadInput, match=f"'{target}' cannot be trained"):
        match_targets([target], LINEARS)


@pytest.mark.parametrize("family", [*FAMILIES, "bert", "roberta"])
def test_vectors_are_on_key_value_and_the_mlps_second_linear(family: str) -> None:
    decoder = decoder_of(config(family))
    expected = match_targets(ia3_targets(family), decoder.linears)
    assert targets_of(IA3(), decoder) == expected
    assert len(expected) == 2 * (2 if len(decoder.names.qkv) == 1 else 3)
    assert targets_of(IA3(targets=["all-linear"]), decoder) == frozenset(decoder.linears)
    assert of_divided_rows(IA3(targets=["all-linear"]), decoder) == []


@pytest.mark.parametrize("targets", [["auto"], ["all-linear"], None], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "bert", "roberta"])
def test_names_for_peft_find_each_kind_and_no_other(family: str, targets: list[str] | None) -> None:
    many: dict[str, object] = {"num_hidden_layers": 12, "layer_types": None, "no_rope_layers": [1] * 12}
    decoder = decoder_of(config(family, **many))
    names = decoder.names
    some = [decoder.full_name(i, name) for i in (1, 11) for name in (names.o, names.into[0], names.out)]
    adapted = targets_of(IA3(targets=targets or some), decoder)
    columns, rows = names_apart(adapted, decoder)
    kinds = {"column": columns, "row": rows}
    for linear in decoder.linears:
        cut = decoder.cuts[decoder.within_block(linear)]
        found = {kind for kind, given in kinds.items() if any(linear == n or linear.endswith(f".{n}") for n in given)}
        assert found == ({cut} if linear in adapted else set())
        assert any(linear.endswith(name) for name in rows) <= (cut == "row"), "as peft finds what scales inputs"


def test_a_vector_on_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match=r"ia3\.targets: 'c_attn' matches no linear"):
        targets_of(IA3(targets=["c_attn"]), decoder_of(config("llama")))
