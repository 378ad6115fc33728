"""Choice of the sandbox for code on this machine: kinds of sandbox are tried at startup.

A sandbox consists of namespaces, a user id, a system call filter and an interpreter.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError
from unisono.toolservers.python.syscall_filter import FilterUnavailable, compile_filter

SANDBOX_SCRIPT: Final = Path(__file__).with_name("sandbox.py")
# User ids that systems leave unused. If the server runs as root, each run has a different id. Concurrent runs then
# cannot access each other or exhaust each other's process limits.
NOBODIES: Final = range(60706, 61184)
# Time limit of the trial program in each kind of sandbox, in seconds.
TRIAL_S: Final = 10.0
TRIAL_DISK: Final = 1 << 20
TRIAL_MEMORY: Final = 1 << 30
SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
PR_SET_DUMPABLE: Final = 4

# Paths of the machine that an isolated run can read in addition to its interpreter: programs, libraries, settings.
SYSTEM_FILES: Final = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/group", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types"),
    *("/etc/nsswitch.conf", "/etc/passwd", "/etc/ssl/certs", "/etc/timezone"),
)
_UNSHARE: Final = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--")
_PATHS: Final = "import sys; print(*{sys.executable, sys.prefix, sys.base_prefix, sys.exec_prefix}, sep=chr(10))"


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Sandbox for code.

    With `drops`, the code runs with an unused user id instead of the server's. With `is_isolated`, the code has its own
    namespaces, and a file system that contains only `paths`. `program` is the compiled filter of system calls, or empty
    if there is none. `missing` describes the protections that this sandbox lacks.
    """

    interpreter: str
    drops: bool
    is_isolated: bool
    program: str = ""
    paths: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def has_network(self) -> bool:
        return not (self.is_isolated or self.program)

    @property
    def described(self) -> str:
        """Summary for the line that is printed at startup."""
        network = "NETWORK OPEN" if self.has_network else "no network"
        processes = "own process and file space" if self.is_isolated else "SHARED process and file space"
        calls = "filtered system calls" if self.program else "ALL system calls"
        user = "nobody" if self.drops else f"user {os.geteuid()}" + ("" if os.geteuid() else " (ROOT)")
        return f"{network}, {processes}, {calls}, as {user}, {self.interpreter}"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Directory of a run: its `script`, its working `directory`, and their owner.

    `user` is None if the server's user owns them.
    """

    script: Path
    directory: Path
    user: int | None


def prepare(folder: Path, code: bytes, user: int | None) -> RunDirectory:
    """Write `code` into `folder` and create the working directory.

    Only `user` can read the code. The working directory belongs to `user`.
    """
    place = RunDirectory(folder / "script.py", folder / "work", user)
    place.script.write_bytes(code)
    place.directory.mkdir()
    (folder / "root").mkdir()
    if user is not None:
        os.chown(place.directory, user, user)
        # `user` must not own the folder, because the owner could move the working directory, whose files are measured.
        for path, mode in ((folder, 0o710), (place.script, 0o640)):
            os.chown(path, -1, user)
            path.chmod(mode)
    return place


def command(
    way: Sandbox,
    status: int,
    place: RunDirectory,
    limits: dict[str, int],
    seconds: float,
    disk: int = TRIAL_DISK,
    memory: int = TRIAL_MEMORY,
) -> list[str]:
    """Build the command line of a run.

    `status` is the file descriptor to which the outcome is written. `disk` and `memory` are in bytes.
    """
    settings = {
        "argv": [way.interpreter, "-I", "-u", "-B", "-X", "utf8", str(place.script)],
        "directory": str(place.directory),
        "environment": environment(place.directory),
        "limits": limits,
        "user": place.user,
        "seconds": seconds,
        "disk": disk,
        "memory": memory,
        "filter": way.program,
        "root": str(place.directory.with_name("root")) if way.is_isolated else None,
        "paths": [*way.paths, str(place.script)],
    }
    prefix = unshare() if way.is_isolated else ()
    return [*prefix, sys.executable, "-I", "-S", str(SANDBOX_SCRIPT), str(status), json.dumps(settings)]


def unshare() -> tuple[str, ...]:
    """Return the command prefix that starts a program in new namespaces; empty if unavailable.

    If this process runs as root, no user namespace is created.
    """
    found = shutil.which("unshare", path=f"{SYSTEM_PATH}:/usr/sbin:/sbin") if sys.platform == "linux" else None
    user = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    return (found, *user, *_UNSHARE) if found is not None else ()


def environment(directory: Path) -> dict[str, str]:
    """Return the whole environment of the code."""
    return {"PATH": SYSTEM_PATH, "HOME": str(directory), "TMPDIR": str(directory), "LANG": "C.UTF-8"}


def is_working(way: Sandbox) -> bool:
    """Return True if a trial program runs in this sandbox and its output is received."""
    if way.is_isolated and not unshare():
        return False
    with tempfile.TemporaryDirectory(prefix="unisono-python-") as folder:
        place = prepare(Path(folder), b"print('it works')", NOBODIES[-1] if way.drops else None)
        end, status = os.pipe()
        try:
            tried = subprocess.run(  # noqa: S603
                command(way, status, place, {}, TRIAL_S),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(status,),
                env={},
                start_new_session=True,
                timeout=2 * TRIAL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        finally:
            os.close(end)
            os.close(status)
    return tried.stdout.strip() == b"it works"


def close_to_inspection() -> None:
    """Deny other processes of this user access to /proc/PID/environ, /proc/PID/mem and ptrace."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def find_sandbox(interpreter: str | None = None, *, as_root: bool = False, unsafe: bool = False) -> Sandbox:
    """Return the most isolated sandbox that works.

    If the server runs as root, the code gets a different user id, unless `as_root`. Without `interpreter`, the
    interpreter of this process is tried, then the system's. Raises `ConfigError` if no sandbox works. Unless `unsafe`,
    also raises `ConfigError` if the sandbox cannot protect the server.
    """
    drops = os.geteuid() == 0 and not as_root
    system = shutil.which("python3", path=SYSTEM_PATH)
    interpreters = [interpreter] if interpreter else [sys.executable, *([system] if system else [])]
    for is_isolated in (True, False):
        for tried in interpreters:
            way = make_sandbox(tried, drops=drops, is_isolated=is_isolated)
            if is_working(way):
                if way.missing and not unsafe:
                    raise ConfigError(f"code could attack this server: {'; '.join(way.missing)}. {ADVICE}")
                return way
    user = " by the user `nobody`, as which the server runs code" if drops else ""
    root = " (or keep root with --as-root, which is dangerous)" if drops else ""
    raise ConfigError(
        f"{' and '.join(interpreters)}: cannot be run{user}; choose another interpreter with --python{root}"
    )


ADVICE: Final = "Run the server in its own container or virtual machine and add --unsafe there"


def make_sandbox(interpreter: str, *, drops: bool, is_isolated: bool) -> Sandbox:
    """Return a sandbox. Its `missing` describes the protections that it lacks."""
    way = Sandbox(interpreter, drops, is_isolated, paths=(*SYSTEM_FILES, *interpreter_paths(interpreter)))
    missing = []
    try:
        way = replace(way, program=compile_filter(has_network_namespace=is_isolated))
    except FilterUnavailable as error:
        missing.append(f"no system call filter: {error}")
    if not (is_isolated or drops):
        why = (
            "namespaces are not permitted here, or Linux is older than 5.12"
            if unshare()
            else "namespaces require Linux and the `unshare` program"
        )
        missing.append(f"{why}, and only a server that runs as root can give the code a different user id")
    return replace(way, missing=tuple(missing))


def interpreter_paths(interpreter: str) -> tuple[str, ...]:
    """Return files and directories that an interpreter needs.

    Directories that contain the home directory are excluded.
    """
    try:
        completed = subprocess.run(  # noqa: S603
            [interpreter, "-I", "-c", _PATHS], capture_output=True, text=True, timeout=TRIAL_S, check=False, env={}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises for a user without one
    homes = (Path(home), Path(os.path.realpath(home)))
    paths = sorted({interpreter, *completed.stdout.splitlines()})
    return tuple(path for path in paths if not any(home.is_relative_to(path) for home in homes))
