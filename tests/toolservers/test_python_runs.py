"""Code in the sandbox: output, restrictions and cleanup.

All tests use real processes. Tests that need namespaces run where the system permits them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.processes import PROC, listed
from tests.listening import listening
from unisono.errors import ConfigError
from unisono.toolservers.python import executor
from unisono.toolservers.python.executor import MIB, Busy, CapturedOutput, CodeRunner, RunLimits, RunOutcome
from unisono.toolservers.python.sandbox_probe import (
    NOBODIES,
    SYSTEM_PATH,
    Sandbox,
    find_sandbox,
    is_working,
    make_sandbox,
)

SHORT = RunLimits(seconds=2.0, cpu_s=10, memory=256 * MIB, file=MIB, files=32, processes=16)


@pytest.fixture(scope="session")
def way() -> Sandbox:
    return find_sandbox(unsafe=True)


@pytest.fixture(params=[True, False], ids=["isolated", "no namespaces"])
def any_way(request: pytest.FixtureRequest, way: Sandbox) -> Sandbox:
    """Every kind of sandbox that this system permits."""
    for interpreter in (way.interpreter, shutil.which("python3", path=SYSTEM_PATH) or sys.executable):
        tried = make_sandbox(interpreter, drops=way.drops, is_isolated=request.param)
        if is_working(tried):
            return tried
    pytest.skip("not permitted on this system")


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder for the runs of one test. After the test, it has to be empty."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder)
        found.chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield found
        assert list(found.iterdir()) == []


def processes(mark: str) -> int:
    """Return the number of processes whose command line contains the mark."""
    if not PROC:
        return sum(mark in command for _, _, _, command in listed())
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            count += mark.encode() in path.read_bytes().replace(b"\0", b" ")
    return count


async def gone(mark: str) -> None:
    """Wait until the killed processes have disappeared."""
    for _ in range(100):
        if not processes(mark):
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"{processes(mark)} processes are still there")


async def run(code: str, way: Sandbox, limits: RunLimits = SHORT) -> RunOutcome:
    return await CodeRunner(way, limits).run(code)


RUNS = {
    "prints": ("print('Grüße')", "Grüße\n", 0, ""),
    "stderr in order": (
        "import sys\nprint(1)\nprint(2, file=sys.stderr)\nprint(3)",
        "1\n2\n3\n",
        0,
        "",
    ),
    "no output": ("1 + 1", "", 0, "[No output. Use print() to see values.]"),
    "exit code": ("import sys; sys.exit(3)", "", 3, "[The program exited with code 3.]"),
    "empty folder": ("import os; print(os.listdir('.'))", "[]\n", 0, ""),
    "writable folder": ("open('a', 'w').write('b'); print(open('a').read())", "b\n", 0, ""),
    "empty stdin": ("import sys; print(repr(sys.stdin.read()))", "''\n", 0, ""),
    "isolated mode": ("import sys; print(sys.flags.isolated)", "1\n", 0, ""),
    "environment variables": ("import os; print(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'TMPDIR']\n", 0, ""),
    "no open files": (
        "import os\nprint([n for n in map(int, os.listdir('/dev/fd')) if n > 2 and os.path.exists(f'/dev/fd/{n}')])",
        "[]\n",
        0,
        "",
    ),
    "Harmony markers are text": ("print('<|end|>')", "<|end|>\n", 0, ""),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("code", "logs", "exit_code", "remark"), RUNS.values(), ids=RUNS)
async def test_output_is_returned(way: Sandbox, code: str, logs: str, exit_code: int, remark: str) -> None:
    outcome = await run(code, way)
    assert (outcome.logs, outcome.exit_code, outcome.timed_out) == (logs, exit_code, False)
    assert outcome.remark == remark


async def test_a_traceback_shows_its_line(way: Sandbox) -> None:
    outcome = await run("x = 1\nprint(x / 0)", way)
    assert 'script.py", line 2' in outcome.logs
    assert outcome.logs.endswith("ZeroDivisionError: division by zero\n")
    assert (outcome.exit_code, outcome.remark) == (1, "")


async def test_runs_share_no_state(way: Sandbox) -> None:
    await run("x = 1; open('kept', 'w').write('x')", way)
    assert "NameError" in (await run("print(x)", way)).logs
    assert (await run("import os; print(os.path.exists('kept'))", way)).logs == "False\n"


async def test_code_cannot_read_the_keys_of_the_server(way: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_MASTER_KEY", "sk-very-secret")
    code = "import os, glob\nfor p in ['/proc/self/environ', f'/proc/{os.getppid()}/environ']:\n"
    code += "  try: print(open(p).read())\n  except OSError as e: print('refused')\nprint(dict(os.environ))"
    assert "sk-very-secret" not in (await run(code, way)).logs


ENDLESS_PROGRAMS = {
    "sleeping": "import time; time.sleep(60)",
    "computing": "while True: pass",
    "ignores signals": "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)",
    "closed output": "import os, time\nos.close(1); os.close(2); time.sleep(60)",
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("code", ENDLESS_PROGRAMS.values(), ids=ENDLESS_PROGRAMS)
async def test_a_run_ends_at_its_time_limit(any_way: Sandbox, code: str) -> None:
    began = time.monotonic()
    outcome = await run("print('began', flush=True)\n" + code, any_way, RunLimits(seconds=0.7))
    assert 0.7 <= time.monotonic() - began < 4
    assert (outcome.timed_out, outcome.logs) == (True, "began\n")
    assert outcome.remark == "[The program exceeded its time limit of 0.7 s and was stopped.]"


@pytest.mark.slow
async def test_cpu_time_has_a_separate_limit(way: Sandbox) -> None:
    began = time.monotonic()
    outcome = await run("while True: pass", way, RunLimits(seconds=20.0, cpu_s=1))
    assert time.monotonic() - began < 10
    assert (outcome.exit_code or 0) < 0
    assert not outcome.timed_out


LIMITED = {
    "memory at once": ("x = bytearray(10**9)", "MemoryError"),
    "memory in steps": ("x = []\nwhile True: x.append(bytearray(10**6))", "MemoryError"),
    "large file": ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)", ""),
    "many files": ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    "many threads": (
        "from threading import *\nfor _ in range(100): Thread(target=Event().wait, args=(9,), daemon=True).start()",
        "can't start new thread",
    ),
}


@pytest.mark.parametrize(("code", "said"), LIMITED.values(), ids=LIMITED)
async def test_a_resource_limit_ends_the_program(way: Sandbox, code: str, said: str) -> None:
    outcome = await run(code, way)
    assert outcome.exit_code not in (0, None)
    assert said in outcome.logs
    assert not outcome.timed_out


FILLING = {
    "many files": "n = 0\nwhile True:\n  n += 1\n  open(f'f{n}', 'wb').write(b'x' * 10**6)",
    "files in folders": "import os\nwhile True:\n  os.mkdir('d'); os.chdir('d'); open('f', 'wb').write(b'x' * 10**6)",
    "endless empty files": "n = 0\nwhile True:\n  n += 1\n  open(f'f{n}', 'w').close()",
    "deeply nested files": (
        "import os\nfor _ in range(2100): os.mkdir('d'); os.chdir('d')\n"
        "n = 0\nwhile True:\n  n += 1\n  open(f'f{n}', 'wb').write(b'x' * 10**6)"
    ),
    "deleted files": (
        "import os, time\nkept = []\nwhile True:\n"
        "  try: kept.append(open('f', 'wb'))\n  except OSError: time.sleep(60)\n"
        "  os.unlink('f')\n  kept[-1].write(b'x' * 10**6)"
    ),
    "deleted mapped files": (
        "import mmap, os, time\nkept = []\nwhile True:\n"
        "  try: file = open('f', 'w+b')\n  except OSError: time.sleep(60)\n  os.unlink('f')\n"
        "  file.write(b'x' * 10**6)\n  file.flush()\n"
        "  try: kept.append(mmap.mmap(file.fileno(), 4096))\n  except OSError: time.sleep(60)"
    ),
    "from a child": (
        "import os, time\nif os.fork(): time.sleep(60)\nn = 0\n"
        "while True:\n  n += 1\n  open(f'f{n}', 'wb').write(b'x' * 10**6)"
    ),
}


SLOW_FILLING = {"many files", "files in folders", "endless empty files", "from a child"}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, id=name, marks=pytest.mark.slow if name in SLOW_FILLING else ())
        for name, code in FILLING.items()
    ],
)
async def test_disk_usage_is_limited(any_way: Sandbox, code: str) -> None:
    before = shutil.disk_usage(tempfile.gettempdir()).used
    outcome = await run(code, any_way, RunLimits(seconds=20.0, disk=16 * MIB))
    if not (any_way.is_isolated and "No space left on device" in outcome.logs):
        # A deleted file is freed with its process, so the file system has space again.
        assert outcome.disk_full
        assert outcome.remark == "[The program exceeded its limit of 16 MiB for files and was stopped.]"
    assert not outcome.timed_out
    # Other processes write to this disk too, but far less than a run would leave.
    assert shutil.disk_usage(tempfile.gettempdir()).used - before < 1024 * MIB


async def test_files_in_world_writable_folders_are_counted_and_deleted(any_way: Sandbox) -> None:
    if not any_way.drops:
        pytest.skip("needs root, so that each run has its own user")
    mark = f"unisono-left-{time.monotonic_ns()}"
    folders = [Path(place) / mark for place in ("/tmp", "/dev/shm")]
    code = f"import os\nfor p in {list(map(str, folders))}: os.mkdir(p); open(p + '/f', 'wb').write(b'x' * 10**6)"
    assert (await run(code, any_way)).exit_code == 0
    assert [path for path in folders if path.exists()] == []
    filling = f"import os\nos.mkdir('{folders[0]}')\nn = 0\nwhile True:\n  n += 1\n  "
    filling += f"open(f'{folders[0]}/{{n}}', 'wb').write(b'x' * 10**6)"
    assert (await run(filling, any_way, RunLimits(seconds=20.0, disk=16 * MIB))).disk_full
    assert not folders[0].exists()


# Attempts to have files that are not counted or not deleted. Printed output means success.
ESCAPES = {
    "outside of the working directory": "open('../f', 'wb')",
    "moved working directory": "os.rename('../work', '../gone')",
    "replaced script": "os.unlink(__file__)",
    "open file sent through a socket pair": (
        "a, b = socket.socketpair()\n"
        "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, (1).to_bytes(4, 'little'))])"
    ),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("code", ESCAPES.values(), ids=ESCAPES)
async def test_no_file_escapes_its_run(any_way: Sandbox, code: str) -> None:
    if not any_way.drops:
        pytest.skip("needs root, so that each run has its own user")
    if any_way.is_isolated and "sendmsg" in code:
        pytest.skip("all files of the run are on a file system of its own")
    outcome = await run(f"import os, socket\n{code}\nprint('escaped')", any_way)
    assert "escaped" not in outcome.logs
    assert "Error" in outcome.logs


@pytest.mark.sampled(one_in=2)
async def test_folders_of_any_depth_are_deleted(any_way: Sandbox) -> None:
    mark = f"/tmp/unisono-deep-{time.monotonic_ns()}"
    code = (
        "import os\nfor place in ('.', MARK):\n  os.makedirs(place, exist_ok=True)\n"
        "  home = os.open('.', os.O_RDONLY)\n  os.chdir(place)\n"
        "  for _ in range(1500): os.mkdir('d'); os.chdir('d')\n  open('f', 'w').close()\n"
        "  os.chmod('.', 0)\n  os.fchdir(home)\nprint('made')"
    )
    limits = RunLimits(seconds=20.0, disk=64 * MIB)
    outcome = await run(code.replace("MARK", repr(mark) if any_way.drops else "'d2'"), any_way, limits)
    assert outcome.logs == "made\n"
    assert not Path(mark).exists()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root")
async def test_deleted_files_are_counted_without_process_inspection(any_way: Sandbox) -> None:
    if any_way.is_isolated:
        pytest.skip("all files of the run are on a file system of its own")
    completed = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_ptrace,-sys_admin", sys.executable, "-c", CONTAINER_SCRIPT],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        env={**os.environ, "CODE": FILLING["deleted files"], "PYTHON": any_way.interpreter},
    )  # fmt: skip
    assert completed.stdout == "disk full\n", completed.stderr


CONTAINER_SCRIPT = """
import asyncio, os
from unisono.toolservers.python.executor import MIB, CodeRunner, RunLimits
from unisono.toolservers.python.sandbox_probe import make_sandbox

way = make_sandbox(os.environ["PYTHON"], drops=True, is_isolated=False)
outcome = asyncio.run(CodeRunner(way, RunLimits(seconds=20.0, disk=16 * MIB)).run(os.environ["CODE"]))
print("disk full" if outcome.disk_full else outcome)
"""


@pytest.mark.sampled(one_in=2)
async def test_a_fork_bomb_is_limited_and_killed(any_way: Sandbox, base: Path) -> None:
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    began = time.monotonic()
    bombing = asyncio.create_task(run(code, any_way, RunLimits(seconds=1.0, processes=16)))
    await asyncio.sleep(0.7)
    count = int(
        subprocess.run(["pgrep", "-fc", f"{base}/unisono-python-.*/script.py"], capture_output=True, check=False).stdout
    )
    outcome = await bombing
    assert 1 < count < 40
    assert outcome.timed_out
    assert time.monotonic() - began < 8
    await gone(f"{base}/unisono-python-")


LEFT_BEHIND = {
    "child": "subprocess.Popen(['sleep', MARK])",
    "child in its own session": "subprocess.Popen(['sleep', MARK], start_new_session=True)",
    "orphan in its own session": (
        "subprocess.Popen([sys.executable, '-c', 'import os, sys\\nif os.fork() == 0:\\n os.setsid()\\n"
        ' if os.fork() == 0: os.execvp("sleep", ["sleep", sys.argv[1]])\', MARK]).wait()'
    ),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("code", LEFT_BEHIND.values(), ids=LEFT_BEHIND)
async def test_no_process_outlives_its_run(any_way: Sandbox, code: str) -> None:
    mark = f"6{time.monotonic_ns() % 10**9}"
    began = time.monotonic()
    outcome = await run(
        f"import subprocess, sys, time\nMARK = '{mark}'\n{code}\ntime.sleep(0.1); print('left')", any_way
    )
    assert (outcome.logs, outcome.exit_code) == ("left\n", 0)
    assert time.monotonic() - began < 5
    await gone(mark)


async def test_endless_output_is_stopped_and_truncated_in_the_middle(way: Sandbox) -> None:
    began = time.monotonic()
    outcome = await run("print('first')\nwhile True: print('x' * 10000)", way, RunLimits(seconds=20.0, output=10_000))
    assert time.monotonic() - began < 15
    assert outcome.logs.startswith("first\nxxx")
    assert len(outcome.logs) < 10_200
    assert outcome.left_out > executor.FLOOD_BYTES - 20_000


async def test_truncated_output_keeps_its_traceback(way: Sandbox) -> None:
    outcome = await run("for n in range(20000): print(n)\n1 / 0", way, RunLimits(output=4000))
    assert outcome.logs.startswith("0\n1\n2\n")
    assert outcome.logs.endswith("ZeroDivisionError: division by zero\n")
    assert f"[... {outcome.left_out} bytes omitted ...]" in outcome.logs


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has privileges to drop")
async def test_code_of_root_runs_without_privileges(way: Sandbox) -> None:
    outcome = await run("import os; print(os.getuid(), os.getgid(), os.getgroups())", way)
    user, group, others = outcome.logs.split()
    assert (int(user) in NOBODIES, group, others) == (True, user, "[]")
    for code in ("open('/etc/shadow').read()", "import os; os.setuid(0)"):
        logs = (await run(code, way)).logs
        assert "PermissionError" in logs or "FileNotFoundError" in logs


NETWORKS = {
    "loopback": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "name resolution": "socket.getaddrinfo('example.com', 80)",
    "other host": "socket.create_connection(('192.0.2.1', 80), 2)",
    "datagrams": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
}


@pytest.mark.parametrize("code", NETWORKS.values(), ids=NETWORKS)
async def test_code_has_no_network_where_it_can_be_blocked(way: Sandbox, code: str) -> None:
    if way.has_network:
        pytest.skip("neither namespaces nor filters on this system")

    async def reached(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Accept the connection and do nothing."""

    async with listening(reached) as listener:
        outcome = await run(
            f"import socket\nPORT = {listener.port}\n{code}\nprint('reached')", way, RunLimits(seconds=8.0)
        )
    assert "reached" not in outcome.logs
    assert "Error" in outcome.logs or "gaierror" in outcome.logs


async def test_code_sees_no_other_process_with_namespaces(way: Sandbox) -> None:
    if not way.is_isolated:
        pytest.skip("no namespaces on this system")
    outcome = await run("import os; print(sorted(int(n) for n in os.listdir('/proc') if n.isdigit()))", way)
    assert outcome.logs == "[1, 2]\n"


async def test_cancelling_a_call_ends_its_run(any_way: Sandbox) -> None:
    mark = f"7{time.monotonic_ns() % 10**9}"
    task = asyncio.create_task(run(f"import subprocess; subprocess.run(['sleep', '{mark}'])", any_way, RunLimits()))
    for _ in range(300):
        if processes(f"sleep {mark}"):
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the program did not start")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(mark)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, all runs have the same user")
async def test_concurrent_runs_cannot_read_each_other(way: Sandbox, base: Path) -> None:
    runner = CodeRunner(way, RunLimits(seconds=5.0))
    code = "import glob, time\ntime.sleep(0.3)\n"
    code += f"print(glob.glob('{base}/unisono-python-*/script.py'))"
    first, second = await asyncio.gather(runner.run(code), runner.run(code))
    assert [len(outcome.logs.split(",")) for outcome in (first, second)] == [1, 1]
    assert first.logs != second.logs


async def test_folders_without_permissions_are_deleted(way: Sandbox) -> None:
    outcome = await run("import os\nos.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)", way)
    assert outcome.exit_code == 0


async def test_runs_wait_for_a_slot_and_too_many_are_refused(way: Sandbox) -> None:
    runner = CodeRunner(way, RunLimits(seconds=5.0), at_once=1)
    first = [asyncio.create_task(runner.run("import time; time.sleep(0.2); print(1)")) for _ in range(5)]
    await asyncio.sleep(0.05)
    with pytest.raises(Busy):
        await runner.run("print(1)")
    assert [outcome.logs for outcome in await asyncio.gather(*first)] == ["1\n"] * 5


async def test_code_cannot_forge_its_exit_report(way: Sandbox) -> None:
    forged = "import os, sys\nfor n in range(3, 30):\n  try: os.write(n, b'{\"exit\": 0}'); print(n)\n"
    outcome = await run(forged + "  except OSError: pass\nsys.exit(3)", way)
    # The program finds no descriptor that it can write to.
    assert (outcome.logs, outcome.exit_code) == ("", 3)


def test_an_invalid_interpreter_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another interpreter with --python"):
        find_sandbox(str(tmp_path / "python"))


def test_the_description_names_missing_restrictions() -> None:
    assert "NETWORK OPEN, SHARED process" in Sandbox(sys.executable, False, False).described
    assert "no network, own process and file space" in Sandbox(sys.executable, False, True).described


def test_captured_output_keeps_both_ends() -> None:
    output = CapturedOutput(10)
    for chunk in (b"abc", b"defgh", b"ijklmnop", b"q"):
        output.add(chunk)
    assert output.text() == ("abcde\n[... 7 bytes omitted ...]\nmnopq", 7)
    whole = CapturedOutput(10)
    for character in b"0123456789":
        whole.add(bytes([character]))
    assert whole.text() == ("0123456789", 0)
