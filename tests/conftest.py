"""Settings every test shares."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # also of what tests start: threads that wait for a taken core spin

import pytest
import torch

torch.set_num_threads(1)

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

RERUNS = 4
"""Of a test of times: what it claims holds on a machine that others leave alone, now and then."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "timing" in item.keywords:
            item.add_marker(pytest.mark.flaky(reruns=RERUNS, reruns_delay=2))
