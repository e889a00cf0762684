"""Configuration files: TOML with the flags' names, underscores for dashes."""

import tomllib
from difflib import get_close_matches

import click

from runner.flags import COMMANDS, Flag, Share, Size

PLACES = {"input": "input_option", "output": "output_option"}
"Keys of a configuration file for the two arguments, and the options that stand for them."

_TOML_TYPES: dict[object, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"Text unless said here."


def load_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Takes a TOML file's values as defaults, so that flags win over it.

    Raises BadParameter for a key that no flag has, or a value of another type than the flag's.
    """
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, ValueError) as error:  # Also what is no TOML, and no UTF-8.
        raise click.BadParameter(f"{path}: cannot be read: {error}") from error
    command = ctx.command.name or ""
    flags = {flag.key: flag for flag in COMMANDS[command]}
    known = [*flags, *PLACES]
    for key, value in values.items():
        if key not in known:
            near = get_close_matches(key, known, n=1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
            raise click.BadParameter(f"{path}: {command} has no key {key!r}. {remedy}")
        _check_type(path, key, value, flags.get(key))
    ctx.default_map = {PLACES.get(key, key): value for key, value in values.items()}


def _check_type(path: str, key: str, value: object, flag: Flag | None) -> None:
    """Click would make an int of 2.9 and of true; a file says what it means by its types."""
    accepted = _TOML_TYPES.get(flag.value_type, (str,)) if flag else (str,)
    if flag and isinstance(flag.value_type, Share | Size):
        accepted = (int, str)
    items = value if flag and flag.multiple and isinstance(value, list) else [value]
    is_list = isinstance(value, list) == bool(flag and flag.multiple)
    if not is_list or any(type(item) not in accepted for item in items):
        words = " or ".join(type_.__name__ for type_ in accepted)
        words = f"a list of {words}" if flag and flag.multiple else words
        raise click.BadParameter(f"{path}: {key} must be {words}, got {value!r}")
