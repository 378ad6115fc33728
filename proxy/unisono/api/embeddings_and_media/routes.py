"""Routes of models that generate no text, such as embeddings and images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_report import backend_header
from unisono.api.body import off_loop, read_model_request
from unisono.api.caller_options import REQUESTED_MODEL, caller_with_options, without_options
from unisono.api.disconnects import until_disconnect
from unisono.api.embeddings_and_media.byte_stream import started_bytes
from unisono.api.embeddings_and_media.inbound import ModeModel, requested_model, to_generation_request
from unisono.api.embeddings_and_media.schema import (
    AudioTranscript,
    EmbeddingList,
    EmbeddingsRequest,
    Images,
    ImagesRequest,
    Moderations,
    ModerationsRequest,
    RerankRequest,
    RerankResults,
    ScoreList,
    ScoreRequest,
    SpeechRequest,
)
from unisono.api.embeddings_and_media.upload import SpooledUpload, read_options, read_upload, remaining_parts
from unisono.api.end_user_fields import identify_end_user
from unisono.api.json_response import to_whole
from unisono.api.passthrough_requests import whole
from unisono.api.path_aliases import PATH_MODEL
from unisono.api.route_table import RouteTable, dependency
from unisono.core.access import Caller
from unisono.core.frozen import dataclass
from unisono.core.passthrough_request import Api, answers_bytes
from unisono.engine.request import GenerationRequest, GenerationService, GenerationStream

OTHER_MODES = RouteTable("other modes")


class Audio(Response):
    """Audio of any type, for the OpenAPI document."""

    media_type = "audio/*"


# Path of version 2 of Cohere's API.
RERANK_V2 = RouteTable("other modes", prefixes=("/v2",), suffix="V2")


# Function that finds a model by its name, with aliases and defaults applied. It raises UnknownModel, ModelNotAllowed,
# and UnsupportedValue if the mode of the model does not fit the API.
FindModel = Callable[[Api, str, Caller], ModeModel]


@dataclass(frozen=True, slots=True)
class ModeRoute:
    """Handler of the APIs whose models generate no text."""

    service: GenerationService
    find: FindModel

    async def answer(self, request: Request, api: Api) -> Response:
        stream, is_bytes = await self._start(request, api)
        if is_bytes:
            return await started_bytes(request, stream)
        answer = await until_disconnect(request, whole(stream))
        return to_whole(answer, backend_header([stream.report]))

    async def answer_upload(self, request: Request, api: Api) -> Response:
        """Answer a form. The form's file is deleted when the response has been sent."""
        upload = await read_upload(request)
        try:
            generation_request = await self._upload_request(request, api, upload)
            stream = self.service.start(generation_request)
            return await started_bytes(request, stream, upload.close, whole=generation_request.answer.whole)
        except BaseException:
            upload.close()
            raise

    async def _upload_request(self, request: Request, api: Api, upload: SpooledUpload) -> GenerationRequest:
        options = read_options(upload.options)
        fields: dict[str, Any] = {**upload.fields, **dict.fromkeys(upload.files, "")}
        if model := getattr(request.state, PATH_MODEL, ""):
            fields["model"] = model
        await identify_end_user(request, fields, "user")
        caller = request.state.caller = caller_with_options(request, request.state.caller, {**fields, **options})
        rest = without_options(request, options)
        for part in remaining_parts(upload.options, options, rest):
            await upload.write(part)
        name = requested_model(fields)
        setattr(request.state, REQUESTED_MODEL, name)
        found = self.find(api, name, caller)
        return to_generation_request(api, {**fields, **rest}, found, caller, request.state.request_id, upload)

    async def _start(self, request: Request, api: Api) -> tuple[GenerationStream, bool]:
        """Start the generation. Return its stream, and True if the answer is relayed as bytes."""
        body = await read_model_request(request, "user")
        caller: Caller = request.state.caller
        model = self.find(api, requested_model(body), caller)
        generation_request = await off_loop(
            lambda: to_generation_request(api, body, model, caller, request.state.request_id),
            len(await request.body()),
        )
        return self.service.start(generation_request), answers_bytes(api, body)


@OTHER_MODES.add_model_call("/embeddings", answer=EmbeddingList, body=EmbeddingsRequest)
async def create_embeddings(request: Request) -> Response:
    """Create embeddings, with a model of the mode `embedding`."""
    return await dependency(request, ModeRoute).answer(request, Api.EMBEDDINGS)


@RERANK_V2.add_model_call("/rerank", answer=RerankResults, body=RerankRequest)
@OTHER_MODES.add_model_call("/rerank", answer=RerankResults, body=RerankRequest)
async def rerank_documents(request: Request) -> Response:
    """Order documents by their relevance to a query; the mode is `rerank` or `score`."""
    return await dependency(request, ModeRoute).answer(request, Api.RERANK)


@OTHER_MODES.add_model_call("/score", answer=ScoreList, body=ScoreRequest)
async def score_texts(request: Request) -> Response:
    """Compare pairs of texts, with a model of the mode `score` or `rerank`."""
    return await dependency(request, ModeRoute).answer(request, Api.SCORE)


@OTHER_MODES.add_model_call("/moderations", answer=Moderations, body=ModerationsRequest)
async def create_moderation(request: Request) -> Response:
    """Classify texts, with a model of the mode `moderation`."""
    return await dependency(request, ModeRoute).answer(request, Api.MODERATIONS)


@OTHER_MODES.add_model_call("/images/generations", answer=Images, body=ImagesRequest)
async def generate_images(request: Request) -> Response:
    """Generate images, with a model of the mode `image_generation`."""
    return await dependency(request, ModeRoute).answer(request, Api.IMAGES)


@OTHER_MODES.add_model_call("/audio/speech", answer=bytes, response_class=Audio, body=SpeechRequest)
async def create_speech(request: Request) -> Response:
    """Generate spoken text, with a model of the mode `audio_speech`."""
    return await dependency(request, ModeRoute).answer(request, Api.SPEECH)


@OTHER_MODES.add_model_call("/audio/transcriptions", answer=AudioTranscript)
async def create_transcription(request: Request) -> Response:
    """Transcribe audio, with a model of the mode `audio_transcription`. The body is a form."""
    return await dependency(request, ModeRoute).answer_upload(request, Api.TRANSCRIPTIONS)


@OTHER_MODES.add_model_call("/audio/translations", answer=AudioTranscript)
async def create_translation(request: Request) -> Response:
    """Translate audio to English; the mode is `audio_transcription`, and the body is a form."""
    return await dependency(request, ModeRoute).answer_upload(request, Api.TRANSLATIONS)
