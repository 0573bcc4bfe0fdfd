"""Measuring on tiny models: lines that make sense, what is remembered, pacing, memory."""

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import config

import potluck.pool.measure as measure_module
from potluck.chain.comm import Comm
from potluck.chain.pace import Pace
from potluck.errors import BadInput
from potluck.job_sections import IA3, Lora
from potluck.models.families.fields import fields_of
from potluck.pool.laps import kept_bytes, make_samples, walk_round
from potluck.pool.link import measure_link, nic_link
from potluck.pool.measure import fit, measure
from potluck.pool.profile import Link, Machine, Profile, Work
from worlds import run_world


def work(family: str = "llama", **fields: object) -> Work:
    usual = {
        "config": fields_of(config(family)),
        "rows": 2,
        "length": 6,
        "supervised": 7,
        "dtype": "fp32",
        "train": "lora",
        "lora": Lora(rank=2),
        "checkpointing": False,
    }
    return Work.model_validate(usual | fields)


def wide() -> Work:
    """Large enough for compute to outweigh the overhead of a piece."""
    shape = {"hidden_size": 240, "intermediate_size": 720, "num_attention_heads": 6, "num_key_value_heads": 3}
    fields = fields_of(config("llama", head_dim=40, vocab_size=2000, max_position_embeddings=256, **shape))
    return work(config=fields, length=48, supervised=90)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "BUDGET_S", 1.0)
    monkeypatch.setattr(measure_module, "_MOST_ROUNDS", 5)


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "llama-biased", "mistral", "qwen2", "qwen3", "gemma3"])
def test_every_family_has_a_profile(family: str, train: str, tmp_path: Path) -> None:
    profile = measure(work(family, train=train), device="pi", threads=1, cache=tmp_path)
    tiny = config(family)
    for line in (profile.attention_s, profile.mlp_s, profile.head_s, profile.optimizer_s):
        assert line.alpha >= 0
        assert line.beta >= 0
        assert all(value > 0 for _, value in line.points)
        assert line(line.points[-1][0]) > 0
    for points, units in (
        (profile.attention_s.points, tiny.num_attention_heads),
        (profile.mlp_s.points, tiny.intermediate_size),
    ):
        assert len(points) == 3
        assert (points[0][0], points[-1][0]) == (0, round(units * 2 / 3))
    assert profile.head_s.points[-1][0] == round(tiny.vocab_size / 2)
    assert 0.1 < profile.forward_part < 0.9
    assert (profile.device, profile.machine.threads, profile.link) == ("pi", 1, None)


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "bert", "roberta"])
def test_a_head_of_sequences_has_no_vocabulary_rows(family: str, train: str, tmp_path: Path) -> None:
    at = work(family, train=train, supervised=2, sequence=True)
    profile = measure(at, device="pi", threads=1, cache=tmp_path)
    assert [units for units, _ in profile.head_s.points] == [0]
    assert profile.head_s(0) > 0
    assert profile.attention_s(9) > 0
    assert profile.mlp_s(26) > 0
    assert measure(at, device="pi", threads=1, cache=tmp_path).head_s == profile.head_s


def test_bytes_grow_by_what_a_unit_keeps(tmp_path: Path) -> None:
    profile = measure(work("llama"), device="pi", threads=1, cache=tmp_path)
    positions, gate_up_and_gated = 2 * 6, 3
    assert profile.mlp_bytes.beta == pytest.approx(positions * gate_up_and_gated * 4)
    # A query head keeps q and its output; a third of a key and of a value is also its own.
    kept = profile.attention_bytes.points
    assert kept[-1][1] - kept[0][1] >= positions * 8 * 4 * (2 * 9 + 2 * 3)


def test_recomputing_keeps_the_stream_and_the_sum_alone(tmp_path: Path) -> None:
    profile = measure(work("llama", checkpointing=True), device="pi", threads=1, cache=tmp_path)
    two_of_hidden_size = 2 * (2 * 6) * 45 * 4
    assert profile.attention_bytes.beta == pytest.approx(0, abs=1e-6)
    assert profile.attention_bytes.alpha == pytest.approx(two_of_hidden_size)
    assert profile.mlp_bytes.alpha == pytest.approx(two_of_hidden_size)


def test_laps_are_of_the_links_they_are_said_to_be_of() -> None:
    samples = make_samples(work(), [0, 3, 9], [0, 5, 26], [30, 61])
    slow = samples.chain.links[6].sharded  # attention with 9 heads: after 2 empty links, and those of (0, 0), (3, 5)

    class Slowed:
        def __call__(self, h_BSD: torch.Tensor, at: object) -> torch.Tensor:
            time.sleep(0.03)
            return slow(h_BSD, at)  # type: ignore[arg-type]

    object.__setattr__(samples.chain.links[6], "sharded", Slowed())
    walk_round(samples, None)
    found = walk_round(samples, None)
    slowest = max(found.forward_s, key=lambda place: found.forward_s[place])
    assert slowest == ("attention", 9)
    assert found.forward_s[slowest] >= 0.03
    assert max(seconds for place, seconds in found.forward_s.items() if place != slowest) < 0.03
    assert set(found.backward_s) == set(found.forward_s) == set(samples.places)
    assert set(kept_bytes(samples)) == set(samples.places)


@pytest.mark.parametrize("targets", [["down_proj"], ["q_proj", "v_proj"], ["model.layers.1.mlp.up_proj"]])
def test_adapters_on_some_linears(targets: list[str], tmp_path: Path) -> None:
    profile = measure(work(lora=Lora(rank=2, targets=targets)), device="pi", threads=1, cache=tmp_path)
    assert len(profile.attention_s.points) == len(profile.mlp_s.points) == 3


ADAPTERS: dict[str, dict[str, object]] = {
    "dora": {"lora": Lora(rank=2, use_dora=True)},
    "ia3": {"train": "ia3"},
    "ia3 everywhere": {"train": "ia3", "ia3": IA3(targets=["all-linear"])},
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_other_adapters(family: str, kind: str, tmp_path: Path) -> None:
    """Of DoRA all linears, as devices with whole ones will have it."""
    profile = measure(work(family, **ADAPTERS[kind]), device="pi", threads=1, cache=tmp_path)
    assert all(line.alpha + line.beta > 0 for line in (profile.attention_s, profile.mlp_s, profile.optimizer_s))
    positions, float32 = 2 * 6, 4
    columns = {"llama": 3, "gpt2": 3 if kind == "dora" else 2}[family]  # kept of each, and the input of what is scaled
    assert profile.mlp_bytes.beta >= 0.999 * positions * columns * float32  # of a fit by least squares


def test_an_adapter_on_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'nowhere' matches no linear"):
        measure(work(lora=Lora(targets=["nowhere"])), device="pi", threads=1, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(work(), device="pi", threads=1, cache=tmp_path)
    monkeypatch.setattr(measure_module, "available_bytes", lambda: 123)
    second = measure(work(), device="tau", threads=1, cache=tmp_path)
    assert second == first.model_copy(update={"device": "tau", "available_bytes": 123})


def test_a_fresh_profile_takes_the_place_of_the_kept_one(tmp_path: Path) -> None:
    first = measure(work(), device="pi", threads=1, cache=tmp_path)
    fresh = measure(work(), device="pi", threads=1, cache=tmp_path, fresh=True)
    assert fresh.attention_s.points != first.attention_s.points
    assert measure(work(), device="pi", threads=1, cache=tmp_path).attention_s == fresh.attention_s


def test_another_work_speed_or_thread_count_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measure(work(), device="pi", threads=1, cache=tmp_path)
    times = []

    def again(work: Work, device: str, machine: Machine, pace: Pace | None) -> Profile:
        times.append(torch.get_num_threads())
        return measured.model_copy(update={"work": work, "machine": machine})

    monkeypatch.setattr(measure_module, "_measured", again)
    others = [work(lora=Lora(rank=2, use_dora=True)), work(train="ia3"), work(train="ia3", ia3=IA3(targets=["q_proj"]))]
    for _ in range(2):
        for differs in (work(rows=1), work(dtype="bf16"), work(lora=Lora(rank=3)), work(train="full"), *others):
            measure(differs, device="pi", threads=1, cache=tmp_path)
        measure(work(), device="pi", threads=2, cache=tmp_path)
        measure(work(), device="pi", threads=1, pace=Pace(0.9), cache=tmp_path)
        measure(work(), device="pi", threads=1, pace=Pace(0.8), cache=tmp_path)
    assert times == [*[1] * 7, 2, 1, 1]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"potluck": "0.0.1"}'])
def test_a_corrupt_cache_is_measured_again(content: bytes, tmp_path: Path) -> None:
    measure(work(), device="pi", threads=1, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    measure(work(), device="pi", threads=1, cache=tmp_path)
    assert Profile.model_validate(json.loads(file.read_text())).work == work()


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert measure(work(), device="pi", threads=1, cache=tmp_path / "file").device == "pi"


@pytest.mark.timing
def test_a_paced_device_measures_itself_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paced = measure(wide(), device="pi", threads=1, pace=Pace(0.25), cache=tmp_path / "paced")
    by_cpu_time(monkeypatch)
    plain = measure(wide(), device="pi", threads=1, cache=tmp_path / "plain")
    for line in ("attention_s", "mlp_s", "head_s"):
        (units, fast_s), (_, slow_s) = getattr(plain, line).points[-1], getattr(paced, line).points[-1]
        assert units > 0
        assert 2.4 < slow_s / fast_s < 12, line  # 4, on a machine that drifts and does other work beside it


@pytest.mark.timing
def test_a_walk_of_one_row_takes_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_cpu_time(monkeypatch)
    profile = measure(wide(), device="pi", threads=1, cache=tmp_path)
    rows = profile.work.rows
    assert rows > 1
    assert profile.one_row_part is not None
    assert 1 / rows <= profile.one_row_part < 1
    assert profile.part_of(1) == profile.one_row_part
    assert profile.part_of(rows) == 1
    more = profile.part_of(2 * rows)
    assert 1 < more <= 2
    assert profile.model_copy(update={"one_row_part": None}).part_of(2 * rows) == 2


def by_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count only this thread's seconds, so that other work on the machine does not show."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)


def test_larger_models_than_the_memory_are_measured_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "available_bytes", lambda: 4 << 20)
    profile = measure(wide(), device="pi", threads=1, cache=tmp_path)
    assert profile.mlp_s.points[-1][0] < 480
    assert profile.head_s.points[-1][0] < 1000


POINTS = st.lists(st.tuples(st.integers(0, 5000), st.floats(1e-6, 1e3)), min_size=2, max_size=6)


@given(POINTS)
def test_no_line_falls(points: list[tuple[int, float]]) -> None:
    line = fit(points)
    assert line.alpha >= 0
    assert line.beta >= 0
    assert line.points == tuple(points)


@given(st.floats(0, 1), st.floats(1e-6, 1), st.lists(st.integers(0, 5000), min_size=2, max_size=6, unique=True))
def test_points_on_a_line_give_that_line(alpha: float, beta: float, units: list[int]) -> None:
    line = fit([(u, alpha + beta * u) for u in units])
    for u in units:
        assert line(u) == pytest.approx(alpha + beta * u, rel=1e-3, abs=1e-6)


def test_points_without_cost() -> None:
    assert fit([(0, 0.0), (4, 0.0)])(2) == 0


@pytest.mark.timing
def test_all_ranks_agree_on_their_link() -> None:
    links = run_world(3, lambda comm: measure_link(comm, 200_000))
    assert len({(link.latency_s, link.bytes_per_s) for link in links}) == 1
    assert all(0 <= link.covered_s < 0.05 and link.covered_bytes == 200_000 for link in links)
    assert links[0].world_size == 3
    assert links[0].latency_s >= 0
    assert 1e6 < links[0].bytes_per_s < 1e12


@pytest.mark.timing
def test_a_slow_link_is_slow() -> None:
    class Slow(Comm):
        """One megabyte a second, after a hundredth of one."""

        def all_reduce(self, x: torch.Tensor, *, exact: bool = False):  # type: ignore[no-untyped-def]
            time.sleep(0.002 + x.nbytes / 100e6)
            return super().all_reduce(x, exact=exact)

    link = run_world(2, lambda comm: measure_link(Slow(comm.group), 100_000))[0]
    assert link.bytes_per_s == pytest.approx(100e6, rel=0.3)
    assert 0.001 < link.latency_s < 0.01


def test_a_device_alone_has_no_link() -> None:
    with pytest.raises(ValueError, match="alone"):
        measure_link(Comm(), 1000)


def test_loopback_promises_nothing() -> None:
    assert nic_link("127.0.0.1") is None
    assert nic_link("::1") is None
    with pytest.raises(ValueError, match=r"pi\.local"):
        nic_link("pi.local")


def test_an_interface_tells_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    stats = psutil.net_if_stats()
    name = next(n for n, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found))
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats | {name: stats[name]._replace(speed=1000, isup=True)})
    assert nic_link("127.0.0.1") == Link(latency_s=3e-4, bytes_per_s=125e6)


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_smollm2_in_under_20_seconds_and_near_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    smollm2 = config("llama", head_dim=64, vocab_size=49152, num_hidden_layers=30, tie_word_embeddings=True, **shape)
    of_4_x_128 = work(config=fields_of(smollm2), length=128, supervised=254, lora=Lora())
    start = time.monotonic()
    profile = measure(of_4_x_128, device="pi", threads=1, cache=tmp_path / "wall")
    assert time.monotonic() - start < 20
    assert profile.attention_s.points[-1][0] == 6  # no share was left out for lack of time

    by_cpu_time(monkeypatch)
    profile = measure(of_4_x_128, device="pi", threads=1, cache=tmp_path / "cpu")
    # Between the measured points, beside the largest, which tells how far the machine has drifted since.
    samples = make_samples(of_4_x_128, [0, 4, 6], [0, 768, 1024], [16384])
    rounds = [walk_round(samples, None) for _ in range(12)][1:]

    def again_s(kind: str, units: int) -> float:
        return sorted(r.forward_s[kind, units] + r.backward_s[kind, units] for r in rounds)[len(rounds) // 2]

    for kind, line, middle, largest in (
        ("attention", profile.attention_s, 4, 6),
        ("mlp", profile.mlp_s, 768, 1024),
    ):
        drift = again_s(kind, largest) / line.points[-1][1]
        # a key/value head that several query heads share makes steps in what the line takes for a slope
        assert line(middle) * drift == pytest.approx(again_s(kind, middle), rel=0.2)
