"""Which framework for this job: facts of the job against what each framework says of itself, with its source.

A framework is ruled out by a fact (it does not do such jobs, does not run on such devices, lacks an axis that the
layout needs); of those that are left, `_first` says which comes first for a job of this kind. Nothing here was
measured: how fast they are is what `modelworks plan` predicts and a trial on the machine decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from modelworks.hardware import Vendor

Task = Literal["pretraining", "fine-tuning", "reinforcement learning"]
Fit = Literal["first choice", "possible", "not for this"]

LARGE = 256  # devices from which on what an unnoticed defect costs asks for the most used program


@dataclass(frozen=True)
class JobFacts:
    """parameters: of the whole model. axes: those above one that the layout needs, of tp, pp, cp, ep.

    offload: where optimiser state is kept, as in the config.
    """

    task: Task
    parameters: float
    n_devices: int
    vendor: Vendor = "nvidia"
    axes: frozenset[str] = frozenset()
    experts: bool = False
    offload: Literal["none", "cpu", "nvme"] = "none"


@dataclass(frozen=True)
class Advice:
    """fit, with the fact that decides it; source: where that was read."""

    framework: str
    fit: Fit
    reason: str
    source: str


@dataclass(frozen=True)
class Framework:
    name: str
    tasks: tuple[Task, ...]
    vendors: tuple[Vendor, ...]
    axes: str  # those it has, in words apart
    says: str
    source: str
    offload: tuple[str, ...] = field(default=("none", "cpu"))


ALL: tuple[Task, ...] = ("pretraining", "fine-tuning", "reinforcement learning")
FRAMEWORKS = (
    Framework(
        "Modelworks",
        ("pretraining",),
        ("cpu", "nvidia", "amd"),
        "tp pp cp ep",
        "one description for plan, proof and run; built and tested on CPUs alone, it has never run on CUDA or NCCL",
        "README.md of this repository",
        ("none", "cpu", "nvme"),
    ),
    Framework(
        "FSDP",
        ("pretraining", "fine-tuning"),
        ("nvidia", "amd", "cpu"),
        "",
        "shards parameters, gradients and optimiser state of a model that stays as it is, within PyTorch",
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
    ),
    Framework(
        "torchtitan",
        ("pretraining",),
        ("nvidia", "amd", "huawei"),
        "tp pp cp ep",
        "PyTorch's own axes composed, in a small code base that follows its newest releases",
        "https://pypi.org/project/torchtitan (AMD: its news; Ascend: https://pypi.org/project/torchtitan-npu)",
    ),
    Framework(
        "Megatron",
        ("pretraining",),
        ("nvidia",),
        "tp pp cp ep",
        "combines every axis, up to trillions of parameters on thousands of GPUs, with dispatch kernels for experts",
        "https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/parallelism-guide.html",
    ),
    Framework(
        "DeepSpeed",
        ("pretraining", "fine-tuning"),
        ("nvidia", "amd", "huawei"),
        "tp",
        "ZeRO 0 to 3 over a Hugging Face model, and the only one here that offloads to NVMe",
        "https://huggingface.co/docs/transformers/deepspeed",
        ("none", "cpu", "nvme"),
    ),
    Framework(
        "ColossalAI",
        ("pretraining", "fine-tuning"),
        ("nvidia", "huawei"),
        "tp pp cp ep",
        "tensor and pipeline parallelism with ZeRO 1 and 2 in one plug-in, ZeRO-3 with chunks (Gemini) in another",
        "https://colossalai.org/docs/basics/booster_plugins",
    ),
    Framework(
        "MaxText",
        ("pretraining", "fine-tuning", "reinforcement learning"),
        ("google", "nvidia"),
        "tp pp cp ep",
        "JAX and XLA for TPUs and GPUs, up to tens of thousands of chips",
        "https://pypi.org/project/maxtext/0.2.5/",
    ),
    Framework(
        "LLaMA-Factory",
        ("fine-tuning",),
        ("nvidia", "amd", "huawei"),
        "",
        "full tuning, LoRA and QLoRA of more than a hundred models from a configuration, over DeepSpeed or FSDP",
        "https://github.com/hiyouga/LLaMA-Factory",
    ),
    Framework(
        "veRL",
        ("fine-tuning", "reinforcement learning"),
        ("nvidia", "amd", "huawei"),
        "tp pp cp ep",
        "trains with FSDP or Megatron and samples with vLLM or SGLang, up to models of 671B parameters",
        "https://github.com/verl-project/verl",
    ),
    Framework(
        "OpenRLHF",
        ("fine-tuning", "reinforcement learning"),
        ("nvidia",),
        "tp",
        "Ray, DeepSpeed's ZeRO-3 and vLLM around a Hugging Face model",
        "https://pypi.org/project/openrlhf/0.3.7",
    ),
)


def runs_on(framework: str) -> tuple[Vendor, ...]:
    """Whose devices a framework runs on, by what it says of itself. framework: the name, in any case."""
    return next(each.vendors for each in FRAMEWORKS if each.name.lower() == framework.lower())


def frameworks_for(facts: JobFacts) -> list[Advice]:
    """Advice on every framework: the first choice first, then those that are possible, then those that are not."""
    excluded = {each.name: _obstacle(each, facts) for each in FRAMEWORKS}
    possible = [each.name for each in FRAMEWORKS if excluded[each.name] is None]
    first, why = _first(facts, possible)
    advice = []
    for each in FRAMEWORKS:
        if each.name == first:
            advice.append(Advice(each.name, "first choice", f"{why}: {each.says}", each.source))
        elif (obstacle := excluded[each.name]) is None:
            advice.append(Advice(each.name, "possible", each.says, each.source))
        else:
            advice.append(Advice(each.name, "not for this", obstacle, each.source))
    order = ("first choice", "possible", "not for this")
    return sorted(advice, key=lambda each: order.index(each.fit))


def _obstacle(framework: Framework, facts: JobFacts) -> str | None:
    """The fact that rules it out; None where there is none."""
    if facts.task not in framework.tasks:
        return f"it does {' and '.join(framework.tasks)}, not {facts.task}"
    if facts.vendor not in framework.vendors:
        return f"it runs on {', '.join(framework.vendors)}, not on {facts.vendor}"
    if missing := sorted(facts.axes - set(framework.axes.split())):
        return f"it has no {', '.join(missing)}, which the layout needs"
    if facts.offload not in framework.offload:
        return f"it does not offload to {facts.offload}"
    return None


def _first(facts: JobFacts, possible: list[str]) -> tuple[str | None, str]:
    """The first of those possible for a job of this kind, and the fact that decides."""
    ranked: tuple[str, ...]
    if facts.task == "reinforcement learning":
        simple = not facts.axes and facts.parameters < 70e9
        ranked = ("OpenRLHF", "veRL") if simple else ("veRL", "OpenRLHF")
        why = (
            "rollouts and updates of a model that ZeRO alone holds"
            if simple
            else "rollouts and a layout of several axes"
        )
    elif facts.vendor == "google":
        ranked, why = ("MaxText",), "TPUs"
    elif facts.offload == "nvme":
        ranked, why = ("DeepSpeed",), "state on NVMe"
    elif facts.vendor == "cpu":
        ranked, why = ("Modelworks", "FSDP"), "no accelerator"
    elif facts.task == "fine-tuning":
        ranked, why = ("LLaMA-Factory", "FSDP", "DeepSpeed", "veRL"), "a trained model to be adapted"
    elif facts.experts or "ep" in facts.axes:
        ranked, why = ("Megatron", "torchtitan"), "experts"
    elif facts.n_devices >= LARGE:
        ranked, why = ("Megatron", "torchtitan"), f"{facts.n_devices} devices"
    elif facts.axes:
        ranked, why = ("torchtitan", "Megatron"), f"a layout with {', '.join(sorted(facts.axes))}"
    else:
        ranked, why = ("FSDP", "DeepSpeed"), "data parallelism alone is enough"
    chosen = next((name for name in (*ranked, "MaxText") if name in possible), None)
    return chosen or next(iter(possible), None), why
