import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Embedding
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from potluck.bench.pool_plans import job_of
from potluck.bench.pool_sets import SETS, SHAPES, model_bytes, shape_of, speeds_of
from potluck.bench.pool_spec import Lines, encoded
from potluck.errors import BadInput
from potluck.models.families import decoder_for, decoder_of


@given(st.sampled_from(sorted(SETS)), st.integers(1, 64), st.floats(0.01, 1.0))
def test_speeds_keep_their_ratios_within_the_load(name: str, cores: int, part: float) -> None:
    load = part * 0.9 * cores
    speeds = speeds_of(name, load, cores)
    assert len(speeds) == len(SETS[name])
    assert max(speeds) <= 1
    assert sum(speeds) <= load + 1e-9
    for speed, ratio in zip(speeds, SETS[name], strict=True):
        assert speed / speeds[-1] == pytest.approx(ratio / SETS[name][-1], abs=2e-4 / speeds[-1])
    if max(speeds) < 1 - 1e-5:
        assert sum(speeds) == pytest.approx(load, abs=1e-5)


def test_an_unknown_set_or_a_load_beyond_the_cores_is_refused() -> None:
    with pytest.raises(BadInput, match=r"no set 'E'; there are A \(1.42:1:1\), B .* D \(4:2:1:1\)"):
        speeds_of("E", 1.5, 2)
    with pytest.raises(BadInput, match=r"the 5 devices of set C cannot be paced on 1\.5 cores: this machine has 1"):
        speeds_of("C", 1.5, 1)
    with pytest.raises(BadInput, match=r"at most 1\.8"):
        speeds_of("A", 1.9, 2)
    with pytest.raises(BadInput, match="--load"):
        speeds_of("A", 0.0, 2)


def test_an_unknown_shape_or_too_many_blocks_are_refused() -> None:
    with pytest.raises(BadInput, match=r"no shape 'gpt'; there are smollm2-135m, .*llama-1b, mobilellama-1.4b"):
        shape_of("gpt", None)
    with pytest.raises(BadInput, match="llama-1b has 1 to 16 blocks, not 17"):
        shape_of("llama-1b", 17)


@pytest.mark.parametrize("name", sorted(set(SHAPES) - {"roberta-base"}))
def test_memory_of_a_whole_model_is_that_of_its_parameters(name: str) -> None:
    config = shape_of(name, 2).config(2)
    decoder = decoder_of(config)
    assert len(decoder.layers) == config.num_hidden_layers == 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    elements = sum(parameter.numel() for parameter in model.parameters())
    head = config.vocab_size * config.hidden_size
    positions = 0 if decoder.names.positions is None else decoder.max_positions * config.hidden_size
    held = elements - positions - (0 if config.tie_word_embeddings else head)
    assert model_bytes(decoder, "lora", "fp32") == 4 * held
    assert model_bytes(decoder, "lora", "bf16") == 2 * held
    assert model_bytes(decoder, "full", "fp32") == 4 * head + 16 * (held - head)


def test_memory_of_an_encoder_is_that_of_its_blocks_and_its_classes() -> None:
    config = shape_of("roberta-base", 2).config(2)
    decoder = decoder_for(config, job_of(train="full", dtype="fp32", rows=8, task="sequence-classification"))
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    tables = sum(table.weight.numel() for table in model.roberta.embeddings.children() if isinstance(table, Embedding))
    elements = sum(parameter.numel() for parameter in model.parameters()) - tables
    assert model_bytes(decoder, "full", "fp32") == 16 * elements
    hidden = sum(parameter.numel() for parameter in model.classifier.dense.parameters())
    out = sum(parameter.numel() for parameter in model.classifier.out_proj.parameters())
    assert model_bytes(decoder, "lora", "fp32") == 4 * (elements - hidden - out) + 16 * (hidden + out)


@given(st.lists(st.dictionaries(st.text(), st.integers())), st.integers(1, 9))
def test_lines_are_whole_however_they_arrive(values: list[dict[str, int]], size: int) -> None:
    content = b"".join(encoded(value) for value in values)
    lines = Lines()
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    assert [value for piece in pieces for value in lines.feed(piece)] == values
    assert list(lines.feed(json.dumps({"half": 1}).encode())) == []
