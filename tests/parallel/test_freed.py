"""What a run leaves behind: nothing. A gradient store that stayed would keep its process groups, whose threads poll."""

from __future__ import annotations

import gc
import weakref

import torch

from modelworks.config import ModelConfig, ParallelConfig
from modelworks.layout import Layout, plan_parameters
from modelworks.models import Transformer
from modelworks.parallel import single_process
from modelworks.parallel.gradients import build_gradient_store


def test_a_store_goes_with_its_model() -> None:
    config = ModelConfig(n_layers=1, d_model=8, n_heads=1, d_ff=8, vocab_size=8)
    model = Transformer(config)
    plans = plan_parameters(config, Layout(), ParallelConfig(), 0, [[0]])
    store = build_gradient_store([model], plans, single_process(torch.device("cpu")), ParallelConfig())
    gone = weakref.ref(store)
    del store, model
    gc.collect()
    assert gone() is None
