"""FedAvg (McMahan et al., 2017) of LoRA adapters as a Flower app: stock transformers and peft, nothing of our chain.

Flower's own processes load ``server_app`` and ``client_app``; :mod:`potluck.bench.fedavg` starts those processes.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM

from potluck.bench.measured import ADAPTER, SUMMARY_FILE
from potluck.job_sections import Data, Lora
from potluck.models.memory import memory_mib
from potluck.texts.batch import Example
from potluck.texts.collate import collate
from potluck.texts.encode import encode
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer

_IGNORED = -100  # the label that transformers leaves out of the loss
_WARMUP = 0.03
_CLIP = 1.0


def serve(grid: Grid, context: Context) -> None:
    """Average the clients' adapters for all rounds, then save the adapter and what the clients reported."""
    config = context.run_config
    began = time.process_time()
    output = Path(str(config["output"]))
    clients, rounds = int(config["clients"]), int(config["rounds"])
    model = adapted_model(Path(str(config["model-dir"])), seed=int(config["seed"]))
    reports: list[dict[str, float]] = []
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
        train_metrics_aggr_fn=lambda replies, _: _kept(replies, reports),
    )
    result = strategy.start(grid, _arrays(model), num_rounds=rounds, timeout=float(config["timeout-s"]))
    if len(reports) != clients * rounds:
        raise RuntimeError(f"{len(reports)} answers came in {rounds} rounds of {clients} clients")
    set_peft_model_state_dict(model, result.arrays.to_torch_state_dict())
    model.save_pretrained(str(output / ADAPTER))
    summary = {"server_s": time.process_time() - began, "reports": reports}
    partial = output / f"{SUMMARY_FILE}.partial"
    partial.write_text(json.dumps(summary), encoding="utf-8")
    partial.replace(output / SUMMARY_FILE)  # its name says that everything is there


def train(message: Message, context: Context) -> Message:
    """One local epoch on this client's file, from the adapter that came."""
    began = time.time()
    node, config = context.node_config, context.run_config
    torch.set_num_threads(int(config["threads"]))
    model_dir = Path(str(config["model-dir"]))
    received = message.content.array_records["arrays"]
    examples = encode_file(Path(str(node["rows"])), model_dir, int(config["max-length"]))
    model = adapted_model(model_dir, seed=int(config["seed"]))
    set_peft_model_state_dict(model, received.to_torch_state_dict())
    client = int(node["partition-id"])
    done_rounds = int(str(message.content.config_records["config"]["server-round"])) - 1
    loss = train_epoch(
        model,
        examples,
        batch_size=int(config["batch-size"]),
        learning_rate=float(config["learning-rate"]),
        epoch=done_rounds,
        epochs=int(config["rounds"]),
        seed=int(config["seed"]) + client,
    )
    sent = _arrays(model)
    report: dict[str, int | float | list[int] | list[float]] = {
        "num-examples": len(examples),
        "client": client,
        "loss": loss,
        "began": began,
        "ended": time.time(),
        "bytes-down": _payload(received),
        "bytes-up": _payload(sent),
        "peak-rss-mib": memory_mib("VmHWM"),
    }
    return Message(content=RecordDict({"arrays": sent, "metrics": MetricRecord(report)}), reply_to=message)


def encode_file(rows: Path, model_dir: Path, max_length: int) -> list[Example]:
    """A client's JSONL file as examples, as every other scheme encodes it."""
    data = Data(train=[str(rows)], max_length=max_length)
    return encode(read_rows([str(rows)], "auto"), load_tokenizer(model_dir), data).examples


def adapted_model(model_dir: Path, *, seed: int) -> PeftModel:
    """The model in bfloat16 with a new float32 adapter on every linear; the same seed gives the same adapter."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16, local_files_only=True)
    torch.manual_seed(seed)
    lora = Lora()
    config = LoraConfig(
        r=lora.rank, lora_alpha=int(lora.alpha), target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.0
    )
    adapted: PeftModel = get_peft_model(model, config)
    return adapted


def train_epoch(
    model: PeftModel,
    examples: Sequence[Example],
    *,
    batch_size: int,
    learning_rate: float,
    epoch: int,
    epochs: int,
    seed: int,
) -> float:
    """AdamW over each example once; returns the mean loss of the batches, in nats a target token.

    The learning rate goes as in a job's defaults (up over the first 3 % of all epochs, then linearly to zero), so that
    rounds continue one schedule; AdamW's moments begin anew each round, as FedAvg has no place for them.
    """
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=learning_rate, weight_decay=0.0
    )
    batches = list(_batches(examples, batch_size, random.Random(f"{seed} {epoch}")))
    model.train()
    losses = []
    for step, batch in enumerate(batches, start=epoch * len(batches)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * _rate(step, epochs * len(batches))
        ids_BS, mask_BS, labels_BS = _tensors(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(input_ids=ids_BS, attention_mask=mask_BS, labels=labels_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def _batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    order = rng.sample(examples, len(examples))
    return (order[at : at + size] for at in range(0, len(order), size))


def _rate(step: int, steps: int) -> float:
    warmup = round(_WARMUP * steps)
    return (step + 1) / (warmup + 1) if step < warmup else (steps - step) / max(1, steps - warmup)


def _tensors(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, attention mask and labels, each B x S; transformers shifts the labels itself."""
    batch = collate(examples)
    ids_BS = batch.ids_BS
    mask_BS, labels_BS = torch.zeros_like(ids_BS), torch.full_like(ids_BS, _IGNORED)
    for row, (length, positions) in enumerate(zip(batch.layout.lengths, batch.layout.positions, strict=True)):
        mask_BS[row, :length] = 1
        targets = torch.tensor(positions) + 1
        labels_BS[row, targets] = ids_BS[row, targets]
    return ids_BS, mask_BS, labels_BS


def _arrays(model: PeftModel) -> ArrayRecord:
    state: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return ArrayRecord({name: tensor.detach().float() for name, tensor in state.items()})


def _payload(arrays: ArrayRecord) -> int:
    return sum(len(array.data) for array in arrays.values())


def _kept(replies: Sequence[RecordDict], reports: list[dict[str, float]]) -> MetricRecord:
    of_round: list[Any] = [dict(reply.metric_records["metrics"]) for reply in replies]
    reports += of_round
    return MetricRecord({"loss": sum(report["loss"] for report in of_round) / len(of_round)})


# Called as functions and not with @: mypy has nothing to say of a decorator whose package may be missing.
server_app = ServerApp()
server_app.main()(serve)
client_app = ClientApp()
client_app.train()(train)
