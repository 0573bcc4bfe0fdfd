"""How many examples are held back to judge by."""

import pytest

from potluck.errors import BadInput
from potluck.split.client_data import parse_holdout


@pytest.mark.parametrize(
    ("text", "examples", "held"),
    [("10%", 50, 5), ("10%", 3, 1), ("0", 3, 0), ("2", 3, 2), (" 33.3 % ", 9, 3), ("0%", 3, 0)],
)
def test_what_is_held_back(text: str, examples: int, held: int) -> None:
    assert parse_holdout(text).of(examples) == held


@pytest.mark.parametrize("text", ["ten", "-1", "100%", "1e3", "", "0.5", "%", "10%x"])
def test_what_is_no_part_to_hold_back(text: str) -> None:
    with pytest.raises(BadInput, match=r"--holdout .*: give a part below 100%, such as 10%, or a number"):
        parse_holdout(text)


@pytest.mark.parametrize("text", ["3", "99.9%", "1000"])
def test_something_must_be_left_to_train_on(text: str) -> None:
    with pytest.raises(BadInput, match="none would be left to train on"):
        parse_holdout(text).of(3)
