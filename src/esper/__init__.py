"""Esper grows neural networks while they train.

Everything a user needs is imported from here; each name is loaded when it is first used, so that
`import esper` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper.adapting.adapt import adapt as adapt
    from esper.adapting.controller import controllers as controllers
    from esper.adapting.result import Adaptation as Adaptation
    from esper.adapting.result import AdaptationResult as AdaptationResult
    from esper.adapting.result import load_adaptation as load_adaptation
    from esper.growing.growth import Growth as Growth
    from esper.growing.run import GrowthResult as GrowthResult
    from esper.growing.run import grow as grow
    from esper.kasmina.blueprints import blueprint as blueprint
    from esper.kasmina.hosts import host as host
    from esper.leyline.budget import Budget as Budget
    from esper.leyline.factored_actions import FactoredActionSpace
    from esper.leyline.factored_actions import Head as Head
    from esper.nissa.page import write_page as write_page
    from esper.simic.agent.ppo import PPOConfig as PPOConfig
    from esper.simic.gym.evaluation import evaluate as evaluate
    from esper.simic.gym.ppo_model import PPO as PPO
    from esper.simic.gym.ppo_model import GymConfig as GymConfig
    from esper.surgery.sites import find_sites as find_sites
    from esper.tamiyo.policy.network import PolicyConfig as PolicyConfig
    from esper.tolaria import tasks as tasks
    from esper.tolaria.population import Population as Population
    from esper.tolaria.tasks import Task as Task

    ActionSpace = FactoredActionSpace

__version__ = "0.2.0"

# module -> its public names
_MODULES = {
    "adapting.adapt": ("adapt",),
    "adapting.controller": ("controllers",),
    "adapting.result": ("Adaptation", "AdaptationResult", "load_adaptation"),
    "leyline.budget": ("Budget",),
    "growing.growth": ("Growth",),
    "nissa.page": ("write_page",),
    "growing.run": ("GrowthResult", "grow"),
    "surgery.sites": ("find_sites",),
    "kasmina.blueprints": ("blueprint",),
    "kasmina.hosts": ("host",),
    "leyline.factored_actions": ("Head",),
    "simic.agent.ppo": ("PPOConfig",),
    "simic.gym.evaluation": ("evaluate",),
    "simic.gym.ppo_model": ("GymConfig", "PPO"),
    "tamiyo.policy.network": ("PolicyConfig",),
    "tolaria.population": ("Population",),
    "tolaria.tasks": ("Task",),
}
# public name -> (module, attribute); an empty attribute is the module itself
_PUBLIC = {name: (f"esper.{module}", name) for module, names in _MODULES.items() for name in names}
_PUBLIC["ActionSpace"] = ("esper.leyline.factored_actions", "FactoredActionSpace")
_PUBLIC["tasks"] = ("esper.tolaria.tasks", "")

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'esper' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    module = import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
