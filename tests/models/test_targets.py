import pytest

from potluck.errors import BadInput
from potluck.models.targets import match_targets

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
