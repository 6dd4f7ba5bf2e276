import pytest

from modelworks.config import UserError
from modelworks.hardware import catalogue, device, match_cuda_name, peak_flops


def test_peaks_are_dense_and_known_devices_are_there():
    assert device("H100-SXM-80GB").peak("bf16") == pytest.approx(989e12)
    assert device("A100-SXM-80GB").peak("bf16") == pytest.approx(312e12)
    assert device("H100-PCIe-80GB").peak("bf16") < device("H100-SXM-80GB").peak("bf16")
    for name in ("A100-40GB", "H200", "B200", "MI300X", "Ascend-910B", "TPU-v5p", "RTX-4090", "L40S"):
        assert device(name).memory_gb > 0


def test_every_figure_has_a_source_that_is_spelled_out():
    whole = catalogue()
    for entry in whole.devices.values():
        for key in (entry.source, *entry.sources.values()):
            assert key in whole.sources, f"{entry.name}: {key}"
        for figure in entry.sources:
            assert figure.split(".")[0] in type(entry).model_fields, f"{entry.name}: {figure}"


def test_vendor_sparse_figures_did_not_slip_in():
    # Where someone measured matrix products, a dense peak is above the measurement but below twice that; a sparse
    # one would be above. MI300X and MI325X reach just over half of theirs, by the same source.
    for entry in catalogue().devices.values():
        if entry.measured_bf16_tflops:
            assert 1.0 <= entry.dense_tflops["bf16"] / entry.measured_bf16_tflops < 2.0, entry.name


def test_no_name_means_two_devices():
    whole = catalogue()
    names = [name.lower() for entry in whole.devices.values() for name in (entry.name, *entry.also)]
    cuda_names = [name.lower() for entry in whole.devices.values() for name in entry.cuda_names]
    assert len(set(names)) == len(names)
    assert len(set(cuda_names)) == len(cuda_names)


def test_names_ignore_case_and_a_wrong_one_names_the_nearest():
    assert device("h100").name == "H100-SXM-80GB"
    with pytest.raises(UserError, match="did you mean H100-SXM-80GB"):
        device("H100-SXM-80")


def test_cuda_names_match_exactly_or_not_at_all():
    assert match_cuda_name("NVIDIA H100 80GB HBM3").name == "H100-SXM-80GB"
    assert match_cuda_name("NVIDIA H100 PCIe").name == "H100-PCIe-80GB"
    assert match_cuda_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_own_catalogue_adds_and_replaces(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text(
        "devices:\n"
        "- {name: MyChip, memory_gb: 16, dense_tflops: {bf16: 100}, source: the vendor's letter}\n"
        "- {name: L40S, memory_gb: 48, dense_tflops: {bf16: 300}, source: own measurement}\n"
    )
    whole = catalogue(own)
    assert whole.device("mychip").peak("bf16") == pytest.approx(100e12)
    assert whole.source(whole.device("MyChip"), "memory_gb") == "the vendor's letter"
    assert whole.device("L40S").peak("bf16") == pytest.approx(300e12)
    assert device("L40S").peak("bf16") == pytest.approx(362e12)  # the built-in one is as it was


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices:\n- {name: X, memory: 16, dense_tflops: {}, source: s}", "device X"),
        ("devices:\n- {name: X, memory_gb: -1, dense_tflops: {}, source: s}", "memory_gb"),
        ("devices:\n- {name: X, memory_gb: 1, dense_tflops: {int8: 5}, source: s}", "dense_tflops"),
        ("devices: 5", "expected a list"),
        ("devices: [", "not valid YAML"),
    ],
)
def test_a_wrong_catalogue_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        catalogue(path)
    assert "\n" not in str(caught.value)


def test_peak_by_name_says_where_it_comes_from():
    peak = peak_flops("H100", "bf16")
    assert peak.flops == pytest.approx(989e12)
    assert "dense bf16 peak of H100-SXM-80GB" in peak.source
    with pytest.raises(UserError, match="no bf16 peak for V100"):
        peak_flops("V100", "bf16")
