from importlib.metadata import version

from potluck.control.versions import differences, versions

THESE = {"potluck": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.1"}


def test_installed_versions_are_told() -> None:
    assert versions() == {name: version(name) for name in ("potluck", "torch", "transformers")}
    assert differences(versions(), versions()) is None


def test_a_difference_names_the_package_and_both_versions() -> None:
    sentence = differences(THESE, {**THESE, "torch": "2.12.0+cpu"})
    assert sentence is not None
    assert "torch 2.12.0+cpu instead of 2.13.0+cpu" in sentence
    assert "transformers" not in sentence
    assert "potluck missing instead of 0.1.0" in (differences(THESE, {}) or "")


def test_a_build_label_may_differ() -> None:
    assert differences(THESE, {**THESE, "torch": "2.13.0+cu130"}) is None
