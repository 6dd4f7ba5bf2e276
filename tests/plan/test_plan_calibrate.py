"""A machine that was measured: the fit finds the costs that made its step times, and ranks share what there is."""

import dataclasses

import numpy as np
import pytest

from modelworks.config import ModelConfig, ParallelConfig, RunConfig, UserError, count_parameters
from modelworks.hardware import OPERATIONS, Both, Costs, Device, catalogue
from modelworks.plan import Candidate, Split, evaluate, work_of
from modelworks.plan.calibrate import Probes, fit_rates
from modelworks.plan.measured import Counts
from modelworks.plan.measured_step import head_products, layer_attention, layer_products
from modelworks.plan.run import predict_run

CPU = catalogue().device("CPU")
MODEL = ModelConfig(family="llama", n_layers=8, d_model=256, n_heads=8, n_kv_heads=4, d_ff=704, vocab_size=4096)
EXPERTS = ModelConfig(
    family="mixtral", n_layers=4, d_model=128, n_heads=4, n_kv_heads=2, d_ff=256, vocab_size=512, n_experts=4
)
KNOWN = Costs(
    layer=Both(forward=1e-3, backward=2e-3),
    expert=Both(forward=1e-4, backward=3e-4),
    element=Both(forward=1e-9, backward=2e-9),
    routed=Both(forward=2e-9, backward=4e-9),
    weight=Both(forward=5e-10, backward=3e-9),
    token=Both(forward=1e-9, backward=5e-9),
    logit=6e-9,
    update=2e-9,
    step=1e-3,
    micro_batch=2e-3,
)


def probe(n_layers, d_model, d_ff, vocab_size, rows, micro_batch=None, parallel=None, **experts):
    shape = {"n_layers": n_layers, "d_model": d_model, "n_heads": d_model // 32, "d_ff": d_ff, "vocab_size": vocab_size}
    return RunConfig.model_validate(
        {
            "model": {"family": "mixtral" if experts else "llama", "tie_embeddings": True, **shape, **experts},
            "data": {"seq_len": 128, "tokenizer": "tokenizer.json"},
            "train": {"global_batch": rows, "micro_batch": micro_batch or rows, "precision": "fp32"},
            "parallel": parallel or {},
        }
    )


SHARDED = {"dp_shard": 2, "zero": 3}
PROBES = [
    probe(8, 64, 128, 256, 1),
    probe(2, 256, 704, 512, 8),
    probe(4, 256, 704, 512, 4),
    probe(2, 384, 1024, 8192, 8),
    probe(3, 512, 512, 4096, 2),
    probe(2, 256, 2048, 512, 4),
    probe(2, 128, 512, 16384, 8),
    probe(2, 128, 352, 512, 16, micro_batch=2),
    probe(4, 256, 704, 512, 32),
    probe(2, 64, 128, 256, 4, n_experts=8, experts_per_token=2),
    probe(2, 256, 512, 512, 8, n_experts=4, experts_per_token=2),
    probe(3, 256, 512, 512, 4, n_experts=2, experts_per_token=1),
]


def split_of(config):
    train = config.train
    return Split.of(
        config.parallel, micro_batch=train.micro_batch, global_batch=train.global_batch, seq_len=config.data.seq_len
    )


def operations(counts, half):
    """Seconds at the reference's rates, from their meaning: two norms, a sum forward, two of gradients, and so on."""
    each = {name: getattr(both, half) for name, both in CPU.measured[0].operations["fp32"].items()}
    sums = {"forward": 1, "backward": 2}[half]
    return (
        counts.stream * (2 * each["rmsnorm"] + sums * each["residual"])
        + counts.rotated * each["rotation"]
        + counts.hidden * each["swiglu"]
        + counts.joined * each["joined"]
        + counts.alone * each["alone"]
        + counts.accumulated * each["accumulate"]
    )


def made_up_times(config):
    """What a machine with the reference's products and `KNOWN` costs would take, from their meaning."""
    work = work_of(config.model, split_of(config), CPU, precision="fp32")
    known, shape, split = work.machine.measured, work.shape, work.split
    counts, n, m = Counts.of(shape, split), shape.n_layers, float(split.n_micro_batches)
    stream, ends = split.tokens * shape.d_model, shape.vocab_size * shape.d_model

    def between(half):
        each = {
            name: getattr(getattr(KNOWN, name), half) for name in ("layer", "expert", "element", "routed", "weight")
        }
        own = each.pop("layer") + sum(cost * getattr(counts, name) for name, cost in each.items())
        return own + operations(counts, half)

    forward = n * (layer_products(work, known, 0) + layer_attention(work, known, 0) + between("forward"))
    forward += KNOWN.token.forward * stream
    backward = n * (layer_products(work, known, 1) + layer_products(work, known, 2))
    backward += n * (layer_attention(work, known, 1) + between("backward")) + head_products(work, known)
    backward += KNOWN.token.backward * stream + KNOWN.logit * split.tokens * shape.vocab_size
    backward += KNOWN.weight.backward * 2 * ends + KNOWN.micro_batch
    return [float(forward), float(m * (forward + backward)), float(KNOWN.update * shape.parameters + KNOWN.step)]


def raw(rates, sharded=()):
    """What `measure_rank` would have returned on a machine with these rates and `KNOWN` costs."""
    rows = [[both.forward, both.backward] for both in (rates.operations["fp32"][name] for name in OPERATIONS)]
    return rates.model_dump() | {
        "operations": {"fp32": rows},
        "steps": {"fp32": [made_up_times(config) for config in PROBES]},
        "watched": {"fp32": []},
        "sharded": {"fp32": list(sharded)},
        "split_loss": {"fp32": []},
    }


def test_the_fit_finds_the_costs_that_made_the_times_and_predicts_another_shape():
    fit = fit_rates(raw(CPU.measured[0]), Probes(PROBES, PROBES[1], []))
    assert max(map(abs, fit.errors["fp32"])) < 1e-3
    other = probe(6, 192, 640, 2048, 12, micro_batch=4)
    device = CPU.model_copy(update={"measured": [fit.rates]})
    _, gradients, update = made_up_times(other)
    assert predict_run(other, device).step_seconds == pytest.approx(gradients + update, rel=0.01)


def test_what_a_step_takes_longer_with_zero_3_or_watched_is_the_cost_of_it():
    rates = CPU.measured[1]
    sharded = [probe(8, 128, 352, 512, 4, 2, SHARDED), probe(3, 512, 1408, 512, 2, 1, SHARDED)]
    measured = raw(rates)
    for config in sharded:
        n, gathered = config.model.n_layers, 4 * 512 * config.model.d_model  # bytes of the tied ends
        per_layer = 4 * (count_parameters(config.model).total - 513 * config.model.d_model) / n
        gather, scatter = (rates.exchange_fits[kind] for kind in ("all_gather", "reduce_scatter"))
        exchanged = 2 * n * (gather[0] + gather[1] * per_layer) + n * (scatter[0] + scatter[1] * per_layer)
        exchanged += gather[0] + scatter[0] + (gather[1] + scatter[1]) * gathered
        calls, elements = 3 * n + 2, (3 * n * per_layer + 2 * gathered) / 4
        measured["sharded"]["fp32"].append([1.0, 1.0 + exchanged + 2e-3 * calls + 3e-9 * elements])
    measured["watched"]["fp32"] = [[1.0, 2.0]]
    costs = fit_rates(measured, Probes(PROBES, PROBES[1], sharded)).rates.costs["fp32"]
    assert (costs.unit, costs.gathered) == pytest.approx((2e-3, 3e-9), rel=1e-3)
    assert 0.0 < costs.watched < 1.0 / PROBES[1].model.n_layers


LAYOUTS = {
    "dp2": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero3": {"dp_shard": 2, "zero": 3},
    "tp2": {"tp": 2},
    "tp2 without sequence": {"tp": 2, "sequence_parallel": False},
    "cp2": {"cp": 2},
    "ulysses": {"cp": 2, "cp_mode": "ulysses"},
    "pp2": {"pp": 2},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved", "pp_virtual": 2},
    "zbv": {"pp": 2, "pp_schedule": "zbv"},
}


def predicted(device=CPU, model=MODEL, micro_batch=1, **parallel):
    layout = ParallelConfig(**parallel)
    return evaluate(Candidate(model, layout, device, micro_batch, global_batch=8, seq_len=256, precision="fp32"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_add_up_and_two_ranks_are_slower_than_two_threads_by_what_they_exchange(name):
    found, whole = predicted(**LAYOUTS[name]), predicted()
    assert found.step_seconds == pytest.approx(sum(found.parts.values()))
    assert min(found.parts.values()) > -1e-9
    exchanged = sum(found.parts[part] for part in ("tensor", "context", "gather", "sends", "data"))
    assert exchanged > 0.0
    assert 0.7 * whole.step_seconds < found.step_seconds - exchanged < 2.0 * whole.step_seconds


def test_experts_over_two_ranks_exchange_rows():
    assert predicted(model=EXPERTS, dp_replicate=2, ep=2).parts["experts"] > 0.0
    assert predicted(model=EXPERTS).parts["experts"] == 0.0


def test_ranks_share_memory_and_beyond_the_measured_number_the_cores():
    assert predicted(dp_replicate=2).memory_limit == pytest.approx(predicted().memory_limit / 2)
    two, four = predicted(dp_replicate=2), predicted(dp_replicate=4)
    assert four.parts["linear"] == pytest.approx(two.parts["linear"], rel=0.01)  # half the work at half the speed


def test_a_layer_costs_its_own_norm_activation_and_positions():
    def seconds(**changes):
        model = ModelConfig.model_validate(MODEL.model_dump() | changes)
        return predicted(model=model).parts["elementwise"]

    def more(name, other):
        each = CPU.measured[0].operations["fp32"]
        return sum(getattr(each[name], half) - getattr(each[other], half) for half in ("forward", "backward"))

    tokens = 8 * 8 * 256  # times layers and micro-batches
    assert seconds(feed_forward="geglu") - seconds() == pytest.approx(tokens * 704 * more("geglu", "swiglu"))
    norms = 2 * tokens * 256 * more("layernorm", "rmsnorm")
    assert seconds(norm="layernorm") - seconds() == pytest.approx(norms, rel=0.02)  # its biases are weights too
    assert seconds(positions="none") < seconds()


def test_what_was_not_measured_is_said():
    with pytest.raises(UserError, match="precision fp16 was not measured on CPU; measured: fp32"):
        evaluate(Candidate(MODEL, ParallelConfig(), CPU, 1, 8, 256, precision="fp16"))
    alone: Device = CPU.model_copy(update={"measured": CPU.measured[:1]})
    with pytest.raises(UserError, match="were not measured"):
        predicted(device=alone, dp_replicate=2)


def test_columns_agree_with_one_row_at_a_time():
    from modelworks.plan import step_time

    rows = [(1, 2, 0.0), (2, 1, 0.0), (1, 1, 1.0), (1, 1, 2.0)]

    def split(tp, pp, recompute):
        return Split(1.0, 8.0, 256.0, tp=tp, pp=pp, dp_replicate=2.0 / (tp * pp), recompute=recompute)

    whole = step_time(
        work_of(MODEL, split(*(np.array(column, float) for column in zip(*rows, strict=True))), CPU, precision="fp32")
    )
    for index, row in enumerate(rows):
        one = step_time(work_of(MODEL, split(*row), CPU, precision="fp32"))
        for field in dataclasses.fields(one):
            column = np.broadcast_to(getattr(whole, field.name), len(rows))
            assert column[index] == pytest.approx(float(getattr(one, field.name))), field.name


def test_a_run_that_is_not_decided_or_compiled_is_refused():
    config = probe(2, 64, 128, 256, 4)
    undecided = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": "auto"})})
    compiled = config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})
    with pytest.raises(UserError, match="still `auto`"):
        predict_run(undecided, CPU)
    with pytest.raises(UserError, match=r"train\.compile"):
        predict_run(compiled, CPU)
