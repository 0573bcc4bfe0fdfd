import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from potluck.bench import fedavg
from potluck.bench.fedavg import missing_flower, run_fedavg
from potluck.errors import BadInput, PotluckError
from potluck.job_sections import Data
from potluck.texts.formats import parse_record
from potluck.use import encode_for, inference_dtype, score
from word_model import ROWS, save_word_model

OPTIONS = {"batch_size": 2, "learning_rate": 2e-2, "max_length": 32, "seed": 0}
HELD_OUT = [parse_record(row, "auto", f"held-out:{n}") for n, row in enumerate(ROWS, 1)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flower():
    if (sentence := missing_flower()) is not None:
        pytest.skip(sentence)


@pytest.fixture
def job(tmp_path):
    """A model, and two clients' files of three and one commands."""
    files = [write(tmp_path / "0.jsonl", ROWS[:3]), write(tmp_path / "a client.jsonl", ROWS[3:])]
    return save_word_model(tmp_path / "model"), files


@pytest.mark.slow
def test_an_adapter_is_the_average_of_what_clients_learned_weighted_by_examples(flower, job, tmp_path):
    from peft import get_peft_model_state_dict

    from potluck.bench.flower_app import adapted_model, encode_file, train_epoch

    model_dir, files = job
    output = tmp_path / "out"
    result = run_fedavg(model_dir, files, HELD_OUT, output=output, epochs=1, timeout_s=200, **OPTIONS)

    expected = {}
    for client, (file, weight) in enumerate(zip(files, (0.75, 0.25), strict=True)):
        model = adapted_model(model_dir, seed=0)
        train_epoch(
            model, encode_file(file, model_dir, 32), batch_size=2, learning_rate=2e-2, epoch=0, epochs=1, seed=client
        )
        for name, tensor in get_peft_model_state_dict(model).items():
            expected[name] = expected.get(name, 0) + weight * tensor.detach()
    saved = load_file(output / "adapter_model.safetensors")
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)
    assert any(tensor.abs().max() > 1e-3 for name, tensor in saved.items() if "lora_B" in name)

    values = 4 * sum(tensor.numel() for tensor in saved.values())
    headers = 2 * len(saved) * 256
    for way in ("bytes_up", "bytes_down"):
        assert 2 * values < result[way] <= 2 * values + headers
    examples = encode_for(model_dir, HELD_OUT, Data(max_length=32))
    judged = score(model_dir, output, examples, inference_dtype(model_dir))
    assert result["eval_loss"] == pytest.approx(judged.loss)
    assert result["eval_accuracy"] == judged.accuracy
    for key in ("client_active_s", "client_compute_s", "client_peak_rss_mib", "client_link_rss_mib"):
        assert len(result[key]) == 2
        assert min(result[key]) > 0
    assert min(result["client_peak_rss_mib"]) > 50
    assert 0 < result["server_s"] < result["wall_s"]


@pytest.mark.slow
def test_rounds_go_on_from_the_average(flower, job, tmp_path):
    model_dir, _ = job
    files = [write(tmp_path / f"{n}.jsonl", ROWS * 16) for n in range(2)]
    result = run_fedavg(model_dir, files, HELD_OUT, output=tmp_path / "out", epochs=2, timeout_s=200, **OPTIONS)
    examples = encode_for(model_dir, HELD_OUT, Data(max_length=32))
    before = score(model_dir, None, examples, inference_dtype(model_dir)).loss
    assert result["eval_loss"] < before / 2


@pytest.mark.slow
def test_a_client_that_cannot_train_is_said_and_nothing_is_written(flower, job, tmp_path):
    model_dir, files = job
    files[1].write_text("{not json\n")
    with pytest.raises(PotluckError, match="not valid JSON"):
        run_fedavg(model_dir, files, HELD_OUT, output=tmp_path / "out", epochs=1, timeout_s=60, **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_without_flower_a_sentence_says_how_to_get_it(job, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(fedavg.importlib.util, "find_spec", lambda name: None if name == "flwr" else found(name))
    assert "potluck[bench]" in missing_flower()
    with pytest.raises(BadInput, match="Flower"):
        run_fedavg(*job, HELD_OUT, output=tmp_path / "out", epochs=1, **OPTIONS)
