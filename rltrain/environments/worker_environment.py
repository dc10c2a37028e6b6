"""The environment variables of a reward worker: those that programs need, and no secrets."""

from collections.abc import Mapping

from rltrain.config.redact import URL_LOGIN
from rltrain.config.secret_names import is_secret

NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "LANG", "LANGUAGE", "TZ"}
    | {"TMPDIR", "TEMP", "TMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV"}
    | {"SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"}
    | {"NLTK_DATA", "MPLCONFIGDIR", "JAVA_HOME"}
)
"""In capitals; the names in small letters, too, for proxies."""
PREFIXES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_"),
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMEXPR_", "NUMBA_", "VECLIB_"),
    *("CUDA_", "NVIDIA_", "TORCH", "TRITON_"),
    *("HF_", "TRANSFORMERS_", "TOKENIZERS_"),
)


def worker_environment(
    driver: Mapping[str, str], named: Mapping[str, str | int | None]
) -> dict[str, str]:
    """What a reward worker has of the driver's environment, and what ``data.reward.env`` names.

    A variable whose name or value looks like a secret is left out, unless it is named.

    Args:
        named: by name, a value; None: the driver's
    Raises:
        ValueError: the driver does not have it. No value is ever shown.
    """
    if missing := [name for name, value in named.items() if value is None and name not in driver]:
        raise ValueError(
            f"data.reward.env.{missing[0]}=null passes on a variable of the environment in which "
            f"the run starts, and there is none of that name: export {missing[0]}, or give a value"
            " [RL2017]"
        )
    passed = {name: driver[name] if value is None else str(value) for name, value in named.items()}
    usual = {name: value for name, value in driver.items() if _is_usual(name, value)}
    return usual | passed


def _is_usual(name: str, value: str) -> bool:
    known = name.upper() in NAMES or name.startswith(PREFIXES)
    return known and not is_secret(name) and not URL_LOGIN.search(value)
