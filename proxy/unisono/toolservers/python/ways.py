"""What this machine allows a run: which namespaces, as whom, with which interpreter. Found out by trying, once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.errors import ConfigError

CAGE: Final = Path(__file__).with_name("cage.py")
NOBODIES: Final = range(60706, 61184)
"""User numbers that systems leave to nobody. Each run of root's is another one, so that runs at the same time cannot
touch each other, nor use up each other's processes."""
TRIAL_S: Final = 10.0
TRIAL_DISK: Final = 1 << 20
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
    """How code is run here. `drops` says that it becomes nobody; otherwise it stays whoever runs the server."""

    interpreter: str
    drops: bool
    seclusion: Seclusion

    @property
    def described(self) -> str:
        """For the line that is shown at the start."""
        network = "no network" if self.seclusion.network else "NETWORK OPEN (namespaces are not permitted here)"
        processes = "own process space" if self.seclusion.processes else "shared process space"
        user = "nobody" if self.drops else f"user {os.geteuid()}" + ("" if os.geteuid() else " (ROOT)")
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run takes place: its `script`, its working `directory`, and whose both are; None for the server's own."""

    script: Path
    directory: Path
    user: int | None


def prepare(folder: Path, code: bytes, user: int | None) -> Place:
    """Put `code` into `folder`, and give that to `user`."""
    place = Place(folder / "script.py", folder / "work", user)
    place.script.write_bytes(code)
    place.directory.mkdir()
    if user is not None:
        for path in (folder, place.script, place.directory):
            os.chown(path, user, user)
    return place


def command(
    way: Way, status: int, place: Place, limits: dict[str, int], seconds: float, disk: int = TRIAL_DISK
) -> list[str]:
    """The whole command line of a run; `status` is the open file its outcome is written to, `disk` is in bytes."""
    settings = {
        "argv": [way.interpreter, "-I", "-u", "-B", "-X", "utf8", str(place.script)],
        "directory": str(place.directory),
        "environment": environment(place.directory),
        "limits": limits,
        "user": place.user,
        "seconds": seconds,
        "disk": disk,
    }
    return [*way.seclusion.prefix, sys.executable, "-I", "-S", str(CAGE), str(status), json.dumps(settings)]


def environment(directory: Path) -> dict[str, str]:
    """All the code sees of an environment."""
    return {"PATH": SYSTEM_PATH, "HOME": str(directory), "TMPDIR": str(directory), "LANG": "C.UTF-8"}


def works(way: Way) -> bool:
    """Whether a program runs like this and its output arrives."""
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


def find_way(interpreter: str | None = None, *, as_root: bool = False) -> Way:
    """The most secluded way that works. Root's code runs as nobody unless `as_root`. Without an interpreter, the one
    of this process, or the system's where that one cannot be reached by whom the code runs as. Raises `ConfigError`
    where nothing works."""
    root = os.geteuid() == 0
    drops = root and not as_root
    system = shutil.which("python3", path=SYSTEM_PATH)
    interpreters = [interpreter] if interpreter else [sys.executable, *([system] if system else [])]
    for tried in interpreters:
        for seclusion in candidates(root):
            way = Way(tried, drops, seclusion)
            if works(way):
                return way
    whom = "as nobody (--as-root keeps root, which is dangerous)" if drops else "here"
    raise ConfigError(f"{' and '.join(interpreters)}: cannot be run {whom}; --python names another interpreter")
