"""The command line: `python -m adapt_practice` trains a controller and compares it.

torch is imported after the number of its threads is set.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from esper.cli import one_line_errors


def main(arguments: list[str] | None = None) -> None:
    """Run a command line; a user's mistake is one line."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small products are fastest with one thread
    with one_line_errors():
        import tyro

        flags = sys.argv[1:] if arguments is None else arguments
        tyro.cli(practise, prog="python -m adapt_practice", args=flags)


def practise(
    preset: Literal["quick", "full"] = "quick",
    out: Path = Path("adapt_controller.pt"),
    rng_seed: int = 0,
    device: str = "auto",
    scenarios: int | None = None,
) -> None:
    """Train a controller for `esper.adapt`, and compare it with fixed rules.

    Args:
        preset: quick (two CPU cores, minutes) or full (a GPU, five minutes)
        rng_seed: draws the practice and the weights
        device: auto, cpu or cuda
        out: the controller's file, for `esper.adapt(..., controller=FILE)`
        scenarios: practice scenarios of each architecture, in place of the preset's
    """
    from adapt_practice.training import PRESETS, compare_on_held_out, train_controller
    from esper.runtime.devices import usable_device

    config = replace(PRESETS[preset], rng_seed=rng_seed, device=device)
    if scenarios is not None:
        config = replace(config, scenarios=scenarios)
    usable_device(device)  # raises before anything is announced
    if out.exists():
        raise ValueError(f"{out} exists; give another file with --out")
    print(
        f"practising: {config.scenarios} scenarios on each of {', '.join(config.architectures)}; "
        "every plan is trained once in each",
        flush=True,
    )
    controller = train_controller(config, lambda line: print(line, flush=True))
    controller.save(out)
    print(f"{out} is written; comparing on kinds of shift that it never saw", flush=True)
    found = compare_on_held_out(controller, config)
    for name, accuracy in found.items():
        print(f"  {name:18} {100 * accuracy:.1f}")
    ours = found.pop("controller")
    best = max(found, key=lambda rule: found[rule])
    advice = f"use it: esper.adapt(model, rows, labels, controller={str(out)!r})"
    if found[best] > ours:
        advice = f"but {best} is better: practise more, with --scenarios or --preset full"
    print(f"{100 * (ours - found['LP-FT']):+.1f} points over LP-FT; {advice}")


if __name__ == "__main__":
    main()
