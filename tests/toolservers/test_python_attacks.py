"""Attacks from executed code on the server and the machine.

Each attack works in a bare process and fails in the Python tool. The server runs as root and as an ordinary user, with
and without namespaces. Attacks that succeed as an ordinary user without namespaces are listed; there, the tool starts
only with `--unsafe`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.toolservers.running import UNISONO
from unisono.toolservers.python.sandbox_probe import NOBODIES, SYSTEM_PATH, is_working
from unisono.toolservers.python.sandbox_probe import make_sandbox as made_way

ROOT = Path(__file__).parents[2]
SYSTEM_PYTHON = shutil.which("python3", path=SYSTEM_PATH) or sys.executable
USER = NOBODIES[0] - 1

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux, and root to become another user"
)

CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ncall = libc.syscall\n"
# Numbers of system calls: on x86_64 and on aarch64.
NUMBERS = {
    "ptrace": (101, 117), "add_key": (248, 217), "keyctl": (250, 219), "unshare": (272, 97), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "shmget": (29, 194),
    "process_vm_readv": (310, 270), "clone": (56, 220), "memfd_create": (319, 279), "mq_open": (180, 180),
}  # fmt: skip
NUMBER = {name: numbers[os.uname().machine == "aarch64"] for name, numbers in NUMBERS.items()}
if os.uname().machine == "x86_64":
    NUMBER["mq_open"] = 240


def system_call(name: str, *arguments: str) -> str:
    return CALL + f"if call({', '.join([str(NUMBER[name]), *arguments])}) >= 0: print('HIT')"


SERVER = (
    "import os\nfor pid in [SERVER, os.getppid(), *(int(n) for n in os.listdir('/proc') if n.isdigit())]:\n  try:\n"
)
MARKS = re.compile("SERVER|HOME|PORT")
# Programs that print HIT when they succeed. SERVER, HOME and PORT are replaced.
ATTACKS: dict[str, str] = {
    "reads the server's environment": SERVER
    + "    if b'environment-canary' in open(f'/proc/{pid}/environ', 'rb').read(): print('HIT'); break\n"
    + "  except OSError: pass",
    "reads the server's memory": SERVER
    + "    mem = open(f'/proc/{pid}/mem', 'rb', 0)\n"
    + "    for line in open(f'/proc/{pid}/maps'):\n"
    + "      if '[heap]' not in line and ' 00:00 0 ' not in line: continue\n"
    + "      begin, end = (int(n, 16) for n in line.split()[0].split('-'))\n"
    + "      if end - begin > 1 << 26 or pid == os.getpid(): continue\n"
    + "      try:\n"
    + "        mem.seek(begin)\n"
    + "        if b'-'.join([b'memory', b'canary', b'0000']) in mem.read(end - begin): print('HIT')\n"
    + "      except (OSError, ValueError, OverflowError): pass\n"
    + "  except OSError: pass",
    "traces the server": CALL
    + f"if call({NUMBER['ptrace']}, 16, SERVER, 0, 0) == 0:\n"
    + f"  os.waitpid(SERVER, 0x40000000); call({NUMBER['ptrace']}, 17, SERVER, 0, 0); print('HIT')",
    "traces a child": CALL
    + f"child = os.fork()\nif not child:\n  os._exit(0 if call({NUMBER['ptrace']}, 0, 0, 0, 0) == 0 else 1)\n"
    + "if os.waitpid(child, 0)[1] == 0: print('HIT')",
    "reads the memory of a process": CALL
    + "text = ctypes.create_string_buffer(b'HIT'); copy = ctypes.create_string_buffer(4)\n"
    + "class Part(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
    + "here, there = Part(ctypes.addressof(copy), 4), Part(ctypes.addressof(text), 4)\n"
    + "parts = ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0)\n"
    + f"call({NUMBER['process_vm_readv']}, os.getpid(), *parts)\n"
    + "print(copy.value.decode())",
    "sees the server's command line": "import os\nif os.path.exists('/proc/SERVER/cmdline') and "
    "b'attacked' in open('/proc/SERVER/cmdline', 'rb').read(): print('HIT')",
    "signals the server": "import os\nos.kill(SERVER, 0)\nprint('HIT')",
    "reads the home directory": "print('HIT' if 'key' in open('HOME/.ssh/id').read() else '')",
    "writes to the home directory": "open('HOME/.bashrc', 'a').write('x')\nprint('HIT')",
    "connects to this machine": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 2)\nprint('HIT')",
    "stores a key": system_call("add_key", "b'user'", "b'a'", "b'b'", "1", "-2"),
    "reads a keyring": system_call("keyctl", "0", "-3", "1"),
    "makes a user namespace": system_call("unshare", "0x10000000"),
    "clones into a user namespace": CALL
    + f"pid = call({NUMBER['clone']}, 0x10000000 | 17, 0, 0, 0, 0)\nif pid == 0: os._exit(0)\nif pid > 0: print('HIT')",
    "mounts": CALL + "if libc.mount(b'x', b'/mnt', b'tmpfs', 0, None) == 0: libc.umount(b'/mnt'); print('HIT')",
    "changes a kernel setting": "import os\nfile = os.open('/proc/sys/kernel/core_pattern', os.O_RDWR)\n"
    "os.write(file, os.read(file, 999)); print('HIT')",
    "loads a program into the kernel": CALL
    + "attributes = (ctypes.c_uint32 * 32)(2, 4, 8, 1)\n"
    + f"if call({NUMBER['bpf']}, 0, ctypes.byref(attributes), 128) >= 0: print('HIT')",
    "watches the processor": CALL
    + "attributes = (ctypes.c_uint32 * 32)(1, 128, 0)\n"
    + f"if call({NUMBER['perf_event_open']}, ctypes.byref(attributes), 0, -1, -1, 0) >= 0: print('HIT')",
    "handles page faults": system_call("userfaultfd", "1"),
    "sets up io_uring": CALL
    + "params = (ctypes.c_uint32 * 30)()\n"
    + f"if call({NUMBER['io_uring_setup']}, 4, ctypes.byref(params)) >= 0: print('HIT')",
    "makes memory files": system_call("memfd_create", "b'a'", "0"),
    "makes shared segments": CALL
    + f"found = call({NUMBER['shmget']}, 0, 1 << 20, 0o1600)\n"
    + "if found >= 0: libc.shmctl(found, 0, None); print('HIT')",
    "makes message queues": CALL
    + f"found = call({NUMBER['mq_open']}, b'unisono-attack', 0o102, 0o600, ctypes.c_void_p())\n"
    + "if found >= 0: libc.mq_unlink(b'/unisono-attack'); print('HIT')",
    "fills shared memory": "import os, glob\ntry:\n"
    "  for n in range(20):\n    with open(f'/dev/shm/unisono-attack-{n}', 'wb') as file:\n"
    "      for _ in range(40): file.write(b'x' * 2**20)\n"
    "  print('HIT')\n"
    "finally:\n  for path in glob.glob('/dev/shm/unisono-attack-*'): os.unlink(path)",
    "shares memory between processes": "import mmap, os, time\nkept = []\nfor n in range(6):\n"
    "  if not os.fork():\n    memory = mmap.mmap(-1, 90 << 20)\n"
    "    for at in range(0, 90 << 20, 4096): memory[at] = 1\n"
    "    time.sleep(3); os._exit(0)\n"
    "for n in range(6): os.wait()\nprint('HIT')",
}
# These need privileges that an ordinary user lacks, so their control runs as root.
CONTROLS_AS_ROOT = {
    "mounts",
    "changes a kernel setting",
    "loads a program into the kernel",
    "watches the processor",
    "handles page faults",
}
# Only namespaces prevent these.
NEED_NAMESPACES = {"sees the server's command line"}
# Namespaces or another user id prevent these.
UNSAFE = NEED_NAMESPACES | {
    "signals the server",
    "reads the home directory",
    "writes to the home directory",
    "fills shared memory",
}
MODES = {
    "root, isolated": (0, "isolated", "drops", set[str]()),
    "root with --as-root, isolated": (0, "isolated", "stays", set[str]()),
    "root, no namespaces": (0, "shared", "drops", NEED_NAMESPACES),
    "a user, isolated": (USER, "isolated", "stays", set[str]()),
    "a user, no namespaces, --unsafe": (USER, "shared", "stays", UNSAFE),
}


@dataclass(frozen=True)
class Machine:
    """A copy of the tool that every user can read, and the home directory of the user."""

    proxy: Path
    home: Path
    port: int

    def server(self, user: int, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [SYSTEM_PYTHON, "-B", str(self.proxy / "attacked.py"), *arguments],
            user=user, group=user, extra_groups=[], cwd="/", text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PYTHONPATH": str(self.proxy), "SECRET": "environment-canary", "HOME": str(self.home)}, **options,
        )  # fmt: skip

    def attacked(self, user: int, *arguments: str, attacks: dict[str, str]) -> dict[str, Any]:
        with self.server(user, *arguments) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            values = {"SERVER": str(process.pid), "HOME": str(self.home), "PORT": str(self.port)}
            filled = {name: MARKS.sub(lambda mark: values[mark[0]], code) for name, code in attacks.items()}
            found, _ = process.communicate(json.dumps(filled) + "\n", timeout=110)
        result: dict[str, Any] = json.loads(found.splitlines()[-1])
        return result


@pytest.fixture
def machine() -> Iterator[Machine]:
    binding = importlib.util.find_spec("pyseccomp")
    assert binding is not None
    assert binding.origin is not None
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        base = Path(folder)
        base.chmod(0o755)
        proxy, home = base / "proxy", base / "home"
        shutil.copytree(ROOT / "proxy/unisono/toolservers/python", proxy / "unisono/toolservers/python")
        shutil.copytree(ROOT / "proxy/unisono/core", proxy / "unisono/core")
        shutil.copy(ROOT / "proxy/unisono/errors.py", proxy / "unisono/errors.py")
        for package in ("unisono", "unisono/toolservers"):
            (proxy / package / "__init__.py").touch()
        shutil.copy(binding.origin, proxy)
        shutil.copy(Path(__file__).with_name("attacked.py"), proxy)
        (home / ".ssh").mkdir(parents=True)
        (home / ".ssh/id").write_text("key")
        (home / ".bashrc").touch()
        for path in (home, home / ".ssh", home / ".ssh/id", home / ".bashrc"):
            os.chown(path, USER, USER)
            path.chmod(0o700)
        yield Machine(proxy, home, listener.getsockname()[1])


def hits(outcomes: dict[str, Any]) -> set[str]:
    return {name for name, outcome in outcomes.items() if "HIT" in outcome["logs"].split()}


@pytest.mark.slow
def test_every_attack_works_in_a_bare_process(machine: Machine) -> None:
    as_root = {name: code for name, code in ATTACKS.items() if name in CONTROLS_AS_ROOT}
    as_user = {name: code for name, code in ATTACKS.items() if name not in CONTROLS_AS_ROOT}
    found = machine.attacked(0, "bare", attacks=as_root) | machine.attacked(USER, "bare", attacks=as_user)
    assert {name: found[name]["logs"] for name in ATTACKS.keys() - hits(found)} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("user", "mode", "identity", "opened"), MODES.values(), ids=MODES)
def test_attacks_fail_in_the_python_tool(
    machine: Machine, user: int, mode: str, identity: str, opened: set[str]
) -> None:
    way = made_way(SYSTEM_PYTHON, drops=True, is_isolated=True)
    if mode == "isolated" and not is_working(way):
        pytest.skip("namespaces are not permitted on this system")
    found = machine.attacked(user, mode, identity, attacks=ATTACKS)
    assert hits(found) == opened
    assert found["shares memory between processes"]["memory_full"]
    assert (machine.home / ".bashrc").read_text() == ("x" if "writes to the home directory" in opened else "")


WITHOUT_NAMESPACES = """
import os, sys
import pyseccomp
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(1), "unshare")
rules.load()
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_without_namespaces_and_root_the_server_refuses_to_start(machine: Machine) -> None:
    user = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/", "env": {"PYTHONPATH": str(machine.proxy)}}
    server = [SYSTEM_PYTHON, "-B", str(machine.proxy / "attacked.py"), "find"]
    refused = subprocess.run(
        [SYSTEM_PYTHON, "-c", WITHOUT_NAMESPACES, *server], capture_output=True, text=True, check=False, **user
    )
    assert "code could attack this server: namespaces are not permitted" in refused.stderr
    assert "--unsafe" in refused.stderr
    # The control: the same user with namespaces.
    if is_working(made_way(SYSTEM_PYTHON, drops=True, is_isolated=True)):
        started = subprocess.run(server, capture_output=True, text=True, check=False, **user)
        assert started.stdout.startswith("no network, own process and file space, filtered system calls, as user")


@pytest.mark.slow
def test_the_command_refuses_and_starts_with_unsafe() -> None:
    """Run the code as root, like the server: one user for both does not protect the server."""
    serve = [sys.executable, "-c", WITHOUT_NAMESPACES, *UNISONO, "mcp", "serve", "python", "--as-root", "--port", "0"]
    refused = subprocess.run(serve, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "add --unsafe there" in refused.stderr
    with subprocess.Popen([*serve, "--unsafe"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("Serving "):
            lines.append(process.stdout.readline())
            assert lines[-1]
        environment = Path(f"/proc/{process.pid}/environ")
        assert environment.stat().st_uid == 0
        process.terminate()
    assert any(line.startswith("UNSAFE: namespaces are not permitted") for line in lines)
