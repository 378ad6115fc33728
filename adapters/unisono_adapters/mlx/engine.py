"""Engine process: serves a model with mlx-lm to the gateways that connect to its socket.

`mlx_backend` starts the process as `python -m unisono_adapters.mlx.engine`. The process inherits a listening socket,
and the read end of a pipe as standard input. It exits when the pipe closes, so it never outlives its parent process.
With `--shared` there is no pipe, and the process runs as long as a gateway is connected. The socket loop runs in the
main thread and stays responsive; the model runs in a thread of its own (`mlx.batch`). Output of libraries is written
to standard error, never to a client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.core.install_commands import install_command
from unisono_adapters.huggingface_download import SNAPSHOT_FILES
from unisono_adapters.mlx.guides import Guide, Guides, Unguidable, installed
from unisono_adapters.mlx.wire import (
    EVERYONE,
    LINE_LIMIT,
    Addressed,
    BatchLimits,
    Cancel,
    Count,
    CountAnswer,
    Encoded,
    Failed,
    GenerateCommand,
    Ready,
    RequestRefused,
    Submit,
    ToGateway,
    Tokenize,
    WireError,
    Withdraw,
    from_line,
    to_line,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from unisono_adapters.mlx.batch import Batch

DEMO = "demo"

# If a gateway leaves more than this number of bytes unread, its connection is closed and its requests are cancelled.
_STUCK_BYTES = 8 * 1024 * 1024

# Seconds for which a shared engine waits for a new connection after its last connection has closed.
_LINGER_S = 1.0

_log = logging.getLogger(__name__)


class ModelUnusable(Exception):
    """Model cannot be loaded, for the reason in the message, which is for the operator."""


@dataclass(slots=True)
class _Loaded:
    batch: Batch
    tokenizer: Tokenizer
    context: int | None
    guides: Guides


@dataclass(slots=True)
class _Engine:
    """Socket side of the engine.

    `greeting` is the first message on every connection. It is None until the model is loaded or has failed to load.
    """

    loop: asyncio.AbstractEventLoop
    greeting: Ready | Failed | None = None
    loaded: _Loaded | None = None
    writers: dict[int, asyncio.StreamWriter] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)
    should_exit: asyncio.Event = field(default_factory=asyncio.Event)
    # Requests that wait until their grammar is compiled, as connection number and request id.
    compiling: set[tuple[int, int]] = field(default_factory=set)
    max_compiling: int = 256
    # True if the engine exits after its last connection closes; False if it exits with its parent process.
    shared: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(self.numbers)
        self.writers[number] = writer
        if self.greeting is not None:
            writer.write(to_line(self.greeting))
        try:
            while line := await reader.readline():
                self._handle_line(number, writer, line)
        except (OSError, WireError, ValueError) as error:  # ValueError: a line over the limit
            _log.warning("the connection to a gateway was lost: %s", error)
        finally:
            del self.writers[number]
            self._drop_client(number)
            writer.close()
            if self.shared and not self.writers:
                self.loop.call_later(_LINGER_S, self._end_when_unused)

    def _end_when_unused(self) -> None:
        if not self.writers:
            self.should_exit.set()

    def _handle_line(self, number: int, writer: asyncio.StreamWriter, line: bytes) -> None:
        message = from_line(line)
        if self.loaded is None:
            raise WireError("a request arrived before the model was loaded")
        match message:
            case GenerateCommand(constraint=None):
                self.loaded.batch.submit(Submit(number, message))
            case GenerateCommand():
                self._guide(self.loaded, number, message)
            case Cancel(request):
                self.compiling.discard((number, request))
                self.loaded.batch.submit(Withdraw(number, request))
            case Tokenize(request, texts):
                codes = [self.loaded.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
                writer.write(to_line(Encoded(request, codes)))
            case Count(request):
                running, waiting, tokens = self.loaded.batch.load
                writer.write(to_line(CountAnswer(request, running, waiting + len(self.compiling), tokens)))
            case _:
                raise WireError(f"the engine does not accept {type(message).__name__} messages")

    def _guide(self, loaded: _Loaded, number: int, command: GenerateCommand) -> None:
        """Compile the grammar of a constrained request, then submit the request.

        The request is not submitted if it was cancelled in the meantime.
        """
        assert command.constraint is not None, "a request without a constraint"
        place = (number, command.id)
        if len(self.compiling) >= self.max_compiling:
            reason = f"{self.max_compiling} grammars are waiting to be compiled, which is the limit; try again later"
            self._send([(number, RequestRefused(command.id, "overloaded", reason))])
            return
        self.compiling.add(place)
        compiled = self.loop.run_in_executor(loaded.guides.threads, loaded.guides.guide, command.constraint)

        def submit(done: asyncio.Future[Guide]) -> None:
            error = done.exception()
            if place not in self.compiling:
                return
            self.compiling.discard(place)
            if error is None:
                loaded.batch.submit(Submit(number, command, done.result()))
                return
            if not isinstance(error, Unguidable):
                _log.error("compiling a grammar failed", exc_info=error)
            self._send(
                [
                    (
                        number,
                        RequestRefused(command.id, "constraint", f"the engine cannot enforce the constraint: {error}"),
                    )
                ]
            )

        compiled.add_done_callback(submit)

    def _drop_client(self, number: int) -> None:
        self.compiling -= {place for place in self.compiling if place[0] == number}
        if self.loaded is not None:
            self.loaded.batch.submit(Withdraw(number))

    def announce(self, greeting: Ready | Failed, loaded: _Loaded | None) -> None:
        self.greeting, self.loaded = greeting, loaded
        for writer in self.writers.values():
            writer.write(to_line(greeting))
        if loaded is None:
            self.should_exit.set()

    def send(self, events: list[Addressed]) -> None:
        """Send messages from the generation thread, which calls this once per step."""
        self.loop.call_soon_threadsafe(self._send, events)

    def _send(self, events: list[Addressed]) -> None:
        lines: dict[int, list[bytes]] = {}
        for number, message in events:
            self._address(lines, number, message)
        for number, parts in lines.items():
            writer = self.writers.get(number)
            if writer is None:
                continue
            writer.write(b"".join(parts))
            if writer.transport.get_write_buffer_size() > _STUCK_BYTES:
                _log.warning("a gateway does not read its answers; closing its connection")
                writer.transport.abort()

    def _address(self, lines: dict[int, list[bytes]], number: int, message: ToGateway) -> None:
        line = to_line(message)
        for each in self.writers if number == EVERYONE else (number,):
            lines.setdefault(each, []).append(line)


def _find(model: str) -> Path:
    """Return the folder of `model`, which is a path, the name of a downloaded model, or "demo"."""
    if model == DEMO:
        from unisono_adapters.demo import DemoError, available, default_folder, expand

        missing = available()
        if missing is not None:
            raise ModelUnusable(missing)
        try:
            return expand(default_folder())
        except (DemoError, OSError) as error:
            raise ModelUnusable(f"the demo model cannot be unpacked: {error}") from error
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelUnusable(f"{model} contains no config.json; name a folder that contains a model for mlx-lm")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True, allow_patterns=list(SNAPSHOT_FILES)))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelUnusable(
            f"{model} is neither a folder nor a completely downloaded model; "
            f"download it with `unisono pull {model}`, or name its folder"
        ) from error


def _load(model: str, engine: _Engine, limits: BatchLimits) -> _Loaded:
    """Load the model.

    Raises ModelUnusable if the model is missing or incomplete. If its files are damaged, mlx and mlx-lm may raise any
    exception.
    """
    folder = _find(model)
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    from unisono_adapters.mlx.batch import Batch

    if not (folder / "tokenizer.json").is_file():
        raise ModelUnusable(f"{model} contains no tokenizer.json; download the model again, or name another folder")
    network, config = load_model(folder)
    window = config.get("max_position_embeddings")
    context = window if isinstance(window, int) and window > 0 else None
    batch = Batch(network, context, engine.send, limits)
    batch.warm_up()
    return _Loaded(batch, Tokenizer.from_file(str(folder / "tokenizer.json")), context, Guides(folder))


def _generate(model: str, limits: BatchLimits, engine: _Engine) -> None:
    """Run the generation thread: load the model, report it, and generate forever."""
    try:
        loaded = _load(model, engine, limits)
    except ModelUnusable as error:
        failure = Failed(str(error))
    except ImportError as error:
        failure = Failed(f"mlx-lm cannot be imported ({error}): {install_command('mlx')}")
    except Exception as error:  # damaged files can cause any error; the gateway gets the error, the log the traceback
        _log.exception("loading %s failed", model)
        failure = Failed(f"{model} cannot be loaded: {type(error).__name__}: {error}")
    else:
        engine.loop.call_soon_threadsafe(engine.announce, Ready(loaded.context, installed(), os.getpid()), loaded)
        loaded.batch.run()
        return
    engine.loop.call_soon_threadsafe(engine.announce, failure, None)


def _end_with_parent(address: str) -> None:
    """Exit the process when standard input closes, or when the parent process has ended.

    Removes the socket `address` and its folder first.
    """
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], 1.0)
        if readable and not os.read(0, 1024):
            break
    _remove(address)
    os._exit(0)  # the generation thread may be in a step of unbounded duration


def _remove(address: str) -> None:
    with contextlib.suppress(OSError):
        Path(address).unlink()
        Path(address).parent.rmdir()


async def _run(args: argparse.Namespace) -> int:
    engine = _Engine(asyncio.get_running_loop(), max_compiling=max(1, args.waiting), shared=args.shared)
    listener = socket.socket(fileno=args.listener)
    listener.setblocking(False)
    server = await asyncio.start_unix_server(engine.serve, sock=listener, limit=LINE_LIMIT)
    limits = BatchLimits(
        batch=args.batch,
        waiting=args.waiting,
        prefill_chunk=args.prefill_chunk,
        prefix_cache_bytes=args.prefix_cache_bytes,
    )
    threading.Thread(target=_generate, args=(args.model, limits, engine), name="generation", daemon=True).start()
    async with server:
        await engine.should_exit.wait()
        # The message about the failure is already in the send buffers; give slow readers a moment.
        await asyncio.sleep(0.2)
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m unisono_adapters.mlx.engine", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--listener", type=int, required=True, help="file descriptor of a listening Unix socket")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--waiting", type=int, required=True)
    parser.add_argument("--prefill-chunk", type=int, required=True)
    parser.add_argument("--prefix-cache-bytes", type=int, required=True)
    parser.add_argument("--shared", action="store_true", help="exit when no gateway is connected any more")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway, which then ends this process
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=os.dup(args.listener)) as listener:
        address = str(listener.getsockname())
    if not args.shared:
        threading.Thread(target=_end_with_parent, args=(address,), name="lifeline", daemon=True).start()
    code = asyncio.run(_run(args))
    _remove(address)
    sys.stderr.flush()
    os._exit(code)  # do not wait for the generation thread, which may be in a long step


if __name__ == "__main__":
    main()
