"""``python -m longstraw.run [-m] key=value ...``: one job, or a sweep of jobs. The doorway to Hydra.

Hydra composes the YAML files of ``conf/`` against ``longstraw.config``; ``longstraw.launch.jobs`` runs what comes out.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # Ctrl-C while the rest is loaded ends the command without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from longstraw.config import ConfigError, available, conf_dir
from longstraw.config.overrides import FOLDERS, Typed, check
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
  prompt_grad=exact         detached (the paper's) or exact (through the prompt too)
  prompt_grad_window=64Ki   stop that walk after the last so many prompt positions
  refresh_every=1           optimizer steps that share one retained prompt
  steps=1 seed=0            optimizer steps, seed
  claim=NAME                a name under which the analysis groups records
  mode=auto                 run, simulate (no hardware), emulate (one GPU plays one rank of many), or auto: run
                            where the hardware is, else simulate
"""
HELP = """\
LongStraw: GRPO steps on prompts of a million tokens and more.

  longstraw key=value ...            one job          (or: python -m longstraw.run ...)
  longstraw -m key=a,b key=c,d ...   every combination, each its own job

Try
  longstraw model=qwen3_6_tiny hardware=cpu context=16Ki
  longstraw -m model=qwen3_6_tiny hardware=cpu group_size=2,8 context=16Ki,64Ki

Keys
{keys}
Groups
{groups}
  Their keys are set as model.dtype=float32 or optimizer.lr=1e-5; --cfg job prints all of them.
  launch.max_parallel=N  jobs at a time     launch.detach=true  return at once     tracking.mode=offline  W&B

Ends with a table, one row a job, and the path of the records.
"""


def main() -> None:
    """Run the command line: check it, hand it to Hydra, exit with 0 only if every job succeeded."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(help_text(), end="")
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
    import hydra
    from hydra._internal.utils import get_args_parser

    sys.argv[1:] = sorted(sys.argv[1:], key=lambda text: text not in ("-m", "--multirun"))  # argparse wants it first
    arguments = get_args_parser().parse_args()
    typed = parse(arguments.overrides)
    check(typed)
    sweep = arguments.multirun or any(argument.key in ("sweep", "hydra.mode") for argument in typed)
    if sweep and process_info().by == "torchrun":
        raise ConfigError(
            "torchrun starts the ranks of one job; a sweep starts its own: python -m longstraw.run -m ..."
        )
    if not sweep:
        for argument in typed:
            if len(argument.values) > 1:
                raise ConfigError(f"{argument.text}: several values are a sweep, which wants -m")
    register()
    if quiet:
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then hands errors on instead of printing its own page
    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_job)()


def parse(overrides: list[str]) -> list[Typed]:
    """Return the arguments by Hydra's grammar."""
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

    typed = []
    for text in overrides:
        if re.fullmatch(r"[\w.]+", text):
            raise ConfigError(f"{text}: write key=value")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{text}: {reason}; write key=value, with '...' round special characters") from None
        prefix = {"ADD": "+", "FORCE_ADD": "++", "DEL": "~"}.get(override.type.name, "")
        typed.append(Typed(text, override.key_or_group, values(override), prefix, override.package))
    return typed


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
    from longstraw.launch.jobs import launch, prepare
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
