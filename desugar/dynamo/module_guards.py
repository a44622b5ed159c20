"""Replaces the guards of a large module by checks that its recorded state is unchanged.

Dynamo guards a module with a tree of guards that follows every attribute that was read. For a module with hundreds of
parameters, or with hooks and `DTensor` parameters, this tree takes most of the time of a call. A few facts imply most
of these guards, and C++ compares the facts at once (`module_state`): no dictionary of the module has changed, and no
recorded object was mutated.

So a call checks two things: the guards of Dynamo's tree that these facts do not imply (`implied_guards`), and the
facts. If a fact has changed, Dynamo checks all its guards, and the state is recorded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from desugar.dynamo.implied_guards import SplitGuards, split_guards
from desugar.dynamo.module_state import Unchanged
from subclasses.slow_paths import say_once

# A module that changes after fewer calls gets a strike; recording its state takes the time that 200 calls save.
_MIN_USES = 20
_MAX_STRIKES = 3


@dataclass(frozen=True, slots=True)
class ModuleGuards:
    """The guards of one module in a frame.

    Attributes:
        name: The variable of the frame that holds the module.
        module: The module.
        split: Dynamo's guards without the guards that `unchanged` implies.
        unchanged: The state of the module when its guards held.
        strikes: How often the module has changed soon after its state was recorded.
    """

    name: str
    module: nn.Module
    split: SplitGuards
    unchanged: Unchanged
    strikes: int = 0

    @property
    def is_given_up(self) -> bool:
        """Whether the module changes too often for these guards to save time."""
        return self.strikes >= _MAX_STRIKES

    def hold(self) -> bool:
        """Returns whether the module is unchanged."""
        return self.unchanged.holds()


def note_module_guards(
    root: Any, frame: dict[str, Any], names: Sequence[str], earlier: ModuleGuards | None
) -> ModuleGuards | None:
    """Records the state of a frame's large module, if all of Dynamo's guards hold now.

    Args:
        root: Dynamo's root guard manager.
        frame: The variables of the frame.
        names: The variables that every call shares.
        earlier: The guards recorded before, which no longer hold.

    Returns:
        The new guards. If the guards do not hold, or no variable holds a large module, `earlier` or None. `earlier`
        gets a strike if the module changed after too few calls; after too many strikes the result is `earlier`.
    """
    if earlier is not None and earlier.unchanged.uses[0] < _MIN_USES:
        earlier = replace(earlier, strikes=earlier.strikes + 1)
        if earlier.is_given_up:
            say_once(
                f"calls of {type(earlier.module).__name__} check Dynamo's guards one by one, for the module changes "
                "between calls",
                "keep what changes in a tensor that is written in place, or pass it as an argument",
                "desugar",
            )
            return earlier
    for name in names:
        module = frame[name]
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            continue
        split = split_guards(root, name, module) if earlier is None else earlier.split
        if split is None:
            continue
        strikes = 0 if earlier is None else earlier.strikes
        unchanged = Unchanged.of(module, split.of_classes, unshare=strikes > 0)
        if root.check(frame) and unchanged.holds():
            return ModuleGuards(name, module, split, unchanged, strikes)
    return earlier
