"""A run that another machine began, of which only the place of its checkpoints is known.

    adopted("s3://bucket/prefix/run") -> RunDirectory

The newest checkpoint holds the configuration; the run's directory on this machine is made from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from flows.stores import asked, environment_endpoint
from storage.home import home
from storage.runs import RunDirectory, check_name
from storage.stores import S3Access, Store, open_store

if TYPE_CHECKING:
    from storage.checkpoints import Checkpoint


def adopted(place: str) -> RunDirectory:
    """The run's directory below this home, made if need be.

    Args:
        place: where its checkpoints are: `checkpoint.url` and the run's name. Endpoint and keys of an S3 service come
            from the environment.

    Raises:
        ConfigError: there is no whole checkpoint, it cannot be read, or another run here has the name.
    """
    above, name = split_place(place)
    path = home() / name
    if path.is_dir():
        directory = RunDirectory.open(home(), name)
        if (directory.read_config().checkpoint.url or "").rstrip("/") == above:
            return directory
        raise ConfigError(
            f"{path} is another run than {place}: its checkpoint.url is not {above}; resume in another DIGENRL_HOME"
        )
    config = config_in(found_at(open_place(place), place), above)
    return RunDirectory.create(home(), name, config, name)


def split_place(place: str) -> tuple[str, str]:
    """`checkpoint.url` and the name of the run.

    Raises:
        ConfigError: the last part is no possible name.
    """
    above, _, name = place.rstrip("/").rpartition("/")
    check_name(name)
    return (above if "://" in above else str(Path(above or "/").expanduser().absolute())), name


def open_place(place: str) -> Store:
    """Open where the checkpoints of a run are.

    Raises:
        ConfigError: it cannot be read.
    """
    endpoint = environment_endpoint() if place.startswith("s3:") else None
    asked(f"RUN={place}", endpoint, lambda: open_store(place, S3Access(), attempts=1).folders())
    return open_store(place, S3Access())


def found_at(store: Store, place: str) -> Checkpoint:
    """The newest whole checkpoint.

    Raises:
        ConfigError: there is none.
    """
    from storage.checkpoints import newest  # imports torch, which takes seconds

    if (checkpoint := newest(store)) is None:
        raise ConfigError(f"{place} has no whole checkpoint; expected folders named step-… with a manifest.json each")
    return checkpoint


def config_in(checkpoint: Checkpoint, above: str) -> RunConfig:
    """The run's configuration, with checkpoints where they were found and reached as they were.

    Raises:
        ConfigError: this version does not understand it.
    """
    reached: dict[str, Any] = {"url": above, "endpoint": None, "credentials_block": None}
    if above.startswith("s3://"):
        reached["endpoint"] = environment_endpoint()
    try:
        saved = checkpoint.state["config"]
        return RunConfig.model_validate({**saved, "checkpoint": {**saved["checkpoint"], **reached}})
    except (ValidationError, KeyError, TypeError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"{error} is missing"
        raise ConfigError(
            f"the configuration in {checkpoint.info.url} is not one of this version of DigenRL: {problem}"
        ) from None
