"""Records of a ``datasets`` directory or a data set on the hub; the ``datasets`` library does the work."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from potluck.errors import BadInput
from potluck.texts.readers import Record, first_line_of, with_class_names


def is_saved_dataset(directory: Path) -> bool:
    """Whether ``save_to_disk`` wrote this directory."""
    return any((directory / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_saved_dataset(directory: Path, split: str | None) -> Iterator[Record]:
    """The records of a directory that ``save_to_disk`` wrote; ``split`` defaults to ``train`` where there are several.

    Raises:
        BadInput: the library is missing, the directory is damaged, or it has no such split.
    """
    library = _library(str(directory))
    try:
        loaded = library.load_from_disk(str(directory))
    except Exception as error:
        raise BadInput(f"{directory} is not a data set that can be loaded: {first_line_of(error)}") from None
    yield from _records(library, _one_split(library, loaded, split, str(directory)), str(directory))


def read_hub_dataset(name: str, split: str | None) -> Iterator[Record]:
    """The records of ``owner/name`` on the hub; ``split`` defaults to ``train``. Code of the data set is never run.

    Raises:
        BadInput: the library is missing, or the hub has no such data set or split, or cannot be reached.
    """
    library = _library(name)
    try:
        loaded = library.load_dataset(name)
    except Exception as error:
        raise BadInput(
            f"'{name}' is neither a file nor a directory here, and it could not be loaded from the hub:"
            f" {first_line_of(error)}"
        ) from None
    yield from _records(library, _one_split(library, loaded, split, name), name)


def _library(source: str) -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise BadInput(
            f"{source}: no such file; to read a data set directory or one from the hub, install the 'datasets'"
            " library: pip install 'potluck[datasets]'."
        ) from None
    module: ModuleType = datasets
    return module


# The library is optional, so that its types cannot be named.
def _one_split(library: ModuleType, loaded: Any, split: str | None, source: str) -> Any:
    if not isinstance(loaded, library.DatasetDict):
        if split is not None:
            raise BadInput(f"{source} has no splits, so '{split}' cannot be chosen.")
        return loaded
    wanted = split or ("train" if "train" in loaded or len(loaded) != 1 else next(iter(loaded)))
    if wanted not in loaded:
        raise BadInput(f"{source} has no split '{wanted}'; add one of these: {', '.join(f':{s}' for s in loaded)}.")
    return loaded[wanted]


def _records(library: ModuleType, dataset: Any, source: str) -> Iterator[Record]:
    features = dataset.features.items()
    names = {column: list(feature.names) for column, feature in features if isinstance(feature, library.ClassLabel)}
    for number, record in enumerate(dataset, 1):
        yield f"{source}:{number}", with_class_names(record, names)
