"""Discovery of gpt-oss backends on the well-known ports of this machine.

Commands use it if there is no configuration. Each candidate is identified through its own API, on loopback only and
with short timeouts. Any model that is not clearly gpt-oss is ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import orjson

from unisono.core.frozen import dataclass

if TYPE_CHECKING:
    import aiohttp

# Default port of each backend kind, in the order of discovered backends.
PORTS: Mapping[str, int] = {"vllm": 8000, "sglang": 30000, "llamacpp": 8080, "ollama": 11434, "mlx_server": 8080}
# Limit for each request to a possible backend. Local servers answer at once.
TIMEOUT_S = 1.0
FIRST_TOKEN_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1024 * 1024

CHANNELS = frozenset({"analysis", "commentary", "final"})
# Prompt that only a Harmony model continues with the name of a channel.
QUESTION = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>"


@dataclass(frozen=True, slots=True)
class DiscoveredBackend:
    """Discovered gpt-oss backend: kind, model name of the backend, address."""

    kind: str
    model: str
    api_base: str

    @property
    def model_name(self) -> str:
        """Public model name: the last part of the backend's model name.

        The backend's name may be a repository or a folder.
        """
        return PurePath(self.model).name


async def discover(ports: Mapping[str, int] = PORTS) -> list[DiscoveredBackend]:
    """Return all gpt-oss backends on loopback, in the order of `ports`.

    Kinds that are not in `ports` are skipped.
    """
    # Imported here, because a gateway with a configuration file never needs it.
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    # `trust_env=False`: requests to this machine must not reach a proxy that the environment names.
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        found = await asyncio.gather(
            *(FINDERS[kind](session, f"http://127.0.0.1:{port}") for kind, port in ports.items())
        )
    return [backend for backends in found for backend in backends]


async def identified(addresses: Sequence[str]) -> dict[str, str]:
    """Return the backend kind of each server that runs gpt-oss, by its address.

    An address may end in `/v1`. Servers that do not answer, or need a key, are left out.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:

        async def kind_of(address: str) -> str | None:
            base = address.rstrip("/").removesuffix("/v1")
            found = await asyncio.gather(*(find(session, base) for find in FINDERS.values()))
            return next((backends[0].kind for backends in found if backends), None)

        kinds = await asyncio.gather(*map(kind_of, addresses))
    return {address: kind for address, kind in zip(addresses, kinds, strict=True) if kind is not None}


# Any program may listen on a well-known port. Each finder therefore first requests a path that identifies the server.
# The list of models is not enough, because every OpenAI-compatible server has one.
async def _vllm(session: aiohttp.ClientSession, base: str) -> list[DiscoveredBackend]:
    if not isinstance((await _get(session, f"{base}/version")).get("version"), str):
        return []
    return [
        DiscoveredBackend("vllm", model["id"], base) for model in await _models(session, base) if _is_gpt_oss(model)
    ]


async def _sglang(session: aiohttp.ClientSession, base: str) -> list[DiscoveredBackend]:
    if not isinstance((await _get(session, f"{base}/model_info")).get("tokenizer_path"), str):
        return []
    return [
        DiscoveredBackend("sglang", model["id"], base) for model in await _models(session, base) if _is_gpt_oss(model)
    ]


async def _llamacpp(session: aiohttp.ClientSession, base: str) -> list[DiscoveredBackend]:
    props = await _get(session, f"{base}/props")
    path, alias = props.get("model_path"), props.get("model_alias")
    if not isinstance(path, str) or "default_generation_settings" not in props:
        return []
    name = alias if isinstance(alias, str) and alias else PurePath(path).stem
    return [DiscoveredBackend("llamacpp", name, base)] if "gpt-oss" in f"{name} {path}".lower() else []


async def _ollama(session: aiohttp.ClientSession, base: str) -> list[DiscoveredBackend]:
    if not isinstance((await _get(session, f"{base}/api/version")).get("version"), str):
        return []
    listed = (await _get(session, f"{base}/api/tags")).get("models")
    models = [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []
    names = [name for model in models if isinstance(name := model.get("name"), str)]
    return [DiscoveredBackend("ollama", name, base) for name in names if "gpt-oss" in name.lower()]


async def _mlx_server(session: aiohttp.ClientSession, base: str) -> list[DiscoveredBackend]:
    """Find mlx_lm.server by a test request.

    Its list of models is not enough, because it contains the models on disk instead of the running model.
    """
    if (await _get(session, f"{base}/health")).get("status") != "ok":
        return []
    if await _get(session, f"{base}/props"):
        return []  # llama-server, which has the same default port, also answers /health, and has this path
    names = [model["id"] for model in await _models(session, base) if _is_gpt_oss(model)]
    if not names or not await _speaks_harmony(session, base):
        return []
    # The last entry is the folder of the model with which the server was started.
    return [DiscoveredBackend("mlx_server", names[-1], base)]


FINDERS: Mapping[str, Callable[[aiohttp.ClientSession, str], Awaitable[list[DiscoveredBackend]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
    "ollama": _ollama,
    "mlx_server": _mlx_server,
}


async def _models(session: aiohttp.ClientSession, base: str) -> list[dict[str, Any]]:
    listed = (await _get(session, f"{base}/v1/models")).get("data")
    models = listed if isinstance(listed, list) else []
    return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]


def _is_gpt_oss(model: Mapping[str, Any]) -> bool:
    # With an alias as `id`, vLLM reports the original name or the folder of the model in `root`.
    return any("gpt-oss" in str(model.get(key, "")).lower() for key in ("id", "root"))


async def _speaks_harmony(session: aiohttp.ClientSession, base: str) -> bool:
    # `default_model` is the model that mlx_lm.server was started with. For any other name it would load that model
    # first.
    body = {"model": "default_model", "prompt": QUESTION, "max_tokens": 1, "temperature": 0.0}
    answer = await _get_json(session, "POST", f"{base}/v1/completions", json=body, timeout_s=FIRST_TOKEN_TIMEOUT_S)
    match answer:
        case {"choices": [{"text": str(text)}, *_]}:
            return text.strip() in CHANNELS
        case _:
            return False


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    return await _get_json(session, "GET", url, json=None, timeout_s=TIMEOUT_S)


async def _get_json(
    session: aiohttp.ClientSession, method: str, url: str, *, json: object, timeout_s: float
) -> dict[str, Any]:
    """Return the JSON object in a response with status 200, otherwise an empty object."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        # A redirect could lead to another machine, so none is followed.
        async with session.request(method, url, json=json, timeout=timeout, allow_redirects=False) as response:
            if response.status != 200:
                return {}
            content = await response.content.read(MAX_ANSWER_BYTES)
            # One `read` returns only the bytes that have arrived.
            while not response.content.at_eof() and len(content) < MAX_ANSWER_BYTES:
                content += await response.content.read(MAX_ANSWER_BYTES)
        answer = _parsed(content)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _parsed(content: bytes) -> object:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
