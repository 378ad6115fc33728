"""The `python` tool in the form gpt-oss was trained on: code in, output out, no state.

    sandbox         first process of a run: sandbox, limits, user id; runs as a separate script
    run_files       disk usage and removal of a run's files
    sandbox_probe   capabilities of this machine: namespaces, user id, interpreter
    syscall_filter  the seccomp filter
    executor        one run from its code to its outcome
    server          the MCP server

docs/tools.md states the restrictions of each mode; tests/toolservers/test_python_attacks.py tests every statement.
"""
