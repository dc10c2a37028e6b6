"""Who holds what of the nodes of a Ray cluster: placement groups and actors, with their drivers."""

from collections import defaultdict
from collections.abc import Iterator

from ray._private import state
from ray.core.generated import gcs_pb2

MOST = 60
"""Characters of a command to show."""


def read_holders() -> dict[str, tuple[str, ...]]:
    """By Ray's name of a node, as ``4 GPU: process 17 on 10.0.0.1 (python train.py)``.

    Tasks that run without an actor are missing: Ray's tables do not list them.
    """
    jobs = {job["JobID"]: _driver(job) for job in state.jobs()}
    held: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for node, job, resources in (*_groups(), *_actors()):
        for kind in ("GPU", "CPU"):
            if resources.get(kind):
                holder = jobs.get(job, f"job {job}"), kind
                held[node][holder] = held[node].get(holder, 0.0) + resources[kind]
    return {
        node: tuple(f"{amount:g} {kind}: {driver}" for (driver, kind), amount in found.items())
        for node, found in held.items()
    }


def _driver(job: dict[str, object]) -> str:
    command = str(job["Entrypoint"])
    shown = command if len(command) <= MOST else f"{command[: MOST - 3]}..."
    return f"process {job['DriverPid']} on {job['DriverIPAddress']} ({shown})"


def _groups() -> Iterator[tuple[str, str, dict[str, float]]]:
    """(node, job, what is held) of each bundle."""
    for written in state.state._connect_and_get_accessor().get_placement_group_table():
        group = gcs_pb2.PlacementGroupTableData.FromString(written)
        if group.state == gcs_pb2.PlacementGroupTableData.CREATED:
            for bundle in group.bundles:
                resources = dict(bundle.unit_resources)
                yield bundle.node_id.hex(), group.creator_job_id.hex(), resources


def _actors() -> Iterator[tuple[str, str, dict[str, float]]]:
    """The same of each actor that is in no placement group."""
    for written in state.state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
        actor = gcs_pb2.ActorTableData.FromString(written)
        if not actor.placement_group_id:
            yield actor.address.node_id.hex(), actor.job_id.hex(), dict(actor.required_resources)
