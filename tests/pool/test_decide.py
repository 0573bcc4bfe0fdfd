"""From a job and measured devices to a plan, by the job's word or by what was measured."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pool.profiles import job, profile
from pool.tiny import config
from potluck.errors import BadInput, PotluckError
from potluck.job import Job
from potluck.pool.candidates import Candidate
from potluck.pool.decide import decide
from potluck.pool.listener import Listener
from potluck.pool.process import Event
from potluck.pool.profile import Link, Work
from potluck.texts.batch import Example


class Measured:
    """A crew whose profiles are made up."""

    measured = True

    def __init__(
        self,
        speeds: Sequence[float],
        owners: Sequence[int] = (0,),
        silent: Sequence[int] = (),
        longest: int = 0,
        available: int = 64 << 30,
    ) -> None:
        self.longest, self.available = longest, available
        self.names = [f"cam-{rank}" if rank else "hub" for rank in range(len(speeds))]
        self.owners = list(owners)
        self.speeds, self.silent = speeds, silent
        self.told: list[dict[str, Any]] = []
        self.kept: tuple[list[int], str] | None = None

    def run(self, task: str, job: Job, fields: dict[str, Any], on_event: Callable[[Event], None]) -> None:
        assert task == "measure"
        self.told.append(fields)
        work = Work.model_validate(fields["work"])
        link = Link(latency_s=1e-6, bytes_per_s=1e10)
        for rank, speed in enumerate(self.speeds):
            if rank not in self.silent:
                made = profile(self.names[rank], speed=speed, of=work, link=link, available=self.available)
                told = {"profile": made.model_dump(mode="json"), "longest": self.longest if rank else 0}
                on_event({"event": "profile", "rank": rank, **told})

    def keep(self, ranks: Sequence[int], why: str) -> None:
        self.kept = (list(ranks), why)


class Heard(Listener):
    def __init__(self) -> None:
        self.candidates: Sequence[Candidate] = ()
        self.if_data_moved: str | None = None

    def chosen(self, candidates: Sequence[Candidate], chosen: Candidate, if_data_moved: str | None) -> None:
        self.candidates, self.if_data_moved = candidates, if_data_moved


EXAMPLE = Example(ids=(1, 2, 3, 4), supervised=(False, False, True, True), where="d:1", prompt_length=2, answer="3 4")


def decided(crew: Measured, **fields: Any) -> tuple[dict[str, list[int]], Any, Heard]:
    """What each device holds, the whole decision, and what was told."""
    heard = Heard()
    decision = decide(job(dtype="fp32", **fields), config("llama"), [EXAMPLE] * 8, crew, heard)
    devices = decision.plan.devices
    return {d.name: [len(d.heads), len(d.columns), len(d.vocab_rows)] for d in devices}, decision, heard


def test_a_ratio_is_the_persons_word() -> None:
    crew = Measured([1, 1, 1], owners=[0, 2])
    held, decision, heard = decided(crew, devices="3:2:1")
    assert held == {"hub": [5, 13, 31], "cam-1": [3, 9, 20], "cam-2": [1, 4, 10]}
    assert decision.prediction.step_s > 0
    assert [candidate.plan for candidate in heard.candidates] == [decision.plan]
    assert crew.kept is None, "nobody is sent home against the person's word"


def test_shares_by_hand_must_fit_too() -> None:
    with pytest.raises(BadInput, match=r"These shares do not fit: .* GiB are missing on"):
        decided(Measured([1, 1], available=1 << 20), devices="1:1")


def test_memory_must_do_for_the_longest_example_of_any_owner() -> None:
    usual, longer = (decided(Measured([1, 1], owners=[0, 1], longest=longest))[1] for longest in (0, 400))
    for few, many in zip(usual.prediction.devices, longer.prediction.devices, strict=True):
        assert many.memory_bytes > few.memory_bytes


def test_shares_by_hand_need_no_ratio() -> None:
    held, decision, _ = decided(Measured([1, 1]), shares={"heads": [0, 9]})
    assert held == {"hub": [0, 13, 31], "cam-1": [9, 13, 30]}
    assert decision.plan.strategy == "tensor"


def test_even_shares_give_the_remainder_to_the_fastest() -> None:
    crew = Measured([0.5, 1, 0.5])
    held, decision, heard = decided(crew, strategy="tensor-uniform")
    assert decision.plan.strategy == "tensor-uniform"
    assert [heads for heads, _, _ in held.values()] == [3, 3, 3]
    assert [rows for _, _, rows in held.values()] == [20, 21, 20]
    strategies = {"single", "tensor", "tensor-uniform", "pipeline", "pipeline-uniform", "data"}
    assert {candidate.strategy for candidate in heard.candidates} == strategies
    assert crew.kept is None


def test_who_would_only_slow_the_others_is_sent_home_with_the_reason() -> None:
    crew = Measured([1, 0.0001])
    held, decision, _ = decided(crew)
    assert held == {"hub": [9, 26, 61]}
    assert decision.plan.strategy == "single"
    assert crew.kept == ([0], "hub trains faster alone: this device is not needed.")

    crew = Measured([0.01, 0.01, 0.00001])
    held, _, _ = decided(crew, strategy="tensor")
    assert list(held) == ["hub", "cam-1"]
    assert crew.kept == ([0, 1], "hub trains faster without this device: this device is not needed.")


def test_an_owner_stays_however_slow() -> None:
    crew = Measured([1, 0.0001], owners=[0, 1])
    held, _, _ = decided(crew)
    assert list(held) == ["hub", "cam-1"]
    assert crew.kept is None


@pytest.mark.parametrize("data_stays", [True, False])
def test_what_moved_data_would_bring_is_told_where_data_stay(data_stays: bool) -> None:
    _, _, heard = decided(Measured([0.001, 1]), data_stays=data_stays)
    assert ("If data could move, cam-1 alone" in (heard.if_data_moved or "")) == data_stays


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": "1:0:0"}, "^Every share goes to hub: train there alone, with 'strategy: single'"),
        ({"devices": "0:0:1"}, "^Every share goes to cam-2: train there alone"),
        ({"shares": {"heads": [9, 0, 0], "columns": [26, 0, 0], "vocab_rows": [61, 0, 0]}}, "goes to hub: train"),
        ({"devices": "2:1:1", "strategy": "tensor-uniform"}, "'tensor-uniform' gives even shares"),
        ({"shares": {"heads": [5, 4]}}, r"shares\.heads: 2 numbers \(5, 4\) for 3 devices"),
        ({"strategy": "single", "shares": {}}, "'single' runs on one device"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        decided(Measured([1, 1, 1]), **fields)


def test_a_device_without_a_profile_is_named() -> None:
    with pytest.raises(PotluckError, match=r"^cam-1 ended without a profile\.$"):
        decided(Measured([1, 1], silent=[1]))


def test_the_devices_choose_the_dtype() -> None:
    crew = Measured([1, 1])
    _, decision, _ = decided(crew)
    assert decision.job.dtype == crew.told[0]["work"]["dtype"] == "fp32"


def test_local_devices_are_not_measured() -> None:
    crew = Measured([])
    crew.measured, crew.names = False, ["device-0", "device-1"]
    held, decision, _ = decided(crew, devices="2:1")
    assert held == {"device-0": [6, 17, 41], "device-1": [3, 9, 20]}
    assert decision.prediction is None
    assert crew.told == []


def test_a_pipeline_of_measured_devices_leaves_out_who_is_not_needed() -> None:
    crew = Measured([0.01, 0.01, 0.00001])
    _, decision, _ = decided(crew, strategy="pipeline", data_stays=False)
    assert [device.name for device in decision.plan.devices] == ["hub", "cam-1"]
    links = [device.links.spans[0] for device in decision.plan.devices]
    assert sorted(links)[0][1] == sorted(links)[1][0]
    assert decision.plan.micro_batch_size in (1, 2)
    assert decision.prediction.step_s == decision.plan.predicted_step_s
    assert crew.kept == ([0, 1], "hub trains faster without this device: this device is not needed.")


@pytest.mark.parametrize("strategy", ["pipeline", "data"])
def test_a_ratio_of_stages_or_rows_is_predicted_too(strategy: str) -> None:
    crew = Measured([1, 1, 1])
    _, decision, heard = decided(crew, strategy=strategy, devices="2:1:1", data_stays=False)
    (candidate,) = heard.candidates
    assert (candidate.strategy, candidate.moves_data) == (strategy, True)
    assert decision.prediction.step_s > 0
    assert [device.name for device in decision.prediction.devices] == ["hub", "cam-1", "cam-2"]
    busy = [device.compute_s for device in decision.prediction.devices]
    assert busy[0] > 1.2 * max(busy[1:]) if strategy == "data" else min(busy) > 0


def test_a_ratio_that_moves_data_that_stay_is_refused() -> None:
    with pytest.raises(BadInput, match=r"'pipeline' is not possible: the labels of hub's texts would go to cam-2, the"):
        decided(Measured([1, 1, 1], owners=[0, 1]), strategy="pipeline", devices="2:1:1")
    with pytest.raises(BadInput, match="strategy: 'pipeline' cannot be carried out: the labels of hub's"):
        decided(Measured([1, 1]), strategy="pipeline-uniform".removesuffix("-uniform"))
