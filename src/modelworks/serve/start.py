"""What a server starts with, as a plain value that travels to the engine's process and builds the engine there.

The front never loads the model: it gets its name, its limits and its tokeniser from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelworks.config import UserError
from modelworks.serve.options import EngineOptions
from modelworks.serve.served_model import ServedModel

if TYPE_CHECKING:
    from modelworks.serve.engine import Engine


@dataclass(frozen=True)
class ModelStart:
    """path: all that `load_model` reads. name: under which requests ask for it. dtype: fp32, bf16, fp16, or auto (bf16
    on CUDA, fp32 on CPU). device: cpu, cuda or auto. recommended: whether requests that name no sampling parameters
    get those that the model's authors recommend. tp: processes that share the model, this one included."""

    path: str
    name: str
    dtype: str = "auto"
    device: str = "auto"
    recommended: bool = True
    tp: int = 1
    options: EngineOptions = field(default_factory=EngineOptions)

    def __call__(self) -> tuple[Engine, ServedModel]:
        """Load the model and build its engine. Raises UserError for what is the user's to fix."""
        import torch

        from modelworks.checkpoint import load_model
        from modelworks.serve.engine import Engine
        from modelworks.serve.tensor_parallel.processes import model_on_ranks

        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device: got 'cuda', but this machine has no usable CUDA device; leave it out or use cpu")
        name = ("bf16" if device == "cuda" else "fp32") if self.dtype == "auto" else self.dtype
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        loaded = (
            load_model(self.path, dtype=dtype, device=device)
            if self.tp == 1
            else model_on_ranks(self.path, self.tp, dtype=dtype, device=device)
        )
        if loaded.tokenizer is None:
            raise UserError(f"{loaded.source} has no tokeniser, so it cannot read prompts; nothing can be served")
        defaults = self._defaults()
        engine = Engine(loaded, self.options)
        engine.warm_up()
        return engine, ServedModel(
            name=self.name,
            vocab_size=loaded.config.vocab_size,
            max_model_len=engine.max_model_len,
            tokenizer=loaded.tokenizer,
            defaults=defaults,
            facts=(f"{loaded.source}; {name} on {device}", *engine.sizing.lines),
        )

    def _defaults(self) -> dict[str, float]:
        from modelworks.checkpoint import generation_defaults
        from modelworks.serve.params import SamplingParams

        if not self.recommended:
            return {}
        found = generation_defaults(self.path, notify=lambda text: None)
        try:
            SamplingParams(**found)  # type: ignore[arg-type]  # checked by it
        except UserError as error:
            raise UserError(
                f"{self.path}: recommends sampling that cannot be ({error}); --no-recommended-sampling ignores it"
            ) from None
        return found
