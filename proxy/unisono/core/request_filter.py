"""Filter of request records, and the facets of a record that a filter can select."""

from __future__ import annotations

from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.request_record import RequestRecord

# Facet of the records of failed requests, and facet of the records with any recovery.
FAILED: Final = "failed"
RECOVERED: Final = "recovered"


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Conditions that a record must meet; an empty value or None is not a condition.

    `recovery` is the name of a recovery rule, or `any`. The request must have ended between `since` and `until`, in
    seconds since 1970.
    """

    tenant: str | None = None
    key: str | None = None
    model: str = ""
    deployment: str = ""
    status: int = 0
    failed: bool = False
    recovery: str = ""
    since: float = 0.0
    until: float | None = None

    @property
    def facets(self) -> tuple[str, ...]:
        """Return the facets (see `facets_of`) that a record must have."""
        wanted = [
            *([RECOVERED] if self.recovery == "any" else [f"recovery:{self.recovery}"] if self.recovery else []),
            *([f"status:{self.status}"] if self.status else []),
            *([FAILED] if self.failed else []),
            *([] if self.key is None else [f"key:{self.key}"]),
            *([] if self.tenant is None else [f"tenant:{self.tenant}"]),
            *([f"deployment:{self.deployment}"] if self.deployment else []),
            *([f"model:{self.model}"] if self.model else []),
        ]
        return tuple(wanted)


def facets_of(record: RequestRecord) -> tuple[str, ...]:
    """Return the facets by which queries find a record, such as `status:200` or `model:NAME`."""
    facets = [f"tenant:{record.tenant}", f"key:{record.key}", f"status:{record.status}"]
    if record.model:
        facets.append(f"model:{record.model}")
    if record.deployment:
        facets.append(f"deployment:{record.deployment}")
    if has_failed(record):
        facets.append(FAILED)
    if record.recoveries:
        facets.append(RECOVERED)
        facets += [f"recovery:{rule}" for rule in record.recoveries]
    return tuple(facets)


def has_failed(record: RequestRecord) -> bool:
    return record.status >= 400 or bool(record.error)
