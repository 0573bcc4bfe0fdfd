"""Smart-home commands and what they ask for, drawn from Home Assistant's sentence templates.

A template such as ``turn on [the] {area} (light|lamp)`` stands for many sentences. Templates are either learned from
or held out, with all their sentences, so that a score on held-out sentences is not the memory of a template.
The grammar is read by hassil, Home Assistant's own parser; its sampler lists every sentence of a template, which is
billions for some, so the random walk over its syntax tree is ours.
"""

import importlib.resources
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hassil import expression as grammar
from hassil import parse_sentence

from potluck.demo.home import AREAS, FLOORS, NAMES_OF_DOMAIN, WILDCARDS

_DRAWS_WITHOUT_A_NEW_SENTENCE = 20


@dataclass(frozen=True)
class Command:
    """One sentence and the intent it expresses."""

    sentence: str
    intent: str
    template: str

    @property
    def prompt(self) -> str:
        """What the model is given."""
        return prompt_of(self.sentence)

    def row(self) -> dict[str, str]:
        """A training example: the prompt, and the completion to be learned."""
        return {"prompt": self.prompt, "completion": f" {self.intent}"}


def prompt_of(sentence: str) -> str:
    """A command as the model is given it."""
    return f"Command: {sentence}\nIntent:"


@dataclass(frozen=True)
class Commands:
    """Sentences to learn from, and sentences of other templates to be judged by."""

    train: tuple[Command, ...]
    held_out: tuple[Command, ...]


@dataclass(frozen=True)
class Template:
    """A sentence template of an intent, with the lists and rules its names refer to."""

    text: str
    intent: str
    names: tuple[str, ...]
    """What ``{name}`` may be here: names of the kinds of device that the template is about."""
    lists: Mapping[str, Any]
    """What ``{list}`` may be, by name: values or a range of numbers."""
    rules: Mapping[str, str]
    """What ``<rule>`` stands for, by name."""


def sample_commands(seed: int, *, per_intent: int = 57, held_out_per_intent: int = 3) -> Commands:
    """Draw sentences of every intent, each sentence once.

    Args:
        seed: the same seed gives the same sentences.
        per_intent: sentences to learn from an intent; fewer where its templates stand for fewer.
        held_out_per_intent: sentences held out an intent, each of another template as long as there are enough; none
            where an intent has a single template.

    Raises:
        ModuleNotFoundError: the package home-assistant-intents is not installed.
    """
    train: list[Command] = []
    held_out: list[Command] = []
    source = _read_source()
    taken: set[str] = set()
    for intent in sorted(source["intents"]):
        rng = random.Random(f"{seed} {intent}")
        templates = list(_templates(intent, source))
        rng.shuffle(templates)
        kept_back = min(held_out_per_intent, len(templates) // 2)
        held_out += _draw_commands(templates[:kept_back], held_out_per_intent, taken, rng)
        train += _draw_commands(templates[kept_back:], per_intent, taken, rng)
    rng = random.Random(f"{seed}")
    rng.shuffle(train)
    return Commands(tuple(train), tuple(held_out))


def _draw_commands(templates: Sequence[Template], count: int, taken: set[str], rng: random.Random) -> Iterator[Command]:
    """At most ``count`` sentences that are not ``taken``, in turn from each template that still has new ones."""
    open_templates = list(templates)
    while open_templates and count > 0:
        for template in list(open_templates):
            sentence = _draw_new(template, taken, rng)
            if sentence is None:
                open_templates.remove(template)
            elif count > 0:
                taken.add(sentence)
                count -= 1
                yield Command(sentence, template.intent, template.text)


def _draw_new(template: Template, taken: set[str], rng: random.Random) -> str | None:
    for _ in range(_DRAWS_WITHOUT_A_NEW_SENTENCE):
        sentence = draw_sentence(template, rng)
        if sentence and sentence not in taken:
            return sentence
    return None


def draw_sentence(template: Template, rng: random.Random) -> str:
    """One sentence of a template."""
    return " ".join(_draw(_parsed(template.text), template, rng).lower().split())


def _draw(node: grammar.Expression, template: Template, rng: random.Random) -> str:
    match node:
        case grammar.TextChunk():
            return str(node.original_text)
        case grammar.Alternative():
            return _draw(rng.choice(node.items), template, rng)
        case grammar.Permutation():
            return " ".join(_draw(item, template, rng) for item in rng.sample(node.items, len(node.items)))
        case grammar.Sequence():
            return "".join(_draw(item, template, rng) for item in node.items)
        case grammar.RuleReference():
            return _draw(_parsed(template.rules[node.rule_name]), template, rng)
        case grammar.ListReference():
            return _draw_from_list(node.list_name, template, rng)
    raise ValueError(f"hassil gave a {type(node).__name__}, which this sampler does not know")


def _draw_from_list(name: str, template: Template, rng: random.Random) -> str:
    words = {"area": AREAS, "floor": FLOORS, "name": template.names, **WILDCARDS}.get(name)
    if words is not None:
        return rng.choice(words)
    choices = template.lists[name]
    if "range" in choices:
        numbers = choices["range"]
        return str(rng.randrange(numbers["from"], numbers["to"] + 1, numbers.get("step", 1)))
    value = rng.choice(choices["values"])
    return _draw(_parsed(value["in"] if isinstance(value, Mapping) else value), template, rng)


def _templates(intent: str, source: Mapping[str, Any]) -> Iterator[Template]:
    seen: set[str] = set()
    for block in source["intents"][intent]["data"]:
        domains = block.get("requires_context", {}).get("domain", [])
        names = tuple(
            name
            for domain in ([domains] if isinstance(domains, str) else domains)
            for name in NAMES_OF_DOMAIN.get(domain, ())
        )
        for text in block["sentences"]:
            if text not in seen:
                seen.add(text)
                yield Template(text, intent, names, source["lists"], source["expansion_rules"])


@cache
def _parsed(text: str) -> grammar.Expression:
    return parse_sentence(text).expression


def _read_source() -> dict[str, Any]:
    file = importlib.resources.files("home_assistant_intents") / "data" / "en.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
