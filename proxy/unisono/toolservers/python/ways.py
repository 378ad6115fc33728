"""What this machine allows a run: which namespaces, as whom, with which interpreter. Found out by trying, once."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError

CAGE: Final = Path(__file__).with_name("cage.py")
NOBODY: Final = 65534
"""Where the system does not say who that is."""
TRIAL_S: Final = 10.0
SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"

_APART = ("--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts")


@dataclass(frozen=True, slots=True)
class Seclusion:
    """A way to start the cage: `prefix` stands before it. `processes` says that a run sees only its own processes and
    none can outlive it, `network` that it has none."""

    prefix: tuple[str, ...] = ()
    network: bool = False
    processes: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """How code is run here. `user` is who it becomes, None for whoever runs the server."""

    interpreter: str
    user: int | None
    seclusion: Seclusion

    @property
    def described(self) -> str:
        """For the line that is shown at the start."""
        network = "no network" if self.seclusion.network else "NETWORK OPEN (namespaces are not permitted here)"
        processes = "own process space" if self.seclusion.processes else "shared process space"
        user = "nobody" if self.user is not None else f"user {os.geteuid()}" + ("" if os.geteuid() else " (ROOT)")
        return f"{network}, {processes}, as {user}, {self.interpreter}"


def candidates(root: bool) -> tuple[Seclusion, ...]:
    """From the most to the least secluded. Root needs no user namespace to make the others."""
    unshare = shutil.which("unshare", path=f"{SYSTEM_PATH}:/usr/sbin:/sbin")
    if sys.platform != "linux" or unshare is None:
        return (Seclusion(),)
    users = () if root else ("--user", "--map-current-user")
    return (
        Seclusion((unshare, *users, "--net", *_APART, "--"), network=True, processes=True),
        # Containers often refuse another /proc but not the rest.
        Seclusion((unshare, *users, "--net", "--"), network=True),
        Seclusion(),
    )


def command(way: Way, status: int, code: Path, directory: Path, limits: dict[str, int], seconds: float) -> list[str]:
    """The whole command line of a run; `status` is the open file its outcome is written to."""
    settings = {
        "argv": [way.interpreter, "-I", "-u", "-B", "-X", "utf8", str(code)],
        "directory": str(directory),
        "environment": environment(directory),
        "limits": limits,
        "user": way.user,
        "seconds": seconds,
    }
    return [*way.seclusion.prefix, sys.executable, "-I", "-S", str(CAGE), str(status), json.dumps(settings)]


def environment(directory: Path) -> dict[str, str]:
    """All the code sees of an environment."""
    return {"PATH": SYSTEM_PATH, "HOME": str(directory), "TMPDIR": str(directory), "LANG": "C.UTF-8"}


def works(way: Way) -> bool:
    """Whether a program runs like this and its output arrives."""
    with tempfile.TemporaryDirectory(prefix="unisono-python-") as folder:
        code = Path(folder, "script.py")
        code.write_text("print('it works')")
        if way.user is not None:
            os.chown(folder, way.user, way.user)
            os.chown(code, way.user, way.user)
        end, status = os.pipe()
        try:
            tried = subprocess.run(  # noqa: S603
                command(way, status, code, Path(folder), {}, TRIAL_S),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=(status,),
                env={},
                timeout=2 * TRIAL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        finally:
            os.close(end)
            os.close(status)
    return tried.stdout.strip() == b"it works"


def nobody() -> int:
    """Who may do least."""
    try:
        return pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return NOBODY


def find_way(interpreter: str | None = None, *, as_root: bool = False) -> Way:
    """The most secluded way that works. Root's code runs as nobody unless `as_root`. Without an interpreter, the one
    of this process, or the system's where that one cannot be reached by whom the code runs as. Raises `ConfigError`
    where nothing works."""
    root = os.geteuid() == 0
    user = nobody() if root and not as_root else None
    system = shutil.which("python3", path=SYSTEM_PATH)
    interpreters = [interpreter] if interpreter else [sys.executable, *([system] if system else [])]
    for tried in interpreters:
        for seclusion in candidates(root):
            way = Way(tried, user, seclusion)
            if works(way):
                return way
    whom = "as nobody (--as-root keeps root, which is dangerous)" if user is not None else "here"
    raise ConfigError(f"{' and '.join(interpreters)}: cannot be run {whom}; --python names another interpreter")
