"""The plain transformers + peft training loop, as anybody would write it: what ``single`` is measured against."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.jobs import LORA
from potluck.texts.batch import Batch


class PlainLoop:
    """LoRA on all linears; ``autocast`` computes linears in bfloat16 as torch's autocast chooses."""

    def __init__(self, model_dir: Path, *, autocast: bool) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(model, config).train()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.0, fused=True)
        self.autocast = autocast

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(
                input_ids=batch.ids_BS, attention_mask=attention_mask(batch), labels=labels(batch)
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def attention_mask(batch: Batch) -> Tensor:
    """1 where there is a token."""
    return (torch.arange(batch.ids_BS.shape[1]) < torch.tensor(batch.layout.lengths)[:, None]).long()


def labels(batch: Batch) -> Tensor:
    """Targets in the place of their own token, as transformers wants them; -100 elsewhere."""
    labels_BS = torch.full_like(batch.ids_BS, -100)
    for row, positions in enumerate(batch.layout.positions):
        places = [position + 1 for position in positions]
        labels_BS[row, places] = batch.ids_BS[row, places]
    return labels_BS
