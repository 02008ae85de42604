"""An inference server on the loopback with the JSON of vLLM's and ``transformers serve``'s endpoints, and their faults.

Behind it is a real tiny model, so that its log-probabilities are right unless a fault is asked for. ``faults`` are used
up one a request for responses; flags hold until they are changed.
"""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from longstraw.models import build_model
from longstraw.models.lora import load_adapter
from longstraw.rollout.sampling import Sampling, draw
from longstraw.step import prefill, score

BASE = "base"


class FakeServer:
    """Serve ``config.model`` with weights of ``config.seed``, and the adapters that are loaded."""

    def __init__(self, config, *faults, text=False):
        self.config, self.faults, self.text = config, list(faults), text
        self.adapters, self.models, self.requests = {}, {}, []
        self.ignores_adapters = self.raw_logprobs = self.stale = self.adds_a_token = False
        self.away = 0.0  # seconds until a server that died is back
        self.http = None
        self.start()

    def start(self, port=0):
        class Handler(_Handler):
            fake = self

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.port = self.http.server_address[1]

    def stop(self):
        self.http.shutdown()
        self.http.server_close()

    def die(self):
        """Stop listening and forget the adapters; be back in ``away`` seconds."""
        self.adapters.clear()

        def again():
            self.stop()
            time.sleep(self.away)
            self.start(self.port)

        threading.Thread(target=again, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def bodies(self, path="/v1/completions"):
        return [body for where, body in self.requests if where == path]

    def model(self, name):
        folders = list(self.adapters.values())
        folder = None if name == BASE or self.ignores_adapters else self.adapters[name]
        if folder is not None and self.stale and len(folders) > 1:
            folder = folders[-2]
        if (self.config.seed, folder) not in self.models:
            model = build_model(self.config.model, seed=self.config.seed)
            self.models[self.config.seed, folder] = model if folder is None else load_adapter(model, folder)
        return self.models[self.config.seed, folder]

    def responses(self, body):
        """Return the drawn responses, and log-probabilities as they are sent."""
        model, prompt = self.model(body["model"]), torch.tensor(body["prompt"])
        retained = prefill(model, prompt, chunk=64)
        how = Sampling(
            body["max_tokens"], body["temperature"], body["top_p"], body["top_k"] or None, body["min_p"],
            tuple(body["stop_token_ids"]),
        )  # fmt: skip
        seeds = [body.get("seed", 12345) + i for i in range(body["n"])]
        found = draw(model, retained, seeds, how)
        return found, score(model, retained, found.responses) if self.raw_logprobs else found.logprobs

    def prompt_logprobs(self, body):
        prompt = torch.tensor(body["prompt"])
        model = self.model(body["model"])
        (scored,) = score(model, prefill(model, prompt[:1], chunk=64), [prompt[1:]])
        each = zip(body["prompt"][1:], scored.tolist(), strict=True)
        return [None, *({str(i): {"logprob": lp, "rank": 1, "decoded_token": "x"}} for i, lp in each)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._json(200, {"object": "list", "data": [{"id": BASE, "object": "model", "parent": None}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake = self.fake
        fake.requests.append((self.path, body))
        if self.path == "/v1/load_lora_adapter":
            if body["lora_name"] in fake.adapters:
                return self._error(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            fake.adapters[body["lora_name"]] = body["lora_path"]
            return self._json(200, f"Success: LoRA adapter '{body['lora_name']}' added successfully.")
        if self.path == "/v1/unload_lora_adapter":
            if not fake.stale:
                fake.adapters.pop(body["lora_name"], None)
            return self._json(200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")
        if fake.text:
            return self._text(body)
        if body["model"] != BASE and body["model"] not in fake.adapters:
            return self._error(404, f"The model `{body['model']}` does not exist.")
        if body.get("prompt_logprobs") is not None:
            choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": fake.prompt_logprobs(body)}
            return self._json(200, {"object": "text_completion", "choices": [choice]})
        return self._stream(body, fake.faults.pop(0) if fake.faults else None)

    def _stream(self, body, fault):
        if fault in (429, 500):
            return self._error(fault, "too many requests" if fault == 429 else "the engine broke")
        if fault == "hang":
            time.sleep(2.0)
            return self.close()
        found, logprobs = self.fake.responses(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        prompt = [*([0] if self.fake.adds_a_token else []), *body["prompt"]]
        for i, tokens in enumerate(found.responses):
            ids, lps = tokens.tolist(), logprobs[i].tolist()
            if fault == "half" and i == body["n"] - 1:
                self._event(i, ids[:1], lps[:1], None)
                return self.close()
            if fault == "die" and i == body["n"] - 1:
                self.fake.die()
                return self.close()
            if fault == "slow" and i == body["n"] - 1:
                time.sleep(2.0)
            if fault == "wrong_ids":
                ids[0] = 10**6
            if fault == "nan":
                lps[0] = None
            half = len(ids) // 2
            self._event(i, ids[:half], lps[:half], None, prompt if i == 0 else None)
            self._event(i, ids[half:], lps[half:], "stop" if found.ended[i] else "length")
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return None

    def _event(self, index, ids, logprobs, reason, prompt=None):
        choice = {"index": index, "text": "", "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": reason}
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [], "top_logprobs": [], "text_offset": []}
        event = {"id": "cmpl-0", "object": "text_completion", "choices": [choice]}
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _text(self, body):
        """Answer as ``transformers serve`` does: it knows no ids, no ``n`` and no log-probabilities."""
        if not isinstance(body["prompt"], str):
            return self._json(400, {"detail": "prompt must be a string."})
        how = json.loads(body["generation_config"])
        prompt = list(body["prompt"].encode())
        asked = {"model": BASE, "prompt": prompt, "max_tokens": body["max_tokens"], "n": 1, "seed": body["seed"]}
        asked |= {key: how[key] or 0 for key in ("temperature", "top_p", "top_k", "min_p")}
        found, _ = self.fake.responses({**asked, "stop_token_ids": how.get("eos_token_id", [])})
        ids = found.responses[0].tolist()[: -1 if found.ended[0] else None]
        choice = {"index": 0, "text": bytes(ids).decode(errors="replace"), "finish_reason": "length"}
        if found.ended[0]:
            choice["finish_reason"] = "stop"
        usage = {"prompt_tokens": len(prompt) + self.fake.adds_a_token}
        return self._json(200, {"object": "text_completion", "choices": [choice], "usage": usage})

    def _chunk(self, data):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that waits no longer
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _error(self, status, message):
        error = {"message": message, "type": "Error", "param": None, "code": status}
        return self._json(status, {"error": error})

    def _json(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def close(self):
        self.close_connection = True
