"""A job that tests of the loop run in their own process, in seconds."""

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
