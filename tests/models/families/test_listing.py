"""What is said of families is true of them."""

import pytest
from transformers import CONFIG_MAPPING

from potluck.errors import BadInput
from potluck.models.families import FAMILIES, decoder_of
from potluck.models.families.listing import families


def test_every_family_is_listed_once_with_what_it_can_do() -> None:
    listed = {family.model_type: family for family in families()}
    assert list(listed) == sorted(FAMILIES)
    assert listed["phi3"].fused == ("self_attn.qkv_proj", "mlp.gate_up_proj")
    assert listed["gpt2"].fused == ("attn.c_attn",)
    assert listed["gpt2"].tied
    assert not listed["gpt_neox"].tied
    assert all("tensor" in family.strategies for family in listed.values())
    assert listed["gpt_neox"].note
    assert not listed["llama"].note


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_linears_are_cut_as_transformers_plan_says_where_it_has_one(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type]()
    decoder = decoder_of(config)
    plan = {name.removeprefix("layers.*."): how for name, how in (config.base_model_tp_plan or {}).items()}
    for name, cut in decoder.cuts.items():
        if (how := plan.get(name)) in ("colwise", "rowwise"):
            assert how == {"column": "colwise", "row": "rowwise"}[cut]


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("mixtral", "mixture of experts"), ("qwen3_moe", "mixture of experts"), ("mamba", "state-space")],
)
def test_models_of_another_kind_are_refused_by_its_name(model_type: str, kind: str) -> None:
    with pytest.raises(BadInput, match=rf"'{model_type}' \({kind}\) are not supported"):
        decoder_of(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("model_type", "fields", "said"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 8}, "word_embed_proj_dim"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ("gpt2", {"n_embd": 10, "n_head": 3}, "do not divide"),
        ("gemma2", {"use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_models_that_are_built_otherwise_are_refused(model_type: str, fields: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        decoder_of(CONFIG_MAPPING[model_type](**fields))
