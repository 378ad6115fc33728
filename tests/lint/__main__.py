"""Check the language and structure of the project: `python -m tests.lint`.

Prints one line for each finding and exits with 1 if there are any. `--figures` prints the measured values instead.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.lint import structure, words

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"unisono": Path("proxy/unisono"), "unisono_adapters": Path("adapters/unisono_adapters")}
BENCH = Path("bench")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "bench")


def sources() -> list[Path]:
    return sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))


def benchmarks() -> list[Path]:
    return sorted(BENCH.rglob("*.py"))


def pages() -> list[Path]:
    found = (Path(name) for name in PAGES)
    return sorted(page for path in found for page in (path.rglob("*.md") if path.is_dir() else (path,)))


def findings() -> Iterator[str]:
    files, bench = sources(), benchmarks()
    yield from words.check_words([*files, *pages()])
    # The benchmarks are counted separately, because the product is ten times as large and would hide their words.
    yield from words.check_words(bench)
    yield from words.check_first_lines([*files, *bench])
    yield from words.check_constants([*files, *bench])
    yield from structure.check_class_names(files)
    yield from structure.check_class_names(bench)
    yield from structure.check_function_lengths([*files, *bench])
    yield from structure.check_cycles(PACKAGES)


def figures() -> Iterator[str]:
    listed: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for path in (*sources(), *benchmarks(), *pages()):
        for text in words.texts_of(path):
            found, total = words.listed_words(text.text)
            listed.setdefault(text.kind, Counter()).update(found)
            totals[text.kind] += total
    for kind, found in listed.items():
        rate = words.per_thousand(found, totals[kind])
        yield f"{kind}s: {rate:.1f} listed words per 1,000 ({totals[kind]} words): {dict(found.most_common(6))}"


def main() -> int:
    # The syntax trees are needed until the end. Collections would visit their objects again and again.
    gc.disable()
    if "--figures" in sys.argv[1:]:
        print(*figures(), sep="\n")
        return 0
    found = list(findings())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
