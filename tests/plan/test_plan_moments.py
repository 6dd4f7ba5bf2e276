"""Memory of a rank on a measured machine: activations against torch's own count, and which moment is the fullest."""

import pytest

from modelworks.config import ModelConfig, ParallelConfig, TrainConfig
from modelworks.hardware import catalogue
from modelworks.plan import Candidate, evaluate
from modelworks.train.memory import activation_bytes

CPU = catalogue().device("CPU")
MODELS = {
    "llama": ModelConfig(
        family="llama", n_layers=3, d_model=128, n_heads=4, n_kv_heads=2, d_ff=352, vocab_size=512, max_seq_len=256
    ),
    "gpt2": ModelConfig(family="gpt2", n_layers=3, d_model=128, n_heads=4, vocab_size=512, max_seq_len=256),
    "mixtral": ModelConfig(
        family="mixtral",
        n_layers=3,
        d_model=128,
        n_heads=4,
        n_kv_heads=2,
        d_ff=256,
        vocab_size=512,
        n_experts=4,
        max_seq_len=256,
    ),
}


def predicted(model, precision="fp32", recompute="none", micro_batch=4, global_batch=8, **parallel):
    layout = ParallelConfig(**parallel)
    return evaluate(Candidate(model, layout, CPU, micro_batch, global_batch, 256, precision, recompute))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_activations_are_those_that_torch_counts(family, precision):
    model = MODELS[family]
    train = TrainConfig(duration="1 steps", global_batch=8, device="cpu")
    counted = activation_bytes(model, train, precision=precision, micro_batch=4, seq_len=256)
    assert predicted(model, precision).bytes["activations"] == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_keeps_less_and_works_on_one_layer(recompute):
    model = MODELS["llama"].model_copy(update={"n_layers": 12})
    kept, less = predicted(model).bytes, predicted(model, recompute=recompute).bytes
    assert less["activations"] < 0.5 * kept["activations"]
    assert less["activations"] + less["working"] < kept["activations"]


def test_gradients_of_one_micro_batch_are_not_there_with_all_activations():
    model = MODELS["llama"]
    one, several = predicted(model, global_batch=4), predicted(model, global_batch=8)
    gradients = one.by_stage[0].parameters  # as many bytes in float32
    assert several.bytes["gradients"] == pytest.approx(gradients, rel=0.01)
    assert one.bytes["gradients"] < 0.5 * gradients
    assert 0.7 * gradients < several.memory - one.memory <= gradients


def test_a_model_larger_than_its_activations_is_fullest_at_the_update():
    wide = MODELS["llama"].model_copy(update={"d_model": 1024, "d_ff": 4096})
    found = predicted(wide, micro_batch=1, global_batch=1)
    stored = found.by_stage[0]
    assert stored.total <= found.memory < 1.1 * stored.total


def test_sharded_parameters_are_gathered_a_few_layers_at_a_time():
    wide = MODELS["llama"].model_copy(update={"n_layers": 16, "d_model": 512, "d_ff": 2048})
    whole = predicted(wide, micro_batch=1, global_batch=2, dp_shard=2, zero=2).by_stage[0].parameters
    found = predicted(wide, micro_batch=1, global_batch=2, dp_shard=2, zero=3)
    assert 0.0 < found.bytes["gather"] < 0.4 * whole
