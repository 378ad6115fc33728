"""Seccomp filter for executed code, compiled in the server and loaded by the sandbox.

The filter is compiled by libseccomp, through one of two bindings with the same interface: `seccomp` of the
distributions (Debian: python3-seccomp), which is not on PyPI, or `pyseccomp`, pure Python over libseccomp.so.2. Only
the server needs a binding; the sandbox gets the compiled program.
"""

from __future__ import annotations

import base64
import errno
import importlib
import os
import sys
from typing import Any, Final

# Inspection of other processes, keys, mounts, kernel interfaces with a history of faults, and memory that no process
# limit counts. New system calls have one number on all architectures; older versions of libseccomp do not know them.
DENIED: Final = """
    ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd
    keyctl add_key request_key
    mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr=442
    open_tree_attr=467 swapon swapoff quotactl quotactl_fd=443 name_to_handle_at open_by_handle_at fanotify_init
    bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
    kexec_load kexec_file_load init_module finit_module delete_module reboot syslog acct
    unshare setns personality modify_ldt iopl ioperm
    settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup
    memfd_create memfd_secret=447 shmget shmat shmctl msgget semget mq_open
"""
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACE_FLAGS: Final = (0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000)
# The network namespace restricts sockets of the families UNIX, INET, INET6 and NETLINK. It does not restrict other
# families, such as VSOCK and ALG.
_NAMESPACED_FAMILIES: Final = frozenset({1, 2, 10, 16})
# libseccomp has no set operation: families up to this one get a rule each, and one rule denies all above.
_MAX_LISTED_FAMILY: Final = 16


class FilterUnavailable(Exception):
    """Raised if no seccomp filter can be compiled. The message says what to install."""


def compile_filter(*, has_network_namespace: bool) -> str:
    """Return the BPF program in base64.

    Without a network namespace, the program denies all sockets except pairs. Raises `FilterUnavailable` if libseccomp
    is missing or does not support this machine.
    """
    seccomp = _load_libseccomp()
    refused, unknown = seccomp.ERRNO(errno.EPERM), seccomp.ERRNO(errno.ENOSYS)
    rules = seccomp.SyscallFilter(seccomp.ALLOW)
    for entry in DENIED.split():
        rules.add_rule(refused, _number(seccomp, entry))
    for flag in _NAMESPACE_FLAGS:
        rules.add_rule(refused, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, flag, flag))
    # The flags of clone3 are in memory, where a filter cannot read them. After ENOSYS, the C library uses clone()
    # instead.
    rules.add_rule(unknown, _number(seccomp, "clone3=435"))
    if has_network_namespace:
        for family in sorted(set(range(_MAX_LISTED_FAMILY)) - _NAMESPACED_FAMILIES):
            rules.add_rule(refused, "socket", seccomp.Arg(0, seccomp.EQ, family))
        rules.add_rule(refused, "socket", seccomp.Arg(0, seccomp.GT, _MAX_LISTED_FAMILY))
    else:
        # Open files in transit through a socket pair belong to no process and could not be counted.
        for name in ("socket", "sendmsg", "sendmmsg"):
            rules.add_rule(refused, name)
    return _exported(rules)


def _load_libseccomp() -> Any:
    if sys.platform != "linux":
        raise FilterUnavailable("seccomp exists on Linux only")
    for name in ("seccomp", "pyseccomp"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
        except (RuntimeError, OSError):
            raise FilterUnavailable("libseccomp.so.2 is missing (Debian: apt-get install libseccomp2)") from None
    raise FilterUnavailable("the seccomp binding is missing (pip install pyseccomp)")


def _number(seccomp: Any, entry: str) -> int:
    """Return the number of a system call, given as `name` or `name=number`.

    `number` is used if libseccomp does not know the name. Raises `FilterUnavailable` if there is neither.
    """
    name, _, number = entry.partition("=")
    try:
        found = int(seccomp.resolve_syscall(seccomp.Arch.NATIVE, name))
    except ValueError:
        found = -1
    # For a call that this architecture lacks, libseccomp returns a negative number. -1 means that the call is unknown.
    if found != -1:
        return found
    if not number:
        raise FilterUnavailable(f"libseccomp does not support the system call {name}; install a newer version")
    return int(number)


def _exported(rules: Any) -> str:
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return base64.b64encode(file.read()).decode()
