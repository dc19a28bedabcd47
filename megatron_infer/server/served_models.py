"""The names that calls may give as their model: the served model's, and those of its LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_infer.server.http_errors import ApiError

if TYPE_CHECKING:
    from megatron_infer.server.engine_client import EngineClient

SHOWN = 20
"""Names in an error."""


def adapter_of(client: EngineClient, name: str | None) -> str | None:
    """The adapter that a call's `model` names; None: it names the model itself, or nothing."""
    return name if name and name not in client.model_names and name in client.adapters else None


def shown_name(client: EngineClient, name: str | None) -> str:
    """The name of a call's model in its reply."""
    return adapter_of(client, name) or client.model_names[0]


def check_model(client: EngineClient, name: str | None) -> None:
    """Raises ApiError 404 for a model that this server does not serve, 503 while it is loading.

    None or "": no name is given.
    """
    if not name or name in client.model_names or adapter_of(client, name):
        return
    _ = client.limits  # while the model is loading, its adapters are not known
    served = [*client.model_names, *client.adapters]
    shown = ", ".join(served[:SHOWN]) + (f" and {len(served) - SHOWN} more" if len(served) > SHOWN else "")
    message = f"the model {name[:200]!r} is not served here; there is {shown}"
    raise ApiError(404, message, param="model", code="model_not_found")
