"""Writes the ledger of a run and names its seeds."""

from itertools import compress

from torch import Tensor, nn

from esper.growing.growing_network import GrowingNetwork
from esper.growing.preparation import PreparedModel
from esper.kasmina.host_reports import History
from esper.leyline.constants import BlendStyle
from esper.leyline.factored_actions import OP_HEADS, ActionMasks, choice_names
from esper.leyline.stages import LifecycleOp, SeedStage
from esper.nissa import ledger as records
from esper.surgery.sites import count_params


class Recorder:
    """Turns what happens in a network into records."""

    def __init__(self, ledger: records.Ledger, network: GrowingNetwork, history: History):
        self.ledger = ledger
        self._network, self._history = network, history
        self._slots = {slot.site.name: index for index, slot in enumerate(network.slots)}

    @property
    def seed_ids(self) -> dict[int, str]:
        """The seeds whose end is not recorded, by slot; ids are unique in a run."""
        ids, fate_of = {}, self.ledger.fate_of
        for seed in self.ledger.seeds:
            if (fate := fate_of(seed.seed)) is None or fate.fate == "kept":
                ids[self._slots[seed.site]] = seed.seed
        return ids

    def seed_states(self) -> tuple[records.SeedState, ...]:
        """The seeds in the network, in the order of their slots."""
        states, found = self._network.states, []
        for slot, seed in sorted(self.seed_ids.items()):
            gain, error, age = self._contribution(slot)
            state = records.SeedState(
                seed=seed,
                stage=SeedStage(int(states.stage[0, slot])).name,
                alpha=float(states.alpha[0, slot]),
                contribution=gain if age == 0 else None,
                contribution_error=error if age == 0 else None,
            )
            found.append(state)
        return tuple(found)

    def decision(
        self, step: int, action: Tensor, masks: ActionMasks, why: str
    ) -> records.DecisionRecord:
        """A decision that is about to be applied; for a germination also the new seed."""
        choices = dict(zip(masks.action_space.names, action.tolist(), strict=True))
        op, slot = LifecycleOp(choices["op"]), choices["slot"]
        new = self._new_seed(step, choices) if op == LifecycleOp.GERMINATE else None
        uses_slot, sites = "slot" in OP_HEADS[op], [slot.site.name for slot in self._network.slots]
        blueprints = [blueprint.name for blueprint in self._network.menu]
        names = choice_names(blueprints, sites)
        record = records.DecisionRecord(
            step=step,
            op=op.name,
            site=sites[slot] if uses_slot else None,
            seed=self.seed_ids.get(slot) if uses_slot else None,
            details={head: names[head][choices[head]] for head in OP_HEADS[op] if head != "slot"},
            legal={
                op.name: tuple(compress(sites, masks["slot"][0, op].tolist()))
                for op in LifecycleOp
                if bool(masks["op"][0, op])
            },
            reason=why,
            params=0 if new is None else new.params,
            macs=0 if new is None else new.macs,
        )
        self.ledger.decisions.append(record)
        return record

    def fates(self, step: int) -> None:
        """Seeds that the controller pruned or committed since the last call."""
        for slot in self._emptied():
            self._end(slot, step, "pruned", self._reason(LifecycleOp.PRUNE, slot))
        for slot in self._newly_committed():
            self._end(slot, step, "kept", self._reason(LifecycleOp.FOSSILIZE, slot))
        self._history.forget(~self._network.states.has_seed)

    def rolled_back(self, step: int, to_step: int, reason: str) -> None:
        """A rollback, and the seeds that it removed."""
        for slot in self._emptied():
            self._end(slot, step, "rolled_back", reason)
        self._history.forget(~self._network.states.has_seed)
        record = records.RollbackRecord(step=step, to_step=to_step, reason=reason)
        self.ledger.rollbacks.append(record)

    def closed(self, step: int, best_step: int) -> None:
        """Seeds that closing has committed, and seeds that are not in the final network."""
        for slot in self._newly_committed():
            self._end(slot, step, "kept", "the best metric was measured with it")
        for slot in self._emptied():
            if self.ledger.fate_of(self.seed_ids[slot]) is None:
                reason = f"the controller did not commit it; {self._worth(slot)}"
                self._end(slot, step, "uncommitted", reason)
            else:
                reason = f"the best network was the one at step {best_step}, without it"
                self._end(slot, step, "rolled_back", reason)

    def _emptied(self) -> list[int]:
        """Slots whose seed is gone and has not been recorded as such."""
        return [slot for slot in self.seed_ids if self._network.slots[slot].seed is None]

    def _newly_committed(self) -> list[int]:
        committed = [s for s in self.seed_ids if self._network.slots[s].is_committed]
        return [slot for slot in committed if self.ledger.fate_of(self.seed_ids[slot]) is None]

    def _end(self, slot: int, step: int, fate: records.Fate, reason: str) -> None:
        seed = self.seed_ids[slot]
        self.ledger.fates.append(records.FateRecord(seed=seed, step=step, fate=fate, reason=reason))

    def _new_seed(self, step: int, choices: dict[str, int]) -> records.SeedRecord:
        slot, blueprint = choices["slot"], self._network.menu[choices["blueprint"]]
        site = self._network.slots[slot].site
        record = records.SeedRecord(
            seed=f"s{len(self.ledger.seeds) + 1}",
            site=site.name,
            blueprint=blueprint.name,
            style=BlendStyle(choices["style"]).name,
            params=site.params_of(blueprint),
            macs=site.macs_of(blueprint),
            born=step,
        )
        self.ledger.seeds.append(record)
        return record

    def _reason(self, op: LifecycleOp, slot: int) -> str:
        """The controller's reason when it last applied `op` to the seed in a slot.

        If it gave none, what was known of the seed.
        """
        sought, decisions = (self.seed_ids[slot], op.name), reversed(self.ledger.decisions)
        reason = next((d.reason for d in decisions if (d.seed, d.op) == sought), "")
        return reason or f"{records.NO_REASON}; {self._worth(slot)}"

    def _worth(self, slot: int) -> str:
        """The last measured contribution of a seed, in words."""
        gain, error, age = self._contribution(slot)
        if age is None:
            return "never measured"
        when = "now" if age == 0 else f"{age} steps ago"
        return f"worth {self.ledger.show_gain(gain, error)}, measured {when}"

    def _contribution(self, slot: int) -> tuple[float, float, int | None]:
        """A seed's, its standard error, and the steps since then; None: never measured."""
        history, at = self._history, (0, slot)
        age = int(history.contribution_age[at]) if history.contribution_known[at] else None
        return float(history.contribution[at]), float(history.contribution_error[at]), age


def network_record(model: nn.Module, prepared: PreparedModel) -> records.NetworkRecord:
    """The user's model: its sites, and the layers with weights outside of them."""
    sites = {site.name for site in prepared.trace.sites if site.pair is None}
    blocks = []
    for name, place in prepared.trace.candidates.items():
        if place.pair is not None:
            continue
        module, is_site = model.get_submodule(name), name in sites
        is_leaf, params = not any(True for _ in module.children()), count_params(module)
        is_inside = any(name.startswith(f"{site}.") for site in sites)
        if is_site or (is_leaf and params and not is_inside):
            block = records.BlockRecord(
                name=name,
                kind=place.module_class,
                shape=place.shape,
                params=params,
                site_kind=place.kind.name if is_site else None,
            )
            blocks.append(block)
    return records.NetworkRecord(params=prepared.params, macs=prepared.macs, blocks=tuple(blocks))
