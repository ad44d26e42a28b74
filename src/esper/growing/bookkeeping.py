"""What growth writes into its ledger."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper.growing.ledger import (
    NO_REASON,
    BlockRecord,
    DecisionRecord,
    Fate,
    FateRecord,
    Ledger,
    NetworkRecord,
    SeedRecord,
    SeedState,
    StepRecord,
)
from esper.growing.network import GrowingNetwork
from esper.growing.reporting import Reporter
from esper.growing.sites import SiteTrace
from esper.leyline.constants import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    TEMPO_STEPS,
    AlphaCurve,
    BlendStyle,
)
from esper.leyline.factored_actions import OP_HEADS, ActionMasks
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.tolaria.reports import History

CLEAR_FALL, LOOKS = 0.2, 3  # share of the metric, and how many times in a row it must be seen


class Bookkeeper:
    """Keeps the ledger of one run, and the names of the seeds in it."""

    def __init__(self, ledger: Ledger, network: GrowingNetwork, reporter: Reporter):
        self.ledger = ledger
        self._network, self._reporter = network, reporter
        self.seed_ids: dict[int, str] = {}  # by slot
        self._has_warned = False

    def step(
        self,
        step: int,
        metric: float,
        evidence: History,
        *,
        val_loss: float | None,
        train_loss: float | None,
        optimizer_steps: int,
    ) -> None:
        """What was measured before a decision."""
        self.ledger.record_step(
            StepRecord(
                step=step,
                metric=metric,
                params=self._reporter.params,
                macs=self._reporter.macs,
                train_loss=train_loss,
                validation_loss=val_loss,
                optimizer_steps=optimizer_steps,
                seeds=tuple(self._seed_state(slot, evidence) for slot in sorted(self.seed_ids)),
            )
        )
        if not self._has_warned and _falls_with_the_loss(self.ledger.steps):
            self._has_warned = True
            warnings.warn(
                "the metric falls as the loss does, and growth takes the highest for the best: the "
                "network of before. If lower is better in it, stop and give 1 - metric instead",
                stacklevel=4,
            )

    def decision(
        self, step: int, action: Tensor, masks: ActionMasks, reason: str
    ) -> DecisionRecord:
        """A decision that is about to be carried out; a birth is written down with it."""
        choices = dict(zip(masks.action_space.names, action.tolist(), strict=True))
        op, slot = LifecycleOp(choices["op"]), choices["slot"]
        uses_slot = "slot" in OP_HEADS[op]
        if op == LifecycleOp.GERMINATE:
            self._birth(step, slot, choices)
        record = DecisionRecord(
            step=step,
            op=op.name,
            site=self._site(slot) if uses_slot else None,
            seed=self.seed_ids.get(slot) if uses_slot else None,
            details=self._details(op, choices),
            legal=self._legal(masks),
            reason=reason,
            params=self._cost(self._reporter.cost_params, op, choices),
            macs=self._cost(self._reporter.cost_macs, op, choices),
        )
        self.ledger.record_decision(record)
        return record

    def fates(self, step: int, evidence: History) -> None:
        """Seeds that were pruned or committed since the last look."""
        for index, seed in list(self.seed_ids.items()):
            slot = self._network.slots[index]
            if slot.seed is None:
                self._end(index, step, "pruned", self._why(LifecycleOp.PRUNE, evidence, index))
            elif slot.is_committed and self.ledger.fate_of(seed) is None:
                why = self._why(LifecycleOp.FOSSILIZE, evidence, index)
                self.ledger.record_fate(FateRecord(seed=seed, step=step, fate="kept", reason=why))

    def kept(self, step: int, reason: str) -> None:
        """Seeds that were committed at the end of the run."""
        for index, seed in self.seed_ids.items():
            if self._network.slots[index].is_committed and self.ledger.fate_of(seed) is None:
                fate = FateRecord(seed=seed, step=step, fate="kept", reason=reason)
                self.ledger.record_fate(fate)

    def last_fates(self, step: int, best_step: int, evidence: History) -> None:
        """Seeds that are not in the network that the run ends with."""
        for index, seed in list(self.seed_ids.items()):
            if self._network.slots[index].seed is None:
                if self.ledger.fate_of(seed) is None:
                    reason = f"the controller did not commit it; {self._worth(evidence, index)}"
                    self._end(index, step, "uncommitted", reason)
                else:
                    reason = f"the best network was the one at step {best_step}, without it"
                    self._end(index, step, "rolled_back", reason)

    def rolled_back(self, step: int, reason: str) -> None:
        """Seeds that a rollback took out."""
        for index in list(self.seed_ids):
            if self._network.slots[index].seed is None:
                self._end(index, step, "rolled_back", reason)

    def _end(self, slot: int, step: int, fate: Fate, reason: str) -> None:
        seed = self.seed_ids.pop(slot)
        self.ledger.record_fate(FateRecord(seed=seed, step=step, fate=fate, reason=reason))

    def _birth(self, step: int, slot: int, choices: dict[str, int]) -> None:
        seed = f"s{len(self.ledger.seeds) + 1}"
        self.seed_ids[slot] = seed
        blueprint = choices["blueprint"]
        self.ledger.record_seed(
            SeedRecord(
                seed=seed,
                site=self._site(slot),
                blueprint=self._network.menu[blueprint].name,
                style=BlendStyle(choices["style"]).name,
                params=int(self._reporter.cost_params[slot, blueprint]),
                macs=int(self._reporter.cost_macs[slot, blueprint]),
                born=step,
            )
        )

    def _seed_state(self, slot: int, evidence: History) -> SeedState:
        states = self._network.states
        is_new = bool(
            evidence.contribution_known[0, slot] & (evidence.contribution_age[0, slot] == 0)
        )
        return SeedState(
            seed=self.seed_ids[slot],
            stage=SeedStage(int(states.stage[0, slot])).name,
            alpha=float(states.alpha[0, slot]),
            contribution=float(evidence.contribution[0, slot]) if is_new else None,
            contribution_error=float(evidence.contribution_error[0, slot]) if is_new else None,
        )

    def _details(self, op: LifecycleOp, choices: dict[str, int]) -> dict[str, str | float]:
        meanings: dict[str, Sequence[str | float]] = {
            "blueprint": [blueprint.name for blueprint in self._network.menu],
            "style": [style.name for style in BlendStyle],
            "tempo": TEMPO_STEPS,
            "alpha_target": ALPHA_TARGETS,
            "alpha_speed": ALPHA_SPEED_STEPS,
            "alpha_curve": [curve.name for curve in AlphaCurve],
        }
        return {head: meanings[head][choices[head]] for head in OP_HEADS[op] if head in meanings}

    def _legal(self, masks: ActionMasks) -> dict[str, tuple[str, ...]]:
        sites = masks["slot"][0]
        return {
            op.name: tuple(self._site(slot) for slot in sites[op].nonzero().flatten().tolist())
            for op in LifecycleOp
            if bool(masks["op"][0, op])
        }

    def _cost(self, costs: Tensor, op: LifecycleOp, choices: dict[str, int]) -> int:
        if op != LifecycleOp.GERMINATE:
            return 0
        return int(costs[choices["slot"], choices["blueprint"]])

    def _why(self, op: LifecycleOp, evidence: History, slot: int) -> str:
        """The controller's reason when it last did `op` to a seed; if it gave none, its worth."""
        about = [
            decision.reason
            for decision in self.ledger.decisions
            if decision.seed == self.seed_ids[slot] and decision.op == op.name
        ]
        if about and about[-1]:
            return about[-1]
        return f"{NO_REASON}; {self._worth(evidence, slot)}"

    def _worth(self, evidence: History, slot: int) -> str:
        """What was last known of a seed, in words."""
        if not bool(evidence.contribution_known[0, slot]):
            return "never measured"
        gain, error = (
            float(evidence.contribution[0, slot]),
            float(evidence.contribution_error[0, slot]),
        )
        age = int(evidence.contribution_age[0, slot])
        when = "now" if age == 0 else f"{age} steps ago"
        return f"worth {self.ledger.show_gain(gain, error)}, measured {when}"

    def _site(self, slot: int) -> str:
        return self._network.slots[slot].site.name


def _falls_with_the_loss(steps: Sequence[StepRecord]) -> bool:
    """Whether no metric was above the first, and those with a lower loss were clearly below it."""
    known = [
        (record.metric, record.validation_loss)
        for record in steps
        if record.metric is not None and record.validation_loss is not None
    ]
    if not known:
        return False
    first, first_loss = known[0]
    better = [metric for metric, loss in known if loss < first_loss]
    return (
        max(metric for metric, _ in known) == first
        and len(better) >= LOOKS
        and max(better[-LOOKS:]) < (1 - CLEAR_FALL) * first
    )


def network_record(model: nn.Module, trace: SiteTrace, params: int, macs: int) -> NetworkRecord:
    """The user's model as the ledger shows it: its sites, and the layers outside of them."""
    offered = {site.name for site in trace.sites}
    blocks = []
    for name, place in trace.candidates.items():
        module = model.get_submodule(name)
        own = sum(parameter.numel() for parameter in module.parameters())
        is_leaf = not any(True for _ in module.children())
        is_inside = any(name.startswith(f"{site}.") for site in offered)
        if name in offered or (is_leaf and own and not is_inside):
            kind = place.kind.name if name in offered else None
            blocks.append(
                BlockRecord(
                    name=name,
                    kind=place.module_class,
                    shape=place.shape,
                    params=own,
                    site_kind=kind,
                )
            )
    return NetworkRecord(params=params, macs=macs, blocks=tuple(blocks))


def facts(device: torch.device, rng_seed: int) -> dict[str, str]:
    """What a reader of the ledger may want to know of the machine."""
    return {"device": str(device), "torch": torch.__version__, "rng seed": str(rng_seed)}
