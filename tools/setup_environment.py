"""Create the Python environment of a CPU machine with the pinned versions of requirements/. `make setup` runs this script.

    python3.12 tools/setup_environment.py [--venv .venv]

Uses only the standard library. pip chooses the build of torch: the CPU build if pip's configured indexes have it, else PyPI's CUDA build,
which also runs without a GPU but needs the CUDA libraries of requirements/torch_cuda.txt. Packages are installed in parts, so that a second
call continues after a failure. Each failure prints one line; pip's full output is in VENV/setup.log. Exit code: 0, or 2 after an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS, CUDA_PINS = ROOT / "requirements" / "cpu.txt", ROOT / "requirements" / "torch_cuda.txt"
PIP = "pip==25.3"
"""A version that resumes interrupted downloads; the one bundled with Python may be older."""
CPU_INDEX = "INDEX"
"""Placeholder for the address of PyTorch's index of CPU wheels, given on its installation page."""
DOWNLOAD_GB = {"cpu": 0.8, "cuda": 3.3}
DISK_GB = {"cpu": 3.6, "cuda": 6.4}
"""Totals for each build of torch: downloads are estimated, environments measured."""
PART = 30
"""Packages per call of pip: if a download fails, completed parts remain installed."""
SILENCE_SECONDS = 10.0
"""Maximum interval between progress lines."""
IMPORTS = "import megatron.core, torch, transformers, vllm"
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|ProtocolError|IncompleteRead|"
    r"Connection (reset|aborted|refused|broken)|Temporary failure in name resolution|Read timed out|RemoteDisconnected"
)
_NEEDS_CUDA = re.compile(r"'(nvidia|cuda)[-_]")  # matches in a printed list of requirements
_DOING = re.compile("Downloading|Collecting|Installing|Building")  # start of pip's progress lines


class SetupError(Exception):
    """An error that the user can fix, described in one line."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="folder of the environment (.venv)")
    venv = parser.parse_args().venv.absolute()
    try:
        set_up(venv)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped: `make setup` continues", file=sys.stderr)
        sys.exit(130)


def set_up(venv: Path) -> None:
    """Create or complete the environment.

    Raises:
        SetupError: a requirement is missing on this machine, or an installation failed.
    """
    require_machine()
    require_space(venv, DISK_GB["cpu"])  # the smaller build; checked first, because a venv that finds no space does not say so
    python = make_venv(venv)
    log = venv / "setup.log"
    log.write_text("", encoding="utf-8")
    pins = read_pins(PINS)
    run_pip(python, ["install", PIP], "pip", log, venv)
    build, name = torch_build(python, pins["torch"], log)
    if build == "cuda":
        pins = {**pins, **read_pins(CUDA_PINS)}
        here = f"Python {_version(sys.version_info)}"
        print(
            f"torch {name}: the CUDA build, the only one that pip finds for {here}; it also runs without a GPU; "
            f"{DOWNLOAD_GB['cuda']} GB to download, {DISK_GB['cuda']} GB on disk.\n"
            f"  For the CPU build ({DISK_GB['cpu']} GB on disk): rm -r {_short(venv)}; PIP_EXTRA_INDEX_URL={CPU_INDEX} make setup\n"
            f"  ({CPU_INDEX}: PyTorch's index of CPU wheels, see its installation page for pip, Linux, CPU)",
            flush=True,
        )
    else:
        print(f"torch {name}: the CPU build; {DOWNLOAD_GB['cpu']} GB to download, {DISK_GB['cpu']} GB on disk", flush=True)
    require_space(venv, DISK_GB[build])
    parts = in_parts(pins, first=("setuptools", "torch"))
    for number, part in enumerate(parts, start=1):
        label = f"packages, part {number} of {len(parts)}"
        run_pip(python, ["install", "--no-deps", "--no-compile", *part], label, log, venv)
    run_pip(python, ["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], "this package", log, venv)
    check_imports(python, log)
    print(f"{_short(venv)}: {len(pins)} packages for Python {_version(sys.version_info)}, all as pinned", flush=True)


def require_machine() -> None:
    """Raise one SetupError if Python's headers, its venv module or a C compiler are missing."""
    version, missing = _version(sys.version_info), []
    if os.environ.get("CC") and shutil.which(os.environ["CC"].split()[0]) is None:
        missing.append(f"the C compiler CC={os.environ['CC']} is not installed (unset CC or install it)")
    elif not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        missing.append("a C compiler is missing (Debian, Ubuntu: apt-get install build-essential)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing.append(f"Python.h, needed to compile packages, is missing (Debian, Ubuntu: apt-get install python{version}-dev)")
    probe = subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False)
    if probe.returncode != 0:
        missing.append(f"Python's venv module is missing (Debian, Ubuntu: apt-get install python{version}-venv)")
    if missing:
        raise SetupError("; ".join(missing))


def make_venv(venv: Path) -> Path:
    """Create the environment, or complete one whose creation was interrupted. Returns its interpreter.

    Raises:
        SetupError: ``venv`` is not a virtual environment or has another Python.
    """
    python = venv / "bin" / "python"
    if venv.exists() and (not venv.is_dir() or (any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists())):
        raise SetupError(f"{venv} exists and is not a virtual environment; move it away or choose another folder (VENV=...)")
    probe = "import sys; print('%d.%d' % sys.version_info[:2])"
    present = _output([str(python), "-c", probe]) if python.exists() else None
    if present is not None and present != _version(sys.version_info):
        raise SetupError(f"{_short(venv)} has Python {present}, not {_version(sys.version_info)}; remove it or choose another (--venv)")
    if present is None or _output([str(python), "-m", "pip", "--version"]) is None:
        create = [sys.executable, "-m", "venv", *(["--clear"] if venv.exists() else []), str(venv)]
        result = subprocess.run(create, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise SetupError(explain(result.stdout + result.stderr, f"creating {venv}", venv))
    return python


def read_pins(file: Path) -> dict[str, str]:
    """Read a requirements file of ``name==version`` lines and comments. Returns versions by package name."""
    lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("==") for line in lines if line)


def torch_build(python: Path, version: str, log: Path) -> tuple[str, str]:
    """Return ("cpu" or "cuda", full version) of the installed torch, or of the one that pip would install; downloads nothing."""
    installed = _output(
        [str(python), "-c", "from importlib.metadata import metadata as m; d = m('torch'); print(d['Version'], d.get_all('Requires-Dist'))"]
    )
    if installed is not None and installed.partition(" ")[0].partition("+")[0] == version:
        return ("cuda" if _NEEDS_CUDA.search(installed) else "cpu"), installed.partition(" ")[0]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            "install",
            "--dry-run",
            "--no-deps",
            "--ignore-installed",
            "--use-feature=fast-deps",
            "--report",
            str(report),
            f"torch=={version}",
        ]
        run_pip(python, command, "looking for torch", log, python.parent.parent)
        [found] = json.loads(report.read_text(encoding="utf-8"))["install"]
    build = "cuda" if _NEEDS_CUDA.search(str(found["metadata"].get("requires_dist"))) else "cpu"
    return build, found["metadata"]["version"]


def in_parts(pins: dict[str, str], first: Sequence[str]) -> list[list[str]]:
    """Split requirements into parts: each of ``first`` and each CUDA library alone, since they are large; the rest ``PART`` at a time."""
    large = [*first, *(name for name in pins if name.startswith("nvidia-") or name == "triton")]
    alone = [[f"{name}=={pins[name]}"] for name in dict.fromkeys(large)]
    rest = [f"{name}=={version}" for name, version in pins.items() if name not in large]
    return alone + [rest[begin : begin + PART] for begin in range(0, len(rest), PART)]


def require_space(venv: Path, gigabytes: float) -> None:
    """Raise SetupError if the file system of ``venv`` has too little space for what is still missing of its ``gigabytes``."""
    present = sum(file.lstat().st_size for file in venv.rglob("*") if not file.is_dir())
    there = next(folder for folder in (venv, *venv.parents) if folder.exists())
    needed, free = gigabytes - present / 1e9, shutil.disk_usage(there).free / 1e9
    if needed > free:
        raise SetupError(
            f"{_short(venv)} needs {needed:.1f} GB more, but only {free:.1f} GB are free; free space, or choose another folder (VENV=...)"
        )


def run_pip(python: Path, arguments: list[str], label: str, log: Path, venv: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run pip with its output in ``log``, and print progress lines while it runs. ``environment``: further variables.

    Raises:
        SetupError: pip failed; the message gives the reason in one line.
    """
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    command = [str(python), "-m", "pip", arguments[0], *quiet, *arguments[1:]]
    lines: list[str] = []
    begin = time.monotonic()
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=variables) as process:
        assert process.stdout is not None
        stream = process.stdout

        def read() -> None:
            with log.open("a", encoding="utf-8") as file:
                for line in stream:
                    file.write(line)
                    file.flush()
                    lines.append(line.strip())

        reader = threading.Thread(target=read)
        reader.start()
        while True:
            try:
                process.wait(SILENCE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                doing = next(filter(_DOING.match, reversed(lines)), "")
                print(f"  {label}: {time.monotonic() - begin:.0f} s; {doing[:90]}", flush=True)
        reader.join()
    if process.returncode != 0:
        raise SetupError(explain("\n".join(lines), label, venv))


def explain(output: str, what: str, venv: Path) -> str:
    """Summarise the output of a failed installation in one line."""
    errors = [line for line in output.splitlines() if line.startswith("ERROR:") or "error:" in line.lower()]
    again = "`make setup` continues where it stopped"
    if "No space left on device" in output or "Disk quota exceeded" in output:
        return f"{what}: the disk is full ({venv} or the temporary folder {tempfile.gettempdir()}, see TMPDIR); free some space; {again}"
    unreachable = _UNREACHABLE.search(output)
    if unreachable:
        return f"{what}: cannot reach the package index ({unreachable.group()}); check network and proxy; {again}"
    unknown = re.search(r"requirement (\S+) \(from versions: none\)", output)
    if unknown:  # with few retries pip does not print the reason
        return f"{what}: cannot reach the package index, or it has no {unknown.group(1)}; check network and proxy; {again}"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return f"{what}: pip finds no {missing.group(1)} for Python {_version(sys.version_info)} on this machine in its package indexes"
    fatal = re.search(r"\S+: fatal error: .*", output)
    if fatal:  # of a compiler; pip's own last line says only that a build failed
        errors.append(fatal.group())
    last = errors[-1] if errors else (output.strip().splitlines() or ["no output"])[-1]
    return f"{what} failed: {last[:300]} (full output of pip: {venv / 'setup.log'}); {again}"


def check_imports(python: Path, log: Path) -> None:
    """Import the stack. This also compiles its modules once, instead of in each process of the first run.

    Where ``PYTHONDONTWRITEBYTECODE`` is set, as in many images, only setup writes bytecode; without it every process would compile what it
    imports (32 s of CPU time for Megatron-Core, transformers and vLLM; 18 s with what setup writes).
    """
    print("  importing the installed packages", flush=True)
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run([str(python), "-W", "ignore", "-c", IMPORTS], capture_output=True, text=True, env=environment, check=False)
    if result.returncode != 0:
        with log.open("a", encoding="utf-8") as file:
            file.write(result.stdout + result.stderr)
        last = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise SetupError(f"everything is installed, but `{IMPORTS}` fails: {last} (full output: {log})")


def _output(command: list[str]) -> str | None:
    """Return the output of a command, or None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _version(info: tuple[int, ...] | sys._version_info) -> str:
    return f"{info[0]}.{info[1]}"


def _short(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    main()
