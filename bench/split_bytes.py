"""Bytes of l-shaped against u-shaped training by the formula that counters of real runs agree with to 1 %.

python -m bench.split_bytes

SmolLM2 cut behind block 2 (hidden size 576, 162,816 numbers of rank-8 adapters in the client's part), bf16, trainable
clients; three clients with 169 supervised tokens each in a step, 1,440 distinct targets and 1,366 negatives each.
"""

import json

from potluck.job_sections import Split
from potluck.split.volumes import Load, scheme_bytes

HIDDEN_SIZE, ADAPTER_PARAMETERS = 576, 162_816
STEP = Load(examples=1, tokens=169, targets=169)
TABLE_ROWS, NEGATIVES = 1440, 1366


def main() -> None:
    """One line for each number of steps."""
    for steps in (40, 120, 300, 1500):
        row: dict[str, float] = {"steps": steps}
        for name, adapters in (("ratio", ADAPTER_PARAMETERS), ("ratio_without_averaging", 0)):
            u, l = (client_bytes(scheme, steps, adapters) for scheme in ("u-shaped", "l-shaped"))  # noqa: E741
            row[name] = round(l / u, 3)
        print(json.dumps(row))


def client_bytes(scheme: str, steps: int, adapter_parameters: int) -> int:
    """Of one client, both ways."""
    split = Split.model_validate({"scheme": scheme, "client": "trainable", "encoding": "bf16"})
    return scheme_bytes(
        split,
        HIDDEN_SIZE,
        [STEP] * steps,
        table_rows=TABLE_ROWS,
        negatives=NEGATIVES,
        adapter_parameters=adapter_parameters,
    ).total


if __name__ == "__main__":
    main()
