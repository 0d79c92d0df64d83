"""DigenRL's own Prefect and MLflow servers: one of each per home, shared by every `train`, `up` and `serve` on it.

    handle    `ensure` starts or joins the servers, `ServicesHandle` is the caller's share in them, `release` ends it
    drain     wait until Prefect has recorded the task runs that were emitted
    lookout   replace a supervisor that was killed, and say when Prefect is gone and when it is back
    burial    mark the flow runs of killed processes as Crashed
    serve     keep both servers up until Ctrl-C

    specs     what the two servers are: commands, ports, environment of server and client
    state     the files of ``<home>/.services``: leases, services.json, lock, logs
    ports     a port that no other home takes between choosing and binding it
    server    one server process: start, health, restart, end
    supervisor  the detached process that owns the servers and lives as long as somebody holds a lease

A process asks for servers by writing a *lease*: its pid, its start time and the services it wants. The supervisor
makes the servers match the living leases, so nothing is ever left behind: an owner that is killed loses its lease, the
last lease ends the supervisor, and a supervisor that is killed takes the servers along (`flows.childguard`).
Nothing here imports Prefect or MLflow, so that `client_env` can be applied before they are. `burial` and `serve` know
runs, which the supervisor need not wait for: they are imported from their modules.
"""

from flows.services.drain import drain_prefect
from flows.services.handle import ServicesHandle, ensure, release
from flows.services.state import ServiceError

__all__ = ["ServiceError", "ServicesHandle", "drain_prefect", "ensure", "release"]
