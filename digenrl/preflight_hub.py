"""Can a checkpoint be downloaded from the hub? Asked with one HEAD request, before anything is started.

hub_problem(hub_id) -> str | None     a sentence, or None if the hub has it (or does not say)

As huggingface_hub does, this obeys HF_ENDPOINT, HF_TOKEN and the token that `hf auth login` leaves.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 5.0


def hub_cache() -> Path:
    """Where huggingface_hub keeps models (https://huggingface.co/docs/huggingface_hub/guides/manage-cache)."""
    return Path(os.environ.get("HF_HUB_CACHE") or _hub_home() / "hub").expanduser()


def hub_problem(hub_id: str) -> str | None:
    """Why `hub_id`, OWNER/NAME, cannot be downloaded from here; None if nothing speaks against it."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    request = urllib.request.Request(f"{endpoint}/{hub_id}/resolve/main/model_index.json", method="HEAD")
    if token := _token():
        # Not sent on when the hub redirects to another host.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return _refusal(hub_id, endpoint, error.code, error.headers.get("X-Error-Code", ""), token is not None)
    except OSError as error:
        reason = getattr(error, "reason", error)
        return (
            f"model.path={hub_id} is no directory here and not in the local hub cache {hub_cache()}, and {endpoint} "
            f"cannot be reached ({reason}); give the path of a directory, or download it where there is a network"
        )


def _refusal(hub_id: str, endpoint: str, code: int, error: str, logged_in: bool) -> str | None:
    log_in = "" if logged_in else " and log in with `hf auth login`"
    if error == "GatedRepo":
        return f"model.path={hub_id} is gated: accept its conditions at {endpoint}/{hub_id}{log_in}"
    if error == "EntryNotFound":
        return f"model.path={hub_id} must be a diffusers pipeline, but {endpoint}/{hub_id} has no model_index.json"
    if code in (401, 403, 404):
        return f"model.path={hub_id} is no directory here, and {endpoint} has no such model for you; check its name" + (
            "" if logged_in else ", or log in with `hf auth login` if it is private or gated"
        )
    return None  # the hub has a bad day, which may be over when the model is needed


def _hub_home() -> Path:
    return Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")


def _token() -> str | None:
    if given := os.environ.get("HF_TOKEN", "").strip():
        return given
    path = Path(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token").expanduser()
    return path.read_text().strip() or None if path.is_file() else None
