"""``python -m longstraw.run [-m] key=value ...``: one job, or a sweep of jobs. The doorway to Hydra.

Hydra composes the YAML files of ``conf/`` against ``longstraw.config``; ``longstraw.launch.jobs`` runs what comes out.
"""

from __future__ import annotations

import argparse
import errno
import functools
import os
import re
import shutil
import signal
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # Ctrl-C while the rest is loaded ends the command without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from longstraw.config import ConfigError, available, conf_dir, use_conf_dirs
from longstraw.config.overrides import (
    FILES,
    FOLDERS,
    RUN_FOLDERS,
    Typed,
    check,
    is_list,
    plain_value,
    users_folders,
    value_types,
)
from longstraw.errors import os_error, os_reason
from longstraw.runtime.process_info import process_info
from longstraw.tracking.command_line import typed_command

UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)
_MADE: list[Path] = []  # folders this command made
KEYS = """\
  group_size=8              responses that share one prompt
  context=2.1M              positions of one branch, prompt + response: 2.1M = 2,100,000, 2Mi = 2,097,152, 256K, 256Ki
  response_length=8192      of it, at most for the response; default: the model's
  chunk=16Ki                prompt positions evaluated at a time; default: the model's
  replay_tokens=64Ki        response positions in one graph: as many branches as fit; default: response_length
  prompt_grad=exact         detached (the paper's) or exact (through the prompt too)
  prompt_grad_window=64Ki   with exact: only through the last so many prompt positions
  state.keep_attention=true keep attention's results for the backward: faster, for a few per cent of memory
  refresh_every=1           optimizer steps that share one retained prompt
  groups_per_step=1         prompts of one optimizer step, each with its group; memory does not grow with them
  updates_per_rollout=1     optimizer steps on the same responses; default: refresh_every
  steps=1 seed=0            optimizer steps, seed
  model.checkpoint=FOLDER   the weights, in transformers' format or FILE.gguf; default: random ones drawn from the seed
  save=true                 write the trained model or adapter into the run's folder at the end
  checkpoint.every=N        steps between two checkpoints, from which a job that was ended goes on; default: ten minutes
  evaluate.every=N          steps between two evaluations on held-out prompts: before the first step and at the end too;
                            evaluate.examples=64 prompts, of evaluate.contexts=[1Ki,4Ki], at evaluate.temperature=0;
                            data=jsonl: evaluate.path=FILE
  data.haystack=FILE        text to hide the needle in; data=jsonl data.path=FILE: your own prompts and responses
  data=rollouts             data.path=PLACE that verl, TRL, NeMo-RL, verifiers, prime-rl or ART stored, or lines
                            of token ids; data.format=NAME where its columns do not say which
  rollout=sample            draw the responses from the retained prompt; data=jsonl: reward=package.module:function
  rollout=server            draw them from vLLM: server.url=http://HOST:PORT, server.sync_every=1 (docs/rollouts.md)
  warmup_steps=0            with rollout=sample: first supervised steps on golden answers
  claim=NAME                a name under which the analysis groups records
  mode=auto                 run, simulate (no hardware), emulate (one rank of many on one GPU), or auto: run
                            where the hardware is, else simulate
"""
HELP = """\
LongStraw: GRPO steps on prompts of a million tokens and more.

  longstraw key=value ...            one job          (or: python -m longstraw.run ...)
  longstraw -m key=a,b key=c,d ...   every combination, each its own job
  python -m longstraw.COMMAND        status (jobs), evaluate (success on held-out prompts), plan (what fits where),
                                     audit and selfcheck (gradients, kernels), fetch (a model)

Try
  longstraw model=qwen3_6_tiny hardware=cpu context=16Ki
  longstraw -m model=qwen3_6_tiny hardware=cpu group_size=2,8 context=16Ki,64Ki

Keys
{keys}
Groups
{groups}
  Their keys are set as model.dtype=float32 or optimizer.lr=1e-5; --cfg job prints all of them, with their defaults.
  launch.max_parallel=N  jobs at a time     launch.detach=true  return at once     tracking.mode=offline  W&B

Ends with a table, one row a job, and the path of the records.
"""


def main() -> None:
    """Run the command line: check it, hand it to Hydra, exit with 0 only if every job succeeded."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(), end="")
        return
    if "--version" in sys.argv[1:]:
        print(f"longstraw {version('longstraw')}")
        return
    by_torchrun = process_info().by == "torchrun" and process_info().world_size > 1
    if by_torchrun and process_info().rank > 0:
        from longstraw.launch.jobs import run_torchrun_worker

        raise SystemExit(run_torchrun_worker())
    quiet = os.environ.get("HYDRA_FULL_ERROR") is None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _start(quiet)
    except KeyboardInterrupt:  # before a job began, or once more while it ends
        print("longstraw: interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        found = os_error(error)  # OmegaConf raises its own where a resolver cannot make a folder
        if quiet and found is not None:
            stop(_unwritable(found))
        if quiet and _is_users(error):
            stop(str(error).split("\n    full_key:")[0])  # OmegaConf's own view of where it was
        raise
    finally:
        _remove_unused()
        if by_torchrun:
            from longstraw.runtime.rendezvous import offer_job

            offer_job(None)  # where no job was started the other ranks must not wait for one


def help_text() -> str:
    """Return the text of ``--help``."""
    groups = "\n".join(f"  {group + '=':<24}{', '.join(available(group)) or '-'}" for group in FOLDERS)
    return HELP.format(keys=KEYS, groups=groups)


def stop(message: str) -> NoReturn:
    """Print each line of ``message`` as LongStraw's and exit with 2."""
    for line in filter(str.strip, message.splitlines()):
        print(f"longstraw: {line}", file=sys.stderr)
    raise SystemExit(2)


def _unwritable(error: OSError) -> str:
    """Return what the operating system refused, and how records go elsewhere where a folder cannot be written."""
    reason = os_reason(error) if error.filename is None else f"{error.filename}: {os_reason(error)}"
    if error.errno not in UNWRITABLE:
        return reason
    return f"{reason}; records go elsewhere with hydra.sweep.dir=FOLDER (without -m: hydra.run.dir=FOLDER/0)"


def _is_users(error: Exception) -> bool:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    return isinstance(error, ConfigError | HydraException | OmegaConfBaseException | OSError)  # a full disk, no right


def _start(quiet: bool) -> None:
    import hydra.version
    from hydra._internal.utils import _run_hydra

    parser, arguments = _options()
    given = arguments.overrides
    sweep = arguments.multirun or any(text.startswith(("sweep=", "hydra.mode=")) for text in given)
    use_conf_dirs(users_folders(arguments.config_dir, given))
    typed = parse(given, sweep=sweep)
    check(typed)
    if sweep and process_info().by == "torchrun":
        raise ConfigError(
            "torchrun starts the ranks of one job; a sweep starts its own: python -m longstraw.run -m ..."
        )
    if not sweep:
        for argument in typed:
            if len(argument.values) > 1:
                one = f"; one value that is a list: {argument.key}=[...]" if is_list(argument.key) else ""
                raise ConfigError(f"{argument.text}: several values are a sweep, which wants -m{one}")
    register()
    if quiet:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands errors on instead of printing its own page
    hydra.version.setbase("1.3")
    arguments.overrides = [argument.text for argument in typed]
    _run_hydra(arguments, parser, _job, str(conf_dir()), "config")


def _options() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return Hydra's parser of options and what it found; raise ``ConfigError`` for what it would refuse."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _wrong_option  # type: ignore[method-assign]
    found = parser.parse_intermixed_args()
    actions = {"--run": found.run, "-m": found.multirun, "--cfg": found.cfg, "--info": found.info}
    if len(several := [option for option, asked in actions.items() if asked]) > 1:
        _wrong_option(f"{' and '.join(several)} exclude each other")
    if found.resolve and not found.cfg:
        _wrong_option("--resolve belongs to --cfg job")
    return parser, found


def _wrong_option(message: str) -> NoReturn:
    raise ConfigError(f"{message}; options are -m (a sweep), --cfg job, --help and --version, all else is key=value")


def parse(overrides: list[str], *, sweep: bool = True) -> list[Typed]:
    """Return the arguments by Hydra's grammar, with counts as numbers and names of files taken as they stand.

    ``sweep`` says whether commas part the values of a sweep; a file whose name has one is found all the same.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override
    from hydra.errors import HydraException

    parser = OverridesParser.create()

    def values(override: Override) -> tuple[Any, ...]:
        if override.is_delete():
            return ()
        if not override.is_sweep_override():
            return (override.value(),)
        raw: Any = override.value()
        if hasattr(raw, "filter"):
            return tuple(raw.filter(list(available(override.key_or_group))))
        if not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line}: write the values of a sweep one by one, or as range(a,b,step)")
        texts = list(override.sweep_string_iterator())
        return tuple(parser.parse_override(f"key={text}").value() for text in texts)

    def parsed(text: str) -> Override:
        try:
            return parser.parse_override(text)
        except (HydraException, ValueError) as error:  # ValueError: a number of more than 4300 digits
            quoted = _quoted(text, sweep)
            if quoted is not None:
                return parser.parse_override(quoted)
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{text}: {reason}; write key=value, with '...' round special characters") from None

    typed = []
    for text in overrides:
        if re.fullmatch(r"[\w.]+", text):
            raise ConfigError(f"{text}: write key=value")
        override = parsed(_quoted(text, sweep, FILES + RUN_FOLDERS) or text)
        key, given = override.key_or_group, values(override)
        prefix = {"ADD": "+", "FORCE_ADD": "++", "DEL": "~"}.get(override.type.name, "")
        plain = tuple(plain_value(key, value) for value in given)
        if repr(plain) != repr(given):  # 1000 is not written 1e3
            text = f"{prefix}{key}={','.join(_written(value) for value in plain)}"
        elif override.input_line is not None:
            text = override.input_line
        typed.append(Typed(text, key, plain, prefix, override.package))
    return typed


def _quoted(text: str, sweep: bool, keys: tuple[str, ...] | None = None) -> str | None:
    """Return ``key=value`` with each value in quotes, or None where it is not text or says how it is to be read.

    ``keys`` are those whose values are never read otherwise; None: of every key whose type is text.
    """
    key, _, value = text.partition("=")
    hint = value_types().get(key.lstrip("+"))
    if hint not in (str, list[str]) or (keys is not None and key not in keys):
        return None
    own_grammar = value.startswith(("'", '"', "[")) or "${" in value or value in ("", "null")
    if keys is not None and (own_grammar or (re.fullmatch(r"\w+\(.*\)", value) and not _exists(value))):
        return None
    parts = value.split(",") if sweep and key not in RUN_FOLDERS and not _exists(value) else [value]
    if key in FILES + RUN_FOLDERS:
        parts = [os.path.expanduser(part) for part in parts]
    return f"{key}={','.join(map(_written, parts))}"


def _exists(path: str) -> bool:
    try:
        return os.path.exists(os.path.expanduser(path))
    except ValueError:  # a null character
        return False


def _written(value: Any) -> str:
    """Return a value in Hydra's grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return QuotedString(value, Quote.single).with_quotes() if isinstance(value, str) else str(value)


def register() -> None:
    """Register the schema of every group, our launcher, and the resolver that names this command's folder."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    from hydra_plugins.longstraw_launcher.launcher import LongStrawLauncher
    from longstraw.config import ARCHITECTURES, DATA, GROUPS, RunConfig

    Plugins.instance().register(LongStrawLauncher)  # Hydra's own search misses an editable install

    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    for name, architecture in ARCHITECTURES.items():
        store.store(group="model", name=f"schema_{name}", node=architecture)
    for name, data in DATA.items():
        store.store(group="data", name=f"schema_{name}", node=data)
    for group in ("hardware", "adapter", "algorithm", "optimizer"):
        store.store(group=group, name="schema", node=GROUPS[group])
    OmegaConf.register_new_resolver("run_folder", functools.cache(new_folder), replace=True)


def new_folder(claim: str | None) -> str:
    """Make and return ``runs/<claim or longstraw>/<time>``, unused before: two commands in one second get two."""
    parent = Path("runs") / re.sub(r"[^\w.-]|^\.+", "_", claim or "longstraw")[:100]  # never "..", nor too long
    parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 1000))):
        try:
            (parent / (stamp + suffix)).mkdir()
        except FileExistsError:
            continue
        _MADE.append(parent / (stamp + suffix))
        return str(_MADE[-1])
    raise FileExistsError(f"{parent / stamp}: a thousand commands in one second")


def _remove_unused() -> None:
    """Remove the folders this command made where no job was started in them."""
    while _MADE:
        folder = _MADE.pop()
        if not any(folder.glob("*/spec.json")):
            shutil.rmtree(folder, ignore_errors=True)


def _job(composed: Any) -> None:
    """Run the one job of a command without ``-m``."""
    from hydra.core.hydra_config import HydraConfig

    from hydra_plugins.longstraw_launcher.launcher import save_composed
    from longstraw.launch.jobs import launch
    from longstraw.launch.prepare import prepare
    from longstraw.launch.spec import draft

    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    drafts = [draft(0, list(hydra.overrides.task), folder, composed)]
    try:
        jobs = prepare(drafts, command=typed_command(), sweep=None)
    except ConfigError as error:
        stop(str(error))  # before Hydra adds lines of its own
    except OSError as error:
        stop(_unwritable(error))
    save_composed(composed, hydra.overrides.task, folder)
    code = launch(jobs, folder.parent, alone=True)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
