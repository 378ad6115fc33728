"""Field types of the admin API, and LiteLLM's fields that do not apply.

A field that does not apply is accepted only if its value requests nothing. LiteLLM's clients send some of these fields
in every request. An unknown field is always refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from unisono.api.field_types import invalid_field
from unisono.config.budget_settings import to_period
from unisono.core.budget_period import NO_PERIOD, Period
from unisono.core.conversation import Json
from unisono.core.quotas import MILLION
from unisono.errors import UnsupportedValue

# Integers up to this bound are exact wherever they are stored.
MAX_INTEGER: Final = 2**53
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_NAMES: Final = 1000
MAX_PAGE_SIZE: Final = 100
PERIOD_NAMES: Final = {"day": Period("day"), "month": Period("month"), "none": NO_PERIOD}
UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
# One hundred years. The unit of a longer duration must be a mistake.
MAX_DURATION_S: Final = 100 * 366 * 86_400
# Expiry that LiteLLM's clients send for a key that never expires.
NEVER: Final = "-1"
# Names in LiteLLM's lists of models that permit all models, or no model.
ALL_MODELS: Final = frozenset({"all-proxy-models", "all-team-models", "*"})
NO_MODELS: Final = "no-default-models"

NEUTRAL_VALUES: Final[tuple[Any, ...]] = (None, [], {}, False, 0, "")
# Fields of LiteLLM that do not apply, by the reason.
REASONS: Final[Mapping[str, str]] = {
    "this gateway has teams and users only": "organization_id organizations project_id agent_id access_group_ids",
    "limits apply to all models together": (
        "model_max_budget model_rpm_limit model_tpm_limit model_itpm_limit model_otpm_limit mcp_rpm_limit "
        "tag_rpm_limit tpd_limit team_member_model_max_budget"
    ),
    "the only budget is `max_budget` in each `budget_duration`": (
        "budget_limits budget_fallbacks end_user_budget_id temp_budget_increase temp_budget_expiry "
        "throttle_on_budget_exceeded team_member_budget team_member_budget_duration max_budget_in_team budget_reset_at"
    ),
    "limits are reserved before a request and settled after it": (
        "rpm_limit_type tpm_limit_type default_estimated_output_tokens default_estimated_output_tokens_per_model "
        "team_member_rpm_limit team_member_tpm_limit"
    ),
    "models, their aliases and their routing are configured in the file": (
        "aliases model_aliases router_settings config allowed_model_region default_model"
    ),
    "guardrails, hooks, logs and secrets are configured in the file": (
        "guardrails policies prompts disable_global_guardrails enforced_params logging secret_manager_settings "
        "new_master_key"
    ),
    "permissions follow from the role of a user": (
        "permissions allowed_routes allowed_passthrough_routes denied_passthrough_routes team_member_permissions"
    ),
    "this gateway has no such cache, index or check": (
        "allowed_cache_controls enable_prompt_caching allowed_vector_store_indexes require_trace_id "
        "enforced_batch_output_expires_after enforced_file_expires_after"
    ),
    "keys are rotated with /key/regenerate": "auto_rotate rotation_interval team_member_key_duration",
    "users can log in only with their keys": "send_invite_email sso_user_id password",
    "the gateway generates every key itself": "key new_key",
    "the spend is counted and cannot be set": "spend",
    "members are listed in `members_with_roles`": "admins members",
    "permissions for tool servers are settings of keys": "object_permission",
    "members may use the models of their team": "allowed_models default_team_member_models",
}
NOT_APPLICABLE: Final[Mapping[str, str]] = {name: reason for reason, names in REASONS.items() for name in names.split()}
# Settings that LiteLLM reads from `metadata`, and stores there if a request sends them as fields. `tags` is not
# one of them, because this gateway supports it.
METADATA_SETTINGS: Final = frozenset(
    (
        *("model_rpm_limit", "model_tpm_limit", "model_itpm_limit", "model_otpm_limit", "mcp_rpm_limit"),
        *("tag_rpm_limit", "rpm_limit_type", "tpm_limit_type", "default_estimated_output_tokens"),
        *("default_estimated_output_tokens_per_model", "enforced_params", "temp_budget_increase", "temp_budget_expiry"),
        *("allowed_vector_store_indexes", "enforced_batch_output_expires_after", "enforced_file_expires_after"),
        *("throttle_on_budget_exceeded", "enable_prompt_caching", "end_user_budget_id", "disable_global_guardrails"),
        *("guardrails", "policies", "team_member_key_duration", "prompts", "logging", "secret_manager_settings"),
        *("allowed_passthrough_routes", "denied_passthrough_routes"),
    )
)


class AdminBody(BaseModel):
    """Body of an admin request. Unknown fields, and fields that do not apply, are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_inapplicable(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return _without(value, NOT_APPLICABLE.keys() - cls.model_fields.keys())

    def changes(self, *names: str) -> dict[str, Any]:
        """Return those of the fields `names` that the body contains; None removes a setting."""
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


def _without(value: Mapping[str, Any], names: Collection[str], path: str = "") -> dict[str, Any]:
    """Return an object without the fields `names`, which this gateway does not support.

    `path` precedes the names of the fields in errors. Raises `UnsupportedValue` if one of these fields has a value that
    is not neutral.
    """
    for name, each in value.items():
        if name in names and each not in NEUTRAL_VALUES:
            raise UnsupportedValue(f"'{path}{name}': {NOT_APPLICABLE[name]}; omit this field.", param=f"{path}{name}")
    return {name: each for name, each in value.items() if name not in names}


def _to_duration(value: str) -> str:
    seconds_of(value)
    return value


def _to_expiry(value: str) -> str:
    return value if value == NEVER else _to_duration(value)


def seconds_of(text: str) -> int:
    """Return the seconds of a duration such as `30s`, `30m`, `12h`, `30d`, `2w` or `1mo`.

    Raises PydanticCustomError for any other text, and for more than `MAX_DURATION_S`.
    """
    found = re.fullmatch(r"([1-9]\d{0,9})(mo|[smhdw])", text, re.ASCII)
    seconds = 0 if found is None else int(found[1]) * UNIT_SECONDS.get(found[2], 30 * 86_400)
    if not 0 < seconds <= MAX_DURATION_S:
        raise invalid_field("must be a duration such as `30s`, `30m`, `12h`, `30d`, `2w` or `1mo`")
    return seconds


def _to_period_text(value: str) -> str:
    period_of(value)
    return value


def period_of(text: str | None) -> Period:
    """Return the period of a text such as `30d`, `1mo`, `day`, `month` or `none`.

    Raises PydanticCustomError for any other text.
    """
    if text is None:
        return NO_PERIOD
    try:
        return PERIOD_NAMES[text] if text in PERIOD_NAMES else to_period(text)
    except ValueError as error:
        raise invalid_field(str(error)) from None


def applicable_metadata(value: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without neutral settings that do not apply.

    Raises `UnsupportedValue` for other settings that do not apply. Those that are equal to the `stored` metadata are
    permitted: earlier versions stored them, and clients send them back.
    """
    kept = {name for name, each in value.items() if name in stored and stored[name] == each}
    return _without(value, METADATA_SETTINGS - kept, "metadata.")


def _new_metadata(value: dict[str, Any]) -> dict[str, Any]:
    return applicable_metadata(value, {})


def _bounded_metadata(value: dict[str, Any]) -> dict[str, Any]:
    try:
        size = len(orjson.dumps(value))
    except orjson.JSONEncodeError:
        raise invalid_field("contains a value that is not valid JSON") from None
    if size > MAX_METADATA_BYTES:
        raise invalid_field(f"must have at most {MAX_METADATA_BYTES:,} bytes")
    return value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise invalid_field("must be one line of printable characters")
    return value


def _micro_exact(value: float) -> float:
    if value and not round(value * MILLION):
        raise invalid_field("must be 0 or at least a millionth of a USD")
    return value


# The length is checked before the validator. Otherwise Pydantic's error would speak of items instead of characters.
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_printable)]
Names = Annotated[list[Name], Field(max_length=MAX_NAMES)]
Amount = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Usd = Annotated[float, Field(ge=0, le=1e9), AfterValidator(_micro_exact)]
DurationText = Annotated[str, AfterValidator(_to_duration)]
ExpiryText = Annotated[str, AfterValidator(_to_expiry)]
PeriodText = Annotated[str, AfterValidator(_to_period_text)]
# Bodies that create an object have the type `NewMetadata`, so that they are refused before anything is reserved.
Metadata = Annotated[dict[str, Any], AfterValidator(_bounded_metadata)]
NewMetadata = Annotated[Metadata, AfterValidator(_new_metadata)]


def to_models(names: list[str] | None) -> frozenset[str] | None:
    """Return permitted models; None for all. An empty list permits all, as in LiteLLM."""
    if not names or ALL_MODELS.intersection(names):
        return None
    return frozenset(names) - {NO_MODELS}


def models_answer(models: frozenset[str] | None) -> list[Json]:
    return [] if models is None else [*sorted(models)] or [NO_MODELS]


def iso(at: float | None) -> str | None:
    """Return a time as LiteLLM writes it; None for a time that is missing."""
    return None if not at else datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def has_part(part: str | None, *texts: str) -> bool:
    """Return True if one of the texts contains `part`, ignoring case, or if `part` is empty."""
    return not part or any(part.casefold() in text.casefold() for text in texts)
