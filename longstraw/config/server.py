"""What ``rollout=server`` is configured by: the inference server that responses are asked from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from longstraw.config.algorithm import ALGORITHM_CHOICES, AlgorithmConfig
from longstraw.config.checks import ConfigError, check_ranges, choose, number


@dataclass
class ServerConfig:
    """The server, how the policy's adapter gets there, and how long it is waited for."""

    url: str | None = None  # such as http://127.0.0.1:8000
    api: str = "tokens"  # tokens: token ids and log-probabilities, as vLLM has them | text: text alone
    model: str | None = None  # the base model's name there; None: the only one
    sync_every: int | None = number(1, 1, 10**9, hint="; null: never")  # optimizer steps between two adapters
    folder: str | None = None  # where adapters are published, which the server reads too; None: in the run's
    seeds: bool = True  # false: the server takes no seed, so a resumed run draws otherwise
    deadline: float = number(1800.0, 0, 10**7, above=True)  # seconds that one request may take
    retries: int = number(8, 0, 10**6)  # of a request that failed
    backoff: float = number(1.0, 0, 3600)  # seconds before the first of them; doubled each time, a minute at most
    correction: str = "token_tis"  # taken where algorithm.correction is none
    max_drift: float = number(0.1, 0, 100, above=True)  # mean distance from our log-probabilities that ends a run

    def __post_init__(self) -> None:
        choose("server.api", self.api, ("tokens", "text"))
        choose("server.correction", self.correction, ALGORITHM_CHOICES["correction"])
        check_ranges(self, "server")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"server.url={self.url} must begin with http:// or https://")
        if self.api == "text" and self.sync_every is not None:
            raise ConfigError(
                "server.api=text: such a server has no way to load adapters, so its responses are of the weights it "
                "was started with; write server.sync_every=null where that is meant"
            )

    def corrected(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """Return the loss of a run whose responses are the server's: with a correction, and what that needs."""
        if self.api == "text":  # no log-probabilities come with text
            old = "score" if algorithm.old_logprobs == "data" else algorithm.old_logprobs
            return replace(algorithm, old_logprobs=old)
        if algorithm.correction != "none" or self.correction == "none":
            return algorithm
        old = "score" if algorithm.old_logprobs == "data" else algorithm.old_logprobs
        return replace(algorithm, correction=self.correction, old_logprobs=old)


def check_server(server: ServerConfig, adapter: str, algorithm: AlgorithmConfig, *, from_some: bool) -> None:
    """Raise ``ConfigError`` for what a server could not do, or would leave out without an error.

    ``adapter`` is the name of what is trained; ``from_some``: a part of the distribution is drawn from.
    """
    if server.url is None:
        raise ConfigError("rollout=server needs server.url=http://HOST:PORT, where an inference server listens")
    if adapter == "none" and server.sync_every is not None:
        raise ConfigError(
            "rollout=server with adapter=none: adapters are handed to the server, not whole models; use adapter=lora, "
            "or server.sync_every=null for responses of the weights that the server was started with"
        )
    if algorithm.correction != "none" and server.api == "text":
        raise ConfigError(
            f"algorithm.correction={algorithm.correction} with server.api=text: no log-probabilities come with text; "
            "leave it out"
        )
    if from_some and algorithm.correction != "none":
        raise ConfigError(
            "top_p, top_k and min_p draw from a part of the distribution, which a correction knows nothing of; write "
            "server.correction=none and algorithm.old_logprobs=none, or leave them out"
        )
