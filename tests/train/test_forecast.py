"""What was predicted of a run is said, recorded and held against what was measured; a run never fails for it."""

from rich.console import Console

from modelworks.config import UserError
from modelworks.records import read_records
from modelworks.report import write_report
from modelworks.train import train
from modelworks.train.forecast import Forecast, describe_step


def records_of(directory):
    return {record.name: record for record in read_records(directory / "records.jsonl")}


def test_predicted_and_measured_stand_side_by_side(tiny_config, tiny_machine, tmp_path, capsys):
    asked = []

    def forecaster(config, machine, n_hosts):
        asked.append((config.train.micro_batch, machine, n_hosts))
        return Forecast(step_seconds=0.25, memory=3e6, basis="made up")

    result = train(
        tiny_config("train.duration=2 steps"),
        tmp_path / "run",
        console=Console(width=200),
        machine=tiny_machine,
        forecaster=forecaster,
    )
    assert asked == [(4, tiny_machine, 1)]  # the micro-batch was `auto` and is decided
    assert result.predicted_step_seconds == 0.25
    records = records_of(tmp_path / "run")
    tokens = 4 * 32
    assert records["predicted/step_seconds"].value == 0.25
    assert records["predicted/tokens_per_second"].value == tokens / 0.25
    assert records["predicted/tensor_memory"].value == 3e6
    flops, peak = records["predicted/flops_per_token"].value, records["machine/peak_flops"].value
    assert records["predicted/mfu"].value == tokens / 0.25 * flops / peak
    measured = records["train/step_seconds"]
    assert (measured.kind, measured.value) == ("measured", tokens / result.tokens_per_second)
    output = capsys.readouterr().out
    assert "predicted: 250 ms a step, 512 tokens/s" in output
    assert "made up" in output
    assert f"measured {describe_step(measured.value)}" in output
    page = write_report(tmp_path / "run").read_text()
    assert "step seconds" in page
    assert "tensor memory" in page


def test_a_run_that_cannot_be_predicted_goes_on_and_says_so(tiny_config, tiny_machine, tmp_path, capsys):
    for error in (UserError("no rate is known"), ZeroDivisionError("by zero")):

        def forecaster(*_, error=error):
            raise error

        config = tiny_config("train.duration=1 steps")
        console = Console(width=200)
        result = train(
            config, tmp_path / "run", console=console, machine=tiny_machine, forecaster=forecaster, overwrite=True
        )
        assert result.steps == 1
        assert result.predicted_step_seconds is None
        assert f"not predicted: {'' if isinstance(error, UserError) else 'ZeroDivisionError: '}{error}" in (
            capsys.readouterr().out
        )
