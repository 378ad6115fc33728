"""Build of llama.cpp's server and quantiser from the sources in the llama-cpp-python package.

The build needs a C++ compiler and 17 minutes of CPU time. No wheel contains these programs, and the package's own
build leaves them out. An interrupted build is resumed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.engines_all.setup import models
from tests.engines_all.setup.places import CACHE, ENVIRONMENTS, GGUF, LLAMA_CPP_PYTHON, LLAMA_QUANTIZE, LLAMA_SERVER
from tests.engines_all.setup.running import Commands, SetupFailed

WORK = CACHE / f"llama-cpp-python-{LLAMA_CPP_PYTHON}"
# Programs of llama.cpp, and their places.
PROGRAMS = {"llama-server": LLAMA_SERVER, "llama-quantize": LLAMA_QUANTIZE}
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


def set_up(commands: Commands) -> None:
    if _is_built() and GGUF.exists():
        return
    tools = ENVIRONMENTS / "llama-build"
    if not (tools / ".ready").exists():
        python = commands.environment(tools)
        commands.install(python, "build tools", "cmake", "ninja", "scikit-build-core")
        (tools / ".ready").touch()
    sources = _sources(commands, tools / "bin" / "python")
    models.to_gguf(commands, sources)
    if not _is_built():
        _build(commands, tools / "bin", sources)
    shutil.rmtree(WORK)
    shutil.rmtree(tools)


def _is_built() -> bool:
    return all(place.exists() for place in PROGRAMS.values())


def _sources(commands: Commands, python: Path) -> Path:
    """Return the folder of llama.cpp's sources."""
    unpacked = WORK / "sources"
    if not unpacked.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        download = ("download", "--no-binary=:all:", "--no-deps", "--no-build-isolation", "--progress-bar=off")
        requirement = f"llama-cpp-python=={LLAMA_CPP_PYTHON}"
        # Without isolation, pip needs the build tools of this environment on PATH to read the package's metadata.
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        commands.run("sources", python, "-m", "pip", *download, "--dest", WORK, requirement, variables={"PATH": path})
        [archive] = WORK.glob("*.tar.gz")
        unfinished = WORK / "unpacking"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        commands.run("unpacked", "tar", "-xzf", archive, "-C", unfinished)
        unfinished.rename(unpacked)
    found = list(unpacked.glob("*/vendor/llama.cpp"))
    if len(found) != 1:
        raise SetupFailed("the llama-cpp-python package does not contain llama.cpp's sources")
    return found[0]


def _build(commands: Commands, tools: Path, sources: Path) -> None:
    built = WORK / "build"
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    commands.run("configure", tools / "cmake", "-S", sources, "-B", built, "-G", "Ninja", ninja, *options)
    jobs = str(os.cpu_count() or 1)
    commands.run("build", tools / "cmake", "--build", built, "--target", *PROGRAMS, "--parallel", jobs)
    for name, place in PROGRAMS.items():
        unfinished = place.with_suffix(".part")
        shutil.copy2(built / "bin" / name, unfinished)
        unfinished.rename(place)
