import random
from collections import Counter

import pytest

pytest.importorskip("hassil", reason="the demo's packages are not installed: pip install -e '.[demo]'")
pytest.importorskip("home_assistant_intents", reason="the demo's packages are not installed: pip install -e '.[demo]'")

from hassil.intents import Intents
from hassil.recognize import recognize
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.demo.intents import Commands, Template, draw_sentence, sample_commands


@pytest.fixture(scope="module")
def commands() -> Commands:
    return sample_commands(0)


def test_about_2200_sentences_of_42_intents(commands: Commands) -> None:
    assert len({command.intent for command in commands.train}) == 42
    assert 2_000 <= len(commands.train) <= 2_400
    assert 105 <= len(commands.held_out) <= 135


def test_no_template_is_both_learned_from_and_held_out(commands: Commands) -> None:
    learned = {(command.intent, command.template) for command in commands.train}
    held_out = {(command.intent, command.template) for command in commands.held_out}
    assert not learned & held_out


def test_no_sentence_comes_twice(commands: Commands) -> None:
    counts = Counter(command.sentence for command in (*commands.train, *commands.held_out))
    assert max(counts.values()) == 1


def test_every_intent_of_two_templates_or_more_is_on_both_sides(commands: Commands) -> None:
    single = {"HassBroadcast", "HassListRemoveItem", "HassVacuumReturnToBase"}
    held_out = Counter(command.intent for command in commands.held_out)
    assert set(held_out) == {command.intent for command in commands.train} - single
    assert max(held_out.values()) <= 3


def test_the_seed_decides(commands: Commands) -> None:
    assert sample_commands(0) == commands
    other = sample_commands(1)
    assert {command.template for command in other.held_out} != {command.template for command in commands.held_out}


def test_rows_are_prompts_and_completions(commands: Commands) -> None:
    for command in commands.train[:50]:
        row = command.row()
        assert row == {"prompt": f"Command: {command.sentence}\nIntent:", "completion": f" {command.intent}"}
        assert command.sentence == " ".join(command.sentence.split()).lower()
        assert not set("[](){}<>|;") & set(command.sentence)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_hassil_recognizes_what_is_drawn(seed: int) -> None:
    """The walk over the syntax tree against the library's own matcher."""
    text = "((turn|switch) on [(all|every) [single]] {color} lamp[s]|<dim> the lamp[s] to {level}[ ]%) (please;now)"
    rules = {"dim": "(dim|(lower;slowly))"}
    lists = {
        "color": {"values": ["red", {"in": "(dark|deep) blue", "out": "blue"}]},
        "level": {"range": {"from": 0, "to": 100, "step": 5}},
    }
    grammar = {"lists": lists, "expansion_rules": rules, "intents": {"Lamp": {"data": [{"sentences": [text]}]}}}
    sentence = draw_sentence(Template(text, "Lamp", (), lists, rules), random.Random(seed))
    assert recognize(sentence, Intents.from_dict({"language": "en", **grammar})) is not None, sentence
