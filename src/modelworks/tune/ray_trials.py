"""Trials by Ray Tune, on the machines of a Ray cluster (extra `ray`).

The search is ours and asks for sets of trials; Ray Tune makes each set: it places trials on machines, as many at a time
as asked for, and hands back what they reported. On its machine a trial is the same process as without Ray (local.py).
Every machine needs this package, and sees the texts and the data's cache under the same paths, or builds its own.

Connects to the cluster that RAY_ADDRESS names, else starts Ray on this machine.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import tempfile
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelworks.config import UserError, dump_yaml, parse_run_config
from modelworks.tune.local import start_trial
from modelworks.tune.setup import Setup
from modelworks.tune.trials import Outcome, Trial

if TYPE_CHECKING:
    from modelworks.tune.ray_listener import Conversation

_SECONDS_TO_STOP = 30.0


@dataclass
class RayRunner:
    """directory: for Ray's own files while trials run. jobs: trials at a time, over all machines."""

    setup: Setup
    directory: Path
    jobs: int = 1

    def __post_init__(self) -> None:
        """Raises `UserError` where Ray is not installed, cannot be reached, or has no machine that is large enough."""
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        try:
            import ray
            from ray import tune  # noqa: F401  what the extra is for
        except ImportError as error:
            raise UserError(f"--ray needs Ray Tune ({error}): pip install 'modelworks[ray]'") from None
        try:
            ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray: Ray cannot be reached or started: {error}") from None
        self._resources = _resources(self.setup, self.jobs, ray.nodes())

    def run(self, trials: Sequence[Trial]) -> Generator[Outcome]:
        """Outcomes as they come. Raises `UserError` for what a trial says the user can fix."""
        from modelworks.tune.ray_listener import Conversation

        conversation = Conversation()
        thread = threading.Thread(target=self._tune, args=(trials, conversation), name="ray tune", daemon=True)
        thread.start()
        try:
            while (outcome := conversation.said.get()) is not None:
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:
            conversation.close()
            thread.join(_SECONDS_TO_STOP)
            shutil.rmtree(self.directory / "ray", ignore_errors=True)

    def _tune(self, trials: Sequence[Trial], conversation: Conversation) -> None:
        """In a thread of its own: `fit` returns when all are done."""
        from ray import tune

        from modelworks.tune.ray_listener import Listener, Stopper

        try:
            threads = max(1, int(self._resources["cpu"]) // self.setup.world_size)
            space = [
                {
                    "rate": each.rate,
                    "seed": each.seed,
                    "config": dump_yaml(self.setup.of(each)),
                    "threads": threads,  # of each rank
                }
                for each in trials
            ]
            tuner = tune.Tuner(
                tune.with_resources(_make_trial, self._resources),
                param_space={"trial": tune.grid_search(space)},
                tune_config=tune.TuneConfig(max_concurrent_trials=self.jobs, trial_dirname_creator=_directory_name),
                run_config=tune.RunConfig(
                    name="trials",
                    storage_path=str((self.directory / "ray").absolute()),
                    stop=Stopper(conversation.number),
                    callbacks=[Listener(conversation.number)],
                    verbose=0,
                ),
            )
            tuner.fit()
            conversation.said.put(None)
        except BaseException as error:
            conversation.said.put(error)


def _directory_name(trial: Any) -> str:
    """Of Ray's own files; it would put the whole configuration into it."""
    return str(trial.trial_id)


def _make_trial(config: dict[str, Any]) -> None:
    """On a machine of Ray's: the trial's process, waited for; what became of it is reported as one text."""
    from ray import tune

    asked = config["trial"]
    trial = Trial(float(asked["rate"]), int(asked["seed"]))
    directory = Path(tempfile.mkdtemp(prefix="modelworks-trial-"))
    try:
        parsed = parse_run_config(asked["config"], "the configuration of a trial")
        environment = {**os.environ, "OMP_NUM_THREADS": str(asked["threads"])}
        running = start_trial(parsed, trial, directory / "run", None, environment, directory / "output.log")
        with selectors.DefaultSelector() as selector:
            selector.register(running.child.control, selectors.EVENT_READ)
            while running.child.outcome is None:
                selector.select()
                running.child.listen()
        report = {"outcome": json.dumps(running.outcome().to_row())}
    except UserError as error:
        report = {"mistake": str(error)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    tune.report(report)


def _resources(setup: Setup, jobs: int, nodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of one trial, all on one machine: an even share of the CPUs, or as many devices as the run has ranks.

    nodes: as `ray.nodes()` lists them.
    """
    alive = [node["Resources"] for node in nodes if node.get("Alive")]
    ranks = setup.world_size
    if setup.config.train.device == "cuda":
        most = max((node.get("GPU", 0.0) for node in alive), default=0.0)
        if most < ranks:
            raise UserError(f"--ray: a trial needs {ranks} GPUs on one machine, and the largest of Ray's has {most:g}")
        return {"cpu": 1.0, "gpu": float(ranks)}
    cores = [node.get("CPU", 0.0) for node in alive]
    if max(cores, default=0.0) < 1:
        raise UserError("--ray: no machine of Ray's has a CPU to give")
    return {"cpu": float(max(1, min(max(cores), sum(cores) // jobs)))}
