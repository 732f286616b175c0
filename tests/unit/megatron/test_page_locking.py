"""A page lock that fails leaves nothing behind: with a CUDA runtime library of the test's own, which keeps errors as the real one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNTIME = """
static __thread int last;
int cudaHostRegister(void *pointer, unsigned long size, unsigned flags) { return last = size > 4096 ? 2 : 0; }
int cudaHostUnregister(void *pointer) { return last = pointer == 0 ? 1 : 0; }
int cudaPeekAtLastError(void) { return last; }
int cudaGetLastError(void) { int code = last; last = 0; return code; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : code == 1 ? "invalid argument" : "no error"; }
"""

SCRIPT = """
import ctypes, sys, types

runtime = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # before the real one, which torch's CUDA build loads so too
import torch
from vapo_mcore.megatron import offload

runtime.cudaGetErrorString.restype = ctypes.c_char_p
torch.cuda.cudart = lambda: types.SimpleNamespace(
    cudaHostRegister=lambda pointer, size, flags: runtime.cudaHostRegister(ctypes.c_void_p(pointer), ctypes.c_ulong(size), flags),
    cudaHostUnregister=lambda pointer: runtime.cudaHostUnregister(ctypes.c_void_p(pointer)),
    cudaError=int,
    cudaGetErrorString=lambda code: runtime.cudaGetErrorString(code).decode(),
)
offload.HAS_CUDA = True
pool = offload.HostPool()
pool.buffer(("policy", "params", 0), torch.empty(8))
try:
    pool.buffer(("policy", "params", 1), torch.empty(2000))
except MemoryError as error:
    print(error)
print("next kernel:", runtime.cudaPeekAtLastError(), "held:", pool.num_bytes)
pool.release("policy")
torch.cuda.cudart = lambda: types.SimpleNamespace(
    cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: runtime.cudaHostUnregister(None), cudaError=int,
    cudaGetErrorString=lambda code: runtime.cudaGetErrorString(code).decode(),
)
pool.buffer(("critic", "params", 0), torch.empty(8))
try:
    pool.release("critic")
except RuntimeError as error:
    print(error)
print("next kernel:", runtime.cudaPeekAtLastError())
"""


def test_a_failed_page_lock_does_not_fail_the_next_kernel(tmp_path: Path) -> None:
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart.so"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(library)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "cannot page-lock 8000 bytes of host memory for offloading: CUDA error 2 (out of memory)",
        "next kernel: 0 held: 32",
        "cannot unlock the host buffer ('critic', 'params', 0): CUDA error 1 (invalid argument)",
        "next kernel: 0",
    ]
