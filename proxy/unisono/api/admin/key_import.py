"""Route `/key/import`, which imports keys of a LiteLLM proxy. LiteLLM has no such route."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

from unisono.api.admin.administration import ADMIN, AdminDeps, CurrentActor
from unisono.api.admin.fields import AdminBody, Names
from unisono.api.admin.litellm_key_rows import import_keys
from unisono.api.answer_types import AnswerModel
from unisono.api.dependencies import ParsedBody
from unisono.api.route_table import BODY_404_409

MAX_ROWS: Final = 1000


class ImportKeys(AdminBody):
    """Body of `/key/import`: rows of LiteLLM's `/key/list?return_full_object=true`.

    `ignore` contains the names of settings to drop. With `create_owners`, missing teams and users are created without
    limits.
    """

    keys: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    ignore: Names = Field(default_factory=list)
    create_owners: bool = False


class ImportResult(AnswerModel):
    """Result for one key.

    `error` is null for an imported key; `created` is false if it was imported before.
    """

    name: str
    token: str | None
    created: bool
    error: str | None


class ImportAnswer(AnswerModel):
    keys: list[ImportResult]


@ADMIN.add("POST", "/key/import", BODY_404_409, body=ImportKeys)
async def import_keys_route(admin: AdminDeps, actor: CurrentActor, body: ParsedBody[ImportKeys]) -> ImportAnswer:
    """Import keys of a LiteLLM proxy. A key that is refused does not affect the other keys."""
    found = await import_keys(admin, actor, body.keys, ignored=body.ignore, creates_owners=body.create_owners)
    return ImportAnswer(
        keys=[
            ImportResult(
                name=each.name,
                token=each.id or None,
                created=each.is_new and not each.problem,
                error=each.problem or None,
            )
            for each in found
        ]
    )
