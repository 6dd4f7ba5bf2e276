"""Reading a published `config.json` strictly: every key is used, known to have no effect on the weights, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from modelworks.config import ConfigError, ModelConfig, Problem, ProblemsError, UserError

# Keys that say nothing about the function the weights compute: bookkeeping, generation defaults, token ids.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "dtype", "eos_token_id", "gradient_checkpointing", "id2label", "is_llama_config",
    "label2id", "max_window_layers", "model_type", "n_ctx", "num_labels", "pad_token_id", "pretraining_tp",
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype",
    "unk_token_id", "use_cache",
}  # fmt: skip
_PREFIXES_WITHOUT_EFFECT = ("transformers", "summary_", "_attn_implementation", "output_", "unsloth_")
_MISSING = object()


class PublishedConfig:
    """The keys of one `config.json`. `take` reads one; `finish` refuses what was not read and may matter."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.architecture = (list(values.get("architectures") or []) or [values.get("model_type", "?")])[0]
        self._left = dict(values)

    def has(self, name: str) -> bool:
        """Whether the key is written in the file, be it as null, and was not taken yet."""
        return name in self._left

    def take(self, *names: str, default: Any = _MISSING) -> Any:
        """The value of the first of `names` that is given and not null. Without a default it must be there."""
        found: Any = _MISSING
        for name in names:
            value = self._left.pop(name, None)
            if value is not None and found is _MISSING:
                found = value
        if found is not _MISSING:
            return found
        if default is _MISSING:
            raise UserError(f"config.json: the key `{names[0]}` is missing, which {self.architecture} needs")
        return default

    def whole(self, *names: str, default: Any = _MISSING) -> int:
        """Like `take`, for sizes that others are computed from."""
        value = self.take(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(f"config.json: `{names[0]}: {value!r}`, expected a whole number")
        return value

    def require(self, name: str, *allowed: Any, default: Any) -> Any:
        """Take `name`, refusing any value but those that this version computes."""
        value = self.take(name, default=default)
        if value not in allowed:
            choices = " or ".join(repr(choice) for choice in allowed)
            raise UserError(f"config.json: `{name}: {value!r}` of {self.architecture} is not supported, only {choices}")
        return value

    def finish(self) -> None:
        """Refuse keys that nothing read, unless they are known to have no effect or are switched off."""
        for name, value in self._left.items():
            harmless = name in _WITHOUT_EFFECT or name.startswith(_PREFIXES_WITHOUT_EFFECT)
            if value and not harmless:
                raise UserError(
                    f"config.json: `{name}: {value!r}` of {self.architecture} is not supported; "
                    "remove the key if it does not change what the weights compute"
                )


def build(values: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig(**values)`; what it refuses becomes a UserError in one line."""
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        details = "; ".join(_message(problem) for problem in error.errors())
        raise UserError(f"config.json does not describe a model we can build: {details}") from None


def _message(problem: Any) -> str:
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ProblemsError):  # keys that contradict each other
        return str(cause)
    return f"{'.'.join(map(str, problem['loc']))}: got {problem['input']!r}, {problem['msg']}"[:200]


def expect(config: ModelConfig, reason: str, **wanted: Any) -> None:
    """Raise ConfigError unless each named key of `config` has the wanted value (a tuple: one of them)."""
    problems = []
    for key, choices in wanted.items():
        choices = choices if isinstance(choices, tuple) else (choices,)
        value = getattr(config, key)
        if value not in choices:
            problems.append(Problem(f"model.{key}", value, " or ".join(map(repr, choices))))
    if problems:
        raise ConfigError(reason, problems)
