"""`RunConfig`: everything a run is, as one frozen, serialisable value.

The planner, the verifier, the trainer, the checkpoint and the server read this same object. Every key has a
default. Keys whose feature this version does not carry accept only the value that switches it off, so that
nothing written in a file is ever silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from modelworks.config.batches import BatchSizes
from modelworks.config.checks import cross_problems
from modelworks.config.errors import ProblemsError
from modelworks.config.health import HealthConfig
from modelworks.config.lr_scaling import ScaledRate, ScalingRule, scale_rate
from modelworks.config.model import Frozen, Length, ModelConfig, Positive, Probability
from modelworks.config.named_models import expand_model
from modelworks.config.optimizers import OptimizerName, own_values
from modelworks.config.quantities import ByteSize, Duration, Flag, Real, Whole, Words

# Names become directories and parts of record names.
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}$"),
    Words("a name of letters, digits and . _ + = -, at most 100, beginning with a letter or digit"),
]
Share = Annotated[Real, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[Real, Field(ge=0.0)]
Degree = Annotated[Whole, Field(gt=0, le=2**20)]  # ranks along one axis


class SourceConfig(Frozen):
    """One source of documents. `weight` is its share of the samples, relative to the other sources' weights."""

    name: Name
    type: Literal["python-stdlib", "text", "jsonl", "parquet"]
    path: str | list[str] | None = None  # files or globs; not for python-stdlib
    field: str = "text"  # the column or JSON key that holds the text
    weight: Annotated[Real, Field(gt=0.0)] = 1.0
    # text: one document a file, or one a blank-line-separated paragraph block
    split: Literal["file", "paragraph"] = "file"
    invalid_utf8: Literal["error", "replace", "skip"] = "error"


class MixtureChange(Frozen):
    """From global sample index `at` on, sources are drawn with these weights."""

    at: Annotated[Whole, Field(ge=0)]
    weights: dict[str, NonNegative]


class TokenizerTraining(Frozen):
    """Train a tokeniser on the training split."""

    train: Literal["bpe", "unigram"] = "bpe"
    vocab_size: Annotated[Whole, Field(ge=258, le=2**24)] = 8192
    sample: ByteSize = 64_000_000  # at most so many bytes of text are used


class DataConfig(Frozen):
    sources: Annotated[list[SourceConfig], Field(min_length=1)] = [SourceConfig(name="code", type="python-stdlib")]
    tokenizer: TokenizerTraining | str = TokenizerTraining()
    seq_len: Length = 256
    packing: Literal["within-document", "across"] = "within-document"
    validation: Duration = Duration(1, "percent")
    mixture_changes: list[MixtureChange] = []
    shuffle: Flag = True
    cache: str = "~/.cache/modelworks/data"
    workers: Annotated[Whole, Field(ge=0, le=1024)] = 0  # processes that tokenise; 0: one per core


class LossScaleConfig(Frozen):
    """Dynamic loss scaling, used by fp16 only."""

    initial: Annotated[Real, Field(gt=0.0)] = 65536.0
    growth_interval: Positive = 2000


class BatchStage(Frozen):
    """Steps of `batch` sequences, until so many steps or tokens of the run are done."""

    batch: Positive
    until: Duration


class BatchRamp(Frozen):
    """From `start` sequences up to `train.global_batch` in even increments, spread over the first steps or tokens."""

    start: Positive
    increment: Positive
    over: Duration


class TrainConfig(Frozen):
    duration: Duration = Duration(2000, "steps")
    global_batch: Positive = 64  # sequences per optimiser step
    batch_ramp: BatchRamp | list[BatchStage] | None = None  # smaller steps at first
    micro_batch: Positive | Literal["auto"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "bf16-autocast", "fp16"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    compile: Flag = False
    grad_clip: Annotated[Real, Field(gt=0.0)] | None = 1.0
    grad_clip_norm: Annotated[Real, Field(gt=0.0)] | Literal["inf"] = 2.0
    z_loss: NonNegative = 0.0
    label_smoothing: Probability = 0.0
    loss_scale: LossScaleConfig = LossScaleConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: Positive = 10  # steps between lines on the terminal; every step is recorded


class ParameterGroup(Frozen):
    """Overrides for parameters whose full name matches `pattern`, a glob; one that matches nothing is an error."""

    pattern: str
    lr_multiplier: NonNegative | None = None
    weight_decay: NonNegative | None = None


class OptimizerConfig(Frozen):
    """Keys that are not written take the chosen optimiser's own values; the defaults here are AdamW's. Those that it
    does not use may not be written (`modelworks.config.optimizers`)."""

    name: OptimizerName = "adamw"
    lr: NonNegative = 3e-4
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Annotated[Real, Field(gt=0.0)] = 1e-8
    weight_decay: NonNegative = 0.1
    # no decay for norms, biases and embeddings: globs over full parameter names
    no_decay: list[str] = ["*norm.weight", "*.bias", "*embedding.weight"]
    momentum: Probability = 0.9
    nesterov: Flag = False
    # trust ratios: norms and biases take the rate as it is
    no_trust: list[str] = ["*norm.weight", "*.bias"]
    trust_clamp: tuple[NonNegative, NonNegative] | None = None  # lamb: bounds of a weight's norm in its ratio
    trust_coefficient: Annotated[Real, Field(gt=0.0)] = 1e-3  # lars
    first_moment: Probability | None = None  # adafactor: decay of a first moment; null: none
    decay_exponent: Annotated[Real, Field(gt=0.0, le=1.0)] = 0.8  # adafactor: beta2 = 1 - t^-exponent
    update_clip: Annotated[Real, Field(gt=0.0)] = 1.0  # adafactor: root mean square of an update, at most
    relative_step: Flag = True  # adafactor: the rate is at most 1 / sqrt(t)
    scale_parameter: Flag = True  # adafactor: times the tensor's root mean square
    min_scale: Annotated[Real, Field(gt=0.0)] = 1e-3  # adafactor: at least so much of it
    orthogonal_steps: Annotated[Whole, Field(ge=1, le=20)] = 5  # muon: of Newton-Schulz
    orthogonal_dtype: Literal["own", "bf16"] = "own"  # muon: what they compute in; own: as the weights are updated
    update_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"  # muon
    lr_scaling: ScalingRule = "none"  # how the rate follows the global batch (`modelworks.config.lr_scaling`)
    base_batch: Positive | None = None  # sequences: the global batch that `lr` belongs to
    groups: list[ParameterGroup] = []

    @model_validator(mode="wrap")
    @classmethod
    def _own_values(cls, value: Any, handler: ModelWrapValidatorHandler[OptimizerConfig]) -> OptimizerConfig:
        """`model_fields_set` remains what was written."""
        if not isinstance(value, dict):
            return handler(value)
        made = handler({**own_values(value.get("name")), **value})
        made.model_fields_set.intersection_update(value)
        return made


class ScheduleConfig(Frozen):
    name: Literal["constant", "cosine", "linear", "wsd", "inverse-sqrt"] = "cosine"
    warmup: Duration = Duration(2, "percent")
    warmup_from: Literal["zero", "base"] = "zero"  # base: optimizer.lr, before it is scaled to the batch
    floor: Share = 0.1  # the last rate as a share of the peak
    decay: Duration = Duration(20, "percent")  # wsd: the length of its last phase
    decay_shape: Literal["linear", "one-minus-sqrt", "cosine"] = "one-minus-sqrt"  # wsd


class ParallelConfig(Frozen):
    """How the run is split. World size is dp_replicate * dp_shard * cp * tp * pp; which layouts a model and a batch
    allow is for `modelworks.layout.check_layout` to say."""

    dp_replicate: Degree = 1  # whole replicas; with dp_shard > 1: hybrid sharding
    dp_shard: Degree = 1
    zero: Literal[0, 1, 2, 3] = 0  # what is sharded: 0 nothing, 1 optimiser state, 2 + gradients, 3 + parameters
    tp: Degree = 1
    sequence_parallel: Flag = True  # of no effect while tp is 1
    cp: Degree = 1
    cp_mode: Literal["ring", "ulysses"] = "ring"
    pp: Degree = 1
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev"] = "1f1b"
    pp_virtual: Degree = 1  # stages on each rank
    pp_partition: Literal["auto"] | list[Annotated[Whole, Field(ge=0, le=4096)]] = "auto"  # layers of each stage
    pp_gather: Literal["step", "micro-batch"] = "step"  # how often zero 3 gathers a stage's parameters
    ep: Degree = 1
    accumulate_reduce: Literal["last", "every"] = "last"  # which micro-batches' gradients are reduced
    bucket_size: ByteSize = 25 * 2**20  # gradients reduced together
    offload: Literal["none", "cpu", "nvme"] = "none"  # where optimiser state and master weights are kept
    offload_path: str | None = None  # nvme: the directory of the files; default: in the run's own
    offload_params: Flag = False  # zero 3: shards of parameters wait in host memory
    offload_activations: Flag = False  # what a block keeps for its backward pass waits in host memory
    timeout: Annotated[Real, Field(gt=0.0)] = 600.0  # seconds in one collective before ranks are called hung
    elastic: Flag = False  # fewer processes than the layout needs: fewer data-parallel ranks go on


class CheckpointConfig(Frozen):
    every: Duration | Literal["auto"] = "auto"  # auto: from what a save costs and how often such jobs fail
    async_: Annotated[Flag, Field(alias="async")] = True  # write while training goes on
    keep_last: Positive = 3
    keep_every: Duration | None = None
    storage: str | None = None  # a directory or a URL for the checkpoints; null: in the run's own directory
    when_busy: Literal["wait", "skip"] = "wait"  # a save comes due while the one before it is still being written
    staging: ByteSize | None = None  # host memory that a rank may copy into before it writes; null: all that it saves
    mean_time_between_failures: Annotated[Real, Field(gt=0.0)] | None = None  # hours, of the whole job
    grace: Annotated[Real, Field(gt=0.0)] = 30.0  # seconds from SIGTERM until the process may be killed


class EvaluateConfig(Frozen):
    every: Duration = Duration(500, "steps")
    max_tokens: Annotated[Whole, Field(gt=0)] | None = (
        512_000  # of the validation split, at each evaluation; null: all of it
    )
    tasks: list[str] = []  # lm-eval task names
    tasks_every: Duration | None = None  # default: at the end only
    tasks_limit: Positive | None = None
    task_path: str | None = None  # local data of the tasks
    samples: Annotated[Whole, Field(ge=0)] = 2
    prompts: list[str] = []  # what samples start from; empty: beginnings of validation documents
    best_metric: str = "val_loss"
    best_mode: Literal["min", "max"] = "min"


class RunConfig(Frozen):
    """The whole run. Made from a file by `load_run_config`; contradictions between keys are refused here too."""

    name: Name = "my-run"
    seed: Annotated[Whole, Field(ge=0, lt=2**63), Words("a whole number from 0 to 2^63 - 1")] = 0
    model: ModelConfig
    init_from: str | None = None
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    health: HealthConfig = HealthConfig()

    @property
    def rank_rows(self) -> int:
        """Rows of the global batch on one data-parallel rank."""
        return self.train.global_batch // (self.parallel.dp_replicate * self.parallel.dp_shard)

    @property
    def batches(self) -> BatchSizes:
        """How many sequences each step has."""
        return BatchSizes.of(self.train, self.data.seq_len)

    def with_batch(self, rows: int) -> RunConfig:
        """The run as it would be with steps of so many sequences throughout."""
        train = self.train.model_copy(update={"global_batch": rows, "batch_ramp": None})
        return self.model_copy(update={"train": train})

    @property
    def peak_rate(self) -> ScaledRate:
        """The highest rate of the schedule: `optimizer.lr`, scaled to the global batch where that is asked for."""
        optimizer = self.optimizer
        base = optimizer.base_batch or self.train.global_batch
        return scale_rate(optimizer.name, optimizer.lr, optimizer.lr_scaling, self.train.global_batch, base)

    @field_validator("model", mode="before")
    @classmethod
    def _named_model(cls, value: object) -> object:
        return expand_model(value)

    @model_validator(mode="after")
    def _agree(self) -> RunConfig:
        if problems := cross_problems(Sections.of(self)):
            raise ProblemsError(problems)
        return self


@dataclass(frozen=True)
class Sections:
    """The sections that rules between keys look at; None for one that is not valid on its own."""

    model: ModelConfig | None
    data: DataConfig | None
    train: TrainConfig | None
    optimizer: OptimizerConfig | None
    schedule: ScheduleConfig | None
    checkpoint: CheckpointConfig | None
    evaluate: EvaluateConfig | None
    health: HealthConfig | None

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    @classmethod
    def of(cls, config: RunConfig) -> Sections:
        return cls(**{name: getattr(config, name) for name in cls.names()})
