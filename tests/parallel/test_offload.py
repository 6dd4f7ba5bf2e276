"""State in host memory or in files gives the same updates, and is where it is said to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import WorkerPool

from modelworks.config import OptimizerConfig, ParallelConfig, UserError
from modelworks.config.optimizers import HABITS
from modelworks.layout import Layout
from modelworks.models import CausalContext, Transformer, initialize
from modelworks.models.offload import activations_on_host
from modelworks.optim import build_optimizer
from modelworks.parallel import Mesh
from modelworks.parallel.offload import state_allocator

CPU = torch.device("cpu")


def allocator(kind: str, directory: Path) -> Any:
    return state_allocator(ParallelConfig(offload=kind), CPU, directory)  # type: ignore[arg-type]


def train(dtype: torch.dtype, allocate: Any, steps: int = 4) -> tuple[dict[str, torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    names = {"blocks.0.feed_forward.up.weight": (7, 5), "final_norm.weight": (5,), "empty.weight": (0, 5)}
    parameters = {
        name: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for name, shape in names.items()
    }
    optimizer = build_optimizer(parameters.items(), OptimizerConfig(no_decay=["*norm.weight"]), allocate=allocate)
    for _ in range(steps):
        gradients = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.items()}
        optimizer.step(gradients, lr=1e-2)
    return {name: tensor.detach() for name, tensor in parameters.items()}, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_updates_are_the_same_bits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected, _ = train(dtype, None)
    found, optimizer = train(dtype, allocator(kind, tmp_path))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert optimizer.state_bytes() == 3 * (7 * 5 + 5) * wide.itemsize  # master and two averages of everything


@pytest.mark.parametrize("name", HABITS)
def test_every_optimiser_keeps_its_state_on_the_host(name: str, tmp_path: Path) -> None:
    """Masters, and everything that the rule keeps, where it was allocated; the updates are the same bits."""
    shapes = {"blocks.0.up.weight": (70, 64), "blocks.0.norm.weight": (64,), "embedding.weight": (70, 64)}
    runs, allocated = [], dict[str, torch.Tensor]()

    def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return allocated.setdefault(name, allocator("cpu", tmp_path)(name, shape, dtype))

    for place in (None, allocate):
        generator = torch.Generator().manual_seed(0)
        values = {n: torch.randn(shape, generator=generator).requires_grad_() for n, shape in shapes.items()}
        optimizer = build_optimizer(values.items(), OptimizerConfig(name=name), allocate=place)  # type: ignore[arg-type]
        for _ in range(3):
            optimizer.step({n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}, lr=1e-2)
        runs.append((values, dict(optimizer.named_state())))
    (values, state), (moved, held) = runs
    assert held.keys() == state.keys() | {f"{n}/master" for n in shapes}
    assert all(tensor.data_ptr() == allocated[n].data_ptr() for n, tensor in held.items())
    for n in shapes:
        assert torch.equal(moved[n], values[n])
    for n, tensor in state.items():
        assert torch.equal(held[n], tensor)


def test_files_hold_the_state(tmp_path: Path) -> None:
    _, optimizer = train(torch.float32, allocator("nvme", tmp_path))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(sizes.values()) == optimizer.state_bytes()
    state = dict(optimizer.named_state())
    name = "blocks.0.feed_forward.up.weight/exp_avg_sq"
    stored = torch.frombuffer(bytearray((tmp_path / f"{name.replace('/', '.')}.bin").read_bytes()), dtype=torch.float32)
    assert torch.equal(stored.view(7, 5), state[name])


def test_a_disk_without_room_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"parallel\.offload: .*\.bin cannot be made with 140 bytes .No space left"):
        train(torch.float32, allocator("nvme", tmp_path))


def test_state_goes_from_one_home_to_another(tmp_path: Path) -> None:
    """A run that was not offloaded goes on offloaded, and back."""
    _, first = train(torch.bfloat16, None)
    _, second = train(torch.bfloat16, allocator("nvme", tmp_path), steps=0)
    second.load_state(((name, tensor.clone()) for name, tensor in first.named_state()), first.updates)
    theirs = dict(second.named_state())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in first.named_state())


def gradients(recompute: str, offload: bool) -> dict[str, torch.Tensor]:
    from modelworks.config import ModelConfig

    config = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=24, vocab_size=31)
    model = Transformer(config)
    initialize(model, 0)
    model.set_recompute(recompute, offload_activations=offload)  # type: ignore[arg-type]
    tokens = torch.arange(12).view(2, 6)
    model.logits(model(tokens, tokens % 6, CausalContext())).square().sum().backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_come_back_as_they_went(recompute: str) -> None:
    expected = gradients(recompute, offload=False)
    for name, gradient in gradients(recompute, offload=True).items():
        assert torch.equal(gradient, expected[name])


def test_parameters_are_no_activations() -> None:
    block = torch.nn.Linear(3, 3)
    with activations_on_host(block):
        y = block(torch.ones(2, 3, requires_grad=True))
    y.sum().backward()
    with pytest.raises(ValueError, match="selective"):
        Transformer(_tiny()).set_recompute("selective", offload_activations=True)


def _tiny() -> Any:
    from modelworks.config import ModelConfig

    return ModelConfig(n_layers=1, d_model=8, n_heads=1, d_ff=8, vocab_size=8)


@pytest.mark.gpu
def test_activations_leave_the_device() -> None:
    device = torch.device("cuda")
    block = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).to(device)
    x = torch.ones(4096, 256, device=device, requires_grad=True)
    kept = {}
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        if offload:
            with activations_on_host(block):
                y = block(x)
        else:
            y = block(x)
        kept[offload] = torch.cuda.memory_allocated() - before
        y.sum().backward()
        del y
    assert kept[True] < kept[False] / 2


def offloaded_step(mesh: Mesh, config: str, scratch: str) -> list[float]:
    from modelworks.config import parse_run_config
    from modelworks.verify.runs import FLOAT64, run_split

    observed, _ = run_split(parse_run_config(config, "test"), 2, FLOAT64, mesh)
    return [] if observed is None else [float(tensor.sum()) for tensor in observed.final.values()]


def test_with_zero_and_tensor_parallel(workers: WorkerPool, tmp_path: Path) -> None:
    text = """
        model: {n_layers: 2, d_model: 16, n_heads: 2, d_ff: 24, vocab_size: 31, max_seq_len: 16}
        data: {seq_len: 16, tokenizer: none}
        train: {global_batch: 4, micro_batch: 1}
        optimizer: {lr: 1e-2}
        parallel: {dp_shard: 2, zero: 1, tp: 2}
    """
    layout = Layout(dp_shard=2, tp=2)
    plain, *_ = workers.run(offloaded_step, layout, text, "")
    for kind in ("cpu", f"nvme, offload_path: {tmp_path}"):
        changed = text.replace("tp: 2}", f"tp: 2, offload: {kind}}}")
        found, *_ = workers.run(offloaded_step, layout, changed, str(tmp_path))
        assert found == plain
