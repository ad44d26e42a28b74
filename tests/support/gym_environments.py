"""Small environments whose best policy and true value are known.

In all of them a right step earns 1 and an episode is cut off, not ended, after `limit` steps. So
the best policy is worth 1 / (1 - gamma) in every state, and less than `limit` to a learner that
takes the cut for an end. Some wrong choices are masked at random, differently in every env, and
an illegal choice raises an error.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper.leyline.factored_actions import FactoredActionSpace, Head


class SmallEnv(gymnasium.Env):
    limit = 8

    def __init__(self) -> None:
        self.scene: list[int] = []  # what this step's observation, masks and rewards depend on
        self.elapsed = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.elapsed = 0
        self.begin()
        return self.observation(), {"action_mask": self.masks()}

    def step(self, action: Any):
        reward = self.reward(action)
        self.elapsed += 1
        self.go_on()
        info = {"action_mask": self.masks()}
        return self.observation(), reward, False, self.elapsed >= self.limit, info

    def begin(self) -> None:
        """Draw the scene of an episode's first step."""
        raise NotImplementedError

    def go_on(self) -> None:
        """Draw the scene of the next step."""
        self.begin()

    def some_legal(self, right: int, size: int) -> list[int]:
        """The right choice, and each wrong one with an even chance."""
        legal = self.np_random.integers(2, size=size).tolist()
        legal[right] = 1
        return legal


class BestActions(SmallEnv):
    """The context says which choice of each head is right."""

    right = np.array([[0, 1, 0], [1, 2, 1], [2, 3, 0]])  # by context
    sizes = (3, 4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(3)
        self.action_space = spaces.MultiDiscrete(self.sizes)

    def begin(self) -> None:
        context = int(self.np_random.integers(3))
        self.scene = [context]
        for right, size in zip(self.right[context].tolist(), self.sizes, strict=True):
            self.scene += self.some_legal(right, size)

    def observation(self) -> int:
        return self.scene[0]

    def masks(self) -> np.ndarray:
        return np.array(self.scene[1:], dtype=np.int8)

    def reward(self, action: np.ndarray) -> float:
        starts = np.cumsum([0, *self.sizes[:-1]])
        assert self.masks()[starts + action].all(), f"{action} is not legal"
        return float((action == self.right[self.scene[0]]).mean())


class CueMemory(SmallEnv):
    """The cue is shown at the first step only; the right action is the cue, at every step."""

    num_cues = 3

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0.0, 1.0, (self.num_cues,))
        self.action_space = spaces.Discrete(self.num_cues, start=1)

    def begin(self) -> None:
        cue = int(self.np_random.integers(self.num_cues))
        self.scene = [cue, *self.some_legal(cue, self.num_cues)]

    def go_on(self) -> None:
        self.scene = [self.scene[0], *self.some_legal(self.scene[0], self.num_cues)]

    def observation(self) -> np.ndarray:
        shown = np.zeros(self.num_cues, dtype=np.float32)
        shown[self.scene[0]] = self.elapsed == 0
        return shown

    def masks(self) -> np.ndarray:
        return np.array(self.scene[1:], dtype=bool)

    def reward(self, action: int) -> float:
        assert self.masks()[action - 1], f"{action} is not legal"
        return float(action - 1 == self.scene[0])


class TwoStates(SmallEnv):
    """Two states in turn; every step is right. Nothing to learn but the value."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(3)

    def begin(self) -> None:
        self.scene = [0, *self.some_legal(int(self.np_random.integers(3)), 3)]

    def go_on(self) -> None:
        state = 1 - self.scene[0]
        self.begin()
        self.scene[0] = state

    def observation(self) -> int:
        return self.scene[0]

    def masks(self) -> np.ndarray:
        return np.array(self.scene[1:], dtype=bool)

    def reward(self, action: int) -> float:
        assert self.masks()[action], f"{action} is not legal"
        return 1.0


class RowThenColumn(SmallEnv):
    """The right row is shown; which column is legal in which row only the masks know.

    Each row has one legal column, drawn anew every step. Independent masks can say which columns
    are legal in some row, and no more.
    """

    rows, columns = 3, 4
    action_heads = FactoredActionSpace((Head("row", rows), Head("column", columns, given=("row",))))

    def __init__(self, *, conditional: bool = True) -> None:
        super().__init__()
        self.conditional = conditional
        self.observation_space = spaces.Discrete(self.rows)
        self.action_space = spaces.MultiDiscrete((self.rows, self.columns))

    def begin(self) -> None:
        right = int(self.np_random.integers(self.rows))
        columns = self.np_random.integers(self.columns, size=self.rows).tolist()
        self.scene = [right, *self.some_legal(right, self.rows), *columns]

    def observation(self) -> int:
        return self.scene[0]

    def masks(self) -> Any:
        row_is_legal = np.array(self.scene[1 : 1 + self.rows], dtype=bool)
        cells = (
            np.eye(self.columns, dtype=bool)[self.scene[1 + self.rows :]] & row_is_legal[:, None]
        )
        if self.conditional:
            return {"row": row_is_legal, "column": cells}
        return np.concatenate([row_is_legal, cells.any(axis=0)])

    def reward(self, action: np.ndarray) -> float:
        row, column = action
        is_legal = column == self.scene[1 + self.rows + row]
        assert is_legal or not self.conditional, f"{action} is not legal"
        return float(row == self.scene[0] and is_legal)


class BatchedEnvs(SyncVectorEnv):
    """A vector environment that is stepped as a whole: the others' sub-environments are not."""


def vector(make: Any, num_envs: int, mode: AutoresetMode | None = AutoresetMode.NEXT_STEP):
    """Environments in an autoreset mode; None: stepped one by one."""
    return vector_of([make] * num_envs, mode)


def vector_of(makers: list[Any], mode: AutoresetMode | None):
    if mode is None:
        return SyncVectorEnv(makers)
    return BatchedEnvs(makers, autoreset_mode=mode)
