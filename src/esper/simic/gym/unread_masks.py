"""Masks that an environment gives under a name that is not read: errors that say what to do.

masks = UnreadMasks("action_mask", action_space)
masks.refuse_infos({"legal_actions": [[1, 0], [1, 1]]})  # raises
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from esper.leyline.factored_actions import FactoredActionSpace
from esper.simic.gym.gym_spaces import Entry

_LEGAL = r"(legal|valid(?!at)|avail|feasib|(?<![hw])allow|possib|permit|admissib|forbid|prohibit)"
_OTHER_USE = r"(_|(is|has|any|no|num|n|count|check|set|apply|print|render)_)"
# names of masks: surely, and if the size fits
_MASK_NAME = re.compile(
    rf"^(?!{_OTHER_USE}).*(action.*mask|mask.*action|{_LEGAL}(.*mask|\w*_?(action|move)s(?![a-z])))"
)
_PERHAPS_MASK = re.compile(rf"mask|{_LEGAL}")
_ILLEGAL = re.compile(rf"(in|un|il|im|dis|no[nt]_?){_LEGAL}|forbid|prohibit")
_MASK_METHOD = re.compile(rf"{_MASK_NAME.pattern}|^(get_|compute_)?mask$", re.IGNORECASE)
# looked for in other processes, where only the outermost wrapper lists its names
_MASK_METHODS = ["mask", "get_mask", "action_mask", "get_action_mask", "get_action_masks"]
_MASK_METHODS += ["valid_action_mask", "legal_actions", "valid_actions", "legal_moves"]
_MASK_METHODS += ["valid_moves", "get_legal_actions", "get_valid_actions", "get_avail_actions"]


class UnreadMasks:
    """Raises for what looks like a mask in an environment that gives none under `mask_key`."""

    def __init__(self, mask_key: str, action_space: FactoredActionSpace):
        self._key, self._heads = mask_key, action_space.names
        choices = [head.size for head in action_space if not head.continuous]
        self._sizes = {*choices, sum(choices)} - {0, 1}
        self._seen: set[str] = set()  # names in info

    def refuse_infos(self, infos: Mapping[str, Any]) -> None:
        """Look at the names in info that are new."""
        new = infos.keys() - self._seen
        self._seen |= new
        for name in sorted(n for n in new if not n.startswith("_")):
            advice = f"masks are read from {self._key!r}: use mask_key={name!r}"
            if name == self._key:
                advice = "the first reset gave none: give it at every reset too"
            self._refuse("info", name, self._row_lengths(infos[name]), advice)

    def refuse_entries(self, entries: Iterable[Entry]) -> None:
        """Look at the entries of the observation."""
        for entry in entries:
            name = ".".join(map(str, entry.path))
            place = " at the top of a Dict: move it there" if len(entry.path) > 1 else ""
            advice = f"masks are read from {self._key!r}{place or f': use mask_key={name!r}'}"
            lengths = {math.prod(entry.shape)} if entry.shape else set()
            self._refuse("observation", name, lengths, advice)

    def refuse_methods(self, envs: Any) -> None:
        """Look at the methods of an unwrapped vector environment's envs, or at its own."""
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        read, advice = "action_masks", "only a method action_masks() is read: rename it"
        names: Iterable[str]
        if isinstance(envs, AsyncVectorEnv):
            found = {name for name in _MASK_METHODS if any(envs.call("has_wrapper_attr", name))}
            names = filter(_MASK_METHOD.search, sorted(found.union(*envs.call("__dir__"))))
        elif isinstance(envs, SyncVectorEnv):
            layers = (layer for env in envs.envs for layer in _layers(env))
            names = (name for layer in layers for name in self._methods(layer))
        else:
            read, names = "", self._methods(envs)
            advice = f"a vector environment's own methods are not read: give info[{self._key!r}]"
        for name in names:
            if name != read:
                self._refuse("environment", name, self._sizes, advice)

    def _methods(self, env: Any) -> Iterator[str]:
        """Methods with the name of a mask, and attributes that have its size too."""
        for name in filter(_MASK_METHOD.search, dir(env)):
            value = getattr(env, name, None)
            if callable(value) or self._row_lengths([value]) & self._sizes:
                yield name

    def _row_lengths(self, values: Any) -> set[int]:
        """The lengths of the envs' values, or of a head's in them, that are rows of numbers."""
        if isinstance(values, Mapping):
            heads = [values[name] for name in self._heads if name in values]
            return set().union(*map(self._row_lengths, heads))
        rows = values if isinstance(values, list) or np.ndim(values) else ()
        shapes = [(len(r),) if isinstance(r, list | tuple) else np.shape(r) for r in rows]
        return {shape[0] for shape in shapes if len(shape) == 1}

    def _refuse(self, where: str, name: str, lengths: set[int], advice: str) -> None:
        """Raise if the name, or name and length, look like a mask's: it would not be applied."""
        *_, last = parts = name.lower().split(".")
        is_named = any(map(_MASK_NAME.search, parts))
        is_mask = is_named or bool(lengths & self._sizes and _PERHAPS_MASK.search(last))
        if _ILLEGAL.search(last):
            is_mask = is_named and bool(lengths)  # a number only counts them
            advice = f"it names illegal actions: give its negation as {self._key!r}"
        if is_mask:
            raise ValueError(
                f"the {where} has {name!r}, but {advice}, or set masks='none' to learn without masks"
            )


def _layers(env: Any) -> Iterator[Any]:
    """An environment's wrappers, outermost first, and the environment itself."""
    yield env
    while env is not env.unwrapped:
        env = env.env
        yield env
