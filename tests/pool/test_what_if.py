"""Profile files to plans, and every file that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from pool.profiles import SMOLLM2, job, profile, work
from pool.tiny import config, save_tiny
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families.fields import fields_of
from potluck.pool.profile import Link, Profile, write_profile
from potluck.pool.what_if import parse_link, read_profiles, what_if


def written(directory: Path, *profiles: Profile) -> list[Path]:
    files = [directory / f"{i}-{p.device}.profile.json" for i, p in enumerate(profiles)]
    for file, each in zip(files, profiles, strict=True):
        write_profile(each, file)
    return files


@pytest.mark.parametrize(
    ("link", "latency", "rate", "seconds"),
    [
        ("1gbit", None, 0.94e9 / 8, 3e-4),
        ("100mbit", "1ms", 0.94e8 / 8, 1e-3),
        ("2.5Gbit", "300us", 2.35e9 / 8, 3e-4),
        (None, "0s", 0.94e9 / 8, 0.0),
    ],
)
def test_links_as_written(link: str | None, latency: str | None, rate: float, seconds: float) -> None:
    parsed = parse_link(link, latency)
    assert (parsed.bytes_per_s, parsed.latency_s) == (pytest.approx(rate), pytest.approx(seconds))


@pytest.mark.parametrize("link", ["fast", "1", "gbit", "-1gbit", "0mbit", "1 gigabit", "1e9gbit", ""])
def test_rates_that_are_none(link: str) -> None:
    with pytest.raises(BadInput, match=r"--link: '.*' is no rate; write it as 1gbit"):
        parse_link(link, None)


@pytest.mark.parametrize("latency", ["quick", "3", "-1ms", "1min"])
def test_times_that_are_none(latency: str) -> None:
    with pytest.raises(BadInput, match=r"--latency: '.*' is no time"):
        parse_link(None, latency)


def test_a_file_given_twice_is_two_devices(tmp_path: Path) -> None:
    pi, hub = written(tmp_path, profile("pi"), profile("hub"))
    assert [p.device for p in read_profiles([hub, pi, pi])] == ["hub", "pi-1", "pi-2"]
    (other,) = written(tmp_path, profile("pi-1"))
    with pytest.raises(BadInput, match="are both of a device named pi-1"):
        read_profiles([pi, pi, other])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    first, second = written(tmp_path, profile("pi"), profile("pi", speed=2))
    with pytest.raises(BadInput, match=r"0-pi.profile.json and .*1-pi.profile.json are both of a device named pi"):
        read_profiles([first, second])


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"length": 64}, r"1-cam.*was measured at other work than .*0-hub.*: length: 64, not 128"),
        ({"dtype": "bf16"}, "dtype: bf16, not fp32"),
        ({"config": SMOLLM2 | {"hidden_size": 2048}}, "the model's hidden_size: 2048, not 576"),
    ],
)
def test_profiles_of_different_work_are_refused(differs: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    files = written(tmp_path, profile("hub"), profile("cam", of=work(**differs)))
    with pytest.raises(BadInput, match=sentence):
        what_if(job(), files)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train": "full"}, "train: lora, and this job has full"),
        ({"checkpointing": True}, "checkpointing: False, and this job has True"),
        ({"dtype": "bf16"}, "dtype: fp32, and this job has bf16"),
        ({"batch_size": 32}, "rows of a half-batch: 2, and this job has 16"),
        ({"lora": {"rank": 16}}, r"lora: .*rank=8.*, and this job has .*rank=16"),
        ({"lora": {"use_dora": True}}, r"lora: .*use_dora=False.*, and this job has .*use_dora=True"),
        ({"train": "ia3"}, "train: lora, and this job has ia3"),
    ],
)
def test_profiles_for_another_job_are_refused(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    files = written(tmp_path, profile("hub"))
    with pytest.raises(BadInput, match=rf"0-hub.profile.json was measured for another job: {sentence}"):
        what_if(job(**fields), files)


def test_fewer_rows_than_a_batch_are_no_other_job(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a", "completion": "b"}) + "\n" for _ in range(3)))
    few = Job.model_validate({"model": "m", "data": {"train": str(data)}, "output": "o", "batch_size": 32})
    assert what_if(few, written(tmp_path, profile("hub"))).best.strategy == "single"


def test_a_model_at_hand_is_compared(tmp_path: Path) -> None:
    shape = config("llama")
    directory = save_tiny(shape, tmp_path / "model")
    here = Job.model_validate(job().model_dump() | {"model": str(directory)})
    (other,) = written(tmp_path, profile("hub"))
    with pytest.raises(BadInput, match="another model: hidden_size: 576, and the job's model has 45"):
        what_if(here, [other])
    (same,) = written(tmp_path, profile("hub", of=work(config=fields_of(shape))))
    assert what_if(here, [same]).best.strategy == "single"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"potluck": "0.0.1"}, "was measured by potluck 0.0.1"),
        ({"forward_part": 1.5}, "forward_part: 1.5 is not from 0 to 1"),
        ({"mlp_s": {"alpha": 1.0, "beta": -1.0}}, "mlp_s: alpha and beta are never negative"),
        ({"head_s": {"alpha": 0.0, "beta": 0.0}}, "head_s: nothing computes in no time"),
        ({"link": {"latency_s": 0.0, "bytes_per_s": 0.0}}, "link: a rate is above 0"),
        ({"link": {"latency_s": 0.0, "bytes_per_s": 1.0, "world_size": 1}}, "devices are at least 2"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "a.profile.json"
    file.write_text(json.dumps(profile("a").model_dump(mode="json") | change))
    with pytest.raises(BadInput, match=sentence):
        what_if(job(), [file])


def test_links_are_the_measured_ones_or_said_to_be_assumed(tmp_path: Path) -> None:
    measured = Link(latency_s=0.001, bytes_per_s=5e7)
    files = written(tmp_path, profile("hub", link=measured), profile("cam", link=None))
    found = what_if(job(), files)
    assert [p.link for p in found.profiles] == [measured, parse_link("1gbit", None)]
    assert found.notes[0].startswith("No link was measured for cam: 1,000 Mbit/s and 0.3 ms a message are assumed")
    given = what_if(job(), files, link="100mbit")
    assert [p.link for p in given.profiles] == [parse_link("100mbit", None)] * 2
    assert given.notes[0] == "Links: 100 Mbit/s and 0.3 ms a message, as given."
    assert what_if(job(dtype="fp32"), files[:1]).notes == ()


def test_at_least_one_profile_and_it_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Name at least one profile"):
        what_if(job(), [])
    with pytest.raises(BadInput, match="There is no profile at"):
        what_if(job(), [tmp_path / "none.json"])
