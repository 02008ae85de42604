"""Groups from an inference server: what is asked, what comes of faults, and that other weights are noticed."""

from dataclasses import replace

import pytest
import torch
from fake_server import BASE, FakeServer
from test_loop import job, rows
from test_rollout import LowTokens

from longstraw.config import ConfigError, load_model_config, to_dict
from longstraw.memory.meter import MemoryMeter
from longstraw.rollout.client import RefusedError, ServerError
from longstraw.rollout.group import DriftError, response_seeds
from longstraw.rollout.served import Probe, ServedSource, _check_moved
from longstraw.tracking.recorder import RunIdentity
from longstraw.training.loop import run_job
from longstraw.training.monitor import Monitor, Progress
from longstraw.training.trainer import build_trainer

STOP = 3
LLAMA = to_dict(load_model_config("llama_tiny", num_hidden_layers=2))


def config(server=None, **changes):
    served = {"url": "http://127.0.0.1:9", "backoff": 0.01, **(server or {})}
    return job(
        **{
            "rollout": "server",
            "server": served,
            "adapter": {"name": "lora", "rank": 4, "alpha": 64},
            "model": LLAMA,
            "context": 46,
            "response_length": 6,
            "chunk": 64,
            "group_size": 4,
            "stop": [STOP],
            "optimizer": {"lr": 0.02},
            "prompt_grad": "exact",
        }
        | changes
    )


@pytest.fixture
def serve():
    """Return a function that starts a server; all are stopped in the end."""
    started = []

    def start(*faults, **options):
        started.append(FakeServer(config(), *faults, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def trainer_of(server, tmp_path, task=None, **changes):
    own = config({"url": server.url, **changes.pop("served", {})}, **changes)
    meter = MemoryMeter()
    return build_trainer(own, Monitor(meter, Progress(None)), task=task or LowTokens(), run_dir=tmp_path)


def steps(server, tmp_path, count=1, task=None, **changes):
    with MemoryMeter():
        trainer = trainer_of(server, tmp_path, task, **changes)
        return trainer, [trainer.step(step) for step in range(count)]


# ---- what is asked and recorded


def test_token_ids_go_in_and_come_out_and_every_step_has_new_weights(serve, tmp_path):
    server = serve()
    trainer, taken = steps(server, tmp_path, 3)
    asked = [body for body in server.bodies() if body.get("stream") and body["n"] == 4]
    assert len(asked) == 3  # one request a group
    first = asked[0]
    assert first["prompt"] == LowTokens().example(0).prompt.tolist()
    assert first["seed"] == response_seeds(0, 0, 0, 4)[0] % 2**62
    assert (first["top_p"], first["top_k"], first["min_p"], first["stop_token_ids"]) == (1.0, 0, 0.0, [STOP])
    assert (first["return_token_ids"], first["logprobs"], first["ignore_eos"], first["max_tokens"]) == (
        True,
        0,
        True,
        6,
    )
    names = [body["model"] for body in asked]
    assert len(set(names)) == 3
    assert list(server.adapters) == names[-1:]  # the others are unloaded
    assert [path.name for path in (tmp_path / "served").iterdir()] == names[-1:]
    for row in taken:
        assert row["probe_drift"] < 1e-5
        assert row["sampler_drift"] < 1e-5 > row["sampler_drift_max"] / 10
        assert (row["sampler_age"], row["old_logprobs"], row["retokenized"]) == (0, "score", False)
        assert row["sampled_positions"] > 0 < row["grad_norm"]
    assert trainer.config.algorithm.correction == "token_tis"


def test_weights_are_handed_over_as_often_as_asked(serve, tmp_path):
    server = serve()
    _, taken = steps(server, tmp_path, 5, served={"sync_every": 2})
    assert [row["sampler_age"] for row in taken] == [0, 1, 0, 1, 0]
    assert len(server.bodies("/v1/load_lora_adapter")) == 3
    assert taken[1]["probe_drift"] is None
    assert taken[1]["sampler_drift"] > 1e-3  # the server has the weights of the step before


def test_one_rank_asks_and_all_get_the_same(serve, tmp_path):
    server, decided = serve(), []
    trainer = trainer_of(server, tmp_path)
    first, published = trainer.source, []
    second = ServedSource(trainer.config, published.append, tmp_path / "second")

    def decide(find):
        decided.append(find())
        return decided[-1]

    def both(policy, request, observer):
        rollout = first(replace(policy, decide=decide), request, observer)
        asked, answers = len(server.requests), iter(decided)
        other = second(replace(policy, decide=lambda find: next(answers)), request, observer)
        assert len(server.requests) == asked
        assert all(torch.equal(a, b) for a, b in zip(rollout.group.responses, other.group.responses, strict=True))
        assert (rollout.probe_drift, rollout.group.rewards) == (other.probe_drift, other.group.rewards)
        return rollout

    trainer.source = both
    with MemoryMeter():
        assert trainer.step(0)["status"] == "ok"
    assert len(published) == 1  # gathering the adapter needs every rank


def test_a_resumed_run_draws_the_same(serve, tmp_path):
    drawn = []
    for name in "ab":
        trainer = trainer_of(serve(), tmp_path / name)
        with MemoryMeter():
            drawn.append(trainer._prompt(0, 0).group.responses)
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


# ---- faults that pass


@pytest.mark.parametrize("fault", [429, 500, "half", "hang", "slow", "wrong_ids", "nan", "die"])
def test_a_fault_that_passes_changes_nothing(serve, tmp_path, fault):
    _, (plain,) = steps(serve(), tmp_path / "plain")
    server = serve(None, fault)  # the first request is the probe's
    server.away = 0.1
    _, (row,) = steps(server, tmp_path / "fault", served={"deadline": 1.5, "retries": 12})
    assert row["status"] == "ok"
    for key in ("loss", "reward_mean", "grad_norm", "replayed_positions"):
        assert row[key] == pytest.approx(plain[key], rel=1e-6)


@pytest.mark.parametrize("fault", ["half", "slow"])
def test_a_straggler_does_not_lose_the_others(serve, tmp_path, fault):
    server = serve(None, fault)
    steps(server, tmp_path, served={"deadline": 1.5})
    asked = [(body["n"], body["seed"]) for body in server.bodies() if body.get("stream")][1:]
    seed = asked[0][1]
    assert asked == [(4, seed), (1, seed + 3)]


def test_a_server_that_dies_between_steps_gets_the_adapter_again(serve, tmp_path):
    server = serve()
    trainer = trainer_of(server, tmp_path, served={"sync_every": 100, "retries": 12})
    with MemoryMeter():
        trainer.step(0)
        server.die()
        assert trainer.step(1)["status"] == "ok"
    assert len(server.bodies("/v1/load_lora_adapter")) == 2


# ---- faults that do not


def test_a_server_that_stays_away_ends_the_run_with_the_reason(serve, tmp_path):
    server = serve(None, *[500] * 3)
    changed = config({"url": server.url, "retries": 2}, data={"name": "lookup"}, context=460, model=LLAMA)
    with pytest.raises(ServerError, match="the engine broke; given up after 3 tries"):
        run_job(changed, tmp_path, RunIdentity("x"))
    (row,) = rows(tmp_path)
    assert row["status"] == "error"
    assert "4 responses: status 500: the engine broke" in row["error"]


def test_other_weights_are_noticed_within_one_sync(serve, tmp_path):
    server = serve()
    server.config = config(seed=1)
    with pytest.raises(DriftError, match="other weights"):
        steps(server, tmp_path)


def test_an_adapter_that_is_left_out_is_noticed_within_one_sync(serve, tmp_path):
    server = serve()
    server.ignores_adapters = True
    with pytest.raises(DriftError, match=r"log-probabilities moved by .* and the server's by 0\.00 of that; it leaves"):
        steps(server, tmp_path, 2, served={"max_drift": 100})


def test_a_stale_cache_is_noticed_within_one_sync(serve, tmp_path):
    server = serve()
    trainer = trainer_of(server, tmp_path, served={"max_drift": 100})
    with MemoryMeter():
        trainer.step(0)
        server.stale = True
        with pytest.raises(DriftError, match="answers from caches of the one before"):
            trainer.step(1)


def probes(noise, share):
    """Log-probabilities before and after a step of which a server with rounding noise took a share."""
    draw = torch.Generator().manual_seed(0)
    ours, step = (torch.randn(63, generator=draw, dtype=torch.float64) for _ in range(2))
    rounding = [noise * torch.randn(63, generator=draw, dtype=torch.float64) for _ in range(2)]
    moved = 0.2 * step
    return Probe(ours, ours + rounding[0]), Probe(ours + moved, ours + share * moved + rounding[1])


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_a_server_that_rounds_is_told_from_one_that_leaves_the_adapter_out(noise):
    _check_moved(*probes(noise, 1.0), noise, "url")
    with pytest.raises(DriftError):
        _check_moved(*probes(noise, 0.0), noise, "url")


def test_a_movement_within_the_rounding_is_not_judged():
    """In bfloat16 a tiny step of a tiny model moves log-probabilities less than rounding does."""
    _check_moved(*probes(0.1, 0.0), 0.1, "url")


def test_log_probabilities_of_another_temperature_are_noticed(serve, tmp_path):
    server = serve()
    server.raw_logprobs = True
    with pytest.raises(DriftError, match=r"those of temperature 1, not 0\.5: start vLLM with --logprobs-mode"):
        steps(server, tmp_path, temperature=0.5)


def test_a_prompt_that_the_server_changes_is_refused(serve, tmp_path):
    server = serve()
    server.adds_a_token = True
    with pytest.raises(RefusedError, match="it read a prompt of 41 other tokens, and was asked about 40"):
        steps(server, tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server": {"url": None}}, "rollout=server needs server.url"),
        ({"server": {"url": "localhost:8000"}}, "must begin with http://"),
        ({"adapter": {"name": "none"}}, "rollout=server with adapter=none"),
        ({"server": {"api": "text"}}, "has no way to load adapters"),
        ({"server": {"api": "txt"}}, "is not one of tokens, text; did you mean text"),
        ({"top_p": 0.9}, "server.correction=none and algorithm.old_logprobs=none"),
        ({"mode": "simulate"}, "mode=simulate asks no server: use rollout=given or sample"),
    ],
)
def test_what_cannot_work_is_refused_before_a_job(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        config(**changes) if "server" not in changes else config(changes["server"])


def test_the_correction_is_on_unless_another_is_asked_for():
    def chosen(server=None, **algorithm):
        found = config(server, algorithm=algorithm).algorithm
        return found.correction, found.old_logprobs

    assert chosen() == ("token_tis", "score")
    assert chosen(correction="icepop", old_logprobs="score") == ("icepop", "score")
    assert chosen({"correction": "none"}) == ("none", "data")
    assert chosen({"api": "text", "sync_every": None}) == ("none", "score")
    assert job().algorithm.correction == "none"


# ---- text alone


def text_config(server, **changes):
    return config(
        {"url": server.url, "api": "text", "sync_every": None}, data={"name": "lookup"}, context=460, **changes
    )


def test_a_server_of_text_alone(serve, tmp_path):
    server = serve(text=True)
    run_job(text_config(server), tmp_path, RunIdentity("x"))
    (row,) = rows(tmp_path)
    assert (row["status"], row["retokenized"], row["old_logprobs"], row["rollout"]) == ("ok", True, "score", "server")
    assert row["scored_positions"] == row["replayed_positions"] or row["reward_std"] == 0
    assert (row["sampler_drift"], row["sampler_age"], row["probe_drift"]) == (None, None, None)
    bodies = server.bodies()
    assert len(bodies) == 4
    assert len({body["seed"] for body in bodies}) == 4
    assert bodies[0]["model"] == BASE


def test_a_text_server_that_reads_another_prompt_is_refused(serve, tmp_path):
    server = serve(text=True)
    server.adds_a_token = True
    with pytest.raises(RefusedError, match="it read a prompt of 455 tokens, and was asked about 454"):
        run_job(text_config(server), tmp_path, RunIdentity("x"))
