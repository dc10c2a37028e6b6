"""A reward of a service, over a real connection: what is sent, asked again, refused and hidden."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rltrain.environments.reward_sample import RewardInput

TOKEN = "s3cr3t-of-the-judge"


class Service(ThreadingHTTPServer):
    """Answers as the first response says: ``STATUS`` so often, then the lengths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.before = 0
        self.seen: list[tuple[str | None, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers["Authorization"], body))
        what, _, times = body["responses"][0].partition(" ")
        tries = sum(one["responses"] == body["responses"] for _, one in self.server.seen)
        answer = json.dumps({"rewards": [len(response) for response in body["responses"]]})
        status = 200
        if what.isdigit() and tries <= int(times or 99):
            status, answer = (
                int(what),
                "no, " + " " * self.server.before + f"{self.headers['Authorization']}",
            )
        elif what == "drop" and tries == 1:
            return self.connection.close()
        elif what == "few":
            answer = '{"rewards": []}'
        elif what == "text":
            answer = "fine"
        self.send_response(status)
        self.send_header("Location", self.server.url)
        self.end_headers()
        self.wfile.write(answer.encode())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN)
    with Service() as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield served
        served.shutdown()


def group(*responses: str) -> list[RewardInput]:
    return [RewardInput(r, r, {"a": 1}, "1+1=", {"level": 2}, "id") for r in responses]


def test_a_group_is_one_request(pool_of, service):
    with pool_of(service.url, token_env="JUDGE_TOKEN") as pool:
        results = pool.collect(pool.submit_group(group("x", "xyz")))
        assert [r.value for r in pool.score(group("xy"))] == [2.0]
    assert [r.value for r in results] == [1.0, 3.0]
    texts = ["x", "xyz"]
    columns = {"level": 2, "prompt": "1+1=", "responses_raw": texts, "responses_clean": texts}
    sent = {"responses": texts, "answer": {"a": 1}, "columns": columns}
    assert service.seen[0] == (f"Bearer {TOKEN}", sent) and len(service.seen) == 2


@pytest.mark.parametrize(("what", "tries"), [("503 2", 3), ("429 1", 2), ("drop", 2)])
def test_a_service_that_is_busy_is_asked_again(pool_of, service, what, tries):
    with pool_of(service.url) as pool:
        assert [r.value for r in pool.score(group(what))] == [float(len(what))]
    assert len(service.seen) == tries and service.seen[0][0] is None


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("400", "asked once and found status 400, 'no, Bearer [redacted]'"),
        ("302", "asked once and found status 302"),
        ("500", "times and found status 500"),
        ("few", "a list of 1 rewards, one for each response in their order, found 0"),
        ("text", 'expected {"rewards": [number, ...]}, found an answer of 4 bytes'),
    ],
)
def test_a_failure_says_what_was_found_and_never_the_token(
    pool_of, service, tmp_path, caplog, what, said
):
    with pool_of(service.url, token_env="JUDGE_TOKEN", timeout_s=2.0) as pool:
        (result,) = pool.score(group(what))
    assert (result.status, result.value) == ("error", None) and said in result.detail
    logs = "".join(log.read_text() for log in tmp_path.glob("*.log"))
    assert TOKEN not in result.detail + caplog.text + logs
    assert len(service.seen) == 1 or what == "500"


def test_no_half_of_a_token_is_shown(pool_of, service):
    service.before = 180  # the cut is in the token
    with pool_of(service.url, token_env="JUDGE_TOKEN") as pool:
        (result,) = pool.score(group("400"))
    assert "status 400, 'no" in result.detail and TOKEN[:4] not in result.detail


def test_a_service_that_is_away_is_named(pool_of, service):
    service.server_close()
    with pool_of(service.url, timeout_s=1.0) as pool:
        (result,) = pool.score(group("x"))
    assert f"{service.url}: expected status 200" in result.detail
    assert "Connection refused" in result.detail


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f"{TOKEN}é"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(pool_of, monkeypatch, token):
    monkeypatch.setenv("JUDGE_TOKEN", token)
    with pytest.raises(ValueError, match="a token of ASCII characters on one line") as refused:
        pool_of("http://127.0.0.1:9/score", token_env="JUDGE_TOKEN")
    assert TOKEN not in str(refused.value)


def test_a_token_that_there_is_not_is_refused_at_start(pool_of, monkeypatch):
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"data.reward.token_env=JUDGE_TOKEN: .* \[RL2017\]"):
        pool_of("http://127.0.0.1:9/score", token_env="JUDGE_TOKEN")
