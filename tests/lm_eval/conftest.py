"""Tests that need lm-eval, in a separate environment: `make test-lm-eval`."""

from tests.lm_eval.evaluation import PROGRAM

collect_ignore_glob = [] if PROGRAM.exists() else ["test_*.py"]
