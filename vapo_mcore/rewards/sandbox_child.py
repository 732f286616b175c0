"""Script that runs a model-written program in a restricted process. Imports the standard library only, nothing of this package.

``python -I sandbox_child.py JOB RESULTS`` takes the file descriptors to read the job from and to write results to. The job is JSON with
``program`` and either ``calls`` (function name and list of argument lists; writes one JSON line per call) or ``tests`` (Python code;
``proof`` is written if it ends without an error) or neither (the program reads stdin and writes stdout). Before the program is compiled,
the process irrevocably drops all rights it does not need; if that fails it exits with ``UNPROTECTED``.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

UNPROTECTED = 97

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _DIE_WITH_PARENT = 38, 22, 1
_X86_64 = 0xC000003E
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

# Denied x86-64 system calls by purpose. All others are allowed.
_NETWORK = (41, 42, 43, 44, 46, 49, 50, 288, 307)  # socket connect accept sendto sendmsg bind listen accept4 sendmmsg
_PROCESSES = (57, 58, 59, 322)  # fork vfork execve execveat
# ptrace, signals by queue, priorities and schedulers, memory of others, pidfds
_OTHERS = (101, 129, 141, 142, 144, 200, 203, 251, 297, 310, 311, 312, 314, 424, 434, 438, 440)
_FILES = (
    76, 77, 82, 83, 84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 132, 133, 188, 189, 190, 197, 198, 199, 235,
    258, 259, 260, 261, 263, 264, 265, 266, 268, 280, 316, 319, 447, 452,
)  # fmt: skip  # truncate rename mkdir rmdir creat link unlink symlink chmod chown utime mknod xattr and their *at forms, memfds
_SYSTEM = (
    29, 30, 64, 68, 135, 155, 160, 161, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 175, 176, 227, 240, 241, 246, 248, 249, 250,
    272, 298, 300, 301, 302, 303, 304, 305, 308, 313, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442,
)  # fmt: skip  # shared memory and queues, limits, mounts, modules, keys, namespaces, perf, bpf, io_uring
_OPEN, _OPENAT, _CLONE, _KILL_CALL, _TGKILL, _FCNTL = 2, 257, 56, 62, 234, 72
_OWNERS = (8, 10, 15)  # of fcntl: who is sent signals about a descriptor, and which
_ABSENT = (435, 437)  # clone3, openat2: seccomp cannot inspect their arguments, and libraries work without them
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x10000


def _filter(pid: int) -> list[tuple[int, int, int, int]]:
    """Return the seccomp program as (code, jump if true, jump if false, operand) instructions, see seccomp(2)."""
    load, equal, above, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    no, absent, yes = _ERRNO | _EPERM, _ERRNO | _ENOSYS, _ALLOW
    program = [(load, 0, 0, 4), (equal, 1, 0, _X86_64), (give, 0, 0, _KILL)]
    program += [(load, 0, 0, 0), (above, 0, 1, 0x40000000), (give, 0, 0, _KILL)]
    for number in (*_NETWORK, *_PROCESSES, *_OTHERS, *_FILES, *_SYSTEM):
        program += [(equal, 0, 1, number), (give, 0, 0, no)]
    for number in _ABSENT:
        program += [(equal, 0, 1, number), (give, 0, 0, absent)]
    for number, argument in ((_OPEN, 1), (_OPENAT, 2)):  # read-only
        program += [(equal, 0, 4, number), (load, 0, 0, 16 + 8 * argument), (any_bit, 0, 1, _WRITING), (give, 0, 0, no), (give, 0, 0, yes)]
    program += [(equal, 0, 4, _CLONE), (load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, no), (give, 0, 0, yes)]
    for number in (_KILL_CALL, _TGKILL):  # itself only
        program += [(equal, 0, 4, number), (load, 0, 0, 16), (equal, 1, 0, pid), (give, 0, 0, no), (give, 0, 0, yes)]
    program += [(equal, 0, 2 + 2 * len(_OWNERS), _FCNTL), (load, 0, 0, 24)]
    for command in _OWNERS:
        program += [(equal, 0, 1, command), (give, 0, 0, no)]
    return [*program, (give, 0, 0, yes), (give, 0, 0, yes)]


def _give_up_system_calls(libc: ctypes.CDLL) -> bool:
    program = _filter(os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    return bool(libc.prctl(_SET_SECCOMP, 2, ctypes.byref(head), 0, 0) == 0)


def _give_up_files(libc: ctypes.CDLL, readable: list[str]) -> bool:
    """Restrict reading to ``readable`` with Landlock. Returns False if the kernel lacks it; reading is then unrestricted."""
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return False
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", rights, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(create, attributes, len(attributes), 0)
    if rules < 0:
        return False
    for path in readable:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        read = 0b1100 if os.path.isdir(path) else 0b100  # read files, list directories
        libc.syscall(add, rules, 1, struct.pack("=Qi", read, descriptor), 0)
        os.close(descriptor)
    return bool(libc.syscall(restrict, rules, 0) == 0)


def protect(limits: dict[str, int]) -> bool:
    """Apply limits, Landlock and seccomp, in this order. Returns whether reading is restricted; exits if seccomp is unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0)
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        os._exit(UNPROTECTED)
    readable = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"}
    restricted = _give_up_files(libc, [*sorted(readable), "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"])
    if os.uname().machine != "x86_64" or not _give_up_system_calls(libc):
        os._exit(UNPROTECTED)
    return restricted


def main() -> None:
    job_file, results = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(job_file, encoding="utf-8") as stream:
        job = json.load(stream)
    restricted = protect(job["limits"])
    if job.get("report"):
        os.write(results, json.dumps({"reading_restricted": restricted}).encode() + b"\n")
    sys.argv = ["program"]
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(job["program"], "<program>", "exec"), space)
    if "calls" in job:
        name, argument_lists = job["calls"]
        function = space[name] if name in space else getattr(space["Solution"](), name)
        for arguments in argument_lists:
            os.write(results, json.dumps(function(*arguments), default=list).encode() + b"\n")
    elif "tests" in job:
        exec(compile(job["tests"], "<tests>", "exec"), space)
        os.write(results, job["proof"].encode() + b"\n")


if __name__ == "__main__":
    main()
