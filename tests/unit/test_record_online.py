"""W&B online, against a stand-in that answers the few requests wandb's client makes."""

import base64
import gzip
import http.server
import json
import os
import threading
import time

import pytest

from analysis.wandb_files import read_runs
from longstraw.tracking import wandb_mirror
from longstraw.tracking.recorder import Recorder, WandbOptions

wandb = pytest.importorskip("wandb")
ENTITY = "nobody"


class StandIn:
    """A server on localhost that keeps what a client sends: ``runs[run_id]`` has config, group and history."""

    def __init__(self):
        self.runs = {}
        answer = self.answer

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                reply = json.dumps(answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            do_GET = do_PUT = do_POST

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):  # clients drop connections
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path, body):
        if path.startswith("/graphql"):
            request = json.loads(body)
            return {"data": self.graphql(request.get("operationName"), request.get("variables") or {})}
        if path.endswith("/file_stream"):
            return self.stream(path.strip("/").split("/")[-2], json.loads(body))
        return {}

    def graphql(self, operation, variables):
        if operation == "Viewer":
            team = {"edges": [{"node": {"name": ENTITY}}]}
            return {"viewer": {"id": "1", "entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": team}}
        if operation == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        if operation == "RunResumeStatus":
            return {
                "model": {
                    "id": "1",
                    "name": "p",
                    "entity": {"id": "1", "name": ENTITY},
                    "bucket": self.bucket(variables),
                }
            }
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": self.upsert(variables), "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def bucket(self, variables):
        run = self.runs.get(variables["name"])
        return run and {
            **self.identity(variables["name"]),
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(run["history"]),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run["history"][-1:]]),
            "eventsTail": "[]",
            "config": json.dumps({key: {"value": value} for key, value in run["config"].items()}),
            "tags": [],
            "notes": None,
            "wandbConfig": '{"t": 1}',
        }

    def identity(self, name):
        return {"id": base64.b64encode(name.encode()).decode(), "name": name, "displayName": name}

    def upsert(self, variables):
        name = variables.get("name") or base64.b64decode(variables["id"]).decode()
        run = self.runs.setdefault(name, {"config": {}, "history": [], "group": None, "exit": None})
        for key, value in json.loads(variables.get("config") or "{}").items():
            run["config"][key] = value.get("value") if isinstance(value, dict) else value
        run["group"] = variables.get("groupName") or run["group"]
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": ENTITY}}
        return {**self.identity(name), "config": "{}", "project": project, "historyLineCount": len(run["history"])}

    def stream(self, name, request):
        run = self.runs[name]
        chunk = (request.get("files") or {}).get("wandb-history.jsonl")
        if chunk:
            rows = [json.loads(line) for line in chunk["content"]]
            run["history"][chunk["offset"] : chunk["offset"] + len(rows)] = rows  # a retry comes again
        if request.get("complete"):
            run["exit"] = request.get("exitcode")
        return {"exitcode": None, "limits": {}}


@pytest.fixture
def server(tmp_path, monkeypatch):
    for key in [key for key in os.environ if key.startswith("WANDB") and key != "WANDB_SERVICE"]:
        monkeypatch.delenv(key)
    stand_in = StandIn()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", stand_in.url)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    wandb.teardown()  # it reads the environment once
    yield stand_in
    stand_in.stop()
    wandb.teardown()


def log_steps(recorder, steps):
    for step in steps:
        recorder.log({"step": step, "status": "ok", "loss": step / 3, "seconds_by_verb": {"replay": step}})


def eventually(condition):
    """Wait for wandb's process, which finishes its files after the run; return whether the condition came true."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_with_a_key_runs_go_online_and_attempts_become_one_run(server, tmp_path, caplog):
    for attempt, steps in enumerate([range(6), range(3, 9)]):  # the second repeats what was not saved
        with Recorder(
            tmp_path / "run", run_id="abc", attempt=attempt, wandb=WandbOptions(config={"a": {"b": 1}}, group="sweep")
        ) as recorder:
            log_steps(recorder, steps)
    run = server.runs["abc"]
    assert eventually(lambda: run["exit"] is not None and len(run["history"]) >= 12)
    assert (run["group"], run["exit"], run["config"]["a"], run["config"]["attempt"]) == ("sweep", 0, {"b": 1}, 1)
    assert [row["step"] for row in run["history"]] == [*range(6), *range(3, 9)]
    assert run["history"][4]["seconds_by_verb/replay"] == 4
    assert [entry for entry in caplog.records if entry.name == "longstraw.tracking.wandb_mirror"] == []


def test_a_server_that_goes_away_holds_nobody_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_mirror, "FINISH_SECONDS", 2)
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        log_steps(recorder, range(3))
        assert eventually(lambda: recorder._mirror._opened)
        server.stop()
        log_steps(recorder, range(3, 6))
    lines = (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    # What `wandb sync` can still upload:
    assert eventually(lambda: [[row["step"] for row in run.history] for run in read_runs(tmp_path)] == [[*range(6)]])


def test_without_a_server_a_run_goes_on_offline(server, tmp_path, monkeypatch, caplog):
    server.stop()
    monkeypatch.setattr(wandb_mirror, "INIT_SECONDS", 2)
    with Recorder(tmp_path / "run", run_id="abc") as recorder:
        log_steps(recorder, range(3))
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.name == "longstraw.tracking.wandb_mirror"]
    assert warning.startswith("W&B: online failed")
    assert eventually(lambda: any(len(run.history) == 3 for run in read_runs(tmp_path / "run")))
