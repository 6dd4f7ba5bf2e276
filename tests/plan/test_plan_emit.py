"""Files for other launchers: what is written reads back to what was wanted, and everything else is refused.

The packages themselves read the files in `benchmarks/emit_check.py`; here are none of them.
"""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelworks.config import (
    ModelConfig,
    ParallelConfig,
    UserError,
    load_run_config,
    parse_run_config,
    preset,
)
from modelworks.hardware import Device, device
from modelworks.layout import layout_problems
from modelworks.models.families import to_hugging_face
from modelworks.plan.candidate import Candidate
from modelworks.plan.emit import TARGETS, emit, read_back, refusals
from modelworks.plan.emit.hugging_face import model_config
from modelworks.plan.emit.launch import Nodes, scripts
from modelworks.plan.emit.settings import Wanted

EVERY = {"accumulate_reduce": "every"}
H100 = device("H100-SXM-80GB")
SMALL: dict[str, Any] = {"n_layers": 8, "d_model": 64, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 512}
MODELS = {
    "llama": ModelConfig(**SMALL, rope_theta=500000.0),
    "scaled": ModelConfig(
        **SMALL, max_seq_len=65536, rope_scaling={"type": "llama3", "factor": 8.0, "original_max_seq_len": 8192}
    ),
    "qwen2": ModelConfig(**SMALL, family="qwen2"),
    "qwen3": ModelConfig(**SMALL, family="qwen3", head_dim=16, tie_embeddings=True),
    "mistral": ModelConfig(**SMALL, family="mistral", sliding_window=128),
    "gpt2": ModelConfig(family="gpt2", n_layers=8, d_model=64, n_heads=8, vocab_size=512),
    "mixtral": ModelConfig(**SMALL, family="mixtral"),
    "biased": ModelConfig(**SMALL, family="qwen3_moe", n_experts=8, experts_per_token=2, dense_layers=[0]).model_copy(
        update={"router_bias": True, "router_aux_loss": 0.0}
    ),
}


def candidate(model: ModelConfig = MODELS["llama"], rows: int = 32, **changes: Any) -> Candidate:
    others = {key: changes.pop(key) for key in ("precision", "recompute", "optimizer", "micro_batch") if key in changes}
    made = Candidate(model, ParallelConfig(**changes), H100, 1, rows, 256)
    return replace(made, **others)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    """Layouts that our own trainer would take, of eight to sixteen ranks, with any training precision."""
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-h1", "zbv", "dualpipev"]))
    shard = draw(st.sampled_from([1, 2, 4]))
    layout = {
        "dp_replicate": draw(st.sampled_from([1, 2])),
        "dp_shard": shard,
        "zero": draw(st.sampled_from([1, 2, 3])) if shard > 1 else 0,
        "tp": draw(st.sampled_from([1, 1, 2, 4])),
        "sequence_parallel": draw(st.booleans()),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "cp_mode": draw(st.sampled_from(["ring", "ulysses"])),
        "pp": pp,
        "pp_schedule": schedule if pp > 1 else "1f1b",
        "pp_virtual": 2 if pp > 1 and schedule not in ("gpipe", "1f1b", "zb-h1") else 1,
        "pp_gather": draw(st.sampled_from(["step", "micro-batch"])),
        "ep": draw(st.sampled_from([1, 1, 2])),
        "accumulate_reduce": draw(st.sampled_from(["last", "every"])),
        "offload": draw(st.sampled_from(["none", "none", "none", "cpu", "nvme"])),
        "timeout": draw(st.sampled_from([600.0, 120.0])),
    }
    if layout["zero"] == 3:
        layout["offload_params"] = draw(st.booleans())
    if layout["offload"] == "nvme":
        layout["offload_path"] = draw(st.sampled_from([None, "/local/nvme", "a b'c\"$(touch no)\n"]))
    return candidate(
        MODELS[draw(st.sampled_from(sorted(MODELS)))],
        micro_batch=draw(st.sampled_from([1, 2])),
        precision=draw(st.sampled_from(["fp32", "bf16", "bf16", "bf16-autocast", "fp16", "fp8"])),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        optimizer=draw(st.sampled_from(["adamw", "adamw", "adamw", "adam", "lion", "sgd", "muon"])),
        **layout,
    )


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reads_back_or_is_refused(target: str, data: st.DataObject, tmp_path: Path) -> None:
    wanted = data.draw(candidates())
    out = tmp_path / "files"
    try:
        emit(target, wanted, out)
    except UserError:
        return
    found = read_back(target, out)
    parallel = wanted.parallel
    assert found["train.micro_batch"] == wanted.micro_batch
    assert found["train.global_batch"] == wanted.global_batch
    assert found["train.precision"] == wanted.precision
    assert found["train.recompute"] == wanted.recompute
    assert found["optimizer.name"] == wanted.optimizer
    assert found["data.seq_len"] == wanted.seq_len
    for key in ("dp_replicate", "dp_shard", "zero", "tp", "cp", "pp", "ep", "offload"):
        assert found[f"parallel.{key}"] == getattr(parallel, key), key
    for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "vocab_size", "tie_embeddings", "norm_eps"):
        assert found[f"model.{key}"] == getattr(wanted.model, key), key
    if parallel.pp > 1:
        assert found["parallel.pp_schedule"] == parallel.pp_schedule
        assert sum(found["parallel.pp_partition"]) == wanted.model.n_layers
    for script in ("launch.sh", "slurm.sh"):
        subprocess.run(["bash", "-n", out / script], check=True)


# What each target is there for must be written, not refused: (target, model, layout).
WRITTEN: list[tuple[str, str, dict[str, Any]]] = [
    ("torchtitan", "llama", {"dp_shard": 4, "zero": 3, "accumulate_reduce": "every"}),
    ("torchtitan", "scaled", {"dp_shard": 2, "dp_replicate": 2, "zero": 2, "accumulate_reduce": "every"}),
    ("torchtitan", "qwen3", {"tp": 4, "cp": 2, "sequence_parallel": False, **EVERY}),
    ("torchtitan", "llama", {"pp": 4, "pp_schedule": "interleaved", "pp_virtual": 2}),
    ("torchtitan", "llama", {"pp": 2, "pp_schedule": "zbv", "pp_partition": [1, 3, 3, 1]}),
    ("torchtitan", "llama", {"pp": 2, "dp_shard": 2, "zero": 3, "pp_gather": "micro-batch"}),
    ("torchtitan", "llama", {"pp": 2, "dp_shard": 2, "zero": 3}),
    (
        "torchtitan",
        "llama",
        {"dp_shard": 8, "zero": 3, "offload": "cpu", "offload_params": True, "accumulate_reduce": "every"},
    ),
    ("torchtitan", "biased", {"dp_shard": 4, "zero": 3, "ep": 4, "accumulate_reduce": "every"}),
    ("megatron", "llama", {"tp": 4, "pp": 2, "dp_shard": 2, "zero": 1}),
    ("megatron", "qwen2", {"pp": 4, "pp_schedule": "interleaved", "pp_virtual": 2, "dp_replicate": 2}),
    ("megatron", "llama", {"pp": 4, "pp_partition": [3, 2, 2, 1]}),
    ("megatron", "gpt2", {"tp": 2, "cp": 2, "cp_mode": "ulysses", "dp_shard": 2, "zero": 1}),
    ("megatron", "scaled", {"dp_shard": 4, "zero": 3, "accumulate_reduce": "every"}),
    ("megatron", "mixtral", {"tp": 2, "ep": 4, "dp_shard": 2, "dp_replicate": 2, "zero": 1}),
    ("megatron", "llama", {"dp_shard": 4, "zero": 1, "offload": "cpu"}),
    ("megatron", "llama", {"dp_shard": 4, "zero": 1, "precision": "fp8"}),
    ("deepspeed", "llama", {"dp_shard": 8, "zero": 1}),
    ("deepspeed", "mixtral", {"dp_shard": 8, "zero": 3, "accumulate_reduce": "every"}),
    (
        "deepspeed",
        "qwen2",
        {"tp": 2, "dp_shard": 4, "zero": 2, "sequence_parallel": False, "accumulate_reduce": "every"},
    ),
    (
        "deepspeed",
        "llama",
        {"dp_shard": 8, "zero": 3, "offload": "nvme", "offload_path": "/x", "accumulate_reduce": "every"},
    ),
    ("deepspeed", "gpt2", {"dp_shard": 8, "zero": 1, "precision": "fp16"}),
    ("fsdp", "llama", {"dp_shard": 8, "zero": 3}),
    (
        "fsdp",
        "mistral",
        {"dp_shard": 4, "dp_replicate": 2, "zero": 2, "accumulate_reduce": "every", "recompute": "full"},
    ),
    ("fsdp", "gpt2", {"dp_replicate": 8, "precision": "bf16-autocast"}),
    ("fsdp", "mixtral", {"dp_shard": 8, "zero": 3, "offload": "cpu", "offload_params": True}),
]


@pytest.mark.parametrize(("target", "model", "layout"), WRITTEN)
def test_is_written(target: str, model: str, layout: dict[str, Any], tmp_path: Path) -> None:
    assert emit(target, candidate(MODELS[model], **layout), tmp_path / "files")


@pytest.mark.parametrize(
    ("target", "layout", "says"),
    [
        ("torchtitan", {"dp_shard": 8, "zero": 1}, "zero=2 or zero=3"),
        ("torchtitan", {"pp": 2, "pp_schedule": "zb-h1"}, "no zb-h1"),
        ("torchtitan", {"tp": 8}, "n_kv_heads"),
        ("torchtitan", {"dp_shard": 8, "zero": 3, "precision": "fp8", "accumulate_reduce": "every"}, "train.precision"),
        ("megatron", {"pp": 2, "pp_schedule": "zbv"}, "1f1b and interleaved"),
        ("megatron", {"pp": 4, "pp_schedule": "interleaved", "pp_virtual": 2, "rows": 6}, "groups of pp=4"),
        ("megatron", {"dp_shard": 8, "zero": 3}, "accumulate_reduce"),
        ("megatron", {"dp_shard": 8, "zero": 1, "offload": "nvme"}, "parallel.offload"),
        ("deepspeed", {"pp": 2}, "list of layers"),
        ("deepspeed", {"tp": 2}, "sequence_parallel=false"),
        ("deepspeed", {"dp_shard": 8, "zero": 1, "recompute": "selective"}, "recompute"),
        ("fsdp", {"tp": 2}, "torchtitan"),
        ("fsdp", {"dp_shard": 8, "zero": 3, "offload": "cpu"}, "offload_params=true"),
        ("modelworks", {"precision": "fp8"}, "no fp8"),
        ("modelworks", {"optimizer": "momentum"}, "none called momentum"),
    ],
)
def test_refusal_names_the_key_and_a_way_out(target: str, layout: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        emit(target, candidate(**layout), tmp_path / "files")
    assert not (tmp_path / "files").exists()
    assert any(says in reason for reason in refusals(target, candidate(**layout)))


def test_what_no_file_can_say_is_refused_by_the_round_trip(tmp_path: Path) -> None:
    """Settings that no target lists: they would be lost, and that alone refuses them."""
    run = parse_run_config("model: llama-tiny\ntrain: {z_loss: 1e-4}", "run", [])
    for target in TARGETS[1:]:
        wanted = candidate(run.model, dp_replicate=4, precision="fp32", accumulate_reduce="last", rows=4)
        with pytest.raises(UserError, match=r"train\.z_loss"):
            emit(target, wanted, tmp_path / target, run=run)


def test_the_parametrisation_is_refused_by_name(tmp_path: Path) -> None:
    wanted = candidate(MODELS["llama"].model_copy(update={"mup_base_width": 32}))
    with pytest.raises(UserError, match=r"model\.mup_base_width: .*use the target modelworks"):
        emit("torchtitan", wanted, tmp_path / "files")
    emit("modelworks", wanted, tmp_path / "own")
    assert load_run_config(tmp_path / "own" / "config.yaml").model.mup_base_width == 32


def test_our_own_config_loads_and_fits(tmp_path: Path) -> None:
    wanted = candidate(tp=2, pp=2, dp_shard=2, zero=1, recompute="full")
    emit("modelworks", wanted, tmp_path)
    config = load_run_config(tmp_path / "config.yaml")
    assert not list(layout_problems(config))
    assert config.parallel == wanted.parallel
    assert config.model == wanted.model
    assert (config.train.micro_batch, config.train.global_batch) == (1, 32)


def test_the_run_it_belongs_to(tmp_path: Path) -> None:
    run = parse_run_config(
        "name: mine\nmodel: llama-tiny\ntrain: {duration: 1M tokens}\noptimizer: {lr: 0.01, betas: [0.8, 0.9]}",
        "run",
        [],
    )
    wanted = candidate(run.model, dp_shard=2, zero=1, rows=16)
    for target in ("modelworks", "megatron", "deepspeed"):
        emit(target, wanted, tmp_path / target, run=run)
        found = read_back(target, tmp_path / target)
        assert found["train.duration"] == "245 steps"  # 10^6 / (16 * 256), rounded up
        assert found["schedule.warmup"] == "5 steps"
        assert found["optimizer.betas"] == [0.8, 0.9]
    assert "mine" in (tmp_path / "megatron" / "slurm.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "qwen3-0.6b", "qwen2.5-0.5b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2-small"]
)
def test_hugging_face_map_is_that_of_the_models(name: str) -> None:
    model = preset(name)
    ours = model_config(Wanted.of(Candidate(model, ParallelConfig(), H100, 1, 1, 128), None))
    theirs = to_hugging_face(model)
    assert {key: theirs[key] for key in ours if key in theirs} == {key: ours[key] for key in ours if key in theirs}
    assert set(ours) - set(theirs) <= {"output_router_logits", "max_position_embeddings"}


def test_ill_meant_names_stay_inside_quotes(tmp_path: Path) -> None:
    """Device names come from catalogue files, run names and paths from users: none may add a command."""
    evil = "x\"'; touch broken; `touch broken` $(touch broken)\ntouch broken\r\n#SBATCH --nodes=9"
    hostile = H100.model_copy(update={"name": evil})
    layout = {"dp_shard": 8, "zero": 3, "offload": "nvme", "offload_path": evil, "accumulate_reduce": "every"}
    wanted = replace(candidate(**layout), device=hostile)
    out = tmp_path / "a b'c"
    for target, chosen in (
        ("deepspeed", wanted),
        ("megatron", replace(candidate(dp_shard=8, zero=1), device=hostile)),
        ("torchtitan", replace(candidate(dp_shard=8, zero=3, accumulate_reduce="every"), device=hostile)),
        ("fsdp", replace(candidate(dp_shard=8, zero=3), device=hostile)),
        ("modelworks", wanted),
    ):
        paths = emit(target, chosen, out / target)
        for path in paths:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".sh":
                commands = [line for line in text.splitlines() if line and not line.startswith("#")]
                assert not any("broken" in line for line in commands)
                assert sum(line.startswith("#SBATCH --nodes") for line in text.splitlines()) == (
                    path.name == "slurm.sh"
                )
            if path.suffix == ".py":
                assert not any(
                    isinstance(node, ast.Constant) and "broken" in str(node.value) for node in ast.walk(ast.parse(text))
                )
    found = json.loads((out / "deepspeed" / "ds_config.json").read_text(encoding="utf-8"))
    assert found["zero_optimization"]["offload_optimizer"]["nvme_path"] == evil
    assert load_run_config(out / "modelworks" / "config.yaml").parallel.offload_path == evil


def test_a_name_that_skipped_validation_is_one_word() -> None:
    """A run's name is checked where it is read; a value made in code may hold anything."""
    texts = scripts("a b'\n#SBATCH --nodes=9\n$(touch broken)", Nodes(1, 1), ["one\ntwo"], "x", "")
    assert "#SBATCH --job-name=a-b---SBATCH---nodes-9---touch-broken-" in texts["slurm.sh"].splitlines()
    assert "# one two" in texts["launch.sh"].splitlines()


def test_launch_script_runs_what_it_says(tmp_path: Path) -> None:
    """With a stand-in for torchrun that prints its words, in a directory whose name needs quotes."""
    out = tmp_path / "a 'b' $c"
    emit("megatron", candidate(MODELS["mixtral"], ep=4, dp_shard=8, dp_replicate=2, zero=1), out)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "torchrun").write_text("#!/bin/bash\nprintf '%q ' \"$@\"\n", encoding="utf-8")
    (tools / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "MEGATRON_LM": "/a b", "MASTER_ADDR": "host"}
    done = subprocess.run(["bash", out / "launch.sh"], capture_output=True, text=True, env=environment, check=True)
    words = shlex.split(done.stdout)
    assert words[:4] == ["--nnodes", "2", "--nproc-per-node", "8"]
    assert "host:29500" in words
    assert "/a b/pretrain_gpt.py" in words
    assert words[words.index("--moe-layer-freq") + 1] == "[1,1,1,1,1,1,1,1]"
    assert words[words.index("--num-layers") + 1] == "8"


def test_nodes_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use 8 or 16"):
        emit("modelworks", candidate(dp_replicate=12, rows=48), tmp_path / "files")
    single: Device = H100.model_copy(update={"link": None})
    emit("modelworks", replace(candidate(dp_replicate=4), device=single), tmp_path / "files")
    assert "--nnodes 4 --nproc-per-node 1" in (tmp_path / "files" / "launch.sh").read_text(encoding="utf-8")


def test_never_over_a_file_of_the_users(tmp_path: Path) -> None:
    mine = tmp_path / "train.py"
    mine.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="is not ours"):
        emit("fsdp", candidate(dp_shard=8, zero=3), tmp_path)
    assert mine.read_text(encoding="utf-8") == "mine"
    mine.unlink()
    emit("fsdp", candidate(dp_shard=8, zero=3), tmp_path)
    emit("fsdp", candidate(dp_shard=8, zero=2), tmp_path)  # what we wrote may be written again
    assert read_back("fsdp", tmp_path)["parallel.zero"] == 2


def test_unknown_target_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean megatron"):
        emit("megatorn", candidate(), tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_back("megatron", tmp_path)
