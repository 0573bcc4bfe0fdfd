"""A config's fields say the same as the config, for every family and rope."""

import json
from dataclasses import fields as parts_of
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from pool import tiny
from pool.tiny import config
from potluck.errors import BadInput
from potluck.models.families import FAMILIES, decoder_of
from potluck.models.families.decoder import Decoder
from potluck.models.families.fields import Fields, config_from, fields_of

ROPES: dict[str, dict[str, Any]] = {
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def over_the_wire(cfg: PretrainedConfig) -> Fields:
    return Fields(json.loads(json.dumps(fields_of(cfg))))


def check_same(found: Decoder, wanted: Decoder) -> None:
    for part in parts_of(Decoder):
        if part.name != "layers":
            assert getattr(found, part.name) == getattr(wanted, part.name), part.name
    assert len(found.layers) == len(wanted.layers)
    for a, b in zip(found.layers, wanted.layers, strict=True):
        assert a.window == b.window
        assert (a.rope is None) == (b.rope is None)
        if a.rope is not None and b.rope is not None:
            for S in (5, 40):
                assert all(
                    torch.equal(x, y) for x, y in zip(a.rope(S, torch.float64), b.rope(S, torch.float64), strict=True)
                )


@pytest.mark.parametrize("family", [*tiny.FAMILIES, "bert", "roberta"])
def test_tiny_models(family: str) -> None:
    cfg = config(family)
    check_same(decoder_of(over_the_wire(cfg)), decoder_of(cfg))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_family_as_it_usually_is(family: str) -> None:
    cfg = AutoConfig.for_model(family)
    check_same(decoder_of(over_the_wire(cfg)), decoder_of(cfg))


@pytest.mark.parametrize("kind", ROPES)
def test_ropes(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    cfg = config("llama", rope_parameters=rope, max_position_embeddings=64)
    check_same(decoder_of(over_the_wire(cfg)), decoder_of(cfg))


def test_a_rope_for_each_kind_of_block() -> None:
    of_kinds = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
    cfg = config("gemma3", rope_parameters=of_kinds)
    check_same(decoder_of(over_the_wire(cfg)), decoder_of(cfg))


def test_a_rope_that_depends_on_the_length() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.2, 2.4, 2.6],
        "original_max_position_embeddings": 16,
    }
    cfg = config("phi3", hidden_size=72, rope_parameters=rope, original_max_position_embeddings=16)
    check_same(decoder_of(over_the_wire(cfg)), decoder_of(cfg))


def test_the_config_comes_back_from_its_fields() -> None:
    for family in (*tiny.FAMILIES, "bert", "roberta"):
        cfg = config(family)
        assert fields_of(config_from(fields_of(cfg))) == fields_of(cfg), family


def test_fields_of_no_model() -> None:
    with pytest.raises(BadInput, match="'mystery'"):
        config_from({"model_type": "mystery"})
    with pytest.raises(BadInput, match="cannot be used"):
        config_from(fields_of(config("llama")) | {"hidden_size": "wide"})


@pytest.mark.parametrize("fields", [{}, {"model_type": "llama"}, {"model_type": "gpt2", "n_head": "many"}], ids=str)
def test_fields_that_say_too_little(fields: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"description of the model cannot be used"):
        decoder_of(Fields(fields))
