"""Check command-line arguments against the schema and the folders of ``conf/`` before Hydra composes anything.

Hydra accepts ``+typo=1`` and prints a page for ``typo=1``. This finds all mistakes of a command line at once and gives
each one line with the nearest valid keys. ``run.py`` parses the arguments, because only it imports Hydra.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from longstraw.config import (
    COUNTS,
    GROUPS,
    ConfigError,
    RunConfig,
    available,
    conf_dir,
    option,
    schema_of,
    use_conf_dirs,
)
from longstraw.units import parse_count

FILES = ("data.path", "data.haystack", "data.tokenizer", "model.checkpoint", "adapter.checkpoint", "evaluate.path")
RUN_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
SEARCH_PATH = "hydra.searchpath"
FOLDERS = ("model", "hardware", "adapter", "data", "algorithm", "optimizer", "sweep")  # groups with a choice


@dataclass(frozen=True)
class Typed:
    """One argument ``[+|++|~]key=value``; ``values`` has one entry, or one for each value of a sweep."""

    text: str
    key: str
    values: tuple[Any, ...] = ()
    prefix: str = ""
    package: str | None = None


def users_folders(config_dir: str | None, arguments: Sequence[str]) -> list[Path]:
    """Return the folders of the user's own option files, named by ``--config-dir`` and ``hydra.searchpath``."""
    named = [] if config_dir is None else [config_dir]
    for text in arguments:
        key, _, value = text.partition("=")
        if key == SEARCH_PATH:
            named += [part.strip().strip("'\"") for part in value.strip("[]").split(",") if part.strip()]
    return [Path(name.removeprefix("file://")).expanduser() for name in named if not name.startswith("pkg://")]


def with_users_options(arguments: Sequence[str]) -> list[str]:
    """Search the user's own option files too, as ``longstraw.run`` does; return the arguments that remain."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    found, rest = parser.parse_known_args(arguments)
    use_conf_dirs(users_folders(found.config_dir, rest))
    return [argument for argument in rest if not argument.startswith(f"{SEARCH_PATH}=")]


def check(arguments: Sequence[Typed]) -> None:
    """Raise ``ConfigError`` with one line for each argument with an unknown key or an invalid value."""
    choices = chosen(arguments)
    complaints = []
    for argument in arguments:
        try:
            _check_one(argument, choices)
        except ConfigError as error:
            complaints.append(str(error))
    if complaints:
        raise ConfigError("\n".join(dict.fromkeys(complaints)))


def typed_keys(values: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``key=value`` arguments with each value in its key's type; raise ``ConfigError`` as ``check`` does.

    ``base`` is the run that they change, as nested dicts, where that is not the default one.
    """
    typed = {key: plain_value(key, value) for key, value in values.items()}
    names = {group: (base or {}).get(group, {}).get("name") for group in FOLDERS}
    known = {group: name for group, name in names.items() if name in available(group)}
    check([Typed(f"{key}={value}", key, (value,)) for key, value in {**known, **typed}.items()])
    return typed


def overlay(base: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run ``base``, as nested dicts, with the ``typed`` keys over it: options such as ``data`` first."""
    values: dict[str, Any] = copy.deepcopy(dict(base))
    values |= {group: option(group, str(typed[group])) for group in FOLDERS if group in typed}
    for key, value in typed.items():
        *path, last = key.split(".")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        if key not in FOLDERS:
            place[last] = value
    return values


def chosen(arguments: Iterable[Typed]) -> dict[str, tuple[str, ...]]:
    """Return the options of each group that the jobs will use: the default, a named sweep's, or those typed.

    Names that no file has are left out; ``check`` reports them where they were typed.
    """
    choices: dict[str, tuple[str, ...]] = {group: (name,) for group, name in _defaults(_conf("config.yaml")).items()}
    typed = {argument.key: argument.values for argument in arguments if not argument.prefix.startswith("~")}
    for sweep in typed.get("sweep", ()):
        if sweep in available("sweep"):
            choices |= _swept(str(sweep))
    choices |= {group: tuple(map(str, typed[group])) for group in FOLDERS if group in typed}
    return {group: tuple(name for name in names if name in available(group)) for group, names in choices.items()}


def _conf(path: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(conf_dir() / path))


def _defaults(content: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{group: option}`` of a defaults list."""
    entries = [entry for entry in content.get("defaults", []) if isinstance(entry, dict)]
    pairs = itertools.chain.from_iterable(entry.items() for entry in entries)
    plain = ((str(key).removeprefix("override ").removeprefix("/"), value) for key, value in pairs)
    return {key: str(value) for key, value in plain if key in FOLDERS}


def _swept(sweep: str) -> dict[str, tuple[str, ...]]:
    content = _conf(f"sweep/{sweep}.yaml")
    params = content.get("hydra", {}).get("sweeper", {}).get("params", {})
    several = {key: tuple(part.strip() for part in str(params[key]).split(",")) for key in FOLDERS if key in params}
    return {**{key: (value,) for key, value in _defaults(content).items()}, **several}


def _check_one(argument: Typed, choices: Mapping[str, tuple[str, ...]]) -> None:
    key = argument.key
    if key == "hydra.sweeper.max_batch_size":
        raise ConfigError(f"{key}: jobs are queued by launch.max_parallel=N")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return  # Hydra's own keys, which Hydra checks
    if argument.package is not None:
        raise ConfigError(f"{argument.text}: a group cannot be moved; write {key}=NAME")
    if key in FOLDERS:
        for value in argument.values:
            if not (key == "sweep" and value is None):
                option(key, str(value))  # which names the valid ones, or what is wrong in the file
    elif key in GROUPS:
        raise ConfigError(f"{argument.text}: {key} is a set of keys; write {key}.KEY=VALUE")
    else:
        _check_key(argument, choices)
    if argument.prefix == "~":
        raise ConfigError(f"{argument.text}: keys cannot be removed; leave {key} out to get its default")
    if argument.prefix == "+" and not _free(key, choices):
        raise ConfigError(f"{argument.text}: the key exists; write {argument.text.removeprefix('+')}")


def _check_key(argument: Typed, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Check that a key exists in each chosen option of its group and that each value fits its type."""
    group, _, inner = argument.key.partition(".")
    if inner == "name" and group in FOLDERS:  # it would only change the name in records
        raise ConfigError(f"{argument.text}: the name is that of the file; write {group}=NAME")
    for option_name, schema in _schemas(group, choices):
        path = inner if option_name is not None else argument.key
        if not _has(schema, path):
            also = f" with {group}={option_name}" if len(choices.get(group, ())) > 1 else ""
            raise ConfigError(f"{argument.text}: there is no key {argument.key}{also}{_near(argument.key, choices)}")
        if _free(argument.key, choices) and not argument.prefix:
            raise ConfigError(f"{argument.text}: {group} takes any key here; write +{argument.text}")
        for value in argument.values:
            _check_value(argument, schema, path, value)


def _schemas(group: str, choices: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str | None, type[Any]]]:
    """Yield the schema a key lives in: one for each chosen option of its group, or the root's."""
    if group not in GROUPS:
        yield None, RunConfig
    elif group not in FOLDERS:
        yield "", GROUPS[group]
    else:
        for name in choices.get(group, ()):
            yield name, schema_of(group, option(group, name))


def _has(schema: type[Any], path: str) -> bool:
    head, _, rest = path.partition(".")
    if head not in {f.name for f in fields(schema)}:
        return False
    hint = get_type_hints(schema)[head]
    return not rest or get_origin(hint) is dict or (is_dataclass(hint) and _has(hint, rest))  # type: ignore[arg-type]


def _free(key: str, choices: Mapping[str, tuple[str, ...]]) -> bool:
    """Return whether ``key`` lies inside a field that holds a dict of any keys."""
    group, _, inner = key.partition(".")
    head, _, rest = inner.partition(".")
    schemas = [schema for _, schema in _schemas(group, choices)]
    return bool(rest) and any(get_origin(get_type_hints(schema).get(head)) is dict for schema in schemas)


def _check_value(argument: Typed, schema: type[Any], path: str, value: Any) -> None:
    shown = argument.text if len(argument.values) == 1 else f"{argument.key}={value}"
    if isinstance(value, str) and "${" in value:
        return  # an interpolation is resolved, and then checked, in the composed job
    try:
        if argument.key in COUNTS and value is not None:
            parse_count(value, least=COUNTS[argument.key].least, most=COUNTS[argument.key].most)
        elif not _free_path(path, schema):
            OmegaConf.update(OmegaConf.structured(schema), path, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{shown}: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from None


def _free_path(path: str, schema: type[Any]) -> bool:
    head, _, rest = path.partition(".")
    return bool(rest) and get_origin(get_type_hints(schema).get(head)) is dict


@functools.cache
def value_types() -> dict[str, Any]:
    """Return the type of every key of every option; of ``X | None`` it is X."""
    types = dict.fromkeys(RUN_FOLDERS, str)
    for group in ("", *GROUPS):
        for name in available(group) if group in FOLDERS else ("",):
            with contextlib.suppress(ConfigError):  # a file of the user's that is wrong matters once it is chosen
                for _, schema in _schemas(group, {group: (name,)}):
                    types |= _field_types(schema, f"{group}." if group else "")
    return types


def _field_types(schema: type[Any], prefix: str) -> dict[str, Any]:
    types: dict[str, Any] = {}
    for key, hint in get_type_hints(schema).items():
        inner = [part for part in get_args(hint) if part is not type(None)] if type(None) in get_args(hint) else [hint]
        if is_dataclass(inner[0]):
            types |= _field_types(inner[0], f"{prefix}{key}.") if prefix else {}  # type: ignore[arg-type]
        else:
            types[prefix + key] = inner[0]
    return types


def is_list(key: str) -> bool:
    """Return whether a key holds several values."""
    return get_origin(value_types().get(key)) is list


def plain_value(key: str, value: Any) -> Any:
    """Convert ``value`` to the type of ``key``: a count such as ``4Ki`` to a number, one name to a list of one.

    A value that cannot be converted is returned unchanged, and ``check`` refuses it.
    """
    hint = value_types().get(key)
    if hint is int and isinstance(value, str | float):
        try:
            return parse_count(value, least=0)
        except ValueError:
            return value
    return [value] if hint == list[str] and isinstance(value, str) and "${" not in value else value


def valid_keys(choices: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return every key that can be set with these choices, groups included."""
    keys = [f.name for f in fields(RunConfig) if f.name not in GROUPS] + list(FOLDERS)
    for group in GROUPS:
        for _, schema in _schemas(group, choices):
            keys += [f"{group}.{f.name}" for f in fields(schema)]
    return list(dict.fromkeys(keys))


def _near(key: str, choices: Mapping[str, tuple[str, ...]]) -> str:
    """Return a hint: keys with the same ending, else similar keys, else all keys of the group."""
    keys = valid_keys(choices)
    last = key.rpartition(".")[2]
    same = [name for name in keys if name.rpartition(".")[2] == last]
    tails = {name.rpartition(".")[2]: name for name in reversed(keys)}
    alike = difflib.get_close_matches(key, keys, n=3, cutoff=0.6)
    alike += [tails[tail] for tail in difflib.get_close_matches(last, tails, n=2, cutoff=0.7)]
    found = list(dict.fromkeys(same + alike))[:3]
    if found:
        return f"; did you mean {' or '.join(found)}?"
    group = key.partition(".")[0]
    shown = [name for name in keys if name.startswith(f"{group}.")] or [name for name in keys if "." not in name]
    return f"; there are {', '.join(shown)}"
