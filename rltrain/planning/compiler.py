"""Whether this machine can compile what torch and vLLM write while they run."""

import subprocess
import sysconfig
from collections.abc import Mapping

SOURCE = "#include <Python.h>\n#include <omp.h>\n"
LIMIT_S = 60.0
REMEDY = "install a C++ compiler and the headers of this Python (apt install g++ python3-dev)"


def compiler_problem(environment: Mapping[str, str]) -> str:
    """What is missing to compile a C++ extension of this Python; empty where nothing is.

    Args:
        environment: may name another compiler than g++ with ``CXX``, which torch follows
    """
    compiler = environment.get("CXX") or "g++"
    headers = sysconfig.get_path("include")
    command = [compiler, "-x", "c++", "-fsyntax-only", f"-I{headers}", "-"]
    try:
        tried = subprocess.run(
            command, input=SOURCE, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except FileNotFoundError:
        return f"there is no {compiler}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} does not run ({error})"
    if tried.returncode == 0:
        return ""
    if "Python.h" in tried.stderr:
        return f"the headers of Python are not in {headers}"
    return f"{compiler} says: {' '.join(tried.stderr.split())[:300]}"


def check_compiler(environment: Mapping[str, str]) -> None:
    """ValueError where nothing can be compiled: engines on a CPU would die at their first request.

    Engines on a GPU compile, too, and what they need differs with their kernels.
    """
    if problem := compiler_problem(environment):
        raise ValueError(
            "vLLM compiles C++ on a CPU: expected a compiler that finds the headers of Python and "
            f"OpenMP, found that {problem}: {REMEDY}"
            " [RL4015]"
        )
