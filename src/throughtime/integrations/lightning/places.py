"""Where the updates of every rank stand, in Lightning's checkpoints, which one rank writes for all."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import distributed

import throughtime as tt
from throughtime.errors import RunError
from throughtime.gradient import generators, set_generators

KEY = "throughtime"


class Places:
    """The places of a checkpoint, from when it is read until the first training step takes them up."""

    def __init__(self) -> None:
        self._read: list[dict[str, Any]] | None = None

    @staticmethod
    def write(
        checkpoint: dict[str, Any], module: LightningModule, place_of_updates: dict[str, Any]
    ) -> None:
        """Adds the place and the random state of every rank; all of them must ask."""
        place = {
            "updates": place_of_updates,
            "random": generators(module.device),
            "step": module.trainer.global_step,
        }
        places: list[Any] = [place] * module.trainer.world_size
        if len(places) > 1:
            distributed.all_gather_object(places, place)
        checkpoint[KEY] = places

    def read(self, checkpoint: Mapping[str, Any]) -> None:
        """Keeps what the checkpoint holds."""
        self._read = checkpoint.get(KEY, [])

    def take_up(self, module: LightningModule, updates: tt.Updates) -> None:
        """Goes on from the place of this rank, unless the checkpoint was read for its weights
        alone.

        Raises:
            RunError: the checkpoint was written by another number of ranks, or holds no place.
        """
        places, self._read = self._read, None
        step = module.trainer.global_step
        if places is None or step == 0:
            return
        if not places or places[0]["step"] != step:
            raise RunError(
                f"the checkpoint of step {step} holds no place in a stream: was it written by"
                " another module? Load its weights alone"
            )
        if len(places) != module.trainer.world_size:
            raise RunError(
                f"the checkpoint was written by {len(places)} ranks and {module.trainer.world_size}"
                " go on from it: take as many"
            )
        updates.load_state_dict(places[module.global_rank]["updates"])
        set_generators(places[module.global_rank]["random"], module.device)
