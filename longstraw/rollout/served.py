"""Groups drawn by an inference server with the policy's adapter, and the check that it answers with just that policy.

An adapter is published as a new folder under a new name, because servers keep what they cached under an old one. After
each time a probe compares log-probabilities: those of fixed tokens must move as ours did, and those of drawn tokens
must be ours at the run's temperature. A server that leaves an adapter out answers without an error otherwise.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstraw.config import RunConfig
from longstraw.data import run_tokenizer
from longstraw.observer import Observer
from longstraw.rollout.client import Client, RefusedError, ServerError
from longstraw.rollout.completions import PATH, Asked, ask_text, ask_tokens
from longstraw.rollout.group import DriftError, Policy, Request, Rollout, check_drift, draw_group, sampling_of
from longstraw.rollout.sampling import Samples, Sampling
from longstraw.step import prefill, score

log = logging.getLogger(__name__)

PROBED = 64  # positions of the first prompt whose log-probabilities are compared
DRAWN = 32  # tokens that a probe draws
LOADING = "vLLM loads adapters where it was started with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
LEFT_OUT = ("lm_head", "embed_tokens", ".experts.")  # what a server leaves out of an adapter without an error


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of the same fixed tokens at one time, ours and the server's."""

    ours: Tensor
    served: Tensor


class ServedSource:
    """Draw groups from the server of ``config``; ``publish`` saves the policy's adapter to a folder, on every rank."""

    def __init__(self, config: RunConfig, publish: Callable[[Path], None], folder: Path) -> None:
        self._config, self._publish = config, publish
        self._folder = Path(config.server.folder).expanduser() if config.server.folder else folder
        self._client = Client(config.server)
        self._tokenizer = run_tokenizer(config) if config.server.api == "text" else None
        self._model: str | None = config.server.model
        self._adapter: tuple[str, Path, int] | None = None  # name, folder, step at which it was published
        self._probed: Tensor | None = None  # the fixed tokens
        self._probes: list[Probe] = []  # the first and the last

    def __call__(self, policy: Policy, request: Request, observer: Observer) -> Rollout:
        """Hand the policy's adapter over if it is time, then draw and reward a group."""
        config = self._config
        drift = self._sync(policy, request)
        prompt = request.prompt.tolist()
        alone = config.hardware.world_size == 1  # else this rank alone must not stop where all would have to
        progress: Callable[[int], None] = observer.advance if alone else lambda _: None

        def draw(seeds: list[int]) -> Samples:
            with observer.verb("sample", len(seeds) * config.response_length):
                return policy.decide(partial(self._ask, prompt, seeds, progress))

        rollout = draw_group(policy, request, draw)
        age = None if self._adapter is None else request.step - self._adapter[2]
        return replace(rollout, retokenized=self._tokenizer is not None, probe_drift=drift, sampler_age=age)

    def _ask(self, prompt: list[int], seeds: list[int], progress: Callable[[int], None]) -> Samples:
        asked = Asked(self._name(), prompt, sampling_of(self._config), self._config.model.vocab_size)
        if self._tokenizer is not None:
            return ask_text(self._client, asked, seeds, self._tokenizer)
        try:
            return ask_tokens(self._client, asked, seeds, progress)
        except RefusedError as error:
            if error.status != 404 or self._adapter is None:
                raise
        self._load(*self._adapter[:2])  # the server began anew and has forgotten it
        return ask_tokens(self._client, asked, seeds, progress)

    def _name(self) -> str:
        """Return what the server calls the policy: the adapter in use, or else its base model."""
        if self._adapter is not None:
            return self._adapter[0]
        if self._model is None:
            answer = self._client.repeat("its models", partial(self._client.get, "/v1/models"))
            names = [each["id"] for each in answer["data"] if not each.get("parent")]
            if len(names) != 1:
                raise ServerError(f"{self._client.url} serves {', '.join(names) or 'no model'}; give server.model=NAME")
            self._model = names[0]
        return self._model

    # ---- weights

    def _sync(self, policy: Policy, request: Request) -> float | None:
        """Hand over the adapter where ``sync_every`` steps have passed; return the drift that the probe found."""
        every, old = self._config.server.sync_every, self._adapter
        if every is None or (old is not None and request.step < old[2] + every):
            return None
        _refuse_left_out(policy)
        name: str = policy.decide(lambda: f"longstraw-{uuid.uuid4().hex[:8]}-step-{request.step}")
        folder = (self._folder / name).absolute()
        self._publish(folder)
        policy.decide(partial(self._load, name, folder))
        self._adapter = (name, folder, request.step)
        drift = self._probe(policy, request)
        if old is not None:
            policy.decide(partial(self._unload, *old[:2]))
        return drift

    def _load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}

        def attempt() -> None:
            try:
                self._client.post("/v1/load_lora_adapter", body)
            except RefusedError as error:
                if error.status == 404:
                    raise RefusedError(f"{error}; {LOADING}") from error
                if "already been loaded" not in str(error):  # by a try whose answer was lost
                    raise

        self._client.repeat(f"loading the adapter {folder}", attempt)

    def _unload(self, name: str, folder: Path) -> None:
        """Remove an adapter that no request names any more; one that a new server does not know is gone already."""
        try:
            body = {"lora_name": name}
            self._client.repeat("unloading an adapter", partial(self._client.post, "/v1/unload_lora_adapter", body))
        except RefusedError as error:
            log.warning("%s", error)
        shutil.rmtree(folder, ignore_errors=True)

    # ---- the probe

    def _probe(self, policy: Policy, request: Request) -> float:
        """Return the mean distance of the server's log-probabilities from ours; every rank takes part.

        Raises ``DriftError`` where it is too large, or where the server's have not moved as ours have.
        """
        if self._probed is None:
            self._probed = request.prompt[:PROBED].clone()
        fixed, temperature = self._probed, self._config.temperature
        served, drawn, served_drawn = policy.decide(partial(self._ask_probe, fixed.tolist()))
        begin = prefill(policy.model, fixed[:1], chunk=self._config.chunk)
        whole = torch.cat([fixed[1:], drawn.to(fixed.device)])
        (plain,) = score(policy.model, begin, [whole])
        tempered = plain if temperature == 1 else score(policy.model, begin, [whole], temperature=temperature)[0]
        now = Probe(plain[: len(fixed) - 1].double(), served.double())
        drift = _distance(tempered[len(fixed) - 1 :], served_drawn)
        if temperature != 1 and _distance(plain[len(fixed) - 1 :], served_drawn) < drift / 4:
            raise DriftError(
                f"{self._client.url}: log-probabilities are those of temperature 1, not {temperature}: start vLLM with "
                "--logprobs-mode processed_logprobs"
            )
        check_drift(drift, self._config.server.max_drift)
        for before in self._probes:
            first = self._probes[0]
            _check_moved(before, now, _rms(first.served - first.ours), self._client.url)
        self._probes = [*self._probes[:1], now]
        return drift

    def _ask_probe(self, fixed: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the served log-probabilities of the fixed tokens but the first, drawn tokens, and those of these."""
        asked = Asked(self._name(), fixed, Sampling(DRAWN, self._config.temperature), self._config.model.vocab_size)
        samples = ask_tokens(self._client, asked, [self._config.seed], lambda _: None)
        body = {"model": self._name(), "prompt": fixed, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        answer = self._client.repeat("a probe", partial(self._client.post, PATH, body))
        return _prompt_logprobs(answer, fixed), samples.responses[0], samples.logprobs[0]


def _refuse_left_out(policy: Policy) -> None:
    """Raise ``ServerError`` for an adapter of modules that servers do not adapt, and do not say so."""
    odd = [name for name, _ in policy.model.named_parameters() if ".lora_" in name and any(x in name for x in LEFT_OUT)]
    if odd:
        raise ServerError(
            f"{odd[0]}: servers leave adapters of heads and experts out; name adapter.targets without them"
        )


def _prompt_logprobs(answer: Any, fixed: list[int]) -> Tensor:
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        return torch.tensor([row[str(token)]["logprob"] for row, token in zip(rows[1:], fixed[1:], strict=True)])
    except (TypeError, KeyError, IndexError, ValueError):
        raise ServerError(
            f"a probe was answered without log-probabilities of its prompt: {str(answer)[:200]}"
        ) from None


def _distance(ours: Tensor, served: Tensor) -> float:
    return float((ours.double() - served.double()).abs().mean())


def _check_moved(before: Probe, now: Probe, noise: float, url: str) -> None:
    """Raise ``DriftError`` where the served log-probabilities of the same tokens did not move with ours.

    Of ``served = share * ours + rest``, in differences of before and after, the share is 1 for a server that took the
    adapter and 0 for one that did not. ``noise`` is how far the two engines were apart at the beginning, as a root mean
    square (0.1 a token in bfloat16); it hides movements that are not clearly larger.
    """
    ours, served = now.ours - before.ours, now.served - before.served
    if len(ours) < 2 or not _rms(ours) > 3 * noise:
        return
    share = float(served @ ours / (ours @ ours))
    error = _rms(served - share * ours) / float(ours.norm())
    if share < 0.5 and share + 3 * error < 1:
        raise DriftError(
            f"{url}: with the new adapter our log-probabilities moved by {_rms(ours):.3f} (root mean square), and the "
            f"server's by {share:.2f} of that; it leaves the adapter out, or answers from caches of the one before"
        )


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
