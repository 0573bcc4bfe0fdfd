"""Adapters of each kind as a job has them, and as stock peft has them: what parity tests compare."""

from collections.abc import Sequence

from peft import IA3Config, LoraConfig, PeftConfig
from torch import Tensor

from pool.plain import PlainRun
from pool.tiny import config
from potluck.job_sections import IA3, Adapter, Lora
from potluck.models.families import decoder_of

RANK, ALPHA = 4, 6
DORA, RSLORA, BOTH = {"use_dora": True}, {"use_rslora": True}, {"use_dora": True, "use_rslora": True}

IA3_TARGETS: dict[str, list[str]] = {
    "bert": ["key", "value", *(f"layer.{i}.output.dense" for i in range(2))],
    "roberta": ["key", "value", *(f"layer.{i}.output.dense" for i in range(2))],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "gpt_neox": ["query_key_value", "dense_4h_to_h"],
    "opt": ["k_proj", "v_proj", "fc2"],
    "phi3": ["qkv_proj", "down_proj"],
}
"""What ``auto`` stands for, last the MLP's second linear; Llama's names elsewhere."""


def ia3_targets(family: str) -> list[str]:
    return IA3_TARGETS.get(family.partition("-")[0], ["k_proj", "v_proj", "down_proj"])


def columns(family: str) -> list[str]:
    """Last parts of the names of linears that are cut by their outputs."""
    names = decoder_of(config(family)).names
    return [name.rpartition(".")[2] for name in (*names.qkv, *names.into)]


def rows(family: str) -> list[str]:
    """Names of linears that are cut by their inputs."""
    names = decoder_of(config(family)).names
    return [names.o, names.out]


def lora(targets: Sequence[str] = ("all-linear",), **variants: bool) -> Lora:
    return Lora(rank=RANK, alpha=ALPHA, targets=list(targets), **variants)


def in_peft(adapter: Adapter, family: str) -> PeftConfig:
    """The same adapter, written by hand for peft."""
    fan_in_fan_out = family == "gpt2"
    if isinstance(adapter, IA3):
        auto = adapter.targets == ["auto"]
        targets = ia3_targets(family)
        of_inputs = [name for name in targets if not any(c.endswith(name) for c in ("key", "value", *columns(family)))]
        return IA3Config(
            target_modules=targets if auto else "all-linear",
            feedforward_modules=of_inputs if auto else rows(family),
            fan_in_fan_out=fan_in_fan_out,
            task_type="CAUSAL_LM",
        )
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=int(adapter.alpha),
        target_modules="all-linear" if adapter.targets == ["all-linear"] else adapter.targets,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        fan_in_fan_out=fan_in_fan_out,
        task_type="CAUSAL_LM",
    )


def as_ours(run: PlainRun) -> PlainRun:
    """With peft's parameters by the names and in the shapes they have in files of adapters, vectors flat."""

    def named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.removesuffix(".weight") if "magnitude" in name else name: t.flatten() if "ia3_l" in name else t
            for name, t in tensors.items()
        }

    return PlainRun(run.losses, named(run.gradients), named(run.initial), named(run.weights))
