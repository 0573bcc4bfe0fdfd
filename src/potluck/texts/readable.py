"""Whether data can be read, where neither their task is known yet nor memory is to be spent on torch."""

from collections.abc import Sequence

from potluck.errors import BadInput
from potluck.texts.rows import read_rows, records_of


def check_readable(sources: Sequence[str]) -> None:
    """See whether sources can be read before their task is known; which columns it wants, a job may say.

    Raises:
        BadInput: a source cannot be read, or holds what no task could use.
    """
    for source in sources:
        try:
            read_rows([source], "auto")
        except BadInput:
            records = [record for _, record in records_of(source)]
            if not records or not all(isinstance(record, dict) and len(record) > 1 for record in records):
                raise
