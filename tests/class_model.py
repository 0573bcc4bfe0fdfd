"""A tiny classifier as ``tune`` leaves it: a base model of a dozen words, an adapter with a head, a job beside it."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

from potluck.job import Job, dump_job
from potluck.job_sections import Data
from word_model import save_word_model

ROWS = [("light on", "lamp"), ("light off", "lamp"), ("music on", "sound"), ("door open", "house"), ("door", "house")]
CLASSES = ["house", "lamp", "sound"]


def save_labelled(path: Path, text: str = "text", label: str = "label") -> Path:
    path.write_text("".join(json.dumps({text: asked, label: name}) + "\n" for asked, name in ROWS))
    return path


def save_classifier(directory: Path, classes: list[str], *, pairs: bool = False) -> tuple[Path, Path, Any]:
    """The base, the result, and the model itself; no classes for one that gives a value."""
    base, out = save_word_model(directory / "base"), directory / "out"
    kind = {"num_labels": len(classes) or 1}
    model = AutoModelForSequenceClassification.from_pretrained(base, **kind)
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")
    adapted = get_peft_model(model, lora).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.save_pretrained(out)
    columns = {"text": "sentence1", "text_pair": "sentence2"} if pairs else {"text": "text"}
    data = Data(train=["a.jsonl"], label="label", labels=classes, **columns)
    task = "sequence-classification" if classes else "sequence-regression"
    job = Job(model=str(base), task=task, data=data, output=out)
    (out / "job.yaml").write_text(dump_job(job))
    return base, out, adapted


@torch.inference_mode()
def said_alone(model: Any, ids: list[int]) -> torch.Tensor:
    logits_C: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return logits_C
