"""Measure on a GPU, in one command: correctness, speed and memory.

    python benchmarks/gpu_step.py                    on a machine with a CUDA device: a random model of 1.5 billion parameters
    python benchmarks/gpu_step.py --model FOLDER     the same with a given model
    python benchmarks/gpu_step.py --small            a tiny model on any device
    python benchmarks/gpu_step.py --skip machine,memory

Each part is a check of ``vapo-mcore certify`` (docs/certify.md) or of ``gpu_checks.py``. One that fails does not hide the others, nor
does one that crashes or hangs: the rest runs in another process. Prints a table and writes ``DIR/gpu_step.json`` (docs/gpu_status.md
explains it); ``DIR/process_N`` has what each process printed and its certificate. Exit code: 0, 1 after a warning, 2 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.gpu_model import QWEN_1_5B, SMALL, write_model, write_recipe  # noqa: E402
from vapo_mcore.certify.certificate import FILE_NAME, PARTIAL_NAME  # noqa: E402

FORMAT = 1
PARTS: Mapping[str, tuple[str, str]] = {
    "machine": ("machine", "the doctor's findings, plan's verdict"),
    "logprobs": ("trainer", "parity of log-probs and hidden states with transformers in float32"),
    "values": ("critic", "parity of values with transformers in float32"),
    "engine": ("engine", "weights and log-probs of the rollout engine against the trainer's"),
    "offload": ("offload", "ten cycles of offloading, bit for bit"),
    "rates": ("rates", "tokens/s and model FLOPs utilisation of log-probs, training and decoding; GB/s of offloading; seconds of a sync"),
    "sleep": (f"{HERE / 'gpu_checks.py'}:sleep", "seconds in which the engine sleeps and wakes up"),
    "memory": (f"{HERE / 'gpu_checks.py'}:memory", "peak of every stage against plan's prediction"),
    "logprob_memory": (f"{HERE / 'gpu_checks.py'}:logprob_memory", "what log-probs need besides the logits"),
}
"""Part -> check of ``certify``, what it measures."""
EXIT_CODES = {"holds": 0, "information": 0, "not applicable": 0, "skipped": 0, "warning": 1, "fails": 2}


def main() -> int:
    listed = "\n".join(f"  {name:<15} {what}" for name, (_, what) in PARTS.items())
    parser = argparse.ArgumentParser(description=f"{__doc__}\nParts:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder with a tokenizer (default: random weights)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--engine", choices=("vllm", "transformers"), help="rollout engine (default: vllm where it is installed)")
    parser.add_argument("--skip", default="", metavar="PARTS", help="parts to leave out, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_step"), metavar="DIR", help="folder for the results (runs/gpu_step)")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of each part (15)")
    parser.add_argument("--parts", nargs=2, help=argparse.SUPPRESS)  # of a process that this program starts, and the recipe
    options = parser.parse_args()
    if options.parts is not None:
        return run_here(options.parts[0].split(","), options.parts[1], options.output)
    skipped = [name.strip() for name in options.skip.split(",") if name.strip()]
    if unknown := sorted(set(skipped) - set(PARTS)):
        parser.error(f"--skip {', '.join(unknown)}: unknown; there are {', '.join(PARTS)}")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g}: use a positive number")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: has no config.json")
    import torch

    if not torch.cuda.is_available() and not options.small:
        parser.error("no CUDA device; --small runs everything that needs none on the CPU")
    return measure([name for name in PARTS if name not in skipped], skipped, options)


def measure(names: Sequence[str], skipped: Sequence[str], options: argparse.Namespace) -> int:
    """Run the parts, write the results and print them; returns the exit code."""
    import torch

    output: Path = options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    size = SMALL if options.small else QWEN_1_5B
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    engine = options.engine or ("vllm" if importlib.util.find_spec("vllm") is not None else "transformers")
    model = options.model.absolute() if options.model is not None else output / "model"
    print(f"{device}, rollout by {engine}; results in {options.output}", flush=True)
    if options.model is None:
        print(f"  writing {model} (random weights)", flush=True)
        shutil.rmtree(model, ignore_errors=True)
        write_model(model, size)
    parts = run_parts(list(names), write_recipe(output, model, size, engine), output, 60 * options.minutes)
    parts |= {name: {"verdict": "skipped"} for name in skipped}
    result = {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": device,
        "torch": torch.__version__,
        "engine": engine,
        "model": str(options.model) if options.model is not None else f"random weights: {size}",
        "parts": parts,
        "numbers": numbers(parts),
    }
    file = output / "gpu_step.json"
    file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if options.model is None:
        shutil.rmtree(model, ignore_errors=True)
    print("\n".join(summary(parts)))
    print(f"written: {file}")
    return max((EXIT_CODES[part["verdict"]] for part in parts.values()), default=0)


# --------------------------------------------------------------------------------------------------------------------- processes


def run_here(names: Sequence[str], recipe: str, output: Path) -> int:
    """Run parts in this process. Returns certify's exit code."""
    from vapo_mcore import cli

    return cli.main(["certify", recipe, "--checks", ",".join(PARTS[name][0] for name in names), "--output", str(output)])


def run_parts(names: list[str], recipe: Path, output: Path, seconds: float) -> dict[str, Any]:
    """Return the parts' records. Parts that come after one that ends its process run in the next one; ``seconds``: limit of each part."""
    found: dict[str, Any] = {}
    left, number = list(names), 0
    while left:
        number += 1
        run = Run(left, recipe, output / f"process_{number}", seconds)
        for name, part in run.parts():
            found[name] = part
            print("\n".join([f"{name}: {PARTS[name][1]}", *table(part)]), flush=True)
        left = [name for name in left if name not in found]
        if run.code == 2 and not run.records():  # the configuration itself is refused, in every process
            found |= {name: {**run.failure(), "measurements": []} for name in left}
            break
    return found


class Run:
    """A process with parts, started as this process was.

    Args:
        folder: for its certificate and ``output.log``.
        seconds: it is ended if a part takes longer.
    """

    def __init__(self, names: Sequence[str], recipe: Path, folder: Path, seconds: float) -> None:
        self.names, self.folder, self.seconds = list(names), folder, seconds
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self.log = folder / "output.log"
        # The interpreter with its options and the program: what comes before this program's own arguments.
        program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
        command = [*program, "--parts", ",".join(names), str(recipe), "--output", str(folder)]
        with self.log.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.code: int | None = None
        self.ended = ""

    def records(self) -> dict[str, Any]:
        """Return the records of the complete checks, by part."""
        try:
            path = self.folder / FILE_NAME
            path = path if path.is_file() else self.folder / PARTIAL_NAME  # of a process that crashed
            checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
        except OSError:
            return {}
        return {name: checks[PARTS[name][0]] for name in self.names if PARTS[name][0] in checks}

    def parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each part when it is done, and at the end the one that ended the process."""
        told: set[str] = set()
        since = time.monotonic()
        try:
            while True:
                ended = self.process.poll() is not None
                late = not ended and time.monotonic() - since > self.seconds
                for name, record in self.records().items():
                    if name not in told:
                        told.add(name)
                        since = time.monotonic()
                        yield name, {key: record[key] for key in ("verdict", "seconds", "measurements", "details")}
                if ended or late:
                    break
                time.sleep(0.2)
        finally:
            self.code = self.process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it has started
            self.process.wait()
        if self.code is None:
            self.ended = f"not done after {self.seconds / 60:g} minutes (--minutes)"
        else:
            self.ended = f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"
        missing = [name for name in self.names if name not in told]
        if missing:
            yield missing[0], {**self.failure(), "seconds": round(time.monotonic() - since, 1), "measurements": []}
        elif self.code not in (0, 1, 2):  # everything was measured, but the process failed at its end
            last = self.names[-1]
            yield last, {**self.records()[last], **self.failure()}

    def failure(self) -> dict[str, Any]:
        """Describe how the process ended, with the last line that names an error, else its last line."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"error|fault", line, re.IGNORECASE)]
        last = (errors or lines or ["no output"])[-1][:400]
        return {"verdict": "fails", "message": f"{self.ended}: {last}", "log": str(self.log)}


# ------------------------------------------------------------------------------------------------------------------------ output


def table(part: Mapping[str, Any]) -> list[str]:
    """Format a part's measurements, one per line, with the remedies of those that fail."""
    lines = [f"  {'fails':<14} {part['message']} (log: {part['log']})"] if "message" in part else []
    for entry in part["measurements"]:
        tolerance = f" [{entry['tolerance']}]" if entry["tolerance"] else ""
        lines.append(f"  {entry['verdict']:<14} {entry['what']}: {entry['measured']}{tolerance}")
        if entry["remedy"] and entry["verdict"] in ("fails", "warning"):
            lines.append(f"  {'':<14} remedy: {entry['remedy']}")
    return lines


def summary(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format one line per part."""
    return ["", *(f"{name:<15} {part['verdict']:<15} {part.get('seconds', 0):>7.1f} s" for name, part in parts.items())]


def numbers(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of all measurements that have one, by "part: measurement"."""
    return {
        f"{name}: {entry['what']}": entry["value"]
        for name, part in parts.items()
        for entry in part.get("measurements", ())
        if entry["value"] is not None
    }


if __name__ == "__main__":
    sys.exit(main())
