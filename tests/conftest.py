"""Two test workers share two cores: one torch thread each, the same everywhere."""

import os
import signal

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("support")
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for child processes
# derandomized: a red test is red for everybody; no deadline: the first call may compile a kernel
settings.register_profile("esper", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("esper")


# where networks of populations train: in tests/tolaria with float64, in these files with float32
FLOAT32 = ("test_comparison.py", "test_evaluation.py", "test_paired_experiment.py",
           "test_data_runs.py", "test_docs.py", "test_growth_training.py", "test_examples.py",
           "test_goldens.py")  # fmt: skip


def pytest_configure(config):
    """Hide GPUs from the tests that need none: they are the same everywhere, and can fork."""
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class OneCompilerEach(LoadScopeScheduling):
    """Compiling host kernels takes a minute: one worker each for those of float32 and float64."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0].split("/")
        if "tolaria" in path:
            return "float64 hosts"
        return "float32 hosts" if path[-1] in FLOAT32 and "growing" not in path else nodeid


def pytest_xdist_make_scheduler(config, log):
    return OneCompilerEach(config, log)


@pytest.fixture
def default_signals():
    """The default handlers, also if the suite was started with signals ignored, as by `nohup`.

    Child processes get the default, too: a handled signal is reset on exec, an ignored one is not.
    """
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def registries():
    """Remove the hosts, blueprints and tasks that a test registers."""
    from esper.kasmina.blueprints import BLUEPRINTS
    from esper.kasmina.hosts import HOSTS
    from esper.tolaria.tasks import TASKS

    before = [(registry, dict(registry)) for registry in (HOSTS, BLUEPRINTS, TASKS)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


@pytest.fixture
def short_updates(monkeypatch):
    """A small network and two passes per update of PPO, where code leaves both to the default."""
    import esper

    monkeypatch.setitem(esper.PolicyConfig.__init__.__kwdefaults__, "lstm_hidden_dim", 16)
    monkeypatch.setitem(esper.PPOConfig.__init__.__kwdefaults__, "ppo_epochs", 2)
