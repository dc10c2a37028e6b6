"""Where this process runs."""

import ray.util


def node_address() -> str:
    """The address by which Ray knows this node, in a process that is connected to Ray."""
    return str(ray.util.get_node_ip_address())
