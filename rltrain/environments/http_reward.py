"""A reward that a service computes: one POST for the responses of a group. In the workers alone."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
SHARE = 0.9
"""Of ``data.reward.timeout_s``, so that what went wrong is said before the worker is killed."""
LONGEST_ANSWER = 1 << 24
MOST_READ, SHOWN = 1 << 16, 200
"""Of an answer that is an error: bytes that are read, and characters that are shown."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def http_reward(url: str, timeout_s: float, token: str | None) -> Callable[..., Any]:
    """A reward function of a whole group that asks the service at ``url``.

    Args:
        timeout_s: the limit of a call, with all its tries
        token: for ``Authorization: Bearer``; no message ever holds it
    """
    opener = urllib.request.build_opener(_NoRedirects)
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"

    def ask(responses: list[str], answer: object, **columns: object) -> list[Any]:
        body = json.dumps({"responses": responses, "answer": answer, "columns": columns}).encode()
        request = urllib.request.Request(url, body, headers, method="POST")
        return _rewards(url, _post(opener, request, time.monotonic() + SHARE * timeout_s, token))

    ask.takes_group = True  # type: ignore[attr-defined]
    return ask


def _post(
    opener: urllib.request.OpenerDirector,
    request: urllib.request.Request,
    deadline: float,
    token: str | None,
) -> bytes:
    """The answer. A server that is busy, broken or away is asked again until the deadline.

    Raises:
        ValueError: there is none.
    """
    pause, tries = FIRST_PAUSE_S, 0
    while True:
        tries += 1
        try:
            left = max(0.01, deadline - time.monotonic())
            with opener.open(request, timeout=left) as answer:
                content: bytes = answer.read(LONGEST_ANSWER + 1)
                return content
        except urllib.error.HTTPError as error:
            why = f"status {error.code}, {_shown(error.read(MOST_READ), token)!r}"
            again = error.code == 429 or error.code >= 500
        except (OSError, HTTPException) as error:  # URLError is an OSError
            why, again = str(error) or type(error).__name__, True
        if not again or time.monotonic() + pause >= deadline:
            times = "once" if tries == 1 else f"{tries} times"
            raise ValueError(
                f"{request.full_url}: expected status 200, asked {times} and found {why}: mend "
                "the service, or raise data.reward.timeout_s [RL2010]"
            )
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _shown(answer: bytes, token: str | None) -> str:
    """Redacted before it is cut: a part of a token is one, too."""
    text = answer.decode(errors="replace")
    return (text.replace(token, "[redacted]") if token else text)[:SHOWN]


def _rewards(url: str, content: bytes) -> list[Any]:
    """
    Raises:
        ValueError: the answer is not ``{"rewards": [...]}``.
    """
    try:
        if len(content) > LONGEST_ANSWER:
            raise ValueError("too long")
        rewards = json.loads(content)["rewards"]
        if isinstance(rewards, list):
            return rewards
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(
        f'{url}: expected {{"rewards": [number, ...]}}, found an answer of {len(content)} bytes '
        "that is none [RL2011]"
    )
