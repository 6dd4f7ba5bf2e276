"""The planner's word on a run that is about to start: what `modelworks train` hands to the trainer.

Nothing is measured for it: there is this machine's calibration, or else the catalogue's figures. So it costs some
hundredths of a second.
"""

from __future__ import annotations

from modelworks.config import RunConfig, UserError
from modelworks.hardware import Device, Machine, match_cuda_name, this_machine, unused_calibration
from modelworks.layout import Layout
from modelworks.train.forecast import Forecast


def forecast(config: RunConfig, machine: Machine, n_hosts: int) -> Forecast:
    """See `train.forecast.Forecaster`. Raises UserError where the planner has no account of the run or its devices."""
    from modelworks.plan.ramp import ramp_stages  # only where a run starts
    from modelworks.plan.run import candidate_of, predict_run

    device, basis = _device(config, machine, n_hosts)
    found = predict_run(config, device)
    ramp = ramp_stages(config.batches, candidate_of(config, device))[:-1]
    stages = tuple((stage.rows, stage.step_seconds) for stage in ramp if stage.step_seconds is not None)
    return Forecast(found.step_seconds, found.memory, basis, stages)


def _device(config: RunConfig, machine: Machine, n_hosts: int) -> tuple[Device, str]:
    gpu = machine.facts.accelerator if config.train.device == "cuda" else None
    here = this_machine()
    if gpu is not None:
        if here.measured_on is not None and here.measured_on.accelerator == gpu.name:
            return here, f"from rates measured here on {here.measured_on.at[:10]}"
        known = match_cuda_name(gpu.name)
        if known is None:
            raise UserError(f"the catalogue does not know {gpu.name}: measure it with modelworks plan --calibrate")
        return known, f"from the catalogue's figures for {known.name}"
    ranks = Layout.of(config.parallel).world_size
    if n_hosts > 1:
        raise UserError("CPUs of several machines: what they exchange over their network was not measured")
    if here.measured_on is not None:
        most = here.measured[-1].ranks
        more = f"; {ranks} processes as if {most} shared the cores longer" if ranks > most else ""
        return here, f"from rates measured here on {here.measured_on.at[:10]}{more}"
    why = unused_calibration()
    told = f"; {why}" if why else ""
    return _as_fast(here, machine), (
        "from another machine's rates, as far as its matrix products tell them: right to a factor of two "
        f"(modelworks plan --calibrate measures this one{told})"
    )


def _as_fast(assumed: Device, machine: Machine) -> Device:
    """The assumed rates, changed by how fast this machine was found to multiply."""
    peak, measured = assumed.peak("fp32"), machine.gemm.get("fp32")
    if not peak or not measured or machine.disturbed:
        return assumed
    rates = [each.scaled(peak / measured, ranks=each.ranks, threads=each.threads) for each in assumed.measured]
    return assumed.model_copy(update={"measured": rates})
