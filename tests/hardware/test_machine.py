import os
import subprocess
import sys
from dataclasses import replace

import pytest

from modelworks.hardware import choose_threads, compiler, facts
from modelworks.hardware.machine import _cpu_quota, _memory_limit


def test_facts_are_of_this_process():
    found = facts()
    assert 1 <= found.cores <= found.physical_cores == os.cpu_count()
    assert 0 < found.memory <= found.physical_memory
    assert found.accelerator is None  # torch was not asked


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity mask on this system")
def test_cores_follow_the_affinity_mask():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert facts().cores == 1
        if (os.cpu_count() or 1) > 1:
            assert "affinity" in facts().cores_reason
    finally:
        os.sched_setaffinity(0, allowed)


def test_facts_and_choices_import_no_torch():
    code = "import sys, modelworks.hardware as h; h.facts(); h.device('H100'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_tightest_limit_on_the_path_counts_version_2(tmp_path):
    own = tmp_path / "self"
    own.write_text("0::/pod/container\n")
    root = tmp_path / "cgroup"
    write(root / "pod/cpu.max", "150000 100000\n")
    write(root / "pod/container/cpu.max", "max 100000\n")
    write(root / "pod/memory.max", "max\n")
    write(root / "pod/container/memory.max", "1073741824\n")
    assert _cpu_quota(root, own) == 1.5
    assert _memory_limit(root, own) == 1024**3


def test_limits_of_version_1_and_none(tmp_path):
    own = tmp_path / "self"
    own.write_text("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    root = tmp_path / "cgroup"
    assert _cpu_quota(root, own) is None
    write(root / "cpu/a/cpu.cfs_quota_us", "-1\n")
    write(root / "cpu/cpu.cfs_quota_us", "400000\n")
    write(root / "cpu/cpu.cfs_period_us", "100000\n")
    write(root / "memory/a/memory.limit_in_bytes", "2048\n")
    assert _cpu_quota(root, own) == 4.0
    assert _memory_limit(root, own) == 2048


def test_container_whose_own_path_is_out_of_sight(tmp_path):
    own = tmp_path / "self"
    own.write_text("0::/host/path/we/cannot/see\n")
    write(tmp_path / "cgroup/cpu.max", "200000 100000\n")
    assert _cpu_quota(tmp_path / "cgroup", own) == 2.0


def test_compiler_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    path, reason = compiler()
    assert path is None
    assert "no C++ compiler found" in reason


@pytest.mark.parametrize(
    ("setting", "threads"), [("1", "1"), ("2,1", "2"), ("99", "4"), ("", "4"), ("x", "4"), ("0", "4")]
)
def test_fewer_threads_where_the_user_says_so(setting: str, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    choice = choose_threads(replace(facts(), cores=4))
    assert choice.value == threads
    assert ("OMP_NUM_THREADS" in choice.reason) == (threads != "4")
