"""A job that tests of the loop run in their own process, in seconds, and one that runs in another and dies there."""

import multiprocessing

from longstraw.config import from_dict, load_model_config, to_dict


def cpu_job(sizes, **changes):
    """Return a job of Qwen3.6's tiny model with other ``sizes`` on a processor, without W&B.

    ``changes`` replace keys; a dict changes some keys of its group, but for the model's, which it replaces.
    """
    values = {
        "model": to_dict(load_model_config("qwen3_6_tiny", **sizes)),
        "hardware": {"name": "cpu", "backend": "cpu"},
        "data": {"name": "needle"},
        "tracking": {"mode": "disabled"},
        "optimizer": {"lr": 1e-3},
        "context": 320,
        "response_length": 24,
        "chunk": 128,
    }
    for key, value in changes.items():
        partial = isinstance(value, dict) and key in values and key != "model"
        values[key] = {**values[key], **value} if partial else value
    return from_dict(values)


def exit_status(function, *arguments):
    """Call ``function`` in another process; return its exit status, negative where a signal ended it.

    The process is forked from one that evaluated nothing: autograd's threads do not survive a fork of this one, and a
    child of this one that raises would go on with its tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["longstraw.training.loop"])
    child = context.Process(target=function, args=arguments)
    child.start()
    child.join(120)
    status = child.exitcode
    if status is None:
        child.kill()
    return status
