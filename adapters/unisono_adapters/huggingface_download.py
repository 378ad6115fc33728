"""Download of models from the Hugging Face hub, and check of their tokenizer.

Files are stored in the cache of the huggingface_hub library, which mlx-lm uses too. An interrupted download continues
from the bytes on disk.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
from pathlib import Path, PurePath
from typing import Any

from unisono.errors import PullError

# Patterns of the files that mlx-lm needs.
SNAPSHOT_FILES = ("*.json", "model*.safetensors")

MODEL_PREFIX = "mlx/"
SHA256 = re.compile(r"[0-9a-f]{64}")
RESUME = "Run the same command again: it continues from the bytes on disk."


def pull(model: str, revision: str | None = None) -> Path:
    """Download a model for the `mlx` backend, check its tokenizer, and return its folder.

    `model` is a name on the hub, with or without the prefix `mlx/`. It may also be a local folder; then only the
    tokenizer is checked. Progress is printed on a terminal. Raises PullError, with a message for the operator, if the
    download or the check fails.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        folder = _download(model.removeprefix(MODEL_PREFIX), revision)
    check_tokenizer(folder)
    return folder


def check_tokenizer(folder: Path) -> None:
    """Check that the tokenizer in a model folder is that of Harmony.

    The ids of special tokens and of some texts are compared. Raises PullError if the tokenizer is missing, unreadable
    or different.
    """
    # Imported here, because the engine process needs only `SNAPSHOT_FILES` of this module.
    from tokenizers import Tokenizer

    from unisono.harmony.encoding import STRUCTURAL, load_encoding
    from unisono_adapters._probe_prompts import BODIES

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise PullError(f"{folder} has no tokenizer.json, which the `mlx` backend needs; use another model")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise PullError(f"{file} cannot be read: {error}. Delete the file and pull the model again.") from error
    for spelling, expected in STRUCTURAL.items():
        if (found := tokenizer.token_to_id(spelling)) != expected:
            raise PullError(
                f"this is not a gpt-oss model: in {file}, the token {spelling} has the id {found} instead of {expected}"
            )
    encoding = load_encoding()
    if any(tokenizer.encode(text, add_special_tokens=False).ids != encoding.encode_text(text) for text in BODIES):
        raise PullError(f"{file} splits text differently from the o200k_harmony encoding; use another model")


def _download(model: str, revision: str | None) -> Path:
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        _download_large_files(model, revision)
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(SNAPSHOT_FILES)))
    except HFValidationError as error:
        raise PullError(f"{model!r} is neither a folder nor a model name of the form `owner/name`") from error
    except GatedRepoError as error:
        raise PullError(f"{model} is gated: accept its licence on the hub, and set a token in HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise PullError(
            f"the hub has no model {model}, or it is private; for a private model set a token in HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise PullError(f"{model} has no revision {revision!r}; use a branch, a tag or a commit") from error
    except LocalEntryNotFoundError as error:
        raise PullError(f"the hub cannot be reached: {_first_line(error.__cause__ or error)}. {RESUME}") from error
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise PullError(f"the disk is full; free some space. {RESUME}") from error
        raise PullError(f"the download of {model} was interrupted: {_first_line(error)}. {RESUME}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        # The library raises these for a malformed response of the hub, or for file names outside the snapshot.
        raise PullError(
            f"the hub returned an invalid list of files for {model}: {_first_line(error)}; try again later"
        ) from error


# huggingface_hub deletes a partial file when its process ends, although a file of weights has gigabytes. So this
# function downloads the large files, to the paths at which the library looks for finished files.
def _download_large_files(model: str, revision: str | None) -> None:
    from httpx2 import ConnectError, TimeoutException
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.hf_api import RepoFile

    hub = HfApi()
    try:
        commit = hub.model_info(model, revision=revision).sha
        files = list(hub.list_repo_tree(model, recursive=True, revision=commit))
    except (ConnectError, TimeoutException, OfflineModeIsEnabled):
        return  # a complete snapshot on disk is used without the hub
    blobs = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=model, repo_type="model") / "blobs"
    for file in files:
        if isinstance(file, RepoFile) and file.lfs is not None and any(map(PurePath(file.path).match, SNAPSHOT_FILES)):
            # The checksum becomes a file name. A checksum that is a path could place the file outside the cache.
            if not SHA256.fullmatch(file.lfs.sha256):
                raise PullError(
                    f"the hub's checksum of {file.path!r} is not a SHA-256 digest; nothing more is downloaded"
                )
            blob = blobs / file.lfs.sha256
            if not _is_whole(blob, file.lfs.size):
                _download_blob(hf_hub_url(model, file.path, revision=commit), blob, file.lfs.size, file.path)


def _download_blob(url: str, blob: Path, size: int, name: str) -> None:
    """Download a file of `size` bytes to `blob`, whose name is the SHA-256 digest of the file.

    Continues from the bytes of an earlier attempt. `name` is the file name to show with the progress and in errors.
    Raises PullError if the digest of the downloaded file differs.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not re-exported

    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.unisono-partial")
    # Never follow a symbolic link: its target is not part of the cache.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with _BoundedFile(os.open(partial, flags, 0o644), size) as content:
        # A second `unisono pull` of the same model waits and then finds the finished file.
        fcntl.flock(content, fcntl.LOCK_EX)
        if _is_whole(blob, size):
            return
        done = content.seek(0, os.SEEK_END)
        if done > size:
            # The partial file is longer than the file, so it cannot be continued: start again.
            done = content.seek(content.truncate(0))
        headers = build_hf_headers()
        http_get(url, content, resume_size=done, headers=headers, expected_size=size, displayed_filename=name)
        content.flush()
        content.seek(0)
        if hashlib.file_digest(content, "sha256").hexdigest() != blob.name:
            partial.unlink()
            raise PullError(f"{name} was damaged during the download: wrong checksum. Run the same command again.")
        partial.rename(blob)


def _is_whole(blob: Path, size: int) -> bool:
    """Return whether the file exists with its full size.

    A crash of the machine may have truncated the file.
    """
    return blob.is_file() and blob.stat().st_size == size


class _BoundedFile(io.BufferedRandom):
    """File that raises OSError on a write beyond `max_bytes`.

    So an endless response cannot fill the disk.
    """

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        super().__init__(io.FileIO(descriptor, "r+b"))
        self._max_bytes = max_bytes

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._max_bytes:
            raise OSError("the hub sent more bytes than the file's size")
        return super().write(data)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
