"""The `python` tool in the form gpt-oss was trained on: code in, printed output out, no state between runs.

    cage            first process of a run: sandbox, limits, user id; runs as a script of its own
    run_files       what the files of a run take, and how they are removed
    ways            what this machine allows: namespaces, user id, interpreter
    syscall_filter  the seccomp filter
    running         one run from its code to its outcome
    server          the MCP server around it

docs/tools.md states what code cannot do in which mode; tests/toolservers/test_python_attacks.py tests every statement.
"""
