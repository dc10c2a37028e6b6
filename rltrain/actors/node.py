"""Where this process runs."""


def node_address() -> str:
    """The address by which Ray knows this node, in a process that is connected to Ray."""
    import ray  # takes a second, and not all that import this module need it

    return str(ray.util.get_node_ip_address())
