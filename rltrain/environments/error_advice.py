"""What to do about an error of a reward function that its process brought about."""

import re
from collections.abc import Iterable, Mapping

LIMITS = {
    "MemoryError": "memory_gib",
    "DefaultCPUAllocator": "memory_gib",  # torch says so
    "Cannot allocate memory": "memory_gib",
    "File too large": "file_gib",
}
"""Which limit an error may come from, by words in it."""


def error_advice(
    text: str, limits: Mapping[str, object], driver: Iterable[str], given: Iterable[str]
) -> str:
    """To append to the text of an error; "" where there is nothing to say.

    Args:
        limits: ``data.reward.limits``
        driver, given: names of the driver's environment variables and of the worker's
    """
    variables = set(re.findall(r"[A-Z][A-Z0-9]*_[A-Z0-9_]+", text))
    if withheld := sorted(variables.intersection(driver).difference(given)):
        return (
            f". Reward functions do not get {withheld[0]} of the environment: set "
            f"data.reward.env.{withheld[0]}=null to pass it on"
        )
    keys = [key for words, key in LIMITS.items() if words in text and limits[key] is not None]
    return f". The process has data.reward.limits.{keys[0]}={limits[keys[0]]}" if keys else ""
